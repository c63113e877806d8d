/* test_working_claims.c: the claims of the memory of working sets, against a table of pages.
 *
 * Usage: test_working_claims PATH_OF_THE_EMULATED_DRIVER, which is not opened. */
#include <stdlib.h>

#include "check.h"
#include "memory/working_claims.h"

enum { PAGES = 600, MEMORIES = 60, MOST_RANGES = 4, ROUNDS = 20000, MANY = 1 << 14 };

static const uint64_t start = UINT64_C(1) << 32;
static mm_status st;

static uint32_t
random_below(uint32_t limit)
{
    static uint64_t seed = 1;

    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % limit;
}

/* Ranges of some bytes of these pages, which do not meet. */
static size_t
random_ranges(mm_working_range *ranges)
{
    size_t count = 0;

    for (uint32_t page = random_below(PAGES / 2); page < PAGES - 8 && count < MOST_RANGES;
         page += 2 + random_below(20)) {
        size_t bytes = 1 + random_below(3 * (uint32_t)mm_page_size());
        ranges[count++] = (mm_working_range){
            .range = {.start = start + page * mm_page_size() + random_below(64), .size = bytes}};
        page += (uint32_t)(bytes / mm_page_size()) + 1;
    }
    return 1 + random_below((uint32_t)count);
}

/* Counts the claims of each page up or down, and returns the highest count before. */
static int
count_pages(int *claims, const mm_working_memory *m, int by)
{
    int most = 0;

    for (size_t i = 0; i < m->count; i++) {
        for (CUdeviceptr page = mm_first_page_of(&m->ranges[i].range);
             page < mm_page_behind(&m->ranges[i].range); page++) {
            int *count = &claims[page - start / mm_page_size()];
            most = *count > most ? *count : most;
            *count += by;
        }
    }
    return most;
}

static void
pages_are_claimed_once(void)
{
    static mm_working_memory memories[MEMORIES];
    static int claims[PAGES + 16];
    int claimed = 0, refused = 0;

    for (int round = 0; round < ROUNDS; round++) {
        mm_working_memory *m = &memories[random_below(MEMORIES)];
        mm_working_range ranges[MOST_RANGES];
        if (m->ranges != NULL) {
            CHECK_EQUAL(count_pages(claims, m, -1), 1);
            mm_give_back_claim(m);
            mm_give_back_claim(m); /* does nothing */
            mm_working_memory_free(m);
            continue;
        }
        CHECK_OK(mm_working_memory_init(m, ranges, random_ranges(ranges), MM_GROUP_READ, &st),
                 &st);
        if (count_pages(claims, m, 1) == 0) {
            CHECK_OK(mm_claim_memory(m, &st), &st);
            claimed++;
        } else {
            CHECK(mm_claim_memory(m, &st) < 0);
            CHECK_EQUAL(st.kind, MM_BAD_VALUE);
            (void)count_pages(claims, m, -1);
            mm_give_back_claim(m);
            mm_working_memory_free(m);
            refused++;
        }
    }
    CHECK(claimed > ROUNDS / 10 && refused > ROUNDS / 10);
    for (int i = 0; i < MEMORIES; i++) {
        mm_give_back_claim(&memories[i]);
        mm_working_memory_free(&memories[i]);
    }
}

/* Memory that was closed gives way, also while its group is still there. */
static void
closed_memory_has_no_pages(void)
{
    mm_guard open = {0}, closed = {0};
    mm_working_range range = {.range = {start, 8 * mm_page_size(), start}, .guard = &closed};
    mm_working_range inside = {.range = {start + mm_page_size(), 10, start}, .guard = &open};
    mm_working_memory first, second, third;

    CHECK_OK(mm_working_memory_init(&first, &range, 1, MM_GROUP_READ, &st), &st);
    CHECK_OK(mm_working_memory_init(&second, &inside, 1, MM_GROUP_READ, &st), &st);
    CHECK_OK(mm_working_memory_init(&third, &inside, 1, MM_GROUP_READ, &st), &st);
    CHECK_OK(mm_claim_memory(&first, &st), &st);
    CHECK(mm_claim_memory(&second, &st) < 0);
    (void)mm_guard_close(&closed, false);
    CHECK_OK(mm_claim_memory(&second, &st), &st);
    CHECK(mm_claim_memory(&third, &st) < 0);
    mm_give_back_claim(&first);
    CHECK(mm_claim_memory(&third, &st) < 0);
    mm_give_back_claim(&second);
    CHECK_OK(mm_claim_memory(&third, &st), &st);
    mm_give_back_claim(&third);
    mm_working_memory_free(&first);
    mm_working_memory_free(&second);
    mm_working_memory_free(&third);
}

static int
height_below(const mm_working_range *range)
{
    int lower, higher;

    if (range == NULL) {
        return 0;
    }
    lower = height_below(range->claim.lower);
    higher = height_below(range->claim.higher);
    return 1 + (lower > higher ? lower : higher);
}

/* A claim goes through some ranges of 16,384, whatever the order in which they come. */
static void
many_claims_take_few_steps(void)
{
    static mm_working_memory memories[MANY];

    for (int falling = 0; falling < 2; falling++) {
        int height = 0;
        for (size_t i = 0; i < MANY; i++) {
            size_t page = falling ? MANY - i : i;
            mm_working_range range = {.range = {start + page * mm_page_size(), 100, start}};
            CHECK_OK(mm_working_memory_init(&memories[i], &range, 1, MM_GROUP_READ, &st), &st);
            CHECK_OK(mm_claim_memory(&memories[i], &st), &st);
        }
        for (size_t i = 0; i < MANY; i++) {
            int below = height_below(memories[i].ranges);
            height = below > height ? below : height;
        }
        CHECK(height > 0 && height < 64);
        for (size_t i = 0; i < MANY; i++) {
            mm_give_back_claim(&memories[i]);
            mm_working_memory_free(&memories[i]);
        }
    }
}

int
main(void)
{
    static const check_test tests[] = {
        CHECK_TEST(pages_are_claimed_once),
        CHECK_TEST(closed_memory_has_no_pages),
        CHECK_TEST(many_claims_take_few_steps),
    };

    return check_run(tests, sizeof tests / sizeof *tests);
}
