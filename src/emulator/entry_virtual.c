/* Entry points: reserved addresses, and the memory of a device or of the host that is mapped there.
 *
 * No recording has these calls yet: they check what CUDA's documentation says. Mapped memory is an
 * allocation in the region of its addresses. While memory is not mapped, its chunk keeps the bytes.
 * So memory is mapped at one address at a time; a real driver allows several. */
#include "entries.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Memory of cuMemCreate. It lives as long as its handle or a mapping of it. */
struct chunk {
    struct chunk *next;
    size_t size;
    enum emu_kind kind;
    struct emu_device *device;
    struct emu_allocation *mapped;
    unsigned char *bytes; /* the contents while it is not mapped */
    bool released;
};

/* Addresses that a user has reserved. */
struct reservation {
    struct reservation *next;
    struct emu_region *region;
};

static struct chunk *chunks;
static struct reservation *reservations;

size_t
emu_virtual_count(void)
{
    size_t count = 0;

    for (const struct chunk *c = chunks; c != NULL; c = c->next) {
        count += c->mapped == NULL; /* mapped memory counts as an allocation */
    }
    for (const struct reservation *r = reservations; r != NULL; r = r->next) {
        count++;
    }
    return count;
}

static bool
is_granular(unsigned long long bytes)
{
    return bytes % EMU_BLOCK == 0;
}

/* --- memory ----------------------------------------------------------------------------------- */

static struct chunk *
chunk_of(CUmemGenericAllocationHandle handle)
{
    struct chunk *c = chunks;

    while (c != NULL && (uintptr_t)c != (uintptr_t)handle) {
        c = c->next;
    }
    return c;
}

static struct chunk *
mapped_chunk(CUdeviceptr ptr, size_t size)
{
    struct chunk *c = chunks;

    while (c != NULL && (c->mapped == NULL || c->mapped->base != ptr || c->size != size)) {
        c = c->next;
    }
    return c;
}

static bool
is_known_location(const CUmemAllocationProp *prop)
{
    const int id = prop->location.id;

    switch ((int)prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return emu_device(id) != NULL;
    case CU_MEM_LOCATION_TYPE_HOST:
        return true;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return id >= 0 && id < emu_config()->numa_nodes;
    default:
        return false;
    }
}

