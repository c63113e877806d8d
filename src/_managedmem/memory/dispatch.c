/* dispatch.c: what dispatch.h says. The measurements behind it are in docs/develop/dispatch.rst. */
#include "dispatch.h"

#include <stdlib.h>

/* --- room ------------------------------------------------------------------------------- */

static void
use_few(mm_batch_arrays *w)
{
    w->starts = w->inline_.starts;
    w->sizes = w->inline_.sizes;
    w->first = w->inline_.first;
    w->where = w->inline_.where;
    w->routes = w->inline_.routes;
}

int
mm_batch_arrays_init(mm_batch_arrays *w, size_t count, mm_status *st)
{
    w->block = NULL;
    w->locations = 0;
    if (count <= MM_INLINE_COUNT) {
        use_few(w);
        return 0;
    }
    w->block = calloc(count, sizeof *w->starts + sizeof *w->sizes + sizeof *w->first
                                 + sizeof *w->where + sizeof *w->routes);
    if (w->block == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", count);
    }
    w->starts = w->block;
    w->sizes = (size_t *)(w->starts + count);
    w->first = w->sizes + count;
    w->where = (CUmemLocation *)(w->first + count);
    w->routes = (unsigned char *)(w->where + count);
    return 0;
}

void
mm_batch_arrays_free(mm_batch_arrays *w)
{
    free(w->block);
}

void
mm_batch_arrays_fill(mm_batch_arrays *w, const mm_batch *b, bool all)
{
    size_t count = 0;

    w->locations = 0;
    for (size_t i = 0; i < b->count; i++) {
        const mm_transfer *m = &b->transfers[i];
        if (!all && w->routes[i] != MM_BATCHED) {
            continue;
        }
        w->starts[count] = m->range.start;
        w->sizes[count] = m->range.size;
        if (count == 0 || !mm_same_location(m->where, w->where[w->locations - 1])) {
            w->where[w->locations] = m->where;
            w->first[w->locations++] = count;
        }
        count++;
    }
}

/* --- deciding --------------------------------------------------------------------------- */

/* The last requested location is the cheapest sign of residency there is: a query of 50 to 110 ns. */
static bool
seems_resident(mm_driver *cu, const mm_transfer *m)
{
    int last = CU_DEVICE_INVALID;

    return cu->MemRangeGetAttribute(&last, sizeof last,
                                    CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, m->range.start,
                                    m->range.size)
               == CUDA_SUCCESS
           && last == m->where.id;
}

/* Below that a prefetch gains nothing from the batch call; discard_prefetch does at any size. */
enum { PREFETCH_BATCH_FROM = 64 << 10 };

static bool
is_small(mm_action what, const mm_transfer *m)
{
    return what == MM_DO_PREFETCH && m->range.size < PREFETCH_BATCH_FROM;
}

bool
mm_may_gain_from_batch(mm_action what, const mm_transfer *m)
{
    return m->where.type == CU_MEM_LOCATION_TYPE_DEVICE && !is_small(what, m);
}

/* A batch call costs about 18 us a range, whatever the range holds. A call for each costs less where
 * pages are there already (2 to 4 us) and where they go to the host. Where they move to a device it
 * costs more, but for a prefetch of less than 64 KiB, where it is the same. */
static mm_route
way_of(mm_driver *cu, mm_action what, const mm_transfer *m)
{
    if (m->where.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return MM_SINGLE_TO_HOST;
    }
    if (is_small(what, m)) {
        return MM_SINGLE_SMALL;
    }
    return seems_resident(cu, m) ? MM_SINGLE_RESIDENT : MM_BATCHED;
}

