/* test_holder_replay.c: the processors that have pages, from events: each kind of event, the order
 * in which the module worked, births, discards, spans; and random events against a list that is
 * followed page by page in the order of time.
 *
 * Usage: test_holder_replay PATH_OF_THE_EMULATED_DRIVER, which is not opened. */
#include "attributed_events.h"
#include "failing_allocations.h"
#include "trace/holder_replay.h"

#define HOST ((uint32_t)1 << MM_SET_HOST_BIT)
enum { DEVICE_0 = 1, DEVICE_1 = 2, BOTH_DEVICES = 3 };

static mm_status st;

/* --- help ------------------------------------------------------------------------------------ */

static mm_batch
batch_of(uint64_t start, uint64_t size)
{
    static mm_transfer one;
    mm_batch batch = {.transfers = &one, .count = 1};

    one = (mm_transfer){.range = {start, size, start}};
    return batch;
}

/* The holders of a range after some events. */
static mm_page_holders
replayed(uint64_t start, uint64_t size, uint64_t since, const mm_event *events, size_t count)
{
    mm_batch batch = batch_of(start, size);
    mm_page_holders h;

    CHECK_OK(mm_page_holders_init(&h, &batch, &since, &st), &st);
    CHECK_OK(mm_replay_holders(&h, events, count, &st), &st);
    return h;
}

/* Checks the holders of the pages of a range from BASE on, born at 0. */
static void
check_pages(const mm_event *events, size_t count, const uint32_t *expected, size_t pages)
{
    mm_page_holders h = replayed(BASE, pages * PAGE, 0, events, count);

    CHECK_EQUAL(h.page_count, pages);
    for (size_t i = 0; i < pages; i++) {
        CHECK_EQUAL(h.page[i], expected[i]);
    }
    mm_page_holders_free(&h);
}

#define EVENTS(...) \
    ((const mm_event[]){__VA_ARGS__}), sizeof((mm_event[]){__VA_ARGS__}) / sizeof(mm_event)
