/* test_attribution_pages.c: the bytes of pages that move back, and the storage of pages. Needs no
 * driver. */
#include "attributed_events.h"
#include "failing_allocations.h"
#include "trace/block_table.h"

/* --- pages that turn back ------------------------------------------------------------------- */

/* A part sees its own moves as a trace of that part alone does, and all parts together see what one
 * part of all moves sees. */
TEST(parts_divide_what_turns_back)
{
    enum { PARTS = 9, MOVES = 40 };
    const mm_allocation_record record = record_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *divided = attribution_of(&record, 1), *whole = attribution_of(&record, 1);
    uint64_t within = 0, across = 0, seed = 7;

    for (uint32_t part = 0; part < PARTS; part++) {
        mm_attribution *alone = attribution_of(&record, 1);
        for (uint64_t i = 0; i < MOVES; i++) {
            uint64_t time = 100 * (part * MOVES + i + 1), at, size;
            mm_event move;
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            at = (seed >> 20) % (6 * MIB);
            size = 1 + (seed >> 45) % MIB;
            move = (seed >> 63) != 0 ? up(time, BASE + at, size) : down(time, BASE + at, size);
            add(divided, part, &move, 1, NULL);
            add(whole, 0, &move, 1, NULL);
            add(alone, 0, &move, 1, NULL);
        }
        CHECK_EQUAL(turned_back(divided, part, 0), turned_back(alone, 0, 0));
        CHECK_EQUAL(turned_across(alone, 0, 0), 0);
        within += turned_back(divided, part, 0);
        across += turned_across(divided, part, 0);
        mm_attribution_free(alone);
    }
    CHECK(within > 0 && across > 0);
    CHECK_EQUAL(within + across, turned_back(whole, 0, 0));
    mm_attribution_free(divided);
    mm_attribution_free(whole);
}

TEST(a_later_move_on_the_same_page_is_another_one)
{
    const mm_allocation_record record = record_of(BASE, BLOCK, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
    const mm_event events[] = {up(100, BASE, PAGE), down(200, BASE, 100),
                               down(300, BASE + 100, 100), down(300, BASE + 200, 100)};

    add(a, 0, events, 4, NULL);
    CHECK_EQUAL(turned_back(a, 0, 0), 100);
    mm_attribution_free(a);
}

TEST(a_block_takes_less_than_300_bytes)
{
    enum { BLOCKS = 100000 };
    long before = live_bytes(), most;
    mm_block_table table = {0};
    mm_status st;

    (void)most_live_bytes();
    CHECK_OK(mm_block_table_add_range(&table, BASE, BASE + (uint64_t)BLOCKS * BLOCK, &st), &st);
    CHECK_EQUAL(table.count, BLOCKS);
    CHECK(live_bytes() - before < 300L * BLOCKS);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        CHECK(mm_block_table_find(&table, (BASE >> MM_BLOCK_BITS) + i) == &table.blocks[i]);
    }
    CHECK(mm_block_table_find(&table, (BASE >> MM_BLOCK_BITS) + BLOCKS) == NULL);
    most = most_live_bytes();
    CHECK(most - before > 200L * BLOCKS); /* the counter works */
    mm_block_table_free(&table);
    CHECK_EQUAL(live_bytes(), before);
}

TEST_MAIN(no_driver)
