/* page_residency.c: the places of pages, from the host's page map and from the driver: its answers
 * where it has cuMemGetLocationInfo (CUDA 13.4), else its records of prefetches. */
#include "page_residency.h"

#include <assert.h>
#include <stdlib.h>

#include "driver_records.h"
#include "growth.h"

/* What the reading of one range works with. */
typedef struct {
    mm_driver *cu;
    mm_places *places;
    mm_range range;
    mm_range_places *out;
    CUmemLocation *answers; /* space for MOST_ANSWERS of one call; NULL if the driver gives none */
} place_reader;

enum { MOST_ANSWERS = 4096 };

static mm_span
span_of(mm_range range)
{
    return (mm_span){range.start, mm_range_end(range)};
}

/* --- runs ------------------------------------------------------------------------------- */

static bool
continues(const mm_place_run *last, const mm_place_run *run)
{
    return last->place == run->place && last->hint == run->hint && last->evidence == run->evidence;
}

static int
append_run(mm_range_places *out, const mm_place_run *run, mm_status *st)
{
    mm_place_run *last = out->count > 0 ? &out->run[out->count - 1] : NULL;

    assert(run->size > 0);
    assert(last == NULL ? run->offset == 0 : run->offset == last->offset + last->size);
    out->on_host += run->place == MM_PLACE_HOST ? run->size : 0;
    if (last != NULL && continues(last, run)) {
        last->size += run->size;
        return 0;
    }
    out->run = mm_grow(out->run, &out->capacity, out->count + 1, sizeof *out->run, st);
    if (out->capacity == out->count) {
        return -1;
    }
    out->run[out->count++] = *run;
    return 0;
}

/* Appends the pages of a span, which lies inside the range. */
static int
append_places(const place_reader *reader, mm_span pages, mm_place_run run, mm_status *st)
{
    run.offset = pages.start - reader->range.start;
    run.size = pages.end - pages.start;
    return append_run(reader->out, &run, st);
}

/* The part of a span up to the next multiple of `step`. */
static mm_span
next_part(mm_span rest, uint64_t step)
{
    uint64_t end = rest.start / step * step + step;

    return (mm_span){rest.start, end < rest.end ? end : rest.end};
}

/* --- the last prefetch ------------------------------------------------------------------ */

/* The hint of a destination; 0 for none, and for more destinations than any system has. */
static uint8_t
hint_of(mm_places *places, CUmemLocation location)
{
    size_t i = 0;

    if (location.type == CU_MEM_LOCATION_TYPE_INVALID) {
        return 0;
    }
    while (i < places->hint_count && !mm_same_location(places->hint[i], location)) {
        i++;
    }
    if (i == places->hint_count) {
        if (i == MM_MOST_HINTS) {
            return 0;
        }
        places->hint[places->hint_count++] = location;
    }
    return (uint8_t)(i + 1);
}

/* Queries the place of pages that the host has not mapped. A prefetch says only where pages were
 * sent, so it never makes "on a device" of "not on the host". The driver names a destination only
 * if all pages share it. In the caller's scope. */
static int
query_prefetch(const place_reader *reader, mm_span pages, mm_place_run *run, mm_status *st)
{
    mm_range range = {pages.start, (size_t)(pages.end - pages.start), reader->range.allocation};
    int answers[] = {CU_MEM_LOCATION_TYPE_INVALID, 0};
    CUmemLocation location;
    mm_query_failure failure = {CUDA_SUCCESS, "cuMemRangeGetAttributes"};
    bool all = true;

    *run = (mm_place_run){.place = MM_PLACE_NOT_HOST, .evidence = MM_BY_PAGE_MAP};
    failure.code = mm_range_query_location(
        reader->cu, range, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE, answers);
    location = mm_location_from_attributes(reader->cu->device_count, answers[0], answers[1]);
    if (failure.code == CUDA_SUCCESS && (int)location.type != CU_MEM_LOCATION_TYPE_INVALID) {
        mm_record r = {CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, location};
        all = mm_record_is_everywhere(reader->cu, range, r, &failure);
    }
    if (failure.code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, failure.function, (int)failure.code);
        (void)mm_range_diagnose(reader->cu, reader->range, mm_host(), MM_QUERY, st);
        return -1;
    }
    if (!all) {
        return 0;
    }
    run->hint = hint_of(reader->places, location);
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        run->evidence = MM_BY_PAGE_MAP_AND_PREFETCH;
    }
    return 0;
}

