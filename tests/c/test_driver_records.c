/* test_driver_records.c: the search for records, on a driver that keeps one record of a few pages and
 * queries them as driver 580 does: by whole nodes, which are pages with equal records. */
#include "memory/driver_records.h"
#include "world.h"

enum { FEW = 8, PATTERNS = 1 << FEW, PAGES = 512, NEVER = 0, FREED = 2 };

static const CUdeviceptr block = (CUdeviceptr)1 << 40;
static const mm_record read_mostly = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
                                      {CU_MEM_LOCATION_TYPE_HOST, 0}};
static int records[PAGES]; /* 0, 1 or FREED */
static size_t pages;
static unsigned queries, failing, changing;
static int change;

static mm_range
pages_of(size_t first, size_t count, size_t allocation)
{
    size_t page = mm_page_size();

    return (mm_range){block + first * page, count * page, block + allocation * page};
}

static bool
all_have_it(size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++) {
        if (records[i] != 1) {
            return false;
        }
    }
    return true;
}

/* Tells the record as read-mostly, or as device 0 of the members, of which device 1 always is one.
 * From the first page on, steps by the length of each node, also from its middle. Freed pages count
 * to the node behind them, because nothing is known of them. A query that fails answers as well. */
static CUresult
query(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr start, size_t count)
{
    size_t at = (start - block) / mm_page_size();
    size_t last = (start + count - 1 - block) / mm_page_size();
    int on = 1;

    CHECK(start >= block && last < pages && count > 0);
    queries++;
    if (queries == changing) {
        for (size_t i = 0; i < pages; i++) {
            records[i] = change;
        }
    }
    while (at <= last) {
        size_t begin = at, end = at;
        if (records[at] == FREED) {
            return queries == failing ? CUDA_ERROR_UNKNOWN : CUDA_ERROR_INVALID_VALUE;
        }
        while (begin > 0 && (records[begin - 1] == records[at] || records[begin - 1] == FREED)) {
            begin--;
        }
        for (; end < pages && records[end] == records[at]; end++) {
        }
        on &= records[at];
        at += end - begin;
    }
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY) {
        CHECK_EQUAL(size, sizeof on);
        memcpy(data, &on, sizeof on);
    } else {
        const int devices[] = {on ? 0 : CU_DEVICE_INVALID, 1, CU_DEVICE_INVALID};
        CHECK_EQUAL(attribute, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY);
        CHECK_EQUAL(size, sizeof devices);
        memcpy(data, devices, sizeof devices);
    }
    return queries == failing ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static void
begin(size_t count)
{
    pages = count;
    queries = 0;
    failing = changing = NEVER;
    world.cu->MemRangeGetAttribute = query;
}

static bool
read_range(mm_range range)
{
    mm_status st;
    bool on;

    CHECK_OK(mm_range_read_mostly(world.cu, range, &on, &st), &st);
    CHECK(!mm_in_scope());
    return on;
}

static mm_scope scope;

static void
enter(void)
{
    mm_status st;

    CHECK_OK(mm_scope_enter(&scope, world.cu, MM_ANY_DEVICE, &st), &st);
}

static bool
is_recorded(mm_range range)
{
    bool answer;

    enter();
    answer = mm_is_recorded(world.cu, range, read_mostly);
    mm_scope_leave(&scope);
    return answer;
}

static size_t
first_without(mm_range range)
{
    CUdeviceptr found;

    enter();
    found = mm_first_without_record(world.cu, range, read_mostly);
    mm_scope_leave(&scope);
    CHECK(found >= range.start && found < mm_range_end(range));
    CHECK_EQUAL(found % mm_page_size(), 0);
    return (found - block) / mm_page_size();
}

/* Runs `act` for every range of an allocation that begins at a page, with each pattern of records. */
static void
for_each_range(size_t allocation, size_t freed, void (*act)(size_t first, size_t count, mm_range))
{
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
        for (size_t first = allocation; first < FEW; first++) {
            for (size_t count = 1; first + count <= FEW; count++) {
                begin(FEW);
                for (size_t i = 0; i < FEW; i++) {
                    records[i] = i < freed ? FREED : pattern >> i & 1;
                }
                act(first, count, pages_of(first, count, allocation));
            }
        }
    }
}

static void
check_answers(size_t first, size_t count, mm_range range)
{
    bool all = all_have_it(first, count);

    CHECK_EQUAL(read_range(range), all);
    CHECK_EQUAL(is_recorded(range), all);
    if (!all) {
        size_t expected = first;
        while (records[expected] == 1) {
            expected++;
        }
        CHECK_EQUAL(first_without(range), expected);
    }
}

TEST(finds_what_a_page_lacks)
{
    for_each_range(0, 0, check_answers);
    for_each_range(3, 0, check_answers);
    for_each_range(3, 3, check_answers);
}

/* Sets the record of some of all pages. */
static void
record(size_t first, size_t count)
{
    begin(PAGES);
    for (size_t i = 0; i < PAGES; i++) {
        records[i] = i - first < count;
    }
}

TEST(few_queries_suffice_for_many_pages)
{
    size_t at = 300;

    record(0, PAGES);
    CHECK(read_range(pages_of(0, PAGES, 0)));
    CHECK_EQUAL(queries, 1);
    record(0, PAGES);
    CHECK(read_range(pages_of(at, 1, 0)));
    CHECK_EQUAL(queries, 1);
    record(at, PAGES);
    CHECK(read_range(pages_of(at, PAGES - at, 0)));
    CHECK_EQUAL(queries, 2);
    for (size_t allocation = 0; allocation < 6; allocation += 5) {
        mm_range range = pages_of(at, PAGES - at, allocation);
        record(allocation, PAGES - allocation);
        CHECK(read_range(range));
        CHECK(queries <= (allocation == 0 ? 3 : 15));
        for (size_t before = 1; before < at - allocation; before *= 3) {
            record(at - before, PAGES);
            CHECK(read_range(range));
            CHECK(queries <= 22);
            record(at - before, before + 100);
            CHECK(!read_range(range));
            CHECK(queries <= 22);
            queries = 0;
            CHECK_EQUAL(first_without(range), at + 100);
            CHECK(queries <= 28);
        }
    }
}

