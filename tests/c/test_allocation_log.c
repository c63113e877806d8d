/* test_allocation_log.c: the list of the memories that live, and the log of births and
 * deaths: of owned memory, blocks of pools and wrapped memory, and without memory for names and
 * copies. */
#include "failing_allocations.h"
#include "logged_allocations.h"

enum { MANY = 100 };

/* --- births and deaths ------------------------------------------------------------------- */

static uint64_t allocated_at, freed_at; /* by the driver's calls */
static CUresult (*real_allocate)(CUdeviceptr *, size_t, unsigned int);
static CUresult (*real_free)(CUdeviceptr);

static CUresult
timed_allocate(CUdeviceptr *start, size_t size, unsigned int flags)
{
    CUresult code = real_allocate(start, size, flags);

    allocated_at = clock_now();
    return code;
}

static mm_memory *successor; /* made by timed_free, as by another thread */

static CUresult
timed_free(CUdeviceptr start)
{
    CUresult code = real_free(start);

    freed_at = clock_now();
    world.cu->MemFree = real_free;
    successor = world_allocate(SIZE);
    return code;
}

/* Born after the allocation returned, dead after the free returned, which waits for work. Memory that
 * gets the address meanwhile is a later entry. */
TEST(an_entry_lasts_until_the_free_returns)
{
    mm_allocation_record record;
    char label[MM_NAME_BYTES + 1];
    mm_memory *m;

    real_allocate = world.cu->MemAllocManaged;
    real_free = world.cu->MemFree;
    world.cu->MemAllocManaged = timed_allocate;
    world.cu->MemFree = timed_free;
    start_log();
    m = world_allocate(SIZE);
    record = record_at(0, label);
    CHECK(allocated_at > 0 && record.born >= allocated_at && record.born <= clock_now());
    CHECK_EQUAL(record.died, ALIVE);
    CHECK_EQUAL(record.start, m->start);
    CHECK_EQUAL(record.size, 2 * mm_page_size()); /* whole pages */
    mm_memory_release(m);
    record = record_at(0, label);
    CHECK(freed_at > 0 && record.died >= freed_at && record.died <= clock_now());
    CHECK(record_at(1, label).serial > record.serial && record_at(1, label).born < record.died);
    CHECK_EQUAL(record_at(1, label).died, ALIVE);
    world.cu->MemAllocManaged = real_allocate;
    mm_allocation_log_stop();
    mm_memory_release(successor);
}

TEST(memory_from_before_has_no_birth)
{
    mm_memory *before = world_allocate(SIZE), *after;
    char label[MM_NAME_BYTES + 1];
    uint64_t serial;

    mm_memory_release(world_allocate(SIZE)); /* is in no log */
    start_log();
    CHECK_EQUAL(mm_allocation_log_count(), 1);
    after = world_allocate(SIZE);
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    CHECK_EQUAL(record_at(0, label).born, 0);
    CHECK_EQUAL(record_at(0, label).start, before->start);
    serial = record_at(0, label).serial;
    CHECK(record_at(1, label).born > 0);
    CHECK_EQUAL(record_at(1, label).serial, serial + 2);
    mm_allocation_log_stop();
    start_log(); /* memory that was born in an earlier log */
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    CHECK_EQUAL(record_at(1, label).born, 0);
    CHECK_EQUAL(record_at(1, label).serial, serial + 2);
    mm_allocation_log_stop();
    mm_memory_release(before);
    mm_memory_release(after);
}

TEST(one_log_runs_at_a_time)
{
    log_copy copy;
    mm_status st;

    CHECK_EQUAL(mm_allocation_log_copy(&copy.records, &copy.count, &st), -1);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(copy.records == NULL);
    start_log();
    CHECK_EQUAL(mm_allocation_log_start(SIZE_MAX, &st), -1);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    copy = copy_log();
    CHECK_EQUAL(copy.count, 0);
    drop(copy);
    mm_allocation_log_stop();
    mm_allocation_log_stop();
    CHECK_EQUAL(mm_allocation_log_copy(&copy.records, &copy.count, &st), -1);
    mm_allocation_records_free(NULL, 0);
}

