/* test_frames_threads.c: parts in frames and of managed memory that threads use, add and remove at
 * once; calls that wait while others go on, and the end of a set under calls. */
#include <sched.h>

#include "frames_model.h"

enum { THREAD_USES = 180 };

static atomic_uint next_thread;

static void
begin_for_threads(int run, size_t room)
{
    seed = (uint64_t)run + 1;
    begin_model(&(model_options){.room = room,
                                 .host_waits = run % 4 == 3,
                                 .managed = run % 3 == 2,
                                 .lazy = run % 2 == 1,
                                 .access = MM_PART_WRITE});
    atomic_store(&next_thread, 0);
}

/* --- uses ----------------------------------------------------------------------------------- */

/* The use of a part by a thread, which writes its own parts and reads those that nobody writes.
 * True if it has written: never at home, from which others may load the part before they know of
 * it. */
static bool
use_in_thread(uint32_t part, bool writes, unsigned char value, CUstream stream)
{
    uint32_t number = model.parts[part].number;
    CUdeviceptr address = mm_frames_acquire(model.frames, number, writes, stream).address;
    kernel k = {.bytes = address != 0 ? (unsigned char *)(uintptr_t)address : home_of(part),
                .count = model.parts[part].bytes,
                .expected = value,
                .written = (unsigned char)(value + 1),
                .checks = true,
                .writes = writes && address != 0};
    mm_status mine;

    if (address == 0) {
        CHECK_OK(mm_frames_settle(model.frames, stream, &mine), &mine);
    }
    launch(k, stream);
    if (address != 0) {
        CHECK_OK(mm_frames_release(model.frames, plain_use(number), writes, writes, stream, &mine),
                 &mine);
        if (writes) {
            CHECK_OK(
                mm_frames_release(model.frames, plain_use(number), false, false, stream, &mine),
                &mine);
        }
    } else if (writes) {
        CHECK_OK(mm_frames_changed(model.frames, number, stream, &mine), &mine);
    }
    return k.writes;
}

/* Its own part comes and goes. */
static void
replace_part(uint32_t part)
{
    model_part *p = &model.parts[part];
    mm_status mine;

    CHECK_OK(mm_frames_remove(model.frames, p->number, &mine), &mine);
    CHECK_OK(mm_frames_add(model.frames, (CUdeviceptr)(uintptr_t)home_of(part), p->bytes,
                           MM_PART_WRITE, &p->number, &mine),
             &mine);
}

static void
use_others(uint32_t step, CUstream stream)
{
    static const uint32_t order[] = {1, 0, 3, 2};
    mm_frames_report ignored;
    mm_status mine;

    if (step % 31 == 0) {
        CHECK_OK(mm_frames_wait(model.frames, &mine), &mine);
    } else if (step % 37 == 0) {
        CHECK_OK(mm_frames_give_order(model.frames, order, step % 5, &mine), &mine);
    } else if (step % 41 == 0) {
        (void)mm_frames_have(model.frames, step % PARTS);
        mm_frames_read_report(model.frames, &ignored);
    } else if (step % 20 == 0) {
        CHECK_OK(mm_frames_begin_round(model.frames, stream, &mine), &mine);
    } else if (step % 20 == 19) {
        mm_frames_end_round(model.frames);
    }
}

static void *
use_from_a_thread(void *nothing)
{
    uint32_t mine = atomic_fetch_add(&next_thread, 1), random = mine;
    model_part *own = &model.parts[2 * mine];
    CUstream stream = model.streams[mine];

    for (uint32_t i = 0; i < THREAD_USES; i++) {
        use_others(i, stream);
        if (i % 3 == 0) {
            own->value += use_in_thread(2 * mine, true, own->value, stream);
        } else {
            uint32_t part = (random = random * 1103515245 + 12345) / 65536 % 4 * 2 + 1;
            (void)use_in_thread(part, false, (unsigned char)(part + 1), stream);
        }
        if (i % 17 == 0) {
            replace_part(2 * mine);
        }
    }
    return nothing;
}

TEST(threads_use_parts_at_once)
{
    for (int run = 0; run < 12; run++) {
        begin_for_threads(run, (size_t)(1 + run) * 1500);
        check_threads(STREAMS, use_from_a_thread, NULL);
        CHECK(report().present <= report().room);
        CHECK_EQUAL(report().parts, PARTS);
        CHECK_EQUAL(report().failures, 0);
        end_model();
    }
}

