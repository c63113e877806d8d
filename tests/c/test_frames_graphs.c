/* test_frames_graphs.c: parts that are used in streams that capture a graph: their contents at each
 * replay, and ends of uses elsewhere. */
#include "captured_graphs.h"

/* --- replays -------------------------------------------------------------------------------- */

TEST(each_replay_reads_what_is_at_home)
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
TEST(copies_are_early)
{
    const CUgraphNode *front;
    const CUgraphEdgeData *edges;
    CUstreamCaptureStatus status;
    CUgraph graph;
    cuuint64_t id;
    size_t count;
    CUstream stream;
    CUdeviceptr first, second;

    stream = begin_graph(MM_PART_READ, 1);
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
    CHECK_EQUAL(acquire_captured(3, false, stream), first);
    CHECK_EQUAL(
        world.cu->StreamGetCaptureInfo(stream, &status, &id, &graph, &front, &edges, &count),
        CUDA_SUCCESS);
    CHECK_EQUAL(count, 2); /* the latest kernel, and the copy beside it */
    launch_captured(3, first, true, false, stream);
    end_use(3, first, false, stream);
    mm_frames_end_round(model.frames);
    end_captured(stream);
    replay_and_end(stream);
}

TEST(uses_may_nest_and_begin_again)
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
    replay_and_end(stream);
}

/* Each replay sees the writes of the one before, and so do other uses. */
TEST(writes_go_home_at_each_replay)
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
TEST(a_copy_follows_a_write_at_home_in_the_graph)
{
    CUstream stream;

    stream = begin_graph(MM_PART_READ, 1);
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
    replay_and_end(stream);
}

TEST(scratch_has_a_frame_of_its_own)
{
    CUstream stream;

    stream = begin_graph(MM_PART_SCRATCH, 1);
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

TEST(two_streams_of_one_graph_share_the_frames)
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
    replay_and_end(stream);
}

/* Nothing tells what a frame has to wait for, so that it is not used again. */
TEST(a_use_may_end_after_the_capture)
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
    replay_and_end(stream);
}

/* The end of a use whose graph is gone ends nothing else: no plain use, and none of another graph. */
TEST(a_use_may_end_after_its_graph)
{
    CUstream stream = begin_graph(MM_PART_WRITE, 0);
    mm_part_use late, left;

    CHECK(begin_use(0, true, stream) != 0);
    late = graph_use(0);
    end_captured(stream);
    destroy_captured();
    acquire(0, true, 1);
    begin_captured(stream);
    CHECK(begin_use(0, false, stream) != 0);
    left = graph_use(0);
    CHECK(left.frame != late.frame);
    CHECK_OK(mm_frames_release(model.frames, late, true, false, model.streams[1], &st), &st);
    CHECK_EQUAL(report().failures, 1); /* its write is lost */
    model.faults = true;
    CHECK_OK(mm_frames_release(model.frames, left, false, false, stream, &st), &st);
    end_captured(stream);
    CHECK_EQUAL(mm_frames_remove(model.frames, 0, &st), -1); /* the plain use goes on */
    release(0);
    CHECK_OK(mm_frames_settle(model.frames, model.streams[1], &st), &st);
    wait_for(model.streams[1]);
    CHECK_EQUAL(*home_of(0), model.parts[0].value);
    replay_and_end(stream);
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
    use.address = acquire_captured(use.part, use.writes, stream);
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
    CHECK_OK(mm_frames_release(model.frames, graph_use(use.part), use.writes, false,
                               model.streams[other], &st),
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

TEST(random_graphs_are_right)
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

TEST_MAIN(world_open)
