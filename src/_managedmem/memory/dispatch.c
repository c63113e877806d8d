/* dispatch.c: routes and driver calls of several ranges. The measurements behind the routes are in
 * docs/develop/dispatch.rst. */
#include "dispatch.h"

#include <assert.h>
#include <stdlib.h>

#include "recorded_calls.h"

/* --- arrays ----------------------------------------------------------------------------- */

int
mm_batch_arrays_init(mm_batch_arrays *arrays, size_t count, mm_status *st)
{
    arrays->block = NULL;
    arrays->locations = 0;
    if (count <= MM_INLINE_COUNT) {
        arrays->starts = arrays->inline_.starts;
        arrays->sizes = arrays->inline_.sizes;
        arrays->first = arrays->inline_.first;
        arrays->location = arrays->inline_.location;
        arrays->routes = arrays->inline_.routes;
        return 0;
    }
    arrays->block =
        calloc(count, sizeof *arrays->starts + sizeof *arrays->sizes + sizeof *arrays->first
                          + sizeof *arrays->location + sizeof *arrays->routes);
    if (arrays->block == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", count);
    }
    arrays->starts = arrays->block;
    arrays->sizes = (size_t *)(arrays->starts + count);
    arrays->first = arrays->sizes + count;
    arrays->location = (CUmemLocation *)(arrays->first + count);
    arrays->routes = (unsigned char *)(arrays->location + count);
    return 0;
}

void
mm_batch_arrays_free(mm_batch_arrays *arrays)
{
    free(arrays->block);
}

void
mm_batch_arrays_fill(mm_batch_arrays *arrays, const mm_batch *b, bool all)
{
    size_t count = 0;

    arrays->locations = 0;
    for (size_t i = 0; i < b->count; i++) {
        const mm_transfer *transfer = &b->transfers[i];
        if (!all && arrays->routes[i] != MM_BATCHED) {
            continue;
        }
        arrays->starts[count] = transfer->range.start;
        arrays->sizes[count] = transfer->range.size;
        if (count == 0
            || !mm_same_location(transfer->location, arrays->location[arrays->locations - 1])) {
            arrays->location[arrays->locations] = mm_location_in_array(transfer->location);
            arrays->first[arrays->locations++] = count;
        }
        count++;
    }
    assert(arrays->locations <= count);
}

/* --- deciding --------------------------------------------------------------------------- */

/* The last prefetch is the cheapest sign of residency that exists: a query of 50 to 110 ns. */
static bool
was_prefetched_there(mm_driver *cu, const mm_transfer *transfer)
{
    int last = CU_DEVICE_INVALID;

    return cu->MemRangeGetAttribute(&last, sizeof last,
                                    CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
                                    transfer->range.start, transfer->range.size)
               == CUDA_SUCCESS
           && last == transfer->location.id;
}

/* A batch call costs about 18 us for each range of any size. A single call costs less if the pages
 * are already resident (2 to 4 us) or are sent to the host. To a device it costs more, except for
 * a prefetch of less than 64 KiB, where both cost the same. */
static mm_route
route_transfer(mm_driver *cu, mm_operation op, const mm_transfer *transfer)
{
    if (transfer->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return MM_SINGLE_TO_HOST;
    }
    if (mm_is_small_transfer(op, transfer)) {
        return MM_SINGLE_SMALL;
    }
    return was_prefetched_there(cu, transfer) ? MM_SINGLE_RESIDENT : MM_BATCHED;
}

/* Stores in *route the route that all transfers share; false if each transfer has its own. */
static bool
route_whole_batch(mm_driver *cu, mm_operation op, const mm_batch *b, mm_dispatch dispatch,
                  mm_route *route)
{
    /* Discards cost the same on both routes, so one call serves all of them. */
    if (b->edges_interleaved) {
        *route = MM_SINGLE_ORDERED;
    } else if (dispatch == MM_DISPATCH_BATCH
               || (dispatch == MM_DISPATCH_AUTO && op == MM_DISCARD && b->count > 1)) {
        *route = MM_BATCHED;
    } else if (dispatch == MM_DISPATCH_LOOP) {
        *route = MM_SINGLE_REQUESTED;
    } else if (b->count < 2) {
        *route = MM_SINGLE_ONE;
    } else if (b->ordered) {
        *route = MM_SINGLE_ORDERED;
    } else if (cu->MemPrefetchBatchAsync == NULL) {
        *route = MM_SINGLE_NO_BATCH_CALL;
    } else if (!cu->concurrent_access) {
        *route = MM_SINGLE_NO_CONCURRENT_ACCESS;
    } else {
        return false;
    }
    return true;
}

