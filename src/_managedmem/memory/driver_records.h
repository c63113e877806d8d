/* driver_records.h: queries of what the driver has recorded for the pages of a range. */
#ifndef MM_DRIVER_RECORDS_H
#define MM_DRIVER_RECORDS_H

#include "range.h"

/* True if a query of the range passes over no page; false if that is to be found out. */
bool mm_query_is_exact(mm_range range);

/* True if the next four may query each page of a range, of which there are many. */
static inline bool
mm_range_may_be_searched(mm_range range)
{
    enum { FEW = 256 << 10 };

    return range.size > FEW && !mm_query_is_exact(range);
}

/* An empty range has no advice. */

MM_NODISCARD int mm_range_read_mostly(mm_driver *cu, mm_range range, bool *on, mm_status *st);

/* The type is INVALID if unset or not the same on all pages. */
MM_NODISCARD int mm_range_preferred_location(mm_driver *cu, mm_range range,
                                             CUmemLocation *location, mm_status *st);
MM_NODISCARD int mm_range_last_prefetch(mm_driver *cu, mm_range range, CUmemLocation *location,
                                        mm_status *st);

/* The members that the accessed-by sets of all pages have. */
MM_NODISCARD int mm_range_accessed_by(mm_driver *cu, mm_range range, mm_location_set *set,
                                      mm_status *st);

/* One query of a location in the caller's scope, by the attribute of its type: answers[0] is the
 * type, answers[1] the id. */
CUresult mm_range_query_location(mm_driver *cu, mm_range range, CUmem_range_attribute type,
                                 int answers[2]);

/* For callers that query the attribute themselves: the capacity of the driver's list, and the set
 * of its members. */
size_t mm_accessed_by_capacity(const mm_driver *cu);
mm_location_set mm_accessed_by_set(const int *ordinals, size_t count);

/* What the driver has recorded for pages: an attribute, which is one number without type and id, and
 * a location where it has one. */
typedef struct {
    CUmem_range_attribute attribute;
    CUmemLocation location;
} mm_record;

/* The first query of several that failed, which ends them; or CUDA_SUCCESS. */
typedef struct {
    CUresult code;
    const char *function;
} mm_query_failure;

/* The next four are in the caller's scope. */

/* Where one query has said that all pages of a range have the record: false if it passed over a page
 * that lacks it. */
bool mm_record_is_everywhere(mm_driver *cu, mm_range range, mm_record r,
                             mm_query_failure *failure);

/* True if all pages have the record, or if a query fails. */
bool mm_is_recorded(mm_driver *cu, mm_range range, mm_record r);

/* The first page without the record, where one lacks it. */
CUdeviceptr mm_first_without_record(mm_driver *cu, mm_range range, mm_record r);

/* The members that all pages have; none if a query fails. */
CUresult mm_recorded_members(mm_driver *cu, mm_range range, mm_location_set *members);

#endif