/* The way of all moves, where one thing decides for all of them; else false. */
static bool
way_of_all(mm_driver *cu, mm_action what, const mm_batch *b, mm_dispatch dispatch, mm_route *way)
{
    /* A discard costs the same either way, so one call serves all of them. */
    if (b->edges_interleaved) {
        *way = MM_SINGLE_ORDERED;
    } else if (dispatch == MM_DISPATCH_BATCH
               || (dispatch == MM_DISPATCH_AUTO && what == MM_DO_DISCARD && b->count > 1)) {
        *way = MM_BATCHED;
    } else if (dispatch == MM_DISPATCH_LOOP) {
        *way = MM_SINGLE_REQUESTED;
    } else if (b->count < 2) {
        *way = MM_SINGLE_ONE;
    } else if (b->ordered) {
        *way = MM_SINGLE_ORDERED;
    } else if (cu->MemPrefetchBatchAsync == NULL) {
        *way = MM_SINGLE_NO_BATCH_CALL;
    } else if (!cu->concurrent_access) {
        *way = MM_SINGLE_NO_CONCURRENT_ACCESS;
    } else {
        return false;
    }
    return true;
}

size_t
mm_dispatch_decide(mm_driver *cu, mm_action what, const mm_batch *b, mm_dispatch dispatch,
                   unsigned char *routes)
{
    mm_route all = MM_BATCHED;
    bool same = way_of_all(cu, what, b, dispatch, &all);
    size_t together = 0, last = 0;

    for (size_t i = 0; i < b->count; i++) {
        routes[i] = (unsigned char)(same ? all : way_of(cu, what, &b->transfers[i]));
        if (routes[i] == MM_BATCHED) {
            together++;
            last = i;
        }
    }
    if (!same && together == 1) {
        routes[last] = MM_SINGLE_REMAINDER;
        return 0;
    }
    return together;
}

bool
mm_dispatch_defers(const mm_batch *b, mm_defer defer, size_t *bytes, CUmemLocation *where)
{
    size_t to_device = 0, to_host = 0;

    for (size_t i = 0; i < b->count; i++) {
        bool device = b->transfers[i].where.type == CU_MEM_LOCATION_TYPE_DEVICE;
        *(device ? &to_device : &to_host) += b->transfers[i].range.size;
    }
    *bytes = to_device > to_host ? to_device : to_host;
    *where = to_device > to_host ? mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0) : mm_host();
    return mm_is_deferred(*bytes, *where, defer);
}

/* --- calling ---------------------------------------------------------------------------- */

static CUresult
call_batch(mm_driver *cu, mm_action what, const mm_batch_arrays *w, size_t count, size_t locations,
           CUstream stream)
{
    if (what == MM_DO_DISCARD) {
        return cu->MemDiscardBatchAsync(w->starts, w->sizes, count, 0, stream);
    }
    return (what == MM_DO_PREFETCH ? cu->MemPrefetchBatchAsync
                                   : cu->MemDiscardAndPrefetchBatchAsync)(
        w->starts, w->sizes, count, w->where, w->first, locations, 0, stream);
}

/* The index of the first range that the checks find wrong; count if none is. */
static size_t
find_bad_range(mm_driver *cu, mm_operation op, const mm_batch_arrays *w, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        mm_range range = {.start = w->starts[i], .size = w->sizes[i]};
        mm_status found;
        if (mm_range_check(cu, &range, op, &found) < 0 && found.kind == MM_BAD_VALUE) {
            return i;
        }
    }
    return count;
}

/* The index of the location with the highest NUMA node, which is the likeliest to be missing; the
 * number of locations if none is a node. *several: there are different nodes. */
static size_t
find_numa_node(const mm_batch_arrays *w, size_t locations, bool *several)
{
    size_t node = locations;

    *several = false;
    for (size_t i = 0; i < locations; i++) {
        if (w->where[i].type == CU_MEM_LOCATION_TYPE_HOST_NUMA) {
            *several = *several || (node < locations && w->where[i].id != w->where[node].id);
            node = node == locations || w->where[i].id > w->where[node].id ? i : node;
        }
    }
    return node;
}

