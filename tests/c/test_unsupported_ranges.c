/* test_unsupported_ranges.c: operations that pass over ranges, on systems for which the emulated driver has no
 * profile: one device with concurrent access and one without, and a driver that accepts advice on
 * pool memory. */
#include "memory/unsupported.h"
#include "world.h"

enum { SIZE = 16 << 10 };

/* --- one device without concurrent access ------------------------------------------------ */

static CUresult CUDAAPI
answer_concurrent(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = attribute != CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS || device == 0;
    return CUDA_SUCCESS;
}

/* Refuses destinations as a driver does; the device of the stream has concurrent access. */
static CUresult CUDAAPI
prefetch_to_concurrent(CUdeviceptr start, size_t size, CUmemLocation location, unsigned int flags,
                       CUstream stream)
{
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id == 1
               ? CUDA_ERROR_INVALID_DEVICE
               : world.cu->MemPrefetchAsync(start, size, location, flags, stream);
}

static mm_driver
mixed_driver(void)
{
    mm_driver cu = *world.cu;

    cu.concurrent_access = false;
    cu.DeviceGetAttribute = answer_concurrent;
    cu.MemPrefetchAsync = prefetch_to_concurrent;
    return cu;
}

/* Two memories, and a batch of both: the first to the host, the second to a device. */
typedef struct {
    mm_memory *memory[2];
    mm_batch batch;
} pair;

static void
make_pair(pair *p, mm_pool *pool, CUmemLocation first, CUmemLocation second)
{
    CUmemLocation location[] = {first, second};
    mm_status st;

    CHECK_EQUAL(mm_batch_init(&p->batch, 2, &st), 0);
    for (int i = 0; i < 2; i++) {
        p->memory[i] = pool != NULL && i == 0
                           ? mm_memory_allocate_from(world.cu, pool, SIZE, NULL, NULL, &st)
                           : mm_memory_allocate(world.cu, SIZE, CU_MEM_ATTACH_GLOBAL, &st);
        CHECK(p->memory[i] != NULL);
        p->batch.transfers[i] = (mm_transfer){
            {p->memory[i]->start, SIZE, atomic_load(&p->memory[i]->allocation)}, location[i]};
    }
}

static void
free_pair(pair *p)
{
    for (int i = 0; i < 2; i++) {
        mm_memory_release(p->memory[i]);
    }
    mm_batch_free(&p->batch);
}

static CUmemLocation
device(int id)
{
    return mm_location(CU_MEM_LOCATION_TYPE_DEVICE, id);
}

static bool
was_prefetched(const mm_memory *memory)
{
    CUmemLocation location;
    mm_status st;

    CHECK_OK(mm_range_last_prefetch(world.cu, (mm_range){memory->start, SIZE, 0}, &location, &st),
             &st);
    return location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id == 0;
}

TEST(prefetches_to_a_device_without_access_are_passed_over)
{
    mm_driver cu = mixed_driver();
    mm_dispatch_options options = {.dispatch = MM_DISPATCH_AUTO};
    size_t skipped;
    mm_status st;
    pair p;

    make_pair(&p, NULL, device(1), device(0));
    skipped = mm_skip_unsupported(&cu, MM_PREFETCH, &p.batch, options.dispatch);
    CHECK_EQUAL(skipped, 0);
    CHECK_EQUAL(mm_batch_run_or_skip(&cu, MM_PREFETCH, &p.batch, &options, &skipped, &st), 0);
    CHECK_EQUAL(skipped, 1);
    CHECK(!was_prefetched(p.memory[0]));
    CHECK(was_prefetched(p.memory[1]));
    free_pair(&p);
}