/* --- calls that wait -------------------------------------------------------------------------- */

static atomic_bool is_waiting, may_go_on;

/* A wait for the device that lasts as long as the test wants. */
static CUresult CUDAAPI
long_wait(CUevent event)
{
    atomic_store(&is_waiting, true);
    while (!atomic_load(&may_go_on)) {
        (void)sched_yield();
    }
    return world.cu->EventSynchronize(event);
}

static void *
wait_in_thread(void *nothing)
{
    mm_status mine;

    CHECK_OK(mm_frames_wait(model.frames, &mine), &mine);
    return nothing;
}

static pthread_t
begin_wait(void)
{
    pthread_t thread;

    atomic_store(&is_waiting, false);
    atomic_store(&may_go_on, false);
    watched.EventSynchronize = long_wait;
    CHECK_EQUAL(pthread_create(&thread, NULL, wait_in_thread, NULL), 0);
    while (!atomic_load(&is_waiting)) {
        (void)sched_yield();
    }
    return thread;
}

static void
end_wait(pthread_t thread)
{
    atomic_store(&may_go_on, true);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    watched.EventSynchronize = world.cu->EventSynchronize;
}

/* The work that one thread waits for may need what another one is about to queue. */
TEST(a_wait_for_copies_holds_nobody_up)
{
    for (int run = 0; run < 3; run++) {
        pthread_t thread;
        begin_for_threads(run, (size_t)2 * LARGEST);
        acquire(0, true, 0);
        release(0);
        thread = begin_wait();
        acquire(1, true, 1);
        release(0);
        CHECK_OK(mm_frames_settle(model.frames, model.streams[2], &st), &st);
        CHECK_EQUAL(report().acquired, 2);
        end_wait(thread);
        end_model();
    }
}

static void CUDA_CB
free_in_host_function(void *frames)
{
    mm_frames_free(frames);
}

/* The call may wait for the host function: the set stays. */
TEST(a_host_function_frees_no_set_that_a_call_uses)
{
    for (int run = 0; run < 3; run++) {
        mm_frames *frames;
        pthread_t thread;
        begin_for_threads(run, (size_t)2 * LARGEST);
        frames = model.frames;
        thread = begin_wait();
        CHECK_EQUAL(world.cu->LaunchHostFunc(model.streams[0], free_in_host_function, frames),
                    CUDA_SUCCESS);
        CHECK_EQUAL(world.cu->StreamSynchronize(model.streams[0]), CUDA_SUCCESS);
        CHECK_EQUAL(report().parts, PARTS);
        end_wait(thread);
        acquire(0, true, 0);
        release(0);
        end_model();
    }
}

/* --- the end ---------------------------------------------------------------------------------- */

static atomic_bool is_closing;

static void *
use_until_it_is_closed(void *nothing)
{
    uint32_t mine = atomic_fetch_add(&next_thread, 1) % STREAMS;
    mm_status ignored;

    for (uint32_t i = 0; i < 400; i++) {
        uint32_t part = (i * 5 + mine) % PARTS;
        if (i == 200 && mine == 0) {
            mm_frames_close(model.frames);
            atomic_store(&is_closing, true);
        }
        if (mm_frames_acquire(model.frames, part, false, model.streams[mine]).address != 0) {
            CHECK_OK(mm_frames_release(model.frames, plain_use(part), false, false,
                                       model.streams[mine], &ignored),
                     &ignored);
        } else if (atomic_load(&is_closing)) {
            CHECK_OK(mm_frames_changed(model.frames, part, model.streams[mine], &ignored),
                     &ignored);
            CHECK_EQUAL(mm_frames_add(model.frames, PAGE, 1, MM_PART_READ, &part, &ignored), -1);
            CHECK_EQUAL(ignored.kind, MM_REFUSED);
        }
    }
    return nothing;
}

TEST(a_set_is_closed_while_threads_use_it)
{
    for (int run = 0; run < 6; run++) {
        begin_for_threads(run, (size_t)4 * LARGEST);
        atomic_store(&is_closing, false);
        check_threads(STREAMS, use_until_it_is_closed, NULL);
        end_model();
    }
}

TEST_MAIN(world_open)
