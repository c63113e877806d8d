/* driver_records.c: what the driver has recorded for the pages of a range: advice, and the last
 * prefetch.
 *
 * Driver 580 keeps adjacent pages with equal records as one node. A query starts at the node of its
 * first page, and advances by the length of each node. So a query that begins inside a node passes
 * over pages behind that node (conformance: queries of records). It can then say that all pages
 * have a record that some pages lack, but never the reverse. So the answer that all pages have a
 * record counts only if the query begins where a node begins, or is of one page. */
#include "driver_records.h"

#include <assert.h>

/* --- one query -------------------------------------------------------------------------- */

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

static CUresult
query_numbers(mm_driver *cu, mm_range range, CUmem_range_attribute attribute, int *out,
              size_t count)
{
    assert(mm_in_scope());
    return cu->MemRangeGetAttribute(out, count * sizeof *out, attribute, range.start, range.size);
}

/* All devices and the host: a driver fills a shorter list with an unspecified choice of members. */
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

MM_GUARD_ARRAYS static CUresult
query_members(mm_driver *cu, mm_range range, mm_location_set *members)
{
    size_t count = mm_accessed_by_capacity(cu);
    int ordinals[MM_MAX_DEVICES + 1];
    CUresult code = query_numbers(cu, range, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, ordinals, count);

    *members = code == CUDA_SUCCESS ? mm_accessed_by_set(ordinals, count) : 0;
    return code;
}

/* A device is queried as one number. That number does not distinguish the kinds of host, so these
 * are queried by type. The id of HOST is not compared, because drivers record it in two forms. */
static CUresult
query_location_is(mm_driver *cu, mm_range range, mm_record r, bool *is)
{
    CUmem_range_attribute type = r.attribute == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION
                                     ? CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE
                                     : CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE;
    int answers[2] = {0};
    CUresult code;

    switch ((int)r.location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        code = query_numbers(cu, range, r.attribute, answers, 1);
        *is = answers[0] == r.location.id;
        return code;
    case CU_MEM_LOCATION_TYPE_HOST:
        code = query_numbers(cu, range, type, answers, 1);
        *is = answers[0] == CU_MEM_LOCATION_TYPE_HOST;
        return code;
    default:
        code = mm_range_query_location(cu, range, type, answers);
        *is = answers[0] == (int)r.location.type && answers[1] == r.location.id;
        return code;
    }
}

static CUresult
query_record(mm_driver *cu, mm_range range, mm_record r, bool *has)
{
    mm_location_set members;
    CUresult code;
    int on = 0;

    assert(range.size > 0);
    switch (r.attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        code = query_numbers(cu, range, r.attribute, &on, 1);
        *has = on != 0;
        return code;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
        code = query_members(cu, range, &members);
        *has = (members & mm_location_bit(r.location)) != 0;
        return code;
    default:
        assert(r.attribute == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION
               || r.attribute == CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION);
        return query_location_is(cu, range, r, has);
    }
}

/* --- all pages -------------------------------------------------------------------------- */

/* A search for pages without a record. After a failed query, all pages count as having it. */
typedef struct {
    mm_driver *cu;
    mm_record record;
    CUresult code; /* of the first query that failed */
} record_search;

/* The driver function that query_record() calls. */
static const char *
query_name(mm_record r)
{
    return mm_is_numa_host(r.location) ? "cuMemRangeGetAttributes" : "cuMemRangeGetAttribute";
}

static bool
have(record_search *s, mm_range range)
{
    bool answer = true;

    if (s->code == CUDA_SUCCESS) {
        s->code = query_record(s->cu, range, s->record, &answer);
    }
    return s->code != CUDA_SUCCESS || answer;
}

static CUdeviceptr
page_of(CUdeviceptr address)
{
    return address / mm_page_size() * mm_page_size();
}

/* The range from an address to the end of another range. */
static mm_range
rest_from(mm_range range, CUdeviceptr start)
{
    return (mm_range){start, (size_t)(mm_range_end(range) - start), range.allocation};
}

/* The part of a page that belongs to an allocation, which may start inside the page. */
static mm_range
one_page(CUdeviceptr page, CUdeviceptr allocation)
{
    CUdeviceptr start = page > allocation ? page : allocation;

    return (mm_range){start, (size_t)(page + mm_page_size() - start), allocation};
}

/* True in the first page of an allocation that starts with a block, because a node begins there.
 * Small allocations can start inside a block, and share nodes with their neighbours. */
static inline bool
begins_block(CUdeviceptr address, CUdeviceptr allocation)
{
    enum { BLOCK = 2 << 20 };

    return allocation % BLOCK == 0
           && (address == allocation || address - allocation < mm_page_size());
}

/* True if a node is known to begin at the start of the range, whose first page has the record: a
 * block begins there, or the page before lacks the record. That page can belong to a neighbour in
 * the block. */
