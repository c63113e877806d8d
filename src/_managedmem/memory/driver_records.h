/* driver_records.h: queries of what the driver has recorded for the pages of a range. */
#ifndef MM_DRIVER_RECORDS_H
#define MM_DRIVER_RECORDS_H

#include "range.h"

/* True if a query of the range is known to pass over no page; false if that must be found out. */
bool mm_query_is_exact(mm_range range);

/* True if the next four functions may query each page of a range that has many pages. */
static inline bool
mm_range_may_be_searched(mm_range range)
{
    enum { FEW = 256 << 10 };

    return range.size > FEW && !mm_query_is_exact(range);
}

/* An empty range has no advice. */

MM_NODISCARD int mm_range_read_mostly(mm_driver *cu, mm_range range, bool *on, mm_status *st);

/* The type of the location is INVALID if it is unset, or not the same on all pages. */
MM_NODISCARD int mm_range_preferred_location(mm_driver *cu, mm_range range,
                                             CUmemLocation *location, mm_status *st);
MM_NODISCARD int mm_range_last_prefetch(mm_driver *cu, mm_range range, CUmemLocation *location,
                                        mm_status *st);

/* The members that the accessed-by sets of all pages have. */
MM_NODISCARD int mm_range_accessed_by(mm_driver *cu, mm_range range, mm_location_set *set,
                                      mm_status *st);

/* Makes one query of a location, in the caller's scope. `type` is the attribute of its type. Stores
 * the type in answers[0] and the id in answers[1]. */
CUresult mm_range_query_location(mm_driver *cu, mm_range range, CUmem_range_attribute type,
                                 int answers[2]);

/* For callers that query accessed-by themselves: the capacity of the list that the driver fills,
 * and the set of the members in such a list. */
size_t mm_accessed_by_capacity(const mm_driver *cu);
mm_location_set mm_accessed_by_set(const int *ordinals, size_t count);

/* A record of the driver for pages: an attribute, and its location if it has one. For a location,
 * the attribute is the one that is a single number, not one of the pair for type and id. */
typedef struct {
    CUmem_range_attribute attribute;
    CUmemLocation location;
} mm_record;

/* The outcome of several queries: the first that failed, which ends them, or CUDA_SUCCESS. */
typedef struct {
    CUresult code;
    const char *function;
} mm_query_failure;

/* The next four are in the caller's scope. */

/* For a range of which one query has said that all pages have the record: false if that query
 * passed over a page without it. True if a query fails now, with the failure in *failure. */
bool mm_record_is_everywhere(mm_driver *cu, mm_range range, mm_record r,
                             mm_query_failure *failure);

/* True if all pages have the record, or if a query fails. */
bool mm_is_recorded(mm_driver *cu, mm_range range, mm_record r);

/* The first page without the record, of a range that has such a page. */
CUdeviceptr mm_first_without_record(mm_driver *cu, mm_range range, mm_record r);

/* The members that all pages have; none if a query fails. */
CUresult mm_recorded_members(mm_driver *cu, mm_range range, mm_location_set *members);

#endif
