/* driver_records.c: what the driver has recorded for the pages of a range: advice, and the last
 * prefetch.
 *
 * Driver 580 keeps adjacent pages with equal records as one node. A query steps from the node of
 * the first page by the length of each, and so passes over pages where it begins inside of a node
 * (conformance: queries of records). It can then say what only some pages have, never that pages
 * lack what all have. So a positive answer counts if the query begins a node. */
#include "driver_records.h"

#include <assert.h>

/* --- records ---------------------------------------------------------------------------- */

CUresult
mm_range_query_location(mm_driver *cu, mm_range range, CUmem_range_attribute type, int answers[2])
{
    CUmem_range_attribute attributes[] = {type, (CUmem_range_attribute)(type + 1)};
    void *out[] = {&answers[0], &answers[1]};
    size_t sizes[] = {sizeof *answers, sizeof *answers};

    assert(mm_in_scope());
    return cu->MemRangeGetAttributes(out, sizes, attributes, 2, range.start, range.size);
}

_Static_assert(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID
                       == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE + 1
                   && CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID
                          == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE + 1,
               "the id of a location follows its type");

/* One query, in the caller's scope. */
static CUresult
query_record(mm_driver *cu, mm_range range, CUmem_range_attribute attribute, int *out,
             size_t count)
{
    assert(mm_in_scope());
    return cu->MemRangeGetAttribute(out, count * sizeof *out, attribute, range.start, range.size);
}

MM_GUARD_ARRAYS bool
mm_query_members(mm_driver *cu, mm_range range, mm_location_set *members)
{
    size_t count = mm_accessed_by_capacity(cu);
    int ordinals[MM_MAX_DEVICES + 1];
    CUresult code = query_record(cu, range, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, ordinals, count);

    *members = code == CUDA_SUCCESS ? mm_accessed_by_set(ordinals, count) : 0;
    return code == CUDA_SUCCESS;
}

/* True if the query fails. A device is queried as one number; that number does not distinguish the
 * kinds of host, and the id of a host is recorded in two forms. */
static bool
location_reads_back(mm_driver *cu, mm_range range, mm_record r)
{
    CUmem_range_attribute type = r.attribute == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION
                                     ? CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE
                                     : CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE;
    int answers[2] = {0};

    if (r.location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return query_record(cu, range, r.attribute, answers, 1) != CUDA_SUCCESS
               || answers[0] == r.location.id;
    }
    if (r.location.type == CU_MEM_LOCATION_TYPE_HOST) {
        return query_record(cu, range, type, answers, 1) != CUDA_SUCCESS
               || answers[0] == CU_MEM_LOCATION_TYPE_HOST;
    }
    return mm_range_query_location(cu, range, type, answers) != CUDA_SUCCESS
           || (answers[0] == (int)r.location.type && answers[1] == r.location.id);
}

/* The answer of one query, or true if it fails. */
static bool
reads_back(mm_driver *cu, mm_range range, mm_record r)
{
    mm_location_set members;
    int on = 0;

    assert(range.size > 0);
    switch (r.attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        return query_record(cu, range, r.attribute, &on, 1) != CUDA_SUCCESS || on != 0;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
        return !mm_query_members(cu, range, &members)
               || (members & mm_location_bit(r.location)) != 0;
    default:
        assert(r.attribute == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION
               || r.attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION);
        return location_reads_back(cu, range, r);
    }
}

/* True if no query of the range can pass over pages: it has only one, or begins its allocation. */
static bool
is_exact(mm_range range)
{
    CUdeviceptr page = mm_page_size(), first = range.start / page;

    return range.allocation == 0 || first == (mm_range_end(range) - 1) / page
           || first == range.allocation / page;
}

/* The page before a range that does not begin its allocation. */
static mm_range
page_before(mm_range range)
{
    CUdeviceptr page = mm_page_size(), end = range.start / page * page;
    CUdeviceptr start = end - page > range.allocation ? end - page : range.allocation;

    assert(!is_exact(range));
    return (mm_range){start, (size_t)(end - start), range.allocation};
}