static bool
begins_node(record_search *s, mm_range range)
{
    CUdeviceptr page = page_of(range.start);
    mm_range before = {page - mm_page_size(), mm_page_size(), range.allocation};
    bool has = true;
    CUresult code;

    if (begins_block(range.start, range.allocation)) {
        return true;
    }
    if (page > range.allocation) {
        return !have(s, one_page(before.start, range.allocation));
    }
    code = query_record(s->cu, before, s->record, &has);
    /* A query of freed memory fails, which says nothing about the range. */
    if (code != CUDA_ERROR_INVALID_VALUE && s->code == CUDA_SUCCESS) {
        s->code = code;
    }
    return code == CUDA_SUCCESS && !has;
}

/* Queries each page, and returns the first that lacks the record, or the end of the range. */
static CUdeviceptr
scan_for_record(record_search *s, mm_range range)
{
    CUdeviceptr end = mm_range_end(range);

    while (range.start < end) {
        mm_range page = mm_first_page(range);
        if (!have(s, page)) {
            return page.start;
        }
        range = rest_from(range, mm_range_end(page));
    }
    return end;
}

/* The first page that lacks the record, of a range that has such a page and begins where a node
 * begins. */
static CUdeviceptr
bisect_pages(record_search *s, mm_range range)
{
    CUdeviceptr from = range.start, to = mm_range_end(range);

    for (;;) {
        CUdeviceptr middle = page_of(from + (to - from) / 2);
        if (middle <= from) {
            middle = page_of(from) + mm_page_size();
        }
        if (middle >= to) {
            return from;
        }
        range.size = (size_t)(middle - range.start);
        if (have(s, range)) {
            from = middle;
        } else {
            to = middle;
        }
    }
}

/* Bisects from a page that lacks the record to a later page that has it. Returns a page that has
 * the record right behind a page that lacks it. */
static CUdeviceptr
bisect_border(record_search *s, CUdeviceptr lacks, CUdeviceptr has, CUdeviceptr allocation)
{
    while (has - lacks > mm_page_size()) {
        CUdeviceptr middle = page_of(lacks + (has - lacks) / 2);
        if (have(s, one_page(middle, allocation))) {
            has = middle;
        } else {
            lacks = middle;
        }
    }
    return has;
}

/* Looks back from a range whose first page has the record, twice as far each time. Returns a page
 * that has the record right behind a page that lacks it, or the first page of the allocation if all
 * pages on the way that were queried have the record. */
static CUdeviceptr
nearest_border(record_search *s, mm_range range)
{
    CUdeviceptr first = page_of(range.allocation), start = page_of(range.start), has = start;

    for (CUdeviceptr distance = mm_page_size(); has > first; distance *= 2) {
        CUdeviceptr page = distance < start - first ? start - distance : first;
        if (!have(s, one_page(page, range.allocation))) {
            return bisect_border(s, page, has, range.allocation);
        }
        has = page;
    }
    return first;
}

/* Extends a range whose first page has the record back to where a node begins. False if no node is
 * known to begin at the nearest border, or if a page between the border and the range lacks the
 * record. */
static bool
extend_to_node(record_search *s, mm_range *range)
{
    mm_range before = one_page(nearest_border(s, *range), range->allocation);

    before.size = (size_t)(range->start - before.start);
    if (!begins_node(s, rest_from(*range, before.start))
        || (before.size > 0 && !have(s, before))) {
        return false;
    }
    *range = rest_from(*range, before.start);
    return true;
}

/* True if all pages have the record. One query of the range has said so, but may have passed over
 * pages. */
static MM_COLD bool
have_all(record_search *s, mm_range range)
{
    mm_range whole = rest_from(range, range.allocation);

    if (page_of(range.start) == page_of(mm_range_end(range) - 1) || begins_node(s, range)
        || (begins_block(whole.start, whole.allocation) && have(s, whole))) {
        return true;
    }
    return extend_to_node(s, &range) ? have(s, range)
                                     : scan_for_record(s, range) == mm_range_end(range);
}

bool
mm_query_is_exact(mm_range range)
{
    return range.allocation == 0 || begins_block(range.start, range.allocation);
}

bool
mm_record_is_everywhere(mm_driver *cu, mm_range range, mm_record r, mm_query_failure *failure)
{
    record_search s = {cu, r, CUDA_SUCCESS};
    bool all = mm_query_is_exact(range) || have_all(&s, range);

    *failure = (mm_query_failure){s.code, query_name(r)};
    return all;
}

bool
mm_is_recorded(mm_driver *cu, mm_range range, mm_record r)
{
    record_search s = {cu, r, CUDA_SUCCESS};
    bool has = true;

    if (query_record(cu, range, r, &has) != CUDA_SUCCESS) {
        return true;
    }
    return has && (mm_query_is_exact(range) || have_all(&s, range));
}

