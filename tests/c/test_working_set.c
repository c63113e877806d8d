/* test_working_set.c: the order and the decisions of a working set, against a model of a device.
 *
 * Usage: test_working_set PATH_OF_THE_EMULATED_DRIVER, which is not opened. */
#include <limits.h>

#include "failing_allocations.h"
#include "working_model.h"

enum { GROUPS = 24, MOST_LIVING = 8, ROUNDS = 3000 };

/* --- random uses -------------------------------------------------------------------------- */

/* A mapped group that is loaded later, while it is held, would break the model's second use. */
static void
random_rounds_never_exceed_the_budget_or_wait_for_themselves(void)
{
    for (uint64_t run = 0; run < 40; run++) {
        uint32_t groups;
        seed = run + 1;
        random_reads = run >= 20;
        groups = 1 + random_below(GROUPS);
        begin_model(100 + random_below(1500), groups, false);
        for (uint32_t i = 0; i < ROUNDS; i++) {
            if (model.held_count == MOST_HELD || (model.held_count > 0 && random_below(2) == 0)) {
                release(random_below((uint32_t)model.held_count));
            } else {
                uint32_t next = run % 3 == 0 ? i / 2 % groups : random_below(groups);
                (void)acquire(next, random_below(STREAMS));
            }
            run_some(random_below(run % 2 == 0 ? 3 : 12));
        }
        while (model.held_count > 0) {
            release(0);
        }
        run_all();
        end_model();
    }
    random_reads = false;
}

static void
random_rounds_with_groups_that_come_and_go(void)
{
    for (uint64_t run = 0; run < 20; run++) {
        seed = run + 100;
        random_reads = run >= 10;
        begin_model(100 + random_below(1500), 4, false);
        for (uint32_t i = 0; i < ROUNDS; i++) {
            uint32_t group =
                run % 2 == 0 ? i / 3 % model.set.order.count : random_below(model.set.order.count);
            mm_status st;
            if (model.held_count == MOST_HELD || (model.held_count > 0 && random_below(2) == 0)) {
                release(random_below((uint32_t)model.held_count));
            } else if (is_live(group)) {
                (void)acquire(group, random_below(STREAMS));
            }
            if (is_live(group) && model.set.groups[group].held == 0 && random_below(90) == 0) {
                remove_group(group);
                check_predictions();
            }
            if (model.set.order.live < MOST_LIVING && random_below(60) == 0) {
                CHECK_OK(mm_working_set_add(&model.set, 1 + random_below(200), MM_GROUP_WRITE,
                                            false, &st),
                         &st);
            }
            run_some(random_below(6));
        }
        while (model.held_count > 0) {
            release(0);
        }
        run_all();
        end_model();
    }
    random_reads = false;
}

/* --- what is loaded and dropped ----------------------------------------------------------- */

static void
use_loop(uint32_t groups, uint32_t rounds)
{
    for (uint32_t i = 0; i < rounds * groups; i++) {
        use(i % groups);
    }
}

static void
use_back_and_forth(uint32_t groups, uint32_t rounds)
{
    for (uint32_t round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < groups; i++) {
            use(i);
        }
        for (uint32_t i = groups; i-- > 0;) {
            use(i);
        }
    }
}

/* Two rounds that read written groups, forward and back, and one that writes them. */
static void
use_as_training(uint32_t groups, uint32_t rounds)
{
    for (uint32_t round = 0; round < rounds; round++) {
        for (uint32_t i = 0; i < 3 * groups; i++) {
            uint32_t turn = i / groups, step = i % groups;
            use_to(turn == 1 ? groups - 1 - step : step, turn < 2);
        }
    }
}

/* The access of each next use is foreseen: no use waits, and each group is moved once in a round, for
 * the use that writes it. */
static void
written_groups_are_copied_for_uses_that_read(void)
{
    for (int given = 0; given < 2; given++) {
        static uint32_t round[3 * GROUPS];
        mm_status st;
        seed = 1;
        begin_model(400, 0, true);
        for (uint32_t i = 0; i < GROUPS; i++) {
            CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_WRITE, false, &st), &st);
            round[i] = round[2 * GROUPS + i] = i;
            round[GROUPS + i] = GROUPS - 1 - i;
        }
        if (given) {
            CHECK_OK(mm_working_order_give(&model.set.order, round, 3 * GROUPS, &st), &st);
        }
        use_as_training(GROUPS, 3);
        run_all();
        model.set.counts.loads_on_demand = model.moves = model.copies = 0;
        use_as_training(GROUPS, 10);
        run_all();
        CHECK_EQUAL(model.set.counts.loads_on_demand, 0);
        CHECK_EQUAL(model.moves, 10 * GROUPS);
        /* Of the four that fit, none is loaded again where the loop turns, nor before it is written. */
        CHECK(model.copies <= (uint64_t)10 * 2 * (GROUPS - 4));
        end_model();
    }
}