/* The middle of a range at the border of a page; its start if it is one page. */
static CUdeviceptr
middle_page(mm_range range)
{
    CUdeviceptr page = mm_page_size(), middle = (range.start + range.size / 2) / page * page;

    if (middle <= range.start) {
        middle = range.start / page * page + page;
    }
    return middle < mm_range_end(range) ? middle : range.start;
}

/* The first page without a record. Some page lacks it, and no query from the start passes over
 * one. */
static CUdeviceptr
first_lacking(mm_driver *cu, mm_range range, mm_record r)
{
    mm_range rest = range;

    for (CUdeviceptr middle; (middle = middle_page(rest)) != rest.start;) {
        mm_range first = {range.start, (size_t)(middle - range.start), range.allocation};
        bool whole = reads_back(cu, first, r);
        CUdeviceptr end = whole ? mm_range_end(rest) : middle;
        rest.start = whole ? middle : rest.start;
        rest.size = (size_t)(end - rest.start);
    }
    return rest.start;
}

/* A page behind one that has the record, where the last page of the range has it and the first one
 * lacks it. */
static CUdeviceptr
border_behind(mm_driver *cu, mm_range range, mm_record r)
{
    for (CUdeviceptr middle; (middle = middle_page(range)) != range.start;) {
        CUdeviceptr end = mm_range_end(range);
        mm_range page = {middle, (size_t)(end - middle), range.allocation};
        if (reads_back(cu, mm_first_page(page), r)) {
            range.size = (size_t)(middle - range.start);
        } else {
            range.start = middle;
            range.size = (size_t)(end - middle);
        }
    }
    return mm_range_end(range);
}

/* Adds pages before a range that have the record, so that no query from the start passes over
 * pages: it must be the first page of what the driver keeps as one, which is known where the page
 * before it lacks the record. Gives up where there are many gaps. */
static mm_range
extended_to_border(mm_driver *cu, mm_range range, mm_record r)
{
    enum { MOST_GAPS = 64 };
    mm_range more = {.start = range.allocation, .allocation = range.allocation};

    if (is_exact(range) || !reads_back(cu, page_before(range), r)) {
        return range;
    }
    for (int n = 0; n < MOST_GAPS && more.start < range.start; n++) {
        more.size = (size_t)(range.start - more.start);
        if (reads_back(cu, more, r)) {
            more.size += range.size;
            return more;
        }
        more.start = first_lacking(cu, more, r);
        more.size = (size_t)(range.start - more.start);
        more.start = border_behind(cu, more, r);
    }
    return range;
}

bool
mm_record_is_everywhere(mm_driver *cu, mm_range range, mm_record r)
{
    mm_range more = extended_to_border(cu, range, r);

    return more.start == range.start || reads_back(cu, more, r);
}

bool
mm_is_recorded(mm_driver *cu, mm_range range, mm_record r)
{
    return reads_back(cu, range, r) && mm_record_is_everywhere(cu, range, r);
}

CUdeviceptr
mm_first_without_record(mm_driver *cu, mm_range range, mm_record r)
{
    CUdeviceptr first = first_lacking(cu, extended_to_border(cu, range, r), r);

    return first > range.start ? first : range.start;
}

/* mm_record_is_everywhere, in a scope of its own. */
static int
check_everywhere(mm_driver *cu, mm_range range, CUmem_range_attribute attribute,
                 CUmemLocation location, bool *whole, mm_status *st)
{
    mm_scope scope;

    *whole = true;
    if (is_exact(range)) {
        return 0;
    }
    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    *whole = mm_record_is_everywhere(cu, range, (mm_record){attribute, location});
    mm_scope_leave(&scope);
    return 0;
}

/* --- queries ---------------------------------------------------------------------------- */

static int
query_range_attribute(mm_driver *cu, mm_range range, CUmem_range_attribute attribute, int *out,
                      size_t count, mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter, MM_ANY_DEVICE, cu, MemRangeGetAttribute, st, out,
               count * sizeof *out, attribute, range.start, range.size);
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemRangeGetAttribute", (int)code);
        return mm_range_diagnose(cu, range, mm_host(), MM_QUERY, st);
    }
    return 0;
}

