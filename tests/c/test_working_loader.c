/* test_working_loader.c: working sets at work on the emulated driver: threads, the thread's end,
 * memory that ends, and groups that are removed.
 *
 * Usage: test_working_loader PATH_OF_THE_EMULATED_DRIVER, which must have at least two devices. */
#include "driver/clock.h"
#include "working_layers.h"

/* --- threads ------------------------------------------------------------------------------ */

enum { TURNS = 200 };

typedef struct {
    mm_loader *l;
    atomic_int number;
} users;

static void *
use_layers(void *argument)
{
    users *u = argument;
    int number = atomic_fetch_add(&u->number, 1);
    CUstream stream = new_stream();
    mm_status own;
    mm_working_use use;

    for (int i = 0; i < TURNS; i++) {
        uint32_t group = (uint32_t)(i + number) % LAYERS;
        CHECK_OK(mm_loader_acquire(u->l, nth_group(group), i % 3 != 0, stream, &use, &own), &own);
        (void)report_of(u->l);
        CHECK_OK(mm_loader_release(u->l, nth_group(group), stream, &own), &own);
    }
    end_stream(stream);
    return NULL;
}

static void
threads_share_a_set(void)
{
    users u = {.number = 0};
    mm_loader_report report;

    make_layers();
    u.l = set_of_layers(2 * SIZE);
    check_threads(4, use_layers, &u);
    report = report_of(u.l);
    CHECK_EQUAL(report.decided.acquired, 4 * TURNS);
    CHECK(report.physical <= 2 * SIZE && report.reserved <= 2 * SIZE);
    CHECK_EQUAL(report.failures, 0);
    close_set(u.l);
    free_layers();
}

static void *
use_until_closed(void *argument)
{
    mm_loader *l = argument;
    mm_status own;
    mm_working_use use;

    for (uint32_t i = 0;
         mm_loader_acquire(l, nth_group(i % LAYERS), i % 4 < 2, NULL, &use, &own) == 0; i++) {
        CHECK_OK(mm_loader_release(l, nth_group(i % LAYERS), NULL, &own), &own);
    }
    CHECK_EQUAL(own.kind, MM_REFUSED);
    return NULL;
}

static void *
close_or_use(void *argument)
{
    static atomic_int turn;
    mm_status own;

    if (atomic_fetch_add(&turn, 1) % 3 == 2) {
        for (int i = 0; i < 100; i++) {
            (void)report_of(argument);
        }
        CHECK_OK(mm_loader_close(argument, &own), &own);
        return NULL;
    }
    return use_until_closed(argument);
}

static CUresult CUDAAPI
prefetch_behind_the_gate(CUdeviceptr start, size_t size, CUmemLocation location,
                         unsigned int flags, CUstream stream)
{
    const struct timespec nap = {.tv_nsec = 100000};

    while (!atomic_load(&gate_is_open)) {
        (void)nanosleep(&nap, NULL);
    }
    return world.cu->MemPrefetchAsync(start, size, location, flags, stream);
}

/* A stream that waits for what is yet to be queued could hold up the driver call that queues it. */
static void
a_use_waits_until_its_load_is_queued(void)
{
    mm_driver gated;
    mm_working_use use;
    pthread_t opener;
    mm_loader *l;

    memcpy(&gated, world.cu, sizeof gated);
    gated.MemPrefetchAsync = prefetch_behind_the_gate;
    atomic_store(&gate_is_open, false);
    make_layers();
    l = mm_loader_new(&gated, 0, SIZE, NULL, &st);
    CHECK(l != NULL);
    CHECK_EQUAL(add_layer(l, 0, MM_GROUP_READ), 0);
    CHECK_EQUAL(pthread_create(&opener, NULL, open_gate_later, NULL), 0);
    CHECK_OK(mm_loader_acquire(l, nth_group(0), false, NULL, &use, &st), &st);
    CHECK(atomic_load(&gate_is_open));
    CHECK_EQUAL(pthread_join(opener, NULL), 0);
    close_set(l);
    free_layers();
}

static PFN_cuMemPrefetchAsync_v12020 real_prefetch;
static atomic_uint_fast64_t prefetch_end, least_pause;
static atomic_int prefetches;

/* Notes the shortest time before a prefetch, without the first two. */
static CUresult CUDAAPI
slow_prefetch(CUdeviceptr ptr, size_t size, CUmemLocation location, unsigned int flags,
              CUstream stream)
{
    const struct timespec nap = {.tv_nsec = 20000000};
    uint64_t pause = mm_monotonic_clock() - atomic_load(&prefetch_end);
    CUresult code = real_prefetch(ptr, size, location, flags, stream);

    if (atomic_fetch_add(&prefetches, 1) > 1 && pause < atomic_load(&least_pause)) {
        atomic_store(&least_pause, pause);
    }
    (void)nanosleep(&nap, NULL);
    atomic_store(&prefetch_end, mm_monotonic_clock());
    return code;
}

