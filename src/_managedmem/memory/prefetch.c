/* prefetch.c: the driver calls of one range in a stream. The measurements behind the sizes from
 * which prefetches are deferred are in docs/develop/dispatch.rst.
 *
 * A prefetch of one range can run on the legacy stream itself. Batch and discard calls cannot:
 * stream.c has the stream that stands in for the legacy stream. */
#include "prefetch.h"

#include <assert.h>

#include "recorded_calls.h"

static void CUDA_CB
do_nothing(void *unused)
{
    (void)unused;
}

/* From these sizes on, deferring saves more than the 30 us that it costs. A prefetch to the host
 * does all of its work in the calling thread, one to a device only a part of it. */
bool
mm_is_deferred(size_t size, CUmemLocation location, mm_defer defer)
{
    size_t from = (size_t)(location.type == CU_MEM_LOCATION_TYPE_DEVICE ? 16 : 2) << 20;

    assert(defer == MM_DEFER_AUTO || defer == MM_DEFER_NO || defer == MM_DEFER_YES);
    return defer == MM_DEFER_YES || (defer == MM_DEFER_AUTO && size >= from);
}

int
mm_queue_host_function(mm_driver *cu, CUstream stream, mm_status *st)
{
    MM_TRY(cu, LaunchHostFunc, st, stream, do_nothing, NULL);
    return 0;
}

int
mm_range_issue(mm_driver *cu, mm_operation op, mm_range range, CUmemLocation location,
               CUstream stream, mm_status *st)
{
    const char *function = "cuMemPrefetchAsync";
    CUmemLocation locations[] = {mm_location_in_array(location)};
    size_t first = 0;
    CUresult code;

    assert(op == MM_PREFETCH || mm_discards(op));
    assert(range.size > 0);
    assert(mm_in_scope() || !mm_is_default_stream(stream));
    if (op == MM_PREFETCH) {
        code = cu->MemPrefetchAsync(range.start, range.size, location, 0, stream);
    } else if (op == MM_DISCARD) {
        function = "cuMemDiscardBatchAsync";
        code = cu->MemDiscardBatchAsync(&range.start, &range.size, 1, 0, stream);
    } else {
        function = "cuMemDiscardAndPrefetchBatchAsync";
        code = cu->MemDiscardAndPrefetchBatchAsync(&range.start, &range.size, 1, locations, &first,
                                                   1, 0, stream);
    }
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, function, (int)code);
    return mm_range_diagnose(cu, range, location, op, st);
}

/* A default stream needs the caller's scope. */
static int
prefetch_in_scope(mm_driver *cu, mm_range range, CUmemLocation location, CUstream stream,
                  mm_defer defer, mm_status *st)
{
    if (mm_stream_refuse_capture(cu, stream, "a prefetch", st) < 0) {
        return -1;
    }
    if (range.size == 0) {
        return 0;
    }
    if (mm_open_destination(cu, location, st) < 0) {
        return -1;
    }
    if (mm_is_deferred(range.size, location, defer)
        && mm_queue_host_function(cu, stream, st) < 0) {
        return -1;
    }
    return mm_range_issue(cu, MM_PREFETCH, range, location, stream, st);
}

/* prefetch_in_scope, in a scope of its own. */
static int
prefetch_range(mm_driver *cu, mm_range range, CUmemLocation location, CUstream stream,
               mm_defer defer, mm_status *st)
{
    int rc;

    MM_RUN_IN(rc, mm_scope_enter, MM_ANY_DEVICE, cu, st,
              prefetch_in_scope(cu, range, location, stream, defer, st));
    return rc;
}

/* Out of line, so that it costs prefetches only one branch while nothing records. */
static MM_COLD int
prefetch_and_record(mm_driver *cu, mm_range range, CUmemLocation location, CUstream stream,
                    mm_defer defer, mm_status *st)
{
    uint64_t begun = mm_raw_clock();
    int rc = prefetch_range(cu, range, location, stream, defer, st);

    if (rc == 0) {
        mm_record_call(MM_PREFETCH, range, location, 0, begun);
    }
    return rc;
}

int
mm_range_prefetch(mm_driver *cu, mm_range range, CUmemLocation location, CUstream stream,
                  mm_defer defer, mm_status *st)
{
    if (mm_is_recording()) {
        return prefetch_and_record(cu, range, location, stream, defer, st);
    }
    /* Only a default stream depends on the thread's context. Captures of other streams do not
     * forbid prefetches, so the capture mode can stay. */
    return mm_is_default_stream(stream)
               ? prefetch_range(cu, range, location, stream, defer, st)
               : prefetch_in_scope(cu, range, location, stream, defer, st);
}

int
mm_range_populate(mm_driver *cu, mm_range range, CUmemLocation location, CUstream stream,
                  mm_status *st)
{
    return prefetch_range(cu, range, location, stream, MM_DEFER_AUTO, st);
}

/* --- host views --------------------------------------------------------------------------- */

static int
wait_for(mm_driver *cu, CUstream stream, mm_status *st)
{
    return mm_stream_synchronize(cu, (mm_device_stream){stream, MM_ANY_DEVICE}, st);
}

/* Waits for earlier work first, because its moves do not belong to the view. */
static MM_COLD int
view_and_record(mm_driver *cu, mm_range range, CUstream stream, mm_status *st)
{
    uint64_t begun;

    if (mm_stream_refuse_capture(cu, stream, "a prefetch", st) < 0
        || wait_for(cu, stream, st) < 0) {
        return -1;
    }
    begun = mm_raw_clock();
    if (prefetch_range(cu, range, mm_host(), stream, MM_DEFER_NO, st) < 0
        || wait_for(cu, stream, st) < 0) {
        return -1;
    }
    mm_record_call(MM_QUERY, range, mm_host(), 0, begun);
    return 0;
}

int
mm_range_view_on_host(mm_driver *cu, mm_range range, CUstream stream, mm_status *st)
{
    if (mm_is_recording()) {
        return view_and_record(cu, range, stream, st);
    }
    return mm_range_prefetch(cu, range, mm_host(), stream, MM_DEFER_NO, st) < 0
               ? -1
               : wait_for(cu, stream, st);
}