/* Queries again if the record changed between type and id. */
static int
query_location(mm_driver *cu, mm_range range, CUmem_range_attribute attribute,
               CUmem_range_attribute type, CUmemLocation *location, mm_status *st)
{
    enum { MOST_QUERIES = 8 };
    int answers[] = {CU_MEM_LOCATION_TYPE_INVALID, 0};
    CUresult code;
    bool whole = true;
    int queries = 0;

    if (range.size == 0) {
        *location = mm_location(CU_MEM_LOCATION_TYPE_INVALID, 0);
        return 0;
    }
    do {
        MM_RUN_IN(code, mm_scope_enter, MM_ANY_DEVICE, cu, st,
                  mm_range_query_location(cu, range, type, answers));
        if (code != CUDA_SUCCESS) {
            (void)mm_fail_call(st, "cuMemRangeGetAttributes", (int)code);
            return mm_range_diagnose(cu, range, mm_host(), MM_QUERY, st);
        }
        *location = mm_location_from_attributes(cu->device_count, answers[0], answers[1]);
    } while ((int)location->type != answers[0] && ++queries < MOST_QUERIES);
    if ((int)location->type != CU_MEM_LOCATION_TYPE_INVALID
        && check_everywhere(cu, range, attribute, *location, &whole, st) < 0) {
        return -1;
    }
    if (!whole) {
        *location = mm_location(CU_MEM_LOCATION_TYPE_INVALID, 0);
    }
    return 0;
}

int
mm_range_read_mostly(mm_driver *cu, mm_range range, bool *on, mm_status *st)
{
    int answer = 0;

    if (range.size > 0
        && query_range_attribute(cu, range, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, &answer, 1, st)
               < 0) {
        return -1;
    }
    *on = answer != 0;
    return answer == 0 ? 0
                       : check_everywhere(cu, range, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, mm_host(),
                                          on, st);
}

int
mm_range_preferred_location(mm_driver *cu, mm_range range, CUmemLocation *location, mm_status *st)
{
    return query_location(cu, range, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
                          CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, location, st);
}

int
mm_range_last_prefetch(mm_driver *cu, mm_range range, CUmemLocation *location, mm_status *st)
{
    return query_location(cu, range, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                          CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, location, st);
}

/* Devices and host: a driver fills a shorter list with an unspecified choice of the members. */
size_t
mm_accessed_by_capacity(const mm_driver *cu)
{
    assert(cu->device_count >= 1 && cu->device_count <= MM_MAX_DEVICES);
    return (size_t)cu->device_count + 1;
}

mm_location_set
mm_accessed_by_set(const int *ordinals, size_t count)
{
    mm_location_set set = 0;

    assert(count <= MM_MAX_DEVICES + 1);
    for (size_t i = 0; i < count; i++) {
        if (ordinals[i] == CU_DEVICE_CPU) {
            set |= mm_location_bit(mm_host());
        } else if (ordinals[i] >= 0) {
            set |= mm_location_bit(mm_location(CU_MEM_LOCATION_TYPE_DEVICE, ordinals[i]));
        }
    }
    return set;
}

MM_GUARD_ARRAYS int
mm_range_accessed_by(mm_driver *cu, mm_range range, mm_location_set *set, mm_status *st)
{
    int ordinals[MM_MAX_DEVICES + 1];
    size_t count = mm_accessed_by_capacity(cu);
    mm_location_set left;
    CUmemLocation location;

    *set = 0;
    if (range.size == 0) {
        return 0;
    }
    if (query_range_attribute(cu, range, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, ordinals, count, st)
        < 0) {
        return -1;
    }
    *set = left = mm_accessed_by_set(ordinals, count);
    while (mm_next_location(&left, &location)) {
        bool whole;
        if (check_everywhere(cu, range, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, location, &whole, st)
            < 0) {
            return -1;
        }
        *set &= whole ? *set : ~mm_location_bit(location);
    }
    return 0;
}