static int
describe_batch(const mm_batch_arrays *w, size_t count, mm_status *st)
{
    CUdeviceptr start = w->starts[0], end = start;

    for (size_t i = 0; i < count; i++) {
        start = w->starts[i] < start ? w->starts[i] : start;
        end = w->starts[i] + w->sizes[i] > end ? w->starts[i] + w->sizes[i] : end;
    }
    mm_status_add(st, "The driver refused a batch of %zu ranges from 0x%llx to 0x%llx.", count,
                  (unsigned long long)start, (unsigned long long)end);
    return -1;
}

/* Names the range or location at fault, or else describes the batch. */
static int
explain_batch(mm_driver *cu, mm_operation op, const mm_batch_arrays *w, size_t count,
              size_t locations, mm_status *st)
{
    bool several = false, refused = st->code == CUDA_ERROR_INVALID_VALUE && cu->concurrent_access;
    size_t bad = refused ? find_bad_range(cu, op, w, count) : 0;
    size_t node = bad == count ? find_numa_node(w, locations, &several) : locations;
    size_t at = bad < count ? bad : (node < locations ? w->first[node] : 0);
    mm_range range = {.start = w->starts[at], .size = w->sizes[at]};
    char text[MM_LOCATION_TEXT];

    if (bad == count && node == locations && count > 1) {
        return describe_batch(w, count, st);
    }
    if (several) {
        return mm_fail(st, MM_BAD_VALUE,
                       "%s or another node of the batch: this system has no such NUMA node",
                       mm_location_text(w->where[node], text));
    }
    return mm_range_diagnose(cu, range, w->where[node < locations ? node : 0], op, st);
}

static int
issue_batch(mm_driver *cu, mm_action what, const mm_batch_arrays *w, size_t count, CUstream stream,
            mm_status *st)
{
    static const char *const names[] = {"cuMemPrefetchBatchAsync", "cuMemDiscardBatchAsync",
                                        "cuMemDiscardAndPrefetchBatchAsync"};
    size_t locations = what == MM_DO_DISCARD ? 0 : w->locations;
    CUresult code;

    /* The arrays may hold more ranges than are meant. */
    while (locations > 0 && w->first[locations - 1] >= count) {
        locations--;
    }
    code = call_batch(cu, what, w, count, locations, stream);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, names[what], (int)code);
    return explain_batch(cu, what == MM_DO_DISCARD ? MM_DISCARD : MM_PREFETCH, w, count, locations,
                         st);
}

