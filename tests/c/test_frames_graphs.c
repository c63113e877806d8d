/* test_frames_graphs.c: parts that are used in streams that capture a graph: their contents at each
 * replay, the memory that the graph keeps, and failures during the capture.
 *
 * Usage: test_frames_graphs PATH_OF_THE_EMULATED_DRIVER. */
#include "failing_allocations.h"
#include "frames_model.h"

enum { EQUAL = 1024, REPLAYS = 4, KERNELS = 64 };

/* A kernel that a graph launches again and again: it finds the value that the part has then. */
typedef struct {
    unsigned char *bytes;
    size_t count;
    unsigned char *expected, *written; /* NULL: it does not check, or not write */
} graph_kernel;

static struct {
    graph_kernel kernels[KERNELS];
    size_t count;
    size_t at_home; /* uses that got no frame */
    CUgraph graph;
    CUgraphExec executable;
} captured;

static unsigned char next_value;

static void
run_graph_kernel(void *argument)
{
    const graph_kernel *k = argument;

    for (size_t i = 0; i < k->count && k->expected != NULL; i++) {
        CHECK_EQUAL(k->bytes[i], *k->expected);
    }
    if (k->written != NULL) {
        *k->written = ++next_value;
        memset(k->bytes, *k->written, k->count);
    }
}

static void
launch_captured(uint32_t part, CUdeviceptr address, bool checks, bool writes, CUstream stream)
{
    graph_kernel *k = &captured.kernels[captured.count++];

    CHECK(captured.count <= KERNELS);
    *k = (graph_kernel){(unsigned char *)(uintptr_t)address, model.parts[part].bytes,
                        checks ? &model.parts[part].value : NULL,
                        writes ? &model.parts[part].value : NULL};
    CHECK_EQUAL(world.launch(stream, run_graph_kernel, k), CUDA_SUCCESS);
}

/* Returns the address, or 0 if the part is used at home. */
static CUdeviceptr
begin_use(uint32_t part, bool writes, CUstream stream)
{
    CUdeviceptr address = mm_frames_acquire(model.frames, part, writes, stream);
    CUdeviceptr place = address != 0 ? address : (CUdeviceptr)(uintptr_t)home_of(part);

    captured.at_home += address == 0;
    launch_captured(part, place, model.parts[part].access != MM_PART_SCRATCH, writes, stream);
    if (writes && address == 0) {
        CHECK_OK(mm_frames_changed(model.frames, part, stream, &st), &st);
    }
    return address;
}

static void
end_use(uint32_t part, CUdeviceptr address, bool writes, CUstream stream)
{
    if (address != 0) {
        CHECK_OK(mm_frames_release(model.frames, part, writes, false, stream, &st), &st);
    }
}

static void
use_captured(uint32_t part, bool writes, CUstream stream)
{
    end_use(part, begin_use(part, writes, stream), writes, stream);
}

static void
begin_captured(CUstream stream)
{
    memset(&captured, 0, sizeof captured);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
}

static void
end_captured(CUstream stream)
{
    CHECK_EQUAL(world.end_capture(stream, &captured.graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.instantiate(&captured.executable, captured.graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(captured.graph), CUDA_SUCCESS);
}

static void
wait_for(CUstream stream)
{
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, 0}, &st), &st);
}

static void
replay(CUstream stream)
{
    mm_scope scope;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.launch_graph(captured.executable, stream), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    wait_for(stream);
}

/* Homes have other contents at each replay. */
static void
replay_with_changed_homes(CUstream stream)
{
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    for (int i = 0; i < REPLAYS; i++) {
        for (uint32_t part = 0; part < PARTS; part++) {
            model.parts[part].value = ++next_value;
            memset(home_of(part), next_value, model.parts[part].bytes);
        }
        replay(stream);
    }
}

static void
destroy_captured(void)
{
    CHECK_EQUAL(world.destroy_executable(captured.executable), CUDA_SUCCESS);
}

static void
use_round(void)
{
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        acquire(i, false, 0);
        while (model.held_count > 0) {
            release(0);
        }
    }
    mm_frames_end_round(model.frames);
}

static void
begin_equal(uint32_t fit, mm_part_access access, bool lazy)
{
    seed = 1;
    next_value = 100;
    begin_model(&(model_options){
        .room = (size_t)fit * EQUAL, .bytes = EQUAL, .access = (int)access, .lazy = lazy});
}

/* --- replays -------------------------------------------------------------------------------- */