/* Appends pages that are not mapped, with a query for each part between multiples of `step`. */
static int
append_by_parts(const place_reader *reader, mm_span pages, uint64_t step, mm_status *st)
{
    while (pages.start < pages.end) {
        mm_span part = next_part(pages, step);
        mm_place_run run;
        if (query_prefetch(reader, part, &run, st) < 0
            || append_places(reader, part, run, st) < 0) {
            return -1;
        }
        pages.start = part.end;
    }
    return 0;
}

/* Appends pages that are not mapped: by one query for all of them if it names a destination, else
 * by a query for each block of 2 MiB. */
static int
append_with_hints(const place_reader *reader, mm_span pages, mm_status *st)
{
    enum { BLOCK = 2 << 20 };
    mm_place_run run;

    if (query_prefetch(reader, pages, &run, st) < 0) {
        return -1;
    }
    return run.hint != 0 || pages.end - pages.start <= mm_page_size()
               ? append_places(reader, pages, run, st)
               : append_by_parts(reader, pages, BLOCK, st);
}

static bool
is_unexplained(const mm_place_run *run)
{
    return run->place == MM_PLACE_NOT_HOST && run->hint == 0 && run->evidence != MM_BY_DRIVER;
}

/* The driver answers "none" both if no page was prefetched and if the pages differ; only the
 * answer for a single page is exact. So each page without a hint is queried, if such pages are
 * few. */
static int
ask_for_pages(const place_reader *reader, mm_status *st)
{
    enum { MOST_PAGES = 1024 };
    mm_range_places *coarse = reader->out, exact = {.run = NULL};
    place_reader asking = {reader->cu, reader->places, reader->range, &exact, NULL};
    uint64_t bytes = 0;
    int rc = 0;

    for (size_t i = 0; i < coarse->count; i++) {
        bytes += is_unexplained(&coarse->run[i]) ? coarse->run[i].size : 0;
    }
    if (bytes == 0 || bytes > MOST_PAGES * (uint64_t)mm_page_size()) {
        return 0;
    }
    for (size_t i = 0; rc == 0 && i < coarse->count; i++) {
        uint64_t start = reader->range.start + coarse->run[i].offset;
        mm_span pages = {start, start + coarse->run[i].size};
        rc = is_unexplained(&coarse->run[i]) ? append_by_parts(&asking, pages, mm_page_size(), st)
                                             : append_run(&exact, &coarse->run[i], st);
    }
    free(coarse->run);
    coarse->run = exact.run;
    coarse->count = exact.count;
    coarse->capacity = exact.capacity;
    return rc;
}

/* --- the driver's answers --------------------------------------------------------------- */

/* Types of locations that the oldest supported headers lack. */
enum { TYPE_DEVICE_DOMAIN = 6 };

/* If the answer is a device that this process does not see, the place is only "not on the host". */
static mm_place_run
answered_place(const place_reader *reader, CUmemLocation answer)
{
    mm_place_run run = {.place = MM_PLACE_NOT_HOST, .evidence = MM_BY_DRIVER};

    switch ((int)answer.type) {
    case CU_MEM_LOCATION_TYPE_NONE:
        run.place = MM_PLACE_NOWHERE;
        break;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        run.place = MM_PLACE_HOST;
        break;
    case TYPE_DEVICE_DOMAIN: /* its first byte is the device, its second the part */
        answer = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, answer.id & 0xff);
        /* fall through */
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (answer.id >= 0 && answer.id < reader->cu->device_count) {
            run.place = MM_PLACE_DEVICE;
            run.hint = hint_of(reader->places, answer);
        }
        break;
    default:
        break;
    }
    return run;
}

