/* test_recorder_failures.c: recordings where driver calls or allocations fail, with disturbed queues,
 * two at once, and in a process that forks. */
#include <sys/wait.h>
#include <unistd.h>

#include "failing_allocations.h"
#include "recordings.h"

enum { UNKNOWN = 999, ROUNDS = 640 };

/* ---- failures ---- */

/* A whole recording, in which one call may fail: 1 if a function failed, 2 if the start did. */
static int
record_failing(mm_memory *m, mm_range foreign, bool *fired)
{
    mm_recording *r = mm_recording_start(world.cu, &usual, true, &st);
    mm_recorded_result result;
    int failures = 0;

    if (r == NULL) {
        CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
        *fired = true;
        world.fail_clear();
        return 2;
    }
    MM_IGNORE(mm_range_prefetch(world.cu, range_of(m), device(0), NULL, MM_DEFER_NO, &st));
    MM_IGNORE(mm_range_prefetch(world.cu, foreign, device(1), NULL, MM_DEFER_NO, &st));
    failures |= mm_recording_mark(r, &st) < 0;
    CHECK(mm_recording_is_running(r));
    MM_IGNORE(mm_range_prefetch(world.cu, range_of(m), mm_host(), NULL, MM_DEFER_NO, &st));
    failures |= mm_recording_stop(r, true, &st) < 0;
    CHECK(!mm_recording_is_running(r) && !mm_is_recording());
    failures |= mm_recording_attribute(r, NULL, 0, &result, &st) < 0;
    mm_recorded_result_free(&result);
    *fired = world.fail_fired();
    world.fail_clear();
    result = attribute(r); /* works now */
    CHECK(result.part_count == 1 || result.part_count == 2);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    return failures;
}

TEST(sums_while_it_runs_leave_nothing_behind)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *r = start();
    mm_recorded_result result = attribute(r); /* the next one finds what this one keeps */
    long before;

    mm_recorded_result_free(&result);
    before = live_bytes();
    result = attribute(r);
    mm_recorded_result_free(&result);
    CHECK_EQUAL(live_bytes(), before);
    mm_recording_free(r);
    mm_memory_release(m);
}

TEST(failing_calls_leave_nothing_behind)
{
    static const char *const functions[] = {"cuCtxSynchronize", "cuStreamIsCapturing",
                                            "cuDeviceGetUuid",  "cuCtxGetCurrent",
                                            "cuCtxPushCurrent", "cuPointerGetAttributes"};
    mm_memory *m = allocate(BLOCK);
    mm_range foreign = {.size = BLOCK};
    bool fired;

    CHECK_EQUAL(world.cu->MemAllocManaged(&foreign.start, BLOCK, CU_MEM_ATTACH_GLOBAL),
                CUDA_SUCCESS);
    memset((void *)(uintptr_t)foreign.start, 1, BLOCK);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        fired = true;
        for (unsigned nth = 1; fired; nth++) {
            size_t depth = world.context_depth(), streams = world.live_streams();
            int files = world_count_files();
            CHECK(nth < 100);
            world.fail(functions[i], nth, UNKNOWN, 0);
            (void)record_failing(m, foreign, &fired);
            CHECK_EQUAL(world.context_depth(), depth);
            CHECK_EQUAL(world.live_streams(), streams);
            CHECK_EQUAL(world_count_files(), files);
        }
    }
    world.fail("cuCtxSynchronize", 1, UNKNOWN, 0);
    CHECK_EQUAL(record_failing(m, foreign, &fired), 2);
    CHECK_EQUAL(st.code, UNKNOWN);
    world.fail_clear();
    CHECK_EQUAL(record_failing(m, foreign, &fired), 0);
    CHECK_EQUAL(world.cu->MemFree(foreign.start), CUDA_SUCCESS);
    mm_memory_release(m);
}

