/* test_batch.c: which moves keep their order, what is one call, and ranges that are refused. */
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
TEST(only_true_conflicts_keep_the_order)
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

TEST(sets_and_locations_convert)
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

static mm_range
part_of(const mm_memory *m, size_t first, size_t pages)
{
    size_t page = mm_page_size();

    return (mm_range){
        .start = m->start + first * page, .size = pages * page, .allocation = m->start};
}

TEST(adjacent_ranges_take_one_call)
{
    mm_memory *m = world_allocate(4 * mm_page_size());
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

TEST(bad_ranges_are_explained)
{
    mm_memory *m = world_allocate(2 * mm_page_size());
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
TEST(the_bad_range_of_a_batch_is_found)
{
    mm_memory *m = world_allocate(8 * mm_page_size()), *gone = world_allocate(1 * mm_page_size());
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

/* More than fit into the struct, so the arrays are on the heap, where ASan sees every step outside. */
TEST(many_ranges_are_discarded_by_one_call)
{
    enum { COUNT = 50 };
    const size_t page = mm_page_size();
    mm_status st;
    mm_memory *m = world_allocate(2 * COUNT * page);
    mm_batch b;

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

TEST_MAIN(world_open)
