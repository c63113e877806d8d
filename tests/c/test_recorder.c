/* test_recorder.c: recordings: their sums against arithmetic, parts, the limit, one at a time,
 * failures, disturbed queues, captures, forks, and threads that work, mark and stop at once.
 *
 * Usage: test_recorder PATH_OF_THE_EMULATED_DRIVER. Made to run under ThreadSanitizer. */
#include <sys/wait.h>
#include <unistd.h>

#include "failing_allocations.h"
#include "memory/recorded_calls.h"
#include "trace/recorder.h"
#include "world.h"

enum { PAGE = 4096, BLOCK = 2 << 20, UNKNOWN = 999 };
enum { TO_DEVICE, TO_HOST, BETWEEN };

static const mm_recording_options usual = {
    .limit = 100000, .faults = true, .synchronize = true, .owner = &usual};
static CUmemLocation device0, device1;
static mm_status st;

/* ---- help ---- */

static mm_recording *
start_with(mm_recording_options options)
{
    mm_recording *r = mm_recording_start(world.cu, &options, true, &st);

    CHECK_OK(r == NULL ? -1 : 0, &st);
    CHECK(mm_recording_is_running(r) && mm_is_recording());
    return r;
}

static mm_recording *
start(void)
{
    return start_with(usual);
}

static void
mark(mm_recording *r)
{
    CHECK_OK(mm_recording_mark(r, &st), &st);
}

static void
stop(mm_recording *r)
{
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    CHECK(!mm_recording_is_running(r) && !mm_is_recording());
}

static mm_recorded_result
attribute(mm_recording *r)
{
    mm_recorded_result result;

    CHECK_OK(mm_recording_attribute(r, NULL, 0, &result, &st), &st);
    return result;
}

/* The total of a part; zeros without a row. */
static mm_sums
total_of(const mm_recorded_result *result, uint32_t part)
{
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(result->sums, &rows);

    for (size_t i = 0; i < count; i++) {
        if (rows[i].part == part && rows[i].memory == MM_NO_MEMORY_INDEX) {
            return rows[i].sums;
        }
    }
    return (mm_sums){0};
}

static size_t
count_kind(const mm_recorded_result *result, mm_event_kind kind)
{
    size_t count = 0;

    for (size_t i = 0; i < result->pieces.count; i++) {
        count += result->pieces.items[i].kind == kind;
    }
    return count;
}

static mm_recording_report
report_of(mm_recording *r)
{
    mm_recording_report report;

    mm_recording_read_report(r, &report);
    return report;
}

static mm_memory *
allocate(size_t size)
{
    mm_memory *m = mm_memory_allocate(world.cu, size, &st);

    CHECK(m != NULL);
    memset((void *)(uintptr_t)m->start, 1, size);
    return m;
}

static mm_range
range_of(const mm_memory *m)
{
    return (mm_range){m->start, m->size, m->allocation};
}

static void
prefetch(mm_range range, CUmemLocation where)
{
    mm_status own;

    CHECK_OK(mm_range_prefetch(world.cu, range, where, NULL, MM_DEFER_NO, &own), &own);
}

/* ---- one thread ---- */

