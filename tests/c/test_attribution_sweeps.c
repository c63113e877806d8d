/* test_attribution_sweeps.c: random traces against a resolver that tries all memories, random
 * orders of events, every allocation failing once, and threads. Needs no driver. */
#include <time.h>

#include "attributed_events.h"
#include "failing_allocations.h"
#include "trace/event_order.h"
#include "trace/host_views.h"

/* --- order ---------------------------------------------------------------------------------- */

static uint64_t random_state;

/* xorshift64*, below the limit. */
static uint64_t
next_random(uint64_t limit)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return ((random_state * 0x2545f4914f6cdd1dU) >> 11) % limit;
}

/* The seed is printed, and can be given as CHECK_SEED. */
static void
seed_random(void)
{
    const char *given = getenv("CHECK_SEED");
    struct timespec now;

    (void)clock_gettime(CLOCK_REALTIME, &now);
    random_state = given != NULL ? strtoull(given, NULL, 10)
                                 : (uint64_t)now.tv_sec * 1000003 + (uint64_t)now.tv_nsec;
    random_state |= 1;
    (void)printf("CHECK_SEED=%llu\n", (unsigned long long)random_state);
}

static void
check_order(const mm_event *events, size_t count)
{
    mm_event_order order;
    bool *seen = calloc(count, sizeof *seen);
    mm_status st;

    CHECK_OK(mm_event_order_make(&order, events, count, &st), &st);
    for (size_t i = 0; i < count; i++) {
        size_t at = mm_event_position(&order, i);
        size_t before = mm_event_position(&order, i > 0 ? i - 1 : 0);
        CHECK(at < count && !seen[at]);
        seen[at] = true;
        CHECK(i == 0 || events[before].start < events[at].start
              || (events[before].start == events[at].start && before < at));
    }
    mm_event_order_free(&order);
    free(seen);
}

TEST(events_are_put_in_order)
{
    enum { COUNT = 5000 };
    static mm_event events[COUNT];
    mm_event_order order;
    mm_status st;

    for (int kind = 0; kind < 6; kind++) {
        for (size_t i = 0; i < COUNT; i++) {
            const uint64_t starts[] = {i,
                                       COUNT - i,
                                       next_random(100),
                                       i - (i > 50 ? next_random(50) : 0),
                                       i == 0 ? 2 * COUNT : i,
                                       i == COUNT - 1 ? 0 : i / 7};
            events[i].start = starts[kind];
        }
        for (size_t count = 0; count < 10; count++) {
            check_order(events, count);
        }
        check_order(events, COUNT);
    }
    CHECK_OK(mm_event_order_make(&order, events, COUNT - 1, &st), &st);
    CHECK(order.positions == NULL); /* nothing to do for those in order */
}

/* --- against a resolver that tries all memories --------------------------------------------- */

enum {
    RECORDS = 10000,
    NAMES = 20,
    EVENTS = 2500,
    PAGES = 16384,
    MOST_BORDERS = 2 * (RECORDS + 64)
};

/* A trace of random records in 64 MiB, some of them unknown. */
static struct {
    mm_allocation_record records[RECORDS];
    mm_named_range named[NAMES];
    allocations foreign;
    mm_event events[EVENTS];
    uint64_t borders[MOST_BORDERS];
    uint32_t near[RECORDS]; /* the records that the present event may belong to */
    size_t near_count;
    mm_event_list pieces; /* as they should be */
    uint64_t ambiguous;
} trace;

static uint64_t
random_size(void)
{
    uint64_t kind = next_random(20);

    return kind < 12   ? 1 + next_random(8 * KIB)
           : kind < 19 ? (1 + next_random(64)) * PAGE
                       : 1 + next_random(4 * MIB);
}

