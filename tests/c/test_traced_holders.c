/* test_traced_holders.c: the processors that have pages while a recording runs: which memory is
 * covered, recordings that cannot answer, captures, and threads that read while others start, mark,
 * stop and free recordings.
 *
 * Usage: test_traced_holders PATH_OF_THE_EMULATED_DRIVER. Made to run under ThreadSanitizer. */
#include "failing_allocations.h"
#include "trace/recorder.h"
#include "trace/traced_holders.h"
#include "world.h"

enum { PAGE = 4096, PAGES = 64 };
#define HOST ((uint32_t)1 << MM_SET_HOST_BIT)

static const mm_recording_options usual = {
    .limit = 100000, .faults = true, .synchronize = true, .owner = &usual};
static mm_status st;

static mm_recording *
start_with(mm_recording_options options)
{
    mm_recording *r = mm_recording_start(world.cu, &options, true, &st);

    CHECK_OK(r == NULL ? -1 : 0, &st);
    return r;
}

static mm_memory *
allocate(size_t pages)
{
    mm_memory *m = mm_memory_allocate(world.cu, pages * PAGE, &st);

    CHECK(m != NULL);
    return m;
}

static mm_range
pages_of(const mm_memory *m, size_t first, size_t count)
{
    return (mm_range){m->start + first * PAGE, count * PAGE, atomic_load(&m->allocation)};
}

static void
prefetch(mm_range range, int device)
{
    CUmemLocation location =
        device < 0 ? mm_host() : mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device);

    CHECK_OK(mm_range_prefetch(world.cu, range, location, NULL, MM_DEFER_NO, &st), &st);
}

static mm_trace_use
read_range(mm_range range, mm_page_holders *h)
{
    mm_batch batch;

    mm_batch_one(&batch, range, mm_host());
    return mm_traced_holders_read(&batch, h, &st);
}

/* Reads a range, and compares all of its pages with one set. */
static void
check_range(mm_range range, uint32_t set)
{
    mm_page_holders h;

    CHECK_EQUAL(read_range(range, &h), MM_TRACE_READ);
    CHECK(mm_page_holders_of(&h, range) != NULL);
    for (size_t i = 0; i < h.page_count; i++) {
        CHECK_EQUAL(h.page[i], set);
    }
    mm_page_holders_free(&h);
}

static void
check_unusable(mm_range range, const char *reason)
{
    mm_page_holders h;

    CHECK_EQUAL(read_range(range, &h), MM_TRACE_UNUSABLE);
    CHECK(h.span == NULL && h.page == NULL);
    CHECK(strstr(st.detail, reason) != NULL);
}

static void
check_without_trace(mm_range range)
{
    mm_page_holders h;

    CHECK_EQUAL(read_range(range, &h), MM_NO_TRACE);
    CHECK(h.span == NULL && h.page == NULL);
}

/* --- what is covered ------------------------------------------------------------------------- */

static void
moves_of_a_running_recording_show(void)
{
    mm_memory *m = allocate(PAGES);
    mm_recording *r;

    memset((void *)(uintptr_t)m->start, 1, PAGES * PAGE);
    prefetch(pages_of(m, 0, PAGES), 0);
    check_without_trace(pages_of(m, 0, PAGES));
    r = start_with(usual);
    check_range(pages_of(m, 0, PAGES), 0);
    prefetch(pages_of(m, 0, 8), -1);
    prefetch(pages_of(m, 8, 8), 1);
    check_range(pages_of(m, 0, 8), HOST);
    check_range(pages_of(m, 8, 8), 2);
    check_range(pages_of(m, 16, 48), 0);
    CHECK_OK(mm_recording_mark(r, &st), &st);
    check_range(pages_of(m, 8, 8), 2);
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    check_without_trace(pages_of(m, 0, PAGES));
    mm_recording_free(r);
    mm_memory_release(m);
}