TEST(no_bytes_have_no_entry)
{
    mm_memory *m, *wrapped;

    start_log();
    m = world_allocate(0);
    wrapped = wrap(0, 0);
    name(m, "nothing");
    CHECK_EQUAL(mm_allocation_log_count(), 0);
    mm_memory_release(m);
    mm_memory_release(wrapped);
    mm_allocation_log_stop();
}

/* --- frees that the driver refuses ------------------------------------------------------- */

TEST(other_failed_frees_end_the_entry)
{
    mm_memory *m;

    start_log();
    m = world_allocate(SIZE);
    world.fail("cuMemFree", 1, CUDA_ERROR_LAUNCH_FAILED, 1);
    CHECK_EQUAL(close_memory(m), -1);
    world.fail_clear();
    CHECK(death_of(0) != ALIVE);
    mm_allocation_log_stop();
    mm_memory_release(m); /* the struct outlives the log */
}

/* --- pools --------------------------------------------------------------------------------- */

static mm_memory *
allocate_from(mm_pool *pool, size_t size)
{
    mm_status st;
    mm_memory *m = mm_memory_allocate_from(world.cu, pool, size, NULL, NULL, &st);

    CHECK(m != NULL);
    return m;
}

TEST(blocks_of_pools_live)
{
    CUmemLocation location = mm_location(CU_MEM_LOCATION_TYPE_NONE, 0);
    mm_status st;
    mm_pool *pool = mm_pool_create(world.cu, true, location, 0, &st);
    char label[MM_NAME_BYTES + 1];
    mm_memory *m;

    CHECK(pool != NULL);
    start_log();
    m = allocate_from(pool, SIZE);
    CHECK_EQUAL(record_at(0, label).start, m->start);
    CHECK_EQUAL(record_at(0, label).size, 2 * mm_page_size());
    world.fail("cuMemFreeAsync", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    CHECK_EQUAL(close_memory(m), -1);
    world.fail_clear();
    CHECK_EQUAL(death_of(0), ALIVE);
    world.fail("cuMemFreeAsync", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    mm_memory_retain(m);
    CHECK(!mm_memory_release_hold(m) && mm_memory_release_hold(m));
    mm_memory_retire(m); /* its block waits, without the memory */
    world.fail_clear();
    CHECK(death_of(0) != ALIVE);
    mm_memory_release_reference(m);
    mm_memory_release_reference(m);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
    mm_memory_release(allocate_from(pool, SIZE));
    CHECK(death_of(1) != ALIVE);
    mm_allocation_log_stop();
    CHECK_OK(mm_pool_release(pool, &st), &st);
}

/* --- wrapped memory ------------------------------------------------------------------------ */

TEST(wrapped_memory_with_a_name_has_an_entry)
{
    mm_memory *owned = world_allocate(SIZE), *before = wrap(owned->start, 100), *during;
    char label[MM_NAME_BYTES + 1];
    uint64_t wrapped;

    start_log();
    during = wrap(owned->start + 7, 100);
    wrapped = clock_now();
    name(before, NULL);
    CHECK_EQUAL(mm_allocation_log_count(), 1); /* without names, they are passing views */
    name(during, "during");
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    CHECK(record_at(1, label).born > 0 && record_at(1, label).born <= wrapped);
    CHECK_EQUAL(record_at(1, label).start, owned->start + 7);
    CHECK_EQUAL(record_at(1, label).size, 100);
    name(before, "part");
    CHECK_EQUAL(mm_allocation_log_count(), 3);
    CHECK_EQUAL(record_at(2, label).born, 0); /* wrapped before the log */
    check_label(2, "part");
    name(during, NULL);
    mm_memory_release(during);
    CHECK(death_of(1) != ALIVE);
    mm_allocation_log_stop();
    start_log();
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    mm_memory_release(before);
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    mm_allocation_log_stop();
    mm_memory_release(owned);
}

static mm_memory *
wrap_living(CUdeviceptr start, size_t size)
{
    mm_memory *m = wrap(start, size);

    mm_memory_add_entry(m);
    return m;
}

/* The view of a closed buffer keeps the struct, not the memory. */
TEST(wrapped_memory_dies_with_its_last_hold)
{
    mm_memory *m;

    start_log();
    m = wrap_living(4096, 100);
    CHECK(mm_memory_release_hold(m));
    mm_memory_retire(m);
    CHECK(death_of(0) != ALIVE);
    mm_memory_release_reference(m);
    m = wrap_living(4096, 100);
    CHECK_EQUAL(close_memory(m), 0);
    CHECK(death_of(1) != ALIVE);
    mm_memory_reopen(m); /* its resource could not free it */
    CHECK_EQUAL(death_of(1), ALIVE);
    mm_memory_release(m);
    CHECK(death_of(1) != ALIVE);
    mm_allocation_log_stop();
}

/* --- a full log --------------------------------------------------------------------------- */

static void
release_all(mm_memory *const *memories, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        mm_memory_release(memories[i]);
    }
}

/* Memories beyond it leave nothing, and are memories like others in the next log. */
TEST(a_full_log_does_not_grow)
{
    mm_memory *lasting[MANY];
    mm_status st;
    long bytes;

    CHECK_OK(mm_allocation_log_start(2, &st), &st);
    for (int i = 0; i < MANY; i++) {
        lasting[i] = world_allocate(SIZE);
        CHECK_EQUAL(mm_allocation_log_missed(), i < 2 ? 0 : i - 1);
        CHECK_EQUAL(mm_allocation_log_count(), i < 2 ? i + 1 : 2);
    }
    bytes = live_bytes();
    for (int i = 0; i < MANY; i++) {
        mm_memory_release(world_allocate(SIZE));
        CHECK_EQUAL(live_bytes(), bytes);
    }
    CHECK_EQUAL(mm_allocation_log_missed(), 2 * MANY - 2);
    mm_memory_release(lasting[0]);
    mm_memory_release(lasting[MANY - 1]);
    CHECK_EQUAL(mm_allocation_log_count(), 2);
    mm_allocation_log_stop();
    CHECK_EQUAL(mm_allocation_log_count(), MANY - 2);
    start_log();
    CHECK_EQUAL(mm_allocation_log_missed(), 0);
    release_all(lasting + 1, 2);
    CHECK_EQUAL(mm_allocation_log_count(), MANY - 2); /* the dead included */
    mm_allocation_log_stop();
    release_all(lasting + 3, MANY - 4);
    CHECK_EQUAL(mm_allocation_log_count(), 0);
}

/* --- without memory ------------------------------------------------------------------------- */

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

    if (mm_allocation_log_copy(&copy.records, &copy.count, st) < 0) {
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
    int rc = mm_allocation_log_start(SIZE_MAX, st);

    (void)unused;
    mm_allocation_log_stop();
    return rc;
}

/* Births, deaths and the borders of a log need no memory; names and copies fail as a whole. */
TEST(out_of_host_memory_changes_nothing)
{
    size_t count = 2;
    mm_memory *m = world_allocate(SIZE), *other = world_allocate(SIZE);
    char text[MM_NAME_BYTES + 1];

    name(m, "before");
    fail_allocation(1);
    CHECK_EQUAL(rename_memory(m, &(mm_status){0}), -1);
    CHECK(allocation_has_failed());
    CHECK(mm_allocation_entry_read_name(&m->entry, text) && strcmp(text, "before") == 0);
    CHECK_EQUAL(count_failures(rename_memory, m), 1);
    CHECK(mm_allocation_entry_read_name(&m->entry, text) && strcmp(text, "after") == 0);
    CHECK_EQUAL(count_failures(start_and_stop, NULL), 0);
    start_log();
    fail_allocation(1);
    mm_allocation_entry_end(&other->entry);
    mm_allocation_entry_resume(&other->entry);
    CHECK(!allocation_has_failed());
    CHECK_EQUAL(count_failures(copy_and_drop, &count), 3); /* the records, and two labels */
    mm_allocation_log_stop();
    mm_memory_release(m);
    mm_memory_release(other);
}

TEST_MAIN(world_open)