static void
make_trace(void)
{
    static char label[] = "x";

    for (size_t i = 0; i < RECORDS; i++) {
        uint64_t born = next_random(1000000), died = born + next_random(20000);
        trace.records[i] = (mm_allocation_record){.start = BASE + next_random(PAGES) * PAGE
                                                           + (i % 3 == 0 ? next_random(PAGE) : 0),
                                                  .size = i % 50 == 0 ? 0 : random_size(),
                                                  .born = i % 100 == 0 ? 0 : born,
                                                  .died = i % 100 == 50 ? ALWAYS : died,
                                                  .serial = i + 1,
                                                  .label = label};
    }
    for (size_t i = 0; i < NAMES; i++) {
        trace.named[i] = (mm_named_range){BASE + next_random(PAGES) * PAGE / 2 + next_random(PAGE),
                                          random_size(), label};
    }
    trace.foreign.count = 0;
    for (uint64_t at = 32 * MIB; at < 40 * MIB; at += MIB) {
        trace.foreign.items[trace.foreign.count].start = BASE + at;
        trace.foreign.items[trace.foreign.count++].size = MIB - (at / MIB % 2) * 64 * KIB;
    }
    for (size_t i = 0; i < EVENTS; i++) {
        uint64_t start = 400 * i - (i > 20 ? next_random(8000) : 0);
        uint64_t page = next_random(PAGES), pages = 1 + next_random(512);
        mm_event_kind kind = next_random(2) ? MM_MOVE : (mm_event_kind)next_random(MM_EVENT_KINDS);
        mm_event *e = &trace.events[i];
        pages = pages < PAGES - page ? pages : PAGES - page;
        *e = event_of(kind, start, BASE + page * PAGE, pages * PAGE);
        e->end = start + next_random(3000);
        e->source = (int16_t)((int)next_random(4) - 1);
        e->destination = (int16_t)((int)next_random(4) - 1);
        do { /* host views, which change causes, are in test_attribution */
            e->cause = (uint8_t)next_random(MM_CAUSES);
        } while (mm_is_host_view(e));
        e->access = (uint8_t)next_random(4);
        if (!mm_event_is_divisible(e)) {
            e->amount = 1;
            e->address += next_random(PAGE);
        }
    }
}

/* Finds the records that have some address of an event at its time, by trying all of them. */
static void
find_near(const mm_event *event)
{
    uint64_t end = event->address + event->amount, time = event->start;

    trace.near_count = 0;
    for (uint32_t i = 0; i < RECORDS; i++) {
        const mm_allocation_record *record = &trace.records[i];
        if (record->start < end && record->start + record->size > event->address
            && record->born <= time + MARGIN
            && (record->died >= time || time - record->died <= MARGIN)) {
            trace.near[trace.near_count++] = i;
        }
    }
}

/* The index of the memory; unknown memory is TOTAL. */
static uint32_t
resolve(uint64_t address, uint64_t time, bool *ambiguous)
{
    size_t near = 0, exact = 0;
    uint32_t nearest = TOTAL, best = TOTAL;

    for (size_t i = NAMES; i-- > 0;) {
        if (address - trace.named[i].start < trace.named[i].size) {
            return (uint32_t)(RECORDS + i);
        }
    }
    for (size_t i = 0; i < trace.near_count; i++) {
        const mm_allocation_record *record = &trace.records[trace.near[i]];
        if (address - record->start >= record->size) {
            continue;
        }
        near++;
        nearest = trace.near[i];
        if (record->born <= time && time <= record->died) {
            exact++;
            best = trace.near[i];
        }
    }
    *ambiguous = *ambiguous || (near > 1 && exact == 0);
    if (near > 0) {
        return exact > 0 ? best : nearest;
    }
    for (size_t i = 0; i < trace.foreign.count; i++) {
        if (address - trace.foreign.items[i].start < trace.foreign.items[i].size) {
            return (uint32_t)(RECORDS + NAMES + i);
        }
    }
    return TOTAL;
}

static int
compare_numbers(const void *a, const void *b)
{
    const uint64_t *left = a, *right = b;

    return (*left > *right) - (*left < *right);
}

static size_t
borders_between(uint64_t start, uint64_t end)
{
    uint64_t *borders = trace.borders;
    size_t count = 0;

#define TAKE(border)                          \
    if ((border) > start && (border) < end) { \
        CHECK(count < MOST_BORDERS - 2);      \
        borders[count++] = (border);          \
    }
    for (size_t i = 0; i < trace.near_count; i++) {
        const mm_allocation_record *record = &trace.records[trace.near[i]];
        TAKE(record->start)
        TAKE(record->start + record->size)
    }
    for (size_t i = 0; i < NAMES; i++) {
        TAKE(trace.named[i].start)
        TAKE(trace.named[i].start + trace.named[i].size)
    }
    for (size_t i = 0; i < trace.foreign.count; i++) {
        TAKE(trace.foreign.items[i].start)
        TAKE(trace.foreign.items[i].start + trace.foreign.items[i].size)
    }
#undef TAKE
    borders[count++] = start;
    qsort(borders, count, sizeof *borders, compare_numbers);
    borders[count] = end;
    return count;
}

