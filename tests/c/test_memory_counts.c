/* test_memory_counts.c: counts of memories with peaks, and copies of what lives: of all sources, of
 * memory that resumes, beside a full log, and without host memory. */
#include "failing_allocations.h"
#include "logged_allocations.h"

static mm_memory_counts
read_counts(mm_source source, int device)
{
    mm_memory_tally tally;

    mm_allocation_counts_read(&tally, false);
    return tally.by[source][device + 1];
}

static void
check_counts(mm_source source, int device, uint64_t bytes, uint64_t living, uint64_t made)
{
    mm_memory_counts counts = read_counts(source, device);

    CHECK_EQUAL(counts.bytes, bytes);
    CHECK_EQUAL(counts.living, living);
    CHECK_EQUAL(counts.made, made);
}

/* The number that lives; the label of the last one is in `label`. */
static size_t
copy_living(char label[MM_NAME_BYTES + 1])
{
    mm_living_memory *memories;
    mm_status st;
    size_t count;

    CHECK_OK(mm_living_memories_copy(&memories, &count, &st), &st);
    for (size_t i = 1; i < count; i++) {
        CHECK(memories[i - 1].serial < memories[i].serial);
        CHECK(memories[i - 1].born <= memories[i].born && memories[i].born <= clock_now());
    }
    (void)snprintf(label, MM_NAME_BYTES + 1, "%s", count > 0 ? memories[count - 1].label : "");
    mm_living_memories_free(memories, count);
    return count;
}

TEST(what_lives_is_counted_by_source)
{
    size_t pages = 2 * mm_page_size();
    mm_memory *m = world_allocate(SIZE), *named = wrap(4096, 100), *lent = wrap(8192, 300);
    char label[MM_NAME_BYTES + 1];

    name(named, "only a name");
    mm_memory_add_entry(lent);
    check_counts(MM_FROM_DRIVER, MM_NO_DEVICE, pages, 1, 1);
    check_counts(MM_FROM_OTHERS, MM_NO_DEVICE, 300, 1, 1);
    CHECK_EQUAL(atomic_load(&mm_managed_bytes), pages);
    CHECK_EQUAL(copy_living(label), 2);
    CHECK(strcmp(label, "300B #3") == 0);
    mm_memory_release(m);
    mm_memory_release(named);
    mm_memory_release(lent);
    check_counts(MM_FROM_DRIVER, MM_NO_DEVICE, 0, 0, 1);
    check_counts(MM_FROM_OTHERS, MM_NO_DEVICE, 0, 0, 1);
    CHECK_EQUAL(atomic_load(&mm_managed_bytes), 0);
    CHECK_EQUAL(copy_living(label), 0);
}

TEST(memory_that_resumes_was_made_once)
{
    mm_memory *lent = wrap(8192, 300);
    uint64_t made = read_counts(MM_FROM_OTHERS, MM_NO_DEVICE).made + 1;

    mm_memory_add_entry(lent);
    mm_allocation_entry_end(&lent->entry);
    check_counts(MM_FROM_OTHERS, MM_NO_DEVICE, 0, 0, made);
    mm_allocation_entry_resume(&lent->entry);
    check_counts(MM_FROM_OTHERS, MM_NO_DEVICE, 300, 1, made);
    mm_memory_release(lent);
    check_counts(MM_FROM_OTHERS, MM_NO_DEVICE, 0, 0, made);
}

TEST(pools_count_by_device)
{
    CUmemLocation location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);
    uint64_t reserved[MM_COUNTED_DEVICES] = {0};
    mm_pool *own, *preferring;
    mm_status st;
    mm_memory *m;

    own = mm_pool_create(world.cu, false, location, 0, &st);
    preferring = mm_pool_create(world.cu, true, mm_location(CU_MEM_LOCATION_TYPE_NONE, 0), 0, &st);
    CHECK(own != NULL && preferring != NULL);
    m = mm_memory_allocate_from(world.cu, own, 100, NULL, NULL, &st);
    CHECK(m != NULL);
    check_counts(MM_FROM_DEVICE_POOL, 1, 100, 1, 1);
    CHECK_EQUAL(atomic_load(&mm_managed_bytes), 0);
    CHECK_OK(mm_pools_add_reserved(world.cu, reserved, &st), &st);
    CHECK(reserved[2] >= 100);
    CHECK_EQUAL(reserved[0] + reserved[1], 0);
    world.fail("cuMemPoolGetAttribute", 2, CUDA_ERROR_UNKNOWN, 0);
    CHECK_EQUAL(mm_pools_add_reserved(world.cu, reserved, &st), -1);
    world.fail_clear();
    mm_pool_drop(preferring); /* the last reference, so that the failure has kept none */
    CHECK_EQUAL(world.live_pools(), 1);
    mm_memory_release(m);
    mm_pool_drop(own);
    CHECK_OK(mm_device_synchronize(world.cu, 1, &st), &st);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){.pools = true});
    CHECK_EQUAL(world.live_pools(), 0);
}

TEST(peaks_are_reset_to_what_lives)
{
    mm_memory *m = world_allocate(SIZE), *other = world_allocate(1);
    mm_memory_tally tally;
    size_t page = mm_page_size();

    mm_allocation_counts_read(&tally, true); /* which also has the peaks before */
    mm_memory_release(m);
    mm_allocation_counts_read(&tally, true);
    CHECK_EQUAL(tally.all.peak_bytes, 3 * page);
    CHECK_EQUAL(read_counts(MM_FROM_DRIVER, MM_NO_DEVICE).peak_bytes, page);
    mm_memory_release(other);
    CHECK_EQUAL(read_counts(MM_FROM_DRIVER, MM_NO_DEVICE).peak_bytes, page);
}

TEST(what_began_beside_a_full_log_lives_too)
{
    mm_memory *before = world_allocate(SIZE), *during[3];
    char label[MM_NAME_BYTES + 1];
    mm_status st;

    CHECK_OK(mm_allocation_log_start(1, &st), &st);
    for (size_t i = 0; i < 3; i++) {
        during[i] = world_allocate(SIZE);
    }
    name(during[2], "last");
    CHECK_EQUAL(copy_living(label), 4);
    CHECK(strcmp(label, "last") == 0);
    mm_memory_release(before); /* stays in the list as a part of the log */
    CHECK_EQUAL(copy_living(label), 3);
    mm_allocation_log_stop();
    CHECK_EQUAL(copy_living(label), 3);
    for (size_t i = 0; i < 3; i++) {
        mm_memory_release(during[i]);
    }
}

TEST(copies_fail_as_a_whole)
{
    mm_memory *m = world_allocate(SIZE), *other = world_allocate(SIZE);
    char label[MM_NAME_BYTES + 1];
    mm_living_memory *memories;
    mm_status st;
    size_t count;

    for (long nth = 1; nth <= 5; nth++) { /* drafts, twice; records; two labels */
        fail_allocation(nth);
        CHECK_EQUAL(mm_living_memories_copy(&memories, &count, &st), -1);
        CHECK(allocation_has_failed() && memories == NULL && st.kind == MM_NO_MEMORY);
    }
    CHECK_EQUAL(copy_living(label), 2);
    mm_memory_release(m);
    mm_memory_release(other);
}

TEST_MAIN(world_open_devices)
