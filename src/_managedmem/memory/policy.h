/* policy.h: one policy for several ranges: applying it, all or nothing, and restoring the earlier
 * advice of every page; and the policy of new memory. */
#ifndef MM_POLICY_H
#define MM_POLICY_H

#include "batch.h"
#include "page_runs.h"

/* Advises memory that was just allocated, by one call for each part of the policy. Queries the
 * records of pages only in memory so small that it can have records of freed memory. After a
 * failure some of the advice may have been given, and the caller frees the memory. */
MM_NODISCARD int mm_policy_advise_new(mm_driver *cu, mm_range memory, const mm_policy *policy,
                                      mm_status *st);

/* The other functions merge the batch first and ignore its locations. */

/* Reads the runs of all ranges; *runs is empty after a failure. The driver does not tell the advice
 * of system memory. Its ranges become runs without a policy, so restoring them unsets their
 * advice. */
MM_NODISCARD int mm_policy_read(mm_driver *cu, mm_batch *b, mm_page_runs *runs, mm_status *st);

/* Makes the advice on every page equal to the policy. On success *before has the earlier advice.
 * On failure that advice is restored, or the status says where it is not, and *before is empty. */
MM_NODISCARD int mm_policy_apply(mm_driver *cu, mm_batch *b, const mm_policy *policy,
                                 mm_page_runs *before, mm_status *st);

/* Restores the advice of the pages in the list. Tries all of them, even after a failure. */
MM_NODISCARD int mm_policy_restore(mm_driver *cu, mm_batch *b, const mm_page_runs *before,
                                   mm_status *st);

#endif
