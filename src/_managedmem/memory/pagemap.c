/* pagemap.c: reads the kernel's page map of this process: PAGEMAP_SCAN, which answers with runs,
 * or the entries of /proc/self/pagemap. */
#include "pagemap.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "growth.h"
#include "range.h"

static const char page_map[] = "/proc/self/pagemap";
static const char nodes_with_memory[] = "/sys/devices/system/node/has_memory";

/* --- the kernel ------------------------------------------------------------------------- */

static int
open_to_read(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC);
}

static int
call_ioctl(int file, unsigned long request, void *argument)
{
    return ioctl(file, request, argument);
}

/* Without destinations, move_pages moves nothing and reports the nodes of the pages. */
static long
ask_for_nodes(unsigned long count, void **pages, int *nodes)
{
    return syscall(SYS_move_pages, 0, count, pages, NULL, nodes, 0);
}

static const mm_pagemap_calls kernel_calls = {open_to_read, call_ioctl, pread, close,
                                              ask_for_nodes};

mm_pagemap_source mm_kernel_pagemap = {.calls = &kernel_calls};

/* --- spans ------------------------------------------------------------------------------ */

void
mm_spans_free(mm_spans *spans)
{
    free(spans->span);
    *spans = (mm_spans){0};
}

static int
append_span(mm_spans *spans, mm_span one, mm_status *st)
{
    assert(one.start < one.end);
    assert(spans->count == 0 || spans->span[spans->count - 1].end <= one.start);
    if (spans->count > 0 && spans->span[spans->count - 1].end == one.start) {
        spans->span[spans->count - 1].end = one.end;
        return 0;
    }
    spans->span =
        mm_grow(spans->span, &spans->capacity, spans->count + 1, sizeof *spans->span, st);
    if (spans->capacity == spans->count) {
        return -1;
    }
    spans->span[spans->count++] = one;
    return 0;
}

/* --- PAGEMAP_SCAN ----------------------------------------------------------------------- */

/* Structures of linux/fs.h, which older systems lack. */
typedef struct {
    uint64_t start, end, categories;
} scan_region;

typedef struct {
    uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
    uint64_t category_inverted, category_mask, category_any_mask, return_mask;
} scan_argument;

_Static_assert(sizeof(scan_region) == 24 && sizeof(scan_argument) == 96, "not the kernel's");

#define PAGEMAP_SCAN_REQUEST _IOWR('f', 16, scan_argument)
#define CATEGORY_PRESENT ((uint64_t)1 << 3)

enum { REGIONS = 512 }; /* as many as the kernel gathers at a time */

/* A kernel with the scan gives regions in order and inside the range. If others are found, the call
 * counts as failed. */
static bool
is_region_inside(const scan_region *region, uint64_t from, uint64_t end)
{
    return region->start >= from && region->start < region->end && region->end <= end;
}

typedef enum { SCANNED, NOT_SCANNED, SCAN_FAILED } scan_result;

/* A request ends early when its regions are used up; the next request goes on from there.
 * NOT_SCANNED leaves the rest, from *start on, to read_entries. */
MM_GUARD_ARRAYS static scan_result
scan_pages(const mm_pagemap *map, uint64_t *start, uint64_t end, mm_spans *mapped, mm_status *st)
{
    scan_region regions[REGIONS] = {{0}};
    scan_argument request = {.size = sizeof request,
                             .end = end,
                             .regions = (uint64_t)(uintptr_t)regions,
                             .region_count = REGIONS,
                             .category_mask = CATEGORY_PRESENT,
                             .return_mask = CATEGORY_PRESENT};

    while (*start < end) {
        int count;
        request.start = *start;
        request.walk_end = 0;
        errno = 0;
        count = map->source->calls->ioctl(map->file, PAGEMAP_SCAN_REQUEST, &request);
        if (count < 0 || count > REGIONS || request.walk_end <= *start || request.walk_end > end) {
            return NOT_SCANNED;
        }
        for (int i = 0; i < count; i++) {
            if (!is_region_inside(&regions[i], *start, request.walk_end)) {
                return NOT_SCANNED;
            }
            if (append_span(mapped, (mm_span){regions[i].start, regions[i].end}, st) < 0) {
                return SCAN_FAILED;
            }
            *start = regions[i].end;
        }
        *start = request.walk_end;
    }
    return SCANNED;
}

/* --- entries ---------------------------------------------------------------------------- */

#define ENTRY_PRESENT ((uint64_t)1 << 63)

enum { ENTRIES = 2048 };

/* Appends the mapped pages of `count` pages from start on. */
static int
append_entries(const uint64_t *entries, size_t count, uint64_t start, mm_spans *mapped,
               mm_status *st)
{
    size_t page = mm_page_size();

    for (size_t i = 0; i < count; i++) {
        size_t first = i;
        while (i < count && (entries[i] & ENTRY_PRESENT) != 0) {
            i++;
        }
        if (i > first
            && append_span(mapped, (mm_span){start + first * page, start + i * page}, st) < 0) {
            return -1;
        }
    }
    return 0;
}