static void
each_replay_reads_what_is_at_home(void)
{
    for (int lazy = 0; lazy < 2; lazy++) {
        CUstream stream;
        begin_equal(4, MM_PART_READ, lazy == 1);
        stream = model.streams[1];
        use_round();
        begin_captured(stream);
        CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
        for (uint32_t i = 0; i < 2 * PARTS; i++) {
            use_captured(i % PARTS, false, stream);
        }
        mm_frames_end_round(model.frames);
        CHECK_EQUAL(captured.at_home, 0);
        end_captured(stream);
        replay_with_changed_homes(stream);
        use_round();
        CHECK_EQUAL(report().mapped, 0); /* half of the room is left */
        replay_with_changed_homes(stream);
        CHECK_EQUAL(report().room, 4 * EQUAL);
        destroy_captured();
        end_model();
    }
}

/* Copies run beside the uses before them: each is behind the last use of its frame alone. */
static void
copies_are_early(void)
{
    const CUgraphNode *front;
    const CUgraphEdgeData *edges;
    CUstreamCaptureStatus status;
    CUgraph graph;
    cuuint64_t id;
    size_t count;
    CUstream stream;
    CUdeviceptr first, second;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[1];
    begin_captured(stream);
    CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
    first = begin_use(0, false, stream);
    second = begin_use(1, false, stream);
    CHECK_EQUAL(begin_use(2, false, stream), 0); /* both frames are in use */
    CHECK(first != second);
    end_use(0, first, false, stream);
    end_use(1, second, false, stream);
    CHECK_EQUAL(
        world.cu->StreamGetCaptureInfo(stream, &status, &id, &graph, &front, &edges, &count),
        CUDA_SUCCESS);
    CHECK_EQUAL(count, 1);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 3, false, stream), first);
    CHECK_EQUAL(
        world.cu->StreamGetCaptureInfo(stream, &status, &id, &graph, &front, &edges, &count),
        CUDA_SUCCESS);
    CHECK_EQUAL(count, 2); /* the latest kernel, and the copy beside it */
    launch_captured(3, first, true, false, stream);
    end_use(3, first, false, stream);
    mm_frames_end_round(model.frames);
    end_captured(stream);
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

static void
uses_may_nest_and_begin_again(void)
{
    CUstream stream;
    CUdeviceptr outer, again;

    begin_equal(6, MM_PART_READ, false);
    stream = model.streams[1];
    begin_captured(stream);
    outer = begin_use(0, false, stream);
    for (uint32_t i = 1; i < PARTS; i++) {
        use_captured(i, false, stream);
        again = begin_use(0, false, stream);
        CHECK_EQUAL(again, outer);
        end_use(0, again, false, stream);
    }
    end_use(0, outer, false, stream);
    use_captured(0, false, stream);
    CHECK_EQUAL(captured.at_home, 0);
    end_captured(stream);
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

/* Each replay sees the writes of the one before, and so do other uses. */
static void
writes_go_home_at_each_replay(void)
{
    CUstream stream;

    begin_equal(4, MM_PART_WRITE, false);
    stream = model.streams[0];
    CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st); /* which never ends */
    use_round();
    begin_captured(stream);
    for (uint32_t i = 0; i < 2 * PARTS; i++) {
        use_captured(i % PARTS, i % 3 != 0, stream);
    }
    CHECK_EQUAL(captured.at_home, 0);
    end_captured(stream);
    for (int i = 0; i < REPLAYS; i++) {
        replay(stream);
        for (uint32_t part = 0; part < PARTS; part++) {
            acquire(part, false, 0); /* checks the value */
            release(0);
            CHECK_EQUAL(*home_of(part), model.parts[part].value);
        }
    }
    destroy_captured();
    end_model();
}

