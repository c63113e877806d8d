/* page_holders.c: spans of pages, sorted, and a set of processors for each page of them. */
#include "page_holders.h"

#include <assert.h>
#include <stdlib.h>

/* --- spans ------------------------------------------------------------------------------ */

static int
compare_spans(const void *a, const void *b)
{
    const mm_held_span *left = a, *right = b;

    return (left->start > right->start) - (left->start < right->start);
}

/* Unsorted: one for each range with a birth. */
static void
add_spans(mm_page_holders *h, const mm_batch *ranges, const uint64_t *since)
{
    uint64_t page = mm_page_size();

    for (size_t i = 0; i < ranges->count; i++) {
        mm_range range = ranges->transfers[i].range;
        if (range.size > 0 && since[i] != MM_NO_BIRTH) {
            h->span[h->count++] = (mm_held_span){
                .start = range.start / page * page,
                .end = (mm_range_end(range) + page - 1) / page * page,
                .since = since[i],
            };
        }
    }
}

/* Joins sorted spans that share pages. Of two births, the later one counts. Neighbours stay apart,
 * because they can be memories with births of their own. */
static void
join_spans(mm_page_holders *h)
{
    size_t joined = 0;

    for (size_t i = 1; i < h->count; i++) {
        mm_held_span *last = &h->span[joined], *next = &h->span[i];
        if (next->start >= last->end) {
            h->span[++joined] = *next;
            continue;
        }
        last->end = next->end > last->end ? next->end : last->end;
        last->since = next->since > last->since ? next->since : last->since;
    }
    h->count = h->count > 0 ? joined + 1 : 0;
}

int
mm_page_holders_init(mm_page_holders *h, const mm_batch *ranges, const uint64_t *since,
                     mm_status *st)
{
    *h = (mm_page_holders){.span = calloc(ranges->count + 1, sizeof *h->span)};
    if (h->span == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", ranges->count);
    }
    add_spans(h, ranges, since);
    qsort(h->span, h->count, sizeof *h->span, compare_spans);
    join_spans(h);
    for (size_t i = 0; i < h->count; i++) {
        h->span[i].first = h->page_count;
        h->page_count += (size_t)((h->span[i].end - h->span[i].start) / mm_page_size());
    }
    h->page = calloc(h->page_count + 1, sizeof *h->page);
    if (h->page == NULL) {
        size_t pages = h->page_count;
        mm_page_holders_free(h);
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu pages", pages);
    }
    return 0;
}

void
mm_page_holders_free(mm_page_holders *h)
{
    free(h->span);
    free(h->page);
    *h = (mm_page_holders){0};
}

/* --- searches --------------------------------------------------------------------------- */

size_t
mm_page_holders_find(const mm_page_holders *h, uint64_t address)
{
    size_t low = 0, high = h->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (h->span[middle].end > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

const uint32_t *
mm_page_holders_of(const mm_page_holders *h, mm_range range)
{
    size_t i = mm_page_holders_find(h, range.start);

    if (i == h->count || range.start < h->span[i].start || mm_range_end(range) > h->span[i].end) {
        return NULL;
    }
    return &h->page[h->span[i].first
                    + (size_t)((range.start - h->span[i].start) / mm_page_size())];
}
