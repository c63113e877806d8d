/* test_pagemap.c: both ways of reading the page map against each other and against the pages that
 * were touched, with every system call failing or lying, and the NUMA nodes of pages. */
#include <errno.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failing_allocations.h"
#include "fake_pagemap.h"
#include "world.h"

enum { PAGES = 3000, TRIALS = 40, ROUNDS = 200, MILLION = 1000000 };
enum { POPULATE_READ = 22 }; /* MADV_POPULATE_READ of Linux 5.14 */

/* --- memory with mapped pages that are known ---------------------------------------------- */

/* Private memory of one's own, none of it mapped. */
static uint64_t
map_pages(size_t count)
{
    void *memory = mmap(NULL, count * page_size(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    CHECK(memory != MAP_FAILED);
    (void)madvise(memory, count * page_size(), MADV_NOHUGEPAGE);
    return (uint64_t)(uintptr_t)memory;
}

static void
unmap_pages(uint64_t start, size_t count)
{
    CHECK_EQUAL(munmap((void *)(uintptr_t)start, count * page_size()), 0);
}

static void
touch_page(uint64_t start, size_t page)
{
    *(volatile char *)(uintptr_t)(start + page * page_size()) = 1;
}

static unsigned
next_number(unsigned *seed)
{
    *seed = *seed * 1664525U + 1013904223U;
    return *seed >> 8;
}

/* Touches pages in runs of random lengths; expected[i] says whether page i is mapped. */
static void
touch_some(uint64_t start, bool expected[PAGES], unsigned seed)
{
    unsigned longest = 1U << next_number(&seed) % 10;

    memset(expected, 0, PAGES * sizeof *expected);
    for (size_t i = 0; i < PAGES;) {
        bool touched = next_number(&seed) % 2 != 0;
        for (size_t n = 1 + next_number(&seed) % longest; n > 0 && i < PAGES; n--, i++) {
            expected[i] = touched;
            if (touched) {
                touch_page(start, i);
            }
        }
    }
}

static void
check_spans(const mm_spans *spans, uint64_t start, const bool expected[PAGES])
{
    size_t at = 0;

    for (size_t i = 0; i < PAGES;) {
        size_t first = i;
        while (i < PAGES && expected[i] == expected[first]) {
            i++;
        }
        if (expected[first]) {
            CHECK(at < spans->count);
            CHECK_EQUAL((spans->span[at].start - start) / page_size(), first);
            CHECK_EQUAL((spans->span[at].end - start) / page_size(), i);
            at++;
        }
    }
    CHECK_EQUAL(at, spans->count);
}

/* --- calls that fail or lie ---------------------------------------------------------------- */

static int
read_pages(mm_pagemap_source *source, uint64_t start, size_t count, mm_spans *out, mm_status *st)
{
    mm_pagemap map;
    int rc;

    *out = (mm_spans){0};
    if (mm_pagemap_open(&map, source, st) < 0) {
        return -1;
    }
    rc = mm_pagemap_read(&map, (mm_span){start, start + count * page_size()}, out, st);
    mm_pagemap_close(&map);
    return rc;
}

/* --- reading the page map -------------------------------------------------------------------- */

static bool
kernel_scans(void)
{
    mm_pagemap_source source = fresh_source();
    uint64_t start = map_pages(1);
    mm_spans spans;
    mm_status st;

    CHECK_OK(read_pages(&source, start, 1, &spans, &st), &st);
    mm_spans_free(&spans);
    unmap_pages(start, 1);
    return !atomic_load(&source.lacks_scan);
}

TEST(both_ways_agree_with_what_was_touched)
{
    static bool expected[PAGES];

    for (unsigned seed = 1; seed <= TRIALS; seed++) {
        uint64_t start = map_pages(PAGES);
        mm_pagemap_source source = fresh_source();
        mm_spans spans;
        mm_status st;
        touch_some(start, expected, seed);
        CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
        check_spans(&spans, start, expected);
        mm_spans_free(&spans);
        source = fresh_source();
        fake.scan_error = ENOTTY;
        CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
        check_spans(&spans, start, expected);
        CHECK(fake.reads > 0);
        mm_spans_free(&spans);
        unmap_pages(start, PAGES);
    }
}

TEST(a_kernel_without_scans_is_remembered)
{
    static const struct {
        int error;
        bool remembered;
    } cases[] = {{ENOTTY, true}, {EINVAL, true}, {ENOMEM, false}, {EPERM, false}, {EINTR, false}};
    uint64_t start = map_pages(PAGES);
    bool expected[PAGES];
    mm_status st;

    touch_some(start, expected, 7);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mm_pagemap_source source = fresh_source();
        fake.scan_error = cases[i].error;
        for (int round = 0; round < 3; round++) {
            mm_spans spans;
            CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
            check_spans(&spans, start, expected);
            mm_spans_free(&spans);
        }
        CHECK_EQUAL(fake.scans, cases[i].remembered ? 1 : 3);
        CHECK_EQUAL(fake.opened, 3);
        CHECK_EQUAL(fake.closed, 3);
    }
    unmap_pages(start, PAGES);
}

/* Alternate pages, so that one scan does not reach the end. */
TEST(a_scan_that_fails_halfway_is_finished_by_entries)
{
    uint64_t start = map_pages(PAGES);
    bool expected[PAGES];
    mm_pagemap_source source = fresh_source();
    mm_spans spans;
    mm_status st;

    for (size_t i = 0; i < PAGES; i++) {
        expected[i] = i % 2 != 0;
        if (expected[i]) {
            touch_page(start, i);
        }
    }
    fake.scan_error = ENOMEM;
    fake.scan_after = 1;
    CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
    check_spans(&spans, start, expected);
    CHECK_EQUAL(fake.scans, kernel_scans() ? 2 : 1);
    mm_spans_free(&spans);
    unmap_pages(start, PAGES);
}

/* The words of the argument: size, flags, start, end, walk_end, regions. */
enum { START = 2, END = 3, WALK_END = 4, REGION_POINTER = 5 };

static uint64_t *
region(uint64_t *argument)
{
    return (uint64_t *)(uintptr_t)argument[REGION_POINTER];
}

static void
stand_still(uint64_t *argument, int *count)
{
    argument[WALK_END] = argument[START];
    *count = 0;
}

static void
walk_too_far(uint64_t *argument, int *count)
{
    (void)count;
    argument[WALK_END] = argument[END] + page_size();
}

static void
count_too_many(uint64_t *argument, int *count)
{
    (void)argument;
    *count = 513;
}

static void
name_a_region_before(uint64_t *argument, int *count)
{
    (void)count;
    region(argument)[0] = argument[START] - page_size();
}

static void
name_a_region_behind(uint64_t *argument, int *count)
{
    (void)count;
    region(argument)[1] = argument[WALK_END] + page_size();
}

static void
name_an_empty_region(uint64_t *argument, int *count)
{
    (void)count;
    region(argument)[1] = region(argument)[0];
}

static void
name_a_region_twice(uint64_t *argument, int *count)
{
    *count = 2;
    memcpy(region(argument) + 3, region(argument), 24);
}

TEST(scans_that_cannot_be_true_are_not_believed)
{
    static void (*const lies[])(uint64_t *, int *) = {
        stand_still,          walk_too_far,         count_too_many,     name_a_region_before,
        name_a_region_behind, name_an_empty_region, name_a_region_twice};
    uint64_t start = map_pages(PAGES);
    bool expected[PAGES];
    mm_status st;

    if (!kernel_scans()) {
        unmap_pages(start, PAGES);
        return;
    }
    touch_some(start, expected, 3);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        mm_pagemap_source source = fresh_source();
        mm_spans spans;
        fake.lie = lies[i];
        CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
        check_spans(&spans, start, expected);
        CHECK(!atomic_load(&source.lacks_scan));
        CHECK(fake.reads > 0);
        mm_spans_free(&spans);
    }
    unmap_pages(start, PAGES);
}

