/* allocation_log.h: the list of the memories that live, their names, and the log of births and deaths while
 * a recording runs.
 *
 * The list is one for the process. Owned memory is in it from its allocation to its free, memory
 * that a buffer gives back to its resource from the wrapping on. Other wrapped memory is in it
 * once it has a name: most of it is a passing view of memory that has a life already. While a log
 * runs, dead lives stay in the list: the list is the log, so that a birth or a death allocates
 * nothing and cannot fail. So that a log does not grow for ever, lives that begin when it is full are in
 * another list until it ends, and not in the log. The lock is held for a few instructions, never in a driver call and
 * never while waiting for the GIL. fork() takes it, so that the child finds the list whole.
 *
 * Lives can overlap: wrapped memory with a name lies inside owned memory, and another thread can
 * get the address of freed memory before that life has ended. */
#ifndef MM_ALLOCATION_LOG_H
#define MM_ALLOCATION_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#include "../driver/status.h"

enum {
    MM_NAME_BYTES = 200, /* the longest name, in UTF-8 and without the terminating null */
    MM_LABEL_DIMENSIONS = 4 /* the lengths of a shape that a label shows */
};

/* Embedded in mm_memory, which sets start and size. All zero: not in the list. */
typedef struct mm_life {
    CUdeviceptr start;
    size_t size;
    /* Changed under the lock; the only thread that can end the life reads them without it. */
    bool alive; /* in the list, and not ended */
    bool kept; /* ended while a log ran, which may still use the struct */
    bool pooled; /* drivers refuse advice on it; set before the life begins */
    /* Fixed by mm_life_describe, before `described` is set. */
    atomic_bool described;
    int dimensions;
    const char *dtype;
    int64_t shape[MM_LABEL_DIMENSIONS];
    /* Protected by the lock. */
    bool listed; /* in the list */
    bool dead; /* in the list of the dead */
    uint64_t missed_log; /* the number of the log that was full when it began; or 0 */
    uint64_t serial; /* the order of birth in the process, from 1; 0 before it was in the list */
    uint64_t born; /* or wrapped: nanoseconds of CLOCK_MONOTONIC_RAW; 0 unless a log ran */
    uint64_t died; /* the same; UINT64_MAX while it lives */
    char *name;
    void *container; /* freed at the end of the log; NULL while the memory owns the struct */
    struct mm_life *next, *previous, *next_dead;
} mm_life;

/* True while a log runs. Inline, because every wrapping of memory asks. */
extern atomic_bool mm_lives_logged;

static inline bool
mm_lives_are_logged(void)
{
    return atomic_load_explicit(&mm_lives_logged, memory_order_relaxed);
}

/* Adds a life to the list; called after the allocation returned. */
void mm_life_begin(mm_life *life, CUdeviceptr start, size_t size);

/* The dtype and the shape of the memory, for its label; called at most once, by the thread that
 * makes the memory. dtype is static text. */
void mm_life_describe(mm_life *life, const char *dtype, int dimensions, const int64_t *shape);

/* Ends a life; called after the driver's free. Does nothing for an unlisted life. Inline, because
 * most wrapped memory is unlisted. */
void mm_life_end_listed(mm_life *life);

static inline void
mm_life_end(mm_life *life)
{
    if (life->alive) {
        mm_life_end_listed(life);
    }
}

/* Undoes mm_life_end, if there was a life: the free failed, and the memory stays open. */
void mm_life_resume(mm_life *life);

/* Ends the life if it was not, and frees the container, or leaves that to the end of the log. */
void mm_life_free(mm_life *life, void *container);

/* Sets or, with NULL, removes the name: at most MM_NAME_BYTES bytes. Adds the life to the list.
 * The memory must be kept from ending meanwhile. */
MM_NODISCARD int mm_life_set_name(mm_life *life, const char *name, mm_status *st);

/* Copies the name; false without one. */
bool mm_life_read_name(mm_life *life, char name[MM_NAME_BYTES + 1]);

/* --- the log of a recording ---------------------------------------------------------------- */

typedef struct {
    CUdeviceptr start;
    size_t size; /* owned memory: whole pages */
    uint64_t born, died; /* 0: before the log; UINT64_MAX: lives */
    uint64_t serial;
    bool pooled;
    char *label; /* the name, or "float32[1024,1024] #7" with the serial; bytes are "64.0M #7" */
} mm_life_record;

/* Starts the log, whose first records are the memories that live; after `births` births it is full.
 * Fails with MM_REFUSED if one runs. The functions of the log are called by one thread at a
 * time. */
MM_NODISCARD int mm_lives_log_start(size_t births, mm_status *st);

/* The number of records. */
size_t mm_lives_log_count(void);

/* The number of lives that began when the log was full. */
uint64_t mm_lives_log_missed(void);

/* Copies the records of the running log. A record keeps its index in later copies; its label is the
 * present name. */
MM_NODISCARD int mm_lives_log_copy(mm_life_record **out, size_t *count, mm_status *st);
void mm_life_records_free(mm_life_record *records, size_t count);

/* Ends the log. Does nothing if none runs, as in a forked child. */
void mm_lives_log_stop(void);

#endif
