/* test_attribution_memories.c: the memory of each event: borders between memories, records one
 * after the other, names, foreign and unknown memory. Needs no driver. */
#include "attributed_events.h"

/* --- borders -------------------------------------------------------------------------------- */

TEST(records_are_divided_at_borders)
{
    const mm_allocation_record records[] = {record_of(BASE, 3 * PAGE, 0, ALWAYS, 1),
                                            record_of(BASE + 3 * PAGE, 100, 0, ALWAYS, 2),
                                            record_of(BASE + 4 * PAGE, PAGE, 0, ALWAYS, 3)};
    mm_attribution *a = attribution_of(records, 3);
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

TEST(addresses_end_somewhere)
{
    const mm_allocation_record record = record_of(UINT64_MAX - PAGE, 2 * PAGE, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);
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

TEST(addresses_have_one_owner_after_the_other)
{
    const uint64_t t = 1000000;
    const mm_allocation_record records[] = {record_of(BASE, MIB, t, 2 * t, 1),
                                            record_of(BASE + PAGE, MIB, 2 * t + 500, 3 * t, 2),
                                            record_of(BASE, 3 * PAGE, 3 * t + 10000, ALWAYS, 3)};
    mm_attribution *a = attribution_of(records, 3);
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

TEST(the_later_owner_may_start_below)
{
    const uint64_t t = 1000000;
    const mm_allocation_record records[] = {record_of(BASE + PAGE, MIB, t, 2 * t, 1),
                                            record_of(BASE, MIB, 2 * t + 500, ALWAYS, 2)};
    mm_attribution *a = attribution_of(records, 2);

    CHECK_EQUAL(memory_of_fault(a, 2 * t + 1, BASE + 2 * PAGE), 1); /* between both */
    CHECK_EQUAL(mm_attribution_ambiguous(a), 1);
    mm_attribution_free(a);
}

/* --- names, growth -------------------------------------------------------------------------- */

TEST(names_come_before_allocations)
{
    const mm_allocation_record record = record_of(BASE, 8 * PAGE, 1000000, ALWAYS, 1);
    mm_named_range named[] = {{BASE + PAGE, 4 * PAGE, "first"},
                              {BASE + 2 * PAGE, PAGE, "inner"},
                              {BASE + 4 * PAGE, 2 * PAGE, "last"},
                              {BASE, 0, "empty"}};
    mm_attribution *a = attribution_of(&record, 1);
    const mm_event move = up(2000000, BASE, 9 * PAGE);
    mm_event_list pieces = {0};
    mm_status st;

    CHECK_OK(mm_attribution_set_memories(a, &record, 1, named, 4, &st), &st);
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
    CHECK_OK(mm_attribution_set_memories(a, &record, 1, named, 2, &st), &st);
    CHECK_EQUAL(memory_of_fault(a, 2000000, BASE + PAGE), 6);
    CHECK_EQUAL(memory_of_fault(a, 2000000, BASE + 5 * PAGE), 0);
    CHECK(strcmp(memory_at(a, 6)->label, "new") == 0);
    CHECK(strcmp(memory_at(a, 2)->label, "inner") == 0);
    free(pieces.items);
    mm_attribution_free(a);
}

TEST(memories_keep_their_indices)
{
    char first[] = "a", second[] = "b", third[] = "c";
    mm_allocation_record records[3] = {record_of(BASE, PAGE, 0, ALWAYS, 1),
                                       record_of(BASE + BLOCK, PAGE, 0, ALWAYS, 2),
                                       record_of(BASE, PAGE, 60000, ALWAYS, 3)};
    const mm_named_range named[] = {{BASE + 8 * BLOCK, PAGE, "n"}, {BASE + 9 * BLOCK, PAGE, "m"}};
    mm_attribution *a;
    mm_status st;

    records[0].label = first;
    records[1].label = second;
    records[2].label = third;
    a = attribution_of(records, 2);
    CHECK_OK(mm_attribution_set_memories(a, records, 2, named, 1, &st), &st);
    CHECK_EQUAL(memory_of_fault(a, 5, BASE + 4 * BLOCK), 3); /* unknown */
    first[0] = 'A'; /* copied before */
    CHECK(strcmp(memory_at(a, 0)->label, "a") == 0);
    records[0].died = 50000;
    CHECK_OK(mm_attribution_set_memories(a, records, 3, named, 2, &st), &st);
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

TEST(foreign_allocations_are_found)
{
    static allocations known;
    const mm_allocation_record records[] = {record_of(BASE, MIB, 0, 10000, 1),
                                            record_of(BASE + 64 * BLOCK, MIB, 50000, ALWAYS, 2)};
    mm_attribution *a = attribution_of(records, 2);
    const mm_event events[] = {
        up(100000, BASE, BLOCK), /* the first record is dead: all of it is foreign now */
        event_of(MM_HOST_FAULT, 100000, BASE + 4 * BLOCK + 12345, 1),
        event_of(MM_HOST_FAULT, 100, BASE + 64 * BLOCK, 1), /* before the second one's birth */
        event_of(MM_CALL, 100000, BASE + 10 * BLOCK, BLOCK),
        up(100, BASE, BLOCK), /* the record has half of it */
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
    check_piece(&pieces, 0, 6, BASE + 64 * BLOCK, 1); /* of a record that has ended */
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

/* Answers that do not contain the address, are empty, or do not end below the last address. */
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

TEST(foreign_nonsense_is_unknown)
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

TEST_MAIN(no_driver)
