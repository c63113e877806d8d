/* unsupported.h: operations that pass over ranges which cannot take them on this system, and count
 * the ranges that they pass over. These become empty. Other failures are reported as usual. */
#ifndef MM_UNSUPPORTED_H
#define MM_UNSUPPORTED_H

#include "dispatch.h"
#include "policy.h"

/* Passes over the ranges of a prefetch or discard that are bound to fail: all ranges if the driver
 * or a device lacks the operation, and ranges without a whole page to discard. Makes no driver
 * call. Returns the number of ranges passed over, without those that were empty before. */
size_t mm_skip_unsupported(const mm_driver *cu, mm_operation op, mm_batch *b,
                           mm_dispatch dispatch);

/* False if every valid prefetch works here, whatever its dispatch. */
bool mm_may_skip_prefetches(const mm_driver *cu);

/* True if no range has a byte. */
bool mm_batch_is_empty(const mm_batch *b);

/* Runs a batch after mm_skip_unsupported. Adds to *skipped the number of prefetches that the driver
 * refuses because a device lacks concurrent access. */
MM_NODISCARD int mm_batch_run_or_skip(mm_driver *cu, mm_operation op, mm_batch *b,
                                      const mm_dispatch_options *options, size_t *skipped,
                                      mm_status *st);

/* mm_batch_advise without the ranges whose location is a device without concurrent access, and
 * without pool memory if the driver refuses advice on it. Adds the number of these ranges to
 * *skipped. */
MM_NODISCARD int mm_batch_advise_or_skip(mm_driver *cu, mm_batch *b, CUmem_advise advice,
                                         size_t *skipped, mm_status *st);

/* mm_policy_apply without the ranges that cannot take all advice of the policy: these keep their
 * advice. They are all ranges if the policy names a device without concurrent access, else pool
 * memory that lacks the policy if the driver refuses advice on it. Adds their number to *skipped.
 * The other ranges stay in the batch as they are. */
MM_NODISCARD int mm_policy_apply_or_skip(mm_driver *cu, mm_batch *b, const mm_policy *policy,
                                         mm_page_runs *before, size_t *skipped, mm_status *st);

#endif