static void
a_copy_is_replaced_before_it_is_written(void)
{
    mm_status st;

    begin_model(100, 0, true);
    CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_WRITE, false, &st), &st);
    CHECK_EQUAL(acquire_to(0, true, 0), MM_USE_LOADED);
    CHECK_EQUAL(acquire_to(0, false, 1), MM_USE_PRESENT); /* held: it is written as it is */
    release(0);
    CHECK_EQUAL(acquire_to(0, true, 1), MM_USE_PRESENT);
    release(0);
    release(0);
    run_all();
    CHECK(model.copied[0]);
    CHECK_EQUAL(acquire_to(0, false, 0), MM_USE_LOADED);
    release(0);
    use_to(0, true);
    use_to(0, false);
    run_all();
    CHECK(!model.copied[0]); /* what was moved serves all uses */
    CHECK_EQUAL(model.copies + model.moves, 2);
    end_model();
}

/* A loop over n groups with room for k of them needs at least n - k + 1 loads in each round. */
static void
a_loop_is_loaded_ahead(void)
{
    uint64_t before;

    seed = 1;
    begin_model(400, 16, true);
    use_loop(16, 3);
    CHECK_EQUAL(model.set.counts.loads_on_demand, 1);
    CHECK_EQUAL(model.set.counts.hits, 3 * 16 - 1);
    before = model.set.counts.ahead;
    use_loop(16, 10);
    CHECK_EQUAL(model.set.counts.loads_on_demand, 1);
    CHECK(model.set.counts.ahead - before <= 160);
    run_all();
    end_model();
}

static uint64_t
count_loads(void)
{
    return model.set.counts.loads_on_demand + model.set.counts.ahead;
}

/* So that the link has work during a long use; but most groups stay from one round to the next. */
static void
many_small_groups_are_loaded_farther_ahead(void)
{
    enum { FIT = 200, AHEAD = FIT / 4 };
    uint64_t before;

    seed = 1;
    begin_model(FIT * 100, MOST_GROUPS, true);
    use(0);
    CHECK_EQUAL(count_loads(), 1 + AHEAD);
    use_loop(MOST_GROUPS, 3);
    before = count_loads();
    use_loop(MOST_GROUPS, 4);
    CHECK(count_loads() - before <= 4 * (MOST_GROUPS - FIT + AHEAD + 2));
    run_all();
    for (int i = 0; i < 9; i++) {
        use(random_below(MOST_GROUPS)); /* which nobody foresees */
    }
    before = count_loads();
    use(7);
    CHECK(count_loads() - before <= 4);
    run_all();
    end_model();
}

/* Large ones are not: what is loaded for nothing keeps a use that was not foreseen waiting. */
static void
large_groups_are_loaded_four_ahead(void)
{
    mm_status st;

    seed = 1;
    begin_model((size_t)1 << 40, 0, true);
    for (int i = 0; i < 30; i++) {
        CHECK_OK(mm_working_set_add(&model.set, (size_t)64 << 20, MM_GROUP_WRITE, false, &st),
                 &st);
    }
    use(0);
    CHECK_EQUAL(count_loads(), 1 + 4);
    run_all();
    end_model();
    begin_model((size_t)1 << 40, 0, true);
    for (int i = 0; i < 30; i++) {
        CHECK_OK(mm_working_set_add(&model.set, (size_t)2 << 20, MM_GROUP_WRITE, false, &st), &st);
    }
    use(0);
    CHECK_EQUAL(count_loads(), 1 + 16); /* 32 MiB */
    run_all();
    end_model();
}

static void
a_loop_of_twice_the_budget_keeps_a_third_of_its_groups(void)
{
    uint64_t before;

    seed = 1;
    begin_model(800, 16, true);
    use_loop(16, 3);
    before = count_loads();
    use_loop(16, 20);
    CHECK(count_loads() - before <= (uint64_t)20 * 16 * 2 / 3);
    CHECK_EQUAL(model.set.counts.loads_on_demand, 1);
    run_all();
    end_model();
}

