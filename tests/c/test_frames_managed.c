/* test_frames_managed.c: parts of managed memory, which keep their address: their contents and
 * places under random uses and failures, prefetches of all sizes, and discards. */
#include "frames_model.h"

enum { STEPS = 250 };

#define MIB ((size_t)1 << 20)

/* --- random uses ---------------------------------------------------------------------------- */

TEST(contents_and_places_are_right_under_random_uses)
{
    for (uint64_t run = 0; run < 80; run++) {
        run_model(&(model_options){.managed = true}, run, STEPS);
    }
}

/* --- single cases --------------------------------------------------------------------------- */

/* Parts of a page, of which so many fit. */
static void
begin_pages(uint32_t fit, mm_part_access access)
{
    seed = 1;
    begin_model(&(model_options){
        .room = (size_t)fit * PAGE, .bytes = PAGE, .managed = true, .access = (int)access});
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    model.rounds++;
}

static void
use(uint32_t part, bool writes)
{
    acquire(part, writes, 0);
    check_report();
    release(model.held_count - 1);
    check_report();
}

/* Without a kernel, so that pages stay where the set has sent them. */
static void
take_room(uint32_t part)
{
    CHECK(mm_frames_acquire(model.frames, part, false, model.streams[0]).address != 0);
    CHECK_OK(mm_frames_release(model.frames, plain_use(part), false, false, model.streams[0], &st),
             &st);
}

TEST(bytes_that_were_on_the_device_are_kept)
{
    begin_pages(2, MM_PART_READ);
    CHECK_EQUAL(report().kept, 0);
    for (uint32_t i = 0; i < PARTS; i++) {
        use(i, false);
    }
    CHECK_EQUAL(report().kept, PARTS * PAGE);
    CHECK(report().present <= 2 * PAGE);
    remove_part(0);
    CHECK_EQUAL(report().kept, (PARTS - 1) * PAGE);
    CHECK(add_part(0, MM_PART_READ));
    CHECK_EQUAL(report().kept, (PARTS - 1) * PAGE);
    end_model();
}

TEST(a_removed_part_stays_where_it_is)
{
    begin_pages(PARTS, MM_PART_WRITE);
    use(4, true);
    CHECK_EQUAL(place_of(4), 1);
    world.log_clear();
    remove_part(4);
    CHECK_EQUAL(world_calls("cuMemPrefetchAsync"), 0);
    CHECK_EQUAL(report().present, model.parts[4].bytes * (report().loads - 1));
    CHECK_EQUAL(place_of(4), 1);
    CHECK_EQUAL(
        mm_frames_acquire(model.frames, model.parts[4].number, false, model.streams[0]).address,
        0);
    end_model();
}

/* Nothing goes home at the end of a use, as nothing was copied. */
TEST(only_parts_that_make_room_go_home)
{
    begin_pages(PARTS, MM_PART_WRITE);
    for (uint32_t i = 0; i < 3 * PARTS; i++) {
        use(i % PARTS, true);
    }
    CHECK_EQUAL(report().bytes_home, 0);
    CHECK_EQUAL(report().drops, 0);
    end_model();
    begin_pages(1, MM_PART_WRITE);
    use(0, true);
    take_room(5);
    CHECK(report().drops > 0);
    CHECK_EQUAL(report().bytes_home, report().drops * PAGE);
    CHECK_EQUAL(place_of(0), 2);
    end_model();
}

/* Whole pages of it are discarded on the way home: what is beside them is kept. */
TEST(scratch_is_discarded_in_whole_pages)
{
    for (int has = 0; has < 2; has++) {
        model_part *p = &model.parts[1];
        seed = 1;
        begin_model(&(model_options){
            .room = LARGEST_MANAGED, .bytes = LARGEST_MANAGED, .managed = true, .access = 2});
        watched.MemDiscardAndPrefetchBatchAsync =
            has ? watched.MemDiscardAndPrefetchBatchAsync : NULL;
        acquire(1, true, 0);
        release(0);
        world.log_clear();
        take_room(2);
        CHECK_EQUAL(world_calls("cuMemDiscardAndPrefetchBatchAsync"), has);
        CHECK_EQUAL(place_of(1), 2);
        CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
        CHECK_EQUAL(home_of(1)[0], p->value); /* inside of a page */
        CHECK_EQUAL(home_of(1)[p->bytes - 1], p->value);
        CHECK_EQUAL(home_of(1)[PAGE] == p->value, !has);
        end_model();
    }
}

