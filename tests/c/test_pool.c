/* test_pool.c: blocks of a pool, their lifetimes and streams, and peers, alone and under threads. */
#include "world.h"

enum { ROUNDS = 200, WORKERS = 4 };

static mm_pool *
make_pool(bool managed)
{
    CUmemLocation location = managed ? mm_location(CU_MEM_LOCATION_TYPE_NONE, 0)
                                     : mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    mm_status st;
    mm_pool *pool = mm_pool_create(world.cu, managed, location, 0, &st);

    CHECK(pool != NULL);
    return pool;
}

static void
release(mm_pool *pool)
{
    mm_status st;

    CHECK_OK(mm_pool_release(pool, &st), &st);
}

static mm_memory *
allocate(mm_pool *pool, size_t size, mm_stream *stream)
{
    mm_status st;
    mm_memory *m =
        mm_memory_allocate_from(world.cu, pool, size, stream ? stream->handle : NULL, stream, &st);

    CHECK(m != NULL);
    return m;
}

static mm_stream *
make_stream(void)
{
    CUstream handle = NULL;
    mm_stream *stream;
    mm_status st;

    CHECK_OK(mm_stream_create(world.cu, &handle, &st), &st);
    stream = mm_stream_share(world.cu, handle, &st);
    CHECK(stream != NULL);
    return stream;
}

TEST(blocks_keep_their_pool)
{
    size_t live = world.live_allocations();
    mm_pool *pool = make_pool(true);
    mm_memory *one = allocate(pool, 100, NULL), *two = allocate(pool, 5000, NULL);

    world.log_clear();
    release(pool);
    mm_memory_release(one);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 0);
    mm_memory_release(two);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 1);
    CHECK_EQUAL(world.live_allocations(), live);
    CHECK_EQUAL(world.context_depth(), 0);
}

TEST(blocks_keep_their_stream)
{
    size_t streams = world.live_streams();
    mm_pool *pool = make_pool(false);
    mm_stream *stream = make_stream();
    mm_memory *m = allocate(pool, 100, stream);
    bool first = false;
    mm_status st;

    CHECK_OK(mm_stream_release(stream, &st), &st);
    CHECK_EQUAL(world.live_streams(), streams + 1);
    CHECK_OK(mm_memory_close(m, NULL, &first, &st), &st);
    CHECK(first);
    CHECK_EQUAL(world.live_streams(), streams);
    mm_memory_release(m);
    release(pool);
}

TEST(pools_wait_for_queued_frees)
{
    size_t live = world.live_allocations();
    mm_pool *pool = make_pool(true);
    mm_memory *m = allocate(pool, 100, NULL);
    mm_status st;

    world.schedule(1);
    world.log_clear();
    mm_memory_release(m);
    release(pool);
    mm_deferred_frees_attempt(
        world.cu,
        &(mm_free_conditions){.pools = true}); /* the event is reached at its second query */
    CHECK_EQUAL(world_calls("cuCtxSynchronize"), 0);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 1);
    m = allocate(pool = make_pool(true), 100, NULL);
    mm_memory_release(m);
    release(pool);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 1);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true, .idle = true});
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 2);
    world.schedule(0);
    CHECK_EQUAL(world.live_allocations(), live);
}

/* A default stream and an own one of each device. An event is of the context of its stream, so one that
 * is recorded elsewhere fails, and the pool would wait for no reason. */
TEST(frees_on_every_device_have_events)
{
    mm_pool *pool = make_pool(true);

    world.log_clear();
    for (int device = 0; device < 2; device++) {
        CUstream stream = NULL;
        mm_scope scope;
        mm_memory *m;
        mm_status st;
        CHECK_OK(mm_scope_enter(&scope, world.cu, device, &st), &st);
        CHECK_EQUAL(world.cu->StreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        mm_memory_release(allocate(pool, 100, NULL));
        m = mm_memory_allocate_from(world.cu, pool, 100, stream, NULL, &st);
        CHECK(m != NULL);
        mm_scope_leave(&scope);
        mm_memory_release(m); /* with the context of device 0 */
        CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
    }
    CHECK_EQUAL(world_calls("cuEventCreate"), 4);
    release(pool);
    CHECK_EQUAL(world_calls("cuMemPoolTrimTo"), 0);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 1);
}

