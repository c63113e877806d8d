/* test_life_names.c: names of memories, labels of those without one, and failed allocations of either.
 *
 * Usage: test_life_names PATH_OF_THE_EMULATED_DRIVER. */
#include "failing_allocations.h"
#include "logged_lives.h"

/* --- names and labels ---------------------------------------------------------------------- */

static void
names_are_kept(void)
{
    char text[MM_NAME_BYTES + 1], longest[MM_NAME_BYTES + 1];
    mm_memory *m = allocate(SIZE);
    mm_status st;
    bool done = true;

    memset(longest, 'x', MM_NAME_BYTES);
    longest[MM_NAME_BYTES] = '\0';
    CHECK(!mm_life_read_name(&m->life, text));
    name(m, "weights");
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, "weights") == 0);
    name(m, longest);
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, longest) == 0);
    name(m, NULL);
    CHECK(!mm_life_read_name(&m->life, text));
    name(m, "again");
    CHECK_EQUAL(close_memory(m), 0);
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, "again") == 0);
    CHECK_OK(mm_memory_set_name(m, "late", &done, &st), &st);
    CHECK(!done);
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, "again") == 0);
    mm_memory_release(m);
}

static void
names_count_whenever_they_are_given(void)
{
    mm_memory *before = allocate(SIZE), *during;

    start_log();
    during = allocate(SIZE);
    name(before, "before");
    name(during, "first");
    check_label(0, "before");
    check_label(1, "first");
    name(during, "second");
    check_label(1, "second");
    mm_memory_release(during); /* a name outlives its memory in the log */
    mm_memory_release(before);
    check_label(0, "before");
    check_label(1, "second");
    mm_lives_log_stop();
}

static void
a_memory_without_a_name_is_labelled_by_its_birth(void)
{
    mm_memory *described = allocate(SIZE), *other = allocate(SIZE);
    const int64_t shape[] = {10, 125};
    char text[64];

    mm_life_describe(&described->life, "float32", 2, shape);
    name(described, "weights");
    start_log();
    check_label(0, "weights");
    name(described, NULL);
    (void)snprintf(text, sizeof text, "float32[10,125] #%llu",
                   (unsigned long long)described->life.serial);
    check_label(0, text);
    (void)snprintf(text, sizeof text, "8.0K #%llu", (unsigned long long)other->life.serial);
    check_label(1, text);
    mm_memory_release(described);
    mm_memory_release(other);
    mm_lives_log_stop();
}

/* Lets each allocation of the call fail in turn, until all succeed. Returns how many could
 * fail. */
static long
count_failures(int (*call)(void *, mm_status *), void *argument)
{
    for (long nth = 1;; nth++) {
        long before = live_bytes();
        mm_status st;
        int rc;

        fail_allocation(nth);
        rc = call(argument, &st);
        if (!allocation_has_failed()) {
            CHECK_EQUAL(rc, 0);
            return nth - 1;
        }
        CHECK_EQUAL(rc, -1);
        CHECK_EQUAL(st.kind, MM_NO_MEMORY);
        CHECK_EQUAL(live_bytes(), before);
    }
}

static int
rename_memory(void *memory, mm_status *st)
{
    bool done;

    return mm_memory_set_name(memory, "after", &done, st);
}

static int
copy_and_drop(void *count, mm_status *st)
{
    log_copy copy;

    if (mm_lives_log_copy(&copy.records, &copy.count, st) < 0) {
        CHECK(copy.records == NULL && copy.count == 0);
        return -1;
    }
    CHECK_EQUAL(copy.count, *(size_t *)count);
    drop(copy);
    return 0;
}

static int
start_and_stop(void *unused, mm_status *st)
{
    int rc = mm_lives_log_start(SIZE_MAX, st);

    (void)unused;
    mm_lives_log_stop();
    return rc;
}

/* Births, deaths and the borders of a log need no memory; names and copies fail as a whole. */
static void
out_of_host_memory_changes_nothing(void)
{
    size_t count = 2;
    mm_memory *m = allocate(SIZE), *other = allocate(SIZE);
    char text[MM_NAME_BYTES + 1];

    name(m, "before");
    fail_allocation(1);
    CHECK_EQUAL(rename_memory(m, &(mm_status){0}), -1);
    CHECK(allocation_has_failed());
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, "before") == 0);
    CHECK_EQUAL(count_failures(rename_memory, m), 1);
    CHECK(mm_life_read_name(&m->life, text) && strcmp(text, "after") == 0);
    CHECK_EQUAL(count_failures(start_and_stop, NULL), 0);
    start_log();
    fail_allocation(1);
    mm_life_end(&other->life);
    mm_life_resume(&other->life);
    CHECK(!allocation_has_failed());
    CHECK_EQUAL(count_failures(copy_and_drop, &count), 3); /* the records, and two labels */
    mm_lives_log_stop();
    mm_memory_release(m);
    mm_memory_release(other);
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(names_are_kept),
        CHECK_TEST(names_count_whenever_they_are_given),
        CHECK_TEST(a_memory_without_a_name_is_labelled_by_its_birth),
        CHECK_TEST(out_of_host_memory_changes_nothing),
    };

    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s EMULATED_DRIVER\n", argv[0]);
        return 2;
    }
    world_open(argv[1]);
    return check_run(tests, sizeof tests / sizeof *tests);
}