EMU_ENTRY(cuMemGetAllocationGranularity, size_t *granularity, const CUmemAllocationProp *prop,
          CUmemAllocationGranularity_flags option)
{
    EMU_BEGIN("cuMemGetAllocationGranularity", EMU_CALL_WORK, "option=%d", (int)option);
    if (granularity == NULL || prop == NULL || !is_known_location(prop)) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    *granularity = EMU_BLOCK;
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
make_chunk(struct chunk **out, size_t size, const CUmemAllocationProp *prop)
{
    struct emu_device *device = NULL;
    struct chunk *made;

    if (size == 0 || !is_granular(size) || prop == NULL || !is_known_location(prop)
        || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        device = emu_device(prop->location.id);
        if (!emu_room_make(device, size, 0)) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    made = calloc(1, sizeof *made);
    if (made != NULL) {
        made->bytes = calloc(1, size);
    }
    if (made == NULL || made->bytes == NULL) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->size = size;
    made->kind = device != NULL ? EMU_DEVICE : EMU_PINNED;
    made->device = device != NULL ? device : emu_device(0);
    if (device != NULL) {
        device->allocated += size;
        emu_device_note_peak(device);
    }
    made->next = chunks;
    chunks = made;
    *out = made;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemCreate, CUmemGenericAllocationHandle *handle, size_t size,
          const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct chunk *made = NULL;
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    EMU_BEGIN("cuMemCreate", EMU_CALL_WORK, "size=%zu", size);
    if (handle != NULL && flags == 0) {
        result = make_chunk(&made, size, prop);
    }
    if (result == CUDA_SUCCESS) {
        *handle = (uintptr_t)made;
    }
    return emu_call_end(&call, result);
}

/* Frees memory if its handle is released and it is not mapped. */
static void
end_chunk(struct chunk *ended)
{
    struct chunk **link = &chunks;

    if (!ended->released || ended->mapped != NULL) {
        return;
    }
    while (*link != ended) {
        link = &(*link)->next;
    }
    *link = ended->next;
    if (ended->kind == EMU_DEVICE) {
        ended->device->allocated -= ended->size;
    }
    free(ended->bytes);
    free(ended);
}

EMU_ENTRY(cuMemRelease, CUmemGenericAllocationHandle handle)
{
    struct chunk *c;

    EMU_BEGIN("cuMemRelease", EMU_CALL_WORK, "handle=0x%llx", handle);
    c = chunk_of(handle);
    if (c == NULL || c->released) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    c->released = true;
    end_chunk(c);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* --- addresses ---------------------------------------------------------------------------------- */

static struct emu_region *
reserved_region(CUdeviceptr ptr, size_t size)
{
    for (struct reservation *r = reservations; r != NULL; r = r->next) {
        const struct emu_region *region = r->region;
        if (ptr >= region->base && ptr - region->base <= region->size
            && size <= region->size - (ptr - region->base)) {
            return r->region;
        }
    }
    return NULL;
}

static CUresult
reserve(CUdeviceptr *ptr, size_t size)
{
    struct reservation *made = calloc(1, sizeof *made);

    if (made == NULL
        || (made->region = emu_region_new(EMU_RESERVED, size, emu_device(0), NULL)) == NULL) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->next = reservations;
    reservations = made;
    emu_region_open(made->region->base, size, false);
    *ptr = made->region->base;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemAddressReserve, CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
          unsigned long long flags)
{
    EMU_BEGIN("cuMemAddressReserve", EMU_CALL_WORK, "size=%zu", size);
    if (ptr == NULL || size == 0 || !is_granular(size) || alignment > EMU_BLOCK || addr != 0
        || flags != 0) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    return emu_call_end(&call, reserve(ptr, size));
}

static CUresult
free_addresses(CUdeviceptr ptr, size_t size)
{
    struct reservation **link = &reservations, *gone;

    while (*link != NULL && ((*link)->region->base != ptr || (*link)->region->size != size)) {
        link = &(*link)->next;
    }
    gone = *link;
    if (gone == NULL || gone->region->allocations > 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *link = gone->next;
    emu_region_delete(gone->region);
    free(gone);
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemAddressFree, CUdeviceptr ptr, size_t size)
{
    EMU_BEGIN("cuMemAddressFree", EMU_CALL_WORK, "ptr=0x%llx, size=%zu", ptr, size);
    return emu_call_end(&call, free_addresses(ptr, size));
}

/* --- mappings ----------------------------------------------------------------------------------- */

static CUresult
map_chunk(CUdeviceptr ptr, size_t size, struct chunk *c)
{
    struct emu_region *region = reserved_region(ptr, size);
    CUresult result;

    if (c == NULL || c->released || c->mapped != NULL || size != c->size || region == NULL
        || !is_granular(ptr)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    result = emu_allocate_in(region, ptr, size, c->kind, c->device, &c->mapped);
    if (result == CUDA_SUCCESS) {
        emu_region_open(ptr, size, true);
        memcpy(emu_bytes(ptr), c->bytes, size);
        emu_region_open(ptr, size, false); /* until access is set */
    }
    return result;
}

EMU_ENTRY(cuMemMap, CUdeviceptr ptr, size_t size, size_t offset,
          CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    EMU_BEGIN("cuMemMap", EMU_CALL_WORK, "ptr=0x%llx, size=%zu, handle=0x%llx", ptr, size, handle);
    return emu_call_end(&call, offset != 0 || flags != 0 ? CUDA_ERROR_INVALID_VALUE
                                                         : map_chunk(ptr, size, chunk_of(handle)));
}

EMU_ENTRY(cuMemSetAccess, CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    EMU_BEGIN("cuMemSetAccess", EMU_CALL_WORK, "ptr=0x%llx, size=%zu", ptr, size);
    if (desc == NULL || count == 0 || mapped_chunk(ptr, size) == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    emu_region_open(ptr, size, true);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Does not wait for queued work, which will find no memory. */
static void
unmap_chunk(struct chunk *c)
{
    const CUdeviceptr ptr = c->mapped->base;

    emu_region_open(ptr, c->size, true);
    memcpy(c->bytes, emu_bytes(ptr), c->size);
    if (!emu_map_advise(ptr, c->size, MADV_REMOVE)) {
        memset(emu_bytes(ptr), 0, c->size);
    }
    emu_region_open(ptr, c->size, false);
    emu_release(c->mapped);
    c->mapped = NULL;
    end_chunk(c);
}

EMU_ENTRY(cuMemUnmap, CUdeviceptr ptr, size_t size)
{
    struct chunk *c;

    EMU_BEGIN("cuMemUnmap", EMU_CALL_WORK, "ptr=0x%llx, size=%zu", ptr, size);
    c = mapped_chunk(ptr, size);
    if (c == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    unmap_chunk(c);
    return emu_call_end(&call, CUDA_SUCCESS);
}