/* Appends pages by one call that gives an answer for each page. Each answer comes from one sample
 * in its page, so it is exact. Returns 1 if this system does not support the call. */
static int
append_answers(const place_reader *reader, mm_span pages, mm_status *st)
{
    size_t size = (size_t)(pages.end - pages.start), page = mm_page_size();
    size_t step = size < page ? size : page;
    CUresult code;
    int rc = 0;

    assert(mm_in_scope() && size <= MOST_ANSWERS * page);
    code = reader->cu->MemGetLocationInfo(pages.start, size, step, step, reader->answers);
    if (code == CUDA_ERROR_NOT_SUPPORTED) {
        return 1;
    }
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemGetLocationInfo", (int)code);
        return mm_range_diagnose(reader->cu, reader->range, mm_host(), MM_LOCATE, st);
    }
    for (size_t i = 0; rc == 0 && pages.start < pages.end; i++) {
        mm_span one = next_part(pages, page);
        rc = append_places(reader, one, answered_place(reader, reader->answers[i]), st);
        pages.start = one.end;
    }
    return rc;
}

static int
refuse_coherent(mm_status *st)
{
    return mm_fail(st, MM_UNSUPPORTED,
                   "residency() does not support devices with "
                   "direct_managed_mem_access_from_host with this driver: the host maps pages "
                   "there that are in device memory, so the page map does not show where they "
                   "are, and cuMemGetLocationInfo of CUDA 13.4 is missing or does not work here");
}

/* Appends pages that the host has not mapped, or of which its page map says nothing. Each part,
 * except perhaps the first, begins at a page border, so that each answer is about one page. */
static int
append_absent(place_reader *reader, mm_span pages, mm_status *st)
{
    while (reader->answers != NULL && pages.start < pages.end) {
        uint64_t page = mm_page_size();
        mm_span part = next_part(pages, pages.start % page ? page : MOST_ANSWERS * page);
        int rc = append_answers(reader, part, st);
        if (rc < 0) {
            return rc;
        }
        if (rc > 0) {
            reader->answers = NULL;
        } else {
            pages.start = part.end;
        }
    }
    if (pages.start == pages.end) {
        return 0;
    }
    return reader->cu->direct_host_access ? refuse_coherent(st)
                                          : append_with_hints(reader, pages, st);
}

/* --- ranges ----------------------------------------------------------------------------- */

/* Appends the runs of a range. The mapped pages have a copy on the host for certain. */
static int
append_all(place_reader *reader, const mm_spans *mapped, mm_status *st)
{
    const mm_place_run on_host = {.place = MM_PLACE_HOST, .evidence = MM_BY_PAGE_MAP};
    mm_span rest = span_of(reader->range);
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < mapped->count; i++) {
        mm_span pages = mm_span_inside(mapped->span[i], rest);
        if (rest.start < pages.start) {
            rc = append_absent(reader, (mm_span){rest.start, pages.start}, st);
        }
        if (rc == 0) {
            rc = append_places(reader, pages, on_host, st);
        }
        rest.start = pages.end;
    }
    if (rc == 0 && rest.start < rest.end) {
        rc = append_absent(reader, rest, st);
    }
    return rc < 0 ? rc : ask_for_pages(reader, st);
}

/* Counts the bytes on each node of a machine with several nodes. If the process may not ask,
 * node_bytes stays NULL. */
static int
count_nodes_of(place_reader *reader, const mm_spans *mapped, mm_pagemap_source *source,
               mm_status *st)
{
    uint64_t *bytes = calloc(MM_MOST_NODES, sizeof *bytes);

    if (bytes == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for the bytes of NUMA nodes");
    }
    if (!mm_pagemap_count_nodes(source, mapped, span_of(reader->range), bytes)) {
        free(bytes);
        bytes = NULL;
    }
    reader->out->node_bytes = bytes;
    return 0;
}