MM_GUARD_ARRAYS static int
read_entries(const mm_pagemap *map, uint64_t start, uint64_t end, mm_spans *mapped, mm_status *st)
{
    uint64_t entries[ENTRIES];
    size_t page = mm_page_size();

    while (start < end) {
        size_t count = (size_t)(end - start) / page;
        ssize_t size;
        count = count < ENTRIES ? count : ENTRIES;
        errno = 0;
        size = map->source->calls->pread(map->file, entries, count * sizeof *entries,
                                         (off_t)(start / page * sizeof *entries));
        if (size < 0 && errno == EINTR) {
            continue;
        }
        if (size < (ssize_t)sizeof *entries || (size_t)size > count * sizeof *entries) {
            return mm_fail_file(st, page_map, size < 0 && errno != 0 ? errno : EIO);
        }
        count = (size_t)size / sizeof *entries;
        if (append_entries(entries, count, start, mapped, st) < 0) {
            return -1;
        }
        start += count * page;
    }
    return 0;
}

/* --- the page map ----------------------------------------------------------------------- */

int
mm_pagemap_open(mm_pagemap *map, mm_pagemap_source *source, mm_status *st)
{
    map->source = source;
    do {
        map->file = source->calls->open(page_map);
    } while (map->file < 0 && errno == EINTR);
    return map->file >= 0 ? 0 : mm_fail_file(st, page_map, errno);
}

void
mm_pagemap_close(mm_pagemap *map)
{
    assert(map->file >= 0);
    (void)map->source->calls->close(map->file); /* nothing was written */
    map->file = -1;
}

int
mm_pagemap_read(mm_pagemap *map, mm_span range, mm_spans *mapped, mm_status *st)
{
    uint64_t at = range.start;

    assert(range.start % mm_page_size() == 0 && range.end % mm_page_size() == 0);
    if (!atomic_load_explicit(&map->source->lacks_scan, memory_order_relaxed)) {
        scan_result result = scan_pages(map, &at, range.end, mapped, st);
        if (result != NOT_SCANNED) {
            return result == SCANNED ? 0 : -1;
        }
        /* Kernels without the scan fail with one of these codes. Other failures, such as a lack of
         * memory, may not last. */
        if (errno == ENOTTY || errno == EINVAL) {
            atomic_store_explicit(&map->source->lacks_scan, true, memory_order_relaxed);
        }
    }
    return read_entries(map, at, range.end, mapped, st);
}

/* --- NUMA nodes ------------------------------------------------------------------------- */

/* The kernel lists nodes as in "0" or "0-1,4". */
static mm_node_count
count_nodes(const mm_pagemap_calls *calls)
{
    char text[256];
    int file = calls->open(nodes_with_memory);
    ssize_t size;

    if (file < 0) {
        return MM_ONE_NODE;
    }
    size = calls->pread(file, text, sizeof text, 0);
    (void)calls->close(file); /* nothing was written */
    return size > 0
                   && (memchr(text, '-', (size_t)size) != NULL
                       || memchr(text, ',', (size_t)size) != NULL)
               ? MM_SEVERAL_NODES
               : MM_ONE_NODE;
}

bool
mm_pagemap_has_nodes(mm_pagemap_source *source)
{
    int nodes = atomic_load_explicit(&source->nodes, memory_order_relaxed);

    if (nodes == MM_NODES_UNKNOWN) {
        nodes = (int)count_nodes(source->calls);
        atomic_store_explicit(&source->nodes, nodes, memory_order_relaxed);
    }
    return nodes == MM_SEVERAL_NODES;
}

mm_span
mm_span_inside(mm_span span, mm_span limits)
{
    return (mm_span){span.start > limits.start ? span.start : limits.start,
                     span.end < limits.end ? span.end : limits.end};
}

enum { PAGES_ASKED = 512 };

/* The pages of one call, and the bytes to count for each page. */
typedef struct {
    void *page[PAGES_ASKED];
    int node[PAGES_ASKED];
    uint64_t amount[PAGES_ASKED];
    size_t count;
} node_query;

static bool
ask_nodes(const mm_pagemap_calls *calls, node_query *query, uint64_t bytes[MM_MOST_NODES])
{
    if (query->count > 0 && calls->move_pages(query->count, query->page, query->node) < 0) {
        return false;
    }
    for (size_t i = 0; i < query->count; i++) {
        if (query->node[i] >= 0 && query->node[i] < MM_MOST_NODES) {
            bytes[query->node[i]] += query->amount[i];
        }
    }
    query->count = 0;
    return true;
}

MM_GUARD_ARRAYS bool
mm_pagemap_count_nodes(mm_pagemap_source *source, const mm_spans *mapped, mm_span limits,
                       uint64_t bytes[MM_MOST_NODES])
{
    uint64_t page = mm_page_size();
    node_query query = {.count = 0};

    for (size_t i = 0; i < mapped->count; i++) {
        mm_span rest = mm_span_inside(mapped->span[i], limits);
        while (rest.start < rest.end) {
            uint64_t start = rest.start / page * page, end = start + page;
            query.page[query.count] = (void *)(uintptr_t)start;
            query.node[query.count] = -1;
            query.amount[query.count++] = (end < rest.end ? end : rest.end) - rest.start;
            rest.start = end;
            if (query.count == PAGES_ASKED && !ask_nodes(source->calls, &query, bytes)) {
                return false;
            }
        }
    }
    return ask_nodes(source->calls, &query, bytes);
}
