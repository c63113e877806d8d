/* late_frees.h: what could not be freed at its end, until it can be.
 *
 * CUDA refuses to free inside a host function, where Python's garbage collector may well run; a block
 * of a pool waits for the end of a capture, and a pool for its queued frees. Each is its own entry of
 * one list, so nothing is allocated where something already went wrong. */
#ifndef MM_LATE_FREES_H
#define MM_LATE_FREES_H

#include "../driver/driver.h"

/* What an attempt may rely on. */
typedef struct {
    bool pools;      /* it is time to look at pools whose last user is gone */
    bool idle;       /* the caller has just waited for a device */
    CUstream stream; /* of another library, which exists now; or NULL */
} mm_chance;

typedef struct mm_late_free mm_late_free;

/* True when the entry is gone, with all that it is part of. */
typedef bool (*mm_attempt)(mm_driver *cu, mm_late_free *entry, const mm_chance *chance);

/* The first member of what can be freed late. */
struct mm_late_free {
    mm_late_free *next;
    mm_attempt attempt;
};

/* Puts an entry on the list. From any thread, without a lock. */
void mm_free_late(mm_late_free *entry, mm_attempt attempt);

/* Attempts every entry; those that fail stay. Can block as every free: call it without the GIL. In a
 * forked child nothing is attempted: all of it is the parent's. */
void mm_late_frees_attempt(mm_driver *cu, const mm_chance *chance);

/* Whether the driver refused because the calling thread runs a host function: the memory is still
 * there and can be freed later. */
static inline bool
mm_can_free_late(const mm_status *st)
{
    return st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_PERMITTED;
}

#endif