/* Appends the pieces of an event. */
static void
divide(const mm_event *event)
{
    mm_event_list *list = &trace.pieces;
    size_t first = list->count;
    bool ambiguous = false;
    size_t count;

    find_near(event);
    count = borders_between(event->address, event->address + event->amount);
    for (size_t i = 0; i < count; i++) {
        uint64_t at = trace.borders[i], end = trace.borders[i + 1];
        uint32_t memory;
        if (at == end) {
            continue;
        }
        memory = resolve(at, event->start, &ambiguous);
        if (list->count > first && list->items[list->count - 1].memory == memory) {
            list->items[list->count - 1].amount += end - at;
            continue;
        }
        if (list->count == list->capacity) {
            list->capacity = 2 * list->capacity + 1000;
            list->items = realloc(list->items, list->capacity * sizeof *list->items);
            CHECK(list->items != NULL);
        }
        list->items[list->count] = *event;
        list->items[list->count].address = at;
        list->items[list->count].amount = end - at;
        list->items[list->count++].memory = memory;
    }
    trace.ambiguous += ambiguous;
}

static void
resolve_trace(void)
{
    trace.pieces.count = 0;
    trace.ambiguous = 0;
    /* The events by start, those of one time in their order. */
    for (size_t i = 1; i < EVENTS; i++) {
        for (size_t k = i; k > 0 && trace.events[k].start < trace.events[k - 1].start; k--) {
            mm_event later = trace.events[k - 1];
            trace.events[k - 1] = trace.events[k];
            trace.events[k] = later;
        }
    }
    for (size_t i = 0; i < EVENTS; i++) {
        divide(&trace.events[i]);
    }
}

/* The nanoseconds in which pieces of this memory move, one by one. */
static uint64_t
busy_time(uint32_t memory)
{
    uint64_t time = 0, until = 0;

    for (size_t i = 0; i < trace.pieces.count; i++) {
        const mm_event *p = &trace.pieces.items[i];
        if (p->kind == MM_MOVE && (memory == TOTAL || p->memory == memory)) {
            uint64_t from = p->start > until ? p->start : until;
            time += p->end > from ? p->end - from : 0;
            until = p->end > until ? p->end : until;
        }
    }
    return time;
}

/* The bytes of a piece that turn back; *turned has a flag for each page of the whole event. */
static uint64_t
turned_bytes(const mm_event *piece, const bool *turned)
{
    uint64_t bytes = 0;

    for (uint64_t at = piece->address; at < piece->address + piece->amount;) {
        uint64_t end = (at / PAGE + 1) * PAGE, stop = piece->address + piece->amount;
        end = end < stop ? end : stop;
        bytes += turned[(at - BASE) / PAGE] ? end - at : 0;
        at = end;
    }
    return bytes;
}

/* Stores the bytes of each piece that turn back. */
static void
replay_trace(uint64_t *bytes)
{
    static signed char direction[PAGES];
    static bool turned[PAGES];
    size_t piece = 0;

    memset(direction, 0, sizeof direction);
    for (size_t i = 0; i < EVENTS; i++) {
        const mm_event *e = &trace.events[i];
        signed char now = e->destination > e->source ? 1 : -1;
        uint64_t end = e->address + e->amount;
        bool moves = e->kind == MM_MOVE && e->source != e->destination;
        for (uint64_t at = e->address; moves && at < end; at += PAGE) {
            turned[(at - BASE) / PAGE] = direction[(at - BASE) / PAGE] == -now;
            direction[(at - BASE) / PAGE] = now;
        }
        for (uint64_t at = e->address; at < end; at += trace.pieces.items[piece++].amount) {
            bytes[piece] = moves ? turned_bytes(&trace.pieces.items[piece], turned) : 0;
        }
    }
    CHECK_EQUAL(piece, trace.pieces.count);
}