#define PAGES(...) \
    ((const uint32_t[]){__VA_ARGS__}), sizeof((uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t)

static mm_event
copied(uint64_t time, uint64_t address, uint64_t amount, uint32_t set)
{
    mm_event e = event_of(MM_DUPLICATE, time, address, amount);

    e.extra = set;
    return e;
}

static mm_event
kept(mm_event_kind kind, uint64_t time, uint64_t address, uint64_t amount, int destination)
{
    mm_event e = event_of(kind, time, address, amount);

    e.destination = (int16_t)destination;
    return e;
}

static mm_event
called(mm_operation op, uint64_t time, uint64_t address, uint64_t amount)
{
    mm_event e = event_of(MM_CALL, time, address, amount);

    e.cause = (uint8_t)op;
    return e;
}

/* A move whose push began earlier than itself. */
static mm_event
move_in_push(uint64_t begun, uint32_t offset, uint64_t address, uint64_t amount, int destination)
{
    mm_event e = move_of(begun + offset, begun + offset + 10, address, amount,
                         destination == MM_ON_HOST ? 0 : MM_ON_HOST, destination);

    e.extra = offset;
    return e;
}

/* --- single events --------------------------------------------------------------------------- */

static void
the_last_move_counts(void)
{
    check_pages(EVENTS(up(100, BASE, 3 * PAGE)), PAGES(DEVICE_0, DEVICE_0, DEVICE_0, 0));
    check_pages(EVENTS(up(100, BASE, 3 * PAGE), down(200, BASE + PAGE, PAGE)),
                PAGES(DEVICE_0, HOST, DEVICE_0, 0));
    check_pages(EVENTS(down(200, BASE + PAGE, PAGE), up(100, BASE, 3 * PAGE)),
                PAGES(DEVICE_0, HOST, DEVICE_0, 0));
    check_pages(EVENTS(up(100, BASE, PAGE), move_of(200, 210, BASE, 2 * PAGE, 0, 1)),
                PAGES(DEVICE_1, DEVICE_1));
    check_pages(EVENTS(up(100, BASE, PAGE), down(100, BASE, PAGE)), PAGES(HOST));
}

static void
copies_are_sets(void)
{
    check_pages(EVENTS(up(100, BASE, 2 * PAGE), copied(101, BASE, PAGE, HOST | DEVICE_0)),
                PAGES(HOST | DEVICE_0, DEVICE_0));
    check_pages(EVENTS(up(100, BASE, 2 * PAGE), copied(101, BASE, 2 * PAGE, HOST | DEVICE_0),
                       kept(MM_DUPLICATE_END, 102, BASE, PAGE, MM_ON_HOST)),
                PAGES(HOST, HOST | DEVICE_0));
    check_pages(EVENTS(copied(101, BASE, PAGE, BOTH_DEVICES),
                       kept(MM_EVICTION, 102, BASE, PAGE, MM_ON_HOST)),
                PAGES(HOST));
}

/* A push takes some time on the device, and the next work on its pages can begin before it ends. */
static void
moves_of_a_push_begin_with_it(void)
{
    check_pages(EVENTS(move_in_push(100, 500, BASE, PAGE, 0), down(300, BASE, PAGE)), PAGES(HOST));
    check_pages(
        EVENTS(copied(120, BASE, PAGE, HOST | DEVICE_0), move_in_push(100, 500, BASE, PAGE, 0)),
        PAGES(HOST | DEVICE_0));
}

static void
other_processors_are_not_known(void)
{
    check_pages(EVENTS(up(100, BASE, PAGE), move_of(200, 210, BASE, PAGE, 0, MM_OTHER_PROCESSOR)),
                PAGES(0));
    check_pages(
        EVENTS(move_of(200, 210, BASE, PAGE, 0, MM_OTHER_PROCESSOR), down(300, BASE, PAGE)),
        PAGES(HOST));
}

static void
faults_and_mappings_change_nothing(void)
{
    check_pages(EVENTS(up(100, BASE, PAGE), event_of(MM_HOST_FAULT, 200, BASE, 1),
                       event_of(MM_DEVICE_FAULT, 200, BASE, 1),
                       kept(MM_REMOTE_MAP, 200, BASE, PAGE, MM_ON_HOST),
                       event_of(MM_THRASHING, 200, BASE, PAGE),
                       event_of(MM_THROTTLING, 200, BASE, 1), called(MM_PREFETCH, 200, BASE, PAGE),
                       called(MM_ADVISE, 200, BASE, PAGE)),
                PAGES(DEVICE_0));
}

/* The call can be earlier than the discard, which takes place in its stream. */
static void
discarded_pages_stay_unknown(void)
{
    check_pages(EVENTS(called(MM_DISCARD, 100, BASE + PAGE, PAGE), up(200, BASE, 3 * PAGE)),
                PAGES(DEVICE_0, 0, DEVICE_0));
    check_pages(EVENTS(up(100, BASE, 3 * PAGE),
                       called(MM_DISCARD_PREFETCH, 200, BASE + 10, PAGE - 10),
                       up(300, BASE, 3 * PAGE)),
                PAGES(0, DEVICE_0, DEVICE_0));
}

static void
events_before_the_birth_do_not_count(void)
{
    const mm_event events[] = {up(100, BASE, 2 * PAGE), called(MM_DISCARD, 150, BASE, PAGE),
                               down(200, BASE, PAGE)};
    mm_page_holders h = replayed(BASE, 2 * PAGE, 160, events, 3);

    CHECK_EQUAL(h.page[0], HOST);
    CHECK_EQUAL(h.page[1], 0);
    mm_page_holders_free(&h);
}

/* --- ranges ---------------------------------------------------------------------------------- */

static void
ranges_share_spans(void)
{
    enum { COUNT = 6 };
    mm_transfer transfers[COUNT] = {
        {.range = {BASE + 8 * PAGE + 5, 10, 0}}, /* in one page */
        {.range = {BASE + 100, PAGE, 0}}, /* two pages */
        {.range = {BASE + PAGE + 50, PAGE, 0}}, /* and the next one */
        {.range = {BASE + 20 * PAGE, PAGE, 0}}, /* of unknown birth */
        {.range = {BASE + 30 * PAGE, 0, 0}}, /* empty */
        {.range = {BASE + 9 * PAGE, 4 * PAGE, 0}}, /* after the first one */
    };
    const uint64_t since[COUNT] = {0, 7, 9, MM_NO_BIRTH, 0, 50};
    const mm_event event = up(20, BASE, 40 * PAGE);
    mm_batch batch = {.transfers = transfers, .count = COUNT};
    mm_page_holders h;

    CHECK_OK(mm_page_holders_init(&h, &batch, since, &st), &st);
    CHECK_OK(mm_replay_holders(&h, &event, 1, &st), &st);
    CHECK_EQUAL(h.count, 3);
    CHECK(h.span[0].start == BASE && h.span[0].end == BASE + 3 * PAGE && h.span[0].since == 9);
    CHECK(h.span[1].start == BASE + 8 * PAGE && h.span[1].end == BASE + 9 * PAGE);
    CHECK(h.span[2].start == BASE + 9 * PAGE && h.span[2].end == BASE + 13 * PAGE);
    CHECK(h.span[1].since == 0 && h.span[2].since == 50);
    CHECK_EQUAL(h.page_count, 8);
    CHECK(mm_page_holders_of(&h, transfers[0].range) == &h.page[3]);
    CHECK(mm_page_holders_of(&h, transfers[1].range) == &h.page[0]);
    CHECK(mm_page_holders_of(&h, transfers[2].range) == &h.page[1]);
    CHECK(mm_page_holders_of(&h, transfers[3].range) == NULL);
    CHECK(mm_page_holders_of(&h, transfers[5].range) == &h.page[4]);
    CHECK(mm_page_holders_of(&h, (mm_range){BASE + 2 * PAGE, 2 * PAGE, 0}) == NULL); /* in part */
    CHECK_EQUAL(h.page[0], DEVICE_0);
    CHECK_EQUAL(h.page[3], DEVICE_0);
    CHECK_EQUAL(h.page[4], 0); /* born after the move */
    mm_page_holders_free(&h);
}

/* --- random events --------------------------------------------------------------------------- */

enum { RANDOM_PAGES = 3 * 512 + 100, RANDOM_EVENTS = 600 };

static uint64_t seed = 88172645463325252U;

static uint64_t
draw(uint64_t below)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed % below;
}

