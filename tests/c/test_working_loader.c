/* test_working_loader.c: working sets at work on the emulated driver: threads, the thread's end,
 * and what it does when calls fail.
 *
 * Usage: test_working_loader PATH_OF_THE_EMULATED_DRIVER, which must have at least two devices. */
#include "driver/clock.h"
#include "failing_allocations.h"
#include "memory/working_loader.h"
#include "memory/working_releases.h"
#include "world.h"

enum { PAGE = 4096, SIZE = 4 * PAGE, LAYERS = 6 };

static mm_memory *layers[LAYERS];
static mm_status st;

static void
make_layers(void)
{
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = mm_memory_allocate(world.cu, SIZE, &st);
        CHECK(layers[i] != NULL);
        memset((void *)(uintptr_t)layers[i]->start, i + 1, SIZE);
    }
}

static void
free_layers(void)
{
    for (int i = 0; i < LAYERS; i++) {
        const unsigned char *bytes = (unsigned char *)(uintptr_t)layers[i]->start;
        if (bytes != NULL && !mm_guard_is_closed(&layers[i]->guard)) {
            CHECK_EQUAL(bytes[0], i + 1);
            CHECK_EQUAL(bytes[SIZE - 1], i + 1);
        }
        mm_memory_release(layers[i]);
    }
}

static mm_working_range
range_of_layer(int i)
{
    return (mm_working_range){.range = {layers[i]->start, SIZE, layers[i]->start},
                              .guard = &layers[i]->guard};
}

static mm_loader *
new_set(size_t budget)
{
    mm_loader *l = mm_loader_new(world.cu, 0, budget, &world, &st);

    CHECK_OK(l == NULL ? -1 : 0, &st);
    return l;
}

static uint32_t
add_layer(mm_loader *l, int i, mm_group_access access)
{
    mm_working_range range = range_of_layer(i);
    uint32_t group = MM_NO_GROUP;

    CHECK_OK(mm_loader_add(l, &range, 1, access, false, &group, &st), &st);
    return group;
}

static mm_loader *
set_of_layers(size_t budget)
{
    mm_loader *l = new_set(budget);

    for (int i = 0; i < LAYERS; i++) {
        CHECK_EQUAL(add_layer(l, i, i % 2 == 0 ? MM_GROUP_READ : MM_GROUP_WRITE), i);
    }
    return l;
}

static CUstream
new_stream(void)
{
    CUstream stream = NULL;

    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    return stream;
}

static void
end_stream(CUstream stream)
{
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, MM_ANY_DEVICE}, &st), &st);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
}

static void
use_group(mm_loader *l, uint32_t group, CUstream stream)
{
    mm_working_use use;

    CHECK_OK(mm_loader_acquire(l, group, false, stream, &use, &st), &st);
    CHECK_OK(mm_loader_release(l, group, stream, &st), &st);
}

static mm_loader_report
report_of(mm_loader *l)
{
    mm_loader_report report;

    mm_loader_read_report(l, &report);
    return report;
}

static void
wait_for_loads(mm_loader *l, uint64_t loads)
{
    const struct timespec nap = {.tv_nsec = 100000};

    while (report_of(l).loads < loads) {
        (void)nanosleep(&nap, NULL);
    }
}

