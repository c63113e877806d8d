/* test_batch.c: merging, rounding to pages, the order of moves, and advice that is taken back.
 *
 * Usage: test_batch PATH_OF_THE_EMULATED_DRIVER, which must have at least two devices. */
#include "world.h"

/* Ranges for merging are never given to a driver: any addresses will do. */
static mm_transfer
move(CUdeviceptr start, size_t size, CUdeviceptr allocation, CUmemLocation location)
{
    return (mm_transfer){.range = {.start = start, .size = size, .allocation = allocation},
                         .location = location};
}

static CUmemLocation
device(int ordinal)
{
    return mm_location(CU_MEM_LOCATION_TYPE_DEVICE, ordinal);
}

static void
fill(mm_batch *b, const mm_transfer *transfers, size_t count)
{
    mm_status st;

    CHECK_OK(mm_batch_init(b, count, &st), &st);
    memcpy(b->transfers, transfers, count * sizeof *transfers);
}

static void
check_move(const mm_transfer *m, CUdeviceptr start, size_t size, CUmemLocation location)
{
    CHECK_EQUAL(m->range.start, start);
    CHECK_EQUAL(m->range.size, size);
    CHECK(mm_same_location(m->location, location));
}

static void
neighbours_merge_in_any_order(void)
{
    const mm_transfer transfers[] = {move(200, 100, 1, mm_host()), move(0, 100, 1, mm_host()),
                                     move(100, 100, 1, mm_host())};
    mm_batch b;

    fill(&b, transfers, 3);
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 1);
    check_move(&b.transfers[0], 0, 300, mm_host());
    mm_batch_free(&b);
}

/* Cases: all are empty, one is not, and empty ones on both sides of it. */
static void
ranges_without_a_byte_are_dropped(void)
{
    size_t page = mm_page_size();
    const mm_transfer nothing = move(0, 0, 0, device(1)), real = move(page, page, 1, mm_host());
    const mm_transfer inside = move(page + 10, 0, 1, device(0));
    const mm_transfer cases[][3] = {{nothing, inside, nothing},
                                    {nothing, real, inside},
                                    {real, inside, nothing},
                                    {inside, nothing, real}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t count = 1; count <= 3; count++) {
            mm_batch b, edges;
            size_t left = 0;
            mm_status st;
            for (size_t n = 0; n < count; n++) {
                left += cases[i][n].range.size > 0;
            }
            fill(&b, cases[i], count);
            mm_batch_merge(&b);
            CHECK_EQUAL(b.count, left);
            CHECK(!b.ordered);
            mm_batch_free(&b);
            fill(&b, cases[i], count);
            CHECK_OK(mm_batch_prepare(&b, MM_DISCARD_PREFETCH, &edges, &st), &st);
            CHECK_EQUAL(b.count, left);
            CHECK_EQUAL(edges.count, 0);
            CHECK(!b.edges_interleaved);
            mm_batch_free(&edges);
            mm_batch_free(&b);
        }
    }
}

static void
gaps_inside_a_page_are_bridged(void)
{
    size_t page = mm_page_size();
    const mm_transfer transfers[] = {move(0, 100, 1, mm_host()), move(160, 10, 1, mm_host()),
                                     move(page, 100, 1, mm_host())};
    mm_batch b;

    fill(&b, transfers, 3);
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 1);
    check_move(&b.transfers[0], 0, page + 100, mm_host());
    mm_batch_free(&b);
}

static void
gaps_and_allocations_stay_apart(void)
{
    size_t page = mm_page_size();
    const mm_transfer gap[] = {move(0, 100, 1, mm_host()), move(page + 1, 100, 1, mm_host())};
    const mm_transfer foreign[] = {move(0, 100, 1, mm_host()), move(100, 100, 100, mm_host())};
    const mm_transfer unknown[] = {move(0, 100, 0, mm_host()), move(100, 100, 0, mm_host())};
    const mm_transfer *const cases[] = {gap, foreign, unknown};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mm_batch b;

        fill(&b, cases[i], 2);
        mm_batch_merge(&b);
        CHECK_EQUAL(b.count, 2);
        check_move(&b.transfers[1], cases[i][1].range.start, 100, mm_host());
        mm_batch_free(&b);
    }
}

