/* test_allocation_log_threads.c: threads that allocate, name and free memory while another one
 * starts and stops logs. */
#include <sched.h>

#include "logged_allocations.h"

enum { WORKERS = 4, ROUNDS = 300, LOGS = 60 };

/* --- threads ------------------------------------------------------------------------------ */

typedef struct {
    CUdeviceptr start; /* of memory that all wrap */
    mm_memory *shared; /* that all name */
    atomic_int joined;
    atomic_bool stop;
} crowd;

/* Checks that the name is one that a thread has set, never a mixture. */
static void
check_shared_name(mm_memory *shared)
{
    char text[MM_NAME_BYTES + 1];

    if (mm_allocation_entry_read_name(&shared->entry, text)) {
        size_t length = strlen(text);
        CHECK(length == 10 || length == 190);
        CHECK_EQUAL(strspn(text, length == 10 ? "a" : "b"), length);
    }
}

static void *
live_and_die(void *argument)
{
    static const char *const bs =
        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
    crowd *c = argument;

    for (int i = 0; i < ROUNDS || !atomic_load(&c->stop); i++) {
        mm_memory *owned = world_allocate(SIZE), *wrapped = wrap(c->start, SIZE);
        name(wrapped, i % 2 ? "wrapped" : NULL);
        name(owned, "owned");
        name(c->shared, i % 3 ? i % 2 ? "aaaaaaaaaa" : bs : NULL);
        check_shared_name(c->shared);
        if (i % 5 == 0) {
            CHECK_EQUAL(close_memory(wrapped), 0);
            mm_memory_reopen(wrapped);
        }
        mm_memory_release(owned);
        mm_memory_release(wrapped);
    }
    return NULL;
}

static void
check_records(log_copy copy, CUdeviceptr shared)
{
    uint64_t now = clock_now();

    for (size_t i = 0; i < copy.count; i++) {
        const mm_allocation_record *r = &copy.records[i];
        CHECK(r->born <= r->died && (r->died == ALIVE || r->died <= now));
        CHECK(r->size == 2 * mm_page_size() || r->start == shared);
        CHECK(strcmp(r->label, "owned") == 0 || strcmp(r->label, "wrapped") == 0
              || strchr(r->label, '#') != NULL || strlen(r->label) == 10
              || strlen(r->label) == 190);
    }
}

/* Each record of an earlier copy is the same in a later one, except that it may have died. */
static void
check_prefix(log_copy earlier, log_copy later)
{
    CHECK(later.count >= earlier.count);
    for (size_t i = 0; i < earlier.count; i++) {
        CHECK_EQUAL(later.records[i].serial, earlier.records[i].serial);
        CHECK_EQUAL(later.records[i].start, earlier.records[i].start);
        CHECK_EQUAL(later.records[i].born, earlier.records[i].born);
    }
}

static void *
log_all(void *argument)
{
    crowd *c = argument;

    for (int i = 0; i < LOGS; i++) {
        log_copy one, two;
        start_log();
        one = copy_log();
        (void)sched_yield();
        two = copy_log();
        mm_allocation_log_stop();
        check_records(one, c->start);
        check_records(two, c->start);
        check_prefix(one, two);
        drop(one);
        drop(two);
    }
    atomic_store(&c->stop, true);
    return NULL;
}

static void *
live_or_log(void *argument)
{
    crowd *c = argument;

    return atomic_fetch_add(&c->joined, 1) == 0 ? log_all(c) : live_and_die(c);
}

TEST(threads_live_while_logs_start_and_stop)
{
    mm_memory *owned = world_allocate(SIZE), *shared = wrap(owned->start, 100);
    crowd c = {.start = owned->start, .shared = shared};

    check_threads(WORKERS + 1, live_or_log, &c);
    mm_memory_release(shared);
    mm_memory_release(owned);
    start_log();
    CHECK_EQUAL(mm_allocation_log_count(), 0);
    mm_allocation_log_stop();
}

TEST_MAIN(world_open)