CUdeviceptr
mm_first_without_record(mm_driver *cu, mm_range range, mm_record r)
{
    record_search s = {cu, r, CUDA_SUCCESS};
    mm_range more = range;
    CUdeviceptr found = range.start;

    if (have(&s, mm_first_page(range))) {
        found = extend_to_node(&s, &more) ? bisect_pages(&s, more) : scan_for_record(&s, range);
    }
    /* The result is outside the range if another thread has changed the records. */
    return found - range.start < range.size ? found : range.start;
}

/* --- queries ---------------------------------------------------------------------------- */

static int
fail_query(mm_driver *cu, mm_range range, const mm_query_failure *failure, mm_status *st)
{
    (void)mm_fail_call(st, failure->function, (int)failure->code);
    return mm_range_diagnose(cu, range, mm_host(), MM_QUERY, st);
}

int
mm_range_read_mostly(mm_driver *cu, mm_range range, bool *on, mm_status *st)
{
    mm_record r = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, mm_host()};
    mm_query_failure failure = {CUDA_SUCCESS, query_name(r)};
    mm_scope scope;

    *on = false;
    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    failure.code = query_record(cu, range, r, on);
    if (failure.code == CUDA_SUCCESS && *on) {
        *on = mm_record_is_everywhere(cu, range, r, &failure);
    }
    mm_scope_leave(&scope);
    return failure.code == CUDA_SUCCESS ? 0 : fail_query(cu, range, &failure, st);
}

/* Queries again if the record changed between the driver's reads of type and id. */
static void
query_location(mm_driver *cu, mm_range range, CUmem_range_attribute attribute,
               CUmem_range_attribute type, CUmemLocation *location, mm_query_failure *failure)
{
    enum { MOST_QUERIES = 8 };
    int answers[] = {CU_MEM_LOCATION_TYPE_INVALID, 0}, queries = 0;
    bool all = true;

    *failure = (mm_query_failure){CUDA_SUCCESS, "cuMemRangeGetAttributes"};
    do {
        failure->code = mm_range_query_location(cu, range, type, answers);
        *location = mm_location_from_attributes(cu->device_count, answers[0], answers[1]);
    } while (failure->code == CUDA_SUCCESS && (int)location->type != answers[0]
             && ++queries < MOST_QUERIES);
    if (failure->code == CUDA_SUCCESS && (int)location->type != CU_MEM_LOCATION_TYPE_INVALID) {
        all = mm_record_is_everywhere(cu, range, (mm_record){attribute, *location}, failure);
    }
    if (!all) {
        *location = mm_location(CU_MEM_LOCATION_TYPE_INVALID, 0);
    }
}

static int
read_location(mm_driver *cu, mm_range range, CUmem_range_attribute attribute,
              CUmem_range_attribute type, CUmemLocation *location, mm_status *st)
{
    mm_query_failure failure;
    mm_scope scope;

    *location = mm_location(CU_MEM_LOCATION_TYPE_INVALID, 0);
    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    query_location(cu, range, attribute, type, location, &failure);
    mm_scope_leave(&scope);
    return failure.code == CUDA_SUCCESS ? 0 : fail_query(cu, range, &failure, st);
}

int
mm_range_preferred_location(mm_driver *cu, mm_range range, CUmemLocation *location, mm_status *st)
{
    return read_location(cu, range, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
                         CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, location, st);
}

int
mm_range_last_prefetch(mm_driver *cu, mm_range range, CUmemLocation *location, mm_status *st)
{
    return read_location(cu, range, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                         CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, location, st);
}

CUresult
mm_recorded_members(mm_driver *cu, mm_range range, mm_location_set *members)
{
    mm_query_failure failure = {query_members(cu, range, members), NULL};
    mm_location_set left = *members;
    CUmemLocation location;

    while (failure.code == CUDA_SUCCESS && mm_next_location(&left, &location)) {
        mm_record r = {CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, location};
        if (!mm_record_is_everywhere(cu, range, r, &failure)) {
            *members &= ~mm_location_bit(location);
        }
    }
    if (failure.code != CUDA_SUCCESS) {
        *members = 0;
    }
    return failure.code;
}

int
mm_range_accessed_by(mm_driver *cu, mm_range range, mm_location_set *set, mm_status *st)
{
    mm_query_failure failure = {CUDA_SUCCESS, "cuMemRangeGetAttribute"};

    *set = 0;
    if (range.size == 0) {
        return 0;
    }
    MM_RUN_IN(failure.code, mm_scope_enter, MM_ANY_DEVICE, cu, st,
              mm_recorded_members(cu, range, set));
    return failure.code == CUDA_SUCCESS ? 0 : fail_query(cu, range, &failure, st);
}
