/* allocation_log.h: the list of the memories that live, their names and counts, and the log of births
 * and deaths while a recording runs.
 *
 * The process has one list. Owned memory has an entry from its allocation to its free, memory that a
 * buffer gives back to its resource from the wrapping on. Other wrapped memory has one as soon as it
 * has a name: most of it is a passing view of memory that has an entry already. While a log runs,
 * entries of the dead stay in the list: the list is the log, so that a birth or a death allocates
 * nothing and cannot fail. So that a log does not grow for ever, entries that begin when it is full
 * are in another list until it ends, and not in the log. The lock is held for a few instructions, or
 * while all entries are copied, never in a driver call and never while waiting for the GIL. fork()
 * takes it, so that the child finds the list whole.
 *
 * Entries can overlap: wrapped memory with a name lies inside owned memory, and another thread can
 * get the address of freed memory before its entry has ended. */
#ifndef MM_ALLOCATION_LOG_H
#define MM_ALLOCATION_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#include "../driver/status.h"
#include "memory_counts.h"

enum {
    MM_NAME_BYTES = 200, /* the longest name, in UTF-8 and without the terminating null */
    MM_LABEL_DIMENSIONS = 4 /* the lengths of a shape that a label shows */
};

/* Embedded in mm_memory, which sets start and size. All zero: not in the list. */
typedef struct mm_allocation_entry {
    CUdeviceptr start;
    size_t size;
    /* Changed under the lock; the only thread that can end the entry reads them without it. */
    bool alive; /* in the list, and not ended */
    bool kept; /* ended while a log ran, which may still use the struct */
    mm_source source; /* with device, set before the entry begins */
    int device; /* of a pool: that of its memory, or that its memory prefers; else MM_NO_DEVICE */
    /* Fixed by mm_allocation_entry_describe, before `described` is set. */
    atomic_bool described;
    int dimensions;
    const char *dtype;
    int64_t shape[MM_LABEL_DIMENSIONS];
    /* Protected by the lock. */
    bool listed; /* in the list */
    bool dead; /* in the list of the dead */
    uint64_t missed_log; /* the log that was full when the entry began; 0 for none */
    uint64_t serial; /* the order of birth in the process, from 1; 0 before it was in the list */
    uint64_t born; /* nanoseconds of CLOCK_MONOTONIC_RAW; of memory that is not counted: when it
                    * was wrapped, or 0 unless a log ran */
    uint64_t died; /* the same; UINT64_MAX while it lives */
    char *name;
    void *container; /* freed at the end of the log; NULL while the memory owns the struct */
    struct mm_allocation_entry *next, *previous, *next_dead;
} mm_allocation_entry;

/* True while a log runs. Inline, because every wrapping of memory asks. */
extern atomic_bool mm_allocations_logged;

static inline bool
mm_allocations_are_logged(void)
{
    return atomic_load_explicit(&mm_allocations_logged, memory_order_relaxed);
}

/* Adds an entry to the list; called after the allocation returned. */
void mm_allocation_entry_add(mm_allocation_entry *entry, CUdeviceptr start, size_t size);

/* The dtype and the shape of the memory, for its label; called at most once, by the thread that
 * makes the memory. dtype is static text. */
void mm_allocation_entry_describe(mm_allocation_entry *entry, const char *dtype, int dimensions,
                                  const int64_t *shape);

void mm_allocation_entry_end_listed(mm_allocation_entry *entry);

/* Ends an entry; called after the driver's free. Does nothing for an unlisted entry. Inline, because
 * most wrapped memory is unlisted. */
static inline void
mm_allocation_entry_end(mm_allocation_entry *entry)
{
    if (entry->alive) {
        mm_allocation_entry_end_listed(entry);
    }
}

/* Undoes mm_allocation_entry_end, if there was an entry: the free failed, and the memory stays
 * open. */
void mm_allocation_entry_resume(mm_allocation_entry *entry);

/* Ends the entry if it was not, and frees the container, or leaves that to the end of the log. */
void mm_allocation_entry_free(mm_allocation_entry *entry, void *container);

/* Sets or, with NULL, removes the name: at most MM_NAME_BYTES bytes. Adds the entry to the list.
 * The memory must be kept from ending meanwhile. */
MM_NODISCARD int mm_allocation_entry_set_name(mm_allocation_entry *entry, const char *name,
                                              mm_status *st);

/* Copies the name. Returns false if there is none. */
bool mm_allocation_entry_read_name(mm_allocation_entry *entry, char name[MM_NAME_BYTES + 1]);

/* --- the memories that live ---------------------------------------------------------------- */

/* Bytes of managed memory that live, pools included. */
extern atomic_size_t mm_managed_bytes;

/* Copies the counts of the process; peaks count from now on if `reset_peaks`. */
void mm_allocation_counts_read(mm_memory_tally *tally, bool reset_peaks);

typedef struct {
    CUdeviceptr start;
    size_t size;
    uint64_t serial, born;
    mm_source source;
    int device;
    char *label; /* as in mm_allocation_record */
} mm_living_memory;

/* Copies what lives and is counted, oldest first. */
MM_NODISCARD int mm_living_memories_copy(mm_living_memory **out, size_t *count, mm_status *st);
void mm_living_memories_free(mm_living_memory *memories, size_t count);

/* --- the log of a recording ---------------------------------------------------------------- */

typedef struct {
    CUdeviceptr start;
    size_t size; /* owned memory: whole pages */
    uint64_t born, died; /* 0: before the log; UINT64_MAX: lives */
    uint64_t serial;
    bool pooled;
    char *label; /* the name, or "float32[1024,1024] #7" with the serial; bytes are "64.0M #7" */
} mm_allocation_record;

/* Starts the log, whose first records are the memories that live; after `births` births it is full.
 * Fails with MM_REFUSED if one runs. The functions of the log are called by one thread at a
 * time. */
MM_NODISCARD int mm_allocation_log_start(size_t births, mm_status *st);

/* The number of records. */
size_t mm_allocation_log_count(void);

/* The number of entries that began when the log was full. */
uint64_t mm_allocation_log_missed(void);

/* Copies the records of the running log. A record keeps its index in later copies; its label is the
 * present name. */
MM_NODISCARD int mm_allocation_log_copy(mm_allocation_record **out, size_t *count, mm_status *st);
void mm_allocation_records_free(mm_allocation_record *records, size_t count);

/* Ends the log. Does nothing if none runs, as in a forked child. */
void mm_allocation_log_stop(void);

#endif