static void
memory_at_an_address_again_is_other_memory(void)
{
    mm_recording *r = start_with(usual);
    mm_memory *first = allocate(PAGES), *second;
    mm_page_holders h;

    memset((void *)(uintptr_t)first->start, 1, PAGES * PAGE);
    prefetch(pages_of(first, 0, PAGES), 0);
    check_range(pages_of(first, 0, PAGES), 1);
    /* Wrapped without a life, it stands for memory of other code. */
    second = mm_memory_wrap(first->start, PAGES * PAGE, &st);
    CHECK(second != NULL);
    check_range(pages_of(second, 0, PAGES), 1); /* inside of the first */
    mm_memory_release(first);
    CHECK_EQUAL(read_range(pages_of(second, 0, PAGES), &h), MM_TRACE_READ);
    CHECK(mm_page_holders_of(&h, pages_of(second, 0, PAGES)) == NULL);
    mm_page_holders_free(&h);
    mm_memory_begin_life(second);
    check_range(pages_of(second, 0, PAGES), 0); /* the moves were before its birth */
    mm_memory_release(second);
    mm_recording_free(r);
}

static void
several_ranges_find_their_lives(void)
{
    enum { COUNT = 40 };
    mm_memory *m[COUNT];
    mm_transfer transfers[2 * COUNT];
    mm_batch batch = {.transfers = transfers, .count = 2 * COUNT};
    mm_recording *r = start_with(usual);
    mm_page_holders h;

    for (size_t i = 0; i < COUNT; i++) {
        m[i] = allocate(8);
        memset((void *)(uintptr_t)m[i]->start, 1, 8 * (size_t)PAGE);
        prefetch(pages_of(m[i], 0, 8), (int)(i % 2));
        transfers[2 * (COUNT - 1 - i)] = (mm_transfer){pages_of(m[i], 0, 8), mm_host()};
        transfers[2 * (COUNT - 1 - i) + 1] =
            (mm_transfer){{m[i]->start + 3 * PAGE + 7, PAGE, 0}, mm_host()};
    }
    transfers[5].range.size = 0;
    CHECK_EQUAL(mm_traced_holders_read(&batch, &h, &st), MM_TRACE_READ);
    for (size_t i = 0; i < 2 * COUNT; i++) {
        const uint32_t *found = mm_page_holders_of(&h, transfers[i].range);
        CHECK(found != NULL);
        CHECK_EQUAL(*found, (COUNT - 1 - i / 2) % 2 == 0 ? 1 : 2);
    }
    mm_page_holders_free(&h);
    for (size_t i = 0; i < COUNT; i++) {
        mm_memory_release(m[i]);
    }
    mm_recording_free(r);
}

/* --- recordings that cannot answer ----------------------------------------------------------- */

static void
missing_events_make_it_unusable(void)
{
    static const char *const switches[] = {"drop", "garbage"};
    static const char *const reasons[] = {"events were lost", "records of its source were not"};
    mm_memory *m = allocate(PAGES);

    memset((void *)(uintptr_t)m->start, 1, PAGES * PAGE);
    for (size_t i = 0; i < 2; i++) {
        mm_recording *r = start_with(usual);
        CHECK_EQUAL(world.disturb_queue(switches[i], 1), 0);
        prefetch(pages_of(m, 0, PAGES), (int)i);
        CHECK_EQUAL(world.disturb_queue(switches[i], 0), 0);
        check_unusable(pages_of(m, 0, PAGES), reasons[i]);
        mm_recording_free(r);
        check_without_trace(pages_of(m, 0, PAGES));
    }
    mm_memory_release(m);
}

static void
a_full_recording_is_unusable(void)
{
    mm_recording_options few = usual;
    mm_memory *m = allocate(PAGES);
    mm_recording *r;

    few.limit = 10;
    r = start_with(few);
    for (int i = 0; i < 4; i++) {
        prefetch(pages_of(m, 0, 1), i % 2); /* a call each */
    }
    check_range(pages_of(m, 1, 1), 0);
    memset((void *)(uintptr_t)m->start, 1, PAGES * PAGE);
    for (int i = 0; i < 12; i++) {
        prefetch(pages_of(m, 0, 1), i % 2);
    }
    check_unusable(pages_of(m, 0, PAGES), "more events than its limit of 10");
    mm_recording_free(r);
    mm_memory_release(m);
}

