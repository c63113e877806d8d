/* test_use_order.c: the uses that are expected next, from a given order, from the past, or from
 * the order of adding; and orders that go on without a part. */
#include "working/use_order.h"

#include "check.h"
#include "failing_allocations.h"
#include "random_numbers.h"

enum { PARTS = 24, MOST_PARTS = 400, MOST_LIVING = 8, STEPS = 3000 };

static mm_status st;
static mm_use_order order;

static uint32_t
add(bool is_written)
{
    CHECK_OK(mm_use_order_add(&order, is_written, &st), &st);
    return order.newest;
}

static void
begin(uint32_t parts)
{
    seed = 1;
    mm_use_order_init(&order);
    for (uint32_t i = 0; i < parts; i++) {
        CHECK_EQUAL(add(true), i);
    }
}

static void
remove_part(uint32_t part)
{
    mm_use_order_remove(&order, part);
    mm_use_order_vacate(&order, part);
}

static bool
is_live(uint32_t part)
{
    return order.followers[(size_t)2 * part] != MM_REMOVED_PART;
}

static bool
is_written(uint32_t part)
{
    return order.followers[(size_t)2 * part + 1] != MM_REMOVED_PART;
}

/* Every prediction is a part that is there. */
static void
check_predictions(void)
{
    mm_order_walk walk = mm_use_order_walk(&order);
    bool reads;

    for (uint32_t i = 0; i < 3 * order.count; i++) {
        uint32_t part = mm_order_walk_next(&order, &walk, &reads);
        if (order.live == 0) {
            CHECK_EQUAL(part, MM_NO_PART);
            return;
        }
        CHECK(part < order.count && is_live(part));
        CHECK(!reads || is_written(part));
    }
}

/* Notes uses, and counts those that were not expected. */
static uint32_t
count_surprises(const uint32_t *parts, const bool *reads, uint32_t count)
{
    uint32_t surprises = 0;

    for (uint32_t i = 0; i < count; i++) {
        mm_order_walk walk = mm_use_order_walk(&order);
        bool read;
        surprises += mm_order_walk_next(&order, &walk, &read) != parts[i]
                     || (reads != NULL && read != reads[i]);
        mm_use_order_note(&order, parts[i], reads != NULL && reads[i]);
    }
    return surprises;
}

static void
check_walk(const uint32_t *expected, uint32_t count, uint32_t steps)
{
    mm_order_walk walk = mm_use_order_walk(&order);
    bool reads;

    for (uint32_t i = 0; i < steps; i++) {
        CHECK_EQUAL(mm_order_walk_next(&order, &walk, &reads), expected[i % count]);
    }
}

/* --- learned orders ------------------------------------------------------------------------- */

/* Forward and back; without one of the parts, if it is less than `parts`. */
static uint32_t
make_turning_loop(uint32_t parts, uint32_t without, uint32_t *loop)
{
    uint32_t count = 0;

    for (uint32_t step = 0; step < 2 * parts; step++) {
        uint32_t part = step < parts ? step : 2 * parts - 1 - step;
        if (part != without) {
            loop[count++] = part;
        }
    }
    return count;
}

TEST(loops_are_learned_in_one_round)
{
    uint32_t loop[2 * PARTS], count = make_turning_loop(PARTS, PARTS, loop);

    begin(PARTS);
    CHECK_EQUAL(count_surprises(loop, NULL, PARTS), 0); /* the order of adding */
    CHECK_EQUAL(count_surprises(loop, NULL, PARTS), 0);
    (void)count_surprises(loop, NULL, count);
    (void)count_surprises(loop, NULL, count);
    CHECK_EQUAL(count_surprises(loop, NULL, count), 0);
    CHECK_EQUAL(mm_use_order_trust(&order), MM_MOST_TRUST);
    mm_use_order_free(&order);
}

/* Each use with its access: two rounds that read, forward and back, and one that writes. */
TEST(accesses_are_learned)
{
    for (int given = 0; given < 2; given++) {
        uint32_t loop[3 * PARTS];
        bool reads[3 * PARTS];
        begin(PARTS);
        for (uint32_t i = 0; i < 3 * PARTS; i++) {
            uint32_t turn = i / PARTS, step = i % PARTS;
            loop[i] = turn == 1 ? PARTS - 1 - step : step;
            reads[i] = turn < 2;
        }
        CHECK_OK(mm_use_order_give(&order, loop, given ? 3 * PARTS : 0, &st), &st);
        (void)count_surprises(loop, reads, 3 * PARTS);
        (void)count_surprises(loop, reads, 3 * PARTS);
        CHECK_EQUAL(count_surprises(loop, reads, 3 * PARTS), 0);
        mm_use_order_free(&order);
    }
}

/* Experts of three parts each, chosen at random: the order in an expert is known, the next expert
 * is not, and a walk tells. */
