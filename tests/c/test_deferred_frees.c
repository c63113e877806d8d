/* test_deferred_frees.c: memory, blocks, pools and streams that cannot be freed at their end, mostly because
 * that is inside a host function; in one thread and in several. */
#include <sys/wait.h>
#include <unistd.h>

#include "world.h"

enum { ROUNDS = 100, WORKERS = 4, SIZE = 5000 };

static const mm_free_conditions any_call = {0}, after_a_wait = {.pools = true, .idle = true};

static void
attempt(void)
{
    mm_deferred_frees_attempt(world.cu, &any_call);
}

/* Runs the function as a host function of a stream; the emulated driver runs it at once. */
static void
run_inside(void (*function)(void *), void *argument)
{
    CUstream stream = NULL;
    mm_status st;

    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    CHECK_EQUAL(world.cu->LaunchHostFunc(stream, function, argument), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
}

static mm_pool *
make_pool(void)
{
    mm_status st;
    mm_pool *pool =
        mm_pool_create(world.cu, true, mm_location(CU_MEM_LOCATION_TYPE_NONE, 0), 0, &st);

    CHECK(pool != NULL);
    return pool;
}

static mm_memory *
allocate_from(mm_pool *pool, CUstream stream, mm_stream *shared)
{
    mm_status st;
    mm_memory *m = mm_memory_allocate_from(world.cu, pool, SIZE, stream, shared, &st);

    CHECK(m != NULL);
    return m;
}

static void
release_memory(void *memory)
{
    mm_memory_release(memory);
}

static void
release_pool(void *pool)
{
    mm_status st;

    CHECK_OK(mm_pool_release(pool, &st), &st);
}

static void
release_stream(void *stream)
{
    mm_status st;

    CHECK_OK(mm_stream_release(stream, &st), &st);
}

static void
close_refused(void *memory)
{
    bool first = true;
    mm_status st;

    CHECK(mm_memory_close(memory, NULL, &first, &st) < 0);
    CHECK(!first);
    CHECK(mm_can_defer_free(&st));
}

/* The call under way may wait for the host function. */
TEST(closing_never_waits_there)
{
    mm_memory *m = world_allocate(SIZE);
    bool first = false;
    mm_status st;

    CHECK(mm_guard_enter(&m->guard));
    run_inside(close_refused, m);
    mm_guard_leave(&m->guard);
    CHECK_OK(mm_memory_close(m, NULL, &first, &st), &st);
    CHECK(first);
    mm_memory_release(m);
}

static void
check_that_the_end_never_waits(mm_memory *m)
{
    size_t live = world.live_allocations();

    mm_memory_retain(m);
    CHECK(!mm_memory_release_hold(m));
    CHECK(mm_guard_enter(&m->guard));
    run_inside(release_memory, m);
    mm_guard_leave(&m->guard);
    CHECK_EQUAL(world.live_allocations(), live);
    attempt();
    attempt();
    CHECK(mm_guard_is_closed(&m->guard));
    CHECK_EQUAL(world.live_allocations(), live - 1);
    mm_memory_release_reference(m);
}

TEST(the_end_never_waits_there)
{
    mm_pool *pool = make_pool();

    check_that_the_end_never_waits(world_allocate(SIZE));
    check_that_the_end_never_waits(allocate_from(pool, NULL, NULL));
    release_pool(pool);
}

/* Such a stream may not exist any more. */
TEST(streams_of_others_are_not_touched)
{
    size_t live = world.live_allocations();
    mm_pool *pool = make_pool();
    CUstream handle = NULL;
    mm_status st;

    CHECK_OK(mm_stream_create(world.cu, &handle, &st), &st);
    run_inside(release_memory, allocate_from(pool, handle, NULL));
    attempt();
    CHECK_EQUAL(world.live_allocations(), live + 1);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.stream = handle});
    CHECK_EQUAL(world.live_allocations(), live);
    run_inside(release_memory, allocate_from(pool, handle, NULL));
    CHECK_EQUAL(world.cu->StreamDestroy(handle), CUDA_SUCCESS);
    attempt();
    CHECK_EQUAL(world.live_allocations(), live + 1);
    mm_deferred_frees_attempt(world.cu, &after_a_wait);
    CHECK_EQUAL(world.live_allocations(), live);
    release_pool(pool);
}