static void
different_locations_stay_apart(void)
{
    const mm_transfer transfers[] = {move(0, 100, 1, device(0)), move(100, 100, 1, device(1)),
                                     move(200, 100, 1, device(1))};
    mm_batch b;

    fill(&b, transfers, 3);
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 2);
    check_move(&b.transfers[0], 0, 100, device(0));
    check_move(&b.transfers[1], 100, 200, device(1));
    mm_batch_free(&b);
}

static void
overlaps_and_contained_ranges_merge(void)
{
    const mm_transfer transfers[] = {move(0, 300, 1, mm_host()), move(50, 100, 1, mm_host()),
                                     move(250, 100, 1, mm_host()), move(0, 300, 1, mm_host())};
    mm_batch b;

    fill(&b, transfers, 4);
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 1);
    check_move(&b.transfers[0], 0, 350, mm_host());
    mm_batch_free(&b);
}

static void
conflicting_moves_keep_their_order(void)
{
    const mm_transfer transfers[] = {move(100, 100, 1, device(0)), move(0, 300, 1, mm_host()),
                                     move(100, 100, 1, device(1))};
    mm_batch b;

    fill(&b, transfers, 3);
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 3);
    for (size_t i = 0; i < 3; i++) {
        check_move(&b.transfers[i], transfers[i].range.start, transfers[i].range.size,
                   transfers[i].location);
    }
    mm_batch_free(&b);
}

/* True if two ranges share a page. */
static bool
share_a_page(const mm_range *x, const mm_range *y)
{
    CUdeviceptr page = mm_page_size();

    return x->start / page <= (y->start + y->size - 1) / page
           && y->start / page <= (x->start + x->size - 1) / page;
}

/* Against the plain definition, over many small random sets: order matters where ranges of
 * different locations share a page, and nowhere else. */
static void
only_true_conflicts_keep_the_order(void)
{
    size_t quarter = mm_page_size() / 4;
    unsigned seed = 1;

    for (int round = 0; round < 5000; round++) {
        mm_transfer transfers[6];
        size_t count = 2 + (size_t)round % 5;
        bool conflict = false;
        mm_batch b;

        for (size_t i = 0; i < count; i++) {
            seed = seed * 1103515245 + 12345;
            transfers[i] = move((seed >> 16 & 31) * quarter, (1 + (seed >> 24 & 7)) * quarter, 1,
                                device(seed >> 28 & 1));
            for (size_t j = 0; j < i; j++) {
                conflict |= share_a_page(&transfers[i].range, &transfers[j].range)
                            && !mm_same_location(transfers[i].location, transfers[j].location);
            }
        }
        fill(&b, transfers, count);
        mm_batch_merge(&b);
        CHECK_EQUAL(b.ordered, conflict);
        mm_batch_free(&b);
    }
}

static void
many_moves_leave_the_small_array(void)
{
    enum { MANY = 100 };
    size_t page = mm_page_size();
    mm_status st;
    mm_batch b;

    CHECK_OK(mm_batch_init(&b, MANY, &st), &st);
    CHECK(b.transfers != b.inline_);
    for (size_t i = 0; i < MANY; i++) {
        /* Backwards, with a gap after every tenth. */
        size_t at = MANY - 1 - i;
        b.transfers[i] = move((at + at / 10) * page, page, 1, mm_host());
    }
    mm_batch_merge(&b);
    CHECK_EQUAL(b.count, 10);
    check_move(&b.transfers[9], (90 + 9) * page, 10 * page, mm_host());
    mm_batch_free(&b);
}

static void
whole_pages_round_inwards(void)
{
    size_t page = mm_page_size();
    mm_range range = {.start = 10 * page + 1, .size = 3 * page};
    mm_status st;

    CHECK_OK(mm_range_whole_pages(&range, &st), &st);
    CHECK_EQUAL(range.start, 11 * page);
    CHECK_EQUAL(range.size, 2 * page);
    range = (mm_range){.start = 10 * page, .size = page};
    CHECK_OK(mm_range_whole_pages(&range, &st), &st);
    CHECK_EQUAL(range.start, 10 * page);
    CHECK_EQUAL(range.size, page);
}

