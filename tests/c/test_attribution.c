/* test_attribution.c: the memories of events and their sums, against arithmetic. Needs no
 * driver. */
#include "attributed_events.h"
#include "failing_allocations.h"
#include "trace/block_table.h"

/* --- sums ----------------------------------------------------------------------------------- */

static void
each_kind_counts_in_its_sum(void)
{
    const mm_life_record life = life_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    mm_event events[24];
    size_t n = 0;
    mm_sums sums, expected = {0};

    for (int cause = 0; cause < MM_CAUSES; cause++) {
        events[n] = up(100, BASE, (uint64_t)(cause + 1) * PAGE);
        events[n++].cause = (uint8_t)cause;
        expected.moved[MM_TO_DEVICE][cause] = (uint64_t)(cause + 1) * PAGE;
    }
    events[n] = up(100, BASE, PAGE);
    events[n++].cause = 77;
    expected.moved[MM_TO_DEVICE][MM_CAUSE_UNKNOWN] += PAGE;
    events[n++] = move_of(300, 340, BASE + 4 * MIB, 3 * PAGE, 1, MM_ON_HOST);
    expected.moved[MM_TO_HOST][MM_CAUSE_FAULT] = 3 * PAGE;
    events[n++] = move_of(320, 350, BASE + 6 * MIB, 5 * PAGE, 1, MM_OTHER_PROCESSOR);
    expected.moved[MM_BETWEEN_DEVICES][MM_CAUSE_FAULT] = 5 * PAGE;
    expected.move_time = 10 + 50;
    for (uint8_t access = MM_NO_ACCESS; access <= MM_ATOMIC_ACCESS; access++) {
        events[n] = event_of(MM_HOST_FAULT, 400, BASE + 5, 1);
        events[n++].access = access;
        events[n] = event_of(MM_DEVICE_FAULT, 400, BASE + 5, 1);
        events[n++].access = access;
    }
    expected.host_faults = expected.device_faults = 4;
    expected.host_write_faults = expected.device_write_faults = 2;
    events[n++] = event_of(MM_REMOTE_MAP, 500, BASE, 7 * PAGE);
    events[n++] = event_of(MM_THRASHING, 500, BASE, 11 * PAGE);
    events[n] = event_of(MM_THROTTLING, 500, BASE, 1);
    events[n++].end = 1234;
    events[n++] = event_of(MM_DUPLICATE, 500, BASE, 13 * PAGE);
    events[n++] = event_of(MM_DUPLICATE_END, 500, BASE, 17 * PAGE);
    events[n++] = event_of(MM_EVICTION, 500, BASE, 19 * PAGE);
    events[n++] = event_of(MM_CALL, 500, BASE, 23 * PAGE);
    CHECK_EQUAL(n, 24);
    expected.remote_mapped = 7 * PAGE;
    expected.thrashing = 11 * PAGE;
    expected.throttled = 734;
    expected.duplicated = 13 * PAGE;
    expected.evicted = 19 * PAGE;
    add(a, 3, events, n, NULL);
    sums = sums_of(a, 3, 0);
    CHECK(memcmp(&sums, &expected, sizeof sums) == 0);
    sums = sums_of(a, 3, TOTAL);
    CHECK(memcmp(&sums, &expected, sizeof sums) == 0);
    CHECK_EQUAL(mm_attribution_ambiguous(a), 0);
    mm_attribution_free(a);
}