/* The groups at the turning points stay: the victim is the one whose next use is farthest. */
static void
a_loop_that_turns_keeps_the_groups_at_its_ends(void)
{
    uint64_t demanded, ahead;

    seed = 1;
    begin_model(400, 16, true);
    use_back_and_forth(16, 2);
    demanded = model.set.counts.loads_on_demand;
    ahead = model.set.counts.ahead;
    use_back_and_forth(16, 10);
    CHECK_EQUAL(model.set.counts.loads_on_demand, demanded);
    CHECK(model.set.counts.ahead - ahead <= 10 * 2 * (16 - 3));
    run_all();
    end_model();
}

static void
what_fits_is_loaded_once(void)
{
    seed = 1;
    begin_model(1600, 16, true);
    use_loop(16, 5);
    CHECK_EQUAL(model.set.counts.loads_on_demand + model.set.counts.ahead, 16);
    CHECK_EQUAL(model.set.counts.drops, 0);
    run_all();
    end_model();
}

static void
a_given_order_wins_until_it_is_wrong(void)
{
    static const uint32_t odd_first[] = {1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10};
    mm_status st;

    seed = 1;
    begin_model(300, 12, true);
    CHECK_OK(mm_working_order_give(&model.set.order, odd_first, 12, &st), &st);
    for (int i = 0; i < 36; i++) {
        use(odd_first[i % 12]);
    }
    CHECK_EQUAL(model.set.counts.loads_on_demand, 1);
    use_loop(12, 4); /* learned, although another order is given */
    model.set.counts.loads_on_demand = 0;
    use_loop(12, 4);
    CHECK_EQUAL(model.set.counts.loads_on_demand, 0);
    CHECK_OK(mm_working_order_give(&model.set.order, NULL, 0, &st), &st);
    use_loop(12, 1);
    run_all();
    end_model();
}

static void
a_given_order_is_found_again(void)
{
    static const uint32_t round[] = {0, 1, 2, 2, 1, 3, 4, 0};
    mm_working_order o;
    mm_order_walk walk;
    bool reads;
    mm_status st;

    mm_working_order_init(&o);
    for (int i = 0; i < 6; i++) {
        CHECK_OK(mm_working_order_add(&o, true, &st), &st);
    }
    CHECK_OK(mm_working_order_give(&o, round, 8, &st), &st);
    mm_working_order_note(&o, 1, false);
    mm_working_order_note(&o, 5, false); /* not in the round: its place stays */
    CHECK(mm_working_order_trust(&o) < MM_MOST_TRUST);
    walk = (mm_order_walk){.given_next = o.given_next, .by_given = true};
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 2);
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 2);
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 1);
    mm_working_order_note(&o, 4, false);
    walk = (mm_order_walk){.given_next = o.given_next, .by_given = true};
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 0);
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 0);
    mm_working_order_free(&o);
}

static void
use_others_back_and_forth(uint32_t groups, uint32_t without, uint32_t rounds)
{
    for (uint32_t i = 0; i < 2 * groups * rounds; i++) {
        uint32_t step = i % (2 * groups), group = step < groups ? step : 2 * groups - 1 - step;
        if (group != without) {
            use(group);
        }
    }
}

/* What came before and behind the group belong together, wherever it was: no use is unforeseen. */
static void
an_order_goes_on_without_a_group(void)
{
    for (uint32_t removed = 0; removed < 8; removed++) {
        seed = 1;
        begin_model(300, 8, true);
        use_back_and_forth(8, 3);
        model.set.counts.loads_on_demand = 0;
        remove_group(removed);
        use_others_back_and_forth(8, removed, 4);
        CHECK_EQUAL(model.set.counts.loads_on_demand, 0);
        check_predictions();
        run_all();
        end_model();
    }
}