/* Events beyond the limit are lost without memory for them, and counted; everything else fails. */
static bool
record_without_memory(mm_memory *m)
{
    mm_recording_options options = usual;
    mm_recorded_result result;
    mm_recording *r;
    uint64_t lost = 0;
    int failures = 0;

    options.limit = MM_LEAST_LIMIT; /* which the moves of one page exceed */
    r = mm_recording_start(world.cu, &options, true, &st);
    if (r == NULL) {
        CHECK_EQUAL(st.kind, MM_NO_MEMORY);
        return allocation_has_failed();
    }
    for (int i = 0; i < ROUNDS; i++) {
        prefetch(range_of(m), device(0));
        prefetch(range_of(m), mm_host());
        if (i == ROUNDS / 2) {
            failures += mm_recording_mark(r, &st) < 0;
        }
    }
    failures += mm_recording_stop(r, true, &st) < 0;
    lost = report_of(r).lost;
    failures += mm_recording_attribute(r, NULL, 0, &result, &st) < 0;
    CHECK_EQUAL(allocation_has_failed(), failures > 0 || lost > 0);
    if (failures == 0) {
        uint64_t moved = total_of(&result, 0).moved[TO_DEVICE][MM_CAUSE_REQUESTED]
                         + total_of(&result, 1).moved[TO_DEVICE][MM_CAUSE_REQUESTED];
        CHECK(lost > 0 ? moved <= ROUNDS * m->size : moved == ROUNDS * m->size);
    }
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    return failures > 0 || lost > 0;
}

TEST(failing_allocations_leave_nothing_behind)
{
    mm_memory *m = allocate(PAGE);
    long before;

    CHECK(!record_without_memory(m));
    before = live_bytes();
    for (long nth = 1;; nth++) {
        bool met;
        CHECK(nth < 1000);
        fail_allocation(nth);
        met = record_without_memory(m);
        (void)allocation_has_failed();
        CHECK(!mm_is_recording());
        CHECK_EQUAL(live_bytes(), before);
        if (!met) {
            break;
        }
    }
    mm_memory_release(m);
}

/* A failed wait at the end is reported; the recording has ended with its events. */
TEST(a_failed_stop_keeps_the_results)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *r = start();
    mm_recorded_result result;

    prefetch(range_of(m), device(0));
    world.fail("cuCtxSynchronize", 1, UNKNOWN, 0);
    CHECK(mm_recording_mark(r, &st) < 0);
    CHECK(mm_recording_is_running(r));
    world.fail("cuCtxSynchronize", 1, UNKNOWN, 0);
    CHECK(mm_recording_stop(r, true, &st) < 0);
    CHECK_EQUAL(st.code, UNKNOWN);
    world.fail_clear();
    CHECK(!mm_recording_is_running(r));
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    result = attribute(r);
    CHECK_EQUAL(result.part_count, 1);
    CHECK_EQUAL(total_of(&result, 0).moved[TO_DEVICE][MM_CAUSE_REQUESTED], BLOCK);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_memory_release(m);
}

TEST(disturbed_queues_are_counted)
{
    mm_memory *m = allocate(BLOCK);
    volatile unsigned char *bytes = (unsigned char *)(uintptr_t)m->start;
    static const char *const switches[] = {"drop", "garbage", "late"};
    mm_recording *r;

    for (size_t i = 0; i < 3; i++) {
        mm_recorded_result result;
        mm_sums sums;
        prefetch(range_of(m), device(0));
        r = start();
        CHECK_EQUAL(world.disturb_queue(switches[i], i == 2 ? 2 : 10), 0);
        for (size_t page = 0; page < 512; page++) {
            CHECK_EQUAL(bytes[page * PAGE], 1);
        }
        stop(r);
        CHECK_EQUAL(world.disturb_queue(switches[i], 0), 0);
        result = attribute(r);
        sums = total_of(&result, 0);
        if (i == 0) {
            CHECK(report_of(r).lost > 0);
            CHECK_EQUAL(sums.host_faults + sums.moved[TO_HOST][MM_CAUSE_FAULT] / PAGE
                            + report_of(r).lost,
                        2 * 512);
        } else {
            CHECK_EQUAL(report_of(r).lost, 0);
            CHECK_EQUAL(sums.host_faults, 512);
            CHECK_EQUAL(sums.moved[TO_HOST][MM_CAUSE_FAULT], BLOCK);
        }
        CHECK_EQUAL(report_of(r).rejected > 0, i == 1);
        mm_recorded_result_free(&result);
        mm_recording_free(r);
    }
    mm_memory_release(m);
}

