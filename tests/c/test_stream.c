/* test_stream.c: calls in scopes, and the default streams of devices and contexts: captures are
 * detected there, work follows work there, and streams that stand in for them end. */
#include "world.h"

/* A capturing stream of the device, for which the device's legacy stream waits. */
static CUstream
begin_capture_on(int device)
{
    CUstream stream = world_make_stream(device, CU_STREAM_DEFAULT);

    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    return stream;
}

/* Checks that the capture is still valid. */
static void
end_capture(CUstream stream)
{
    CUgraph graph = NULL;

    CHECK_EQUAL(world.end_capture(stream, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
}

static void
check_capturing(int rc, const mm_status *st)
{
    CHECK_EQUAL(rc, -1);
    CHECK_EQUAL((int)st->kind, (int)MM_CAPTURING);
}

/* Prefetches go to the default stream of device 0 there. */
TEST(a_thread_without_a_context_sees_captures)
{
    const mm_dispatch_options options = {NULL, MM_DISPATCH_AUTO, MM_DEFER_NO};
    CUmemLocation location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    mm_memory *m = world_allocate(1 << 20);
    mm_range range = {m->start, m->size, m->start};
    CUstream stream = begin_capture_on(0);
    mm_status st;

    check_capturing(mm_range_prefetch(world.cu, range, location, NULL, MM_DEFER_NO, &st), &st);
    check_capturing(mm_dispatch_check(world.cu, MM_DISCARD, &options, &st), &st);
    CHECK_EQUAL(world.context_depth(), 0);
    end_capture(stream);
    CHECK_OK(mm_range_prefetch(world.cu, range, location, NULL, MM_DEFER_NO, &st), &st);
    CHECK_OK(mm_dispatch_check(world.cu, MM_DISCARD, &options, &st), &st);
    mm_memory_release(m);
}

static int
follow(CUstream stream, int device, CUstream producer, int producer_device, mm_status *st)
{
    return mm_stream_follow(world.cu, (mm_device_stream){stream, device},
                            (mm_device_stream){producer, producer_device}, st);
}

TEST(following_sees_captures_of_the_other_device)
{
    CUstream own = NULL, capturing;
    mm_scope scope;
    mm_status st;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->StreamCreate(&own, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    capturing = begin_capture_on(1);
    check_capturing(follow(own, 0, NULL, 1, &st), &st);
    check_capturing(follow(NULL, 1, own, 0, &st), &st);
    CHECK_OK(follow(own, 0, NULL, 0, &st), &st);
    end_capture(capturing);
    CHECK_OK(follow(own, 0, NULL, 1, &st), &st);
    CHECK_EQUAL(world.cu->StreamDestroy(own), CUDA_SUCCESS);
    mm_scope_leave(&scope);
}

/* Each device has a legacy stream of its own. */
TEST(following_waits_between_legacy_streams)
{
    mm_status st;

    world.log_clear();
    CHECK_OK(follow(NULL, 0, CU_STREAM_LEGACY, 0, &st), &st);
    CHECK_EQUAL(world_calls("cuStreamWaitEvent"), 0);
    CHECK_OK(follow(NULL, 0, NULL, 1, &st), &st);
    CHECK_EQUAL(world_calls("cuStreamWaitEvent"), 1);
    CHECK_EQUAL(world_calls("cuEventDestroy"), 1);
}

/* A context that is not the primary one may end: here the driver has another primary one. */
TEST(nothing_is_kept_of_other_contexts)
{
    size_t streams = world.live_streams();
    mm_driver cu = *world.cu;
    mm_memory *m;
    mm_scope scope;
    mm_batch b;
    mm_status st;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    atomic_store(&cu.primary[0], (CUcontext)&cu);
    m = world_allocate(1 << 20);
    mm_batch_one(&b, (mm_range){m->start, m->size, m->start}, mm_host());
    world.log_clear();
    CHECK_OK(world_run(&cu, MM_DISCARD, &b, NULL, MM_DISPATCH_AUTO, &st), &st);
    CHECK_EQUAL(world_calls("cuStreamCreate"), 1);
    CHECK_EQUAL(world.live_streams(), streams);
    mm_memory_release(m);
    mm_scope_leave(&scope);
}

/* No context and no capture mode of a scope may be left, whichever of its calls fails. */
TEST(a_call_in_a_scope_leaves_it_and_names_the_failed_function)
{
    static const char *const functions[] = {
        "cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode", "cuStreamSynchronize"};
    mm_status st;

    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        world.fail(functions[i], 1, CUDA_ERROR_LAUNCH_FAILED, 0);
        CHECK_EQUAL(mm_stream_synchronize(world.cu, (mm_device_stream){NULL, 1}, &st), -1);
        CHECK_EQUAL(world.fail_fired(), 1);
        CHECK_EQUAL(st.code, CUDA_ERROR_LAUNCH_FAILED);
        CHECK(strcmp(st.function, functions[i]) == 0);
        CHECK_EQUAL(world.context_depth(), 0);
        world.fail_clear();
    }
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){NULL, 1}, &st), &st);
}

#ifndef NDEBUG
TEST(scopes_are_counted)
{
    mm_scope outer, inner;
    mm_status st;

    CHECK(!mm_in_scope());
    CHECK_OK(mm_scope_enter(&outer, world.cu, 1, &st), &st);
    CHECK_OK(mm_scope_enter_default_relaxed(&inner, world.cu, 1, &st), &st);
    mm_scope_leave(&inner);
    CHECK(mm_in_scope());
    mm_scope_leave(&outer);
    CHECK(!mm_in_scope());
}
#endif

TEST_MAIN(world_open_devices)