TEST(a_search_is_of_many_pages_inside_of_a_block)
{
    size_t few = 256 << 10;
    CUdeviceptr next = block + mm_page_size();

    CHECK(mm_range_may_be_searched((mm_range){next, few + 1, block}));
    CHECK(!mm_range_may_be_searched((mm_range){next, few, block}));
    CHECK(!mm_range_may_be_searched((mm_range){block, few + 1, block}));
    CHECK(mm_range_may_be_searched((mm_range){next, few + 1, next}));
}

/* Each query fails in turn. */
static void
check_failures(size_t first, size_t count, mm_range range)
{
    unsigned n = 0;
    bool all = all_have_it(first, count);

    do {
        mm_status st = {.kind = MM_OK};
        bool on;
        queries = 0;
        failing = ++n;
        if (mm_range_read_mostly(world.cu, range, &on, &st) == 0) {
            CHECK_EQUAL(on, all);
            CHECK(queries < n);
            break;
        }
        CHECK(st.kind == MM_DRIVER_CALL && st.code == CUDA_ERROR_UNKNOWN);
        CHECK_EQUAL(strcmp(st.function, "cuMemRangeGetAttribute"), 0);
        CHECK(queries >= n && queries <= n + 1);
        queries = 0;
        CHECK(is_recorded(range));
        queries = 0;
        if (!all) {
            (void)first_without(range);
        }
    } while (n < 100);
    CHECK(n < 100);
}

TEST(failed_queries_end_a_search)
{
    for_each_range(0, 0, check_failures);
    for_each_range(3, 0, check_failures);
    for_each_range(3, 3, check_failures);
}

static CUresult
read_members(mm_range range, mm_location_set *members)
{
    CUresult code;

    enter();
    code = mm_recorded_members(world.cu, range, members);
    mm_scope_leave(&scope);
    return code;
}

static void
check_failures_of_members(size_t first, size_t count, mm_range range)
{
    mm_location_set members, expected = all_have_it(first, count) ? 3 : 2;

    CHECK_EQUAL(read_members(range, &members), CUDA_SUCCESS);
    CHECK_EQUAL(members, expected);
    for (unsigned all = queries, n = 1; n <= all; n++) {
        queries = 0;
        failing = n;
        CHECK_EQUAL(read_members(range, &members), CUDA_ERROR_UNKNOWN);
        CHECK_EQUAL(members, 0);
    }
}

TEST(failed_queries_end_a_search_for_members)
{
    for_each_range(3, 0, check_failures_of_members);
}

/* Another thread advises all pages, or takes the advice back, before each query in turn. */
static void
check_changes(size_t first, size_t count, mm_range range)
{
    int kept[FEW];

    memcpy(kept, records, sizeof kept);
    for (change = 0; change < 2 && !all_have_it(first, count); change++) {
        for (changing = 1; changing < 12; changing++) {
            memcpy(records, kept, sizeof kept);
            queries = 0;
            (void)first_without(range);
        }
        memcpy(records, kept, sizeof kept);
    }
}

TEST(changes_beside_a_search_leave_the_page_in_the_range)
{
    for_each_range(0, 0, check_changes);
    for_each_range(3, 0, check_changes);
}

/* --- locations -------------------------------------------------------------------------- */

static unsigned torn; /* queries that are between the type of a record and its id */
static int told; /* the type */

static CUresult
query_torn(void **data, size_t *sizes, CUmem_range_attribute *attributes, size_t count,
           CUdeviceptr start, size_t size)
{
    int id = queries < torn ? CU_DEVICE_INVALID : 1;

    CHECK(count == 2 && sizes[0] == sizeof told && sizes[1] == sizeof id && start >= block);
    CHECK(attributes[0] == CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE && size > 0);
    queries++;
    memcpy(data[0], &told, sizeof told);
    memcpy(data[1], &id, sizeof id);
    return queries == failing ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

TEST(a_location_that_changes_between_its_numbers_is_queried_again)
{
    CUmemLocation location;
    mm_status st;

    begin(PAGES);
    world.cu->MemRangeGetAttributes = query_torn;
    told = CU_MEM_LOCATION_TYPE_DEVICE;
    for (torn = 0; torn < 12; torn++) {
        queries = 0;
        CHECK_OK(mm_range_preferred_location(world.cu, pages_of(0, 1, 0), &location, &st), &st);
        CHECK_EQUAL(queries, torn < 8 ? torn + 1 : 8);
        CHECK(!mm_in_scope());
        CHECK_EQUAL(location.type,
                    torn < 8 ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_INVALID);
    }
    torn = 1;
    queries = 0;
    failing = 2;
    CHECK(mm_range_preferred_location(world.cu, pages_of(0, 1, 0), &location, &st) < 0);
    CHECK_EQUAL(st.code, CUDA_ERROR_UNKNOWN);
}

TEST(a_location_that_is_not_set_needs_one_query)
{
    CUmemLocation location;
    mm_status st;

    begin(PAGES);
    told = CU_MEM_LOCATION_TYPE_INVALID;
    CHECK_OK(mm_range_preferred_location(world.cu, pages_of(1, 9, 0), &location, &st), &st);
    CHECK_EQUAL(location.type, CU_MEM_LOCATION_TYPE_INVALID);
    CHECK_EQUAL(queries, 1);
}

TEST_MAIN(world_open)
