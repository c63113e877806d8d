/* plan.h: prefetches that are prepared once and executed often.
 *
 * A plan never changes, so any number of threads may execute it at once. It refers to guards and
 * addresses and owns neither: during a call, the caller keeps their owners alive. */
#ifndef MM_PLAN_H
#define MM_PLAN_H

#include "dispatch.h"
#include "guard.h"

typedef struct {
    mm_transfer transfer;
    mm_guard *memory; /* of memory that this library owns, else NULL */
    mm_guard *view;   /* of a view on it, which can be closed by itself; or NULL */
    bool dense;       /* no gaps, whose contents a discard would destroy */
    bool read_only;   /* its contents must not be discarded */
} mm_plan_entry;

typedef struct mm_plan mm_plan;

/* Prepares prefetches, or discards with prefetch, of at least one entry; copies the entries. NULL
 * on failure. The messages of these functions count entries from 0. */
mm_plan *mm_plan_new(const mm_plan_entry *entries, size_t count, mm_operation op, mm_status *st);
void mm_plan_retain(mm_plan *p);
void mm_plan_release(mm_plan *p);

/* Enters the guards of all memory, then issues. Allocates nothing, unless another thread is
 * executing the same plan. */
MM_NODISCARD int mm_plan_execute(mm_driver *cu, mm_plan *p, const mm_dispatch_options *options,
                                 mm_status *st);

/* Executes a plan of prefetches on a system that may not support some of them. Passes over the
 * entries that are not supported, and adds their number to *skipped. `entries` are the plan's. */
MM_NODISCARD int mm_plan_execute_or_skip(mm_driver *cu, mm_plan *p, const mm_plan_entry *entries,
                                         size_t count, const mm_dispatch_options *options,
                                         size_t *skipped, mm_status *st);

/* The calls that an execution would make now. Refers to the plan. */
typedef struct {
    mm_operation op;
    const mm_batch *transfers;
    const mm_batch *edges; /* prefetched one by one before the transfers; some may be empty */
    size_t batched; /* the number of transfers in one batch call */
    bool deferred; /* because deferred_bytes go to deferred_to */
    size_t deferred_bytes;
    CUmemLocation deferred_to;
    mm_batch_arrays work; /* work.routes: the mm_route of each transfer */
} mm_plan_preview;

/* Fails as an execution would. */
MM_NODISCARD int mm_plan_make_preview(mm_driver *cu, mm_plan *p,
                                      const mm_dispatch_options *options, mm_plan_preview *preview,
                                      mm_status *st);
void mm_plan_preview_free(mm_plan_preview *preview);

/* Assigns each entry, in order, to the device if it fits in the rest of the budget, else to the
 * host. The budget is in bytes, counts whole pages, and counts equal ranges once. */
MM_NODISCARD int mm_plan_fit(mm_plan_entry *entries, size_t count, CUmemLocation device,
                             size_t budget, mm_status *st);

#endif