static void
less_than_a_page_is_refused(void)
{
    size_t page = mm_page_size();
    const mm_range small[] = {
        {.start = 10 * page, .size = page - 1},         {.start = 10 * page + 1, .size = page},
        {.start = 10 * page + 1, .size = 2 * page - 2}, {.start = 10 * page - 1, .size = 2},
        {.start = UINT64_MAX - 99, .size = 50},
    };

    for (size_t i = 0; i < sizeof small / sizeof *small; i++) {
        mm_range range = small[i];
        mm_status st;

        CHECK_EQUAL(mm_range_whole_pages(&range, &st), -1);
        CHECK_EQUAL(st.kind, MM_BAD_VALUE);
        CHECK_EQUAL(range.start, small[i].start);
        CHECK_EQUAL(range.size, small[i].size);
    }
}

static void
sets_and_locations_convert(void)
{
    CHECK_EQUAL(mm_location_bit(device(5)), 1 << 5);
    CHECK(mm_location_bit(mm_host()) == (mm_location_set)1 << MM_HOST_BIT);
    CHECK_EQUAL(mm_location_bit(device(-1)), 0);
    CHECK_EQUAL(mm_location_bit(device(MM_HOST_BIT)), 0);
    CHECK_EQUAL(mm_location_bit(mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0)), 0);
    CHECK(mm_same_location(mm_location_from_bit(MM_HOST_BIT), mm_host()));
    CHECK(mm_same_location(mm_location_from_bit(3), device(3)));
    CHECK(!mm_same_location(device(0), mm_host()));
    CHECK_EQUAL(mm_advice_from_name("set_accessed_by"), CU_MEM_ADVISE_SET_ACCESSED_BY);
    CHECK_EQUAL(mm_advice_from_name("set_accessed_b"), 0);
}

static mm_memory *
allocate_pages(size_t pages)
{
    mm_status st;
    mm_memory *m = mm_memory_allocate(world.cu, pages * mm_page_size(), &st);

    CHECK(m != NULL);
    return m;
}

static mm_range
part_of(const mm_memory *m, size_t first, size_t pages)
{
    size_t page = mm_page_size();

    return (mm_range){
        .start = m->start + first * page, .size = pages * page, .allocation = m->start};
}

static CUmemLocation
last_prefetch(mm_range range)
{
    CUmemLocation location;
    mm_status st;

    CHECK_OK(mm_range_last_prefetch(world.cu, range, &location, &st), &st);
    return location;
}

/* Where moves overlap the last one wins, whichever way the driver is called: the moves that gain
 * from a batch call must not overtake the others. */
static void
last_of_overlapping_moves_wins(void)
{
    enum { PAGES = 64 };
    const mm_dispatch routes[] = {MM_DISPATCH_AUTO, MM_DISPATCH_LOOP};
    mm_memory *m = allocate_pages(4 * PAGES);

    for (size_t i = 0; i < 2; i++) {
        const mm_transfer transfers[] = {
            {.range = part_of(m, 0, PAGES), .location = device(0)},
            {.range = part_of(m, 2 * PAGES, PAGES), .location = device(0)},
            {.range = part_of(m, 0, PAGES), .location = mm_host()},
        };
        const mm_transfer reversed[] = {transfers[2], transfers[1], transfers[0]};
        mm_status st;
        mm_batch b;

        fill(&b, transfers, 3);
        CHECK_OK(world_run(world.cu, MM_PREFETCH, &b, NULL, routes[i], &st), &st);
        mm_batch_free(&b);
        CHECK(mm_same_location(last_prefetch(transfers[0].range), mm_host()));
        /* Not resident on the device any more, so that this too may choose the batch call. */
        fill(&b, transfers + 2, 1);
        b.transfers[0].range = part_of(m, 0, 4 * PAGES);
        CHECK_OK(world_run(world.cu, MM_PREFETCH, &b, NULL, routes[i], &st), &st);
        mm_batch_free(&b);
        fill(&b, reversed, 3);
        CHECK_OK(world_run(world.cu, MM_PREFETCH, &b, NULL, routes[i], &st), &st);
        mm_batch_free(&b);
        CHECK(mm_same_location(last_prefetch(transfers[0].range), device(0)));
    }
    mm_memory_release(m);
}

