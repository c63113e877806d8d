/* test_recorded_calls.c: the log of prefetches, discards and advice: one event for each range of a
 * call that succeeded; none for failed calls, repeated advice and edges. And captures of listed
 * streams. */
#include "memory/recorded_calls.h"
#include "world.h"

enum { PAGE = 4096, SIZE = 16 * PAGE, MOST = 64 };

static mm_event calls[MOST];
static size_t count;
static mm_memory *memory;
static mm_range range;
static mm_status st;
static CUmemLocation device0, device1;

static void
take(void)
{
    uint64_t lost = 0;
    const mm_event *taken = mm_call_log_take(&count, &lost);

    CHECK(count <= MOST);
    if (count > 0) {
        memcpy(calls, taken, count * sizeof *calls);
    }
    CHECK_EQUAL(lost, 0);
}

static bool
is_call(const mm_event *e, mm_operation op, mm_range expected, int destination, unsigned advice)
{
    return e->kind == MM_CALL && e->cause == op && e->address == expected.start
           && e->amount == expected.size && e->destination == destination && e->extra == advice
           && e->source == MM_NO_PROCESSOR && e->memory == MM_NO_MEMORY_INDEX && e->start <= e->end
           && e->end <= mm_raw_clock();
}

static mm_range
part(size_t offset, size_t size)
{
    return (mm_range){range.start + offset, size, range.allocation};
}

static void
run_one(mm_operation op, mm_range target, CUmemLocation location)
{
    mm_batch batch;

    mm_batch_one(&batch, target, location);
    CHECK_OK(world_run(world.cu, op, &batch, NULL, MM_DISPATCH_AUTO, &st), &st);
}

/* ---- tests ---- */

TEST(test_single_ranges)
{
    uint64_t before = mm_raw_clock();

    CHECK_OK(mm_call_log_start(&st), &st);
    CHECK_OK(mm_range_prefetch(world.cu, range, device1, NULL, MM_DEFER_YES, &st), &st);
    CHECK_OK(mm_range_prefetch(world.cu, part(0, PAGE), mm_host(), NULL, MM_DEFER_NO, &st), &st);
    CHECK_OK(mm_range_prefetch(world.cu, part(0, 0), device0, NULL, MM_DEFER_NO, &st), &st);
    run_one(MM_DISCARD, part(100, 3 * PAGE), mm_host()); /* whole pages only */
    run_one(MM_DISCARD_PREFETCH, part(100, 3 * PAGE), device0); /* and its edges */
    take();
    CHECK_EQUAL(count, 4);
    CHECK(is_call(&calls[0], MM_PREFETCH, range, 1, 0));
    CHECK(is_call(&calls[1], MM_PREFETCH, part(0, PAGE), MM_ON_HOST, 0));
    CHECK(is_call(&calls[2], MM_DISCARD, part(PAGE, 2 * PAGE), MM_NO_PROCESSOR, 0));
    CHECK(is_call(&calls[3], MM_DISCARD_PREFETCH, part(PAGE, 2 * PAGE), 0, 0));
    CHECK(calls[0].start >= before);
}

/* Mixed pages need repeated driver calls for one advice. */
TEST(test_advice)
{
    mm_location_set both = mm_location_bit(device0) | mm_location_bit(mm_host());

    CHECK_OK(mm_range_advise(world.cu, part(PAGE, PAGE), CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                             device1, &st),
             &st);
    CHECK_OK(mm_call_log_start(&st), &st);
    CHECK_OK(mm_range_advise(world.cu, range, CU_MEM_ADVISE_SET_READ_MOSTLY, device1, &st), &st);
    CHECK_OK(mm_range_advise(world.cu, range, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device0, &st),
             &st);
    CHECK_OK(mm_range_change_accessed_by(world.cu, range, mm_location_bit(device1), both, &st),
             &st);
    CHECK_OK(mm_range_switch_accessed_by(world.cu, range, both, false, &st), &st);
    take();
    CHECK_EQUAL(count, 7);
    CHECK(is_call(&calls[0], MM_ADVISE, range, MM_NO_PROCESSOR, CU_MEM_ADVISE_SET_READ_MOSTLY));
    CHECK(is_call(&calls[1], MM_ADVISE, range, 0, CU_MEM_ADVISE_SET_PREFERRED_LOCATION));
    CHECK(is_call(&calls[2], MM_ADVISE, range, 1, CU_MEM_ADVISE_UNSET_ACCESSED_BY));
    CHECK(is_call(&calls[3], MM_ADVISE, range, 0, CU_MEM_ADVISE_SET_ACCESSED_BY));
    CHECK(is_call(&calls[4], MM_ADVISE, range, MM_ON_HOST, CU_MEM_ADVISE_SET_ACCESSED_BY));
    CHECK(is_call(&calls[5], MM_ADVISE, range, 0, CU_MEM_ADVISE_UNSET_ACCESSED_BY));
    CHECK(is_call(&calls[6], MM_ADVISE, range, MM_ON_HOST, CU_MEM_ADVISE_UNSET_ACCESSED_BY));
}

