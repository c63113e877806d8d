/* test_frames.c: parts in frames and at home: their contents under random uses, and the memory
 * that the device gives for them; loads ahead, and the ends of uses. */
#include "failing_allocations.h"
#include "frames_model.h"

enum { EQUAL = 1024, STEPS = 250, MANY_STREAMS = 300, IN_FLIGHT = 40, MANY_USES = 1300 };

/* --- random uses ---------------------------------------------------------------------------- */

TEST(contents_are_right_under_random_uses)
{
    for (uint64_t run = 0; run < 80; run++) {
        run_model(&(model_options){0}, run, STEPS);
    }
}

/* --- loads ---------------------------------------------------------------------------------- */

/* Each makes a use of the same order, so that all is known by the third round. */
static void
use_round(uint32_t parts)
{
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (uint32_t i = 0; i < parts; i++) {
        acquire(i, false, 0);
        while (model.held_count > 0) {
            release(0);
        }
    }
    mm_frames_end_round(model.frames);
}

/* Parts of a size, of which so many fit. */
static void
begin_equal(uint32_t fit)
{
    seed = 1;
    begin_model(
        &(model_options){.room = (size_t)fit * EQUAL, .bytes = EQUAL, .access = MM_PART_WRITE});
}

/* A loop is loaded ahead, each part at most once a round. */
TEST(a_loop_is_loaded_ahead)
{
    mm_frames_report before;

    begin_equal(3);
    for (int i = 0; i < 3; i++) {
        use_round(PARTS);
    }
    before = report();
    for (int i = 0; i < 5; i++) {
        use_round(PARTS);
    }
    CHECK(report().loads - before.loads <= (uint64_t)5 * PARTS);
    CHECK(report().ahead - before.ahead >= (uint64_t)5 * (PARTS - 1));
    CHECK_EQUAL(report().mapped, 0);
    end_model();
}

/* The uses of one long round, in an order about which nothing was learned. */
TEST(a_given_order_is_loaded_ahead)
{
    static const uint32_t order[] = {5, 0, 7, 2, 8, 1, 6, 3, 4};
    mm_frames_report before;

    for (int given = 0; given < 2; given++) {
        begin_equal(3);
        CHECK_OK(mm_frames_give_order(model.frames, order, given ? PARTS : 0, &st), &st);
        CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
        for (uint32_t i = 0; i < PARTS; i++) {
            before = report();
            acquire(order[i], false, 0);
            CHECK(!given || i == 0 || report().hits == before.hits + 1);
            release(0);
        }
        CHECK(given || report().hits < PARTS / 2);
        end_model();
    }
}

/* Parts whose next use was not foreseen before, too: one that is loaded ahead stays until
 * its use. */
TEST(an_order_after_random_uses_is_loaded_ahead)
{
    static const uint32_t order[] = {5, 0, 7, 2, 8, 1, 6, 3, 4};
    mm_frames_report before;

    begin_equal(4);
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    model.rounds++;
    for (int i = 0; i < 300; i++) {
        acquire(random_below(PARTS), false, 0);
        release(0);
    }
    CHECK_OK(mm_frames_give_order(model.frames, order, PARTS, &st), &st);
    for (int i = 0; i < 3; i++) {
        before = report();
        for (uint32_t j = 0; j < PARTS; j++) {
            acquire(order[j], false, 0);
            release(0);
        }
        CHECK(i == 0 || report().hits - before.hits == PARTS);
        CHECK(i == 0 || report().loads - before.loads <= PARTS);
    }
    end_model();
}

/* A part that was removed leaves its room, and is not expected any more. */
TEST(a_loop_goes_on_without_a_part)
{
    mm_frames_report before;

    begin_equal(3);
    for (int i = 0; i < 3; i++) {
        use_round(PARTS);
    }
    remove_part(PARTS - 1);
    use_round(PARTS - 1);
    before = report();
    for (int i = 0; i < 5; i++) {
        use_round(PARTS - 1);
    }
    CHECK(report().ahead - before.ahead >= (uint64_t)5 * (PARTS - 2));
    CHECK(report().loads - before.loads <= (uint64_t)5 * (PARTS - 1));
    end_model();
}

TEST(held_parts_leave_no_room)
{
    begin_equal(2);
    acquire(0, false, 0);
    acquire(1, false, 1);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 2, false, model.streams[0]).address, 0);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 0, false, model.streams[1]).address,
                model.held[0].address);
    CHECK_OK(mm_frames_release(model.frames, plain_use(0), false, false, model.streams[1], &st),
             &st);
    CHECK_EQUAL(report().mapped, 1);
    CHECK_EQUAL(mm_frames_remove(model.frames, 0, &st), -1);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    release(1);
    CHECK(mm_frames_acquire(model.frames, 2, false, model.streams[0]).address != 0);
    CHECK_OK(mm_frames_release(model.frames, plain_use(2), false, false, model.streams[0], &st),
             &st);
    end_model();
}

