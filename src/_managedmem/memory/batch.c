/* batch.c: what batch.h says. The measurements behind choose() are in docs/develop/dispatch.rst. */
#include "batch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int
mm_batch_init(mm_batch *b, size_t count, mm_status *st)
{
    b->count = count;
    b->moves = b->few;
    b->in_order = false;
    if (count > MM_FEW) {
        b->moves = calloc(count, sizeof *b->moves);
        if (b->moves == NULL) {
            b->moves = b->few;
            return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
        }
    }
    return 0;
}

void
mm_batch_free(mm_batch *b)
{
    if (b->moves != b->few) {
        free(b->moves);
    }
}

/* --- merging ---------------------------------------------------------------------------- */

static int
by_address(const void *a, const void *b)
{
    const mm_move *x = a, *y = b;

    return x->range.start < y->range.start ? -1 : x->range.start > y->range.start;
}

static CUdeviceptr
end_of(const mm_move *m)
{
    return m->range.start + m->range.size;
}

/* Ranges may only be joined inside one known allocation: the driver refuses a range that spans
 * two, even where they touch. A range reaches to the end of its last page, for that is what advice
 * and prefetch act on; discards have been rounded to whole pages before. */
static bool
can_join(const mm_move *left, const mm_move *right)
{
    CUdeviceptr page = mm_page_size();
    CUdeviceptr reach = (end_of(left) + page - 1) / page * page;

    return left->range.allocation != 0 && left->range.allocation == right->range.allocation
           && mm_same_location(left->where, right->where)
           && right->range.start >= left->range.start && right->range.start <= reach;
}

static bool
is_sorted(const mm_batch *b)
{
    for (size_t i = 1; i < b->count; i++) {
        if (by_address(&b->moves[i - 1], &b->moves[i]) > 0) {
            return false;
        }
    }
    return true;
}

/* Whether ranges overlap while there is more than one location; the batch is sorted. */
static bool
has_conflict(const mm_batch *b)
{
    bool overlap = false, several = false;
    CUdeviceptr reach = end_of(&b->moves[0]);

    for (size_t i = 1; i < b->count; i++) {
        overlap |= b->moves[i].range.start < reach;
        reach = end_of(&b->moves[i]) > reach ? end_of(&b->moves[i]) : reach;
        several |= !mm_same_location(b->moves[i].where, b->moves[0].where);
    }
    return overlap && several;
}

static void
join_neighbours(mm_batch *b)
{
    size_t last = 0;

    for (size_t i = 1; i < b->count; i++) {
        mm_move *m = &b->moves[last];
        if (can_join(m, &b->moves[i])) {
            if (end_of(&b->moves[i]) > end_of(m)) {
                m->range.size = (size_t)(end_of(&b->moves[i]) - m->range.start);
            }
        } else {
            b->moves[++last] = b->moves[i];
        }
    }
    b->count = last + 1;
}

void
mm_batch_merge(mm_batch *b)
{
    mm_move *kept;

    if (b->count < 2) {
        return;
    }
    if (is_sorted(b)) {
        b->in_order = has_conflict(b);
        join_neighbours(b);
        return;
    }
    kept = malloc(b->count * sizeof *kept);
    if (kept == NULL) {
        b->in_order = true;
        return; /* merging is a saving, not a need */
    }
    memcpy(kept, b->moves, b->count * sizeof *kept);
    qsort(b->moves, b->count, sizeof *b->moves, by_address);
    b->in_order = has_conflict(b);
    if (b->in_order) {
        memcpy(b->moves, kept, b->count * sizeof *kept);
    }
    free(kept);
    join_neighbours(b);
}

/* --- dispatch --------------------------------------------------------------------------- */

/* The last requested location is the cheapest sign of residency there is: a query of 60 ns. */
static bool
seems_resident(mm_driver *cu, const mm_move *m)
{
    int last = CU_DEVICE_INVALID;

    return cu->MemRangeGetAttribute(&last, sizeof last,
                                    CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, m->range.start,
                                    m->range.size)
               == CUDA_SUCCESS
           && last == m->where.id;
}

/* Whether a move gains from the driver's batch call. It costs about 18 us a range, whatever the
 * range holds; a call for each costs less where pages are there already (2 to 4 us) and where they
 * go to the host, the same below 64 KiB, and more where larger pages move to a device. */
