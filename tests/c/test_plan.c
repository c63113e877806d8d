/* test_plan.c: that executing allocates nothing, who is held meanwhile, what fits a budget. */
#include "memory/plan.h"
#include "world.h"

/* Of the sanitizers' run times, which have no header for it in every compiler. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static atomic_size_t allocations;

static void
count_malloc(const volatile void *address, size_t size)
{
    (void)address;
    (void)size;
    atomic_fetch_add(&allocations, 1);
}

static void
ignore_free(const volatile void *address)
{
    (void)address;
}

static CUmemLocation
device(int ordinal)
{
    return mm_location(CU_MEM_LOCATION_TYPE_DEVICE, ordinal);
}

static mm_plan_entry
entry(CUdeviceptr start, size_t size, CUmemLocation location, mm_guard *guard)
{
    return (mm_plan_entry){.transfer = {.range = {.start = start, .size = size, .allocation = 1},
                                        .location = location},
                           .memory = guard,
                           .dense = true};
}

static mm_plan *
new_plan(const mm_plan_entry *entries, size_t count, mm_operation op)
{
    mm_status st;
    mm_plan *p = mm_plan_new(entries, count, op, &st);

    if (p == NULL) {
        (void)fprintf(stderr, "%s\n", st.detail);
        exit(1);
    }
    return p;
}

/* --- a driver that only notes what it is asked ------------------------------------------- */

enum { MANY = 40 };

static struct {
    size_t calls, queries;
    CUdeviceptr there; /* the range that was prefetched to device 0 last; 0 for none */
} noted;