/* Work of the graph writes at home what it uses later. */
static void
a_copy_follows_a_write_at_home_in_the_graph(void)
{
    CUstream stream;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[1];
    begin_captured(stream);
    CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
    use_captured(0, false, stream);
    launch_captured(1, (CUdeviceptr)(uintptr_t)home_of(1), true, true, stream);
    CHECK_OK(mm_frames_changed(model.frames, 1, stream, &st), &st);
    use_captured(1, false, stream);
    launch_captured(2, (CUdeviceptr)(uintptr_t)home_of(2), true, true, stream);
    CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
    use_captured(2, false, stream);
    mm_frames_end_round(model.frames);
    mm_frames_end_round(model.frames);
    launch_captured(3, (CUdeviceptr)(uintptr_t)home_of(3), true, true, stream);
    use_captured(3, false, stream); /* outside of rounds nobody tells */
    CHECK_EQUAL(captured.at_home, 0);
    end_captured(stream);
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

static void
scratch_has_a_frame_of_its_own(void)
{
    CUstream stream;

    begin_equal(4, MM_PART_SCRATCH, false);
    stream = model.streams[1];
    begin_captured(stream);
    for (uint32_t i = 0; i < PARTS; i++) {
        CUdeviceptr address = begin_use(i, true, stream);
        CHECK(address != 0);
        launch_captured(i, address, true, false, stream);
        end_use(i, address, true, stream);
    }
    end_captured(stream);
    for (int i = 0; i < REPLAYS; i++) {
        replay(stream);
    }
    CHECK_EQUAL(report().bytes_home, 0);
    destroy_captured();
    end_model();
}

/* --- two streams, and ends elsewhere ---------------------------------------------------------- */

static void
fork_stream(CUstream from, CUstream to)
{
    CUevent event = NULL;
    mm_scope scope;

    CHECK_OK(mm_scope_enter_relaxed(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->EventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->EventRecord(event, from), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamWaitEvent(to, event, 0), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->EventDestroy(event), CUDA_SUCCESS);
    mm_scope_leave(&scope);
}

static void
two_streams_of_one_graph_share_the_frames(void)
{
    CUstream stream, other;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[0];
    other = model.streams[1];
    begin_captured(stream);
    CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
    fork_stream(stream, other);
    for (uint32_t i = 0; i < PARTS; i++) {
        CUdeviceptr address = begin_use(i, false, stream);
        CUdeviceptr same = begin_use(i, false, other);
        CHECK_EQUAL(address, same);
        end_use(i, address, false, i % 2 ? stream : other);
        end_use(i, same, false, i % 2 ? other : stream);
    }
    fork_stream(other, stream);
    mm_frames_end_round(model.frames);
    CHECK_EQUAL(captured.at_home, 0);
    end_captured(stream);
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

/* Nothing tells what a frame has to wait for, so that it is not used again. */
static void
a_use_may_end_after_the_capture(void)
{
    CUstream stream;
    CUdeviceptr address;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[0];
    acquire(0, false, 1);
    release(0);
    begin_captured(stream);
    address = begin_use(0, false, stream);
    CHECK(address != 0);
    end_captured(stream);
    CHECK_EQUAL(mm_frames_remove(model.frames, 0, &st), -1); /* it is in use */
    acquire(0, false, 1);
    end_use(0, address, false, stream);
    release(0);
    replay_with_changed_homes(stream);
    CHECK_OK(mm_frames_remove(model.frames, 0, &st), &st);
    model.parts[0].is_live = false;
    model.live--;
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

/* --- random graphs -------------------------------------------------------------------------- */

typedef struct {
    uint32_t part, stream;
    CUdeviceptr address;
    bool writes;
} open_use;

static open_use uses[MOST_HELD];
static uint32_t open_count;

/* What the caller must do itself: uses that write are ordered with all others. */
static void
join_both(void)
{
    fork_stream(model.streams[0], model.streams[1]);
    fork_stream(model.streams[1], model.streams[0]);
}

static bool
may_begin(uint32_t part, bool writes)
{
    for (uint32_t i = 0; i < open_count; i++) {
        if (uses[i].part == part && (writes || uses[i].writes)) {
            return false;
        }
    }
    return open_count < MOST_HELD;
}

static void
begin_random_use(void)
{
    static unsigned char scratch;
    open_use use = {.part = random_below(PARTS), .stream = random_below(2)};
    const model_part *p = &model.parts[use.part];
    graph_kernel *k = &captured.kernels[captured.count];
    CUstream stream = model.streams[use.stream];

    use.writes = p->access != MM_PART_READ && random_below(2) == 0;
    if (!may_begin(use.part, use.writes)) {
        return;
    }
    if (use.writes) {
        join_both();
    }
    use.address = mm_frames_acquire(model.frames, use.part, use.writes, stream);
    if (use.address == 0) {
        join_both();
    }
    launch_captured(use.part,
                    use.address != 0 ? use.address : (CUdeviceptr)(uintptr_t)home_of(use.part),
                    p->access != MM_PART_SCRATCH, use.writes, stream);
    if (p->access == MM_PART_SCRATCH && use.writes) {
        k->written = &scratch;
    }
    if (use.writes) {
        if (use.address == 0) {
            CHECK_OK(mm_frames_changed(model.frames, use.part, stream, &st), &st);
        }
        join_both();
    }
    captured.at_home += use.address == 0;
    if (use.address != 0) {
        uses[open_count++] = use;
    }
}

static void
end_random_use(void)
{
    const uint32_t i = random_below(open_count);
    const open_use use = uses[i];
    const uint32_t other = random_below(2);

    uses[i] = uses[--open_count];
    if (other != use.stream) {
        fork_stream(model.streams[use.stream], model.streams[other]);
    }
    CHECK_OK(
        mm_frames_release(model.frames, use.part, use.writes, false, model.streams[other], &st),
        &st);
    if (use.writes) {
        join_both();
    }
}

static void
capture_random_uses(bool in_round)
{
    CUstream stream = model.streams[0];

    begin_captured(stream);
    fork_stream(stream, model.streams[1]);
    if (in_round) {
        CHECK_OK(mm_frames_begin_round(model.frames, stream, &st), &st);
    }
    for (int step = 0; step < KERNELS; step++) {
        begin_random_use();
        if (open_count > 0 && random_below(3) > 0) {
            end_random_use();
        }
    }
    while (open_count > 0) {
        end_random_use();
    }
    if (in_round) {
        mm_frames_end_round(model.frames);
    }
    join_both();
    end_captured(stream);
}

static void
check_homes(void)
{
    for (uint32_t i = 0; i < PARTS; i++) {
        const model_part *p = &model.parts[i];
        for (size_t j = 0; j < p->bytes && p->access != MM_PART_SCRATCH; j++) {
            CHECK_EQUAL(home_of(i)[j], p->value);
        }
    }
}

static void
random_graphs_are_right(void)
{
    size_t at_home = 0, in_frames = 0;

    for (uint64_t run = 0; run < 60; run++) {
        seed = run + 1;
        begin_model(&(model_options){
            .room = 1000 + random_below(PARTS * LARGEST), .lazy = run % 2 == 1, .access = -1});
        capture_random_uses(run % 3 > 0);
        for (int i = 0; i < REPLAYS; i++) {
            replay_with_changed_homes(model.streams[0]);
            check_homes();
            for (uint32_t part = 0; part < PARTS && model.held_count < 3; part++) {
                if (model.parts[part].access != MM_PART_SCRATCH && random_below(2) == 0) {
                    acquire(part, false, 2);
                }
            }
            while (model.held_count > 0) {
                release(0);
            }
        }
        at_home += captured.at_home;
        in_frames += captured.count - captured.at_home;
        destroy_captured();
        end_model();
    }
    CHECK(at_home > 250 && in_frames > 1000);
}

/* --- memory --------------------------------------------------------------------------------- */

static void
the_room_comes_back_after_the_last_graph(void)
{
    CUgraphExec first;
    CUstream stream;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[1];
    begin_captured(stream);
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
        CHECK_OK(mm_frames_release(model.frames, i, false, false, model.streams[0], &st), &st);
    }
    model.held_count = 0;
    end_model();
}

/* Frames and homes live as long as the graph does. */
static void
memory_outlives_the_set_for_a_graph(void)
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
        mm_late_frees_attempt(world.cu, &(mm_free_conditions){0});
        CHECK_EQUAL(world.live_allocations(), 0);
        for (int i = 0; i < STREAMS; i++) {
            CHECK_EQUAL(world.cu->StreamDestroy(model.streams[i]), CUDA_SUCCESS);
        }
    }
}

static void
a_capture_that_ends_in_nothing_keeps_nothing(void)
{
    CUgraph graph;
    CUstream stream;

    begin_equal(4, MM_PART_READ, false);
    stream = model.streams[1];
    begin_captured(stream);
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
static void
other_drivers_use_parts_at_home(void)
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
        replay_with_changed_homes(stream);
        destroy_captured();
        end_model();
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
static void
replays_are_right_when_calls_fail(void)
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

static void
every_allocation_may_fail(void)
{
    bool failed = true;

    for (long nth = 1; failed; nth++) {
        CUstream stream;
        begin_equal(4, MM_PART_READ, false);
        stream = model.streams[1];
        begin_captured(stream);
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

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(each_replay_reads_what_is_at_home),
        CHECK_TEST(copies_are_early),
        CHECK_TEST(uses_may_nest_and_begin_again),
        CHECK_TEST(writes_go_home_at_each_replay),
        CHECK_TEST(a_copy_follows_a_write_at_home_in_the_graph),
        CHECK_TEST(scratch_has_a_frame_of_its_own),
        CHECK_TEST(two_streams_of_one_graph_share_the_frames),
        CHECK_TEST(a_use_may_end_after_the_capture),
        CHECK_TEST(random_graphs_are_right),
        CHECK_TEST(the_room_comes_back_after_the_last_graph),
        CHECK_TEST(memory_outlives_the_set_for_a_graph),
        CHECK_TEST(a_capture_that_ends_in_nothing_keeps_nothing),
        CHECK_TEST(other_drivers_use_parts_at_home),
        CHECK_TEST(replays_are_right_when_calls_fail),
        CHECK_TEST(every_allocation_may_fail),
    };

    if (argc != 2) {
        (void)fprintf(stderr, "usage: test_frames_graphs PATH_OF_THE_EMULATED_DRIVER\n");
        return 2;
    }
    world_open(argv[1]);
    return check_run(tests, sizeof tests / sizeof *tests);
}