static bool
gains_from_batch(mm_driver *cu, const mm_move *m)
{
    return m->where.type == CU_MEM_LOCATION_TYPE_DEVICE && m->range.size >= 65536
           && !seems_resident(cu, m);
}

/* Moves those that gain from the batch call to the front, in order; returns how many. */
static size_t
choose(mm_driver *cu, mm_batch *b, mm_dispatch dispatch)
{
    size_t chosen = 0;

    if (dispatch != MM_DISPATCH_AUTO) {
        return dispatch == MM_DISPATCH_BATCH ? b->count : 0;
    }
    if (b->count < 2 || b->in_order || cu->MemPrefetchBatchAsync == NULL
        || !cu->concurrent_access) {
        return 0;
    }
    for (size_t i = 0; i < b->count; i++) {
        if (gains_from_batch(cu, &b->moves[i])) {
            mm_move m = b->moves[i];
            b->moves[i] = b->moves[chosen];
            b->moves[chosen++] = m;
        }
    }
    return chosen >= 2 ? chosen : 0;
}

/* The arrays of a batch call, in one block. */
typedef struct {
    void *block;
    CUdeviceptr *starts;
    size_t *sizes;
    CUmemLocation *where;
    size_t *first; /* index of the first range of each location */
    size_t locations;
} call_arrays;

static int
fill_arrays(call_arrays *a, const mm_move *moves, size_t count, mm_status *st)
{
    assert(count > 0);
    a->block = malloc(
        count * (sizeof *a->starts + sizeof *a->sizes + sizeof *a->where + sizeof *a->first));
    if (a->block == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", count);
    }
    a->starts = a->block;
    a->sizes = (size_t *)(a->starts + count);
    a->first = a->sizes + count;
    a->where = (CUmemLocation *)(a->first + count);
    a->locations = 0;
    for (size_t i = 0; i < count; i++) {
        a->starts[i] = moves[i].range.start;
        a->sizes[i] = moves[i].range.size;
        if (i == 0 || !mm_same_location(moves[i].where, moves[i - 1].where)) {
            a->where[a->locations] = moves[i].where;
            a->first[a->locations++] = i;
        }
    }
    return 0;
}

typedef enum { PREFETCH, DISCARD, DISCARD_PREFETCH } kind;

static CUresult
call_batch(mm_driver *cu, kind what, const call_arrays *a, size_t count, CUstream stream)
{
    if (what == DISCARD) {
        return cu->MemDiscardBatchAsync(a->starts, a->sizes, count, 0, stream);
    }
    return (what == PREFETCH ? cu->MemPrefetchBatchAsync : cu->MemDiscardAndPrefetchBatchAsync)(
        a->starts, a->sizes, count, a->where, a->first, a->locations, 0, stream);
}

static int
issue_batch(mm_driver *cu, kind what, const mm_move *moves, size_t count, CUstream stream,
            mm_status *st)
{
    static const char *const names[] = {"cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync",
                                        "cuMemDiscardAndPrefetchBatchAsync"};
    call_arrays a = {0};
    CUresult code;

    if (fill_arrays(&a, moves, count, st) < 0) {
        return -1;
    }
    code = call_batch(cu, what, &a, count, stream);
    free(a.block);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, names[what], (int)code);
    return mm_explain(cu, moves[0].range, moves[0].where,
                      what == DISCARD ? MM_DISCARD : MM_PREFETCH, st);
}

/* One range by the call that is made for one: no arrays, no allocation. */
static int
issue_one(mm_driver *cu, kind what, const mm_move *m, CUstream stream, mm_status *st)
{
    CUdeviceptr start = m->range.start;
    size_t size = m->range.size, first = 0;
    CUmemLocation where = m->where;
    const char *function = "cuMemPrefetchAsync";
    CUresult code;

    if (what == PREFETCH) {
        code = cu->MemPrefetchAsync(start, size, where, 0, stream);
    } else if (what == DISCARD) {
        function = "cuMemDiscardBatchAsync";
        code = cu->MemDiscardBatchAsync(&start, &size, 1, 0, stream);
    } else {
        function = "cuMemDiscardAndPrefetchBatchAsync";
        code = cu->MemDiscardAndPrefetchBatchAsync(&start, &size, 1, &where, &first, 1, 0, stream);
    }
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, function, (int)code);
    return mm_explain(cu, m->range, where, what == DISCARD ? MM_DISCARD : MM_PREFETCH, st);
}

