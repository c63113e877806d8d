/* allocation_log.h: the list of the memories that live, their names and counts, and the log of
 * births and deaths while a recording runs.
 *
 * The process has one list. Owned memory has an entry from its allocation to its free. Wrapped
 * memory that its buffer gives back to a resource has an entry from the wrapping on. Other wrapped
 * memory gets an entry with its first name, because most of it is a short-lived view of memory that
 * has an entry already.
 *
 * While a log runs, entries of dead memory stay in the list. The list is the log, so that a birth
 * or a death allocates nothing and cannot fail. A log has a limit: entries that begin when it is
 * full are not part of the log, and are kept in a second list until the log ends.
 *
 * The lock is held for a few instructions, or while all entries are copied. It is never held in a
 * driver call or while a thread waits for the GIL. fork() takes the lock, so that the child finds
 * the list whole.
 *
 * Entries can overlap: wrapped memory with a name lies inside owned memory, and another thread can
 * get the address of freed memory before the entry of that memory has ended. */
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
    /* Changed under the lock. Only one thread can end the entry: it reads them without the lock. */
    bool alive; /* in the list, and not ended */
    bool kept; /* ended while a log ran; the log may still use the struct */
    mm_source source; /* set, like device, before the entry begins */
    int device; /* of pool memory: where it is, or what it prefers; else MM_NO_DEVICE */
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
    uint64_t born; /* nanoseconds of CLOCK_MONOTONIC_RAW. If the memory is not counted: the time of
                    * its wrapping while a log ran, else 0 */
    uint64_t died; /* on the same clock; UINT64_MAX while the memory lives */
    char *name;
    void *container; /* the struct around the entry, which the end of the log frees; or NULL */
    struct mm_allocation_entry *next, *previous, *next_dead;
} mm_allocation_entry;

/* True while a log runs. Inline, because it is called whenever memory is wrapped. */
extern atomic_bool mm_allocations_logged;

static inline bool
mm_allocations_are_logged(void)
{
    return atomic_load_explicit(&mm_allocations_logged, memory_order_relaxed);
}

/* Adds an entry to the list; called after the allocation returned. */
void mm_allocation_entry_add(mm_allocation_entry *entry, CUdeviceptr start, size_t size);

/* Stores the dtype and the shape of the memory, for its label. Called at most once, by the thread
 * that makes the memory. dtype is static text. */
void mm_allocation_entry_describe(mm_allocation_entry *entry, const char *dtype, int dimensions,
                                  const int64_t *shape);

void mm_allocation_entry_end_listed(mm_allocation_entry *entry);

/* Ends an entry; called after the driver's free. Does nothing for an unlisted entry. Inline,
 * because most wrapped memory is unlisted. */
static inline void
mm_allocation_entry_end(mm_allocation_entry *entry)
{
    if (entry->alive) {
        mm_allocation_entry_end_listed(entry);
    }
}

/* Undoes mm_allocation_entry_end, for memory whose free failed and which stays open. Does nothing
 * if the memory never had an entry in the list. */
void mm_allocation_entry_resume(mm_allocation_entry *entry);

/* Ends the entry unless it has ended, and frees the container. If a log still uses the entry, the
 * end of the log frees the container. */
void mm_allocation_entry_free(mm_allocation_entry *entry, void *container);

/* Sets the name, of at most MM_NAME_BYTES bytes, or removes it if `name` is NULL. A first name adds
 * the entry to the list. The caller keeps the memory from ending meanwhile. */
MM_NODISCARD int mm_allocation_entry_set_name(mm_allocation_entry *entry, const char *name,
                                              mm_status *st);

/* Copies the name. Returns false if there is none. */
bool mm_allocation_entry_read_name(mm_allocation_entry *entry, char name[MM_NAME_BYTES + 1]);

/* --- the memories that live ---------------------------------------------------------------- */

/* Bytes of managed memory that live, pools included. */
extern atomic_size_t mm_managed_bytes;

/* Copies the counts of the process. If `reset_peaks`, then sets each peak to the present bytes. */
void mm_allocation_counts_read(mm_memory_tally *tally, bool reset_peaks);

typedef struct {
    CUdeviceptr start;
    size_t size;
    uint64_t serial, born;
    mm_source source;
    int device;
    char *label; /* as in mm_allocation_record */
} mm_living_memory;

/* Copies the memories that live and are counted, oldest first. */
MM_NODISCARD int mm_living_memories_copy(mm_living_memory **out, size_t *count, mm_status *st);
void mm_living_memories_free(mm_living_memory *memories, size_t count);

/* --- the log of a recording ---------------------------------------------------------------- */

typedef struct {
    CUdeviceptr start;
    size_t size; /* owned memory: whole pages */
    uint64_t born, died; /* born is 0 before the log; died is UINT64_MAX for living memory */
    uint64_t serial;
    bool pooled;
    char *label; /* the name, or "float32[1024,1024] #7" with the serial; bytes are "64.0M #7" */
} mm_allocation_record;

/* Starts the log. Its first records are the memories that live now, and it is full after `births`
 * further births. Fails with MM_REFUSED if a log runs already. The functions of the log are called
 * by one thread at a time. */
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