/* However many streams free, few events are kept where the frees have run. */
TEST(events_that_were_reached_go_early)
{
    enum { STREAMS = 60 };
    mm_pool *pool = make_pool(true);
    mm_status st;

    world.log_clear();
    for (int i = 0; i < STREAMS; i++) {
        mm_stream *stream = make_stream();
        mm_memory_release(allocate(pool, 100, stream));
        CHECK_OK(mm_stream_release(stream, &st), &st);
    }
    CHECK_EQUAL(world_calls("cuEventCreate"), STREAMS);
    CHECK(world_calls("cuEventDestroy") > STREAMS / 2);
    release(pool);
    CHECK_EQUAL(world_calls("cuEventDestroy"), STREAMS);
}

/* Retires a pool whose queued frees may not have run, and checks that it exists until a wait. */
static void
check_waits(mm_pool *pool, size_t pools)
{
    mm_status st;
    int rc = mm_pool_release(pool, &st);

    (void)rc;
    /* The emulated driver would abort. */
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true});
    world.fail_clear();
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true});
    world.schedule(0);
    CHECK_EQUAL(world.live_pools(), pools);
}

TEST(pools_wait_where_an_event_fails)
{
    for (int after = 0; after <= 1; after++) {
        size_t pools = world.live_pools();
        mm_pool *pool = make_pool(true);
        mm_memory *m = allocate(pool, 100, NULL);
        world.schedule(1);
        mm_memory_release(m);
        world.fail("cuEventQuery", 1, CUDA_ERROR_UNKNOWN, after);
        check_waits(pool, pools);
    }
}

/* Even if no event can be created or recorded behind them. */
TEST(pools_wait_for_frees_that_failed_after_they_acted)
{
    static const char *const calls[] = {"cuMemFreeAsync", "cuEventRecord", "cuEventCreate",
                                        "cuCtxGetCurrent"};

    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        size_t pools = world.live_pools();
        mm_pool *pool = make_pool(true);
        mm_memory *m = allocate(pool, 100, NULL);
        world.schedule(1);
        world.fail("cuMemFreeAsync", 1, CUDA_ERROR_UNKNOWN, 1);
        if (i > 0) {
            world.fail(calls[i], 1, CUDA_ERROR_UNKNOWN, 0);
        }
        mm_memory_release(m);
        check_waits(pool, pools);
    }
}

static void *
free_on_own_default_stream(void *argument)
{
    CUstream stream = CU_STREAM_PER_THREAD;
    bool first = false;
    mm_status st;

    CHECK_OK(mm_memory_close(argument, &stream, &first, &st), &st);
    CHECK(first);
    return NULL;
}

/* The default streams of all threads have the same handle. */
TEST(pools_wait_for_the_frees_of_every_thread)
{
    size_t pools = world.live_pools();
    mm_pool *pool = make_pool(true);
    mm_memory *one = allocate(pool, 100, NULL), *two = allocate(pool, 100, NULL);

    world.schedule(1);
    check_threads(1, free_on_own_default_stream, one);
    check_threads(1, free_on_own_default_stream, two);
    mm_memory_release(one);
    mm_memory_release(two);
    check_waits(pool, pools);
}

static void *
end_pools(void *argument)
{
    (void)argument;
    for (int i = 0; i < ROUNDS / 10; i++) {
        mm_pool *pool = make_pool(i % 2 == 0);
        mm_memory_release(allocate(pool, 100, NULL));
        release(pool);
        mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true});
    }
    return NULL;
}

TEST(threads_reclaim_pools)
{
    size_t pools = world.live_pools();

    check_threads(WORKERS, end_pools, NULL);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true});
    CHECK_EQUAL(world.live_pools(), pools);
}

TEST(managed_blocks_are_whole_pages)
{
    mm_pool *pool = make_pool(true);
    mm_memory *m = allocate(pool, 1, NULL);
    uint64_t used = 0;
    mm_status st;

    CHECK_OK(mm_pool_get_attribute(world.cu, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used, &st),
             &st);
    CHECK_EQUAL(used, mm_page_size());
    CHECK_EQUAL(m->device, MM_ANY_DEVICE);
    mm_memory_release(m);
    release(pool);
}