static void
a_given_order_goes_on_without_a_group(void)
{
    static const uint32_t round[] = {0, 1, 2, 2, 1, 3, 4, 0};
    static const uint32_t left[] = {1, 1, 3, 4};
    mm_working_order o;
    mm_order_walk walk;
    bool reads;
    mm_status st;

    mm_working_order_init(&o);
    for (int i = 0; i < 6; i++) {
        CHECK_OK(mm_working_order_add(&o, true, &st), &st);
    }
    CHECK_OK(mm_working_order_give(&o, round, 8, &st), &st);
    for (int i = 0; i < 4; i++) {
        mm_working_order_note(&o, round[i], false);
    }
    mm_working_order_remove(&o, 2);
    CHECK_EQUAL(o.given_count, 6);
    mm_working_order_remove(&o, 0);
    walk = (mm_order_walk){.given_next = o.given_next, .by_given = true};
    for (int i = 0; i < 8; i++) {
        CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), left[(i + 1) % 4]);
    }
    CHECK_OK(mm_working_order_give(&o, round, 8, &st), &st);
    CHECK_EQUAL(o.given_count, 4);
    mm_working_order_remove(&o, 1);
    mm_working_order_remove(&o, 3);
    mm_working_order_remove(&o, 4);
    CHECK_EQUAL(o.given_count, 0);
    walk = mm_working_order_walk(&o);
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), 5);
    mm_working_order_remove(&o, 5);
    walk = mm_working_order_walk(&o);
    CHECK_EQUAL(mm_order_walk_next(&o, &walk, &reads), MM_NO_GROUP);
    mm_working_order_free(&o);
}

static void
a_removed_group_leaves_its_room(void)
{
    uint64_t ticket;
    uint32_t group;
    mm_status st;

    seed = 1;
    begin_model(250, 3, true);
    use_loop(3, 3);
    remove_group(0);
    CHECK_EQUAL(model.set.order.live, 2);
    use(1);
    use(2);
    CHECK_EQUAL(model.set.reserved, 200);
    model.set.counts.drops = 0;
    for (int i = 0; i < 6; i++) {
        use((uint32_t)(1 + i % 2));
    }
    CHECK_EQUAL(model.set.counts.drops, 0);
    remove_group(1);
    remove_group(2);
    CHECK_EQUAL(model.set.reserved, 0);
    run_all();
    CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_WRITE, false, &st), &st);
    group = model.set.order.newest;
    CHECK_EQUAL(mm_working_set_acquire(&model.set, group, false, &ticket), MM_USE_LOADED);
    mm_working_set_release(&model.set, group, NULL);
    run_all();
    end_model();
}

/* Random uses are no reason to fill the link with guesses. */
static void
random_uses_end_the_guesses(void)
{
    uint64_t ahead;

    seed = 7;
    begin_model(400, GROUPS, true);
    for (int i = 0; i < 2000; i++) {
        use(random_below(GROUPS));
    }
    ahead = model.set.counts.ahead;
    for (int i = 0; i < 1000; i++) {
        use(random_below(GROUPS));
    }
    CHECK(model.set.counts.ahead - ahead < 400);
    run_all();
    end_model();
}

/* Experts of three groups each, chosen at random: what comes in an expert is known, what comes after
 * it is not. */
static void
chains_in_random_order_end_the_guesses_at_their_ends(void)
{
    enum { CHAIN = 3, CHAINS = GROUPS / CHAIN };
    uint64_t loads = 0, uses = 0;

    seed = 7;
    begin_model(400, GROUPS, true);
    for (int i = 0; i < 1200; i++) {
        uint32_t first = CHAIN * random_below(CHAINS);
        if (i == 200) {
            loads = model.set.counts.ahead + model.set.counts.loads_on_demand;
        }
        for (uint32_t j = 0; j < CHAIN; j++) {
            use(first + j);
            uses += i >= 200;
        }
    }
    loads = model.set.counts.ahead + model.set.counts.loads_on_demand - loads;
    CHECK(loads <= uses); /* guesses about the next expert would add half of that */
    run_all();
    end_model();
}

static void
held_groups_leave_no_room(void)
{
    uint64_t ticket;

    seed = 1;
    begin_model(250, 4, true);
    CHECK_EQUAL(acquire(0, 0), MM_USE_LOADED);
    CHECK(acquire(1, 1) != MM_USE_MAPPED);
    CHECK_EQUAL(acquire(2, 2), MM_USE_MAPPED);
    CHECK_EQUAL(acquire(2, 3), MM_USE_MAPPED);
    CHECK_EQUAL(mm_working_set_acquire(&model.set, 0, false, &ticket), MM_USE_PRESENT);
    mm_working_set_give_back(&model.set, 0);
    while (model.held_count > 0) {
        release(model.held_count - 1);
    }
    CHECK_EQUAL(model.set.counts.mapped, 2);
    CHECK_EQUAL(acquire(3, 0) == MM_USE_MAPPED, 0);
    release(0);
    run_all();
    end_model();
}