TEST(test_failed_calls)
{
    mm_batch batch;

    CHECK_OK(mm_call_log_start(&st), &st);
    world.fail("cuMemPrefetchAsync", 1, CUDA_ERROR_LAUNCH_FAILED, 0);
    CHECK(mm_range_prefetch(world.cu, range, device0, NULL, MM_DEFER_NO, &st) < 0);
    world.fail("cuMemAdvise", 1, CUDA_ERROR_LAUNCH_FAILED, 0);
    CHECK(mm_range_advise(world.cu, range, CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host(), &st) < 0);
    world.fail("cuMemDiscardBatchAsync", 1, CUDA_ERROR_LAUNCH_FAILED, 0);
    mm_batch_one(&batch, range, mm_host());
    CHECK(world_run(world.cu, MM_DISCARD, &batch, NULL, MM_DISPATCH_AUTO, &st) < 0);
    world.fail("cuMemAdvise", 1, CUDA_ERROR_LAUNCH_FAILED, 0);
    CHECK(mm_range_change_accessed_by(world.cu, range, 0, mm_location_bit(device1), &st) < 0);
    world.fail_clear();
    take();
    CHECK_EQUAL(count, 0);
}

static void *
prefetch_often(void *argument)
{
    mm_status own;

    (void)argument;
    for (int i = 0; i < 200; i++) {
        CHECK_OK(mm_range_prefetch(world.cu, part(0, PAGE), device0, NULL, MM_DEFER_NO, &own),
                 &own);
    }
    return NULL;
}

static void *
take_often(void *argument)
{
    size_t *total = argument;
    uint64_t lost = 0;

    for (int i = 0; i < 200; i++) {
        size_t some = 0;
        const mm_event *taken = mm_call_log_take(&some, &lost);
        for (size_t n = 0; n < some; n++) {
            CHECK(is_call(&taken[n], MM_PREFETCH, part(0, PAGE), 0, 0));
        }
        *total += some;
    }
    CHECK_EQUAL(lost, 0);
    return NULL;
}

TEST(test_threads_while_it_is_taken)
{
    pthread_t taker;
    size_t total = 0, rest = 0;
    uint64_t lost = 0;

    CHECK_OK(mm_call_log_start(&st), &st);
    CHECK_EQUAL(pthread_create(&taker, NULL, take_often, &total), 0);
    check_threads(7, prefetch_often, NULL);
    CHECK_EQUAL(pthread_join(taker, NULL), 0);
    (void)mm_call_log_take(&rest, &lost);
    CHECK_EQUAL(total + rest, 7 * 200);
    CHECK_EQUAL(lost, 0);
    mm_call_log_stop();
    CHECK(!mm_is_recording());
}

static void *
open_and_close(void *argument)
{
    mm_status own;

    (void)argument;
    for (int i = 0; i < 100; i++) {
        CHECK_OK(mm_call_log_start(&own), &own);
        mm_call_log_stop();
    }
    return NULL;
}

TEST(test_threads_while_it_opens_and_closes)
{
    pthread_t owner;

    CHECK_EQUAL(pthread_create(&owner, NULL, open_and_close, NULL), 0);
    check_threads(4, prefetch_often, NULL);
    CHECK_EQUAL(pthread_join(owner, NULL), 0);
    take();
    CHECK_EQUAL(count, 0);
}