/* A prefetch keeps the lock of the context, which a use needs for its kernels. One load does not wait:
 * it may be the next that the caller needs. */
static void
loads_ahead_give_way_to_a_use(void)
{
    mm_driver slow;
    mm_working_use use;
    mm_loader *l;

    memcpy(&slow, world.cu, sizeof slow);
    real_prefetch = slow.MemPrefetchAsync;
    slow.MemPrefetchAsync = slow_prefetch;
    atomic_store(&least_pause, UINT64_MAX);
    make_layers();
    l = mm_loader_new(&slow, 0, 4 * SIZE, NULL, &st);
    CHECK(l != NULL);
    for (int i = 0; i < 4; i++) {
        mm_working_range range = range_of_layer(i);
        (void)add_ranges(l, &range, 1, MM_GROUP_READ, true);
    }
    CHECK_OK(mm_loader_give_order(l, (mm_group_id[]){{0, 0}, {1, 1}, {2, 2}, {3, 3}}, 4, &st),
             &st);
    CHECK_OK(mm_loader_acquire(l, nth_group(0), false, NULL, &use, &st), &st);
    wait_for_loads(l, 4);
    CHECK_OK(mm_loader_release(l, nth_group(0), NULL, &st), &st);
    CHECK_EQUAL(atomic_load(&prefetches), 4);
    CHECK(atomic_load(&least_pause) >= 500000);
    close_set(l);
    free_layers();
}

static void
a_set_is_closed_beside_uses(void)
{
    for (int round = 0; round < 5; round++) {
        mm_loader *l;
        make_layers();
        l = set_of_layers(3 * SIZE);
        check_threads(3, close_or_use, l);
        CHECK(mm_loader_is_closed(l));
        mm_loader_free(l);
        free_layers();
    }
}

static atomic_int queries_left;

/* Work that does not end, but for a test that waits for it in vain. */
static CUresult CUDAAPI
query_endless_work(CUevent event)
{
    return atomic_fetch_sub(&queries_left, 1) > 0 ? CUDA_ERROR_NOT_READY
                                                  : world.cu->EventQuery(event);
}

static void *
use_the_second_layer(void *l)
{
    mm_working_use use;
    mm_status own;

    (void)!mm_loader_acquire(l, nth_group(1), false, NULL, &use, &own);
    return NULL;
}

/* A use may wait for the thread, which waits for work that ends only after the set is closed. */
static void
a_set_is_closed_beside_a_use_that_waits(void)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    mm_driver endless;
    pthread_t user;
    mm_loader *l;

    memcpy(&endless, world.cu, sizeof endless);
    endless.EventQuery = query_endless_work;
    atomic_store(&queries_left, 100000);
    make_layers();
    l = mm_loader_new(&endless, 0, SIZE, NULL, &st);
    CHECK_OK(l == NULL ? -1 : 0, &st);
    (void)add_layer(l, 0, MM_GROUP_READ);
    (void)add_layer(l, 1, MM_GROUP_READ);
    use_group(l, 0, NULL);
    CHECK_EQUAL(pthread_create(&user, NULL, use_the_second_layer, l), 0);
    (void)nanosleep(&nap, NULL);
    CHECK_OK(mm_loader_close(l, &st), &st);
    CHECK(atomic_load(&queries_left) > 0);
    CHECK_EQUAL(report_of(l).failures, 0);
    CHECK_EQUAL(pthread_join(user, NULL), 0);
    mm_loader_free(l);
    free_layers();
}