/* The first use of a group may fail: what its memory holds is still needed then. */
static void
an_acquisition_that_is_undone_leaves_a_group_unused(void)
{
    for (int released = 0; released < 2; released++) {
        mm_working_command command = {.kind = MM_COMMAND_HOME};
        uint64_t ticket;
        begin_model(100, 2, true);
        CHECK_EQUAL(mm_working_set_acquire(&model.set, 0, false, &ticket), MM_USE_LOADED);
        if (released) {
            mm_working_set_release(&model.set, 0, NULL);
        } else {
            mm_working_set_give_back(&model.set, 0);
        }
        (void)mm_working_set_acquire(&model.set, 1, false, &ticket); /* or it was foreseen */
        while (command.kind != MM_COMMAND_DROP) {
            CHECK(mm_working_set_take(&model.set, &command));
        }
        CHECK_EQUAL(command.group, 0);
        CHECK_EQUAL(command.unused, !released);
        mm_working_set_release(&model.set, 1, NULL);
        end_model();
    }
}

static void
a_group_at_home_is_not_brought_there(void)
{
    mm_working_command command;
    mm_status st;

    begin_model(100, 0, true);
    CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_READ, true, &st), &st);
    CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_READ, false, &st), &st);
    CHECK(mm_working_set_take(&model.set, &command));
    CHECK_EQUAL(command.kind, MM_COMMAND_HOME);
    CHECK_EQUAL(command.group, 1);
    CHECK(!mm_working_set_take(&model.set, &command));
    end_model();
}

static void
a_group_larger_than_the_budget_stays_at_home(void)
{
    seed = 1;
    begin_model(99, 3, true);
    use_loop(3, 4);
    CHECK_EQUAL(model.set.counts.mapped, 12);
    CHECK_EQUAL(model.set.counts.ahead + model.set.counts.drops, 0);
    run_all();
    end_model();
}

static void
a_lost_load_is_tried_again(void)
{
    uint64_t ticket, earlier;

    seed = 1;
    begin_model(400, 2, true);
    CHECK_EQUAL(mm_working_set_acquire(&model.set, 0, false, &ticket), MM_USE_LOADED);
    mm_working_set_release(&model.set, 0, NULL);
    earlier = ticket;
    mm_working_set_lost(&model.set, 0, earlier);
    check_accounts();
    CHECK_EQUAL(mm_working_set_acquire(&model.set, 0, false, &ticket), MM_USE_LOADED);
    mm_working_set_lost(&model.set, 0, earlier); /* of a load that another one replaced */
    CHECK(model.set.groups[0].present);
    mm_working_set_release(&model.set, 0, NULL);
    end_model();
}

/* --- groups that come and go --------------------------------------------------------------- */

static uint32_t
add_written(void)
{
    mm_status st;

    CHECK_OK(mm_working_set_add(&model.set, 100, MM_GROUP_WRITE, false, &st), &st);
    return model.set.order.newest;
}

static void
removed_groups_leave_nothing(void)
{
    long bytes = 0;

    seed = 1;
    begin_model(250, 3, true);
    for (uint32_t i = 0; i < 5000; i++) {
        uint32_t group = add_written();
        CHECK(group <= 3);
        use(i % 3);
        use(group);
        use_to(group, true);
        remove_group(group);
        run_all();
        model.streams[0].queued = model.streams[0].done = model.events = 0; /* for later ones */
        memset(model.ended, 0, 3 * sizeof *model.ended);
        bytes = i == 100 ? live_bytes() : bytes;
        CHECK(i < 100 || live_bytes() < bytes + 4096); /* besides ends of uses, of this model */
    }
    CHECK_EQUAL(model.set.order.count, 4);
    CHECK_EQUAL(model.set.order.pair_mask + 1, 64);
    end_model();
}

/* What a removal and a load look through gets smaller with the set, whichever groups are left. */
static void
a_set_that_was_large_is_a_small_one(void)
{
    seed = 1;
    begin_model(250, MOST_GROUPS, true);
    use_loop(MOST_GROUPS, 1);
    CHECK(model.set.order.pair_mask + 1 >= 8 * MOST_GROUPS);
    for (uint32_t i = 0; i < MOST_GROUPS - 3; i++) {
        remove_group(i);
    }
    run_all();
    CHECK(model.set.order.pair_mask + 1 <= 4 * 64);
    CHECK_EQUAL(model.set.order.oldest, MOST_GROUPS - 3);
    CHECK_EQUAL(model.set.order.newest, MOST_GROUPS - 1);
    for (uint32_t i = 0; i < 300; i++) {
        CHECK(add_written() < MOST_GROUPS);
    }
    CHECK_EQUAL(model.set.order.count, MOST_GROUPS);
    check_predictions();
    run_all();
    end_model();
}