/* The driver may have acted, so a second free could be that of somebody else's memory. */
TEST(failed_attempts_are_not_repeated)
{
    size_t live = world.live_allocations(), pools = world.live_pools();
    mm_pool *pool = make_pool();
    mm_status st;

    run_inside(release_memory, allocate_from(pool, NULL, NULL));
    world.fail("cuMemFreeAsync", 1, CUDA_ERROR_LAUNCH_FAILED, 1);
    attempt();
    CHECK_EQUAL(world.fail_fired(), 1);
    world.fail_clear();
    CHECK_EQUAL(world.live_allocations(), live);
    world.log_clear();
    attempt();
    release_pool(pool);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    mm_deferred_frees_attempt(world.cu, &after_a_wait);
    CHECK_EQUAL(world_calls("cuMemFreeAsync"), 0);
    CHECK_EQUAL(world.live_pools(), pools);
}

/* A refusal inside a host function has done nothing: the call is made again, and nothing waits for it. */
TEST(refused_calls_are_repeated)
{
    size_t live = world.live_allocations(), pools = world.live_pools();
    mm_pool *pool = make_pool();

    world.fail("cuMemFreeAsync", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    release_memory(allocate_from(pool, NULL, NULL));
    CHECK_EQUAL(world.live_allocations(), live + 1);
    attempt();
    CHECK_EQUAL(world.live_allocations(), live);
    world.log_clear();
    world.fail("cuMemPoolDestroy", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    release_pool(pool);
    CHECK_EQUAL(world.live_pools(), pools + 1);
    mm_deferred_frees_attempt(world.cu, &after_a_wait);
    CHECK_EQUAL(world.live_pools(), pools);
    CHECK_EQUAL(world_calls("cuMemPoolTrimTo"), 0);
    world.fail_clear();
}

TEST(pools_and_streams_go_late)
{
    size_t pools = world.live_pools(), streams = world.live_streams();
    CUstream handle = NULL;
    mm_status st;

    CHECK_OK(mm_stream_create(world.cu, &handle, &st), &st);
    run_inside(release_pool, make_pool());
    run_inside(release_stream, mm_stream_share(world.cu, handle, &st));
    mm_deferred_frees_attempt(world.cu, &after_a_wait);
    CHECK_EQUAL(world.live_pools(), pools);
    CHECK_EQUAL(world.live_streams(), streams);
}

TEST(forked_children_attempt_nothing)
{
    size_t live = world.live_allocations();
    int status = 1;
    pid_t child;

    run_inside(release_memory, world_allocate(SIZE));
    child = fork();
    if (child == 0) {
        attempt();
        _exit(0);
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    attempt();
    CHECK_EQUAL(world.live_allocations(), live);
}

/* In each round, the next thread that allocates frees the memory of the others. */
static void *
leave_and_allocate(void *pool)
{
    for (int i = 0; i < ROUNDS; i++) {
        run_inside(release_memory, world_allocate(SIZE));
        run_inside(release_memory, allocate_from(pool, NULL, NULL));
        mm_memory_release(world_allocate(SIZE));
    }
    return NULL;
}

TEST(threads_free_each_others_memory)
{
    size_t live = world.live_allocations();
    mm_pool *pool = make_pool();

    check_threads(WORKERS, leave_and_allocate, pool);
    attempt();
    CHECK_EQUAL(world.live_allocations(), live);
    release_pool(pool);
}

/* A wait for a device destroys its captures, so a block waits until the user has waited for each.
 * The last test: from here on device 1 is in use. */
TEST(captures_of_other_devices_survive)
{
    size_t live = world.live_allocations();
    CUstream stream = world_make_stream(0, CU_STREAM_NON_BLOCKING),
             other = world_make_stream(1, CU_STREAM_NON_BLOCKING);
    mm_pool *pool = make_pool();
    CUgraph graph = NULL;

    run_inside(release_memory, allocate_from(pool, stream, NULL));
    CHECK_EQUAL(world.begin_capture(other, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    mm_deferred_frees_attempt(world.cu, &after_a_wait);
    CHECK_EQUAL(world.end_capture(other, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.live_allocations(), live + 1);
    mm_deferred_frees_attempt(world.cu,
                              &(mm_free_conditions){.pools = true, .idle = true, .device = 1});
    CHECK_EQUAL(world.live_allocations(), live);
    release_pool(pool);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamDestroy(other), CUDA_SUCCESS);
}

TEST_MAIN(world_open)