static void
adjacent_ranges_take_one_call(void)
{
    mm_memory *m = allocate_pages(4);
    const mm_transfer transfers[] = {{.range = part_of(m, 0, 1), .location = mm_host()},
                                     {.range = part_of(m, 1, 1), .location = mm_host()},
                                     {.range = part_of(m, 2, 2), .location = mm_host()}};
    mm_status st;
    mm_batch b;

    fill(&b, transfers, 3);
    world.log_clear();
    CHECK_OK(world_run(world.cu, MM_PREFETCH, &b, NULL, MM_DISPATCH_AUTO, &st), &st);
    CHECK_EQUAL(world_calls("cuMemPrefetchAsync"), 1);
    CHECK_EQUAL(world_calls("cuMemPrefetchBatchAsync"), 0);
    mm_batch_free(&b);
    mm_memory_release(m);
}

/* Every driver call of an advice over several ranges fails in turn; the advice on each range is
 * then what it was before. */
static void
failed_advice_is_taken_back(void)
{
    enum { COUNT = 3 };
    mm_memory *m = allocate_pages(2 * COUNT);
    mm_transfer transfers[COUNT];
    mm_status st;
    unsigned n;

    for (size_t i = 0; i < COUNT; i++) {
        transfers[i] = (mm_transfer){.range = part_of(m, 2 * i, 1), .location = device(1)};
        CHECK_OK(mm_range_advise(world.cu, transfers[i].range,
                                 CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                                 i == 1 ? mm_host() : device(0), &st),
                 &st);
    }
    for (n = 1;; n++) {
        mm_batch b;
        int rc, fired;

        fill(&b, transfers, COUNT);
        world.fail("cuMemAdvise", n, CUDA_ERROR_LAUNCH_FAILED, 0);
        rc = mm_batch_advise(world.cu, &b, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, &st);
        fired = world.fail_fired();
        world.fail_clear();
        mm_batch_free(&b);
        if (!fired) {
            CHECK_OK(rc, &st);
            break;
        }
        CHECK_EQUAL(rc, -1);
        CHECK_EQUAL(st.code, CUDA_ERROR_LAUNCH_FAILED);
        for (size_t i = 0; i < COUNT; i++) {
            CUmemLocation location;

            CHECK_OK(mm_range_preferred_location(world.cu, transfers[i].range, &location, &st),
                     &st);
            CHECK(mm_same_location(location, i == 1 ? mm_host() : device(0)));
        }
    }
    CHECK_EQUAL(n, COUNT + 1);
    mm_memory_release(m);
}

/* Unsetting the pages of a range that differed must not take what a range over some of them had. */
static void
overlapping_advice_is_taken_back(void)
{
    mm_memory *m = allocate_pages(6);
    const mm_transfer transfers[] = {
        {part_of(m, 0, 4), device(0)},
        {part_of(m, 2, 2), mm_host()},
        {part_of(m, 5, 1), mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 99)}};
    CUmemLocation location;
    mm_batch b;
    mm_status st;

    CHECK_OK(mm_range_advise(world.cu, part_of(m, 1, 3), CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                             device(1), &st),
             &st);
    fill(&b, transfers, 3);
    CHECK_EQUAL(mm_batch_advise(world.cu, &b, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, &st), -1);
    mm_batch_free(&b);
    CHECK_OK(mm_range_preferred_location(world.cu, part_of(m, 2, 2), &location, &st), &st);
    CHECK(mm_same_location(location, device(1)));
    CHECK_OK(mm_range_preferred_location(world.cu, part_of(m, 0, 1), &location, &st), &st);
    CHECK_EQUAL((int)location.type, (int)CU_MEM_LOCATION_TYPE_INVALID);
    mm_memory_release(m);
}

