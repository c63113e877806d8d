/* Entry points: memory pools and stream-ordered allocation. */
#include "entries.h"

#include <string.h>

/* Measured (topic "capture, each call alone"): in a thread that a capture forbids unsafe calls,
 * all functions of pools are refused, queries too. */
#define REFUSE_IN_CAPTURE()                      \
    do {                                         \
        CUresult allowed = emu_capture_unsafe(); \
        if (allowed != CUDA_SUCCESS) {           \
            return emu_call_end(&call, allowed); \
        }                                        \
    } while (0)

EMU_ENTRY(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    struct emu_pool *made = NULL;
    CUresult result;

    EMU_BEGIN("cuMemPoolCreate", EMU_CALL_WORK, "type=%d",
              poolProps == NULL ? -1 : (int)poolProps->allocType);
    REFUSE_IN_CAPTURE();
    result = pool == NULL || poolProps == NULL ? CUDA_ERROR_INVALID_VALUE
                                               : emu_pool_new(poolProps, &made);
    if (result == CUDA_SUCCESS) {
        *pool = (CUmemoryPool)made;
        emu_call_out(&call, ", pool=0x%llx", emu_handle_number(made));
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuMemPoolDestroy, CUmemoryPool pool)
{
    struct emu_pool *found;

    EMU_BEGIN("cuMemPoolDestroy", EMU_CALL_WORK, "pool=0x%llx", emu_handle_number(pool));
    REFUSE_IN_CAPTURE();
    found = emu_pool_find(pool);
    if (found == NULL || found->is_default) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    if (emu_pool_frees_queued(found)) {
        emu_crash("cuMemPoolDestroy behind a queued free");
    }
    emu_pool_delete(found);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemPoolTrimTo, CUmemoryPool pool, size_t minBytesToKeep)
{
    struct emu_pool *found;

    EMU_BEGIN("cuMemPoolTrimTo", EMU_CALL_WORK, "pool=0x%llx, keep=%zu", emu_handle_number(pool),
              minBytesToKeep);
    REFUSE_IN_CAPTURE();
    found = emu_pool_find(pool);
    if (found == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
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

    EMU_BEGIN("cuMemPoolGetAttribute", EMU_CALL_WORK, "pool=0x%llx, attribute=%d",
              emu_handle_number(pool), (int)attr);
    REFUSE_IN_CAPTURE();
    found = emu_pool_find(pool);
    return emu_call_end(&call, found == NULL || value == NULL
                                   ? CUDA_ERROR_INVALID_VALUE
                                   : read_pool_attribute(found, attr, value));
}

/* High-water marks can only be set to 0, current values cannot be set. */
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

    EMU_BEGIN("cuMemPoolSetAttribute", EMU_CALL_WORK, "pool=0x%llx, attribute=%d",
              emu_handle_number(pool), (int)attr);
    REFUSE_IN_CAPTURE();
    found = emu_pool_find(pool);
    return emu_call_end(&call, found == NULL || value == NULL
                                   ? CUDA_ERROR_INVALID_VALUE
                                   : write_pool_attribute(found, attr, value));
}

/* ---- access ---- */

static CUresult
read_access(CUmemAccess_flags *flags, const struct emu_pool *pool, const CUmemLocation *location)
{
    bool allowed = false;

    if (flags == NULL || pool == NULL || location == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE) {
        if (emu_device(location->id) == NULL) {
            return CUDA_ERROR_INVALID_DEVICE;
        }
        allowed = emu_pool_admits(pool, location->id);
    }
    *flags = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemPoolGetAccess, CUmemAccess_flags *flags, CUmemoryPool memPool,
          CUmemLocation *location)
{
    EMU_BEGIN("cuMemPoolGetAccess", EMU_CALL_WORK, "pool=0x%llx", emu_handle_number(memPool));
    REFUSE_IN_CAPTURE();
    return emu_call_end(&call, read_access(flags, emu_pool_find(memPool), location));
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
static CUresult
write_access(struct emu_pool *pool, const CUmemAccessDesc *map, size_t count)
{
    if (pool == NULL || map == NULL || count == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        CUresult result = check_access_change(pool, &map[i]);
        if (result != CUDA_SUCCESS) {
            return result;
        }
    }
    for (size_t i = 0; i < count && pool->type != CU_MEM_ALLOCATION_TYPE_MANAGED; i++) {
        uint64_t bit = (uint64_t)1 << map[i].location.id;
        bool none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        pool->access = none ? pool->access & ~bit : pool->access | bit;
    }
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemPoolSetAccess, CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    EMU_BEGIN("cuMemPoolSetAccess", EMU_CALL_WORK, "pool=0x%llx, count=%zu",
              emu_handle_number(pool), count);
    REFUSE_IN_CAPTURE();
    return emu_call_end(&call, write_access(emu_pool_find(pool), map, count));
}

/* ---- default and current pools ---- */

static CUresult
default_or_current_pool(const char *name, CUmemoryPool *out, const CUmemLocation *location,
                        CUmemAllocationType type, bool current)
{
    struct emu_pool *pool = NULL;
    CUresult result;

    EMU_BEGIN(name, EMU_CALL_WORK, "type=%d", (int)type);
    if (out == NULL || location == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    result = current ? emu_pool_current(*location, type, &pool)
                     : emu_pool_default(*location, type, &pool);
    if (result == CUDA_SUCCESS) {
        *out = (CUmemoryPool)pool;
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuMemGetDefaultMemPool, CUmemoryPool *pool_out, CUmemLocation *location,
          CUmemAllocationType type)
{
    return default_or_current_pool("cuMemGetDefaultMemPool", pool_out, location, type, false);
}

EMU_ENTRY(cuMemGetMemPool, CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    return default_or_current_pool("cuMemGetMemPool", pool, location, type, true);
}

EMU_ENTRY(cuMemSetMemPool, CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    EMU_BEGIN("cuMemSetMemPool", EMU_CALL_WORK, "type=%d, pool=0x%llx", (int)type,
              emu_handle_number(pool));
    return emu_call_end(&call, location == NULL
                                   ? CUDA_ERROR_INVALID_VALUE
                                   : emu_pool_set_current(*location, type, emu_pool_find(pool)));
}

static CUmemLocation
place_of_device(CUdevice device)
{
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
}

/* ---- stream-ordered allocation ---- */

/* The caller has the address at once, and the memory from this point of the stream on. */
static CUresult
allocate_from_pool(CUdeviceptr *out, size_t size, struct emu_pool *pool, struct emu_stream *stream)
{
    struct emu_allocation *allocation = NULL;
    const struct emu_op op = {.kind = EMU_OP_NOTHING};
    bool captured = false;
    CUresult result;

    if (out == NULL || pool == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (size == 0) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    result = emu_capture_record(stream, &captured);
    if (result == CUDA_SUCCESS && captured) {
        /* The allocation would be a node, and graphs hold none here. */
        result = emu_capture_refuse(stream);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_unsafe();
    }
    if (result == CUDA_SUCCESS) {
        result = emu_pool_allocate(pool, size, &allocation);
    }
    if (result == CUDA_SUCCESS) {
        *out = allocation->base;
        result = emu_stream_submit(stream, &op);
    }
    return result;
}

EMU_ENTRY(cuMemAllocFromPoolAsync, CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
          CUstream hStream)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuMemAllocFromPoolAsync", EMU_CALL_WORK, "size=%zu, pool=0x%llx, stream=0x%llx",
              bytesize, emu_handle_number(pool), emu_handle_number(hStream));
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = allocate_from_pool(dptr, bytesize, emu_pool_find(pool), stream);
    }
    if (result == CUDA_SUCCESS) {
        emu_call_out(&call, ", ptr=0x%llx", *dptr);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuMemAllocAsync, CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    struct emu_stream *stream = NULL;
    struct emu_pool *pool = NULL;
    CUresult result;

    EMU_BEGIN("cuMemAllocAsync", EMU_CALL_WORK, "size=%zu, stream=0x%llx", bytesize,
              emu_handle_number(hStream));
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_pool_current(place_of_device(stream->device->ordinal),
                                  CU_MEM_ALLOCATION_TYPE_PINNED, &pool);
    }
    if (result == CUDA_SUCCESS) {
        result = allocate_from_pool(dptr, bytesize, pool, stream);
    }
    if (result == CUDA_SUCCESS) {
        emu_call_out(&call, ", ptr=0x%llx", *dptr);
    }
    return emu_call_end(&call, result);
}

static CUresult
queue_free(CUdeviceptr ptr, CUstream handle)
{
    struct emu_allocation *allocation = emu_find(ptr);
    struct emu_op op = {.kind = EMU_OP_RELEASE, .allocation = allocation};
    struct emu_stream *stream = NULL;
    CUresult result = emu_stream_find(handle, &stream);

    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (allocation == NULL || allocation->base != ptr || allocation->freed) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (allocation->pool == NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    result = emu_capture_refuse(stream);
    if (result == CUDA_SUCCESS) {
        emu_pool_queue_release(allocation);
        result = emu_stream_submit(stream, &op);
    }
    return result;
}

EMU_ENTRY(cuMemFreeAsync, CUdeviceptr dptr, CUstream hStream)
{
    EMU_BEGIN("cuMemFreeAsync", EMU_CALL_WORK, "ptr=0x%llx, stream=0x%llx", dptr,
              emu_handle_number(hStream));
    return emu_call_end(&call, queue_free(dptr, hStream));
}