static void
parts_add_up_to_the_bytes(void)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *r = start();
    mm_recorded_result result;
    volatile unsigned char *bytes = (unsigned char *)(uintptr_t)m->start;
    mm_sums sums;

    prefetch(range_of(m), device0);
    mark(r);
    CHECK_EQUAL(bytes[0] + bytes[4 * PAGE], 2); /* two faults */
    mark(r);
    prefetch(range_of(m), device1);
    stop(r);
    result = attribute(r);
    CHECK_EQUAL(result.part_count, 3);
    sums = total_of(&result, 0);
    CHECK_EQUAL(sums.moved[TO_DEVICE][MM_CAUSE_REQUESTED], BLOCK);
    CHECK_EQUAL(sums.moved[TO_HOST][MM_CAUSE_FAULT], 0);
    sums = total_of(&result, 1);
    CHECK_EQUAL(sums.moved[TO_DEVICE][MM_CAUSE_REQUESTED], 0);
    CHECK_EQUAL(sums.host_faults, sums.moved[TO_HOST][MM_CAUSE_FAULT] / PAGE);
    CHECK(sums.host_faults >= 2);
    sums = total_of(&result, 2);
    CHECK_EQUAL(sums.moved[TO_DEVICE][MM_CAUSE_REQUESTED]
                    + sums.moved[BETWEEN][MM_CAUSE_REQUESTED],
                BLOCK);
    CHECK_EQUAL(count_kind(&result, MM_CALL), 2);
    CHECK(result.parts[0].end == result.parts[1].start
          && result.parts[1].end <= result.parts[2].end);
    CHECK_EQUAL(result.parts[0].pieces + result.parts[1].pieces + result.parts[2].pieces,
                result.pieces.count);
    CHECK_EQUAL(report_of(r).lost + report_of(r).rejected, 0);
    CHECK(report_of(r).waited && !report_of(r).truncated && report_of(r).overhead > 0);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_memory_release(m);
}

static void
faults_can_be_left_out(void)
{
    mm_recording_options options = usual;
    mm_memory *m = allocate(BLOCK);
    mm_recorded_result result;
    mm_recording *r;

    options.faults = false;
    r = start_with(options);
    prefetch(range_of(m), device0);
    mark(r);
    CHECK_EQUAL(*(volatile unsigned char *)(uintptr_t)m->start, 1);
    stop(r);
    result = attribute(r);
    CHECK_EQUAL(total_of(&result, 0).moved[TO_DEVICE][MM_CAUSE_REQUESTED], BLOCK);
    CHECK(total_of(&result, 1).moved[TO_HOST][MM_CAUSE_FAULT] >= PAGE);
    CHECK_EQUAL(total_of(&result, 1).host_faults, 0);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_memory_release(m);
}

/* 64 MiB there and back are 64 moves in blocks of 2 MiB, whose calls come on top. */
static void
sums_are_exact_beyond_the_limit(void)
{
    enum { BLOCKS = 32, ROUNDS = 40 };
    mm_recording_options options = usual;
    mm_memory *m = allocate((size_t)BLOCKS * BLOCK);
    mm_recorded_result result;
    mm_recording *r;

    options.limit = MM_LEAST_LIMIT;
    r = start_with(options);
    for (int i = 0; i < ROUNDS; i++) {
        prefetch(range_of(m), device0);
        prefetch(range_of(m), mm_host());
        if (i == ROUNDS / 2 - 1) {
            mark(r);
        }
    }
    stop(r);
    result = attribute(r);
    CHECK(report_of(r).truncated);
    CHECK_EQUAL(report_of(r).lost, 0);
    CHECK_EQUAL(result.pieces.count, MM_LEAST_LIMIT);
    for (uint32_t part = 0; part < 2; part++) {
        mm_sums sums = total_of(&result, part);
        CHECK_EQUAL(sums.moved[TO_DEVICE][MM_CAUSE_REQUESTED],
                    (long long)ROUNDS / 2 * BLOCKS * BLOCK);
        CHECK_EQUAL(sums.moved[TO_HOST][MM_CAUSE_REQUESTED],
                    (long long)ROUNDS / 2 * BLOCKS * BLOCK);
    }
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_memory_release(m);
}

/* Each page gives two records, so that a part fills the space for spilled events once, and the
 * queue not at all. */