size_t
mm_dispatch_decide(mm_driver *cu, mm_operation op, const mm_batch *b, mm_dispatch dispatch,
                   unsigned char *routes)
{
    mm_route shared = MM_BATCHED;
    bool same = route_whole_batch(cu, op, b, dispatch, &shared);
    size_t batched = 0, last = 0;

    assert(mm_in_scope());
    assert(op == MM_PREFETCH || mm_discards(op));
    assert(b->batchable <= b->count);
    for (size_t i = 0; i < b->count; i++) {
        routes[i] = (unsigned char)(same ? shared : route_transfer(cu, op, &b->transfers[i]));
        if (routes[i] == MM_BATCHED) {
            batched++;
            last = i;
        }
    }
    if (!same && batched == 1) {
        routes[last] = MM_SINGLE_REMAINDER;
        return 0;
    }
    return batched;
}

bool
mm_dispatch_defers(const mm_batch *b, mm_defer defer, size_t *bytes, CUmemLocation *location)
{
    size_t to_device = 0, to_host = 0;

    for (size_t i = 0; i < b->count; i++) {
        bool device = b->transfers[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        *(device ? &to_device : &to_host) += b->transfers[i].range.size;
    }
    *bytes = to_device > to_host ? to_device : to_host;
    *location = to_device > to_host ? mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0) : mm_host();
    return mm_is_deferred(*bytes, *location, defer);
}

/* --- diagnosing a batch call ------------------------------------------------------------ */

/* The index of the first range that a check refuses; count if all pass. */
static size_t
find_bad_range(mm_driver *cu, mm_operation op, const mm_batch_arrays *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        mm_range range = {.start = arrays->starts[i], .size = arrays->sizes[i]};
        mm_status found;
        if (mm_range_check(cu, &range, op, &found) < 0 && mm_is_bad_argument(&found)) {
            return i;
        }
    }
    return count;
}

/* The index of the location with the highest NUMA node, which is the likeliest to be missing; the
 * number of locations if none is a node. *several becomes true if the nodes differ. */
static size_t
find_numa_node(const mm_batch_arrays *arrays, size_t locations, bool *several)
{
    const CUmemLocation *location = arrays->location;
    size_t node = locations;

    *several = false;
    for (size_t i = 0; i < locations; i++) {
        if (location[i].type == CU_MEM_LOCATION_TYPE_HOST_NUMA) {
            *several = *several || (node < locations && location[i].id != location[node].id);
            node = node == locations || location[i].id > location[node].id ? i : node;
        }
    }
    return node;
}

static int
describe_batch(const mm_batch_arrays *arrays, size_t count, mm_status *st)
{
    CUdeviceptr start = arrays->starts[0], end = start;

    assert(count > 0);
    for (size_t i = 0; i < count; i++) {
        CUdeviceptr range_end = arrays->starts[i] + arrays->sizes[i];
        start = arrays->starts[i] < start ? arrays->starts[i] : start;
        end = range_end > end ? range_end : end;
    }
    mm_status_add(st, "The driver refused a batch of %zu ranges from 0x%llx to 0x%llx.", count,
                  (unsigned long long)start, (unsigned long long)end);
    return -1;
}

/* Names the range or location at fault, or else describes the batch. */
static int
diagnose_batch(mm_driver *cu, mm_operation op, const mm_batch_arrays *arrays, size_t count,
               size_t locations, mm_status *st)
{
    bool several = false, refused = st->code == CUDA_ERROR_INVALID_VALUE && cu->concurrent_access;
    size_t bad = refused ? find_bad_range(cu, op, arrays, count) : 0;
    size_t node = bad == count ? find_numa_node(arrays, locations, &several) : locations;
    size_t at = bad < count ? bad : (node < locations ? arrays->first[node] : 0);
    mm_range range = {.start = arrays->starts[at], .size = arrays->sizes[at]};
    char text[MM_LOCATION_TEXT];

    assert(at < count);
    if (bad == count && node == locations && count > 1) {
        return describe_batch(arrays, count, st);
    }
    if (several) {
        return mm_fail(st, MM_BAD_VALUE,
                       "this system lacks a NUMA node of the batch: %s or another one",
                       mm_location_text(arrays->location[node], text));
    }
    return mm_range_diagnose(cu, range, arrays->location[node < locations ? node : 0], op, st);
}