static CUresult CUDAAPI
note_prefetch(CUdeviceptr start, size_t size, CUmemLocation location, unsigned flags, CUstream s)
{
    (void)start, (void)size, (void)location, (void)flags, (void)s;
    noted.calls++;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
note_batch(CUdeviceptr *starts, size_t *sizes, size_t count, CUmemLocation *location,
           size_t *first, size_t locations, unsigned long long flags, CUstream s)
{
    (void)starts, (void)sizes, (void)count, (void)location, (void)first, (void)locations;
    (void)flags, (void)s;
    noted.calls++;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
note_advice(CUdeviceptr start, size_t size, CUmem_advise advice, CUmemLocation location)
{
    (void)start, (void)size, (void)advice, (void)location;
    noted.calls++;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
answer_attribute(void *into, size_t size, CUmem_range_attribute asked, CUdeviceptr start,
                 size_t count)
{
    int last = start == noted.there ? 0 : CU_DEVICE_INVALID;

    (void)asked, (void)count;
    noted.queries++;
    memcpy(into, &last, size);
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
answer_capturing(CUstream s, CUstreamCaptureStatus *status)
{
    (void)s;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
answer_context(CUcontext *context)
{
    *context = (CUcontext)&noted;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
answer_mode(CUstreamCaptureMode *mode)
{
    (void)mode;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
note_host_function(CUstream s, CUhostFn function, void *argument)
{
    (void)s, (void)function, (void)argument;
    noted.calls++;
    return CUDA_SUCCESS;
}

static mm_driver *
noting_driver(void)
{
    static mm_driver cu;

    memset(&noted, 0, sizeof noted);
    cu.MemPrefetchAsync = note_prefetch;
    cu.MemPrefetchBatchAsync = note_batch;
    cu.MemDiscardBatchAsync = world.cu->MemDiscardBatchAsync;
    cu.MemDiscardAndPrefetchBatchAsync = note_batch;
    cu.MemAdvise = note_advice;
    cu.MemRangeGetAttribute = answer_attribute;
    cu.StreamIsCapturing = answer_capturing;
    cu.CtxGetCurrent = answer_context;
    cu.ThreadExchangeStreamCaptureMode = answer_mode;
    cu.LaunchHostFunc = note_host_function;
    cu.device_count = 2;
    atomic_store(&cu.primary[0], (CUcontext)&noted);
    atomic_store(&cu.primary[1], (CUcontext)&noted);
    cu.concurrent_access = true;
    return &cu;
}

/* Any stream but the default one: that would need a stand-in. */
static const mm_dispatch_options on_a_stream = {(CUstream)&noted, MM_DISPATCH_AUTO, MM_DEFER_YES};

/* --- tests ------------------------------------------------------------------------------- */

/* From here on `allocations` counts. */
static void
count_allocations(void)
{
    static bool counting;
    void *volatile control;
    size_t before;

    if (!counting) {
        CHECK(__sanitizer_install_malloc_and_free_hooks(count_malloc, ignore_free) > 0);
        counting = true;
    }
    before = atomic_load(&allocations);
    control = malloc(1);
    free(control);
    CHECK_EQUAL(atomic_load(&allocations), before + 1);
}

TEST(executing_allocates_nothing)
{
    mm_driver *cu = noting_driver();
    mm_guard guard = {0};
    mm_plan_entry entries[MANY];
    mm_status st;
    size_t before;

    for (size_t i = 0; i < MANY; i++) {
        /* Every fourth to the host; with gaps, and off the pages so that discards leave edges. */
        entries[i] = entry((i + 1) << 20 | 100, (size_t)1 << 19,
                           i % 4 == 0 ? mm_host() : device((int)(i % 2)), &guard);
    }
    count_allocations();
    for (int discard = 0; discard <= 1; discard++) {
        mm_operation op = discard ? MM_DISCARD_PREFETCH : MM_PREFETCH;

        for (size_t count = 1; count <= MANY; count += 3) {
            mm_plan *p = new_plan(entries, count, op);
            before = atomic_load(&allocations);
            for (int there = 0; there < 2; there++) {
                noted.there = there ? entries[1].transfer.range.start : 0;
                for (mm_dispatch d = MM_DISPATCH_AUTO; d <= MM_DISPATCH_LOOP; d++) {
                    mm_dispatch_options options = on_a_stream;
                    options.dispatch = d;
                    CHECK_OK(mm_plan_execute(cu, p, &options, &st), &st);
                }
            }
            CHECK_EQUAL(atomic_load(&allocations), before);
            mm_plan_release(p);
        }
    }
    CHECK(noted.calls > 0 && noted.queries > 0);
    CHECK_EQUAL(atomic_load(&guard.state), 0);
}

/* The allocations of one call, a prefetch or an advice, on so many ranges, the last one first. */
static size_t
allocations_of(mm_driver *cu, size_t count, const mm_dispatch *prefetch)
{
    size_t before = atomic_load(&allocations);
    mm_status st;
    mm_batch b;

    CHECK_OK(mm_batch_init(&b, count, &st), &st);
    for (size_t i = 0; i < count; i++) {
        CUdeviceptr start = (CUdeviceptr)(count - i) << 20;
        b.transfers[i] = entry(start, (size_t)1 << 19, device(0), NULL).transfer;
    }
    if (prefetch != NULL) {
        CHECK_OK(world_run(cu, MM_PREFETCH, &b, on_a_stream.stream, *prefetch, &st), &st);
    } else {
        CHECK_OK(mm_batch_advise(cu, &b, CU_MEM_ADVISE_SET_READ_MOSTLY, &st), &st);
    }
    CHECK_EQUAL(b.count, count);
    mm_batch_free(&b);
    return atomic_load(&allocations) - before;
}

TEST(thousands_of_ranges_allocate_as_often_as_a_hundred)
{
    mm_driver *cu = noting_driver();

    count_allocations();
    for (mm_dispatch d = MM_DISPATCH_AUTO; d <= MM_DISPATCH_LOOP; d++) {
        CHECK(allocations_of(cu, 100, &d) > 0);
        CHECK_EQUAL(allocations_of(cu, 5000, &d), allocations_of(cu, 100, &d));
    }
    CHECK_EQUAL(allocations_of(cu, 5000, NULL), allocations_of(cu, 100, NULL));
    CHECK(noted.calls > 5000);
}

TEST(memory_is_held_once_and_let_go)
{
    mm_driver *cu = noting_driver();
    mm_guard open = {0}, closed = {0}, view = {0};
    mm_plan_entry entries[] = {entry(1 << 20, 4096, mm_host(), &open),
                               entry(2 << 20, 4096, mm_host(), &open),
                               entry(3 << 20, 4096, mm_host(), &closed)};
    mm_plan *p;
    mm_status st;

    entries[1].view = &view;
    p = new_plan(entries, 3, MM_PREFETCH);
    CHECK_EQUAL(mm_guard_close(&closed, false), MM_CLOSED_NOW);
    CHECK_EQUAL(mm_plan_execute(cu, p, &on_a_stream, &st), -1);
    CHECK_EQUAL(st.kind, MM_REFUSED);
    CHECK(strstr(st.detail, "entry 2") != NULL);
    CHECK_EQUAL(mm_guard_close(&view, false), MM_CLOSED_NOW);
    CHECK_EQUAL(mm_plan_execute(cu, p, &on_a_stream, &st), -1);
    CHECK(strstr(st.detail, "entry 1") != NULL);
    CHECK_EQUAL(noted.calls, 0);
    CHECK_EQUAL(atomic_load(&open.state), 0);
    mm_plan_release(p);
}

typedef struct {
    mm_plan *plan;
    atomic_size_t failed;
} shared;

static void *
execute_often(void *argument)
{
    shared *s = argument;
    const mm_dispatch_options options = {CU_STREAM_PER_THREAD, MM_DISPATCH_AUTO, MM_DEFER_NO};

    for (int i = 0; i < 50; i++) {
        mm_plan_preview preview;
        mm_status st;
        mm_plan_retain(s->plan);
        if (mm_plan_execute(world.cu, s->plan, &options, &st) < 0
            || mm_plan_make_preview(world.cu, s->plan, &options, &preview, &st) < 0) {
            atomic_fetch_add(&s->failed, 1);
        } else {
            mm_plan_preview_free(&preview);
        }
        mm_plan_release(s->plan);
    }
    return NULL;
}

TEST(threads_execute_one_plan)
{
    mm_memory *m = world_allocate((size_t)8 << 20);
    mm_plan_entry entries[16];
    shared s = {.plan = NULL};

    for (size_t i = 0; i < 16; i++) {
        entries[i] = entry(m->start + (i << 19), (size_t)1 << 17, device((int)(i % 2)), &m->guard);
        entries[i].transfer.range.allocation = m->allocation;
    }
    s.plan = new_plan(entries, 16, MM_PREFETCH);
    check_threads(4, execute_often, &s);
    CHECK_EQUAL(atomic_load(&s.failed), 0);
    CHECK_EQUAL(atomic_load(&m->guard.state), 0);
    mm_plan_release(s.plan);
    mm_memory_release(m);
}

TEST(a_budget_is_spent_in_order)
{
    const size_t page = mm_page_size();
    mm_plan_entry entries[] = {
        entry(10 * page, 4 * page, mm_host(), NULL), entry(20 * page + 1, 1, mm_host(), NULL),
        entry(30 * page, 3 * page, mm_host(), NULL), entry(40 * page, 2 * page, mm_host(), NULL),
        entry(10 * page, 4 * page, mm_host(), NULL), entry(30 * page, 3 * page, mm_host(), NULL),
    };
    const bool fits[] = {true, true, false, true, true, false};
    mm_status st;

    CHECK_OK(mm_plan_fit(entries, 6, device(1), 7 * page, &st), &st);
    for (size_t i = 0; i < 6; i++) {
        CHECK(mm_same_location(entries[i].transfer.location, fits[i] ? device(1) : mm_host()));
    }
}

/* Options of the sanitizers: allocations that are too large return NULL. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);

const char *
__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

const char *
__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

/* More entries than memory can hold; none of them is read. */
TEST(too_many_entries_are_refused)
{
    volatile size_t most = SIZE_MAX; /* volatile, because compilers warn about the constant */
    const size_t count = most / 16;
    mm_plan_preview preview;
    mm_batch batch;
    mm_status st;

    CHECK_EQUAL(mm_plan_fit(NULL, count, device(0), 1, &st), -1);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK_EQUAL(mm_batch_init(&batch, count, &st), -1);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK_EQUAL(mm_batch_arrays_init(&preview.work, count, &st), -1);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    mm_plan_preview_free(&preview);
    CHECK(mm_plan_new(NULL, count, MM_PREFETCH, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
}

TEST_MAIN(world_open)