/* The group that is expected behind one that never had a follower is the one that was added next, also
 * where it has the number of an earlier group. */
static void
expectations_follow_the_order_of_adding(void)
{
    mm_order_walk walk;
    bool reads;

    seed = 1;
    begin_model(100, 4, true);
    use(3);
    remove_group(1);
    remove_group(0);
    run_all();
    CHECK_EQUAL(add_written(), 0); /* the number that was vacated last */
    CHECK_EQUAL(add_written(), 1);
    walk = mm_working_order_walk(&model.set.order);
    for (uint32_t i = 0; i < 8; i++) {
        static const uint32_t next[] = {0, 1, 2, 3};
        CHECK_EQUAL(mm_order_walk_next(&model.set.order, &walk, &reads), next[i % 4]);
    }
    run_all();
    end_model();
}

/* --- memory ------------------------------------------------------------------------------- */

/* Without memory for commands a group is used where it is, and without memory for what was learned
 * nothing is forgotten that holds the set together. */
static void
every_allocation_may_fail(void)
{
    for (unsigned n = 1; n < 40; n++) {
        mm_status st;
        bool failed = false;
        uint64_t ticket;
        memset(&model, 0, sizeof model);
        mm_working_set_init(&model.set, 250);
        fail_allocation(n);
        for (uint32_t i = 0; i < 12 && !failed; i++) {
            failed = mm_working_set_add(&model.set, 100, MM_GROUP_WRITE, false, &st) < 0;
            CHECK(!failed || st.kind == MM_NO_MEMORY);
        }
        for (uint32_t i = 0; i < 3 * model.set.order.count; i++) {
            (void)mm_working_set_acquire(&model.set, i % model.set.order.count, i % 5 < 2,
                                         &ticket);
            mm_working_set_release(&model.set, i % model.set.order.count, NULL);
            check_accounts();
        }
        if (model.set.order.count > 0) {
            static const uint32_t round[] = {0};
            failed = mm_working_order_give(&model.set.order, round, 1, &st) < 0;
            CHECK(!failed || st.kind == MM_NO_MEMORY);
        }
        fail_allocation(0);
        end_model();
    }
}

int
main(void)
{
    static const check_test tests[] = {
        CHECK_TEST(random_rounds_never_exceed_the_budget_or_wait_for_themselves),
        CHECK_TEST(random_rounds_with_groups_that_come_and_go),
        CHECK_TEST(written_groups_are_copied_for_uses_that_read),
        CHECK_TEST(a_copy_is_replaced_before_it_is_written),
        CHECK_TEST(a_loop_is_loaded_ahead),
        CHECK_TEST(many_small_groups_are_loaded_farther_ahead),
        CHECK_TEST(large_groups_are_loaded_four_ahead),
        CHECK_TEST(a_loop_of_twice_the_budget_keeps_a_third_of_its_groups),
        CHECK_TEST(a_loop_that_turns_keeps_the_groups_at_its_ends),
        CHECK_TEST(what_fits_is_loaded_once),
        CHECK_TEST(a_given_order_wins_until_it_is_wrong),
        CHECK_TEST(a_given_order_is_found_again),
        CHECK_TEST(an_order_goes_on_without_a_group),
        CHECK_TEST(a_given_order_goes_on_without_a_group),
        CHECK_TEST(a_removed_group_leaves_its_room),
        CHECK_TEST(random_uses_end_the_guesses),
        CHECK_TEST(chains_in_random_order_end_the_guesses_at_their_ends),
        CHECK_TEST(held_groups_leave_no_room),
        CHECK_TEST(an_acquisition_that_is_undone_leaves_a_group_unused),
        CHECK_TEST(a_group_at_home_is_not_brought_there),
        CHECK_TEST(a_group_larger_than_the_budget_stays_at_home),
        CHECK_TEST(a_lost_load_is_tried_again),
        CHECK_TEST(removed_groups_leave_nothing),
        CHECK_TEST(a_set_that_was_large_is_a_small_one),
        CHECK_TEST(expectations_follow_the_order_of_adding),
        CHECK_TEST(every_allocation_may_fail),
    };

    return check_run(tests, sizeof tests / sizeof *tests);
}