static void
close_set(mm_loader *l)
{
    CHECK_OK(mm_loader_close(l, &st), &st);
    mm_loader_free(l);
}

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
        CHECK_OK(mm_loader_acquire(u->l, group, i % 3 != 0, stream, &use, &own), &own);
        (void)report_of(u->l);
        CHECK_OK(mm_loader_release(u->l, group, stream, &own), &own);
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

    for (uint32_t i = 0; mm_loader_acquire(l, i % LAYERS, i % 4 < 2, NULL, &use, &own) == 0; i++) {
        CHECK_OK(mm_loader_release(l, i % LAYERS, NULL, &own), &own);
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

static atomic_bool gate_is_open;

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

static void *
open_gate_later(void *nothing)
{
    const struct timespec nap = {.tv_nsec = 20000000};

    (void)nanosleep(&nap, NULL);
    atomic_store(&gate_is_open, true);
    return nothing;
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
    CHECK_OK(mm_loader_acquire(l, 0, false, NULL, &use, &st), &st);
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
        uint32_t group;
        CHECK_OK(mm_loader_add(l, &range, 1, MM_GROUP_READ, true, &group, &st), &st);
    }
    CHECK_OK(mm_loader_give_order(l, (uint32_t[]){0, 1, 2, 3}, 4, &st), &st);
    CHECK_OK(mm_loader_acquire(l, 0, false, NULL, &use, &st), &st);
    wait_for_loads(l, 4);
    CHECK_OK(mm_loader_release(l, 0, NULL, &st), &st);
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

    (void)!mm_loader_acquire(l, 1, false, NULL, &use, &own);
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
    CHECK(mm_loader_acquire(ours, 0, false, NULL, &use, &st) < 0);
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
        found += strstr(text, "cuMemPrefetchAsync(") == text && strstr(text, "type=2") != NULL;
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
        CHECK_OK(mm_loader_add(l, &range, 1, MM_GROUP_READ, at_home, &group, &st), &st);
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
    CHECK_OK(mm_loader_add(l, both, 2, MM_GROUP_WRITE, false, &group, &st), &st);
    use_group(l, group, NULL);
    CHECK_OK(mm_memory_close(layers[1], NULL, &first, &st), &st);
    CHECK(mm_loader_acquire(l, group, false, NULL, &use, &st) < 0);
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
    CHECK_OK(mm_loader_add(l, &range, 1, MM_GROUP_SCRATCH, false, &group, &st), &st);
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
    CHECK_OK(mm_loader_add(l, parts, 3, MM_GROUP_SCRATCH, false, &scratch, &st), &st);
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
    CHECK_OK(mm_loader_acquire(l, 2, false, stream, &use, &st), &st);
    CHECK(mm_loader_remove(l, 2, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(strstr(st.detail, "group 2 is acquired") != NULL);
    CHECK_OK(mm_loader_release(l, 2, stream, &st), &st);
    CHECK_OK(mm_loader_remove(l, 2, &st), &st);
    check_restored(2);
    CHECK_OK(mm_memory_close(layers[2], NULL, &first, &st), &st);
    mm_loader_read_group(l, 2, &group);
    CHECK(group.removed && !group.resident);
    CHECK(mm_loader_remove(l, 2, &st) < 0);
    CHECK(mm_loader_acquire(l, 2, false, stream, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(strstr(st.detail, "group 2 was removed") != NULL);
    CHECK(mm_loader_release(l, 2, stream, &st) < 0);
    CHECK_EQUAL(report_of(l).groups, LAYERS - 1);
    for (uint32_t i = 0; i < 3 * LAYERS; i++) {
        if (i % LAYERS != 2) {
            use_group(l, i % LAYERS, stream);
        }
    }
    CHECK_OK(mm_loader_remove(l, 3, &st), &st);
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
            (void)!mm_loader_remove(u->l, group, &own);
        } else if (mm_loader_acquire(u->l, group, false, stream, &use, &own) == 0) {
            CHECK_OK(mm_loader_release(u->l, group, stream, &own), &own);
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
            mm_loader_read_group(u.l, i, &group);
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
        if (mm_loader_remove(argument, i, &own) < 0) {
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

    if (mm_loader_remove(l, 0, &own) < 0) {
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
    CHECK(mm_loader_acquire(l, 0, false, NULL, &use, &st) < 0);
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
        CHECK(mm_loader_remove(l, 1, &st) < 0);
        CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
        CHECK(mm_loader_acquire(l, 1, false, NULL, &use, &st) < 0);
        world.fail_clear();
        if (attempt == 0) {
            CHECK_OK(mm_loader_remove(l, 1, &st), &st);
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
        rc = mm_loader_remove(l, 1, &st);
        fail_allocation(0);
        CHECK(rc == 0 || st.kind == MM_NO_MEMORY);
    }
    CHECK(nth > 2);
    check_restored(1);
    CHECK_EQUAL(report_of(l).groups, LAYERS - 1);
    close_set(l);
    free_layers();
}

/* --- failures ----------------------------------------------------------------------------- */

/* A drop that fails twice keeps its bytes, and nothing is loaded beyond the budget. */
static void
what_does_not_leave_the_device_is_counted(void)
{
    mm_loader *l;
    CUstream stream;

    make_layers();
    l = new_set(2 * SIZE);
    stream = new_stream();
    for (int i = 0; i < LAYERS; i++) {
        (void)add_layer(l, i, MM_GROUP_READ);
    }
    use_group(l, 0, stream);
    use_group(l, 1, stream);
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, MM_ANY_DEVICE}, &st), &st);
    for (unsigned nth = 1; nth <= 12; nth++) {
        world.fail("cuMemAdvise", nth, CUDA_ERROR_UNKNOWN, 0);
    }
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        use_group(l, i % LAYERS, stream);
        CHECK(report_of(l).physical <= 2 * SIZE);
    }
    end_stream(stream);
    CHECK(report_of(l).failures > 0);
    CHECK(report_of(l).physical <= 2 * SIZE);
    world.fail_clear();
    close_set(l);
    free_layers();
}

/* --- failures beside work that is slow ---------------------------------------------------- */

static pthread_t caller;
static atomic_bool refuses_advice, refuses_scopes;

static CUresult CUDAAPI
query_behind_the_gate(CUstream stream)
{
    return atomic_load(&gate_is_open) ? world.cu->StreamQuery(stream) : CUDA_ERROR_NOT_READY;
}

static CUresult CUDAAPI
keep_the_first_layer(CUdeviceptr start, size_t size, CUmem_advise advice, CUmemLocation location)
{
    return atomic_load(&refuses_advice) && start == layers[0]->start
                   && advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY
               ? CUDA_ERROR_UNKNOWN
               : world.cu->MemAdvise(start, size, advice, location);
}

static CUresult CUDAAPI
push_for_the_caller_only(CUcontext context)
{
    return atomic_load(&refuses_scopes) && !pthread_equal(pthread_self(), caller)
               ? CUDA_ERROR_UNKNOWN
               : world.cu->CtxPushCurrent(context);
}

/* What leaves is done at once, what is loaded when something waits for it. */
static CUresult CUDAAPI
prefetch_home_at_once(CUdeviceptr start, size_t size, CUmemLocation location, unsigned int flags,
                      CUstream stream)
{
    CUresult code = world.cu->MemPrefetchAsync(start, size, location, flags, stream);

    return code == CUDA_SUCCESS && location.type == CU_MEM_LOCATION_TYPE_HOST
               ? world.cu->StreamSynchronize(stream)
               : code;
}

/* A set on a driver whose streams are slow while the gate is closed. */
static mm_loader *
new_slow_set(mm_driver *slow, size_t budget)
{
    mm_loader *l;

    memcpy(slow, world.cu, sizeof *slow);
    slow->StreamQuery = query_behind_the_gate;
    slow->MemAdvise = keep_the_first_layer;
    slow->CtxPushCurrent = push_for_the_caller_only;
    caller = pthread_self();
    atomic_store(&gate_is_open, false);
    world.schedule(1);
    l = mm_loader_new(slow, 0, budget, NULL, &st);
    CHECK_OK(l == NULL ? -1 : 0, &st);
    return l;
}

/* What a use writes must still be there once all that was queued before it is done. */
static void
write_and_check(mm_loader *l, uint32_t group, int layer, CUstream stream)
{
    unsigned char *bytes = (unsigned char *)(uintptr_t)layers[layer]->start;
    mm_working_use use;

    CHECK_OK(mm_loader_acquire(l, group, false, stream, &use, &st), &st);
    CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
    memset(bytes, layer + 1, SIZE);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    CHECK_EQUAL(bytes[0], layer + 1);
    CHECK_OK(mm_loader_release(l, group, stream, &st), &st);
}

/* A load that is refused, because other memory did not leave, makes its use wait for the earlier
 * discard all the same. */
static void
a_refused_load_follows_the_discard(void)
{
    mm_driver slow;
    mm_loader *l;
    CUstream stream = new_stream(), other = new_stream();
    mm_working_use use;
    pthread_t opener;

    make_layers();
    l = new_slow_set(&slow, 2 * SIZE);
    (void)add_layer(l, 0, MM_GROUP_READ);
    (void)add_layer(l, 1, MM_GROUP_READ);
    (void)add_layer(l, 2, MM_GROUP_SCRATCH);
    use_group(l, 2,
              stream); /* loads the first layer ahead, then the second one in place of this */
    CHECK_EQUAL(report_of(l).decided.drops, 1);
    atomic_store(&refuses_advice, true); /* nothing can be dropped: the second layer is held */
    CHECK_OK(mm_loader_acquire(l, 1, false, other, &use, &st), &st);
    CHECK_EQUAL(pthread_create(&opener, NULL, open_gate_later, NULL), 0);
    write_and_check(l, 2, 2, stream);
    CHECK(report_of(l).failures > 0);
    CHECK_EQUAL(pthread_join(opener, NULL), 0);
    atomic_store(&refuses_advice, false);
    close_set(l);
    world.schedule(0);
    end_stream(stream);
    end_stream(other);
    memset((void *)(uintptr_t)layers[2]->start, 3, SIZE);
    free_layers();
}

/* The part of a load before its failure must not come after the group was taken away. */
static void
a_failed_load_is_taken_away_behind_its_part(void)
{
    mm_driver slow;
    mm_loader *l;
    CUstream stream = new_stream();
    mm_working_use use;
    mm_working_range both[2];
    uint32_t group, other;
    int type, id;

    make_layers();
    l = new_slow_set(&slow, 2 * SIZE);
    atomic_store(&gate_is_open, true);
    slow.MemPrefetchAsync = prefetch_home_at_once;
    both[0] = range_of_layer(0);
    both[1] = range_of_layer(2);
    CHECK_OK(mm_loader_add(l, both, 2, MM_GROUP_WRITE, false, &group, &st), &st);
    use_group(l, group, stream);
    other = add_layer(l, 1, MM_GROUP_READ);
    CHECK_OK(mm_loader_acquire(l, other, false, stream, &use, &st), &st); /* in place of both */
    world.fail("cuMemPrefetchAsync", 2, CUDA_ERROR_UNKNOWN, 0);
    CHECK_OK(mm_loader_release(l, other, stream, &st), &st); /* loads both ahead */
    wait_for_loads(l, 3);
    CHECK_EQUAL(world.fail_fired(), 1);
    world.fail_clear();
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    CHECK_EQUAL(report_of(l).physical, 0);
    CHECK_EQUAL(world.residency(layers[0]->start, SIZE, &type, &id), 0);
    CHECK_EQUAL(type, 2); /* a NUMA node of the host */
    close_set(l);
    world.schedule(0);
    end_stream(stream);
    free_layers();
}

/* A thread that cannot ask whether its streams are done must not take them for done. */
static void
a_use_follows_a_discard_that_nobody_can_ask_for(void)
{
    const struct timespec nap = {.tv_nsec = 10000000};
    mm_driver slow;
    mm_loader *l;
    CUstream stream = new_stream(), other = new_stream();
    mm_working_use use;

    make_layers();
    l = new_slow_set(&slow, SIZE);
    (void)add_layer(l, 0, MM_GROUP_SCRATCH);
    (void)add_layer(l, 1, MM_GROUP_READ);
    use_group(l, 0, stream);
    CHECK_OK(mm_loader_acquire(l, 1, false, other, &use, &st),
             &st); /* in place of the scratch memory */
    wait_for_loads(l, 2);
    atomic_store(&refuses_scopes, true);
    (void)nanosleep(&nap, NULL);
    atomic_store(&refuses_scopes, false);
    write_and_check(l, 0, 0, stream);
    atomic_store(&gate_is_open, true);
    close_set(l);
    world.schedule(0);
    end_stream(stream);
    end_stream(other);
    memset((void *)(uintptr_t)layers[0]->start, 1, SIZE);
    free_layers();
}

static atomic_bool load_has_passed, query_has_failed;

/* The first query behind that of the load, which is that of the end of a use, fails once. */
static CUresult CUDAAPI
query_event_behind_the_gate(CUevent event)
{
    CUresult code = CUDA_ERROR_NOT_READY;

    if (atomic_load(&gate_is_open) || !atomic_load(&load_has_passed)) {
        code = world.cu->EventQuery(event);
        atomic_store(&load_has_passed, code == CUDA_SUCCESS);
    } else if (!atomic_exchange(&query_has_failed, true)) {
        code = CUDA_ERROR_UNKNOWN;
    }
    return code;
}

static void
a_query_that_fails_once_ends_no_use(void)
{
    mm_driver slow;
    mm_loader *l;
    CUstream stream = new_stream();
    mm_working_use use;
    pthread_t opener;

    make_layers();
    l = new_slow_set(&slow, SIZE);
    slow.EventQuery = query_event_behind_the_gate;
    atomic_store(&load_has_passed, false);
    atomic_store(&query_has_failed, false);
    (void)add_layer(l, 0, MM_GROUP_SCRATCH);
    (void)add_layer(l, 1, MM_GROUP_READ);
    use_group(l, 0, stream);
    CHECK_EQUAL(pthread_create(&opener, NULL, open_gate_later, NULL), 0);
    CHECK_OK(mm_loader_acquire(l, 1, false, NULL, &use, &st),
             &st); /* in place of the scratch memory */
    CHECK(atomic_load(&gate_is_open) && atomic_load(&query_has_failed));
    CHECK_EQUAL(pthread_join(opener, NULL), 0);
    close_set(l);
    world.schedule(0);
    end_stream(stream);
    memset((void *)(uintptr_t)layers[0]->start, 1, SIZE);
    free_layers();
}

/* Work whose end is not known may still use the memory, so that nothing may be discarded. */
static void
an_end_that_is_not_recorded_keeps_contents(void)
{
    mm_working_use use;
    uint32_t scratch;
    mm_loader *l;

    make_layers();
    l = new_set(SIZE);
    scratch = add_layer(l, 0, MM_GROUP_SCRATCH);
    CHECK_OK(mm_loader_acquire(l, scratch, false, NULL, &use, &st), &st);
    world.fail("cuEventRecord", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK(mm_loader_release(l, scratch, NULL, &st) < 0);
    world.fail_clear();
    use_group(l, add_layer(l, 1, MM_GROUP_READ), NULL);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    CHECK(report_of(l).bytes_home >= SIZE);
    close_set(l);
    free_layers(); /* with their contents */
}

/* Two threads that release on one stream: the one that adds its event later may have recorded it
 * earlier, so that both events count. */
static void
releases_of_two_threads_count_both(void)
{
    mm_release_list releases[3] = {{.stream = 7}, {.stream = 7}, {.stream = 7}};
    mm_release_list *pool = NULL, *list = mm_release_add(NULL, &releases[0], &pool);

    list = mm_release_add(list, &releases[1], &pool); /* began before the first was added */
    CHECK(pool == NULL && list == &releases[1] && list->next == &releases[0]);
    releases[2].begun = releases[1].added;
    list = mm_release_add(list, &releases[2], &pool);
    CHECK(list == &releases[2] && list->next == NULL);
    CHECK(pool != NULL && pool->next != NULL && pool->next->next == NULL);
}

/* Memory that may be only on the device must not be dropped as a copy, so that it is not loaded. */
static void
a_group_that_was_never_home_is_not_loaded(void)
{
    mm_loader *l;
    CUstream stream;
    uint32_t group;
    mm_working_use use;

    make_layers();
    stream = new_stream();
    l = new_set(2 * SIZE);
    for (unsigned nth = 1; nth <= 4; nth++) {
        world.fail("cuMemPrefetchAsync", nth, CUDA_ERROR_UNKNOWN, 0);
    }
    group = add_layer(l, 0, MM_GROUP_READ);
    CHECK_OK(mm_loader_acquire(l, group, false, stream, &use, &st), &st);
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, MM_ANY_DEVICE}, &st), &st);
    CHECK_EQUAL(report_of(l).bytes_loaded, 0);
    CHECK_EQUAL(report_of(l).failures, 5);
    world.fail_clear();
    CHECK_OK(mm_loader_release(l, group, stream, &st), &st); /* looks ahead, and so may load it */
    use_group(l, group, stream);
    end_stream(stream);
    CHECK_EQUAL(report_of(l).bytes_loaded, SIZE);
    close_set(l);
    free_layers();
}

