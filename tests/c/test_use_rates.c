/* test_use_rates.c: how often parts are used, and whether at regular distances. */
#include "working/use_order.h"

#include <string.h>

#include "check.h"
#include "random_numbers.h"

enum { PARTS = 24, MANY = 200000 };

static mm_use_clock time_of_uses;
static mm_use_rate rates[PARTS];
static double heats[PARTS];

static void
begin(void)
{
    seed = 1;
    memset(&time_of_uses, 0, sizeof time_of_uses);
    memset(rates, 0, sizeof rates);
    memset(heats, 0, sizeof heats);
}

/* True if all were cooled. */
static bool
use(uint32_t part)
{
    if (!mm_use_rate_note(&time_of_uses, &rates[part], &heats[part], PARTS)) {
        return false;
    }
    for (uint32_t i = 0; i < PARTS; i++) {
        heats[i] *= MM_USE_COOLING;
    }
    return true;
}

static uint32_t
count_regular(void)
{
    uint32_t regular = 0;

    for (uint32_t i = 0; i < PARTS; i++) {
        regular += mm_use_rate_is_regular(&rates[i]);
    }
    return regular;
}

TEST(uses_of_loops_are_regular)
{
    begin();
    for (uint32_t i = 0; i < 6 * PARTS; i++) {
        use(i % PARTS);
        CHECK_EQUAL(count_regular(), PARTS);
    }
    begin();
    for (uint32_t i = 0; i < 12 * PARTS; i++) { /* forward and then back */
        uint32_t step = i % (2 * PARTS);
        use(step < PARTS ? step : 2 * PARTS - 1 - step);
        CHECK_EQUAL(count_regular(), PARTS);
    }
}

/* And become regular again in a loop. */
TEST(random_uses_are_not_regular)
{
    begin();
    for (uint32_t i = 0; i < 20 * PARTS; i++) {
        use(random_below(PARTS));
    }
    CHECK(count_regular() < PARTS / 4);
    for (uint32_t i = 0; i < 6 * PARTS; i++) {
        use(i % PARTS);
    }
    CHECK_EQUAL(count_regular(), PARTS);
}

TEST(the_second_surprise_makes_a_part_irregular)
{
    static const uint32_t gaps[] = {10, 10, 100, 1000};

    begin();
    use(0);
    for (size_t i = 0; i < 4; i++) {
        CHECK(mm_use_rate_is_regular(&rates[0]));
        for (uint32_t turn = 1; turn < gaps[i]; turn++) {
            use(1);
        }
        use(0);
    }
    CHECK(!mm_use_rate_is_regular(&rates[0]));
}

/* Recent uses count: what was used most before is overtaken after some rounds, even across
 * coolings. */
TEST(the_part_that_is_used_most_has_the_most_heat)
{
    uint32_t coolings = 0;

    begin();
    for (uint32_t i = 0; i < MANY; i++) {
        uint32_t often = i / 1000 % PARTS;
        coolings += use(random_below(3) == 0 ? often : random_below(PARTS));
        for (uint32_t j = 0; j < PARTS && i % 1000 == 999; j++) {
            CHECK(j == often || heats[j] < heats[often]);
        }
    }
    CHECK(coolings >= 2);
    for (uint32_t i = 0; i < PARTS; i++) {
        CHECK(heats[i] > 0 && heats[i] < 1e120);
    }
}

TEST(a_use_counts_half_after_some_rounds)
{
    double half;

    begin();
    use(0);
    for (uint32_t i = 1; i < 3 * PARTS; i++) {
        use(1);
    }
    use(2);
    half = heats[0] / heats[2];
    CHECK(half > 0.48 && half < 0.52);
}

TEST_MAIN(no_driver)