TEST(refused_queues_fail_the_start)
{
    static const char *const switches[] = {"absent", "denied", "refused"};

    for (size_t i = 0; i < 3; i++) {
        int files = world_count_files();
        CHECK_EQUAL(world.disturb_queue(switches[i], 1), 0);
        CHECK(mm_recording_start(world.cu, &usual, true, &st) == NULL);
        CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
        CHECK(st.code != 0);
        CHECK_EQUAL(world.disturb_queue(switches[i], 0), 0);
        CHECK_EQUAL(world_count_files(), files);
        CHECK(!mm_is_recording());
    }
    mm_recording_free(start());
}

/* ---- two at once ---- */

TEST(there_is_one_at_a_time)
{
    mm_recording *r = start(), *second;

    CHECK(mm_recording_start(world.cu, &usual, true, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_TRACE_BUSY);
    stop(r);
    second = start();
    CHECK_OK(mm_recording_stop(r, true, &st), &st); /* does nothing */
    CHECK(mm_recording_is_running(second));
    CHECK(mm_recording_mark(r, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    mm_recording_free(r);
    CHECK(mm_recording_is_running(second));
    mm_recording_free(second); /* while it runs */
    CHECK(!mm_is_recording());
    mm_recording_free(NULL);
    r = start();
    mm_recordings_end(&st); /* another owner's */
    CHECK(mm_recording_is_running(r));
    mm_recordings_end(usual.owner);
    CHECK(!mm_recording_is_running(r) && !mm_is_recording());
    mm_recordings_end(usual.owner);
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    mm_recording_free(r);
    mm_recordings_end(usual.owner);
}

/* ---- forks ---- */

static int
use_in_child(mm_recording *r, mm_recording *ended)
{
    mm_recorded_part *parts = NULL;
    mm_recorded_result result;
    size_t count;
    bool good = !mm_recording_is_running(r) && mm_recording_mark(r, &st) < 0
                && st.kind == MM_FORKED && mm_recording_stop(r, true, &st) == 0
                && mm_recording_attribute(ended, NULL, 0, &result, &st) < 0
                && mm_recording_copy_parts(ended, &parts, &count, &st) == 0 && count == 1;

    (void)report_of(r);
    free(parts);
    mm_recordings_end(usual.owner);
    mm_recording_free(r);
    mm_recording_free(ended);
    return good ? 0 : 1;
}

TEST(a_forked_child_does_nothing_to_its_parents_recording)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *ended = start(), *r;
    mm_recorded_result result;

    stop(ended);
    r = start();
    prefetch(range_of(m), device(0));
    for (int i = 0; i < 10; i++) {
        int status;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            _exit(use_in_child(r, ended));
        }
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        CHECK_EQUAL(status, 0);
    }
    CHECK(mm_recording_is_running(r));
    prefetch(range_of(m), mm_host());
    stop(r);
    result = attribute(r);
    CHECK_EQUAL(total_of(&result, 0).moved[TO_DEVICE][MM_CAUSE_REQUESTED], BLOCK);
    CHECK_EQUAL(total_of(&result, 0).moved[TO_HOST][MM_CAUSE_REQUESTED], BLOCK);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_recording_free(ended);
    mm_memory_release(m);
}

TEST_MAIN(world_open_on_device)