static void
calls_belong_to_memories_and_count_in_no_sum(void)
{
    const mm_life_record lives[] = {life_of(BASE, BLOCK, 0, ALWAYS, 1),
                                    life_of(BASE + BLOCK, BLOCK, 0, ALWAYS, 2)};
    mm_attribution *a = attribution_of(lives, 2);
    const mm_event events[] = {event_of(MM_CALL, 5, BASE + MIB, BLOCK),
                               event_of(MM_CALL, 6, 0, 0)};
    const mm_sums_row *rows;
    mm_event_list pieces = {0};

    add(a, 0, events, 2, &pieces);
    CHECK_EQUAL(pieces.count, 3);
    check_piece(&pieces, 0, 0, BASE + MIB, MIB);
    check_piece(&pieces, 1, 1, BASE + BLOCK, MIB);
    check_piece(&pieces, 2, MM_NO_MEMORY_INDEX, 0, 0);
    CHECK_EQUAL(mm_attribution_rows(a, &rows), 0);
    CHECK_EQUAL(memory_count(a), 2);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
time_of_moves_is_united(void)
{
    const mm_life_record lives[] = {life_of(BASE, BLOCK, 0, ALWAYS, 1),
                                    life_of(BASE + BLOCK, BLOCK, 0, ALWAYS, 2)};
    mm_attribution *a = attribution_of(lives, 2);
    const mm_event first[] = {
        move_of(100, 200, BASE, PAGE, 0, 1),         move_of(150, 180, BASE, PAGE, 0, 1),
        move_of(150, 260, BASE + BLOCK, PAGE, 0, 1), move_of(400, 500, BASE, PAGE, 0, 1),
        move_of(300, 350, BASE, PAGE, 0, 1), /* late, but sorted */
    };
    /* Late by a call: between the last two intervals, then across the last one. */
    const mm_event second[] = {move_of(360, 380, BASE, PAGE, 0, 1)};
    const mm_event third[] = {move_of(390, 410, BASE, PAGE, 0, 1)};
    const mm_event fourth[] = {move_of(340, 510, BASE, PAGE, 0, 1)};

    add(a, 0, first, 5, NULL);
    CHECK_EQUAL(sums_of(a, 0, 0).move_time, 100 + 50 + 100);
    CHECK_EQUAL(sums_of(a, 0, 1).move_time, 110);
    CHECK_EQUAL(sums_of(a, 0, TOTAL).move_time, 160 + 50 + 100);
    add(a, 0, second, 1, NULL);
    CHECK_EQUAL(sums_of(a, 0, 0).move_time, 250 + 20);
    add(a, 0, third, 1, NULL);
    CHECK_EQUAL(sums_of(a, 0, 0).move_time, 270 + 10);
    add(a, 0, fourth, 1, NULL); /* what lies before the last late one is taken as counted */
    CHECK_EQUAL(sums_of(a, 0, 0).move_time, 280 + 10 + 10);
    mm_attribution_free(a);
}

static void
parts_have_their_own_sums(void)
{
    const mm_life_record life = life_of(BASE, BLOCK, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event go = up(100, BASE, PAGE), back = down(200, BASE, PAGE);

    for (int round = 0; round < 3; round++) {
        for (uint32_t part = 0; part < 4; part++) {
            add(a, part * 5, &go, 1, NULL);
        }
    }
    for (uint32_t part = 0; part < 4; part++) {
        CHECK_EQUAL(sums_of(a, part * 5, 0).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], 3 * PAGE);
        CHECK_EQUAL(sums_of(a, part * 5, TOTAL).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], 3 * PAGE);
    }
    add(a, 20, &back, 1, NULL); /* it went up in another part */
    CHECK_EQUAL(turned_back(a, 20, 0), 0);
    CHECK_EQUAL(turned_across(a, 20, 0), PAGE);
    add(a, 20, &go, 1, NULL);
    CHECK_EQUAL(turned_back(a, 20, 0), PAGE);
    CHECK_EQUAL(turned_across(a, 20, 0), PAGE);
    CHECK_EQUAL(turned_across(a, 20, TOTAL), PAGE);
    check_invariant(a);
    mm_attribution_free(a);
}

/* --- pages that turn back ------------------------------------------------------------------- */

static void
pages_turn_back(void)
{
    const mm_life_record life = life_of(BASE, 64 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event events[] = {
        up(100, BASE + MIB, 8 * MIB), /* 0 */
        up(200, BASE, 4 * MIB), /* 0: once more */
        down(300, BASE + MIB / 2, 4 * MIB), /* all of it was up */
        down(400, BASE, 16 * MIB), /* 0.5 MiB below, 4.5 MiB above, 7 MiB new */
        up(500, BASE + 3 * PAGE, 2 * PAGE), /* both */
        up(600, BASE + 3 * PAGE, 3 * PAGE), /* one */
        move_of(700, 710, BASE + 20 * MIB, PAGE, 0, 1),
        move_of(800, 810, BASE + 20 * MIB, PAGE, 1, 2),
        move_of(900, 910, BASE + 20 * MIB, PAGE, 2, 0), /* turns */
        move_of(950, 960, BASE + 20 * MIB, PAGE, 0, 0),
        move_of(960, 970, BASE + 20 * MIB, PAGE, 0, MM_ON_HOST),
        up(1000, BASE + 20 * MIB, PAGE), /* turns */
    };
    uint64_t expected = 0;

    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        const uint64_t turns[] = {0, 0, 4 * MIB, MIB / 2 + 9 * MIB / 2, 2 * PAGE, PAGE, 0, 0, PAGE,
                                  0, 0, PAGE};
        expected += turns[i];
        add(a, 0, &events[i], 1, NULL);
        CHECK_EQUAL(turned_back(a, 0, 0), expected);
    }
    CHECK_EQUAL(turned_back(a, 0, TOTAL), expected);
    mm_attribution_free(a);
}

