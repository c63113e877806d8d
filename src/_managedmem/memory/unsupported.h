/* unsupported.h: operations that pass over the ranges that cannot take them on this system, and count
 * these. Ranges that are passed over become empty. Other failures come from the operations. */
#ifndef MM_UNSUPPORTED_H
#define MM_UNSUPPORTED_H

#include "dispatch.h"
#include "policy.h"

/* Passes over the ranges of a prefetch or discard that can be recognised without a driver call: all of
 * them where the driver or a device lacks the operation, and ranges without a whole page to
 * discard. Returns the number of those that were not empty. */
size_t mm_skip_unsupported(const mm_driver *cu, mm_operation op, mm_batch *b,
                           mm_dispatch dispatch);

/* False if every valid prefetch works here, whatever its dispatch. */
bool mm_may_skip_prefetches(const mm_driver *cu);

/* True if no range has a byte. */
bool mm_batch_is_empty(const mm_batch *b);

/* Runs a batch without these ranges, and adds the prefetches that the driver refuses for the lack
 * of concurrent access to *skipped. */
MM_NODISCARD int mm_batch_run_or_skip(mm_driver *cu, mm_operation op, mm_batch *b,
                                      const mm_dispatch_options *options, size_t *skipped,
                                      mm_status *st);

/* mm_batch_advise without the ranges whose location is a device without concurrent access, and
 * without pool memory if the driver refuses advice on it; adds their number to *skipped. */
MM_NODISCARD int mm_batch_advise_or_skip(mm_driver *cu, mm_batch *b, CUmem_advise advice,
                                         size_t *skipped, mm_status *st);

/* mm_policy_apply without the ranges that cannot take some advice of the policy, which keep all of
 * theirs: all ranges if the policy names a device without concurrent access, and pool memory
 * without the policy if the driver refuses advice on it. Adds their number to *skipped, and leaves the
 * others in the batch as they are. */
MM_NODISCARD int mm_policy_apply_or_skip(mm_driver *cu, mm_batch *b, const mm_policy *policy,
                                         mm_page_runs *before, size_t *skipped, mm_status *st);

#endif