TEST(a_part_larger_than_the_room_is_used_at_home)
{
    uint32_t part;

    begin_equal(2);
    CHECK_OK(
        mm_frames_add(model.frames, model.slab->start, 2 * EQUAL + 1, MM_PART_READ, &part, &st),
        &st);
    for (int i = 0; i < 5; i++) {
        CHECK_EQUAL(mm_frames_acquire(model.frames, part, false, model.streams[0]).address, 0);
    }
    CHECK_EQUAL(report().mapped, 5);
    CHECK_EQUAL(report().loads, report().ahead);
    CHECK_OK(mm_frames_remove(model.frames, part, &st), &st);
    CHECK_EQUAL(mm_frames_acquire(model.frames, part, false, model.streams[0]).address, 0);
    end_model();
}

/* Nothing of scratch crosses the bus. */
TEST(scratch_is_not_copied)
{
    seed = 1;
    begin_model(&(model_options){.room = 2 * EQUAL, .bytes = EQUAL, .access = MM_PART_SCRATCH});
    world.log_clear();
    for (uint32_t i = 0; i < 3 * PARTS; i++) {
        acquire(i % PARTS, true, i % STREAMS);
        go_on(0);
        release(0);
    }
    CHECK_EQUAL(world_calls("cuMemcpyAsync"), 0);
    CHECK_EQUAL(report().bytes_home, 0);
    CHECK_EQUAL(report().mapped, 0);
    end_model();
}

