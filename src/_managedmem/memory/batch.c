/* batch.c: merging, ordering and advising several ranges. The measurements behind the order are in
 * docs/develop/dispatch.rst. */
#include "batch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "advice.h"
#include "recorded_calls.h"

int
mm_batch_init(mm_batch *b, size_t count, mm_status *st)
{
    mm_batch_init_empty(b);
    b->count = count;
    if (count > MM_INLINE_COUNT) {
        b->transfers = calloc(count, sizeof *b->transfers);
        if (b->transfers == NULL) {
            b->transfers = b->inline_;
            return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
        }
    }
    return 0;
}

void
mm_batch_free(mm_batch *b)
{
    if (b->transfers != b->inline_) {
        free(b->transfers);
    }
}

int
mm_batch_copy(mm_batch *to, const mm_batch *from, mm_status *st)
{
    if (mm_batch_init(to, from->count, st) < 0) {
        return -1;
    }
    memcpy(to->transfers, from->transfers, from->count * sizeof *from->transfers);
    return 0;
}

/* --- merging ---------------------------------------------------------------------------- */

static int
compare_starts(const void *a, const void *b)
{
    const mm_transfer *x = a, *y = b;

    return x->range.start < y->range.start ? -1 : x->range.start > y->range.start;
}

/* The end of the last page of a range: advice and prefetches act on whole pages. Discards are
 * rounded to whole pages already. */
static CUdeviceptr
last_page_end(const mm_transfer *t, CUdeviceptr page)
{
    assert((page & (page - 1)) == 0);
    return (mm_range_end(t->range) + page - 1) & ~(page - 1); /* a division is slow */
}

/* Ranges are joined inside one allocation only: the driver refuses a range over two allocations,
 * even if these touch. System memory has no allocation, so only overlapping ranges are joined. As
 * separate ranges of one batch call, they would be discarded and prefetched in an undefined
 * order. */
static bool
can_join(const mm_transfer *left, const mm_transfer *right, CUdeviceptr page)
{
    bool known = left->range.allocation != 0;

    return left->range.allocation == right->range.allocation
           && mm_same_location(left->location, right->location)
           && right->range.start >= left->range.start
           && (known ? right->range.start <= last_page_end(left, page)
                     : right->range.start < mm_range_end(left->range));
}

static bool
is_sorted(const mm_batch *b)
{
    for (size_t i = 1; i < b->count; i++) {
        if (compare_starts(&b->transfers[i - 1], &b->transfers[i]) > 0) {
            return false;
        }
    }
    return true;
}

/* True if sorted ranges of different locations overlap or share a page. `reach` is the end of the
 * last page of the earlier ranges, so a range that starts before it overlaps them or shares their
 * last page. It is enough to compare neighbouring locations: where the location changes without a
 * conflict, all earlier ranges have ended. */
static bool
has_conflict(const mm_transfer *transfers, size_t count)
{
    CUdeviceptr page = mm_page_size(), reach = last_page_end(&transfers[0], page);

    for (size_t i = 1; i < count; i++) {
        CUdeviceptr end = last_page_end(&transfers[i], page);
        if (!mm_same_location(transfers[i].location, transfers[i - 1].location)
            && transfers[i].range.start < reach) {
            return true;
        }
        reach = end > reach ? end : reach;
    }
    return false;
}

static void
join_neighbours(mm_batch *b)
{
    CUdeviceptr page = mm_page_size();
    size_t last = 0;

    assert(b->count > 0);
    for (size_t i = 1; i < b->count; i++) {
        mm_transfer *t = &b->transfers[last];
        if (can_join(t, &b->transfers[i], page)) {
            if (mm_range_end(b->transfers[i].range) > mm_range_end(t->range)) {
                t->range.size = (size_t)(mm_range_end(b->transfers[i].range) - t->range.start);
            }
        } else {
            b->transfers[++last] = b->transfers[i];
        }
    }
    b->count = last + 1;
}

static void
remove_empty(mm_batch *b)
{
    size_t count = 0;

    for (size_t i = 0; i < b->count; i++) {
        if (b->transfers[i].range.size > 0) {
            if (count < i) {
                b->transfers[count] = b->transfers[i];
            }
            count++;
        }
    }
    b->count = count;
}