/* Neighbours are advised in one call, but each has its own advice back. */
static void
advice_on_neighbours_is_taken_back(void)
{
    mm_memory *m = allocate_pages(6);
    const mm_transfer transfers[] = {
        {part_of(m, 0, 2), mm_host()},
        {part_of(m, 2, 2), mm_host()},
        {part_of(m, 5, 1), mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 99)}};
    CUmemLocation location;
    mm_batch b;
    mm_status st;

    CHECK_OK(mm_range_advise(world.cu, transfers[1].range, CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                             device(1), &st),
             &st);
    fill(&b, transfers, 3);
    CHECK_EQUAL(mm_batch_advise(world.cu, &b, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, &st), -1);
    CHECK_EQUAL(b.count, 2);
    mm_batch_free(&b);
    CHECK_OK(mm_range_preferred_location(world.cu, transfers[1].range, &location, &st), &st);
    CHECK(mm_same_location(location, device(1)));
    CHECK_OK(mm_range_preferred_location(world.cu, transfers[0].range, &location, &st), &st);
    CHECK_EQUAL((int)location.type, (int)CU_MEM_LOCATION_TYPE_INVALID);
    mm_memory_release(m);
}

static void
failed_set_change_is_taken_back(void)
{
    mm_memory *m = allocate_pages(1);
    mm_range range = part_of(m, 0, 1);
    mm_location_set from = mm_location_bit(device(0)), now = 0;
    mm_location_set to = mm_location_bit(device(1)) | mm_location_bit(mm_host());
    mm_status st;

    CHECK_OK(mm_range_change_accessed_by(world.cu, range, 0, from, &st), &st);
    for (unsigned n = 1; n <= 3; n++) {
        world.fail("cuMemAdvise", n, CUDA_ERROR_LAUNCH_FAILED, 0);
        CHECK_EQUAL(mm_range_change_accessed_by(world.cu, range, from, to, &st), -1);
        CHECK(world.fail_fired());
        world.fail_clear();
        CHECK_OK(mm_range_accessed_by(world.cu, range, &now, &st), &st);
        CHECK(now == from);
    }
    CHECK_OK(mm_range_change_accessed_by(world.cu, range, from, to, &st), &st);
    CHECK_OK(mm_range_accessed_by(world.cu, range, &now, &st), &st);
    CHECK(now == to);
    mm_memory_release(m);
}

static void
bad_ranges_are_explained(void)
{
    mm_memory *m = allocate_pages(2);
    size_t page = mm_page_size();
    mm_range over = {.start = m->start + page, .size = 2 * page};
    mm_range wraps = {.start = m->start + page, .size = SIZE_MAX};
    int local = 0;
    mm_range system = {.start = (CUdeviceptr)(uintptr_t)&local, .size = sizeof local};
    mm_status st;

    CHECK_EQUAL(mm_range_check(world.cu, &over, MM_PREFETCH, &st), -1);
    CHECK_EQUAL(st.kind, MM_BAD_VALUE);
    CHECK(strstr(st.detail, "managed-memory allocation") != NULL);
    CHECK_EQUAL(mm_range_check(world.cu, &wraps, MM_PREFETCH, &st), -1);
    CHECK_EQUAL(st.kind, MM_BAD_VALUE);
    CHECK_EQUAL(mm_range_check(world.cu, &system, MM_DISCARD, &st), -1);
    CHECK_EQUAL(st.kind, MM_NOT_MANAGED);
    CHECK(strstr(st.detail, "managed-memory allocation") != NULL);
    mm_memory_release(m);
}

/* The driver does not tell the range of a batch that it refused. */
static void
the_bad_range_of_a_batch_is_found(void)
{
    mm_memory *m = allocate_pages(8), *gone = allocate_pages(1);
    const mm_operation ops[] = {MM_PREFETCH, MM_DISCARD, MM_DISCARD_PREFETCH};
    CUdeviceptr freed = gone->start;
    char address[32];
    mm_status st;
    mm_batch b;

    mm_memory_release(gone);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        const mm_transfer transfers[] = {
            {.range = part_of(m, 0, 1), .location = mm_host()},
            {.range = part_of(m, 2, 1), .location = device(0)},
            {.range = {freed, mm_page_size(), freed}, .location = mm_host()},
            {.range = part_of(m, 4, 1), .location = mm_host()}};
        fill(&b, transfers, 4);
        CHECK_EQUAL(world_run(world.cu, ops[i], &b, NULL, MM_DISPATCH_BATCH, &st), -1);
        CHECK_EQUAL(st.kind, MM_NOT_MANAGED);
        (void)snprintf(address, sizeof address, "0x%llx", (unsigned long long)freed);
        CHECK(strstr(st.detail, address) != NULL);
        mm_batch_free(&b);
    }
    mm_memory_release(m);
}