static void
check_refused(mm_pagemap_source *source, uint64_t start, int code)
{
    mm_spans spans;
    mm_status st;

    CHECK(read_pages(source, start, PAGES, &spans, &st) < 0);
    CHECK_EQUAL(st.kind, MM_SYSTEM_CALL);
    CHECK_EQUAL(st.code, code);
    CHECK_EQUAL(strcmp(st.function, "/proc/self/pagemap"), 0);
    CHECK_EQUAL(fake.opened, fake.closed);
    mm_spans_free(&spans);
}

TEST(refusals_name_the_file)
{
    static const int open_errors[] = {ENOENT, EACCES, EMFILE, EPERM};
    static const int read_errors[] = {EFAULT, EPERM, ENOMEM};
    uint64_t start = map_pages(PAGES);
    mm_pagemap_source source;

    for (size_t i = 0; i < sizeof open_errors / sizeof *open_errors; i++) {
        source = fresh_source();
        fake.open_error = open_errors[i];
        check_refused(&source, start, open_errors[i]);
    }
    for (size_t i = 0; i < sizeof read_errors / sizeof *read_errors; i++) {
        source = fresh_source();
        fake.scan_error = ENOTTY;
        fake.read_error = read_errors[i];
        fake.read_errors = 1;
        check_refused(&source, start, read_errors[i]);
    }
    source = fresh_source(); /* the end of the file, as of a process that ended */
    fake.scan_error = ENOTTY;
    fake.read_errors = 1;
    check_refused(&source, start, EIO);
    unmap_pages(start, PAGES);
}