TEST(discards_and_forced_batches_need_all_devices)
{
    static const mm_operation operations[] = {MM_DISCARD, MM_DISCARD_PREFETCH, MM_PREFETCH};
    mm_driver cu = mixed_driver();
    mm_dispatch_options options = {.dispatch = MM_DISPATCH_BATCH};

    for (int i = 0; i < 3; i++) {
        size_t skipped;
        mm_status st;
        pair p;
        make_pair(&p, NULL, mm_host(), device(0));
        skipped = mm_skip_unsupported(&cu, operations[i], &p.batch, options.dispatch);
        CHECK_EQUAL(skipped, 2);
        CHECK(mm_batch_is_empty(&p.batch));
        world.log_clear();
        CHECK_EQUAL(mm_batch_run_or_skip(&cu, operations[i], &p.batch, &options, &skipped, &st),
                    0);
        CHECK_EQUAL(skipped, 2);
        CHECK_EQUAL(world_calls("cuMemDiscard") + world_calls("cuMemPrefetch"), 0);
        free_pair(&p);
    }
}

TEST(advice_that_names_such_a_device_is_passed_over)
{
    mm_driver cu = mixed_driver();
    mm_location_set set;
    size_t skipped = 0;
    mm_status st;
    pair p;

    make_pair(&p, NULL, device(1), device(0));
    CHECK_EQUAL(
        mm_batch_advise_or_skip(&cu, &p.batch, CU_MEM_ADVISE_SET_ACCESSED_BY, &skipped, &st), 0);
    CHECK_EQUAL(skipped, 1);
    for (int i = 0; i < 2; i++) {
        mm_range range = {p.memory[i]->start, SIZE, 0};
        CHECK_EQUAL(mm_range_accessed_by(world.cu, range, &set, &st), 0);
        CHECK_EQUAL(set, i == 0 ? 0 : mm_location_bit(device(0)));
    }
    free_pair(&p);
}

/* --- a driver that accepts advice on pool memory ----------------------------------------- */

static mm_memory *pooled;
static bool advised; /* pool memory is read-mostly */
static CUdeviceptr refused; /* the driver refuses advice on this range */

static CUresult CUDAAPI
advise_pools_too(CUdeviceptr start, size_t size, CUmem_advise advice, CUmemLocation location)
{
    if (start == refused) {
        return CUDA_ERROR_UNKNOWN;
    }
    if (start == pooled->start) {
        advised = advice == CU_MEM_ADVISE_SET_READ_MOSTLY;
        return CUDA_SUCCESS;
    }
    return world.cu->MemAdvise(start, size, advice, location);
}

static CUresult CUDAAPI
remember_advice(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr start,
                size_t count)
{
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY && pooled->start >= start
        && pooled->start < start + count) {
        CHECK_EQUAL(size, sizeof(int));
        *(int *)data = advised;
        return CUDA_SUCCESS;
    }
    return world.cu->MemRangeGetAttribute(data, size, attribute, start, count);
}

TEST(pool_memory_is_advised_where_the_driver_accepts_it)
{
    mm_driver cu = *world.cu;
    mm_status st;
    mm_pool *pool =
        mm_pool_create(world.cu, true, mm_location(CU_MEM_LOCATION_TYPE_NONE, 0), 0, &st);

    CHECK(pool != NULL);
    cu.MemAdvise = advise_pools_too;
    cu.MemRangeGetAttribute = remember_advice;
    for (int failing = 0; failing < 2; failing++) {
        size_t skipped = 0;
        bool on;
        pair p;
        make_pair(&p, pool, mm_host(), mm_host());
        pooled = p.memory[0];
        advised = false;
        refused = failing ? p.memory[1]->start : 0;
        CHECK_EQUAL(
            mm_batch_advise_or_skip(&cu, &p.batch, CU_MEM_ADVISE_SET_READ_MOSTLY, &skipped, &st),
            failing ? -1 : 0);
        CHECK_EQUAL(skipped, 0);
        CHECK_EQUAL(advised, !failing);
        CHECK_EQUAL(
            mm_range_read_mostly(world.cu, (mm_range){p.memory[1]->start, SIZE, 0}, &on, &st), 0);
        CHECK_EQUAL(on, !failing);
        free_pair(&p);
    }
    CHECK_EQUAL(mm_pool_release(pool, &st), 0);
}

TEST_MAIN(world_open_devices)
