/* Entry points: memory pools and stream-ordered allocation. */
#include "entries.h"

#include <string.h>

/* Begins an entry point about pools. Measured (topic "capture, each call alone"): where a capture
 * forbids unsafe calls to the thread, all these calls are refused, even queries. */
#define BEGIN(function, ...)                         \
    EMU_BEGIN(function, EMU_CALL_WORK, __VA_ARGS__); \
    EMU_STEP(emu_capture_unsafe())

EMU_ENTRY(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    struct emu_pool *made = NULL;

    BEGIN("cuMemPoolCreate", "type=%d", poolProps == NULL ? -1 : (int)poolProps->allocType);
    EMU_NEED(pool != NULL && poolProps != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_pool_new(poolProps, &made));
    *pool = (CUmemoryPool)made;
    emu_call_out(&call, ", pool=0x%llx", emu_handle_number(made));
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemPoolDestroy, CUmemoryPool pool)
{
    struct emu_pool *found;

    BEGIN("cuMemPoolDestroy", "pool=0x%llx", emu_handle_number(pool));
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL && !found->is_default, CUDA_ERROR_INVALID_VALUE);
    if (found->queued > 0) {
        emu_crash("cuMemPoolDestroy behind a queued free");
    }
    emu_pool_delete(found);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemPoolTrimTo, CUmemoryPool pool, size_t minBytesToKeep)
{
    struct emu_pool *found;

    BEGIN("cuMemPoolTrimTo", "pool=0x%llx, keep=%zu", emu_handle_number(pool), minBytesToKeep);
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL, CUDA_ERROR_INVALID_VALUE);
    emu_pool_regions_trim(found, minBytesToKeep, true);
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
read_pool_attribute(const struct emu_pool *pool, CUmemPool_attribute attribute, void *value)
{
    cuuint64_t number = 0;

    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        memcpy(value, &pool->reuse[(int)attribute - 1], sizeof(int));
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        number = pool->threshold;
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        number = emu_pool_regions_bytes(pool);
        break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        number = pool->reserved_high;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        number = pool->used;
        break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        number = pool->used_high;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(value, &number, sizeof number);
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemPoolGetAttribute, CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    const struct emu_pool *found;

    BEGIN("cuMemPoolGetAttribute", "pool=0x%llx, attribute=%d", emu_handle_number(pool),
          (int)attr);
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL && value != NULL, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(&call, read_pool_attribute(found, attr, value));
}

