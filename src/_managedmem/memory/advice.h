/* advice.h: advice on one range: setting it so that it reads back, and restoring the earlier advice
 * after a failure. */
#ifndef MM_ADVICE_H
#define MM_ADVICE_H

#include "driver_records.h"

/* All advice on a page. */
typedef struct {
    bool read_mostly;
    CUmemLocation preferred; /* type INVALID if unset */
    mm_location_set accessed_by;
} mm_policy;

bool mm_same_policy(const mm_policy *a, const mm_policy *b);

/* Advises a range, and makes sure that set advice reads back. After a failure, even of a driver
 * that acted first, advice that all pages had is restored. If the pages differed, they keep their
 * advice where the driver refused the call, and lose it where the driver had set the new advice on
 * all of them. */
MM_NODISCARD int mm_range_advise(mm_driver *cu, mm_range range, CUmem_advise advice,
                                 CUmemLocation location, mm_status *st);

/* mm_range_advise, but nothing is restored after a failure. */
MM_NODISCARD int mm_range_advise_until_recorded(mm_driver *cu, mm_range range, CUmem_advise advice,
                                                CUmemLocation location, mm_status *st);

/* Makes only the driver call: for callers that read the records afterwards, and for ranges whose
 * pages have equal records. If the records differ, the driver may leave some as they were. */
MM_NODISCARD int mm_range_advise_once(mm_driver *cu, mm_range range, CUmem_advise advice,
                                      CUmemLocation location, mm_status *st);

/* For a range whose preferred location was just advised as a NUMA host: stores in *node the node
 * that the driver recorded. If the machine ignores nodes, as machines with one node do, advises the
 * host instead, which is the same memory. In that case, and on failure, the type of *node is not
 * HOST_NUMA. */
MM_NODISCARD int mm_range_readvise_node(mm_driver *cu, mm_range range, CUmemLocation *node,
                                        mm_status *st);

/* One advice of a range before a call. */
typedef struct {
    bool whole; /* true: all pages had it. false: none had it, they differed, or it is not known */
    CUmemLocation location; /* if whole, the location of that advice */
} mm_advice_before;

/* Queries the advice of a range. System memory cannot be queried: there the call succeeds, with
 * `whole` false. */
MM_NODISCARD int mm_advice_query(mm_driver *cu, mm_range range, CUmem_advise advice,
                                 CUmemLocation location, mm_advice_before *before, mm_status *st);

/* How far a failed operation came with one range: it did not reach the range, it failed there, or
 * it had advised the range. */
typedef enum { MM_NOT_TRIED, MM_FAILED, MM_ADVISED } mm_advice_progress;

/* Restores the advice of a range. If its pages differed before and the call set the advice, unsets
 * it on all of them. Ignores its own failures, because the caller reports an earlier failure. */
void mm_advice_restore(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                       const mm_advice_before *before, mm_advice_progress progress);

/* Sets the members if `on`, else unsets them, by one driver call for each. Calls before a failure
 * keep their effect. */
MM_NODISCARD int mm_range_switch_accessed_by(mm_driver *cu, mm_range range,
                                             mm_location_set members, bool on, mm_status *st);

/* Changes the accessed-by set from `from`, which all pages have, to `to`, by one call for each
 * member that differs. If members were added, queries whether they read back. A failure undoes the
 * change, but pages that already had some of the added members then lack these. */
MM_NODISCARD int mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                                             mm_location_set to, mm_status *st);

#endif