/* One range by the call that is made for one: no arrays, no allocation. */
static int
issue_one(mm_driver *cu, mm_action what, const mm_transfer *m, CUstream stream, mm_status *st)
{
    CUdeviceptr start = m->range.start;
    size_t size = m->range.size, first = 0;
    CUmemLocation where = m->where;
    const char *function = "cuMemPrefetchAsync";
    CUresult code;

    if (what == MM_DO_PREFETCH) {
        code = cu->MemPrefetchAsync(start, size, where, 0, stream);
    } else if (what == MM_DO_DISCARD) {
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
    return mm_range_diagnose(cu, m->range, where, what == MM_DO_DISCARD ? MM_DISCARD : MM_PREFETCH,
                             st);
}

static int
issue_edges(mm_driver *cu, const mm_batch *edges, size_t from, size_t to, CUstream stream,
            mm_status *st)
{
    for (size_t i = from; i < to; i++) {
        const mm_transfer *edge = &edges->transfers[i];
        if (edge->range.size > 0 && issue_one(cu, MM_DO_PREFETCH, edge, stream, st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Adds to a failure how many ranges have lost their contents. */
static int
add_discarded_count(mm_status *st, size_t count)
{
    if (count == 0) {
        mm_status_add(st, "Nothing was discarded.");
    } else {
        mm_status_add(st, "%zu range%s discarded before.", count, count == 1 ? " was" : "s were");
    }
    return -1;
}

/* Issues the moves that have calls of their own, and before each its edges if they are interleaved. */
static int
issue_singles(mm_driver *cu, mm_action what, const mm_batch *b, const mm_batch *edges,
              const mm_batch_arrays *work, size_t together, CUstream stream, mm_status *st)
{
    size_t done = together;

    for (size_t i = 0; i < b->count; i++) {
        if (work->routes[i] == MM_BATCHED) {
            continue;
        }
        if (b->edges_interleaved && issue_edges(cu, edges, 2 * i, 2 * i + 2, stream, st) < 0) {
            return add_discarded_count(st, done);
        }
        if (issue_one(cu, what, &b->transfers[i], stream, st) < 0) {
            return what == MM_DO_PREFETCH || done == 0 ? -1 : add_discarded_count(st, done);
        }
        done++;
    }
    return 0;
}

/* Edges come first, so that nothing is discarded if one of them fails. */
static int
issue(mm_driver *cu, mm_action what, const mm_batch *b, const mm_batch *edges,
      const mm_batch_arrays *arrays, const mm_batch_arrays *work, size_t together, CUstream stream,
      mm_status *st)
{
    if (edges != NULL && !b->edges_interleaved
        && issue_edges(cu, edges, 0, edges->count, stream, st) < 0) {
        return add_discarded_count(st, 0);
    }
    if (together > 0 && issue_batch(cu, what, arrays, together, stream, st) < 0) {
        return -1;
    }
    return issue_singles(cu, what, b, edges, work, together, stream, st);
}

/* All calls of one operation, and the host function that defers them, go to one stream. */
static int
run_in_scope(mm_driver *cu, mm_action what, const mm_batch *b, const mm_batch *edges,
             const mm_batch_arrays *prebuilt, mm_batch_arrays *work,
             const mm_dispatch_options *how, mm_status *st)
{
    size_t together = mm_dispatch_decide(cu, what, b, how->dispatch, work->routes), bytes;
    mm_batch_stream s = {.stream = how->stream};
    CUmemLocation where;
    int rc = 0;

    if ((what != MM_DO_PREFETCH || together > 0)
        && mm_batch_stream_get(cu, how->stream, &s, st) < 0) {
        return -1;
    }
    /* Those that can go together come first, so arrays of all begin with them. */
    if (together > 0 && (prebuilt == NULL || (together != b->count && together != b->batchable))) {
        mm_batch_arrays_fill(work, b, false);
        prebuilt = work;
    }
    /* Once for all: what follows on the stream is then behind the host function too. */
    if (what != MM_DO_DISCARD && mm_dispatch_defers(b, how->defer, &bytes, &where)) {
        rc = mm_queue_host_function(cu, s.stream, st);
    }
    if (rc == 0) {
        rc = issue(cu, what, b, edges, prebuilt, work, together, s.stream, st);
    }
    mm_batch_stream_release(cu, &s);
    return rc;
}

int
mm_dispatch_check(mm_driver *cu, mm_action what, const mm_dispatch_options *how, mm_status *st)
{
    static const char *const names[] = {"a prefetch", "a discard", "discard_prefetch"};
    static const char *const needs[] = {"dispatch=\"batch\"", "discard", "discard_prefetch"};

    if (cu->MemDiscardBatchAsync == NULL
        && (what != MM_DO_PREFETCH || how->dispatch == MM_DISPATCH_BATCH)) {
        return mm_driver_lacks(cu, needs[what], st);
    }
    return mm_stream_refuse_capture(cu, how->stream, names[what], st);
}

int
mm_dispatch_run(mm_driver *cu, mm_action what, const mm_batch *b, const mm_batch *edges,
                const mm_batch_arrays *prebuilt, mm_batch_arrays *work,
                const mm_dispatch_options *how, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (mm_dispatch_check(cu, what, how, st) < 0) {
        return -1;
    }
    if (b->count == 0) {
        return 0;
    }
    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    rc = run_in_scope(cu, what, b, edges, prebuilt, work, how, st);
    mm_scope_leave(&scope);
    return rc;
}