static void
many_faults_beyond_the_limit(void)
{
    enum { PARTS = 3, PAGES = 20000 };
    mm_recording_options options = usual;
    mm_memory *m = allocate((size_t)PARTS * PAGES * PAGE);
    volatile unsigned char *bytes = (unsigned char *)(uintptr_t)m->start;
    mm_recorded_result result;
    mm_recording *r;

    prefetch(range_of(m), device0);
    options.limit = MM_LEAST_LIMIT;
    r = start_with(options);
    for (size_t i = 0; i < (size_t)PARTS * PAGES; i++) {
        CHECK_EQUAL(bytes[i * PAGE], 1);
        if (i % PAGES == PAGES - 1) {
            mark(r);
        }
    }
    stop(r);
    CHECK(report_of(r).truncated);
    CHECK_EQUAL(report_of(r).lost, 0);
    result = attribute(r);
    CHECK_EQUAL(result.part_count, PARTS + 1);
    for (uint32_t part = 0; part < PARTS; part++) {
        CHECK_EQUAL(total_of(&result, part).host_faults, PAGES);
        CHECK_EQUAL(total_of(&result, part).moved[TO_HOST][MM_CAUSE_FAULT], PAGES * PAGE);
    }
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    mm_memory_release(m);
}

static void
there_is_one_at_a_time(void)
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

