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

/* Advises a range, so that set advice also reads back. If the driver fails, even after it acted,
 * advice that all pages had is restored. Pages that differed keep their advice if the driver
 * refused, and have none if it set the advice on all of them. */
MM_NODISCARD int mm_range_advise(mm_driver *cu, mm_range range, CUmem_advise advice,
                                 CUmemLocation location, mm_status *st);

/* mm_range_advise, but nothing is restored after a failure. */
MM_NODISCARD int mm_range_advise_until_recorded(mm_driver *cu, mm_range range, CUmem_advise advice,
                                                CUmemLocation location, mm_status *st);

/* Only the driver call: for callers that read the records afterwards, and for ranges whose pages
 * have equal records. Where they differ, the driver may leave some records as they were. */
MM_NODISCARD int mm_range_advise_once(mm_driver *cu, mm_range range, CUmem_advise advice,
                                      CUmemLocation location, mm_status *st);

/* Queries the node that the driver recorded after a NUMA host was advised as preferred location.
 * If the machine ignores nodes, as machines with one node do, advises the host, which is the same
 * memory. Then, and on failure, the type of *node is not HOST_NUMA. */
MM_NODISCARD int mm_range_readvise_node(mm_driver *cu, mm_range range, CUmemLocation *node,
                                        mm_status *st);

/* One advice of a range before a call. */
typedef struct {
    bool whole; /* true: all pages had it. false: none had it, they differed, or it is not known */
    CUmemLocation location; /* if whole, the location of that advice */
} mm_advice_before;

/* Queries it. For system memory, which cannot be queried, succeeds with `whole` false. */
MM_NODISCARD int mm_advice_query(mm_driver *cu, mm_range range, CUmem_advise advice,
                                 CUmemLocation location, mm_advice_before *before, mm_status *st);

/* The progress of a failed operation on a range: not reached, failed there, or already advised. */
typedef enum { MM_NOT_TRIED, MM_FAILED, MM_ADVISED } mm_advice_progress;

/* Restores the advice of a range. If its pages differed before and the call set the advice, unsets
 * it on all of them. Failures are ignored, because an earlier one is being reported. */
void mm_advice_restore(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                       const mm_advice_before *before, mm_advice_progress progress);

/* One driver call for each member: set or unset. Calls before a failure keep their effect. */
MM_NODISCARD int mm_range_switch_accessed_by(mm_driver *cu, mm_range range,
                                             mm_location_set members, bool on, mm_status *st);

/* Changes the accessed-by set that all pages have from one set to another: one call for each member
 * that differs, and one query if members were added, so that they read back. A failure undoes the
 * change; pages that already had some of the added members then lack them. */
MM_NODISCARD int mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                                             mm_location_set to, mm_status *st);

#endif