TEST(failed_allocation_leaves_nothing)
{
    size_t live = world.live_allocations();
    mm_pool *pool = make_pool(false);
    mm_status st;

    world.fail("cuMemAllocFromPoolAsync", 1, CUDA_ERROR_OUT_OF_MEMORY, 0);
    CHECK(mm_memory_allocate_from(world.cu, pool, 100, NULL, NULL, &st) == NULL);
    world.fail_clear();
    CHECK_EQUAL(st.code, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(world.live_allocations(), live);
    world.log_clear();
    release(pool);
    CHECK_EQUAL(world_calls("cuMemPoolDestroy"), 1);
}

TEST(peers_change_in_one_call)
{
    mm_pool *pool = make_pool(false);
    mm_location_set peers = 99, all = (mm_location_set)2;
    mm_status st;

    CHECK_OK(mm_pool_peers(world.cu, pool, &peers, &st), &st);
    CHECK_EQUAL(peers, 0);
    world.log_clear();
    CHECK_OK(mm_pool_change_peers(world.cu, pool, 0, all, &st), &st);
    CHECK_EQUAL(world_calls("cuMemPoolSetAccess"), 1);
    world.fail("cuMemPoolSetAccess", 1, CUDA_ERROR_UNKNOWN, 1);
    CHECK(mm_pool_change_peers(world.cu, pool, all, 0, &st) < 0);
    world.fail_clear();
    CHECK_OK(mm_pool_peers(world.cu, pool, &peers, &st), &st);
    CHECK_EQUAL(peers, all);
    release(pool);
}

/* Each worker holds the pool by its own blocks only. */
static void *
allocate_and_close(void *argument)
{
    mm_pool *pool = argument;
    mm_stream *stream = make_stream();
    mm_memory *kept = allocate(pool, 4096, stream);
    mm_status st;

    for (int i = 0; i < ROUNDS; i++) {
        mm_memory *m = allocate(pool, (size_t)i + 1, stream);
        bool first = false;
        CHECK_OK(mm_memory_close(m, NULL, &first, &st), &st);
        CHECK(first);
        mm_memory_release(m);
    }
    CHECK_OK(mm_stream_release(stream, &st), &st);
    mm_memory_release(kept);
    return NULL;
}

TEST(threads_share_a_pool)
{
    size_t live = world.live_allocations(), streams = world.live_streams();
    mm_pool *pool = make_pool(true);

    check_threads(WORKERS, allocate_and_close, pool);
    release(pool);
    CHECK_EQUAL(world.live_allocations(), live);
    CHECK_EQUAL(world.live_streams(), streams);
}

static void *
close_on_a_stream(void *argument)
{
    CUstream stream = NULL;
    bool first = false;
    mm_status st;

    CHECK_OK(mm_memory_close(argument, &stream, &first, &st), &st);
    return NULL;
}

TEST(threads_free_a_block_once)
{
    mm_pool *pool = make_pool(true);

    for (int i = 0; i < ROUNDS / 10; i++) {
        mm_memory *m = allocate(pool, 4096, NULL);
        world.log_clear();
        check_threads(WORKERS, close_on_a_stream, m);
        CHECK_EQUAL(world_calls("cuMemFreeAsync"), 1);
        mm_memory_release(m);
    }
    release(pool);
}

/* Only the block keeps its stream, so using one that another thread has replaced would be a use after
 * free. */
static void *
change_the_stream(void *argument)
{
    mm_memory *m = argument;
    mm_status st;

    for (int i = 0; i < 20; i++) {
        mm_stream *stream = make_stream();
        bool done = false;
        CHECK_OK(mm_memory_set_stream(world.cu, m, stream->handle, stream, &done, &st), &st);
        CHECK(done);
        CHECK_OK(mm_stream_release(stream, &st), &st);
        CHECK_OK(mm_memory_refuse_capture(world.cu, m, NULL, &st), &st);
    }
    return NULL;
}

TEST(threads_change_the_stream_of_a_block)
{
    size_t streams = world.live_streams();
    mm_pool *pool = make_pool(true);
    mm_memory *m = allocate(pool, 4096, NULL);
    bool first = false, done = true;
    mm_status st;

    check_threads(WORKERS, change_the_stream, m);
    CHECK_EQUAL(world.live_streams(), streams + 1);
    CHECK_OK(mm_memory_close(m, NULL, &first, &st), &st);
    CHECK_EQUAL(world.live_streams(), streams);
    CHECK_OK(mm_memory_set_stream(world.cu, m, NULL, NULL, &done, &st), &st);
    CHECK(!done);
    mm_memory_release(m);
    release(pool);
}

TEST_MAIN(world_open)