TEST(ends_of_chains_are_doubtful)
{
    enum { CHAIN = 3, CHAINS = PARTS / CHAIN };
    uint32_t doubtful = 0, sure = 0;

    begin(PARTS);
    for (int i = 0; i < 600; i++) {
        uint32_t first = CHAIN * random_below(CHAINS);
        for (uint32_t j = 0; j < CHAIN; j++) {
            mm_order_walk walk;
            bool reads;
            mm_use_order_note(&order, first + j, false);
            walk = mm_use_order_walk(&order);
            (void)mm_order_walk_next(&order, &walk, &reads);
            doubtful += i >= 100 && j == CHAIN - 1 && walk.is_doubtful;
            sure += i >= 100 && j < CHAIN - 1 && !walk.is_doubtful;
        }
    }
    CHECK(doubtful > 450 && sure == 1000);
    mm_use_order_free(&order);
}

TEST(random_uses_end_the_trust)
{
    int trust = 0;

    begin(PARTS);
    for (int i = 0; i < 1000; i++) {
        mm_use_order_note(&order, random_below(PARTS), false);
        trust += mm_use_order_trust(&order);
    }
    CHECK(trust < 1000);
    mm_use_order_free(&order);
}

/* --- given orders --------------------------------------------------------------------------- */

TEST(a_given_order_wins_until_it_is_wrong)
{
    static const uint32_t odd_first[] = {1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10};
    uint32_t loop[12];

    begin(12);
    for (uint32_t i = 0; i < 12; i++) {
        loop[i] = i;
    }
    CHECK_OK(mm_use_order_give(&order, odd_first, 12, &st), &st);
    CHECK_EQUAL(count_surprises(odd_first, NULL, 12), 0);
    CHECK_EQUAL(count_surprises(odd_first, NULL, 12), 0);
    for (int i = 0; i < 4; i++) {
        (void)count_surprises(loop, NULL, 12); /* learned, although another order is given */
    }
    CHECK_EQUAL(count_surprises(loop, NULL, 12), 0);
    CHECK_OK(mm_use_order_give(&order, NULL, 0, &st), &st);
    CHECK_EQUAL(count_surprises(loop, NULL, 12), 0);
    mm_use_order_free(&order);
}

TEST(a_given_order_is_found_again)
{
    static const uint32_t round[] = {0, 1, 2, 2, 1, 3, 4, 0};
    static const uint32_t behind_1[] = {2, 2, 1, 3, 4, 0}, behind_4[] = {0, 0, 1, 2, 2, 1, 3, 4};

    begin(6);
    CHECK_OK(mm_use_order_give(&order, round, 8, &st), &st);
    mm_use_order_note(&order, 1, false);
    mm_use_order_note(&order, 5, false); /* not in the round: its place stays */
    CHECK(mm_use_order_trust(&order) < MM_MOST_TRUST);
    order.learned_trust = 0; /* so that the walk goes along the given order */
    check_walk(behind_1, 6, 6);
    mm_use_order_note(&order, 4, false);
    order.learned_trust = 0;
    check_walk(behind_4, 8, 20);
    mm_use_order_free(&order);
}

TEST(a_given_order_goes_on_without_a_part)
{
    static const uint32_t round[] = {0, 1, 2, 2, 1, 3, 4, 0};
    static const uint32_t left[] = {1, 3, 4, 1}, last[] = {5};

    begin(6);
    CHECK_OK(mm_use_order_give(&order, round, 8, &st), &st);
    (void)count_surprises(round, NULL, 4);
    mm_use_order_remove(&order, 2);
    CHECK_EQUAL(order.given_count, 6);
    mm_use_order_remove(&order, 0);
    order.learned_trust = 0;
    check_walk(left, 4, 8);
    CHECK_OK(mm_use_order_give(&order, round, 8, &st), &st);
    CHECK_EQUAL(order.given_count, 4);
    mm_use_order_remove(&order, 1);
    mm_use_order_remove(&order, 3);
    mm_use_order_remove(&order, 4);
    CHECK_EQUAL(order.given_count, 0);
    check_walk(last, 1, 3);
    mm_use_order_remove(&order, 5);
    check_walk((const uint32_t[]){MM_NO_PART}, 1, 3);
    mm_use_order_free(&order);
}

/* --- parts that come and go ----------------------------------------------------------------- */

/* The uses before the part and behind it are joined, at each place of it: all uses are foreseen,
 * unless the part was one of the last two that were used. */
TEST(a_learned_order_goes_on_without_a_part)
{
    for (uint32_t removed = 0; removed < 8; removed++) {
        uint32_t loop[16], count = make_turning_loop(8, 8, loop);
        begin(8);
        for (int i = 0; i < 3; i++) {
            (void)count_surprises(loop, NULL, count);
        }
        remove_part(removed);
        count = make_turning_loop(8, removed, loop);
        CHECK(count_surprises(loop, NULL, count) <= (removed < 2));
        for (int i = 0; i < 3; i++) {
            CHECK_EQUAL(count_surprises(loop, NULL, count), 0);
        }
        check_predictions();
        mm_use_order_free(&order);
    }
}

