/* test_recorder.c: recordings: their sums against arithmetic, parts, the limit, one at a time, and
 * captures.
 *
 * Usage: test_recorder PATH_OF_THE_EMULATED_DRIVER. */
#include "recordings.h"

/* ---- one thread ---- */

static void
parts_add_up_to_the_bytes(void)
{
    mm_memory *m = allocate(BLOCK);
    mm_recording *r = start();
    mm_recorded_result result;
    volatile unsigned char *bytes = (unsigned char *)(uintptr_t)m->start;
    mm_sums sums;

    prefetch(range_of(m), device(0));
    mark(r);
    CHECK_EQUAL(bytes[0] + bytes[4 * PAGE], 2); /* two faults */
    mark(r);
    prefetch(range_of(m), device(1));
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
    prefetch(range_of(m), device(0));
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
        prefetch(range_of(m), device(0));
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

    prefetch(range_of(m), device(0));
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
    prefetch((mm_range){foreign, BLOCK, foreign}, device(0));
    prefetch(range_of(dies), device(0));
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
    stream = mm_stream_share(world.cu, handle, &st);
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
    };

    CHECK_EQUAL(argc, 2);
    world_open(argv[1]);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