static void
merge_several(mm_batch *b)
{
    mm_transfer *unsorted;

    remove_empty(b);
    if (b->count < 2) {
        return;
    }
    if (is_sorted(b)) {
        b->ordered = has_conflict(b->transfers, b->count);
        join_neighbours(b);
        return;
    }
    unsorted = malloc(b->count * sizeof *unsorted);
    if (unsorted == NULL) {
        b->ordered = true;
        return; /* correct without merging, only slower */
    }
    memcpy(unsorted, b->transfers, b->count * sizeof *unsorted);
    qsort(b->transfers, b->count, sizeof *b->transfers, compare_starts);
    b->ordered = has_conflict(b->transfers, b->count);
    if (b->ordered) {
        memcpy(b->transfers, unsorted, b->count * sizeof *unsorted);
    }
    free(unsorted);
    join_neighbours(b);
}

void
mm_batch_merge(mm_batch *b)
{
    b->ordered = b->edges_interleaved;
    if (b->edges_interleaved) {
        return; /* an edge is found by the index of its range */
    }
    if (b->count > 1) {
        merge_several(b);
    } else if (b->count == 1 && b->transfers[0].range.size == 0) {
        b->count = 0;
    }
}

/* --- preparing -------------------------------------------------------------------------- */

/* Merges, and moves the transfers that the batch call can make faster to the front. Conflicting
 * transfers keep their order, and only dispatch="batch" batches them. */
static void
merge_and_order(mm_batch *b, mm_operation op)
{
    mm_batch_merge(b);
    b->batchable = 0;
    for (size_t i = 0; i < b->count && !b->ordered; i++) {
        mm_transfer t = b->transfers[i];
        if (t.location.type == CU_MEM_LOCATION_TYPE_DEVICE && !mm_is_small_transfer(op, &t)) {
            b->transfers[i] = b->transfers[b->batchable];
            b->transfers[b->batchable++] = t;
        }
    }
}

/* Shrinks one range to whole pages. If it has none and there are several ranges, the message says
 * which range it is. */
static int
shrink_range(mm_batch *b, size_t i, mm_status *st)
{
    int rc = mm_range_whole_pages(&b->transfers[i].range, st);

    if (rc < 0 && b->count > 1) {
        mm_status_add(st, "(target %zu)", i);
    }
    return rc;
}