TEST(predictions_are_parts_that_are_there)
{
    for (uint64_t run = 0; run < 20; run++) {
        begin(4);
        seed = run + 100;
        for (uint32_t i = 0; i < STEPS; i++) {
            uint32_t part = run % 2 == 0 ? i / 3 % order.count : random_below(order.count);
            if (is_live(part)) {
                mm_use_order_note(&order, part, is_written(part) && random_below(3) == 0);
            }
            if (is_live(part) && random_below(60) == 0) {
                remove_part(part);
                check_predictions();
            }
            if (order.live < MOST_LIVING && random_below(40) == 0) {
                CHECK(add(random_below(2) == 0) < MOST_LIVING);
            }
            if (random_below(200) == 0) {
                uint32_t round[] = {random_below(order.count), random_below(order.count)};
                CHECK_OK(mm_use_order_give(&order, round, random_below(3), &st), &st);
            }
            check_predictions();
        }
        mm_use_order_free(&order);
    }
}

TEST(removed_parts_leave_nothing)
{
    long bytes = 0;

    begin(3);
    for (uint32_t i = 0; i < 5000; i++) {
        uint32_t part = add(true);
        CHECK(part <= 3);
        mm_use_order_note(&order, i % 3, false);
        mm_use_order_note(&order, part, false);
        mm_use_order_note(&order, part, true);
        remove_part(part);
        bytes = i == 100 ? live_bytes() : bytes;
        CHECK(i < 100 || live_bytes() == bytes);
    }
    CHECK_EQUAL(order.count, 4);
    CHECK_EQUAL(order.pair_mask + 1, 64);
    mm_use_order_free(&order);
}

/* What a removal and a load look through gets smaller with the set, whichever parts are left. */
TEST(a_set_that_was_large_is_a_small_one)
{
    begin(MOST_PARTS);
    for (uint32_t i = 0; i < MOST_PARTS; i++) {
        mm_use_order_note(&order, i, false);
    }
    CHECK(order.pair_mask + 1 >= 8 * MOST_PARTS);
    for (uint32_t i = 0; i < MOST_PARTS - 3; i++) {
        remove_part(i);
    }
    CHECK(order.pair_mask + 1 <= 4 * 64);
    CHECK_EQUAL(order.oldest, MOST_PARTS - 3);
    CHECK_EQUAL(order.newest, MOST_PARTS - 1);
    for (uint32_t i = 0; i < 300; i++) {
        CHECK(add(true) < MOST_PARTS);
    }
    CHECK_EQUAL(order.count, MOST_PARTS);
    check_predictions();
    mm_use_order_free(&order);
}

/* The part that is expected behind one that never had a follower is the one that was added next,
 * even if it has the number of an earlier part. */
TEST(expectations_follow_the_order_of_adding)
{
    static const uint32_t next[] = {0, 1, 2, 3};

    begin(4);
    mm_use_order_note(&order, 3, false);
    remove_part(1);
    remove_part(0);
    CHECK_EQUAL(add(true), 0); /* the number that was vacated last */
    CHECK_EQUAL(add(true), 1);
    check_walk(next, 4, 8);
    mm_use_order_free(&order);
}

/* Without memory for what was learned, nothing is forgotten that holds the order together. */
TEST(every_allocation_may_fail)
{
    for (long n = 1; n < 30; n++) {
        static const uint32_t round[] = {0};
        begin(0);
        fail_allocation(n);
        for (uint32_t i = 0; i < 12; i++) {
            if (mm_use_order_add(&order, i % 2 == 0, &st) < 0) {
                CHECK_EQUAL(st.kind, MM_NO_MEMORY);
                break;
            }
        }
        if (order.count > 0 && mm_use_order_give(&order, round, 1, &st) < 0) {
            CHECK_EQUAL(st.kind, MM_NO_MEMORY);
        }
        for (uint32_t i = 0; i < 3 * order.count; i++) {
            mm_use_order_note(&order, i % order.count, false);
            check_predictions();
        }
        while (order.live > 0) {
            mm_use_order_remove(&order, order.oldest);
            check_predictions();
        }
        fail_allocation(0);
        mm_use_order_free(&order);
    }
}

TEST(too_many_parts_are_refused)
{
    begin(0);
    order.count = MM_REMOVED_PART / 2;
    CHECK_EQUAL(mm_use_order_add(&order, true, &st), -1);
    CHECK_EQUAL(st.kind, MM_BAD_VALUE);
    CHECK_EQUAL(mm_use_order_give(&order, NULL, MM_NO_PART, &st), -1);
    mm_use_order_free(&order);
}

TEST_MAIN(no_driver)