static void
a_set_that_cannot_begin_leaves_nothing(void)
{
    size_t streams = world.live_streams();

    world.fail("cuStreamCreate", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK(mm_loader_new(world.cu, 0, SIZE, NULL, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
    world.fail("cuCtxPushCurrent", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK(mm_loader_new(world.cu, 0, SIZE, NULL, &st) == NULL);
    world.fail_clear();
    CHECK_EQUAL(world.live_streams(), streams);
}

static void
a_group_that_cannot_be_added_leaves_nothing(void)
{
    mm_loader *l;
    mm_working_range range;
    uint32_t group;
    long nth = 0;
    int rc = -1;

    make_layers();
    l = new_set(SIZE);
    range = range_of_layer(0);
    for (nth = 1; rc < 0; nth++) {
        mm_policy policy;
        CHECK_EQUAL(report_of(l).groups, 0);
        fail_allocation(nth);
        rc = mm_loader_add(l, &range, 1, MM_GROUP_WRITE, false, &group, &st);
        fail_allocation(0);
        CHECK_OK(mm_range_preferred_location(world.cu, range.range, &policy.preferred, &st), &st);
        CHECK_EQUAL(policy.preferred.type == CU_MEM_LOCATION_TYPE_HOST, rc == 0);
    }
    CHECK(nth > 3);
    close_set(l);
    free_layers();
}

static void
a_use_in_a_capture_is_refused(void)
{
    CUstream stream = new_stream();
    mm_working_use use;
    CUgraph graph = NULL;
    mm_loader *l;

    make_layers();
    l = set_of_layers(SIZE);
    CHECK_OK(mm_loader_acquire(l, 0, false, stream, &use, &st), &st);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK(mm_loader_acquire(l, 1, false, stream, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_CAPTURING);
    CHECK(mm_loader_release(l, 0, stream, &st) < 0);
    CHECK_EQUAL(st.kind, MM_CAPTURING);
    CHECK_EQUAL(world.end_capture(stream, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_OK(mm_loader_release(l, 0, stream, &st), &st);
    end_stream(stream);
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
        CHECK_TEST(what_does_not_leave_the_device_is_counted),
        CHECK_TEST(a_refused_load_follows_the_discard),
        CHECK_TEST(a_failed_load_is_taken_away_behind_its_part),
        CHECK_TEST(a_use_follows_a_discard_that_nobody_can_ask_for),
        CHECK_TEST(a_query_that_fails_once_ends_no_use),
        CHECK_TEST(an_end_that_is_not_recorded_keeps_contents),
        CHECK_TEST(releases_of_two_threads_count_both),
        CHECK_TEST(a_group_that_was_never_home_is_not_loaded),
        CHECK_TEST(a_set_that_cannot_begin_leaves_nothing),
        CHECK_TEST(a_group_that_cannot_be_added_leaves_nothing),
        CHECK_TEST(a_use_in_a_capture_is_refused),
    };

    CHECK(argc == 2);
    world_open(argv[1]);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