/* ---- captures ---- */

static mm_stream *
make_stream(unsigned flags)
{
    CUstream handle = NULL;
    mm_stream *stream;
    mm_status own;

    CHECK_EQUAL(world.cu->StreamCreate(&handle, flags), CUDA_SUCCESS);
    stream = mm_stream_share(world.cu, handle, &own);
    CHECK(stream != NULL);
    return stream;
}

static bool
captures(void)
{
    bool capturing = false;

    CHECK_OK(mm_streams_are_capturing(world.cu, &capturing, &st), &st);
    return capturing;
}

TEST(test_listed_streams_that_capture)
{
    size_t before = world.live_streams();
    mm_stream *streams[3];
    CUgraph graph;

    for (int i = 0; i < 3; i++) {
        streams[i] = make_stream(i == 1 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
    }
    CHECK(!captures());
    for (int i = 0; i < 3; i++) {
        CHECK_EQUAL(world.begin_capture(streams[i]->handle, CU_STREAM_CAPTURE_MODE_GLOBAL),
                    CUDA_SUCCESS);
        CHECK(captures());
        CHECK_EQUAL(world.end_capture(streams[i]->handle, &graph), CUDA_SUCCESS);
        CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
        CHECK(!captures());
    }
    world.fail("cuStreamIsCapturing", 3, CUDA_ERROR_LAUNCH_FAILED, 0);
    CHECK(mm_streams_are_capturing(world.cu, &(bool){false}, &st) < 0);
    CHECK_EQUAL(st.code, CUDA_ERROR_LAUNCH_FAILED);
    CHECK_EQUAL(world.begin_capture(streams[2]->handle, CU_STREAM_CAPTURE_MODE_GLOBAL),
                CUDA_SUCCESS);
    world.fail("cuCtxGetId", 1, CUDA_ERROR_CONTEXT_IS_DESTROYED, 0); /* of the newest stream */
    CHECK(!captures());
    world.fail_clear();
    CHECK(captures());
    CHECK_EQUAL(world.end_capture(streams[2]->handle, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    for (int i = 1; i < 4; i++) { /* the middle one first */
        CHECK_OK(mm_stream_release(streams[i % 3], &st), &st);
        CHECK(!captures());
    }
    CHECK_EQUAL(world.live_streams(), before);
}

static void *
make_streams(void *argument)
{
    mm_status own;

    (void)argument;
    for (int i = 0; i < 50; i++) {
        mm_stream *one = make_stream(CU_STREAM_NON_BLOCKING);
        mm_stream *two = make_stream(CU_STREAM_NON_BLOCKING);
        CHECK_OK(mm_stream_release(one, &own), &own);
        CHECK_OK(mm_stream_release(two, &own), &own);
    }
    return NULL;
}

static void *
ask_for_captures(void *argument)
{
    bool capturing = false;
    mm_status own;

    (void)argument;
    for (int i = 0; i < 100; i++) {
        CHECK_OK(mm_streams_are_capturing(world.cu, &capturing, &own), &own);
        CHECK(!capturing);
    }
    return NULL;
}

static void *
make_or_ask(void *argument)
{
    static atomic_int threads;
    CUcontext context = NULL;
    mm_status own;

    CHECK_OK(mm_primary_context(world.cu, 0, &context, &own), &own);
    CHECK_EQUAL(world.cu->CtxSetCurrent(context), CUDA_SUCCESS);
    return atomic_fetch_add(&threads, 1) % 2 == 0 ? make_streams(argument)
                                                  : ask_for_captures(argument);
}

TEST(test_streams_come_and_go_while_they_are_asked)
{
    size_t before = world.live_streams();

    check_threads(6, make_or_ask, NULL);
    CHECK_EQUAL(world.live_streams(), before);
}

static void
set_up(const char *path)
{
    world_open(path);
    device0 = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    device1 = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);
    memory = world_allocate(SIZE);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    range = (mm_range){memory->start, SIZE, memory->allocation};
}

TEST_MAIN(set_up)
