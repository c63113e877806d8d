/* test_working_loader_failures.c: what a working set at work does when calls of the driver fail or are
 * refused.
 *
 * Usage: test_working_loader_failures PATH_OF_THE_EMULATED_DRIVER, which must have at least two devices. */
#include "memory/home.h"
#include "memory/working_releases.h"
#include "working_layers.h"

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

/* --- beside work that is slow ------------------------------------------------------------- */

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

    return code == CUDA_SUCCESS && location.type != CU_MEM_LOCATION_TYPE_DEVICE
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

    CHECK_OK(mm_loader_acquire(l, nth_group(group), false, stream, &use, &st), &st);
    CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
    memset(bytes, layer + 1, SIZE);
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    CHECK_EQUAL(bytes[0], layer + 1);
    CHECK_OK(mm_loader_release(l, nth_group(group), stream, &st), &st);
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
    CHECK_OK(mm_loader_acquire(l, nth_group(1), false, other, &use, &st), &st);
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
    group = add_ranges(l, both, 2, MM_GROUP_WRITE, false);
    use_group(l, group, stream);
    other = add_layer(l, 1, MM_GROUP_READ);
    CHECK_OK(mm_loader_acquire(l, nth_group(other), false, stream, &use, &st),
             &st); /* in place of both */
    world.fail("cuMemPrefetchAsync", 2, CUDA_ERROR_UNKNOWN, 0);
    CHECK_OK(mm_loader_release(l, nth_group(other), stream, &st), &st); /* loads both ahead */
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
    CHECK_OK(mm_loader_acquire(l, nth_group(1), false, other, &use, &st),
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
    CHECK_OK(mm_loader_acquire(l, nth_group(1), false, NULL, &use, &st),
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
    CHECK_OK(mm_loader_acquire(l, nth_group(scratch), false, NULL, &use, &st), &st);
    world.fail("cuEventRecord", 1, CUDA_ERROR_UNKNOWN, 0);
    CHECK(mm_loader_release(l, nth_group(scratch), NULL, &st) < 0);
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
    CHECK_OK(mm_loader_acquire(l, nth_group(group), false, stream, &use, &st), &st);
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, MM_ANY_DEVICE}, &st), &st);
    CHECK_EQUAL(report_of(l).bytes_loaded, 0);
    CHECK_EQUAL(report_of(l).failures, 5);
    world.fail_clear();
    CHECK_OK(mm_loader_release(l, nth_group(group), stream, &st),
             &st); /* looks ahead, and so may load it */
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
    mm_group_id group;
    long nth = 0;
    int rc = -1;

    make_layers();
    l = new_set(SIZE);
    range = range_of_layer(0);
    for (nth = 1; rc < 0; nth++) {
        mm_policy policy;
        CUmemLocation home;
        CHECK_EQUAL(report_of(l).groups, 0);
        fail_allocation(nth);
        rc = mm_loader_add(l, &range, 1, MM_GROUP_WRITE, false, &group, &st);
        fail_allocation(0);
        CHECK_OK(mm_range_preferred_location(world.cu, range.range, &policy.preferred, &st), &st);
        CHECK_OK(mm_home_for(world.cu, 0, &home, &st), &st);
        CHECK_EQUAL(mm_same_location(policy.preferred, home), rc == 0);
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
    CHECK_OK(mm_loader_acquire(l, nth_group(0), false, stream, &use, &st), &st);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    CHECK(mm_loader_acquire(l, nth_group(1), false, stream, &use, &st) < 0);
    CHECK_EQUAL(st.kind, MM_CAPTURING);
    CHECK(mm_loader_release(l, nth_group(0), stream, &st) < 0);
    CHECK_EQUAL(st.kind, MM_CAPTURING);
    CHECK_EQUAL(world.end_capture(stream, &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    CHECK_OK(mm_loader_release(l, nth_group(0), stream, &st), &st);
    end_stream(stream);
    close_set(l);
    free_layers();
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
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