static void
pages_turn_back_across_parts(void)
{
    const mm_life_record life = life_of(BASE, 64 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event first[] = {up(100, BASE, 4 * MIB), down(200, BASE, PAGE)};
    const mm_event second[] = {
        down(300, BASE, 6 * MIB), /* all but one page of 4 MiB across; 2 MiB are new */
        up(400, BASE + 100, 2 * PAGE), /* within */
        down(500, BASE + 10 * MIB, PAGE), /* new */
    };
    const mm_event third[] = {
        up(600, BASE + 2 * PAGE + 100,
           PAGE), /* bytes of two pages: one up since the second part */
        down(700, BASE + PAGE, PAGE), /* it was up since the second part */
        up(800, BASE + PAGE, PAGE), /* within */
    };

    add(a, 0, first, 2, NULL);
    CHECK_EQUAL(turned_back(a, 0, 0), PAGE);
    CHECK_EQUAL(turned_across(a, 0, 0), 0);
    add(a, 1, second, 3, NULL);
    CHECK_EQUAL(turned_back(a, 1, 0), 2 * PAGE);
    CHECK_EQUAL(turned_across(a, 1, 0), 4 * MIB - PAGE);
    add(a, 2, third, 3, NULL);
    CHECK_EQUAL(turned_back(a, 2, 0), PAGE);
    CHECK_EQUAL(turned_across(a, 2, 0), 100 + PAGE);
    for (uint32_t part = 0; part < 3; part++) {
        CHECK_EQUAL(turned_across(a, part, TOTAL), turned_across(a, part, 0));
    }
    mm_attribution_free(a);
}

/* A part sees its own moves as a trace of that part alone does, and all parts together see what one
 * part of all moves sees. */
static void
parts_divide_what_turns_back(void)
{
    enum { PARTS = 9, MOVES = 40 };
    const mm_life_record life = life_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *divided = attribution_of(&life, 1), *whole = attribution_of(&life, 1);
    uint64_t within = 0, across = 0, seed = 7;

    for (uint32_t part = 0; part < PARTS; part++) {
        mm_attribution *alone = attribution_of(&life, 1);
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

static void
pages_turn_back_byte_by_byte(void)
{
    /* Two memories share the second page; the third memory has a part of the third page. */
    const mm_life_record lives[] = {life_of(BASE, PAGE + 1000, 0, ALWAYS, 1),
                                    life_of(BASE + PAGE + 1000, PAGE, 0, ALWAYS, 2),
                                    life_of(BASE + 2 * PAGE + 1000, 24, 0, ALWAYS, 3)};
    mm_attribution *a = attribution_of(lives, 3), *again = attribution_of(lives, 3);
    const mm_event events[] = {up(100, BASE, 2 * PAGE + 1024), down(200, BASE, 2 * PAGE + 1024),
                               up(300, BASE + 10, 20), down(400, BASE + 15, 2 * PAGE)};
    /* The last one: page 0 from 15 on had gone up, the others had not. */
    const uint64_t turned = 2 * PAGE + 1024 + 20 + PAGE - 15;
    mm_event_list pieces = {0}, same = {0};

    add(a, 0, events, 4, &pieces);
    CHECK_EQUAL(turned_back(a, 0, TOTAL), turned);
    CHECK_EQUAL(turned_back(a, 0, 0), PAGE + 1000 + 20 + PAGE - 15);
    CHECK_EQUAL(turned_back(a, 0, 1), PAGE);
    CHECK_EQUAL(turned_back(a, 0, 2), 24);
    CHECK_EQUAL(pieces.count, 3 + 3 + 1 + 2);
    for (size_t i = 0; i < pieces.count; i++) { /* one call each */
        add(again, 0, &pieces.items[i], 1, &same);
    }
    CHECK_EQUAL(turned_back(again, 0, TOTAL), turned);
    CHECK_EQUAL(same.count, pieces.count);
    CHECK(memcmp(same.items, pieces.items, same.count * sizeof *same.items) == 0);
    free(pieces.items);
    free(same.items);
    mm_attribution_free(a);
    mm_attribution_free(again);
}

static void
a_later_move_on_the_same_page_is_another_one(void)
{
    const mm_life_record life = life_of(BASE, BLOCK, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event events[] = {up(100, BASE, PAGE), down(200, BASE, 100),
                               down(300, BASE + 100, 100), down(300, BASE + 200, 100)};

    add(a, 0, events, 4, NULL);
    CHECK_EQUAL(turned_back(a, 0, 0), 100);
    mm_attribution_free(a);
}

static void
a_block_takes_less_than_300_bytes(void)
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

/* --- borders -------------------------------------------------------------------------------- */

static void
records_are_divided_at_borders(void)
{
    const mm_life_record lives[] = {life_of(BASE, 3 * PAGE, 0, ALWAYS, 1),
                                    life_of(BASE + 3 * PAGE, 100, 0, ALWAYS, 2),
                                    life_of(BASE + 4 * PAGE, PAGE, 0, ALWAYS, 3)};
    mm_attribution *a = attribution_of(lives, 3);
    const mm_event_kind kinds[] = {MM_MOVE,      MM_REMOTE_MAP, MM_THRASHING,
                                   MM_DUPLICATE, MM_EVICTION,   MM_DUPLICATE_END};
    mm_event_list pieces = {0};
    mm_sums sums;

    for (size_t k = 0; k < 6; k++) {
        mm_event e = event_of(kinds[k], k, BASE + PAGE, 5 * PAGE);
        e.extra = 77;
        add(a, 0, &e, 1, &pieces);
        CHECK_EQUAL(pieces.count, 5);
        check_piece(&pieces, 0, 0, BASE + PAGE, 2 * PAGE);
        check_piece(&pieces, 1, 1, BASE + 3 * PAGE, 100);
        check_piece(&pieces, 2, 3, BASE + 3 * PAGE + 100, PAGE - 100);
        check_piece(&pieces, 3, 2, BASE + 4 * PAGE, PAGE);
        check_piece(&pieces, 4, 3, BASE + 5 * PAGE, PAGE);
        for (size_t i = 0; i < 5; i++) {
            CHECK_EQUAL(pieces.items[i].start, k);
            CHECK_EQUAL(pieces.items[i].kind, kinds[k]);
            CHECK_EQUAL(pieces.items[i].extra, 77);
        }
        pieces.count = 0;
    }
    CHECK_EQUAL(memory_at(a, 3)->kind, MM_MEMORY_UNKNOWN);
    CHECK_EQUAL(memory_at(a, 3)->start, BASE);
    CHECK_EQUAL(memory_at(a, 3)->size, BLOCK);
    sums = sums_of(a, 0, 3);
    CHECK_EQUAL(sums.evicted, 2 * PAGE - 100);
    sums = sums_of(a, 0, TOTAL);
    CHECK_EQUAL(moved_by(&sums), 5 * PAGE);
    CHECK_EQUAL(sums.evicted, 5 * PAGE);
    check_invariant(a);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
unknown_blocks_are_joined(void)
{
    mm_attribution *a = attribution_of(NULL, 0);
    mm_event events[5];
    mm_event_list pieces = {0};
    const mm_event beside = up(9, BASE + 5 * BLOCK, PAGE), bridge = up(9, BASE + BLOCK, BLOCK);

    for (size_t i = 0; i < 5; i++) { /* the blocks 4, 2, 3 and, apart, 8 and 9 */
        const uint64_t blocks[] = {4, 2, 3, 8, 9};
        events[i] = up(i, BASE + blocks[i] * BLOCK + PAGE, PAGE);
    }
    add(a, 0, events, 5, &pieces);
    CHECK_EQUAL(memory_count(a), 2);
    CHECK_EQUAL(memory_at(a, 0)->start, BASE + 2 * BLOCK);
    CHECK_EQUAL(memory_at(a, 0)->size, 3 * BLOCK);
    CHECK_EQUAL(memory_at(a, 1)->size, 2 * BLOCK);
    CHECK_EQUAL(memory_at(a, 1)->died, ALWAYS);
    CHECK(memory_at(a, 1)->label == NULL);
    for (size_t i = 0; i < 5; i++) {
        CHECK_EQUAL(pieces.items[i].memory, i < 3 ? 0 : 1);
    }
    add(a, 0, &beside, 1, NULL);
    add(a, 0, &bridge, 1, NULL);
    CHECK_EQUAL(memory_count(a), 2);
    CHECK_EQUAL(memory_at(a, 0)->start, BASE + BLOCK);
    CHECK_EQUAL(memory_at(a, 0)->size, 5 * BLOCK);
    check_invariant(a);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
addresses_end_somewhere(void)
{
    const mm_life_record life = life_of(UINT64_MAX - PAGE, 2 * PAGE, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event events[] = {
        up(1, UINT64_MAX - 2 * PAGE, 4 * PAGE),    up(1, UINT64_MAX - PAGE, 2 * PAGE),
        event_of(MM_HOST_FAULT, 2, UINT64_MAX, 1), event_of(MM_HOST_FAULT, 3, UINT64_MAX - 1, 1),
        event_of(MM_EVENT_KINDS, 3, BASE, 1),      event_of(200, 3, BASE, 1)};
    mm_sums sums;

    add(a, 0, events, 6, NULL);
    sums = sums_of(a, 0, 0);
    CHECK_EQUAL(moved_by(&sums), 2 * PAGE); /* the second one is cut */
    CHECK_EQUAL(sums.host_faults, 1);
    sums = sums_of(a, 0, TOTAL);
    CHECK_EQUAL(moved_by(&sums), 3 * PAGE);
    check_invariant(a);
    mm_attribution_free(a);
}

/* --- times ---------------------------------------------------------------------------------- */

static uint32_t
memory_of_fault(mm_attribution *a, uint64_t time, uint64_t address)
{
    const mm_event fault = event_of(MM_HOST_FAULT, time, address, 1);
    mm_event_list pieces = {0};
    uint32_t memory;

    add(a, 0, &fault, 1, &pieces);
    CHECK_EQUAL(pieces.count, 1);
    memory = pieces.items[0].memory;
    free(pieces.items);
    return memory;
}

static void
addresses_have_one_life_after_the_other(void)
{
    const uint64_t t = 1000000;
    const mm_life_record lives[] = {life_of(BASE, MIB, t, 2 * t, 1),
                                    life_of(BASE + PAGE, MIB, 2 * t + 500, 3 * t, 2),
                                    life_of(BASE, 3 * PAGE, 3 * t + 10000, ALWAYS, 3)};
    mm_attribution *a = attribution_of(lives, 3);
    const uint64_t at = BASE + 2 * PAGE;

    CHECK_EQUAL(memory_of_fault(a, t - MARGIN, at), 0);
    CHECK_EQUAL(memory_of_fault(a, t - MARGIN - 1, at), 3); /* unknown */
    CHECK_EQUAL(memory_of_fault(a, 2 * t, at), 0);
    CHECK_EQUAL(mm_attribution_ambiguous(a), 0);
    CHECK_EQUAL(memory_of_fault(a, 2 * t + 1, at), 1); /* between both: the later */
    CHECK_EQUAL(mm_attribution_ambiguous(a), 1);
    CHECK_EQUAL(memory_of_fault(a, 2 * t + 500, at), 1);
    CHECK_EQUAL(memory_of_fault(a, 2 * t + 1, BASE), 0); /* only the first has it */
    CHECK_EQUAL(mm_attribution_ambiguous(a), 1);
    CHECK_EQUAL(memory_of_fault(a, 3 * t + MARGIN, at), 1);
    CHECK_EQUAL(memory_of_fault(a, 3 * t + MARGIN + 1, at), 3);
    CHECK_EQUAL(memory_of_fault(a, 3 * t + 10000 - MARGIN, at), 2);
    CHECK_EQUAL(memory_of_fault(a, UINT64_MAX, at), 2);
    CHECK_EQUAL(memory_of_fault(a, t, at), 0); /* and back in time */
    CHECK_EQUAL(memory_of_fault(a, 0, at), 3);
    CHECK_EQUAL(mm_attribution_ambiguous(a), 1);
    mm_attribution_free(a);
}

static void
the_later_of_nested_lives_has_the_address(void)
{
    /* Many parts of one allocation, as to_managed makes them, and a part of a part. */
    enum { PARTS = 50 };
    mm_life_record lives[PARTS + 2];
    mm_attribution *a;
    const mm_event move = up(5, BASE, 2 * PARTS * PAGE);
    mm_event_list pieces = {0};

    lives[0] = life_of(BASE, 2 * PARTS * PAGE, 0, ALWAYS, 1);
    for (size_t i = 1; i <= PARTS; i++) { /* with a page between them */
        lives[i] = life_of(BASE + (2 * i - 2) * PAGE, PAGE, 0, ALWAYS, 1 + i);
    }
    lives[PARTS + 1] = life_of(BASE + 100, 8, 0, ALWAYS, 99);
    a = attribution_of(lives, PARTS + 2);
    add(a, 0, &move, 1, &pieces);
    CHECK_EQUAL(pieces.count, 2 + 2 * PARTS);
    check_piece(&pieces, 0, 1, BASE, 100);
    check_piece(&pieces, 1, PARTS + 1, BASE + 100, 8);
    check_piece(&pieces, 2, 1, BASE + 108, PAGE - 108);
    for (size_t i = 2; i <= PARTS; i++) {
        check_piece(&pieces, 2 * i - 1, 0, BASE + (2 * i - 3) * PAGE, PAGE);
        check_piece(&pieces, 2 * i, (uint32_t)i, BASE + (2 * i - 2) * PAGE, PAGE);
    }
    CHECK_EQUAL(mm_attribution_ambiguous(a), 0);
    check_invariant(a);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
many_lives_at_one_address_cost_little(void)
{
    enum { COUNT = 20000 };
    mm_life_record *lives = calloc(COUNT, sizeof *lives);
    mm_event *faults = calloc(COUNT, sizeof *faults);
    mm_event_list pieces = {0};
    mm_attribution *a;

    /* A scan of all of them for each event would take minutes. */
    for (size_t i = 0; i < COUNT; i++) {
        lives[i] = life_of(BASE, (1 + i % 7) * PAGE, 10000 * i, 10000 * i + 5000, i);
        faults[i] = event_of(MM_DEVICE_FAULT, 10000 * i + 2500, BASE, 1);
    }
    a = attribution_of(lives, COUNT);
    add(a, 0, faults, COUNT, &pieces);
    CHECK_EQUAL(pieces.count, COUNT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_EQUAL(pieces.items[i].memory, i);
    }
    free(pieces.items);
    free(faults);
    free(lives);
    mm_attribution_free(a);
}

/* --- names, growth -------------------------------------------------------------------------- */

static void
names_come_before_lives(void)
{
    const mm_life_record life = life_of(BASE, 8 * PAGE, 1000000, ALWAYS, 1);
    mm_named_range named[] = {{BASE + PAGE, 4 * PAGE, "first"},
                              {BASE + 2 * PAGE, PAGE, "inner"},
                              {BASE + 4 * PAGE, 2 * PAGE, "last"},
                              {BASE, 0, "empty"}};
    mm_attribution *a = attribution_of(&life, 1);
    const mm_event move = up(2000000, BASE, 9 * PAGE);
    mm_event_list pieces = {0};
    mm_status st;

    CHECK_OK(mm_attribution_set_memories(a, &life, 1, named, 4, &st), &st);
    add(a, 0, &move, 1, &pieces);
    CHECK_EQUAL(pieces.count, 7);
    check_piece(&pieces, 0, 0, BASE, PAGE);
    check_piece(&pieces, 1, 1, BASE + PAGE, PAGE);
    check_piece(&pieces, 2, 2, BASE + 2 * PAGE, PAGE);
    check_piece(&pieces, 3, 1, BASE + 3 * PAGE, PAGE);
    check_piece(&pieces, 4, 3, BASE + 4 * PAGE, 2 * PAGE);
    check_piece(&pieces, 5, 0, BASE + 6 * PAGE, 2 * PAGE);
    check_piece(&pieces, 6, 5, BASE + 8 * PAGE, PAGE);
    CHECK_EQUAL(memory_at(a, 3)->kind, MM_MEMORY_NAMED);
    CHECK(strcmp(memory_at(a, 3)->label, "last") == 0);
    CHECK_EQUAL(memory_at(a, 3)->size, 2 * PAGE);
    CHECK_EQUAL(memory_of_fault(a, 5, BASE + PAGE), 1); /* at all times */
    check_invariant(a);
    /* Another name in the place of the second one, and one fewer. */
    named[1] = (mm_named_range){BASE + PAGE, 4 * PAGE, "new"};
    CHECK_OK(mm_attribution_set_memories(a, &life, 1, named, 2, &st), &st);
    CHECK_EQUAL(memory_of_fault(a, 2000000, BASE + PAGE), 6);
    CHECK_EQUAL(memory_of_fault(a, 2000000, BASE + 5 * PAGE), 0);
    CHECK(strcmp(memory_at(a, 6)->label, "new") == 0);
    CHECK(strcmp(memory_at(a, 2)->label, "inner") == 0);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
memories_keep_their_indices(void)
{
    char first[] = "a", second[] = "b", third[] = "c";
    mm_life_record lives[3] = {life_of(BASE, PAGE, 0, ALWAYS, 1),
                               life_of(BASE + BLOCK, PAGE, 0, ALWAYS, 2),
                               life_of(BASE, PAGE, 60000, ALWAYS, 3)};
    const mm_named_range named[] = {{BASE + 8 * BLOCK, PAGE, "n"}, {BASE + 9 * BLOCK, PAGE, "m"}};
    mm_attribution *a;
    mm_status st;

    lives[0].label = first;
    lives[1].label = second;
    lives[2].label = third;
    a = attribution_of(lives, 2);
    CHECK_OK(mm_attribution_set_memories(a, lives, 2, named, 1, &st), &st);
    CHECK_EQUAL(memory_of_fault(a, 5, BASE + 4 * BLOCK), 3); /* unknown */
    first[0] = 'A'; /* copied before */
    CHECK(strcmp(memory_at(a, 0)->label, "a") == 0);
    lives[0].died = 50000;
    CHECK_OK(mm_attribution_set_memories(a, lives, 3, named, 2, &st), &st);
    CHECK_EQUAL(memory_count(a), 6);
    CHECK_EQUAL(memory_at(a, 0)->died, 50000);
    CHECK(strcmp(memory_at(a, 0)->label, "A") == 0);
    CHECK(strcmp(memory_at(a, 1)->label, "b") == 0);
    CHECK(strcmp(memory_at(a, 4)->label, "c") == 0);
    CHECK(strcmp(memory_at(a, 2)->label, "n") == 0);
    CHECK(strcmp(memory_at(a, 5)->label, "m") == 0);
    CHECK_EQUAL(memory_at(a, 4)->serial, 3);
    CHECK_EQUAL(memory_at(a, 4)->born, 60000);
    CHECK_EQUAL(memory_of_fault(a, 100000, BASE), 4);
    CHECK_EQUAL(memory_of_fault(a, 100, BASE), 0);
    CHECK_EQUAL(memory_of_fault(a, 100, BASE + BLOCK), 1);
    CHECK_EQUAL(memory_of_fault(a, 100, BASE + 4 * BLOCK), 3);
    CHECK_EQUAL(memory_of_fault(a, 100, BASE + 9 * BLOCK), 5);
    mm_attribution_free(a);
}

/* --- foreign memory ------------------------------------------------------------------------- */

static void
foreign_allocations_are_found(void)
{
    static allocations known;
    const mm_life_record lives[] = {life_of(BASE, MIB, 0, 10000, 1),
                                    life_of(BASE + 64 * BLOCK, MIB, 50000, ALWAYS, 2)};
    mm_attribution *a = attribution_of(lives, 2);
    const mm_event events[] = {
        up(100000, BASE, BLOCK), /* the first life is dead: all of it is foreign now */
        event_of(MM_HOST_FAULT, 100000, BASE + 4 * BLOCK + 12345, 1),
        event_of(MM_HOST_FAULT, 100, BASE + 64 * BLOCK, 1), /* before the second one's birth */
        event_of(MM_CALL, 100000, BASE + 10 * BLOCK, BLOCK),
        up(100, BASE, BLOCK), /* the life has half of it */
    };
    mm_event_list pieces = {0};
    size_t asked;

    known = (allocations){.items = {{BASE - BLOCK, 2 * BLOCK},
                                    {BASE + 4 * BLOCK + 12000, 700},
                                    {BASE + 64 * BLOCK, MIB},
                                    {BASE + 10 * BLOCK + MIB, 64 * KIB}},
                          .count = 4};
    find_foreign(a, events, 5, &known);
    CHECK_EQUAL(memory_count(a), 5);
    CHECK_EQUAL(memory_at(a, 2)->kind, MM_MEMORY_FOREIGN);
    CHECK_EQUAL(memory_at(a, 2)->start, BASE - BLOCK);
    CHECK_EQUAL(memory_at(a, 2)->size, 2 * BLOCK);
    CHECK_EQUAL(memory_at(a, 2)->died, ALWAYS);
    CHECK_EQUAL(memory_at(a, 3)->size, 700);
    CHECK_EQUAL(memory_at(a, 4)->start, BASE + 10 * BLOCK + MIB);
    asked = known.asked;
    /* For each MiB that nobody has: 13 small steps, 6 longer ones, then every 64 KiB. */
    CHECK(asked <= 3 + 2 * (13 + 6 + 16) + 2);
    find_foreign(a, events, 5, &known);
    CHECK_EQUAL(known.asked, asked);
    add(a, 0, events, 5, &pieces);
    CHECK_EQUAL(pieces.count, 2 + 1 + 1 + 3 + 1);
    check_piece(&pieces, 0, 6, BASE + 64 * BLOCK, 1); /* of a life that has ended */
    check_piece(&pieces, 1, 0, BASE, MIB);
    check_piece(&pieces, 2, 2, BASE + MIB, MIB);
    check_piece(&pieces, 3, 2, BASE, BLOCK);
    check_piece(&pieces, 4, 3, BASE + 4 * BLOCK + 12345, 1);
    check_piece(&pieces, 6, 4, BASE + 10 * BLOCK + MIB, 64 * KIB);
    CHECK_EQUAL(memory_at(a, 5)->kind, MM_MEMORY_UNKNOWN);
    CHECK_EQUAL(memory_at(a, 6)->start, BASE + 64 * BLOCK);
    check_invariant(a);
    free(pieces.items);
    mm_attribution_free(a);
}

static void
small_foreign_allocations_share_pages(void)
{
    static allocations known;
    mm_attribution *a = attribution_of(NULL, 0);
    const mm_event move = up(5, BASE, 128 * KIB);
    uint64_t bytes = 0;
    mm_sums sums;

    known.count = known.asked = 0;
    for (uint64_t at = 0; at < 128 * KIB; at += 512 * (1 + at / 512 % 10)) {
        known.items[known.count].start = BASE + at;
        known.items[known.count++].size = 300;
        bytes += 300;
    }
    CHECK(known.count > 20);
    find_foreign(a, &move, 1, &known);
    CHECK_EQUAL(memory_count(a), known.count);
    add(a, 0, &move, 1, NULL);
    sums = sums_of(a, 0, (uint32_t)known.count); /* unknown */
    CHECK_EQUAL(moved_by(&sums), 128 * KIB - bytes);
    check_invariant(a);
    mm_attribution_free(a);
}

/* Answers that are no allocation around the address, or that contradict others. */
static bool
find_nonsense(void *context, CUdeviceptr address, CUdeviceptr *start, size_t *size)
{
    size_t *calls = context;
    const uint64_t starts[] = {address + 1, address - PAGE, address, address - PAGE, UINT64_MAX};
    const size_t sizes[] = {PAGE, PAGE, 0, SIZE_MAX, SIZE_MAX};

    *start = starts[*calls % 5];
    *size = sizes[*calls % 5];
    ++*calls;
    return true;
}

static void
foreign_nonsense_is_unknown(void)
{
    static allocations known;
    mm_attribution *a = attribution_of(NULL, 0);
    const mm_event move = up(5, BASE, 16 * BLOCK), fault = event_of(MM_HOST_FAULT, 5, BASE, 1);
    const mm_event other = event_of(MM_HOST_FAULT, 5, BASE + 3 * PAGE, 1);
    size_t calls = 0;
    mm_status st;

    CHECK_OK(mm_attribution_find_foreign(a, &move, 1, find_nonsense, &calls, &st), &st);
    CHECK(calls > 100);
    CHECK_EQUAL(memory_count(a), 0);
    mm_attribution_free(a);
    /* An allocation that overlaps an earlier answer, which was freed meanwhile. */
    a = attribution_of(NULL, 0);
    known = (allocations){.items = {{BASE, 2 * PAGE}}, .count = 1};
    find_foreign(a, &fault, 1, &known);
    known.items[0].size = 4 * PAGE;
    find_foreign(a, &other, 1, &known);
    CHECK_EQUAL(memory_count(a), 1);
    CHECK_EQUAL(memory_at(a, 0)->size, 2 * PAGE);
    CHECK_EQUAL(known.asked, 2);
    mm_attribution_free(a);
}

/* --- merging -------------------------------------------------------------------------------- */

static void
merging_adds_sums(void)
{
    static allocations known;
    mm_life_record lives[] = {life_of(BASE, BLOCK, 0, ALWAYS, 1),
                              life_of(BASE + BLOCK, BLOCK, 0, 60000, 2),
                              life_of(BASE + BLOCK, BLOCK, 60001, ALWAYS, 3)};
    const mm_named_range named[] = {{BASE, PAGE, "n"}};
    mm_event first[] = {up(10, BASE, 2 * BLOCK), up(10, BASE + 10 * BLOCK, 4 * BLOCK)};
    mm_event second[] = {down(20, BASE, 2 * BLOCK), down(20, BASE + 12 * BLOCK, 3 * BLOCK),
                         up(20, BASE + 20 * BLOCK, BLOCK), up(20, BASE + 30 * BLOCK, BLOCK)};
    mm_attribution *a = attribution_of(NULL, 0), *other = attribution_of(lives, 2);
    mm_status st;

    known = (allocations){.items = {{BASE + 20 * BLOCK, BLOCK}}, .count = 1};
    CHECK_OK(mm_attribution_set_memories(a, lives, 3, named, 1, &st), &st);
    add(a, 0, first, 2, NULL);
    find_foreign(a, &second[2], 1, &known);
    known = (allocations){.items = {{BASE + 30 * BLOCK, BLOCK}}, .count = 1};
    find_foreign(other, &second[3], 1, &known);
    add(other, 0, second, 4, NULL);
    add(other, 7, second, 4, NULL);
    CHECK_OK(mm_attribution_merge(a, other, &st), &st);
    CHECK_EQUAL(sums_of(a, 0, 0).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], BLOCK - PAGE);
    CHECK_EQUAL(sums_of(a, 0, 0).moved[MM_TO_HOST][MM_CAUSE_FAULT], BLOCK);
    CHECK_EQUAL(sums_of(a, 7, 0).moved[MM_TO_HOST][MM_CAUSE_FAULT], BLOCK);
    CHECK_EQUAL(sums_of(a, 0, 1).moved[MM_TO_HOST][MM_CAUSE_FAULT], BLOCK);
    CHECK_EQUAL(sums_of(a, 0, 3).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], PAGE);
    /* The unknown memory of both is one, now longer; the foreign one of `a` has the block that is
     * unknown in the other. */
    CHECK_EQUAL(memory_count(a), 7);
    CHECK_EQUAL(memory_at(a, 4)->size, 5 * BLOCK);
    CHECK_EQUAL(sums_of(a, 0, 4).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], 4 * BLOCK);
    CHECK_EQUAL(sums_of(a, 0, 4).moved[MM_TO_HOST][MM_CAUSE_FAULT], 3 * BLOCK);
    CHECK_EQUAL(memory_at(a, 5)->kind, MM_MEMORY_FOREIGN);
    CHECK_EQUAL(sums_of(a, 7, 5).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], BLOCK);
    CHECK_EQUAL(memory_at(a, 6)->start, BASE + 30 * BLOCK);
    CHECK_EQUAL(sums_of(a, 7, 6).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], BLOCK);
    CHECK_EQUAL(sums_of(a, 0, TOTAL).moved[MM_TO_HOST][MM_CAUSE_FAULT], 5 * BLOCK);
    CHECK_EQUAL(sums_of(a, 0, TOTAL).move_time, 20);
    check_invariant(a);
    mm_attribution_free(other);
    mm_attribution_free(a);
}

static void
merging_into_nothing_copies(void)
{
    const mm_life_record life = life_of(BASE, BLOCK, 0, ALWAYS, 1);
    const mm_named_range named = {BASE, PAGE, "n"};
    const mm_event move = up(10, BASE, 3 * BLOCK);
    mm_attribution *a = attribution_of(NULL, 0), *other = attribution_of(NULL, 0);
    const mm_sums_row *rows, *copied;
    mm_status st;
    size_t count;

    CHECK_OK(mm_attribution_set_memories(other, &life, 1, &named, 1, &st), &st);
    add(other, 2, &move, 1, NULL);
    CHECK_OK(mm_attribution_merge(a, other, &st), &st);
    count = mm_attribution_rows(other, &rows);
    CHECK_EQUAL(count, 4);
    CHECK_EQUAL(mm_attribution_rows(a, &copied), count);
    CHECK(memcmp(rows, copied, count * sizeof *rows) == 0);
    CHECK_EQUAL(memory_count(a), 3);
    CHECK(strcmp(memory_at(a, 1)->label, "n") == 0 && memory_at(a, 1)->label != named.label);
    CHECK_OK(mm_attribution_merge(a, other, &st), &st);
    CHECK_EQUAL(memory_count(a), 3);
    CHECK_EQUAL(sums_of(a, 2, 1).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], 2 * PAGE);
    mm_attribution_free(other);
    mm_attribution_free(a);
}

int
main(void)
{
    static const check_test tests[] = {
        CHECK_TEST(each_kind_counts_in_its_sum),
        CHECK_TEST(calls_belong_to_memories_and_count_in_no_sum),
        CHECK_TEST(time_of_moves_is_united),
        CHECK_TEST(parts_have_their_own_sums),
        CHECK_TEST(pages_turn_back),
        CHECK_TEST(pages_turn_back_across_parts),
        CHECK_TEST(parts_divide_what_turns_back),
        CHECK_TEST(pages_turn_back_byte_by_byte),
        CHECK_TEST(a_later_move_on_the_same_page_is_another_one),
        CHECK_TEST(a_block_takes_less_than_300_bytes),
        CHECK_TEST(records_are_divided_at_borders),
        CHECK_TEST(unknown_blocks_are_joined),
        CHECK_TEST(addresses_end_somewhere),
        CHECK_TEST(addresses_have_one_life_after_the_other),
        CHECK_TEST(the_later_of_nested_lives_has_the_address),
        CHECK_TEST(many_lives_at_one_address_cost_little),
        CHECK_TEST(names_come_before_lives),
        CHECK_TEST(memories_keep_their_indices),
        CHECK_TEST(foreign_allocations_are_found),
        CHECK_TEST(small_foreign_allocations_share_pages),
        CHECK_TEST(foreign_nonsense_is_unknown),
        CHECK_TEST(merging_adds_sums),
        CHECK_TEST(merging_into_nothing_copies),
    };

    return check_run(tests, sizeof tests / sizeof *tests);
}