/* --- issuing ---------------------------------------------------------------------------- */

static int
issue_batch(const mm_dispatch_call *call, mm_status *st)
{
    static const char *const functions[] = {
        [MM_PREFETCH] = "cuMemPrefetchBatchAsync",
        [MM_DISCARD] = "cuMemDiscardBatchAsync",
        [MM_DISCARD_PREFETCH] = "cuMemDiscardAndPrefetchBatchAsync",
    };
    const mm_batch_arrays *arrays = call->arrays;
    size_t count = call->batched, locations = call->op == MM_DISCARD ? 0 : arrays->locations;
    CUstream stream = call->stream.stream;
    mm_driver *cu = call->cu;
    CUresult code;

    assert(!mm_is_legacy_stream(stream));
    /* Prebuilt arrays may hold more ranges than this call takes. */
    while (locations > 0 && arrays->first[locations - 1] >= count) {
        locations--;
    }
    if (call->op == MM_DISCARD) {
        code = cu->MemDiscardBatchAsync(arrays->starts, arrays->sizes, count, 0, stream);
    } else {
        code = (call->op == MM_PREFETCH ? cu->MemPrefetchBatchAsync
                                        : cu->MemDiscardAndPrefetchBatchAsync)(
            arrays->starts, arrays->sizes, count, arrays->location, arrays->first, locations, 0,
            stream);
    }
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, functions[call->op], (int)code);
    return diagnose_batch(cu, call->op, arrays, count, locations, st);
}

