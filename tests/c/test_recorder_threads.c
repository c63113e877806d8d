/* test_recorder_threads.c: recordings while threads work, mark, stop and read at once. */
#include "recordings.h"

/* ---- threads ---- */

static atomic_bool work_ends;

static void *
work(void *argument)
{
    mm_status own;

    (void)argument;
    while (!atomic_load(&work_ends)) {
        mm_memory *m = world_allocate(16 * PAGE);
        mm_range range;
        mm_batch batch;
        range = range_of(m);
        prefetch(range, device(0));
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

TEST(cycles_while_threads_work)
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
    mm_clock_pair moments[2];
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

TEST(threads_mark_stop_and_read_at_once)
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

TEST(threads_start_at_once)
{
    check_threads(8, start_and_stop, NULL);
    CHECK_EQUAL(atomic_load(&started) + atomic_load(&refused), 8 * 20);
    CHECK(atomic_load(&started) > 0);
    mm_recording_free(start());
}

TEST_MAIN(world_open_on_device)
