/* deferred_frees.h: resources that could not be freed with their last reference, and are freed later.
 *
 * CUDA refuses to free inside a host function, where Python's garbage collector may run; a block
 * of a pool waits for the end of a capture, a pool for its queued frees. Each contains its list
 * entry, so that deferring a free needs no allocation. */
#ifndef MM_DEFERRED_FREES_H
#define MM_DEFERRED_FREES_H

#include "../driver/driver.h"

/* The caller's conditions, which decide what can be freed. All zero: nothing is known. */
typedef struct {
    bool pools; /* retired pools are attempted too */
    bool idle; /* the caller has just waited for `device` */
    int device;
    CUstream stream; /* a stream of another library that exists now; or NULL */
} mm_free_conditions;

typedef struct mm_deferred_free mm_deferred_free;

/* True if the resource was freed, and the entry with it; false if it must wait. */
typedef bool (*mm_deferred_free_attempt)(mm_driver *cu, mm_deferred_free *entry,
                                         const mm_free_conditions *conditions);

/* The first member of a resource that can be freed late. */
struct mm_deferred_free {
    mm_deferred_free *next;
    mm_deferred_free_attempt attempt;
};

/* Appends an entry to the list. Safe from every thread, without a lock. */
void mm_deferred_frees_append(mm_deferred_free *entry, mm_deferred_free_attempt attempt);

/* Attempts every entry, and keeps those that must wait. Can block, so call it without the GIL.
 * Does nothing in a forked child, because the resources are the parent's. */
void mm_deferred_frees_attempt(mm_driver *cu, const mm_free_conditions *conditions);

/* True if the driver refused the free inside a host function, so that it can be done later. */
static inline bool
mm_can_defer_free(const mm_status *st)
{
    return st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_PERMITTED;
}

#endif
