/* test_frames_graph_memory.c: the memory that a graph with parts keeps, and failures during its
 * capture. */
#include "captured_graphs.h"
#include "failing_allocations.h"

/* --- memory --------------------------------------------------------------------------------- */

TEST(the_room_comes_back_after_the_last_graph)
{
    CUgraphExec first;
    CUstream stream;

    stream = begin_graph(MM_PART_READ, 1);
    use_captured(0, false, stream);
    end_captured(stream);
    first = captured.executable;
    begin_captured(stream);
    use_captured(1, false, stream);
    end_captured(stream);
    CHECK_EQUAL(world.destroy_executable(first), CUDA_SUCCESS);
    for (uint32_t i = 0; i < 3; i++) {
        acquire(i, false, 0);
    }
    CHECK_EQUAL(report().mapped, 1);
    while (model.held_count > 0) {
        release(0);
    }
    destroy_captured();
    for (uint32_t i = 0; i < 4; i++) {
        acquire(i, false, 0);
    }
    CHECK_EQUAL(report().mapped, 1);
    begin_captured(stream);
    use_captured(5, false, stream); /* no room for graphs: it is in use */
    CHECK_EQUAL(captured.at_home, 1);
    end_captured(stream);
    replay_with_changed_homes(stream);
    destroy_captured();
    for (uint32_t i = 0; i < 4; i++) { /* which have changed at home */
        CHECK_OK(
            mm_frames_release(model.frames, plain_use(i), false, false, model.streams[0], &st),
            &st);
    }
    model.held_count = 0;
    end_model();
}

/* Frames and homes live as long as the graph does. */
TEST(memory_outlives_the_set_for_a_graph)
{
    for (int lazy = 0; lazy < 2; lazy++) {
        CUstream stream;
        begin_equal(4, MM_PART_READ, lazy == 1);
        stream = model.streams[1];
        begin_captured(stream);
        for (uint32_t i = 0; i < PARTS; i++) {
            use_captured(i, false, stream);
        }
        end_captured(stream);
        mm_frames_free(model.frames);
        mm_slab_free(model.slab);
        CHECK(world.live_allocations() > 0);
        replay_with_changed_homes(stream);
        destroy_captured();
        mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
        CHECK_EQUAL(world.live_allocations(), 0);
        for (int i = 0; i < STREAMS; i++) {
            CHECK_EQUAL(world.cu->StreamDestroy(model.streams[i]), CUDA_SUCCESS);
        }
    }
}

TEST(a_capture_that_ends_in_nothing_keeps_nothing)
{
    CUgraph graph;
    CUstream stream;

    stream = begin_graph(MM_PART_READ, 1);
    use_captured(0, false, stream);
    CHECK(world.cu->StreamQuery(stream) != CUDA_SUCCESS); /* breaks it */
    use_captured(1, false, stream);
    CHECK_EQUAL(captured.at_home, 1);
    CHECK(world.end_capture(stream, &graph) != CUDA_SUCCESS);
    for (uint32_t i = 0; i < 4; i++) {
        acquire(i, false, 0);
    }
    CHECK_EQUAL(report().mapped, 1);
    while (model.held_count > 0) {
        release(0);
    }
    end_model();
}

/* Without the calls, and if the host waits for copies, a graph reads and writes at home. */
TEST(other_drivers_use_parts_at_home)
{
    for (int waits = 0; waits < 2; waits++) {
        CUstream stream;
        seed = 1;
        begin_model(&(model_options){
            .room = 4 * EQUAL, .bytes = EQUAL, .access = MM_PART_WRITE, .host_waits = waits == 1});
        if (waits == 0) {
            watched.GraphAddMemcpyNode = NULL;
        }
        stream = model.streams[1];
        begin_captured(stream);
        for (uint32_t i = 0; i < PARTS; i++) {
            use_captured(i, i % 2 == 0, stream);
        }
        CHECK_EQUAL(captured.at_home, PARTS);
        end_captured(stream);
        replay_and_end(stream);
    }
}

/* --- failures ------------------------------------------------------------------------------- */

static void
capture_everything(CUstream stream)
{
    MM_IGNORE(mm_frames_begin_round(model.frames, stream, &st));
    for (uint32_t i = 0; i < PARTS; i++) {
        use_captured(i, i % 2 == 0, stream);
    }
    mm_frames_end_round(model.frames);
}

static size_t broken_captures;

static void
check_replays(CUstream stream)
{
    if (world.end_capture(stream, &captured.graph) != CUDA_SUCCESS) {
        broken_captures++;
        return;
    }
    CHECK_EQUAL(world.instantiate(&captured.executable, captured.graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(captured.graph), CUDA_SUCCESS);
    replay_with_changed_homes(stream);
    for (uint32_t i = 0; i < PARTS; i++) {
        CHECK_EQUAL(*home_of(i), model.parts[i].value);
    }
    destroy_captured();
}

/* One call of the function fails, before its effect or after it: the graph is right, or there is
 * none. False if it was not called so often. */
static bool
capture_with_a_failure(const char *function, unsigned nth, bool after)
{
    CUstream stream;
    bool fired;

    begin_equal(4, MM_PART_WRITE, false);
    stream = model.streams[1];
    use_round();
    begin_captured(stream);
    world.fail(function, nth, CUDA_ERROR_UNKNOWN, after);
    capture_everything(stream);
    fired = world.fail_fired() > 0;
    world.fail_clear();
    check_replays(stream);
    model.faults = true; /* so that failures are expected */
    end_model();
    return fired;
}

/* The driver keeps what it does not release. */
TEST(replays_are_right_when_calls_fail)
{
    static const char *const names[] = {"cuStreamIsCapturing",
                                        "cuStreamGetCaptureInfo",
                                        "cuStreamUpdateCaptureDependencies",
                                        "cuGraphAddMemcpyNode",
                                        "cuUserObjectCreate",
                                        "cuGraphRetainUserObject",
                                        "cuUserObjectRelease",
                                        "cuStreamSynchronize",
                                        "cuStreamWaitEvent",
                                        "cuStreamGetCtx",
                                        "cuCtxGetCurrent",
                                        "cuCtxPushCurrent",
                                        "cuCtxPopCurrent",
                                        "cuThreadExchangeStreamCaptureMode"};
    size_t failed = 0;

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        for (int after = i == 6 || i == 11 ? i == 6 : 0; after < (i == 11 ? 1 : 2); after++) {
            unsigned nth = 1;
            while (capture_with_a_failure(names[i], nth, after)) {
                nth++;
            }
            failed += nth - 1;
        }
    }
    CHECK(failed > 200);
    CHECK_EQUAL(broken_captures, 2 * 5); /* copies home that could not be added */
}

TEST(every_allocation_may_fail)
{
    bool failed = true;

    for (long nth = 1; failed; nth++) {
        CUstream stream;
        stream = begin_graph(MM_PART_READ, 1);
        fail_allocation(nth);
        for (uint32_t i = 0; i < 2 * PARTS; i++) {
            use_captured(i % PARTS, false, stream);
        }
        failed = allocation_has_failed();
        fail_allocation(0);
        end_captured(stream);
        replay_with_changed_homes(stream);
        destroy_captured();
        model.faults = true;
        end_model();
    }
}

TEST_MAIN(world_open)