/* High-water marks can only be set to 0. Current values cannot be set. */
static CUresult
write_pool_attribute(struct emu_pool *pool, CUmemPool_attribute attribute, const void *value)
{
    cuuint64_t number = 0;

    switch ((int)attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        memcpy(&pool->reuse[(int)attribute - 1], value, sizeof(int));
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        memcpy(&pool->threshold, value, sizeof pool->threshold);
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        memcpy(&number, value, sizeof number);
        if (number != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
            pool->used_high = pool->used;
        } else {
            pool->reserved_high = emu_pool_regions_bytes(pool);
        }
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EMU_ENTRY(cuMemPoolSetAttribute, CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    struct emu_pool *found;

    BEGIN("cuMemPoolSetAttribute", "pool=0x%llx, attribute=%d", emu_handle_number(pool),
          (int)attr);
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL && value != NULL, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(&call, write_pool_attribute(found, attr, value));
}

/* ---- access ---- */

EMU_ENTRY(cuMemPoolGetAccess, CUmemAccess_flags *flags, CUmemoryPool memPool,
          CUmemLocation *location)
{
    const struct emu_pool *pool;
    bool allowed = false;

    BEGIN("cuMemPoolGetAccess", "pool=0x%llx", emu_handle_number(memPool));
    pool = emu_pool_find(memPool);
    EMU_NEED(flags != NULL && pool != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        EMU_NEED(emu_device(location->id) != NULL, CUDA_ERROR_INVALID_DEVICE);
        allowed = emu_pool_admits(pool, location->id);
    }
    *flags = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Measured (topic "two devices: pool access"): the owner of a device pool cannot lose its
 * access; managed pools accept all changes. */
static CUresult
check_access_change(const struct emu_pool *pool, const CUmemAccessDesc *desc)
{
    const CUmemLocation *location = &desc->location;
    bool owner =
        pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE && pool->location.id == location->id;

    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return emu_device(location->id) == NULL
                   || (owner && desc->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE)
               ? CUDA_ERROR_INVALID_DEVICE
               : CUDA_SUCCESS;
}

/* Checks all changes before it applies any. */
EMU_ENTRY(cuMemPoolSetAccess, CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    struct emu_pool *found;

    BEGIN("cuMemPoolSetAccess", "pool=0x%llx, count=%zu", emu_handle_number(pool), count);
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL && map != NULL && count != 0, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        EMU_STEP(check_access_change(found, &map[i]));
    }
    for (size_t i = 0; i < count && found->type != CU_MEM_ALLOCATION_TYPE_MANAGED; i++) {
        uint64_t bit = (uint64_t)1 << map[i].location.id;
        bool none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        found->access = none ? found->access & ~bit : found->access | bit;
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* ---- default and current pools ---- */

EMU_ENTRY(cuMemGetDefaultMemPool, CUmemoryPool *pool_out, CUmemLocation *location,
          CUmemAllocationType type)
{
    struct emu_pool_home *home = NULL;

    EMU_BEGIN("cuMemGetDefaultMemPool", EMU_CALL_WORK, "type=%d", (int)type);
    EMU_NEED(pool_out != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_pool_home(*location, type, &home));
    *pool_out = (CUmemoryPool)home->default_pool;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemGetMemPool, CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    struct emu_pool_home *home = NULL;

    EMU_BEGIN("cuMemGetMemPool", EMU_CALL_WORK, "type=%d", (int)type);
    EMU_NEED(pool != NULL && location != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_pool_home(*location, type, &home));
    *pool = (CUmemoryPool)home->current;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemSetMemPool, CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    struct emu_pool *found;
    struct emu_pool_home *home = NULL;

    EMU_BEGIN("cuMemSetMemPool", EMU_CALL_WORK, "type=%d, pool=0x%llx", (int)type,
              emu_handle_number(pool));
    EMU_NEED(location != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_pool_home(*location, type, &home));
    found = emu_pool_find(pool);
    EMU_NEED(found != NULL && found->type == type && found->location.type == location->type
                 && found->location.id == location->id,
             CUDA_ERROR_INVALID_VALUE);
    home->current = found;
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Older forms of the three calls above, which cuda.core calls. */

EMU_ENTRY(cuDeviceGetDefaultMemPool, CUmemoryPool *pool_out, CUdevice dev)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};

    return emu_cuMemGetDefaultMemPool(pool_out, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
}

EMU_ENTRY(cuDeviceGetMemPool, CUmemoryPool *pool, CUdevice dev)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};

    return emu_cuMemGetMemPool(pool, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
}

EMU_ENTRY(cuDeviceSetMemPool, CUdevice dev, CUmemoryPool pool)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev};

    return emu_cuMemSetMemPool(&location, CU_MEM_ALLOCATION_TYPE_PINNED, pool);
}

/* ---- stream-ordered allocation ---- */

/* The caller gets the address at once. The memory can be used from this point of the stream on. */
static CUresult
allocate_from_pool(CUdeviceptr *out, size_t size, struct emu_pool *pool, struct emu_stream *stream)
{
    struct emu_allocation *allocation = NULL;
    const struct emu_op op = {.kind = EMU_OP_NOTHING};

    if (out == NULL || pool == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (size == 0) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    EMU_TRY(emu_capture_refuse(stream)); /* a graph holds no allocations here */
    EMU_TRY(emu_capture_unsafe());
    EMU_TRY(emu_pool_allocate(pool, size, &allocation));
    *out = allocation->base;
    return emu_stream_submit(stream, &op);
}

EMU_ENTRY(cuMemAllocFromPoolAsync, CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
          CUstream hStream)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuMemAllocFromPoolAsync", EMU_CALL_WORK, "size=%zu, pool=0x%llx, stream=0x%llx",
              bytesize, emu_handle_number(pool), emu_handle_number(hStream));
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_STEP(allocate_from_pool(dptr, bytesize, emu_pool_find(pool), stream));
    emu_call_out(&call, ", ptr=0x%llx", *dptr);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemAllocAsync, CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
    struct emu_stream *stream = NULL;
    struct emu_pool_home *home = NULL;

    EMU_BEGIN("cuMemAllocAsync", EMU_CALL_WORK, "size=%zu, stream=0x%llx", bytesize,
              emu_handle_number(hStream));
    EMU_STEP(emu_stream_find(hStream, &stream));
    location.id = stream->device->ordinal;
    EMU_STEP(emu_pool_home(location, CU_MEM_ALLOCATION_TYPE_PINNED, &home));
    EMU_STEP(allocate_from_pool(dptr, bytesize, home->current, stream));
    emu_call_out(&call, ", ptr=0x%llx", *dptr);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemFreeAsync, CUdeviceptr dptr, CUstream hStream)
{
    struct emu_op op = {.kind = EMU_OP_RELEASE};
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuMemFreeAsync", EMU_CALL_WORK, "ptr=0x%llx, stream=0x%llx", dptr,
              emu_handle_number(hStream));
    EMU_STEP(emu_stream_find(hStream, &stream));
    op.allocation = emu_find(dptr);
    EMU_NEED(op.allocation != NULL && op.allocation->base == dptr && !op.allocation->freed,
             CUDA_ERROR_INVALID_VALUE);
    EMU_NEED(op.allocation->pool != NULL, CUDA_ERROR_NOT_SUPPORTED);
    EMU_STEP(emu_capture_refuse(stream));
    emu_pool_queue_release(op.allocation);
    return emu_call_end(&call, emu_stream_submit(stream, &op));
}