static int
issue_edges(const mm_dispatch_call *call, size_t from, size_t to, mm_status *st)
{
    assert(to <= call->edges->count);
    for (size_t i = from; i < to; i++) {
        const mm_transfer *edge = &call->edges->transfers[i];
        if (edge->range.size > 0
            && mm_range_issue(call->cu, MM_PREFETCH, edge->range, edge->location,
                              call->stream.stream, st)
                   < 0) {
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
        mm_status_add(st, "%zu range%s been discarded before.", count,
                      count == 1 ? " had" : "s had");
    }
    return -1;
}

/* Edges are a part of their discard_prefetch, not calls of the user. */
static MM_COLD void
record_transfers(const mm_dispatch_call *call)
{
    const mm_batch *b = call->batch;

    for (size_t i = 0; i < b->count; i++) {
        mm_record_call(call->op, b->transfers[i].range, b->transfers[i].location, 0, call->begun);
    }
}

/* Edges are prefetched before the first discard, so that nothing is discarded if an edge fails.
 * Interleaved edges are prefetched right before their own transfer. */
int
mm_dispatch_issue(const mm_dispatch_call *call, mm_status *st)
{
    const mm_batch *b = call->batch;
    size_t done = call->batched;

    assert(mm_in_scope());
    if (!b->edges_interleaved && issue_edges(call, 0, call->edges->count, st) < 0) {
        return add_discarded_count(st, 0);
    }
    if (call->batched > 0 && issue_batch(call, st) < 0) {
        return -1;
    }
    for (size_t i = 0; i < b->count; i++) {
        const mm_transfer *transfer = &b->transfers[i];
        if (call->work->routes[i] == MM_BATCHED) {
            continue;
        }
        if (b->edges_interleaved && issue_edges(call, 2 * i, 2 * i + 2, st) < 0) {
            return add_discarded_count(st, done);
        }
        if (mm_range_issue(call->cu, call->op, transfer->range, transfer->location,
                           call->stream.stream, st)
            < 0) {
            return call->op == MM_PREFETCH || done == 0 ? -1 : add_discarded_count(st, done);
        }
        done++;
    }
    assert(done == b->count);
    if (call->begun != 0) {
        record_transfers(call);
    }
    return 0;
}

int
mm_dispatch_check(mm_driver *cu, mm_operation op, const mm_dispatch_options *options,
                  mm_status *st)
{
    static const struct {
        const char *name, *needed;
    } texts[] = {
        [MM_PREFETCH] = {"a prefetch", "dispatch=\"batch\""},
        [MM_DISCARD] = {"a discard", "discard"},
        [MM_DISCARD_PREFETCH] = {"discard_prefetch", "discard_prefetch"},
    };

    assert(op == MM_PREFETCH || mm_discards(op));
    if (cu->MemDiscardBatchAsync == NULL
        && (op != MM_PREFETCH || options->dispatch == MM_DISPATCH_BATCH)) {
        (void)mm_driver_lacks(cu, texts[op].needed, st);
        mm_status_add(st, "(managedmem.%s(..., unsupported=\"skip\") skips what is unsupported)",
                      mm_skipping_function(op));
        return -1;
    }
    return mm_stream_refuse_capture(cu, options->stream, texts[op].name, st);
}

static int
open_destinations(const mm_dispatch_call *call, mm_status *st)
{
    const mm_batch *b = call->batch;

    for (size_t i = 0; call->op != MM_DISCARD && i < b->count; i++) {
        if (mm_open_destination(call->cu, b->transfers[i].location, st) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
enter_in_scope(mm_dispatch_call *call, const mm_dispatch_options *options, mm_status *st)
{
    const mm_batch *b = call->batch;
    CUmemLocation location;
    size_t bytes;

    if (open_destinations(call, st) < 0) {
        return -1;
    }
    call->batched =
        mm_dispatch_decide(call->cu, call->op, b, options->dispatch, call->work->routes);
    call->stream = (mm_batch_stream){.stream = options->stream};
    if ((call->op != MM_PREFETCH || call->batched > 0)
        && mm_batch_stream_acquire(call->cu, options->stream, &call->stream, st) < 0) {
        return -1;
    }
    /* The prebuilt arrays begin with the batchable transfers, so they also serve a call of exactly
     * these. */
    call->arrays = call->prebuilt;
    if (call->batched > 0
        && (call->prebuilt == NULL
            || (call->batched != b->count && call->batched != b->batchable))) {
        mm_batch_arrays_fill(call->work, b, false);
        call->arrays = call->work;
    }
    /* One host function serves all calls: later calls on the stream run after it. */
    if (call->op != MM_DISCARD && mm_dispatch_defers(b, options->defer, &bytes, &location)
        && mm_queue_host_function(call->cu, call->stream.stream, st) < 0) {
        mm_batch_stream_release(call->cu, &call->stream);
        return -1;
    }
    return 0;
}

int
mm_dispatch_enter(mm_dispatch_call *call, const mm_dispatch_options *options, mm_status *st)
{
    call->begun = mm_call_begin();
    if (mm_dispatch_check(call->cu, call->op, options, st) < 0) {
        return -1;
    }
    if (call->batch->count == 0) {
        return 0;
    }
    if (mm_scope_enter(&call->scope, call->cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    if (enter_in_scope(call, options, st) < 0) {
        mm_scope_leave(&call->scope);
        return -1;
    }
    return 1;
}

void
mm_dispatch_leave(mm_dispatch_call *call)
{
    mm_batch_stream_release(call->cu, &call->stream);
    mm_scope_leave(&call->scope);
}

int
mm_batch_run(mm_driver *cu, mm_operation op, mm_batch *b, const mm_dispatch_options *options,
             mm_status *st)
{
    mm_batch_arrays work;
    mm_batch edges;
    mm_dispatch_call call;
    int rc;

    /* One range needs no arrays. */
    if (op == MM_PREFETCH && b->count == 1 && options->dispatch != MM_DISPATCH_BATCH) {
        return mm_range_prefetch(cu, b->transfers[0].range, b->transfers[0].location,
                                 options->stream, options->defer, st);
    }
    rc = mm_batch_prepare(b, op, &edges, st);
    call.cu = cu;
    call.op = op;
    call.batch = b;
    call.edges = &edges;
    call.prebuilt = NULL;
    call.work = &work;
    work.block = NULL;
    if (rc == 0 && (rc = mm_batch_arrays_init(&work, b->count, st)) == 0
        && (rc = mm_dispatch_enter(&call, options, st)) > 0) {
        rc = mm_dispatch_issue(&call, st);
        mm_dispatch_leave(&call);
    }
    mm_batch_arrays_free(&work);
    mm_batch_free(&edges);
    return rc;
}