static void
an_owner_ends_its_sets_only(void)
{
    static int other;
    mm_loader *ours, *theirs;
    mm_working_use use;

    make_layers();
    ours = set_of_layers(2 * SIZE);
    theirs = mm_loader_new(world.cu, 1, SIZE, &other, &st);
    CHECK(theirs != NULL);
    use_group(ours, 0, NULL);
    mm_loaders_end(&world);
    mm_loaders_end(&world);
    CHECK(mm_loader_is_closed(ours) && !mm_loader_is_closed(theirs));
    CHECK(mm_loader_acquire(ours, nth_group(0), false, NULL, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    mm_loader_free(theirs);
    mm_loader_free(ours);
    mm_loader_free(NULL);
    free_layers();
}

static size_t
count_prefetches_to_the_host(void)
{
    size_t found = 0;
    char text[512];

    for (size_t i = 0; i < world.log_count(); i++) {
        (void)world.log_entry(i, text, sizeof text);
        found += strstr(text, "cuMemPrefetchAsync(") == text && strstr(text, "type=1") == NULL;
    }
    return found;
}

static void
a_group_at_home_is_not_brought_there(void)
{
    for (int at_home = 0; at_home < 2; at_home++) {
        mm_working_range range;
        mm_loader *l;
        uint32_t group;
        make_layers();
        l = new_set(SIZE);
        world.log_clear();
        range = range_of_layer(0);
        group = add_ranges(l, &range, 1, MM_GROUP_READ, at_home);
        use_group(l, group, NULL);
        use_group(l, add_layer(l, 1, MM_GROUP_READ), NULL);
        CHECK_EQUAL(count_prefetches_to_the_host(), at_home ? 1 : 2);
        CHECK_EQUAL(report_of(l).bytes_home, 0);
        close_set(l);
        free_layers();
    }
}

/* --- memory that ends --------------------------------------------------------------------- */

static void
memory_that_was_closed_is_passed_over(void)
{
    mm_working_range both[2];
    uint32_t group;
    mm_working_use use;
    mm_loader *l = new_set(3 * SIZE);
    bool first;

    make_layers();
    both[0] = range_of_layer(0);
    both[1] = range_of_layer(1);
    group = add_ranges(l, both, 2, MM_GROUP_WRITE, false);
    use_group(l, group, NULL);
    CHECK_OK(mm_memory_close(layers[1], NULL, &first, &st), &st);
    CHECK(mm_loader_acquire(l, nth_group(group), false, NULL, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    for (int i = 2; i < LAYERS; i++) {
        use_group(l, add_layer(l, i, MM_GROUP_SCRATCH), NULL);
    }
    close_set(l);
    for (int i = 2; i < LAYERS; i++) {
        memset((void *)(uintptr_t)layers[i]->start, i + 1, SIZE);
    }
    free_layers();
}

/* Wrapped memory has no guard: the driver is asked whether it is still the same. */
static void
memory_of_others_may_be_freed(void)
{
    mm_loader *l = new_set(2 * SIZE);
    CUdeviceptr freed = 0;
    mm_working_range range;
    uint32_t group;

    make_layers();
    CHECK_EQUAL(world.cu->MemAllocManaged(&freed, SIZE, CU_MEM_ATTACH_GLOBAL), CUDA_SUCCESS);
    range = (mm_working_range){.range = {freed, SIZE, freed}};
    group = add_ranges(l, &range, 1, MM_GROUP_SCRATCH, false);
    use_group(l, group, NULL);
    CHECK_EQUAL(world.cu->MemFree(freed), CUDA_SUCCESS);
    use_group(l, group, NULL);
    use_group(l, add_layer(l, 0, MM_GROUP_READ), NULL);
    use_group(l, add_layer(l, 1, MM_GROUP_READ), NULL);
    CHECK_EQUAL(report_of(l).failures, 0);
    close_set(l);
    free_layers();
}

/* --- scratch ------------------------------------------------------------------------------ */

/* Parts that do not fill pages: the bytes beside them stay. */
static void
a_discard_spares_the_bytes_between(void)
{
    mm_loader *l = new_set(SIZE);
    mm_working_range parts[3];
    unsigned char *bytes;
    uint32_t scratch, other;

    make_layers();
    bytes = (unsigned char *)(uintptr_t)layers[0]->start;
    for (size_t i = 0; i < 3; i++) {
        static const size_t starts[] = {100, PAGE + 10, 2 * PAGE + 200};
        static const size_t ends[] = {PAGE, 2 * PAGE + 100, 4 * PAGE - 1};
        parts[i] = range_of_layer(0);
        parts[i].range.start += starts[i];
        parts[i].range.size = ends[i] - starts[i];
        parts[i].target = i;
    }
    scratch = add_ranges(l, parts, 3, MM_GROUP_SCRATCH, false);
    other = add_layer(l, 1, MM_GROUP_WRITE);
    for (int i = 0; i < 4; i++) {
        use_group(l, scratch, NULL);
        use_group(l, other, NULL);
    }
    close_set(l);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(bytes[i], 1);
        CHECK_EQUAL(bytes[2 * PAGE + 100 + i], 1);
    }
    CHECK_EQUAL(bytes[4 * PAGE - 1], 1);
    memset(bytes, 1, SIZE);
    free_layers();
}

/* --- groups that are removed -------------------------------------------------------------- */

static void
check_restored(int layer)
{
    mm_policy policy;
    mm_range range = range_of_layer(layer).range;

    CHECK_OK(mm_range_preferred_location(world.cu, range, &policy.preferred, &st), &st);
    CHECK_EQUAL((int)policy.preferred.type, CU_MEM_LOCATION_TYPE_INVALID);
    CHECK_OK(mm_range_read_mostly(world.cu, range, &policy.read_mostly, &st), &st);
    CHECK(!policy.read_mostly);
}

static void
a_group_is_removed_from_a_set_that_goes_on(void)
{
    mm_loader_group_report group;
    CUstream stream = new_stream();
    mm_working_use use;
    bool first;
    mm_loader *l;

    make_layers();
    l = set_of_layers(2 * SIZE);
    for (uint32_t i = 0; i < 3 * LAYERS; i++) {
        use_group(l, i % LAYERS, stream);
    }
    CHECK_OK(mm_loader_acquire(l, nth_group(2), false, stream, &use, &st), &st);
    CHECK(mm_loader_remove(l, nth_group(2), &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(strstr(st.detail, "group 2 is acquired") != NULL);
    CHECK_OK(mm_loader_release(l, nth_group(2), stream, &st), &st);
    CHECK_OK(mm_loader_remove(l, nth_group(2), &st), &st);
    check_restored(2);
    CHECK_OK(mm_memory_close(layers[2], NULL, &first, &st), &st);
    mm_loader_read_group(l, nth_group(2), &group);
    CHECK(group.removed && !group.resident);
    CHECK(mm_loader_remove(l, nth_group(2), &st) < 0);
    CHECK(mm_loader_acquire(l, nth_group(2), false, stream, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(strstr(st.detail, "group 2 was removed") != NULL);
    CHECK(mm_loader_release(l, nth_group(2), stream, &st) < 0);
    CHECK_EQUAL(report_of(l).groups, LAYERS - 1);
    for (uint32_t i = 0; i < 3 * LAYERS; i++) {
        if (i % LAYERS != 2) {
            use_group(l, i % LAYERS, stream);
        }
    }
    CHECK_OK(mm_loader_remove(l, nth_group(3), &st), &st);
    CHECK_EQUAL(add_layer(l, 3, MM_GROUP_SCRATCH), LAYERS); /* with the event of another one */
    CHECK(report_of(l).physical <= 2 * SIZE);
    CHECK_EQUAL(report_of(l).failures, 0);
    end_stream(stream);
    close_set(l);
    free_layers();
}

/* All of them are in use by the others meanwhile, so that a removal has to be tried again. */
static void *
remove_or_use(void *argument)
{
    users *u = argument;
    int number = atomic_fetch_add(&u->number, 1);
    CUstream stream = new_stream();
    mm_status own;
    mm_working_use use;

    for (int i = 0; i < TURNS; i++) {
        uint32_t group = (uint32_t)(i + number) % LAYERS;
        if (i % 20 == 19) {
            (void)!mm_loader_remove(u->l, nth_group(group), &own);
        } else if (mm_loader_acquire(u->l, nth_group(group), false, stream, &use, &own) == 0) {
            CHECK_OK(mm_loader_release(u->l, nth_group(group), stream, &own), &own);
        } else {
            CHECK_EQUAL(own.kind, MM_REFUSED);
        }
    }
    end_stream(stream);
    return NULL;
}

static void
threads_remove_groups_of_one_set(void)
{
    for (int round = 0; round < 5; round++) {
        users u = {.number = 0};
        make_layers();
        u.l = set_of_layers(2 * SIZE);
        check_threads(4, remove_or_use, &u);
        CHECK_EQUAL(report_of(u.l).failures, 0);
        CHECK(report_of(u.l).groups < LAYERS);
        for (uint32_t i = 0; i < LAYERS; i++) {
            mm_loader_group_report group;
            mm_loader_read_group(u.l, nth_group(i), &group);
            CHECK(!group.removed || !group.resident);
        }
        close_set(u.l);
        for (int i = 0; i < LAYERS; i++) {
            check_restored(i);
        }
        free_layers();
    }
}

static void *
close_or_remove(void *argument)
{
    static atomic_int turn;
    mm_status own;

    if (atomic_fetch_add(&turn, 1) % 3 == 2) {
        CHECK_OK(mm_loader_close(argument, &own), &own);
        return NULL;
    }
    for (uint32_t i = 0; i < LAYERS; i++) {
        if (mm_loader_remove(argument, nth_group(i), &own) < 0) {
            CHECK_EQUAL(own.kind, MM_REFUSED);
        }
    }
    return NULL;
}

static void
a_set_is_closed_beside_removals(void)
{
    for (int round = 0; round < 20; round++) {
        mm_loader *l;
        make_layers();
        l = set_of_layers(3 * SIZE);
        for (uint32_t i = 0; i < LAYERS; i++) {
            use_group(l, i, NULL);
        }
        check_threads(3, close_or_remove, l);
        for (int i = 0; i < LAYERS; i++) {
            check_restored(i);
        }
        mm_loader_free(l);
        free_layers();
    }
}

static void *
remove_the_first_layer(void *l)
{
    mm_status own;

    if (mm_loader_remove(l, nth_group(0), &own) < 0) {
        CHECK_EQUAL(own.kind, MM_REFUSED); /* the set was closed before */
    }
    return NULL;
}

/* A removal may wait for the thread, which waits for work that ends only after the set is closed. */
static void
a_set_is_closed_beside_a_removal_that_waits(void)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    mm_driver endless;
    pthread_t remover;
    mm_working_use use;
    mm_loader *l;

    memcpy(&endless, world.cu, sizeof endless);
    endless.EventQuery = query_endless_work;
    atomic_store(&queries_left, 100000);
    make_layers();
    l = mm_loader_new(&endless, 0, SIZE, NULL, &st);
    CHECK_OK(l == NULL ? -1 : 0, &st);
    (void)add_layer(l, 0, MM_GROUP_READ);
    (void)add_layer(l, 1, MM_GROUP_READ);
    use_group(l, 0, NULL);
    CHECK_EQUAL(pthread_create(&remover, NULL, remove_the_first_layer, l), 0);
    (void)nanosleep(&nap, NULL);
    CHECK_OK(mm_loader_close(l, &st), &st);
    CHECK_EQUAL(pthread_join(remover, NULL), 0);
    CHECK(atomic_load(&queries_left) > 0);
    CHECK(mm_loader_acquire(l, nth_group(0), false, NULL, &use, &st) < 0);
    check_restored(0);
    mm_loader_free(l);
    free_layers();
}

/* A removal that cannot restore the advice may be repeated, or the set closed. */
static void
advice_that_is_not_restored_is_tried_again(void)
{
    mm_working_use use;
    mm_loader *l;

    for (int attempt = 0; attempt < 2; attempt++) {
        make_layers();
        l = set_of_layers(2 * SIZE);
        use_group(l, 1, NULL);
        world.fail("cuMemRangeGetAttributes", 1, CUDA_ERROR_UNKNOWN, 0);
        CHECK(mm_loader_remove(l, nth_group(1), &st) < 0);
        CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
        CHECK(mm_loader_acquire(l, nth_group(1), false, NULL, &use, &st) < 0);
        world.fail_clear();
        if (attempt == 0) {
            CHECK_OK(mm_loader_remove(l, nth_group(1), &st), &st);
            check_restored(1);
        }
        close_set(l);
        check_restored(1);
        free_layers();
    }
}

static void
a_removal_without_memory_changes_nothing(void)
{
    mm_loader *l;
    long nth;
    int rc = -1;

    make_layers();
    l = set_of_layers(2 * SIZE);
    use_group(l, 1, NULL);
    for (nth = 1; rc < 0; nth++) {
        fail_allocation(nth);
        rc = mm_loader_remove(l, nth_group(1), &st);
        fail_allocation(0);
        CHECK(rc == 0 || st.kind == MM_NO_MEMORY);
    }
    CHECK(nth > 2);
    check_restored(1);
    CHECK_EQUAL(report_of(l).groups, LAYERS - 1);
    close_set(l);
    free_layers();
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(threads_share_a_set),
        CHECK_TEST(a_use_waits_until_its_load_is_queued),
        CHECK_TEST(loads_ahead_give_way_to_a_use),
        CHECK_TEST(a_set_is_closed_beside_uses),
        CHECK_TEST(a_group_at_home_is_not_brought_there),
        CHECK_TEST(a_set_is_closed_beside_a_use_that_waits),
        CHECK_TEST(an_owner_ends_its_sets_only),
        CHECK_TEST(memory_that_was_closed_is_passed_over),
        CHECK_TEST(memory_of_others_may_be_freed),
        CHECK_TEST(a_discard_spares_the_bytes_between),
        CHECK_TEST(a_group_is_removed_from_a_set_that_goes_on),
        CHECK_TEST(threads_remove_groups_of_one_set),
        CHECK_TEST(a_set_is_closed_beside_removals),
        CHECK_TEST(a_set_is_closed_beside_a_removal_that_waits),
        CHECK_TEST(advice_that_is_not_restored_is_tried_again),
        CHECK_TEST(a_removal_without_memory_changes_nothing),
    };

    CHECK(argc == 2);
    world_open(argv[1]);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