static void
failing_allocations_make_it_unusable(void)
{
    mm_memory *m = allocate(PAGES);
    mm_recording *r = start_with(usual);
    bool failed = true;
    long nth = 0;

    check_range(pages_of(m, 0, 8), 0);
    while (failed) {
        long before = live_bytes();
        mm_page_holders h;
        mm_trace_use use;
        fail_allocation(++nth);
        use = read_range(pages_of(m, 0, PAGES), &h);
        failed = allocation_has_failed();
        CHECK_EQUAL(use, failed ? MM_TRACE_UNUSABLE : MM_TRACE_READ);
        mm_page_holders_free(&h);
        CHECK_EQUAL(live_bytes(), before);
    }
    CHECK(nth > 7);
    mm_recording_free(r);
    mm_memory_release(m);
}

static void
captures_survive(void)
{
    mm_memory *m = allocate(PAGES);
    mm_recording *r = start_with(usual);
    CUgraph graph;
    CUstream stream;

    CHECK_EQUAL(world.cu->StreamCreate(&stream, CU_STREAM_NON_BLOCKING), 0);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), 0);
    check_range(pages_of(m, 0, PAGES), 0);
    CHECK_EQUAL(world.end_capture(stream, &graph), 0);
    CHECK_EQUAL(world.destroy_graph(graph), 0);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), 0);
    mm_recording_free(r);
    mm_memory_release(m);
}

/* --- threads --------------------------------------------------------------------------------- */

static atomic_bool reading_ends;
static atomic_uint answers[3], mine;

/* Moves memory of its own, and reads it, with whatever recording runs. */
static void *
move_and_read(void *argument)
{
    int device = (int)(atomic_fetch_add(&mine, 1) % 2);
    mm_status own;

    (void)argument;
    while (!atomic_load(&reading_ends)) {
        mm_memory *m = mm_memory_allocate(world.cu, 16 * PAGE, &own);
        mm_page_holders h;
        mm_trace_use use;
        mm_batch batch;
        CHECK(m != NULL);
        memset((void *)(uintptr_t)m->start, 1, 16 * PAGE);
        mm_batch_one(&batch, pages_of(m, 0, 16), mm_host());
        CHECK_OK(mm_range_prefetch(world.cu, pages_of(m, 0, 16),
                                   mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device), NULL,
                                   MM_DEFER_NO, &own),
                 &own);
        use = mm_traced_holders_read(&batch, &h, &own);
        atomic_fetch_add(&answers[use], 1);
        for (size_t i = 0; i < h.page_count; i++) {
            CHECK(h.page[i] == 0 || h.page[i] == (uint32_t)1 << device);
        }
        mm_page_holders_free(&h);
        mm_memory_release(m);
    }
    return NULL;
}

/* Starts and ends recordings until one of them has answered. A loaded machine may let no reader run
   during the first forty; one that never answers fails the test after four thousand. */
static void *
cycle_recordings(void *argument)
{
    mm_status own;

    (void)argument;
    for (int i = 0; i < 40 || (i < 4000 && atomic_load(&answers[MM_TRACE_READ]) == 0); i++) {
        mm_recording *r = mm_recording_start(world.cu, &usual, true, &own);
        CHECK(r != NULL);
        for (int marks = 0; marks < i % 4; marks++) {
            CHECK_OK(mm_recording_mark(r, &own), &own);
        }
        if (i % 3 == 0) {
            CHECK_OK(mm_recording_stop(r, true, &own), &own);
        }
        mm_recording_free(r);
    }
    atomic_store(&reading_ends, true);
    return NULL;
}

static atomic_uint roles;

static void *
read_or_cycle(void *argument)
{
    return atomic_fetch_add(&roles, 1) == 0 ? cycle_recordings(argument) : move_and_read(argument);
}

static void
threads_read_while_recordings_come_and_go(void)
{
    check_threads(4, read_or_cycle, NULL);
    CHECK(atomic_load(&answers[MM_TRACE_READ]) > 0);
    CHECK_EQUAL(atomic_load(&answers[MM_TRACE_UNUSABLE]), 0);
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(moves_of_a_running_recording_show),
        CHECK_TEST(memory_at_an_address_again_is_other_memory),
        CHECK_TEST(several_ranges_find_their_lives),
        CHECK_TEST(missing_events_make_it_unusable),
        CHECK_TEST(a_full_recording_is_unusable),
        CHECK_TEST(failing_allocations_make_it_unusable),
        CHECK_TEST(captures_survive),
        CHECK_TEST(threads_read_while_recordings_come_and_go),
    };

    CHECK_EQUAL(argc, 2);
    world_open(argv[1]);
    world.schedule(0);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
