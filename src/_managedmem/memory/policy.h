/* policy.h: one policy for several ranges: applying it, all or nothing, and restoring the earlier
 * advice of every page. */
#ifndef MM_POLICY_H
#define MM_POLICY_H

#include "batch.h"
#include "page_runs.h"

/* All of these merge the batch first, without regard to its locations. */

/* The runs of all ranges; an empty list on failure. */
MM_NODISCARD int mm_policy_read(mm_driver *cu, mm_batch *b, mm_page_runs *runs, mm_status *st);

/* Makes the advice on every page equal to the policy. On success *before has the earlier advice.
 * On failure that is in force again, or the status says what is not, and *before is empty. */
MM_NODISCARD int mm_policy_apply(mm_driver *cu, mm_batch *b, const mm_policy *policy,
                                 mm_page_runs *before, mm_status *st);

/* Makes the advice on those pages that the list has equal to it. Tries all of it. */
MM_NODISCARD int mm_policy_restore(mm_driver *cu, mm_batch *b, const mm_page_runs *before,
                                   mm_status *st);

#endif