static void
long_details_are_cut_off(void)
{
    mm_status st;
    char text[2 * sizeof st.detail];

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK_EQUAL(mm_fail(&st, MM_BAD_VALUE, "%s", text), -1);
    CHECK_EQUAL(strlen(st.detail), sizeof st.detail - 1);
    mm_status_add(&st, "%s", text);
    CHECK_EQUAL(strlen(st.detail), sizeof st.detail - 1);
    (void)mm_fail(&st, MM_BAD_VALUE, "first");
    mm_status_add(&st, "%s", "second");
    CHECK(strcmp(st.detail, "first second") == 0);
}

static void
a_driver_is_chosen_only_once(void)
{
    mm_status st;

    CHECK_EQUAL(mm_driver_select("cuda", &st), -1);
    CHECK(mm_driver_peek() == world.cu);
    CHECK(!mm_driver_forked());
}

/* More than fit into the struct, so the arrays are on the heap, where ASan sees every step outside. */
static void
many_ranges_are_discarded_by_one_call(void)
{
    enum { COUNT = 50 };
    const size_t page = mm_page_size();
    mm_status st;
    mm_memory *m = mm_memory_allocate(world.cu, 2 * COUNT * page, &st);
    mm_batch b;

    CHECK(m != NULL);
    CHECK_OK(mm_batch_init(&b, COUNT, &st), &st);
    for (size_t i = 0; i < COUNT; i++) {
        b.transfers[i] = (mm_transfer){{m->start + 2 * i * page, page, m->start}, mm_host()};
    }
    world.log_clear();
    CHECK_OK(world_run(world.cu, MM_DISCARD, &b, NULL, MM_DISPATCH_AUTO, &st), &st);
    CHECK_EQUAL(world_calls("cuMemDiscardBatchAsync"), 1);
    mm_batch_free(&b);
    mm_memory_release(m);
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(neighbours_merge_in_any_order),
        CHECK_TEST(ranges_without_a_byte_are_dropped),
        CHECK_TEST(gaps_inside_a_page_are_bridged),
        CHECK_TEST(gaps_and_allocations_stay_apart),
        CHECK_TEST(different_locations_stay_apart),
        CHECK_TEST(overlaps_and_contained_ranges_merge),
        CHECK_TEST(conflicting_moves_keep_their_order),
        CHECK_TEST(only_true_conflicts_keep_the_order),
        CHECK_TEST(many_moves_leave_the_small_array),
        CHECK_TEST(whole_pages_round_inwards),
        CHECK_TEST(less_than_a_page_is_refused),
        CHECK_TEST(sets_and_locations_convert),
        CHECK_TEST(last_of_overlapping_moves_wins),
        CHECK_TEST(adjacent_ranges_take_one_call),
        CHECK_TEST(failed_advice_is_taken_back),
        CHECK_TEST(overlapping_advice_is_taken_back),
        CHECK_TEST(advice_on_neighbours_is_taken_back),
        CHECK_TEST(failed_set_change_is_taken_back),
        CHECK_TEST(bad_ranges_are_explained),
        CHECK_TEST(the_bad_range_of_a_batch_is_found),
        CHECK_TEST(long_details_are_cut_off),
        CHECK_TEST(a_driver_is_chosen_only_once),
        CHECK_TEST(many_ranges_are_discarded_by_one_call),
    };

    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s EMULATED_DRIVER\n", argv[0]);
        return 2;
    }
    world_open(argv[1]);
    return check_run(tests, sizeof tests / sizeof *tests);
}
