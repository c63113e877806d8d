/* test_attribution.c: the sums of events and of parts, and merging sums, against arithmetic. Needs no
 * driver. */
#include "attributed_events.h"
#include "trace/host_views.h"

/* --- sums ----------------------------------------------------------------------------------- */

/* What random traces do not have: a cause that is not known, and a move to an unknown processor. */
TEST(unknown_causes_and_processors_count)
{
    const mm_allocation_record record = record_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
    mm_event events[] = {up(100, BASE, PAGE),
                         move_of(320, 350, BASE, 5 * PAGE, 1, MM_OTHER_PROCESSOR)};
    mm_sums sums;

    events[0].cause = 77;
    add(a, 0, events, 2, NULL);
    sums = sums_of(a, 0, 0);
    CHECK_EQUAL(sums.moved[MM_TO_DEVICE][MM_CAUSE_UNKNOWN], PAGE);
    CHECK_EQUAL(sums.moved[MM_BETWEEN_DEVICES][MM_CAUSE_FAULT], 5 * PAGE);
    mm_attribution_free(a);
}

TEST(calls_belong_to_memories_and_count_in_no_sum)
{
    const mm_allocation_record records[] = {record_of(BASE, BLOCK, 0, ALWAYS, 1),
                                            record_of(BASE + BLOCK, BLOCK, 0, ALWAYS, 2)};
    mm_attribution *a = attribution_of(records, 2);
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

TEST(time_of_moves_is_united)
{
    const mm_allocation_record records[] = {record_of(BASE, BLOCK, 0, ALWAYS, 1),
                                            record_of(BASE + BLOCK, BLOCK, 0, ALWAYS, 2)};
    mm_attribution *a = attribution_of(records, 2);
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

TEST(parts_have_their_own_sums)
{
    const mm_allocation_record record = record_of(BASE, BLOCK, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
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

/* --- merging -------------------------------------------------------------------------------- */

TEST(merging_adds_sums)
{
    static allocations known;
    mm_allocation_record records[] = {record_of(BASE, BLOCK, 0, ALWAYS, 1),
                                      record_of(BASE + BLOCK, BLOCK, 0, 60000, 2),
                                      record_of(BASE + BLOCK, BLOCK, 60001, ALWAYS, 3)};
    const mm_named_range named[] = {{BASE, PAGE, "n"}};
    mm_event first[] = {up(10, BASE, 2 * BLOCK), up(10, BASE + 10 * BLOCK, 4 * BLOCK)};
    mm_event second[] = {down(20, BASE, 2 * BLOCK), down(20, BASE + 12 * BLOCK, 3 * BLOCK),
                         up(20, BASE + 20 * BLOCK, BLOCK), up(20, BASE + 30 * BLOCK, BLOCK)};
    mm_attribution *a = attribution_of(NULL, 0), *other = attribution_of(records, 2);
    mm_status st;

    known = (allocations){.items = {{BASE + 20 * BLOCK, BLOCK}}, .count = 1};
    CHECK_OK(mm_attribution_set_memories(a, records, 3, named, 1, &st), &st);
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

TEST(merging_into_nothing_copies)
{
    const mm_allocation_record record = record_of(BASE, BLOCK, 0, ALWAYS, 1);
    const mm_named_range named = {BASE, PAGE, "n"};
    const mm_event move = up(10, BASE, 3 * BLOCK);
    mm_attribution *a = attribution_of(NULL, 0), *other = attribution_of(NULL, 0);
    const mm_sums_row *rows, *copied;
    mm_status st;
    size_t count;

    CHECK_OK(mm_attribution_set_memories(other, &record, 1, &named, 1, &st), &st);
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

static mm_event
view_of(uint64_t start, uint64_t end, uint64_t address, uint64_t amount)
{
    mm_event e = event_of(MM_CALL, start, address, amount);

    e.end = end;
    e.cause = MM_QUERY;
    return e;
}

static mm_event
asked(mm_event move)
{
    move.cause = MM_CAUSE_REQUESTED;
    return move;
}

/* Requested moves to the host, in the time and the range of a view. */
TEST(host_views_have_their_moves)
{
    const mm_allocation_record record = record_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
    const mm_event events[] = {
        asked(down(120, BASE, PAGE)), /* the call comes after its moves */
        asked(down(130, BASE + PAGE, 2 * PAGE)),
        asked(down(140, BASE + 4 * MIB, 4 * PAGE)), /* elsewhere */
        asked(up(150, BASE, 8 * PAGE)),
        down(160, BASE, 16 * PAGE), /* by faults */
        asked(down(300, BASE, 32 * PAGE)), /* later */
        asked(down(50, BASE, 64 * PAGE)), /* before */
        asked(down(220, BASE + 6 * MIB, 128 * PAGE)), /* of a second view */
        view_of(110, 200, BASE + 100, 3 * PAGE - 100),
        view_of(115, 250, BASE + 6 * MIB, MIB),
    };
    mm_event_list pieces = {0};
    mm_sums sums;

    add(a, 0, events, sizeof events / sizeof *events, &pieces);
    sums = sums_of(a, 0, 0);
    CHECK_EQUAL(sums.moved[MM_TO_HOST][MM_CAUSE_HOST_VIEW], (1 + 2 + 128) * PAGE);
    CHECK_EQUAL(sums.moved[MM_TO_HOST][MM_CAUSE_REQUESTED], (4 + 32 + 64) * PAGE);
    CHECK_EQUAL(sums.moved[MM_TO_HOST][MM_CAUSE_FAULT], 16 * PAGE);
    CHECK_EQUAL(sums.moved[MM_TO_DEVICE][MM_CAUSE_REQUESTED], 8 * PAGE);
    CHECK_EQUAL(pieces.items[3].cause, MM_CAUSE_HOST_VIEW);
    free(pieces.items);
    mm_attribution_free(a);
}

/* Views beyond the space are not told apart; those that have ended leave theirs. */
TEST(many_host_views_are_bounded)
{
    enum { COUNT = MM_MOST_HOST_VIEWS + 1 };
    const mm_allocation_record record = record_of(BASE, 8 * MIB, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
    mm_event events[2 * COUNT + 2];
    size_t n = 0;

    for (uint64_t i = 0; i < COUNT; i++) {
        events[n++] = view_of(100 + i, 1000, BASE + i * PAGE, PAGE);
    }
    for (uint64_t i = 0; i < COUNT; i++) {
        events[n++] = asked(down(500 + i, BASE + i * PAGE, PAGE));
    }
    events[n++] = view_of(2000, 2100, BASE, PAGE);
    events[n++] = asked(down(2050, BASE, PAGE));
    add(a, 0, events, n, NULL);
    CHECK_EQUAL(sums_of(a, 0, 0).moved[MM_TO_HOST][MM_CAUSE_HOST_VIEW], COUNT * PAGE);
    CHECK_EQUAL(sums_of(a, 0, 0).moved[MM_TO_HOST][MM_CAUSE_REQUESTED], PAGE);
    mm_attribution_free(a);
}

TEST_MAIN(no_driver)