static mm_event
random_event(uint64_t time)
{
    uint64_t first = draw(RANDOM_PAGES), whole = draw(4) == 0;
    uint64_t pages = 1 + draw(whole ? RANDOM_PAGES : 40);
    uint64_t start = BASE - 50 * PAGE + (whole ? 0 : first * PAGE);

    switch (draw(6)) {
    case 0:
        return copied(time, start, pages * PAGE, (uint32_t)(1 + draw(3)) | (draw(2) ? HOST : 0));
    case 1:
        return kept(MM_DUPLICATE_END, time, start, pages * PAGE, (int)draw(3) - 1);
    case 2:
        return draw(20) == 0 ? called(MM_DISCARD, time, start, 3 * PAGE)
                             : event_of(MM_HOST_FAULT, time, start, 1);
    default:
        return move_in_push(time, (uint32_t)draw(3000), start, pages * PAGE, (int)draw(3) - 1);
    }
}

/* What happens to the pages, event after event; `discarded` keeps what later events would set. */
static void
follow(const mm_event *e, uint32_t *pages, bool *discarded)
{
    for (size_t i = 0; i < RANDOM_PAGES; i++) {
        uint64_t address = BASE + i * PAGE;
        if (e->kind == MM_HOST_FAULT || address + PAGE <= e->address
            || address >= e->address + e->amount) {
            continue;
        }
        discarded[i] = discarded[i] || e->kind == MM_CALL;
        pages[i] = e->kind == MM_DUPLICATE        ? e->extra
                   : e->destination == MM_ON_HOST ? HOST
                                                  : (uint32_t)1 << (e->destination & 31);
    }
}

/* The records of moves come late, so the events are shuffled in a window. */
static void
random_events_equal_the_model(void)
{
    for (int round = 0; round < 60; round++) {
        static mm_event events[RANDOM_EVENTS];
        uint32_t pages[RANDOM_PAGES] = {0};
        bool discarded[RANDOM_PAGES] = {false};
        mm_page_holders h;
        size_t count = 1 + draw(RANDOM_EVENTS);
        for (size_t i = 0; i < count; i++) {
            events[i] = random_event(1000 + 100 * i);
            follow(&events[i], pages, discarded);
        }
        for (size_t i = 1; i < count; i++) {
            size_t other = i - draw(i < 30 ? i : 30);
            mm_event swapped = events[i];
            events[i] = events[other];
            events[other] = swapped;
        }
        h = replayed(BASE, RANDOM_PAGES * PAGE, 0, events, count);
        for (size_t i = 0; i < RANDOM_PAGES; i++) {
            CHECK_EQUAL(h.page[i], discarded[i] ? 0 : pages[i]);
        }
        mm_page_holders_free(&h);
    }
}

static void
failed_allocations_leave_nothing(void)
{
    const mm_event event = up(20, BASE, 40 * PAGE);
    mm_batch batch = batch_of(BASE, 40 * PAGE);
    const uint64_t since = 0;
    bool failed = true;

    for (long nth = 1; failed; nth++) {
        long before = live_bytes();
        mm_page_holders h;
        int rc;
        fail_allocation(nth);
        rc = mm_page_holders_init(&h, &batch, &since, &st);
        if (rc == 0) {
            rc = mm_replay_holders(&h, &event, 1, &st);
        }
        failed = allocation_has_failed();
        CHECK_EQUAL(rc < 0, failed);
        CHECK(!failed || st.kind == MM_NO_MEMORY);
        mm_page_holders_free(&h);
        CHECK_EQUAL(live_bytes(), before);
        CHECK(failed || nth > 5);
    }
}

int
main(void)
{
    static const check_test tests[] = {
        CHECK_TEST(the_last_move_counts),
        CHECK_TEST(copies_are_sets),
        CHECK_TEST(moves_of_a_push_begin_with_it),
        CHECK_TEST(other_processors_are_not_known),
        CHECK_TEST(faults_and_mappings_change_nothing),
        CHECK_TEST(discarded_pages_stay_unknown),
        CHECK_TEST(events_before_the_birth_do_not_count),
        CHECK_TEST(ranges_share_spans),
        CHECK_TEST(random_events_equal_the_model),
        CHECK_TEST(failed_allocations_leave_nothing),
    };

    return check_run(tests, sizeof tests / sizeof *tests);
}