/* What captured may have written every part at home by the next use. */
TEST(copies_are_forgotten_after_a_capture_that_begins_a_round)
{
    CUgraph graph;
    uint64_t drops;

    begin_equal(PARTS);
    use_round(PARTS);
    drops = report().drops;
    CHECK_EQUAL(world.begin_capture(model.streams[1], CU_STREAM_CAPTURE_MODE_RELAXED),
                CUDA_SUCCESS);
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[1], &st), &st);
    model.rounds++;
    CHECK_EQUAL(world.end_capture(model.streams[1], &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_EQUAL(report().drops, drops);
    CHECK_OK(mm_frames_changed(model.frames, 3, model.streams[0], &st), &st); /* that one alone */
    CHECK_EQUAL(report().drops, drops + 1);
    acquire(0, false, 0);
    CHECK_EQUAL(report().drops, drops + PARTS);
    release(0);
    end_model();
}

/* --- the ends of uses ------------------------------------------------------------------------ */

/* Its list of ends does not grow with the streams that have come and gone. */
TEST(a_part_that_stays_keeps_few_ends_of_uses)
{
    size_t events = 0;
    long bytes = 0;

    for (int held = 0; held < 2; held++) {
        begin_equal(2);
        CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
        model.rounds++;
        if (held) {
            acquire(0, false, 0);
        }
        for (uint32_t i = 0; i < MANY_STREAMS; i++) {
            CUstream stream;
            CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
            CHECK(mm_frames_acquire(model.frames, 0, false, stream).address != 0);
            CHECK_OK(mm_frames_release(model.frames, plain_use(0), false, i % 2 == 1, stream, &st),
                     &st);
            if (i % 2 == 1) {
                CHECK_OK(mm_frames_release(model.frames, plain_use(0), false, false, stream, &st),
                         &st);
            }
            CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
            events = i == IN_FLIGHT ? world.live_events() : events;
            bytes = i == IN_FLIGHT ? live_bytes() : bytes;
            CHECK(i < IN_FLIGHT || world.live_events() <= events);
        }
        CHECK(live_bytes() < bytes + 8192); /* besides what the driver keeps of its streams */
        end_model();
    }
}

/* Those under way are not among the ones that go: their frame is not written before. */
TEST(a_frame_follows_all_uses_under_way)
{
    CUstream streams[IN_FLIGHT];
    CUdeviceptr address;

    seed = 1;
    begin_model(
        &(model_options){.room = EQUAL, .bytes = EQUAL, .access = MM_PART_READ, .lazy = true});
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    model.rounds++;
    for (int i = 0; i < IN_FLIGHT; i++) {
        CHECK_OK(mm_stream_create(world.cu, &streams[i], &st), &st);
        address = mm_frames_acquire(model.frames, 0, false, streams[i]).address;
        CHECK(address != 0);
        launch((kernel){.bytes = (unsigned char *)(uintptr_t)address,
                        .count = EQUAL,
                        .expected = 1,
                        .checks = true},
               streams[i]);
        CHECK_OK(mm_frames_release(model.frames, plain_use(0), false, false, streams[i], &st),
                 &st);
    }
    acquire(1, false, 0);
    CHECK_EQUAL(world.cu->StreamSynchronize(model.streams[0]), CUDA_SUCCESS);
    release(0);
    for (int i = 0; i < IN_FLIGHT; i++) {
        CHECK_EQUAL(world.cu->StreamDestroy(streams[i]), CUDA_SUCCESS);
    }
    end_model();
}

/* Each event is of the context of its stream. */
TEST(streams_of_two_devices_use_a_part)
{
    CUstream other;
    mm_scope scope;

    begin_equal(2);
    CHECK_OK(mm_scope_enter(&scope, world.cu, 1, &st), &st);
    CHECK_OK(mm_stream_create(world.cu, &other, &st), &st);
    mm_scope_leave(&scope);
    for (uint32_t i = 0; i < 4 * PARTS; i++) {
        CUstream stream = i % 3 == 0 ? other : model.streams[0];
        CHECK(mm_frames_acquire(model.frames, i % PARTS, true, stream).address != 0);
        CHECK_OK(mm_frames_release(model.frames, plain_use(i % PARTS), true, false, stream, &st),
                 &st);
    }
    CHECK_EQUAL(report().failures, 0);
    CHECK_EQUAL(world.cu->StreamDestroy(other), CUDA_SUCCESS);
    end_model();
}

/* A use in a stream of a context that ends with it. */
static void
use_in_a_context(uint32_t part)
{
    CUcontext context = NULL, current = NULL;
    CUstream stream;

    CHECK_EQUAL(world.create_context(&context, 0, 0), CUDA_SUCCESS); /* and makes it current */
    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    CHECK(mm_frames_acquire(model.frames, part, false, stream).address != 0);
    CHECK_OK(mm_frames_release(model.frames, plain_use(part), false, false, stream, &st), &st);
    CHECK_EQUAL(world.cu->CtxPopCurrent(&current), CUDA_SUCCESS);
    CHECK(current == context);
    CHECK_EQUAL(world.destroy_context(context), CUDA_SUCCESS);
}

/* Their events have ended too: nothing waits for them, and nothing is left of them. */
TEST(contexts_end_with_their_uses)
{
    long bytes = 0;

    for (int stays = 0; stays < 2; stays++) {
        begin_equal(1);
        CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
        model.rounds++;
        for (uint32_t i = 0; i < 120; i++) {
            use_in_a_context(stays ? 0 : i % PARTS);
            bytes = i == IN_FLIGHT ? live_bytes() : bytes;
        }
        CHECK(live_bytes() < bytes + 2048);
        CHECK_EQUAL(report().failures, 0);
        acquire(1, true, 0);
        release(0);
        end_model();
    }
}

/* Of two that were recorded at once, either may be the later one. */
TEST(ends_that_were_recorded_at_once_are_both_kept)
{
    mm_release_list releases[3] = {{.stream = 7}, {.stream = 7}, {.stream = 7}};
    mm_release_list *pool = NULL, *list = mm_release_add(NULL, &releases[0], &pool);

    list = mm_release_add(list, &releases[1], &pool); /* began before the first was added */
    CHECK_EQUAL(mm_releases_count(list), 2);
    CHECK(pool == NULL);
    releases[2].begun = releases[1].added;
    list = mm_release_add(list, &releases[2], &pool);
    CHECK(list == &releases[2] && list->next == NULL);
    CHECK_EQUAL(mm_releases_count(pool), 2);
}

/* Old uses count less and less, for ever. */
TEST(many_uses_are_weighed)
{
    begin_equal(2);
    for (uint32_t i = 1; i < PARTS; i++) {
        remove_part(i);
    }
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    model.rounds++;
    for (int i = 0; i < MANY_USES; i++) {
        CHECK(mm_frames_acquire(model.frames, 0, false, model.streams[0]).address != 0);
        CHECK_OK(
            mm_frames_release(model.frames, plain_use(0), false, false, model.streams[0], &st),
            &st);
    }
    CHECK_EQUAL(report().hits, MANY_USES - 1);
    CHECK(add_part(1, MM_PART_WRITE));
    acquire(1, false, 0);
    CHECK(mm_frames_have(model.frames, 0));
    release(0);
    end_model();
}

/* --- memory and failures ---------------------------------------------------------------------- */

static void
use_with_little_memory(mm_frames *frames, mm_slab *home, CUstream stream)
{
    static const uint32_t order[] = {0, 0, 0};
    bool locked = mm_slab_lock(world.cu, home, &st) == 0;
    uint32_t part;

    for (int i = 0; i < 3 && locked; i++) {
        bool added = mm_frames_add(frames, home->start + (CUdeviceptr)i % 2 * PAGE, PAGE,
                                   MM_PART_WRITE, &part, &st)
                     == 0;
        CHECK(added || st.kind == MM_NO_MEMORY);
        if (added && i == 1) {
            CHECK_OK(mm_frames_remove(frames, part, &st), &st);
        }
    }
    if (mm_frames_count(frames) > 0 && mm_frames_give_order(frames, order, 3, &st) < 0) {
        CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    }
    for (uint32_t i = 0; i < 2 * mm_frames_count(frames); i++) {
        if (mm_frames_acquire(frames, i / 2, true, stream).address != 0) {
            CHECK_OK(mm_frames_release(frames, plain_use(i / 2), true, false, stream, &st), &st);
        }
    }
}

TEST(every_allocation_may_fail)
{
    for (long n = 1; n < 40; n++) {
        mm_frames *frames;
        mm_slab *home;
        CUstream stream;
        CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
        fail_allocation(n);
        home = mm_slab_on_host(0, (size_t)2 * PAGE, &st);
        CHECK(home != NULL || st.kind == MM_NO_MEMORY);
        frames = mm_frames_new(world.cu, 0, PAGE, false, n % 2 == 0, false, &st);
        CHECK(frames != NULL || st.kind == MM_NO_MEMORY);
        if (home != NULL && frames != NULL) {
            use_with_little_memory(frames, home, stream);
        }
        fail_allocation(0);
        CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
        mm_frames_free(frames);
        mm_slab_free(home);
        CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
        CHECK_EQUAL(world.live_allocations(), 0);
    }
}

/* The part is gone all the same, as the device was waited for. */
TEST(a_removal_goes_on_after_a_failure)
{
    begin_equal(2);
    acquire(0, true, 0);
    release(0);
    world.fail("cuStreamWaitEvent", 1, CUDA_ERROR_UNKNOWN, 0);
    remove_part(0);
    world.fail_clear();
    CHECK_EQUAL(report().failures, 1);
    CHECK_EQUAL(report().error.code, CUDA_ERROR_UNKNOWN);
    CHECK_EQUAL(report().present, 0);
    CHECK(mm_frames_acquire(model.frames, 1, true, model.streams[0]).address != 0);
    CHECK_OK(mm_frames_release(model.frames, plain_use(1), false, false, model.streams[0], &st),
             &st);
    end_model();
}

/* Without an event for its end, and if the wait for the device fails too. The caller tries
 * again. */
TEST(a_release_that_fails_leaves_the_part_held)
{
    begin_equal(2);
    acquire(0, true, 0);
    world.fail("cuStreamGetId", 1, CUDA_ERROR_UNKNOWN, 0);
    world.fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK_EQUAL(mm_frames_release(model.frames, plain_use(0), true, false, model.streams[0], &st),
                -1);
    CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
    world.fail_clear();
    CHECK_EQUAL(mm_frames_remove(model.frames, 0, &st), -1);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK_EQUAL(report().failures, 1);
    release(0);
    remove_part(0);
    end_model();
}

/* Each call of a new set and of its first part. */
TEST(a_set_that_cannot_be_made_leaves_nothing)
{
    static const char *const names[] = {"cuMemAlloc", "cuStreamCreate", "cuEventCreate",
                                        "cuCtxPushCurrent", "cuDeviceGetAttribute"};
    size_t made = 0;

    for (uint32_t i = 0; i < 5 * 4 * 2; i++) {
        mm_frames *frames;
        uint32_t part = 0;
        world.fail(names[i / 8], 1 + i / 2 % 4, CUDA_ERROR_UNKNOWN, 0);
        frames = mm_frames_new(world.cu, 0, PAGE, false, i % 2 == 0, false, &st);
        if (frames != NULL && mm_frames_add(frames, PAGE, 1, MM_PART_READ, &part, &st) < 0) {
            CHECK_EQUAL(mm_frames_count(frames), 0);
        }
        made += frames != NULL;
        CHECK(frames != NULL || st.kind == MM_DRIVER_CALL);
        world.fail_clear();
        mm_frames_free(frames);
        CHECK_EQUAL(world.live_streams(), 0);
        CHECK_EQUAL(world.live_events(), 0);
        CHECK_EQUAL(world.live_allocations(), 0);
    }
    CHECK(made > 0 && made < 40);
    mm_frames_free(NULL);
}

/* The last test: events that could not be destroyed stay. */
TEST(contents_are_right_when_calls_fail)
{
    for (uint64_t run = 100; run < 240; run++) {
        run_model(&(model_options){.faults = true}, run, STEPS);
    }
}

TEST_MAIN(world_open)
