/* test_policy.c: a policy and its end on a driver that records advice for a part of a range. */
#include "memory/advice.h"
#include "memory/policy.h"
#include "world.h"

enum { PAGES = 8 };

static __typeof__(world.cu->MemAdvise) kept_advise;

static mm_range
pages_of(const mm_memory *m, size_t first, size_t count)
{
    size_t page = mm_page_size();

    return (mm_range){m->start + first * page, count * page, m->start};
}

static void
advise(mm_range range, CUmem_advise advice, CUmemLocation location)
{
    mm_status st;

    CHECK_OK(mm_range_advise(world.cu, range, advice, location, &st), &st);
}

/* Different advice on neighbouring pages. */
static void
scramble(const mm_memory *m)
{
    CUmemLocation second = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);

    advise(pages_of(m, 1, 2), CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host());
    advise(pages_of(m, 2, 3), CU_MEM_ADVISE_SET_PREFERRED_LOCATION, second);
    advise(pages_of(m, 4, 1), CU_MEM_ADVISE_SET_ACCESSED_BY, second);
    advise(pages_of(m, 4, 3), CU_MEM_ADVISE_SET_ACCESSED_BY, mm_host());
}

static mm_page_runs
read_all(const mm_memory *m)
{
    mm_page_runs runs = {0};
    mm_status st;

    CHECK_OK(mm_page_runs_read(world.cu, pages_of(m, 0, PAGES), MM_BY_MEANING, &runs, &st), &st);
    return runs;
}

static void
check_same(const mm_memory *m, const mm_page_runs *expected)
{
    mm_page_runs now = read_all(m);

    CHECK_EQUAL(now.count, expected->count);
    for (size_t i = 0; i < now.count; i++) {
        CHECK_EQUAL(now.run[i].range.start, expected->run[i].range.start);
        CHECK_EQUAL(now.run[i].range.size, expected->run[i].range.size);
        CHECK(mm_same_policy(&now.run[i].policy, &expected->run[i].policy));
    }
    mm_page_runs_free(&now);
}

static void
fill(mm_batch *b, const mm_memory *const *memories, size_t count)
{
    mm_status st;

    CHECK_OK(mm_batch_init(b, count, &st), &st);
    for (size_t i = 0; i < count; i++) {
        b->transfers[i].range = pages_of(memories[i], 0, PAGES);
    }
}

/* A driver that records any advice for the first page only. */
static CUresult
advise_first_page(CUdeviceptr start, size_t size, CUmem_advise advice, CUmemLocation location)
{
    mm_range first = mm_first_page((mm_range){.start = start, .size = size});

    return kept_advise(first.start, first.size, advice, location);
}

TEST(records_that_stay_behind_are_settled_page_by_page)
{
    mm_memory *m = world_allocate(PAGES * mm_page_size());
    const mm_memory *const targets[] = {m};
    const mm_policy policy = {true, mm_host(), mm_location_bit(mm_location_from_bit(1))};
    const mm_page_run whole = {.range = pages_of(m, 0, PAGES), .policy = policy};
    mm_page_runs earlier, before;
    mm_status st;
    mm_batch b;

    scramble(m);
    before = read_all(m);
    kept_advise = world.cu->MemAdvise;
    world.cu->MemAdvise = advise_first_page;
    fill(&b, targets, 1);
    CHECK_OK(mm_policy_apply(world.cu, &b, &policy, &earlier, &st), &st);
    check_same(m, &(mm_page_runs){.run = (mm_page_run *)&whole, .count = 1});
    CHECK_OK(mm_policy_restore(world.cu, &b, &earlier, &st), &st);
    world.cu->MemAdvise = kept_advise;
    check_same(m, &before);
    mm_batch_free(&b);
    mm_page_runs_free(&earlier);
    mm_page_runs_free(&before);
    mm_memory_release(m);
}

/* A driver during whose call another thread removes a member. */
static CUresult
advise_beside_a_removal(CUdeviceptr start, size_t size, CUmem_advise advice,
                        CUmemLocation location)
{
    CUmemLocation second = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);

    CHECK_EQUAL(kept_advise(start, size, CU_MEM_ADVISE_UNSET_ACCESSED_BY, second), 0);
    return kept_advise(start, size, advice, location);
}

TEST(a_member_that_another_thread_removes_stays_removed)
{
    mm_memory *m = world_allocate(PAGES * mm_page_size());
    CUmemLocation second = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);
    mm_location_set from = mm_location_bit(second), host = mm_location_bit(mm_host()), now = 0;
    mm_range range = pages_of(m, 0, PAGES);
    mm_status st;

    kept_advise = world.cu->MemAdvise;
    for (int way = 0; way < 2; way++) {
        CHECK_OK(mm_range_change_accessed_by(world.cu, range, host, from, &st), &st);
        world.cu->MemAdvise = advise_beside_a_removal;
        if (way == 0) {
            CHECK_OK(mm_range_change_accessed_by(world.cu, range, from, from | host, &st), &st);
        } else {
            advise(range, CU_MEM_ADVISE_SET_ACCESSED_BY, mm_host());
        }
        world.cu->MemAdvise = kept_advise;
        CHECK_OK(mm_range_accessed_by(world.cu, range, &now, &st), &st);
        CHECK_EQUAL(now, host);
    }
    mm_memory_release(m);
}

TEST_MAIN(world_open)
