/* working_memory.h: the memory of one group of a working set: its pages, its advice, and the calls
 * that bring it to the device and away from it.
 *
 * A group owns neither guards nor memory. The caller keeps the guards while the group lives; memory
 * that was closed meanwhile is passed over. */
#ifndef MM_WORKING_MEMORY_H
#define MM_WORKING_MEMORY_H

#include "guard.h"
#include "policy.h"
#include "working_set.h"

typedef struct mm_working_range {
    mm_range range;
    mm_guard *guard; /* of memory that this library owns; or NULL */
    size_t target; /* the first of its targets, for messages */
    struct { /* see working_claims.c */
        const struct mm_working_memory *claimant; /* NULL: not claimed */
        struct mm_working_range *lower, *higher;
        CUdeviceptr page_behind; /* the highest one of this range and those below it in the tree */
        uint64_t priority;
    } claim;
} mm_working_range;

typedef struct mm_working_memory {
    mm_group_access access;
    mm_working_range *ranges; /* in the order of their addresses, without neighbours */
    size_t count;
    size_t bytes; /* of their pages */
    CUmemLocation home;
    mm_page_runs before; /* the advice before the group was added */
    bool advised; /* and `before` is not restored yet */
    const void *set; /* of the group, for messages, like its number */
    uint64_t number;
} mm_working_memory;

/* The number of the first page of a range, and that behind its last one. */
static inline CUdeviceptr
mm_first_page_of(const mm_range *range)
{
    return range->start / mm_page_size();
}

static inline CUdeviceptr
mm_page_behind(const mm_range *range)
{
    return (mm_range_end(*range) - 1) / mm_page_size() + 1;
}

/* A group of these ranges, whose targets are numbered in their order; none of them is empty. Copies
 * them. The group can be freed also on failure. */
MM_NODISCARD int mm_working_memory_init(mm_working_memory *m, const mm_working_range *ranges,
                                        size_t count, mm_group_access access, mm_status *st);
void mm_working_memory_free(mm_working_memory *m);

/* Fails with MM_REFUSED if memory of the group was closed. */
MM_NODISCARD int mm_working_memory_check(const mm_working_memory *m, mm_status *st);

/* Gives the memory the advice with which it stays at home, where the device reaches it; `mapped` for
 * memory that the device always reaches there. All or nothing. The caller has entered the guards. */
MM_NODISCARD int mm_working_memory_advise(mm_driver *cu, mm_working_memory *m, int device,
                                          bool mapped, mm_status *st);

/* Restores the earlier advice, except that of closed memory. After a failure it can be called
 * again. */
MM_NODISCARD int mm_working_memory_restore(mm_driver *cu, mm_working_memory *m, mm_status *st);

/* The next calls queue work on a stream, not on a default stream. After a failure they go on with the
 * rest of the memory, and report the first failure. In the caller's scope. */

/* `copy`: as a copy, also of a group that is written. One that is only read is always copied. */
MM_NODISCARD int mm_working_memory_load(mm_driver *cu, const mm_working_memory *m, int device,
                                        bool copy, CUstream stream, mm_status *st);

/* Takes the memory off the device: drops a read-only copy by advice, discards whole pages of scratch,
 * and brings written memory home. */
MM_NODISCARD int mm_working_memory_drop(mm_driver *cu, const mm_working_memory *m, CUstream stream,
                                        mm_status *st);

/* Brings it home with its contents; `copy` if it was loaded as one. Pages of a copy that were written
 * all the same are on the device only, and go home too. */
MM_NODISCARD int mm_working_memory_home(mm_driver *cu, const mm_working_memory *m, bool copy,
                                        CUstream stream, mm_status *st);

#endif