static int
shrink_all(mm_batch *b, mm_status *st)
{
    for (size_t i = 0; i < b->count; i++) {
        if (shrink_range(b, i, st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Removes empty ranges before the others are shrunk. If there are any, all ranges are checked
 * first, so that the index in an error message counts empty ranges too. */
static int
remove_empty_checked(mm_batch *b, mm_status *st)
{
    bool empty = false;

    for (size_t i = 0; i < b->count; i++) {
        empty = empty || b->transfers[i].range.size == 0;
    }
    for (size_t i = 0; empty && i < b->count; i++) {
        mm_transfer whole = b->transfers[i];
        if (shrink_range(b, i, st) < 0) {
            return -1;
        }
        b->transfers[i] = whole;
    }
    if (empty) {
        remove_empty(b);
    }
    return 0;
}

/* Adds the range between two addresses. An empty one is added only if every transfer has two
 * edges. */
static void
add_edge(mm_batch *edges, const mm_transfer *t, CUdeviceptr start, CUdeviceptr end)
{
    assert(start <= end);
    if (start < end || edges->edges_interleaved) {
        edges->transfers[edges->count] = *t;
        edges->transfers[edges->count].range.start = start;
        edges->transfers[edges->count++].range.size = (size_t)(end - start);
    }
}

/* True if transfers with different locations share a page, so that the last one must win.
 * `scratch` has space for all transfers. */
static bool
is_order_needed(const mm_batch *b, mm_transfer *scratch)
{
    if (b->count < 2) {
        return false;
    }
    if (is_sorted(b)) {
        return has_conflict(b->transfers, b->count);
    }
    memcpy(scratch, b->transfers, b->count * sizeof *scratch);
    qsort(scratch, b->count, sizeof *scratch, compare_starts);
    return has_conflict(scratch, b->count);
}

/* Shrinks every range to whole pages. The parts that are cut off share pages with neighbours; they
 * become edges, which are prefetched with their contents. */
static int
split_edges(mm_batch *b, mm_batch *edges, mm_status *st)
{
    bool cut = false;

    if (mm_batch_init(edges, 2 * b->count, st) < 0 || remove_empty_checked(b, st) < 0) {
        return -1;
    }
    edges->edges_interleaved = b->edges_interleaved = is_order_needed(b, edges->transfers);
    edges->count = 0;
    for (size_t i = 0; i < b->count; i++) {
        mm_transfer before = b->transfers[i], *t = &b->transfers[i];
        if (shrink_range(b, i, st) < 0) {
            return -1;
        }
        add_edge(edges, &before, before.range.start, t->range.start);
        add_edge(edges, &before, mm_range_end(t->range), mm_range_end(before.range));
        cut = cut || t->range.size < before.range.size;
    }
    if (!cut) {
        edges->edges_interleaved = b->edges_interleaved = false;
        edges->count = 0;
    }
    merge_and_order(edges, MM_PREFETCH);
    return 0;
}

int
mm_batch_prepare(mm_batch *b, mm_operation op, mm_batch *edges, mm_status *st)
{
    assert(op == MM_PREFETCH || mm_discards(op));
    mm_batch_init_empty(edges);
    if ((op == MM_DISCARD && shrink_all(b, st) < 0)
        || (op == MM_DISCARD_PREFETCH && split_edges(b, edges, st) < 0)) {
        return -1;
    }
    merge_and_order(b, op);
    return 0;
}

/* --- advice ----------------------------------------------------------------------------- */

/* The progress of advice on an original range, which is that of the merged range around it. */
static mm_advice_progress
find_progress(const mm_batch *merged, size_t failed, const mm_transfer *original)
{
    assert(failed < merged->count);
    for (size_t i = 0; i <= failed; i++) {
        const mm_transfer *t = &merged->transfers[i];
        if (mm_same_location(t->location, original->location)
            && t->range.start <= original->range.start
            && mm_range_end(original->range) <= mm_range_end(t->range)) {
            return i < failed ? MM_ADVISED : MM_FAILED;
        }
    }
    return MM_NOT_TRIED;
}

/* Restores the advice of all ranges after a failure. Ranges whose pages differed come first: their
 * advice is unset, and they may overlap other ranges. So the advice of all other ranges is set
 * again afterwards, even if the call did not reach them. */
static void
restore_advice(mm_driver *cu, const mm_batch *original, const mm_batch *merged,
               CUmem_advise advice, const mm_advice_before *before, size_t failed)
{
    for (int whole = 0; whole <= 1; whole++) {
        for (size_t i = 0; i < original->count; i++) {
            const mm_transfer *t = &original->transfers[i];
            if (before[i].whole == (whole == 1)) {
                mm_advice_restore(cu, t->range, advice, t->location, &before[i],
                                  find_progress(merged, failed, t));
            }
        }
    }
}

/* Queries the advice of all original ranges, then advises the merged ones. After a failure,
 * restores the original advice. `before` has space for each original range. */
static int
advise_merged(mm_driver *cu, const mm_batch *original, const mm_batch *merged, CUmem_advise advice,
              mm_advice_before *before, mm_status *st)
{
    for (size_t i = 0; i < original->count; i++) {
        const mm_transfer *t = &original->transfers[i];
        if (mm_advice_query(cu, t->range, advice, t->location, &before[i], st) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < merged->count; i++) {
        const mm_transfer *t = &merged->transfers[i];
        if (mm_range_advise_until_recorded(cu, t->range, advice, t->location, st) < 0) {
            restore_advice(cu, original, merged, advice, before, i);
            return -1;
        }
    }
    return 0;
}

static int
advise_several(mm_driver *cu, mm_batch *original, const mm_batch *merged, CUmem_advise advice,
               mm_status *st)
{
    mm_advice_before *before = calloc(original->count, sizeof *before);
    uint64_t begun = mm_call_begin();
    int rc;

    if (before == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", original->count);
    }
    remove_empty(original);
    rc = advise_merged(cu, original, merged, advice, before, st);
    free(before);
    for (size_t i = 0; begun != 0 && rc == 0 && i < merged->count; i++) {
        mm_record_advice(merged->transfers[i].range, advice, merged->transfers[i].location, begun);
    }
    return rc;
}

int
mm_batch_advise(mm_driver *cu, mm_batch *b, CUmem_advise advice, mm_status *st)
{
    mm_batch original;
    int rc = mm_batch_copy(&original, b, st);

    if (rc == 0) {
        mm_batch_merge(b);
        if (b->count > 1) {
            rc = advise_several(cu, &original, b, advice, st);
        } else if (b->count == 1) {
            rc = mm_range_advise(cu, b->transfers[0].range, advice, b->transfers[0].location, st);
        }
    }
    mm_batch_free(&original);
    return rc;
}
