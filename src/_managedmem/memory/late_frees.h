/* late_frees.h: resources that could not be freed at their end, and are freed later.
 *
 * CUDA refuses to free inside a host function, where Python's garbage collector may run; a block of a
 * pool waits for the end of a capture, a pool for its queued frees. Each contains its list entry, so
 * that deferring a free needs no allocation. */
#ifndef MM_LATE_FREES_H
#define MM_LATE_FREES_H

#include "../driver/driver.h"

/* The conditions of an attempt. */
typedef struct {
    bool pools;      /* retired pools are attempted too */
    bool idle;       /* the caller has just waited for `device` */
    int device;
    CUstream stream; /* a stream of another library that is known to exist; or NULL */
} mm_chance;

typedef struct mm_late_free mm_late_free;

/* Returns true if the resource was freed, and the entry with it. */
typedef bool (*mm_attempt)(mm_driver *cu, mm_late_free *entry, const mm_chance *chance);

/* The first member of a resource that can be freed late. */
struct mm_late_free {
    mm_late_free *next;
    mm_attempt attempt;
};

/* Puts an entry on the list. Safe from every thread, without a lock. */
void mm_free_late(mm_late_free *entry, mm_attempt attempt);

/* Attempts every entry; those that fail stay on the list. Can block, so call it without the GIL. Does
 * nothing in a forked child, because the resources are the parent's. */
void mm_late_frees_attempt(mm_driver *cu, const mm_chance *chance);

/* True if the driver refused the free inside a host function, so that it can be done later. */
static inline bool
mm_can_free_late(const mm_status *st)
{
    return st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_PERMITTED;
}

#endif