TEST(short_and_interrupted_reads_go_on)
{
    static const ssize_t lengths[] = {8, 9, 15, 64, 1000, 4096};
    uint64_t start = map_pages(PAGES);
    bool expected[PAGES];
    mm_status st;

    touch_some(start, expected, 11);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        mm_pagemap_source source = fresh_source();
        mm_spans spans;
        fake.scan_error = ENOTTY;
        fake.open_error = fake.read_error = EINTR;
        fake.read_errors = 5;
        fake.longest_read = lengths[i];
        CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
        check_spans(&spans, start, expected);
        mm_spans_free(&spans);
    }
    unmap_pages(start, PAGES);
}

TEST(reading_without_memory_leaves_nothing)
{
    uint64_t start = map_pages(PAGES);
    mm_status st;

    for (size_t i = 0; i < PAGES; i += 2) {
        touch_page(start, i);
    }
    for (int by_entries = 0; by_entries < 2; by_entries++) {
        bool failed = true;
        for (long nth = 1; failed; nth++) {
            mm_pagemap_source source = fresh_source();
            long before = live_bytes();
            mm_spans spans;
            int rc;
            fake.scan_error = by_entries ? ENOTTY : 0;
            fail_allocation(nth);
            rc = read_pages(&source, start, PAGES, &spans, &st);
            failed = allocation_has_failed();
            CHECK_EQUAL(rc < 0, failed);
            CHECK(!failed || st.kind == MM_NO_MEMORY);
            CHECK_EQUAL(fake.opened, fake.closed);
            mm_spans_free(&spans);
            CHECK_EQUAL(live_bytes(), before);
            CHECK(failed || nth > 5); /* the list of spans grows several times */
        }
    }
    unmap_pages(start, PAGES);
}

TEST(a_million_runs_are_read_both_ways)
{
    size_t count = 2 * (size_t)MILLION;
    uint64_t start = map_pages(count);
    mm_pagemap_source source;
    mm_spans spans;
    mm_status st;

    for (size_t i = 1; i < count; i += 2) {
        void *page = (void *)(uintptr_t)(start + i * page_size());
        if (madvise(page, page_size(), POPULATE_READ) != 0) {
            CHECK_EQUAL(errno, EINVAL); /* an older kernel */
            unmap_pages(start, count);
            return;
        }
    }
    for (int way_back = 0; way_back < 2; way_back++) {
        source = fresh_source();
        fake.scan_error = way_back ? ENOTTY : 0;
        CHECK_OK(read_pages(&source, start, count, &spans, &st), &st);
        CHECK_EQUAL(spans.count, MILLION);
        for (size_t i = 0; i < spans.count; i++) {
            uint64_t page = start + (2 * i + 1) * page_size();
            CHECK(spans.span[i].start == page && spans.span[i].end == page + page_size());
        }
        mm_spans_free(&spans);
    }
    unmap_pages(start, count);
}

/* --- NUMA nodes ------------------------------------------------------------------------------ */