/* The pieces are those of the trace, with one of the unknown memories where no memory is known. */
static void
compare_pieces(const mm_attribution *a, const mm_event_list *pieces)
{
    CHECK_EQUAL(pieces->count, trace.pieces.count);
    for (size_t i = 0; i < pieces->count; i++) {
        mm_event expected = trace.pieces.items[i];
        const mm_traced_memory *memory = memory_at(a, pieces->items[i].memory);
        if (expected.memory == TOTAL) {
            CHECK_EQUAL(memory->kind, MM_MEMORY_UNKNOWN);
            CHECK(expected.address >= memory->start
                  && expected.address + expected.amount <= memory->start + memory->size);
            expected.memory = pieces->items[i].memory;
        }
        CHECK(memcmp(&expected, &pieces->items[i], sizeof expected) == 0);
    }
}

/* Adds a piece to sums; its time is left out. */
static void
add_to_sums(mm_sums *s, const mm_event *p, uint64_t turned)
{
    int direction = p->destination == MM_ON_HOST ? MM_TO_HOST
                    : p->source == MM_ON_HOST    ? MM_TO_DEVICE
                                                 : MM_BETWEEN_DEVICES;
    bool writes = p->access >= MM_WRITE_ACCESS;

    s->moved[direction][p->cause] += p->kind == MM_MOVE ? p->amount : 0;
    s->turned_back += turned;
    s->host_faults += p->kind == MM_HOST_FAULT;
    s->host_write_faults += p->kind == MM_HOST_FAULT && writes;
    s->device_faults += p->kind == MM_DEVICE_FAULT;
    s->device_write_faults += p->kind == MM_DEVICE_FAULT && writes;
    s->remote_mapped += p->kind == MM_REMOTE_MAP ? p->amount : 0;
    s->thrashing += p->kind == MM_THRASHING ? p->amount : 0;
    s->throttled += p->kind == MM_THROTTLING ? p->end - p->start : 0;
    s->duplicated += p->kind == MM_DUPLICATE ? p->amount : 0;
    s->evicted += p->kind == MM_EVICTION ? p->amount : 0;
}

/* The sums are those of the pieces. All unknown memories are taken for one. */
static void
compare_sums(const mm_attribution *a)
{
    enum { MOST = RECORDS + NAMES + 64 };
    static mm_sums expected[MOST];
    uint32_t unknown = (uint32_t)(RECORDS + NAMES + trace.foreign.count);
    uint64_t *turned = calloc(trace.pieces.count, sizeof *turned);
    mm_sums found, total = {0};

    memset(expected, 0, sizeof expected);
    replay_trace(turned);
    for (size_t i = 0; i < trace.pieces.count; i++) {
        const mm_event *p = &trace.pieces.items[i];
        add_to_sums(&expected[p->memory == TOTAL ? unknown : p->memory], p, turned[i]);
        add_to_sums(&total, p, turned[i]);
    }
    for (uint32_t i = 0; i < unknown; i++) {
        found = sums_of(a, 0, i);
        /* Slow to find, so only for some memories. */
        expected[i].move_time = i % 64 == 0 ? busy_time(i) : found.move_time;
        CHECK(memcmp(&found, &expected[i], sizeof found) == 0);
    }
    memset(&found, 0, sizeof found);
    for (uint32_t i = unknown; i < memory_count(a); i++) {
        mm_sums sums = sums_of(a, 0, i);
        mm_sums_merge(&found, &sums);
    }
    expected[unknown].move_time = found.move_time;
    CHECK(memcmp(&found, &expected[unknown], sizeof found) == 0);
    found = sums_of(a, 0, TOTAL);
    total.move_time = busy_time(TOTAL);
    CHECK(memcmp(&found, &total, sizeof found) == 0);
    free(turned);
}

static mm_attribution *
attribution_of_trace(void)
{
    mm_attribution *a = attribution_of(NULL, 0);
    mm_event every;
    mm_status st;

    CHECK_OK(mm_attribution_set_memories(a, trace.records, RECORDS, trace.named, NAMES, &st), &st);
    /* At a time when few records are left. What others hide even then is forgotten. */
    for (size_t i = 0; i < trace.foreign.count;) {
        for (uint64_t at = 0; at < MIB && memory_count(a) <= RECORDS + NAMES + i; at += PAGE) {
            every = event_of(MM_HOST_FAULT, 1 << 30, trace.foreign.items[i].start + at, 1);
            find_foreign(a, &every, 1, &trace.foreign);
        }
        if (memory_count(a) > RECORDS + NAMES + i) {
            i++;
        } else {
            trace.foreign.items[i] = trace.foreign.items[--trace.foreign.count];
        }
    }
    CHECK_EQUAL(memory_count(a), RECORDS + NAMES + trace.foreign.count);
    return a;
}