/* Of scratch, what uses leave is not needed; what the caller has written for the next one is. */
TEST(scratch_that_was_written_at_home_is_kept_until_a_use)
{
    for (int used = 0; used < 2; used++) {
        model_part *p = &model.parts[2];
        begin_pages(1, MM_PART_SCRATCH);
        if (used) {
            take_room(2);
            p->value = 77;
            memset(home_of(2), p->value, p->bytes);
            CHECK_OK(mm_frames_changed(model.frames, 2, model.streams[0], &st), &st);
        }
        take_room(1); /* and 2 is loaded ahead */
        CHECK(used || mm_frames_have(model.frames, 2));
        take_room(5);
        CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
        CHECK_EQUAL(home_of(2)[0], p->value);
        take_room(2);
        take_room(5);
        CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
        CHECK(home_of(2)[0] != p->value);
        end_model();
    }
}

/* A scratch part without a whole page is prefetched. */
TEST(small_scratch_is_not_discarded)
{
    seed = 1;
    begin_model(
        &(model_options){.room = 500, .bytes = 400, .managed = true, .access = MM_PART_SCRATCH});
    world.log_clear();
    acquire(1, true, 0);
    release(0);
    take_room(2);
    CHECK_EQUAL(world_calls("cuMemDiscardAndPrefetchBatchAsync"), 0);
    CHECK_EQUAL(place_of(1), 2);
    end_model();
}

/* Somebody else may have its address. */
TEST(closed_memory_does_not_move)
{
    mm_guard guard = {0};

    begin_pages(1, MM_PART_WRITE);
    mm_frames_end_round(model.frames); /* nothing is loaded ahead */
    model.rounds--;
    mm_frames_guard(model.frames, 3, &guard);
    world.log_clear();
    take_room(3);
    CHECK_EQUAL(world_calls("cuMemPrefetchAsync"), 1);
    world.log_clear();
    CHECK_EQUAL(mm_guard_close(&guard, false), MM_CLOSED_NOW); /* no call is under way */
    CHECK_OK(mm_frames_changed(model.frames, 3, model.streams[0], &st), &st);
    CHECK_EQUAL(report().present, 0);
    take_room(3);
    CHECK_OK(mm_frames_changed(model.frames, 3, model.streams[0], &st), &st);
    CHECK_EQUAL(world_calls("cuMemPrefetchAsync"), 0);
    CHECK_EQUAL(report().present, 0);
    end_model();
}

/* Large prefetches stand behind host functions, so that the calls return. */
TEST(large_prefetches_are_deferred)
{
    CUdeviceptr start = 0;
    mm_frames *frames;
    uint32_t parts[2];
    CUstream stream;
    mm_scope scope;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->MemAllocManaged(&start, 20 * MIB, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    frames = mm_frames_new(world.cu, 0, 17 * MIB, false, true, false, &st);
    CHECK(frames != NULL);
    CHECK_OK(mm_frames_add(frames, start, 17 * MIB, MM_PART_WRITE, &parts[0], &st), &st);
    CHECK_OK(mm_frames_add(frames, start + 17 * MIB, 3 * MIB, MM_PART_WRITE, &parts[1], &st), &st);
    world.log_clear();
    for (size_t i = 0; i < 5; i++) {
        static const size_t calls[] = {1, 2, 3, 4, 5}; /* 17 in; out; 17 in, 3 out; out; ... */
        CHECK_EQUAL(mm_frames_acquire(frames, parts[i % 2], true, stream).address,
                    start + i % 2 * 17 * MIB);
        CHECK_OK(mm_frames_release(frames, plain_use(parts[i % 2]), true, false, stream, &st),
                 &st);
        CHECK(world_calls("cuLaunchHostFunc") >= calls[i]);
    }
    world.fail("cuLaunchHostFunc", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK_EQUAL(mm_frames_acquire(frames, parts[1], true, stream).address, 0);
    world.fail_clear();
    mm_frames_free(frames);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->MemFree(start), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    CHECK_EQUAL(world.live_allocations(), 0);
}

/* The last test: events that could not be destroyed stay. */
TEST(contents_are_right_when_calls_fail)
{
    for (uint64_t run = 100; run < 200; run++) {
        run_model(&(model_options){.managed = true, .faults = true}, run, STEPS);
    }
}

TEST_MAIN(world_open)