static bool
covers(const mm_spans *mapped, mm_span pages)
{
    return mapped->count == 1 && mapped->span[0].start == pages.start
           && mapped->span[0].end == pages.end;
}

/* A capture allows queries of records. Nothing says that it allows cuMemGetLocationInfo, so the
 * scope of that call is relaxed. */
static int
ask_driver(place_reader *reader, const mm_spans *mapped, mm_status *st)
{
    int rc;

    MM_RUN_IN(rc, reader->answers != NULL ? mm_scope_enter_relaxed : mm_scope_enter, MM_ANY_DEVICE,
              reader->cu, st, append_all(reader, mapped, st));
    return rc;
}

/* The driver is asked only about pages that are not mapped. */
static int
read_places(place_reader *reader, mm_pagemap *map, mm_status *st)
{
    uint64_t page = mm_page_size(), end = mm_range_end(reader->range);
    mm_span pages = {reader->range.start / page * page, (end + page - 1) / page * page};
    mm_spans mapped = {0};
    int rc;

    if (reader->cu->direct_host_access) {
        return ask_driver(reader, &mapped, st);
    }
    rc = mm_pagemap_read(map, pages, &mapped, st);
    if (rc == 0) {
        rc = covers(&mapped, pages) ? append_all(reader, &mapped, st)
                                    : ask_driver(reader, &mapped, st);
    }
    if (rc == 0 && mm_pagemap_has_nodes(map->source)) {
        rc = count_nodes_of(reader, &mapped, map->source, st);
    }
    mm_spans_free(&mapped);
    return rc;
}

static int
check_system(const mm_driver *cu, mm_status *st)
{
    if (!cu->concurrent_access) {
        return mm_fail(st, MM_UNSUPPORTED,
                       "residency() needs concurrent_managed_access of every device: without it "
                       "pages move as a whole at launches, and the page map says nothing");
    }
    return cu->direct_host_access && cu->MemGetLocationInfo == NULL ? refuse_coherent(st) : 0;
}

static int
read_ranges(mm_driver *cu, mm_pagemap_source *source, const mm_batch *ranges, mm_places *out,
            mm_status *st)
{
    CUmemLocation *answers = NULL;
    mm_pagemap map;
    int rc = 0;

    if (check_system(cu, st) < 0
        || (!cu->direct_host_access && mm_pagemap_open(&map, source, st) < 0)) {
        return -1;
    }
    if (cu->MemGetLocationInfo != NULL) {
        answers = malloc(MOST_ANSWERS * sizeof *answers);
        rc = answers ? 0 : mm_fail(st, MM_NO_MEMORY, "out of host memory for places of pages");
    }
    for (size_t i = 0; rc == 0 && i < ranges->count; i++) {
        mm_range_places one = {.run = NULL};
        place_reader reader = {cu, out, ranges->transfers[i].range, &one, answers};
        rc = reader.range.size > 0 ? read_places(&reader, &map, st) : 0;
        out->range[i] = one;
    }
    free(answers);
    if (!cu->direct_host_access) {
        mm_pagemap_close(&map);
    }
    return rc;
}

int
mm_places_read(mm_driver *cu, mm_pagemap_source *source, const mm_batch *ranges, mm_places *out,
               mm_status *st)
{
    size_t empty = 0;

    out->hint_count = out->count = 0;
    out->range = calloc(ranges->count + 1, sizeof *out->range);
    if (out->range == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", ranges->count);
    }
    out->count = ranges->count;
    for (size_t i = 0; i < ranges->count; i++) {
        empty += ranges->transfers[i].range.size == 0;
    }
    return empty == ranges->count ? 0 : read_ranges(cu, source, ranges, out, st);
}

void
mm_places_free(mm_places *places)
{
    for (size_t i = 0; i < places->count; i++) {
        free(places->range[i].run);
        free(places->range[i].node_bytes);
    }
    free(places->range);
    places->range = NULL;
    places->count = 0;
}