TEST(random_traces_are_resolved)
{
    mm_event_list pieces = {0}, same = {0};
    mm_attribution *a, *again;

    seed_random();
    make_trace();
    a = attribution_of_trace();
    add(a, 0, trace.events, EVENTS, &pieces); /* not sorted */
    resolve_trace();
    compare_pieces(a, &pieces);
    compare_sums(a);
    CHECK(trace.ambiguous > 10);
    CHECK_EQUAL(mm_attribution_ambiguous(a), trace.ambiguous);
    check_invariant(a);
    /* The pieces again, and the events call by call. */
    again = attribution_of_trace();
    add(again, 0, pieces.items, pieces.count, &same);
    compare_pieces(again, &same);
    compare_sums(again);
    mm_attribution_free(again);
    again = attribution_of_trace();
    same.count = 0;
    add(again, 0, trace.events, 1, &same);
    add(again, 0, trace.events + 1, 0, &same);
    add(again, 0, trace.events + 1, EVENTS / 2, &same);
    add(again, 0, trace.events + 1 + EVENTS / 2, EVENTS - 1 - EVENTS / 2, &same);
    CHECK_EQUAL(mm_attribution_ambiguous(again), trace.ambiguous);
    CHECK_EQUAL(same.count, pieces.count);
    check_invariant(again);
    mm_attribution_free(again);
    mm_attribution_free(a);
    free(pieces.items);
    free(same.items);
}

/* --- without memory ------------------------------------------------------------------------- */

/* What a failed call must leave as it was. */
typedef struct {
    mm_traced_memory memories[64];
    mm_sums_row rows[64];
    size_t memory_count, row_count, pieces;
    uint64_t ambiguous;
} snapshot;

static snapshot
snapshot_of(const mm_attribution *a, const mm_event_list *pieces)
{
    const mm_traced_memory *memories;
    const mm_sums_row *rows;
    snapshot s;

    memset(&s, 0, sizeof s);
    s.memory_count = mm_attribution_memories(a, &memories);
    s.row_count = mm_attribution_rows(a, &rows);
    CHECK(s.memory_count <= 64 && s.row_count <= 64);
    for (size_t i = 0; i < s.memory_count; i++) {
        s.memories[i].kind = memories[i].kind; /* not the bytes between the fields */
        s.memories[i].start = memories[i].start;
        s.memories[i].size = memories[i].size;
        s.memories[i].born = memories[i].born;
        s.memories[i].died = memories[i].died;
        s.memories[i].serial = memories[i].serial;
        s.memories[i].label = memories[i].label;
    }
    for (size_t i = 0; i < s.row_count; i++) {
        memcpy(&s.rows[i], &rows[i], sizeof *rows);
    }
    s.pieces = pieces->count;
    s.ambiguous = mm_attribution_ambiguous(a);
    return s;
}

enum { STEPS = 5 };

typedef struct {
    mm_attribution *a, *other;
    mm_event_list pieces;
    mm_allocation_record records[8];
    allocations known;
} story;

/* One call; they come one after the other. */
static int
take_step(story *s, int step, mm_status *st)
{
    static const mm_named_range named[] = {{BASE + 3 * PAGE, PAGE, "n"}, {BASE, PAGE, "m"}};
    mm_event events[40];

    for (size_t i = 0; i < 40; i++) { /* not in order, over known, foreign and unknown memory */
        events[i] = i % 2 ? up(100 - i, BASE + i * BLOCK / 2, BLOCK)
                          : down(200 - i, BASE + i * BLOCK / 3, BLOCK);
    }
    switch (step) {
    case 0:
        return mm_attribution_set_memories(s->a, s->records, 5, named, 1, st);
    case 1:
        return mm_attribution_add(s->a, 1, events, 40, &s->pieces, st);
    case 2:
        return mm_attribution_set_memories(s->a, s->records, 8, named, 2, st);
    case 3:
        return mm_attribution_find_foreign(s->a, events, 40, find_allocation, &s->known, st);
    case 4:
        return mm_attribution_add(s->a, 2, events, 40, &s->pieces, st);
    default:
        return mm_attribution_merge(s->a, s->other, st);
    }
}

