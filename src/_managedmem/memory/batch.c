/* batch.c: what batch.h says. The measurements behind it are in docs/develop/dispatch.rst. */
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

int
mm_batch_init(mm_batch *b, size_t count, mm_status *st)
{
    b->count = count;
    b->transfers = b->inline_;
    b->ordered = b->edges_interleaved = false;
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
by_address(const void *a, const void *b)
{
    const mm_transfer *x = a, *y = b;

    return x->range.start < y->range.start ? -1 : x->range.start > y->range.start;
}

static CUdeviceptr
end_of(const mm_transfer *m)
{
    return m->range.start + m->range.size;
}

/* The end of the last page of a range: advice and prefetch act on whole pages. Discards were rounded to
 * whole pages before. */
static CUdeviceptr
reach_of(const mm_transfer *m, CUdeviceptr page)
{
    return (end_of(m) + page - 1) & ~(page - 1); /* page is a power of two; a division is slow */
}

/* Ranges are joined inside one allocation only: the driver refuses a range over two, even if they
 * touch. System memory has no allocation, so only overlapping ranges are joined; separate ranges of
 * one batch call would be discarded and prefetched in an undefined order. */
static bool
can_join(const mm_transfer *left, const mm_transfer *right, CUdeviceptr page)
{
    bool known = left->range.allocation != 0;

    return left->range.allocation == right->range.allocation
           && mm_same_location(left->where, right->where)
           && right->range.start >= left->range.start
           && (known ? right->range.start <= reach_of(left, page)
                     : right->range.start < end_of(left));
}

static bool
is_sorted(const mm_batch *b)
{
    for (size_t i = 1; i < b->count; i++) {
        if (by_address(&b->transfers[i - 1], &b->transfers[i]) > 0) {
            return false;
        }
    }
    return true;
}

/* True if sorted ranges of different locations overlap or share a page. `reach` is the end of a page, so
 * a range that begins before it begins on a page of another range. Where the location changes without a
 * conflict, all ranges before end there. */
static bool
has_conflict(const mm_transfer *transfers, size_t count)
{
    CUdeviceptr page = mm_page_size(), reach = reach_of(&transfers[0], page);

    for (size_t i = 1; i < count; i++) {
        CUdeviceptr end = reach_of(&transfers[i], page);
        if (!mm_same_location(transfers[i].where, transfers[i - 1].where)
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

    for (size_t i = 1; i < b->count; i++) {
        mm_transfer *m = &b->transfers[last];
        if (can_join(m, &b->transfers[i], page)) {
            if (end_of(&b->transfers[i]) > end_of(m)) {
                m->range.size = (size_t)(end_of(&b->transfers[i]) - m->range.start);
            }
        } else {
            b->transfers[++last] = b->transfers[i];
        }
    }
    b->count = last + 1;
}

/* Removes empty ranges. */
static void
drop_empty(mm_batch *b)
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
    mm_transfer *kept;

    drop_empty(b);
    if (b->count < 2) {
        return;
    }
    if (is_sorted(b)) {
        b->ordered = has_conflict(b->transfers, b->count);
        join_neighbours(b);
        return;
    }
    kept = malloc(b->count * sizeof *kept);
    if (kept == NULL) {
        b->ordered = true;
        return; /* merging is a saving, not a need */
    }
    memcpy(kept, b->transfers, b->count * sizeof *kept);
    qsort(b->transfers, b->count, sizeof *b->transfers, by_address);
    b->ordered = has_conflict(b->transfers, b->count);
    if (b->ordered) {
        memcpy(b->transfers, kept, b->count * sizeof *kept);
    }
    free(kept);
    join_neighbours(b);
}

void
mm_batch_merge(mm_batch *b)
{
    b->ordered = b->edges_interleaved;
    if (b->edges_interleaved) {
        return; /* edges are found by the index of their range */
    }
    if (b->count > 1) {
        merge_several(b);
    } else if (b->count == 1 && b->transfers[0].range.size == 0) {
        b->count = 0;
    }
}

/* Brings those that can gain from the batch call, as far as that does not depend on where pages
 * are, to the front. Conflicting moves keep their order and are never batched by choice. */
void
mm_batch_prepare(mm_batch *b, mm_action what)
{
    mm_batch_merge(b);
    b->batchable = 0;
    for (size_t i = 0; i < b->count && !b->ordered; i++) {
        mm_transfer m = b->transfers[i];
        if (mm_may_gain_from_batch(what, &m)) {
            b->transfers[i] = b->transfers[b->batchable];
            b->transfers[b->batchable++] = m;
        }
    }
}

/* --- operations ------------------------------------------------------------------------- */

/* The common part of the three operations; edges may be NULL. */
static int
run(mm_driver *cu, mm_action what, mm_batch *b, const mm_batch *edges,
    const mm_dispatch_options *how, mm_status *st)
{
    mm_batch_arrays work;
    int rc;

    mm_batch_prepare(b, what);
    if (mm_batch_arrays_init(&work, b->count, st) < 0) {
        return -1;
    }
    rc = mm_dispatch_run(cu, what, b, edges, NULL, &work, how, st);
    mm_batch_arrays_free(&work);
    return rc;
}

int
mm_batch_prefetch(mm_driver *cu, mm_batch *b, CUstream stream, mm_dispatch dispatch,
                  mm_defer defer, mm_status *st)
{
    const mm_dispatch_options how = {stream, dispatch, defer};

    return run(cu, MM_DO_PREFETCH, b, NULL, &how, st);
}

/* Shrinks one range to whole pages; the message says which of several has none. */
static int
shrink(mm_batch *b, size_t i, mm_status *st)
{
    int rc = mm_range_whole_pages(&b->transfers[i].range, st);

    if (rc < 0 && b->count > 1) {
        mm_status_add(st, "(target %zu)", i);
    }
    return rc;
}

/* Drops empty ranges before the others are shrunk. If there are any, all ranges are checked first, so
 * that the index in an error message counts the empty ones too. */
static int
drop_empty_checked(mm_batch *b, mm_status *st)
{
    bool empty = false;

    for (size_t i = 0; i < b->count; i++) {
        empty = empty || b->transfers[i].range.size == 0;
    }
    for (size_t i = 0; empty && i < b->count; i++) {
        mm_transfer whole = b->transfers[i];
        if (shrink(b, i, st) < 0) {
            return -1;
        }
        b->transfers[i] = whole;
    }
    if (empty) {
        drop_empty(b);
    }
    return 0;
}

/* Shrinks every range before any driver call, so that a bad one leaves the others alone. */
static int
whole_pages(mm_batch *b, mm_status *st)
{
    for (size_t i = 0; i < b->count; i++) {
        if (shrink(b, i, st) < 0) {
            return -1;
        }
    }
    return 0;
}

int
mm_batch_discard(mm_driver *cu, mm_batch *b, CUstream stream, mm_dispatch dispatch, mm_status *st)
{
    const mm_dispatch_options how = {stream, dispatch, MM_DEFER_NO};

    return whole_pages(b, st) < 0 ? -1 : run(cu, MM_DO_DISCARD, b, NULL, &how, st);
}

/* Adds the range between two addresses. An empty one is added only if every move has two edges. */
static void
add_edge(mm_batch *edges, const mm_transfer *m, CUdeviceptr start, CUdeviceptr end)
{
    if (start < end || edges->edges_interleaved) {
        edges->transfers[edges->count] = *m;
        edges->transfers[edges->count].range.start = start;
        edges->transfers[edges->count++].range.size = (size_t)(end - start);
    }
}

/* True if moves with different locations share a page, so that the last one must win. `scratch` has
 * space for all moves. */
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
    qsort(scratch, b->count, sizeof *scratch, by_address);
    return has_conflict(scratch, b->count);
}

int
mm_batch_split_edges(mm_batch *b, mm_batch *edges, mm_status *st)
{
    bool cut = false;

    if (mm_batch_init(edges, 2 * b->count, st) < 0 || drop_empty_checked(b, st) < 0) {
        return -1;
    }
    edges->edges_interleaved = b->edges_interleaved = is_order_needed(b, edges->transfers);
    edges->count = 0;
    for (size_t i = 0; i < b->count; i++) {
        mm_transfer before = b->transfers[i], *m = &b->transfers[i];
        if (shrink(b, i, st) < 0) {
            return -1;
        }
        add_edge(edges, &before, before.range.start, m->range.start);
        add_edge(edges, &before, end_of(m), end_of(&before));
        cut = cut || m->range.size < before.range.size;
    }
    if (!cut) {
        edges->edges_interleaved = b->edges_interleaved = false;
        edges->count = edges->batchable = 0;
        return 0;
    }
    mm_batch_prepare(edges, MM_DO_PREFETCH);
    return 0;
}

/* The pages at the ends, which a range shares with its neighbours, move with their contents. */
int
mm_batch_discard_prefetch(mm_driver *cu, mm_batch *b, CUstream stream, mm_dispatch dispatch,
                          mm_defer defer, mm_status *st)
{
    const mm_dispatch_options how = {stream, dispatch, defer};
    mm_batch edges;
    int rc = mm_batch_split_edges(b, &edges, st);

    if (rc == 0) {
        rc = run(cu, MM_DO_DISCARD_PREFETCH, b, &edges, &how, st);
    }
    mm_batch_free(&edges);
    return rc;
}

/* --- advice ----------------------------------------------------------------------------- */

/* How far an advice on merged ranges got with one of the ranges that were asked for. */
static mm_advice_progress
progress_with(const mm_batch *merged, size_t failed, const mm_transfer *asked)
{
    for (size_t i = 0; i <= failed; i++) {
        const mm_transfer *m = &merged->transfers[i];
        if (mm_same_location(m->where, asked->where) && m->range.start <= asked->range.start
            && end_of(asked) <= end_of(m)) {
            return i < failed ? MM_ADVISED : MM_FAILED;
        }
    }
    return MM_NOT_TRIED;
}

/* Restores the advice of all ranges after a failure. Ranges whose pages differed come first, because
 * they are unset and may overlap ranges that are set again; so even ranges that were not reached are
 * set again. */
static void
restore_all(mm_driver *cu, const mm_batch *asked, const mm_batch *merged, CUmem_advise advice,
            const mm_advice_before *before, size_t failed)
{
    for (int whole = 0; whole <= 1; whole++) {
        for (size_t i = 0; i < asked->count; i++) {
            const mm_transfer *m = &asked->transfers[i];
            if (before[i].whole == (whole == 1)) {
                mm_advice_put_back(cu, m->range, advice, m->where, &before[i],
                                   progress_with(merged, failed, m));
            }
        }
    }
}

/* Advises the merged ranges, having remembered all that were asked for; on a failure every one of
 * these goes back to what it was. before has space for each. */
static int
advise_all(mm_driver *cu, const mm_batch *asked, const mm_batch *merged, CUmem_advise advice,
           mm_advice_before *before, mm_status *st)
{
    for (size_t i = 0; i < asked->count; i++) {
        const mm_transfer *m = &asked->transfers[i];
        if (mm_advice_remember(cu, m->range, advice, m->where, &before[i], st) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < merged->count; i++) {
        const mm_transfer *m = &merged->transfers[i];
        if (mm_range_advise_settled(cu, m->range, advice, m->where, st) < 0) {
            restore_all(cu, asked, merged, advice, before, i);
            return -1;
        }
    }
    return 0;
}

static int
advise_several(mm_driver *cu, mm_batch *asked, const mm_batch *merged, CUmem_advise advice,
               mm_status *st)
{
    mm_advice_before *before = calloc(asked->count, sizeof *before);
    int rc;

    if (before == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", asked->count);
    }
    drop_empty(asked);
    rc = advise_all(cu, asked, merged, advice, before, st);
    free(before);
    return rc;
}

int
mm_batch_advise(mm_driver *cu, mm_batch *b, CUmem_advise advice, mm_status *st)
{
    mm_batch asked;
    int rc = mm_batch_copy(&asked, b, st);

    if (rc == 0) {
        mm_batch_merge(b);
        if (b->count > 1) {
            rc = advise_several(cu, &asked, b, advice, st);
        } else if (b->count == 1) {
            rc = mm_range_advise(cu, b->transfers[0].range, advice, b->transfers[0].where, st);
        }
    }
    mm_batch_free(&asked);
    return rc;
}