/* Memory that was not allocated here is asked for; freed memory keeps its place. */
static void
memories_have_their_kinds(void)
{
    CUdeviceptr foreign = 0;
    mm_memory *dies = allocate(BLOCK);
    mm_named_range named = {dies->start, PAGE, "first"};
    const mm_traced_memory *memories;
    mm_recorded_result result;
    size_t count, found[4] = {0};
    mm_recording *r = start();

    CHECK_EQUAL(world.cu->MemAllocManaged(&foreign, BLOCK, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
    memset((void *)(uintptr_t)foreign, 1, BLOCK);
    prefetch((mm_range){foreign, BLOCK, foreign}, device0);
    prefetch(range_of(dies), device0);
    mark(r); /* the queue is asked before the memory is gone */
    mm_memory_release(dies);
    stop(r);
    CHECK_OK(mm_recording_attribute(r, &named, 1, &result, &st), &st);
    count = mm_attribution_memories(result.sums, &memories);
    for (size_t i = 0; i < count; i++) {
        found[memories[i].kind]++;
        if (memories[i].kind == MM_MEMORY_FOREIGN) {
            CHECK_EQUAL(memories[i].start, foreign);
            CHECK_EQUAL(memories[i].size, BLOCK);
        }
    }
    CHECK(found[MM_MEMORY_BUFFER] >= 1 && found[MM_MEMORY_NAMED] == 1);
    CHECK_EQUAL(found[MM_MEMORY_FOREIGN], 1);
    CHECK_EQUAL(found[MM_MEMORY_UNKNOWN], 0);
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    CHECK_EQUAL(world.cu->MemFree(foreign), CUDA_SUCCESS);
}

/* ---- captures ---- */

static void
captures_are_not_destroyed(void)
{
    CUgraph graph;
    CUstream handle = NULL;
    mm_stream *stream;
    mm_recording *r;
    mm_recorded_result result;

    CHECK_OK(mm_stream_create(world.cu, &handle, &st), &st);
    stream = mm_stream_share(handle);
    for (int mode = CU_STREAM_CAPTURE_MODE_GLOBAL; mode <= CU_STREAM_CAPTURE_MODE_RELAXED;
         mode++) {
        CHECK_EQUAL(world.begin_capture(handle, (CUstreamCaptureMode)mode), CUDA_SUCCESS);
        r = start();
        CHECK(mm_recording_mark(r, &st) < 0);
        CHECK_EQUAL(st.kind, MM_REFUSED);
        stop(r);
        CHECK(!report_of(r).waited);
        result = attribute(r);
        CHECK_EQUAL(result.part_count, 1);
        CHECK_EQUAL(world.end_capture(handle, &graph), CUDA_SUCCESS);
        CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
        mm_recorded_result_free(&result);
        mm_recording_free(r);
    }
    CHECK_OK(mm_stream_release(stream, &st), &st);
}

static void
without_waiting_nothing_is_refused(void)
{
    mm_recording_options options = usual;
    CUgraph graph;
    CUstream handle = NULL;
    mm_recording *r;
    size_t waits;

    options.synchronize = false;
    CHECK_OK(mm_stream_create(world.cu, &handle, &st), &st);
    CHECK_EQUAL(world.begin_capture(handle, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    waits = world_calls("cuCtxSynchronize");
    r = start_with(options);
    mark(r);
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    CHECK_EQUAL(world_calls("cuCtxSynchronize"), waits);
    CHECK(report_of(r).waited);
    mm_recording_free(r);
    CHECK_EQUAL(world.end_capture(handle, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamDestroy(handle), CUDA_SUCCESS);
}

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
    MM_IGNORE(mm_range_prefetch(world.cu, range_of(m), device0, NULL, MM_DEFER_NO, &st));
    MM_IGNORE(mm_range_prefetch(world.cu, foreign, device1, NULL, MM_DEFER_NO, &st));
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

static void
failing_calls_leave_nothing_behind(void)
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

    options.limit = MM_LEAST_LIMIT;
    r = mm_recording_start(world.cu, &options, true, &st);
    if (r == NULL) {
        CHECK_EQUAL(st.kind, MM_NO_MEMORY);
        return allocation_has_failed();
    }
    for (int i = 0; i < 20; i++) {
        prefetch(range_of(m), device0);
        prefetch(range_of(m), mm_host());
        if (i == 10) {
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
        CHECK(lost > 0 ? moved < 20 * m->size : moved == 20 * m->size);
    }
    mm_recorded_result_free(&result);
    mm_recording_free(r);
    return failures > 0 || lost > 0;
}

static void
failing_allocations_leave_nothing_behind(void)
{
    mm_memory *m = allocate((size_t)32 * BLOCK);
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
static void
a_failed_stop_keeps_the_results(void)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *r = start();
    mm_recorded_result result;

    prefetch(range_of(m), device0);
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

static void
disturbed_queues_are_counted(void)
{
    mm_memory *m = allocate(BLOCK);
    volatile unsigned char *bytes = (unsigned char *)(uintptr_t)m->start;
    static const char *const switches[] = {"drop", "garbage", "late"};
    mm_recording *r;

    for (size_t i = 0; i < 3; i++) {
        mm_recorded_result result;
        mm_sums sums;
        prefetch(range_of(m), device0);
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

static void
refused_queues_fail_the_start(void)
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

/* ---- forks ---- */

static int
use_in_child(mm_recording *r, mm_recording *ended)
{
    mm_recorded_part *parts;
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

static void
a_forked_child_does_nothing_to_its_parents_recording(void)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *ended = start(), *r;
    mm_recorded_result result;

    stop(ended);
    r = start();
    prefetch(range_of(m), device0);
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

/* ---- threads ---- */

static atomic_bool work_ends;

static void *
work(void *argument)
{
    mm_status own;

    (void)argument;
    while (!atomic_load(&work_ends)) {
        mm_memory *m = mm_memory_allocate(world.cu, 16 * PAGE, &own);
        mm_range range;
        mm_batch batch;
        CHECK(m != NULL);
        range = range_of(m);
        prefetch(range, device0);
        CHECK_OK(mm_range_advise(world.cu, range, CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host(), &own),
                 &own);
        mm_batch_one(&batch, range, mm_host());
        CHECK_OK(world_run(world.cu, MM_DISCARD, &batch, NULL, MM_DISPATCH_AUTO, &own), &own);
        mm_memory_release(m);
    }
    return NULL;
}

static void
check_sums_of_memories(const mm_recorded_result *result)
{
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(result->sums, &rows);
    uint64_t total = 0, all = 0;

    for (size_t i = 0; i < count; i++) {
        uint64_t moved = rows[i].sums.moved[TO_DEVICE][MM_CAUSE_REQUESTED];
        *(rows[i].memory == MM_NO_MEMORY_INDEX ? &total : &all) += moved;
    }
    CHECK_EQUAL(all, total);
}

static void
cycles_while_threads_work(void)
{
    enum { WORKERS = 6, CYCLES = 12 };
    pthread_t workers[WORKERS];
    mm_recording_options options = usual;

    atomic_store(&work_ends, false);
    for (int i = 0; i < WORKERS; i++) {
        CHECK_EQUAL(pthread_create(&workers[i], NULL, work, NULL), 0);
    }
    for (int i = 0; i < CYCLES; i++) {
        mm_recorded_result result;
        mm_recording *r;
        options.limit = i % 2 == 0 ? MM_LEAST_LIMIT : 100000;
        r = start_with(options);
        mark(r);
        result = attribute(r);
        check_sums_of_memories(&result);
        mm_recorded_result_free(&result);
        mark(r);
        if (i % 4 < 3) {
            stop(r);
            result = attribute(r);
            CHECK_EQUAL(result.part_count, 3);
            check_sums_of_memories(&result);
            mm_recorded_result_free(&result);
        }
        mm_recording_free(r);
    }
    atomic_store(&work_ends, true);
    for (int i = 0; i < WORKERS; i++) {
        CHECK_EQUAL(pthread_join(workers[i], NULL), 0);
    }
}

static void *
use_recording(void *argument)
{
    static atomic_uint turn;
    unsigned mine = atomic_fetch_add(&turn, 1);
    mm_recording *r = argument;
    mm_recorded_result result;
    mm_moment moments[2];
    mm_status own;

    for (int i = 0; i < 6; i++) {
        int rc = mm_recording_mark(r, &own);
        CHECK(rc == 0 || own.kind == MM_REFUSED);
        CHECK_OK(mm_recording_attribute(r, NULL, 0, &result, &own), &own);
        check_sums_of_memories(&result);
        mm_recorded_result_free(&result);
        (void)report_of(r);
        mm_recording_read_clock(r, moments);
        CHECK(moments[0].raw <= moments[1].raw);
        if (i == 3 && mine % 3 == 0) {
            CHECK_OK(mm_recording_stop(r, true, &own), &own);
        }
    }
    return NULL;
}

static void
threads_mark_stop_and_read_at_once(void)
{
    for (int i = 0; i < 5; i++) {
        mm_recording *r = start();
        check_threads(6, use_recording, r);
        CHECK(!mm_recording_is_running(r));
        mm_recording_free(r);
    }
}

static atomic_uint started, refused;

static void *
start_and_stop(void *argument)
{
    mm_status own;

    (void)argument;
    for (int i = 0; i < 20; i++) {
        mm_recording *r = mm_recording_start(world.cu, &usual, true, &own);
        if (r == NULL) {
            CHECK_EQUAL(own.kind, MM_TRACE_BUSY);
            atomic_fetch_add(&refused, 1);
            continue;
        }
        atomic_fetch_add(&started, 1);
        CHECK_OK(mm_recording_stop(r, true, &own), &own);
        mm_recording_free(r);
    }
    return NULL;
}

static void
threads_start_at_once(void)
{
    check_threads(8, start_and_stop, NULL);
    CHECK_EQUAL(atomic_load(&started) + atomic_load(&refused), 8 * 20);
    CHECK(atomic_load(&started) > 0);
    mm_recording_free(start());
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(parts_add_up_to_the_bytes),
        CHECK_TEST(faults_can_be_left_out),
        CHECK_TEST(sums_are_exact_beyond_the_limit),
        CHECK_TEST(many_faults_beyond_the_limit),
        CHECK_TEST(there_is_one_at_a_time),
        CHECK_TEST(memories_have_their_kinds),
        CHECK_TEST(captures_are_not_destroyed),
        CHECK_TEST(without_waiting_nothing_is_refused),
        CHECK_TEST(failing_calls_leave_nothing_behind),
        CHECK_TEST(failing_allocations_leave_nothing_behind),
        CHECK_TEST(a_failed_stop_keeps_the_results),
        CHECK_TEST(disturbed_queues_are_counted),
        CHECK_TEST(refused_queues_fail_the_start),
        CHECK_TEST(a_forked_child_does_nothing_to_its_parents_recording),
        CHECK_TEST(cycles_while_threads_work),
        CHECK_TEST(threads_mark_stop_and_read_at_once),
        CHECK_TEST(threads_start_at_once),
    };

    CHECK_EQUAL(argc, 2);
    world_open(argv[1]);
    device0 = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    device1 = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