static int
issue(mm_driver *cu, kind what, mm_batch *b, size_t together, CUstream stream, mm_status *st)
{
    if (together > 0 && issue_batch(cu, what, b->moves, together, stream, st) < 0) {
        return -1;
    }
    for (size_t i = together; i < b->count; i++) {
        if (issue_one(cu, what, &b->moves[i], stream, st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Defers once for all: what follows on the stream is then behind the host function too. */
static int
defer_batch(mm_driver *cu, const mm_batch *b, CUstream stream, mm_defer defer, mm_status *st)
{
    size_t bytes[2] = {0, 0};
    CUmemLocation device = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);

    for (size_t i = 0; i < b->count; i++) {
        bytes[b->moves[i].where.type != CU_MEM_LOCATION_TYPE_DEVICE] += b->moves[i].range.size;
    }
    if (bytes[0] > bytes[1]) {
        return mm_defer_prefetch(cu, bytes[0], device, stream, defer, st);
    }
    return mm_defer_prefetch(cu, bytes[1], mm_host(), stream, defer, st);
}

/* All calls of one operation, and the host function that defers them, go to one stream. */
static int
run_in_scope(mm_driver *cu, kind what, mm_batch *b, CUstream stream, mm_dispatch dispatch,
             mm_defer defer, mm_status *st)
{
    mm_batch_stream s = {.stream = stream};
    size_t together;
    int rc;

    mm_batch_merge(b);
    /* A discard costs the same either way, so one call serves all of them. */
    together = what == DISCARD && dispatch == MM_DISPATCH_AUTO && b->count > 1
                   ? b->count
                   : choose(cu, b, dispatch);
    if ((what != PREFETCH || together > 0) && mm_batch_stream_get(cu, stream, &s, st) < 0) {
        return -1;
    }
    rc = what == DISCARD ? 0 : defer_batch(cu, b, s.stream, defer, st);
    if (rc == 0) {
        rc = issue(cu, what, b, together, s.stream, st);
    }
    mm_batch_stream_release(cu, &s);
    return rc;
}

/* What the three operations share: the checks in front and the scope around. */
static int
run(mm_driver *cu, kind what, mm_batch *b, CUstream stream, mm_dispatch dispatch, mm_defer defer,
    mm_status *st)
{
    static const char *const names[] = {"a prefetch", "a discard", "discard_prefetch"};
    static const char *const needs[] = {"dispatch=\"batch\"", "discard", "discard_prefetch"};
    mm_scope scope;
    int rc;

    if (cu->MemDiscardBatchAsync == NULL && (what != PREFETCH || dispatch == MM_DISPATCH_BATCH)) {
        return mm_driver_lacks(cu, needs[what], st);
    }
    if (mm_stream_refuse_capture(cu, stream, names[what], st) < 0
        || mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    rc = run_in_scope(cu, what, b, stream, dispatch, defer, st);
    mm_scope_leave(&scope);
    return rc;
}

int
mm_batch_prefetch(mm_driver *cu, mm_batch *b, CUstream stream, mm_dispatch dispatch,
                  mm_defer defer, mm_status *st)
{
    return run(cu, PREFETCH, b, stream, dispatch, defer, st);
}

/* Shrinks one range to whole pages; the message says which of several has none. */
static int
shrink(mm_batch *b, size_t i, mm_status *st)
{
    int rc = mm_range_whole_pages(&b->moves[i].range, st);

    if (rc < 0 && b->count > 1) {
        mm_status_add(st, "(target %zu)", i);
    }
    return rc;
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
    return whole_pages(b, st) < 0 ? -1 : run(cu, DISCARD, b, stream, dispatch, MM_DEFER_NO, st);
}

/* Adds what lies between two addresses, if anything does. */
static void
add_edge(mm_batch *edges, const mm_move *m, CUdeviceptr start, CUdeviceptr end)
{
    if (start < end) {
        edges->moves[edges->count] = *m;
        edges->moves[edges->count].range.start = start;
        edges->moves[edges->count++].range.size = (size_t)(end - start);
    }
}

/* Shrinks every range to whole pages and collects what that cuts off. */
static int
split_edges(mm_batch *b, mm_batch *edges, mm_status *st)
{
    if (mm_batch_init(edges, 2 * b->count, st) < 0) {
        return -1;
    }
    edges->count = 0;
    for (size_t i = 0; i < b->count; i++) {
        mm_move before = b->moves[i], *m = &b->moves[i];
        if (shrink(b, i, st) < 0) {
            return -1;
        }
        add_edge(edges, &before, before.range.start, m->range.start);
        add_edge(edges, &before, end_of(m), end_of(&before));
    }
    return 0;
}

/* The pages at the ends, which a range shares with its neighbours, move with their contents. */
int
mm_batch_discard_prefetch(mm_driver *cu, mm_batch *b, CUstream stream, mm_dispatch dispatch,
                          mm_defer defer, mm_status *st)
{
    mm_batch edges;
    int rc = split_edges(b, &edges, st);

    if (rc == 0) {
        rc = run(cu, DISCARD_PREFETCH, b, stream, dispatch, defer, st);
    }
    if (rc == 0 && edges.count > 0) {
        rc = run(cu, PREFETCH, &edges, stream, MM_DISPATCH_LOOP, MM_DEFER_NO, st);
    }
    mm_batch_free(&edges);
    return rc;
}

/* --- advice ----------------------------------------------------------------------------- */

/* A target and what the advice changes of it, as it was before. */
typedef struct {
    mm_move target;
    CUmemLocation preferred;
    bool on; /* read mostly, or accessed by the location in question */
} advice_before;

static int
remember(mm_driver *cu, const mm_move *m, CUmem_advise advice, advice_before *before,
         mm_status *st)
{
    mm_location_set set = 0;

    before->target = *m;
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        return mm_range_read_mostly(cu, m->range, &before->on, st);
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        return mm_range_preferred_location(cu, m->range, &before->preferred, st);
    default:
        if (mm_range_accessed_by(cu, m->range, &set, st) < 0) {
            return -1;
        }
        before->on = (set & mm_location_bit(m->where)) != 0;
        return 0;
    }
}

static void
take_back(mm_driver *cu, CUmem_advise advice, const advice_before *before)
{
    CUmemLocation where = before->target.where;
    CUmem_advise undo;
    mm_status ignored;
    int rc;

    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        undo = before->on ? CU_MEM_ADVISE_SET_READ_MOSTLY : CU_MEM_ADVISE_UNSET_READ_MOSTLY;
        break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        undo = CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        if ((int)before->preferred.type != 0) {
            undo = CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
            where = before->preferred;
        }
        break;
    default:
        undo = before->on ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    }
    rc = mm_range_advise(cu, before->target.range, undo, where, &ignored);
    (void)rc; /* the first failure is the one to report */
}

/* Remembers each target, merges, advises; on a failure every target goes back to what it was. */
static int
advise_all(mm_driver *cu, mm_batch *b, CUmem_advise advice, advice_before *before, mm_status *st)
{
    size_t targets = b->count;

    for (size_t i = 0; i < targets; i++) {
        if (remember(cu, &b->moves[i], advice, &before[i], st) < 0) {
            return -1;
        }
    }
    mm_batch_merge(b);
    for (size_t i = 0; i < b->count; i++) {
        if (mm_range_advise(cu, b->moves[i].range, advice, b->moves[i].where, st) < 0) {
            while (targets-- > 0) {
                take_back(cu, advice, &before[targets]);
            }
            return -1;
        }
    }
    return 0;
}

int
mm_batch_advise(mm_driver *cu, mm_batch *b, CUmem_advise advice, mm_status *st)
{
    advice_before *before;
    int rc;

    if (b->count == 1) {
        return mm_range_advise(cu, b->moves[0].range, advice, b->moves[0].where, st);
    }
    before = calloc(b->count, sizeof *before);
    if (before == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", b->count);
    }
    rc = advise_all(cu, b, advice, before, st);
    free(before);
    return rc;
}