TEST(nodes_are_counted_once)
{
    static const struct {
        const char *text;
        bool several;
    } cases[] = {{NULL, false},   {"", false},     {"0\n", false},   {"7\n", false},
                 {"0-1\n", true}, {"0,2\n", true}, {"0-1,4\n", true}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mm_pagemap_source source = fresh_source();
        fake.nodes = cases[i].text;
        CHECK_EQUAL(mm_pagemap_has_nodes(&source), cases[i].several);
        fake.nodes = cases[i].several ? NULL : "0-1\n"; /* nobody looks again */
        CHECK_EQUAL(mm_pagemap_has_nodes(&source), cases[i].several);
    }
}

static long
name_odd_nodes(unsigned long count, void **pages, int *nodes)
{
    (void)pages;
    for (unsigned long i = 0; i < count; i++) {
        nodes[i] = i % 2 == 0 ? MM_MOST_NODES : -EFAULT;
    }
    return 0;
}

TEST(bytes_of_nodes_are_those_of_their_pages)
{
    mm_pagemap_source source = fresh_source();
    uint64_t page = page_size(), bytes[MM_MOST_NODES] = {0}, expected[3] = {0};
    mm_span spans[2] = {{0, 0}, {0, 0}}, limits;
    mm_spans mapped = {spans, 2, 2};

    node_start = (uint64_t)1 << 40;
    spans[0] = (mm_span){node_start, node_start + 700 * page};
    spans[1] = (mm_span){node_start + 800 * page, node_start + 2000 * page};
    limits = (mm_span){node_start + page + 100, node_start + 1500 * page + 7};
    for (uint64_t n = 1; n <= 1500; n++) {
        uint64_t amount = n == 1 ? page - 100 : n == 1500 ? 7 : page;
        expected[n % 3] += n % 5 != 0 && (n < 700 || n >= 800) ? amount : 0;
    }
    fake.move_pages = spread_pages;
    CHECK(mm_pagemap_count_nodes(&source, &mapped, limits, bytes));
    for (int node = 0; node < MM_MOST_NODES; node++) {
        CHECK_EQUAL(bytes[node], node < 3 ? expected[node] : 0);
    }
    fake.move_pages = refuse_to_tell;
    CHECK(!mm_pagemap_count_nodes(&source, &mapped, limits, bytes));
    memset(bytes, 0, sizeof bytes);
    fake.move_pages = name_odd_nodes;
    CHECK(mm_pagemap_count_nodes(&source, &mapped, limits, bytes));
    for (int node = 0; node < MM_MOST_NODES; node++) {
        CHECK_EQUAL(bytes[node], 0);
    }
}

/* --- threads --------------------------------------------------------------------------------- */

static atomic_bool over;

static void *
map_and_unmap(void *argument)
{
    uint64_t start = *(const uint64_t *)argument;

    for (unsigned seed = 5; !atomic_load(&over);) {
        uint64_t page = start + next_number(&seed) % PAGES * page_size();
        int advice = next_number(&seed) % 2 ? POPULATE_READ : MADV_DONTNEED;
        (void)madvise((void *)(uintptr_t)page, page_size() * (1 + seed % 3), advice);
    }
    return NULL;
}

static void
check_order(const mm_spans *spans, uint64_t start)
{
    uint64_t end = start;

    for (size_t i = 0; i < spans->count; i++) {
        CHECK(spans->span[i].start >= end + (i > 0));
        CHECK(spans->span[i].end > spans->span[i].start);
        end = spans->span[i].end;
    }
    CHECK(end <= start + PAGES * page_size());
}

TEST(spans_keep_their_order_while_pages_come_and_go)
{
    uint64_t start = map_pages(PAGES + 4);
    pthread_t threads[2];
    mm_status st;

    atomic_store(&over, false);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, map_and_unmap, &start), 0);
    }
    for (int round = 0; round < ROUNDS; round++) {
        mm_pagemap_source source = fresh_source();
        mm_spans spans;
        fake.scan_error = round % 2 ? ENOTTY : 0;
        CHECK_OK(read_pages(&source, start, PAGES, &spans, &st), &st);
        check_order(&spans, start);
        mm_spans_free(&spans);
    }
    atomic_store(&over, true);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    unmap_pages(start, PAGES + 4);
}

static void
set_up(const char *path)
{
    world_open(path);
    world.schedule(0);
}

TEST_MAIN(set_up)