static void
begin_story(story *s)
{
    const mm_named_range named = {BASE + 5 * PAGE, PAGE, "of the other"};
    mm_status st;

    memset(s, 0, sizeof *s);
    for (size_t i = 0; i < 8; i++) {
        s->records[i] = record_of(BASE + i * BLOCK, BLOCK - PAGE, 0, i % 2 ? ALWAYS : 100, i + 1);
    }
    s->known.items[0].start = BASE + 9 * BLOCK;
    s->known.items[0].size = BLOCK + 100;
    s->known.items[1].start = BASE + 12 * BLOCK; /* the rest of its page is asked for in vain */
    s->known.items[1].size = 100;
    s->a = attribution_of(NULL, 0);
    s->records[6].serial += 100; /* the other one has a memory that is not here */
    s->other = attribution_of(NULL, 0);
    CHECK_OK(mm_attribution_set_memories(s->other, s->records, 7, &named, 1, &st), &st);
    s->records[6].serial -= 100;
    s->known.items[2].start = BASE + 15 * BLOCK;
    s->known.items[2].size = BLOCK;
    s->known.count = 3; /* one of which is freed before it is asked for here */
    CHECK_OK(take_step(&(story){.a = s->other, .known = s->known}, 3, &st), &st);
    s->known.count = 2;
    {
        mm_event e = up(100, BASE, 60 * BLOCK);
        add(s->other, 1, &e, 1, NULL);
    }
}

static void
end_story(story *s)
{
    mm_attribution_free(s->a);
    mm_attribution_free(s->other);
    free(s->pieces.items);
}

TEST(a_call_without_memory_changes_nothing)
{
    long before = live_bytes();
    story undisturbed;
    snapshot last;
    mm_status st;

    begin_story(&undisturbed);
    for (int step = 0; step <= STEPS; step++) {
        CHECK_OK(take_step(&undisturbed, step, &st), &st);
    }
    last = snapshot_of(undisturbed.a, &undisturbed.pieces);
    CHECK(last.row_count > 20 && last.pieces > 100);
    for (int failing = 0; failing <= STEPS; failing++) {
        bool failed = true;
        for (long nth = 1; failed; nth++) {
            snapshot present;
            story s;
            int rc;
            begin_story(&s);
            for (int step = 0; step < failing; step++) {
                CHECK_OK(take_step(&s, step, &st), &st);
            }
            present = snapshot_of(s.a, &s.pieces);
            fail_allocation(nth);
            rc = take_step(&s, failing, &st);
            failed = allocation_has_failed();
            CHECK_EQUAL(rc, failed ? -1 : 0);
            CHECK(failed || nth > 1); /* each call allocates */
            if (failed) {
                snapshot now = snapshot_of(s.a, &s.pieces);
                CHECK_EQUAL(st.kind, MM_NO_MEMORY);
                CHECK(memcmp(&now, &present, sizeof now) == 0);
            }
            for (int step = failed ? failing : failing + 1; step <= STEPS; step++) {
                CHECK_OK(take_step(&s, step, &st), &st);
            }
            present = snapshot_of(s.a, &s.pieces);
            for (size_t i = 0; i < present.memory_count; i++) { /* copies of equal labels */
                CHECK(last.memories[i].label == NULL
                      || strcmp(present.memories[i].label, last.memories[i].label) == 0);
                present.memories[i].label = last.memories[i].label;
            }
            CHECK(memcmp(&present, &last, sizeof last) == 0);
            end_story(&s);
        }
    }
    mm_attribution_free(NULL);
    fail_allocation(1);
    CHECK(mm_attribution_new(&st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK(allocation_has_failed());
    end_story(&undisturbed);
    CHECK_EQUAL(live_bytes(), before);
}

static void *
attribute_alone(void *argument)
{
    const mm_event *e = argument;
    const mm_allocation_record record = record_of(BASE, BLOCK, 0, ALWAYS, 1);
    mm_attribution *a = attribution_of(&record, 1);

    for (int i = 0; i < 100; i++) {
        add(a, 0, e, 1, NULL);
    }
    CHECK_EQUAL(sums_of(a, 0, 0).moved[MM_TO_DEVICE][MM_CAUSE_FAULT], 100 * PAGE);
    mm_attribution_free(a);
    return NULL;
}

/* Nothing is shared between two of them. */
TEST(threads_attribute_at_once)
{
    mm_event e = up(5, BASE, PAGE);

    check_threads(4, attribute_alone, &e);
}

TEST_MAIN(no_driver)
