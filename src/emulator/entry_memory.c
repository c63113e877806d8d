/* Entry points: allocation, advice, prefetch, discard, range attributes, locations. The order of
 * checks is the measured one, because it decides the error of a call with several faults. */
#include "entries.h"

#include <string.h>

static CUresult
allocate_memory(enum emu_kind kind, CUdeviceptr *out, size_t size, unsigned int flags)
{
    struct emu_allocation *allocation = NULL;
    struct emu_device *device = emu_current();
    CUresult result;

    if (out == NULL || size == 0
        || (kind == EMU_MANAGED && flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (device == NULL) {
        return emu_no_context();
    }
    result = emu_capture_unsafe();
    if (result != CUDA_SUCCESS) {
        return result;
    }
    result = emu_allocate(kind, size, device, NULL, &allocation);
    if (result == CUDA_SUCCESS) {
        allocation->context = emu_context();
        allocation->attach = allocation->first_attach = flags;
        allocation->sync_memops = kind == EMU_MANAGED; /* topic "pointer attributes" */
        *out = allocation->base;
    }
    return result;
}

EMU_ENTRY(cuMemGetAddressRange_v2, CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    const struct emu_allocation *allocation;

    EMU_BEGIN("cuMemGetAddressRange", EMU_CALL_WORK, "ptr=0x%llx", dptr);
    allocation = emu_find(dptr);
    EMU_NEED(emu_context() != NULL, emu_no_context());
    EMU_NEED(allocation != NULL, CUDA_ERROR_NOT_FOUND);
    if (pbase != NULL) {
        *pbase = allocation->base;
    }
    if (psize != NULL) {
        *psize = allocation->size;
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemAllocManaged, CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    CUresult result;

    EMU_BEGIN("cuMemAllocManaged", EMU_CALL_WORK, "size=%zu, flags=%u", bytesize, flags);
    result = allocate_memory(EMU_MANAGED, dptr, bytesize, flags);
    if (result == CUDA_SUCCESS) {
        emu_call_out(&call, ", ptr=0x%llx", *dptr);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuMemAlloc_v2, CUdeviceptr *dptr, size_t bytesize)
{
    EMU_BEGIN("cuMemAlloc", EMU_CALL_WORK, "size=%zu", bytesize);
    EMU_STEP(allocate_memory(EMU_DEVICE, dptr, bytesize, 0));
    emu_call_out(&call, ", ptr=0x%llx", *dptr);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Measured (topic "pinned memory"): an allocation of no bytes succeeds. Its pointer, which no
 * recording shows, is NULL here. */
static CUresult
allocate_pinned(const char *name, void **out, size_t size, unsigned int flags)
{
    const unsigned int known =
        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    CUdeviceptr ptr = 0;

    EMU_BEGIN(name, EMU_CALL_WORK, "size=%zu, flags=%u", size, flags);
    EMU_NEED(out != NULL && (flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    EMU_NEED(emu_current() != NULL, emu_no_context());
    if (size != 0) {
        EMU_STEP(allocate_memory(EMU_PINNED, &ptr, size, 0));
    }
    *out = (void *)(uintptr_t)ptr;
    emu_call_out(&call, ", ptr=0x%llx", ptr);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemAllocHost_v2, void **pp, size_t bytesize)
{
    return allocate_pinned("cuMemAllocHost", pp, bytesize, 0);
}

EMU_ENTRY(cuMemHostAlloc, void **pp, size_t bytesize, unsigned int Flags)
{
    return allocate_pinned("cuMemHostAlloc", pp, bytesize, Flags);
}

/* The allocation that begins at an address, or NULL. */
static struct emu_allocation *
allocation_at(CUdeviceptr ptr)
{
    struct emu_allocation *allocation = emu_find(ptr);

    return allocation != NULL && allocation->base == ptr ? allocation : NULL;
}

/* Measured (topics "capture, each call alone" and "busy streams"): even the free of an unknown
 * pointer breaks a capture that forbids frees. A free waits for all queued operations. */
static CUresult
free_memory(CUdeviceptr ptr, bool pinned)
{
    struct emu_allocation *allocation;

    if (ptr == 0) {
        return CUDA_SUCCESS;
    }
    EMU_TRY(emu_capture_unsafe());
    allocation = allocation_at(ptr);
    if (allocation == NULL || (allocation->kind == EMU_PINNED) != pinned) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    emu_streams_drain(NULL);
    allocation = allocation_at(ptr);
    if (allocation == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (allocation->pool != NULL) {
        emu_pool_release(allocation);
    } else {
        emu_release(allocation);
    }
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemFree_v2, CUdeviceptr dptr)
{
    EMU_BEGIN("cuMemFree", EMU_CALL_WORK, "ptr=0x%llx", dptr);
    return emu_call_end(&call, free_memory(dptr, false));
}

EMU_ENTRY(cuMemFreeHost, void *p)
{
    EMU_BEGIN("cuMemFreeHost", EMU_CALL_WORK, "ptr=0x%llx", emu_handle_number(p));
    return emu_call_end(&call, free_memory((CUdeviceptr)(uintptr_t)p, true));
}

/* ---- advice ---- */

static bool
node_exists(int node)
{
    return node >= 0 && node < emu_config()->numa_nodes;
}

/* Checks the location of advice. Measured (topic "advise matrix"): read-mostly and unset-preferred
 * ignore the id but not the type; the others need a device that exists; accessed-by refuses NUMA
 * nodes. */
static CUresult
check_advice(CUmem_advise advice, CUmemLocation location)
{
    bool device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    bool known = device || location.type == CU_MEM_LOCATION_TYPE_HOST
                 || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
                 || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    bool accessed =
        advice == CU_MEM_ADVISE_SET_ACCESSED_BY || advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY;

    if ((int)advice < CU_MEM_ADVISE_SET_READ_MOSTLY || advice > CU_MEM_ADVISE_UNSET_ACCESSED_BY
        || !known) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!accessed && advice != CU_MEM_ADVISE_SET_PREFERRED_LOCATION) {
        return CUDA_SUCCESS;
    }
    if (device) {
        return emu_device(location.id) == NULL ? CUDA_ERROR_INVALID_VALUE
               : emu_config()->concurrent      ? CUDA_SUCCESS
                                               : CUDA_ERROR_INVALID_DEVICE;
    }
    if (accessed && location.type != CU_MEM_LOCATION_TYPE_HOST) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA && !node_exists(location.id)
               ? CUDA_ERROR_INVALID_VALUE
               : CUDA_SUCCESS;
}

/* True for system memory that devices can access. Advice and prefetches of it change nothing. */
static bool
system_range(CUdeviceptr ptr, size_t size)
{
    return emu_config()->pageable && ptr != 0 && size != 0 && ptr + size > ptr
           && emu_find(ptr) == NULL && emu_find(ptr + size - 1) == NULL;
}

/* Finds the managed range of a call, or NULL for system memory that devices can access. */
static CUresult
find_managed(CUdeviceptr ptr, size_t size, const struct emu_allocation **out)
{
    *out = emu_find_managed(ptr, size);
    return *out != NULL || system_range(ptr, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult
advise_range(CUdeviceptr ptr, size_t size, CUmem_advise advice, CUmemLocation location)
{
    const struct emu_allocation *allocation;

    EMU_TRY(check_advice(advice, location));
    if (emu_current() == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    EMU_TRY(find_managed(ptr, size, &allocation));
    EMU_TRY(emu_capture_unsafe());
    if (allocation == NULL) {
        return CUDA_SUCCESS;
    }
    if (allocation->pool != NULL) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    /* Without concurrent access, the driver accepts advice and forgets it. */
    return emu_config()->concurrent
               ? emu_policy_advise(allocation->region, ptr, size, advice, location)
               : CUDA_SUCCESS;
}

EMU_ENTRY(cuMemAdvise_v2, CUdeviceptr devPtr, size_t count, CUmem_advise advice,
          CUmemLocation location)
{
    EMU_BEGIN("cuMemAdvise", EMU_CALL_WORK, "ptr=0x%llx, count=%zu, advice=%d, type=%d, id=%d",
              devPtr, count, (int)advice, (int)location.type, location.id);
    return emu_call_end(&call, advise_range(devPtr, count, advice, location));
}

/* The location for the device argument of the first version: -1 is the host. Other negative numbers
 * are devices that do not exist. */
static CUmemLocation
location_of_device(CUdevice device)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};

    if (device == CU_DEVICE_CPU) {
        location.type = CU_MEM_LOCATION_TYPE_HOST;
        location.id = 0;
    }
    return location;
}

EMU_ENTRY(cuMemAdvise, CUdeviceptr devPtr, size_t count, CUmem_advise advice, CUdevice device)
{
    bool ignored = advice != CU_MEM_ADVISE_SET_PREFERRED_LOCATION
                   && advice != CU_MEM_ADVISE_SET_ACCESSED_BY
                   && advice != CU_MEM_ADVISE_UNSET_ACCESSED_BY;

    EMU_BEGIN("cuMemAdvise", EMU_CALL_WORK, "ptr=0x%llx, count=%zu, advice=%d, device=%d", devPtr,
              count, (int)advice, device);
    /* Measured (topic "advise checks"): where the id matters, this version answers a missing
     * device with INVALID_DEVICE. */
    EMU_NEED(ignored || device == CU_DEVICE_CPU || emu_device(device) != NULL,
             CUDA_ERROR_INVALID_DEVICE);
    return emu_call_end(&call, advise_range(devPtr, count, advice, location_of_device(device)));
}

/* ---- prefetch ---- */

static CUresult
check_destination(CUmemLocation location)
{
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return emu_device(location.id) == NULL ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return node_exists(location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult
queue_prefetch(struct emu_stream *stream, const struct emu_allocation *allocation, CUdeviceptr ptr,
               size_t size, CUmemLocation location)
{
    struct emu_op op = {.kind = EMU_OP_PREFETCH, .ptr = ptr, .size = size, .location = location};

    EMU_TRY(emu_policy_prefetched(allocation->region, ptr, size, location));
    /* As driver 580 does (docs/develop/dispatch.rst): if the device has no context at the call,
     * nothing moves, even once it has one. */
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE && !emu_device_has_context(location.id)) {
        op.kind = EMU_OP_NOTHING;
    }
    return emu_stream_submit(stream, &op);
}

static CUresult
prefetch_range(CUdeviceptr ptr, size_t size, CUmemLocation location, unsigned int flags,
               CUstream handle)
{
    const struct emu_allocation *allocation;
    struct emu_stream *stream = NULL;

    if (flags != 0 || size == 0 || ptr == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(check_destination(location));
    EMU_TRY(emu_stream_find(handle, &stream));
    /* Measured (topic "prefetch checks"): a range that wraps around is treated as empty. */
    if (ptr + size < ptr) {
        return CUDA_SUCCESS;
    }
    EMU_TRY(find_managed(ptr, size, &allocation));
    if (!emu_config()->concurrent) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    EMU_TRY(emu_capture_refuse(stream));
    if (location.type == CU_MEM_LOCATION_TYPE_HOST) {
        location.id = CU_DEVICE_CPU;
    }
    return allocation == NULL ? CUDA_SUCCESS
                              : queue_prefetch(stream, allocation, ptr, size, location);
}

EMU_ENTRY(cuMemPrefetchAsync_v2, CUdeviceptr devPtr, size_t count, CUmemLocation location,
          unsigned int flags, CUstream hStream)
{
    EMU_BEGIN("cuMemPrefetchAsync", EMU_CALL_WORK,
              "ptr=0x%llx, count=%zu, type=%d, id=%d, flags=%u, stream=0x%llx", devPtr, count,
              (int)location.type, location.id, flags, emu_handle_number(hStream));
    return emu_call_end(&call, prefetch_range(devPtr, count, location, flags, hStream));
}

EMU_ENTRY(cuMemPrefetchAsync, CUdeviceptr devPtr, size_t count, CUdevice dstDevice,
          CUstream hStream)
{
    EMU_BEGIN("cuMemPrefetchAsync", EMU_CALL_WORK,
              "ptr=0x%llx, count=%zu, device=%d, stream=0x%llx", devPtr, count, dstDevice,
              emu_handle_number(hStream));
    return emu_call_end(&call,
                        prefetch_range(devPtr, count, location_of_device(dstDevice), 0, hStream));
}

/* ---- batches ---- */

struct batch {
    const CUdeviceptr *ptrs;
    const size_t *sizes;
    size_t count;
    const CUmemLocation *locations;
    const size_t *indices;
    size_t places; /* 0: discard only */
    unsigned long long flags;
    bool discard;
};

static void
log_batch(struct emu_call *call, const struct batch *b, CUstream stream)
{
    emu_call_out(call, "count=%zu, numLocs=%zu, flags=%llu, stream=0x%llx, ranges=[", b->count,
                 b->places, b->flags, emu_handle_number(stream));
    for (size_t i = 0; b->ptrs != NULL && b->sizes != NULL && i < b->count && i < 6; i++) {
        emu_call_out(call, "%s0x%llx+%zu", i == 0 ? "" : " ", b->ptrs[i], b->sizes[i]);
    }
    emu_call_out(call, "], locs=[");
    for (size_t i = 0; b->locations != NULL && b->indices != NULL && i < b->places && i < 6; i++) {
        emu_call_out(call, "%s%d:%d@%zu", i == 0 ? "" : " ", (int)b->locations[i].type,
                     b->locations[i].id, b->indices[i]);
    }
    emu_call_out(call, "]");
}

/* Measured (topic "batch checks"): equal indices pass, every index must be below the count,
 * and the number of locations must not exceed it. Every fault is INVALID_VALUE, even a missing
 * device. */
static CUresult
check_batch(const struct batch *b, bool has_places)
{
    if (b->flags != 0 || b->count == 0 || b->ptrs == NULL || b->sizes == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!has_places) {
        return CUDA_SUCCESS;
    }
    if (b->locations == NULL || b->indices == NULL || b->places == 0 || b->places > b->count
        || b->indices[0] != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < b->places; i++) {
        if (b->indices[i] >= b->count || (i > 0 && b->indices[i] < b->indices[i - 1])
            || check_destination(b->locations[i]) != CUDA_SUCCESS) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

/* Measured (topic "batch checks"): the first of two locations with the same index is used. */
static CUmemLocation
place_of_element(const struct batch *b, size_t element)
{
    size_t i = 0;

    for (size_t e = 1; e <= element; e++) {
        i += i + 1 < b->places && b->indices[i + 1] == e;
    }
    return b->locations[i];
}

static CUresult
queue_element(struct emu_stream *stream, const struct batch *b, size_t i)
{
    const struct emu_allocation *allocation;
    struct emu_op op = {.ptr = b->ptrs[i], .size = b->sizes[i]};

    EMU_TRY(find_managed(op.ptr, op.size, &allocation));
    if (b->discard) {
        op.kind = allocation != NULL ? EMU_OP_DISCARD : EMU_OP_DISCARD_SYSTEM;
        EMU_TRY(emu_stream_submit(stream, &op));
    }
    return allocation == NULL || b->places == 0
               ? CUDA_SUCCESS
               : queue_prefetch(stream, allocation, op.ptr, op.size, place_of_element(b, i));
}

/* Measured (topic "batch checks"): elements before a bad one are applied, those after it are
 * not. */
static CUresult
run_batch(const struct batch *b, bool has_places, CUstream handle)
{
    struct emu_stream *stream = NULL;

    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(emu_stream_find(handle, &stream));
    EMU_TRY(check_batch(b, has_places));
    if (!emu_config()->concurrent) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(emu_capture_refuse(stream));
    for (size_t i = 0; i < b->count; i++) {
        EMU_TRY(queue_element(stream, b, i));
    }
    return CUDA_SUCCESS;
}

/* The vendor's prototypes have non-const pointers for inputs.
 * NOLINTBEGIN(readability-non-const-parameter) */
EMU_ENTRY(cuMemPrefetchBatchAsync, CUdeviceptr *dptrs, size_t *sizes, size_t count,
          CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs, size_t numPrefetchLocs,
          unsigned long long flags, CUstream hStream)
{
    const struct batch b = {dptrs,           sizes,           count, prefetchLocs,
                            prefetchLocIdxs, numPrefetchLocs, flags, false};

    EMU_BEGIN("cuMemPrefetchBatchAsync", EMU_CALL_WORK, "%s", "");
    log_batch(&call, &b, hStream);
    return emu_call_end(&call, run_batch(&b, true, hStream));
}

EMU_ENTRY(cuMemDiscardBatchAsync, CUdeviceptr *dptrs, size_t *sizes, size_t count,
          unsigned long long flags, CUstream hStream)
{
    const struct batch b = {dptrs, sizes, count, NULL, NULL, 0, flags, true};

    EMU_BEGIN("cuMemDiscardBatchAsync", EMU_CALL_WORK, "%s", "");
    log_batch(&call, &b, hStream);
    return emu_call_end(&call, run_batch(&b, false, hStream));
}

EMU_ENTRY(cuMemDiscardAndPrefetchBatchAsync, CUdeviceptr *dptrs, size_t *sizes, size_t count,
          CUmemLocation *prefetchLocs, size_t *prefetchLocIdxs, size_t numPrefetchLocs,
          unsigned long long flags, CUstream hStream)
{
    const struct batch b = {dptrs,           sizes,           count, prefetchLocs,
                            prefetchLocIdxs, numPrefetchLocs, flags, true};

    EMU_BEGIN("cuMemDiscardAndPrefetchBatchAsync", EMU_CALL_WORK, "%s", "");
    log_batch(&call, &b, hStream);
    return emu_call_end(&call, run_batch(&b, true, hStream));
}

/* ---- range attributes ---- */

static CUresult
check_range(const struct emu_allocation **out, CUdeviceptr ptr, size_t size)
{
    if (emu_current() == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *out = emu_find_managed(ptr, size);
    return *out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EMU_ENTRY(cuMemRangeGetAttribute, void *data, size_t dataSize, CUmem_range_attribute attribute,
          CUdeviceptr devPtr, size_t count)
{
    const struct emu_allocation *allocation = NULL;

    EMU_BEGIN("cuMemRangeGetAttribute", EMU_CALL_WORK,
              "ptr=0x%llx, count=%zu, attribute=%d, dataSize=%zu", devPtr, count, (int)attribute,
              dataSize);
    EMU_STEP(check_range(&allocation, devPtr, count));
    EMU_STEP(emu_policy_check(attribute, data, dataSize));
    emu_policy_read(allocation->region, devPtr, count, attribute, data, dataSize);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* All sizes are checked before anything is written. */
EMU_ENTRY(cuMemRangeGetAttributes, void **data, size_t *dataSizes,
          CUmem_range_attribute *attributes, size_t numAttributes, CUdeviceptr devPtr,
          size_t count)
{
    const struct emu_allocation *allocation = NULL;

    EMU_BEGIN("cuMemRangeGetAttributes", EMU_CALL_WORK, "ptr=0x%llx, count=%zu, numAttributes=%zu",
              devPtr, count, numAttributes);
    EMU_STEP(check_range(&allocation, devPtr, count));
    EMU_NEED(numAttributes != 0 && data != NULL && dataSizes != NULL && attributes != NULL,
             CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < numAttributes; i++) {
        EMU_STEP(emu_policy_check(attributes[i], data[i], dataSizes[i]));
    }
    for (size_t i = 0; i < numAttributes; i++) {
        emu_policy_read(allocation->region, devPtr, count, attributes[i], data[i], dataSizes[i]);
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* NOLINTEND(readability-non-const-parameter) */

/* ---- locations ---- */

/* One call of cuMemGetLocationInfo. For system memory, `allocation` is NULL. */
struct location_query {
    const struct emu_allocation *allocation;
    CUdeviceptr ptr;
    size_t size, summary, sampling;
};

enum { NOWHERE = EMU_HOST_BIT + EMU_MAX_NODES }; /* above the bits of places */

static void
note_mapped(CUdeviceptr start, CUdeviceptr end, void *argument)
{
    (void)start;
    (void)end;
    *(bool *)argument = true;
}

/* The number of the bit of the place of an address. If a device and the host have copies, it is
 * that of the device: no recording shows which of them a driver names. */
static int
place_at(const struct location_query *q, CUdeviceptr at)
{
    CUdeviceptr page = at - at % emu_map_page_size();
    uint64_t places = 0;
    bool mapped = false;

    if (q->allocation != NULL) {
        const struct emu_region *region = q->allocation->region;
        places = emu_runs_at(&region->pages, (size_t)(at - region->base) / emu_config()->page)
                     ->page.places;
    } else if (emu_map_visit(page, page + emu_map_page_size(), note_mapped, &mapped) && mapped) {
        places = (uint64_t)1 << EMU_HOST_BIT;
    }
    return places == 0 ? NOWHERE : __builtin_ctzll(places);
}

/* The most common place of a part, or the first of several. */
static CUmemLocation
common_location(const struct location_query *q, CUdeviceptr start, CUdeviceptr end)
{
    size_t counts[NOWHERE + 1] = {0};
    int best = NOWHERE;

    for (CUdeviceptr at = start; at < end; at += q->sampling) {
        int place = place_at(q, at);
        if (++counts[place] > counts[best]) {
            best = place;
        }
    }
    if (best == NOWHERE || best == EMU_HOST_BIT) {
        return (CUmemLocation){.type = best == NOWHERE ? CU_MEM_LOCATION_TYPE_NONE
                                                       : CU_MEM_LOCATION_TYPE_HOST};
    }
    return best < EMU_HOST_BIT ? (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = best}
                               : (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST_NUMA,
                                                 .id = best - EMU_HOST_BIT};
}

/* By the header of CUDA 13.5, which does not mention contexts and captures. So calls without a
 * context, and during a capture, are refused. */
static CUresult
check_location_query(struct location_query *q, const CUmemLocation *out)
{
    if (out == NULL || q->summary == 0 || q->summary > q->size || q->sampling > q->summary) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (emu_current() == NULL) {
        return emu_no_context();
    }
    if (!emu_config()->concurrent) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    EMU_TRY(emu_capture_unsafe());
    EMU_TRY(find_managed(q->ptr, q->size, &q->allocation));
    return q->allocation == NULL && emu_find_registered(q->ptr) != NULL ? CUDA_ERROR_INVALID_VALUE
                                                                        : CUDA_SUCCESS;
}

EMU_ENTRY(cuMemGetLocationInfo, CUdeviceptr ptr, size_t size, size_t summaryGranularity,
          size_t samplingGranularity, CUmemLocation *location_out)
{
    struct location_query q = {NULL, ptr, size, summaryGranularity, samplingGranularity};

    EMU_BEGIN("cuMemGetLocationInfo", EMU_CALL_WORK,
              "ptr=0x%llx, size=%zu, summaryGranularity=%zu, samplingGranularity=%zu", ptr, size,
              summaryGranularity, samplingGranularity);
    EMU_STEP(check_location_query(&q, location_out));
    q.sampling = q.sampling == 0 ? emu_config()->page : q.sampling;
    if (q.allocation != NULL) {
        size_t first, end;
        emu_page_span(q.allocation->region, ptr, size, &first, &end);
        emu_pages_observe(q.allocation->region, first, end);
    }
    for (CUdeviceptr at = ptr; at < ptr + size; at += q.summary) {
        size_t rest = (size_t)(ptr + size - at);
        *location_out++ = common_location(&q, at, at + (rest < q.summary ? rest : q.summary));
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}
