/* Memory pools: their properties, and the default and current pool of each location. The
 * allocations of a pool share regions and so pages: a change of a page affects all of them, as
 * on a real driver. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

static struct emu_pool *pools;
static struct emu_pool_home *homes;
static size_t user_pools;

size_t
emu_pool_count(void)
{
    return user_pools;
}

struct emu_pool *
emu_pool_find(CUmemoryPool handle)
{
    struct emu_pool *pool;

    EMU_SEEK(pool, pools, (void *)pool == (void *)handle && !pool->dying);
    return pool;
}

bool
emu_pool_admits(const struct emu_pool *pool, int device)
{
    return (pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE && pool->location.id == device)
           || (pool->access >> device & 1) != 0;
}

static bool
place_exists(CUmemLocation location, CUmemAllocationType type)
{
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return emu_device(location.id) != NULL;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        return true;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return location.id >= 0 && location.id < emu_config()->numa_nodes;
    case CU_MEM_LOCATION_TYPE_NONE:
        return type == CU_MEM_ALLOCATION_TYPE_MANAGED;
    default:
        return false;
    }
}

static struct emu_pool *
pool_make(CUmemAllocationType type, CUmemLocation location)
{
    struct emu_pool *pool = calloc(1, sizeof *pool);

    if (pool == NULL) {
        return NULL;
    }
    pool->type = type;
    pool->location = location;
    pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
    EMU_LINK(pools, pool);
    return pool;
}

/* Checks the place and the type of a pool. */
static CUresult
check_home(CUmemLocation location, CUmemAllocationType type)
{
    if ((type != CU_MEM_ALLOCATION_TYPE_PINNED && type != CU_MEM_ALLOCATION_TYPE_MANAGED)
        || !place_exists(location, type)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return type == CU_MEM_ALLOCATION_TYPE_MANAGED && !emu_config()->concurrent
               ? CUDA_ERROR_NOT_SUPPORTED
               : CUDA_SUCCESS;
}

CUresult
emu_pool_new(const CUmemPoolProps *props, struct emu_pool **out)
{
    if (props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED
        && (props->maxSize != 0 || props->handleTypes != CU_MEM_HANDLE_TYPE_NONE)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(check_home(props->location, props->allocType));
    *out = pool_make(props->allocType, props->location);
    if (*out != NULL) {
        (*out)->max_size = props->maxSize;
    }
    user_pools += *out != NULL;
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static struct emu_pool_home *
home_make(CUmemLocation location, CUmemAllocationType type)
{
    struct emu_pool_home *home = calloc(1, sizeof *home);
    struct emu_pool *pool = home == NULL ? NULL : pool_make(type, location);

    if (pool == NULL) {
        free(home);
        return NULL;
    }
    pool->is_default = true;
    *home = (struct emu_pool_home){homes, location, type, pool, pool};
    homes = home;
    return home;
}

CUresult
emu_pool_home(CUmemLocation location, CUmemAllocationType type, struct emu_pool_home **out)
{
    struct emu_pool_home *home;

    EMU_TRY(check_home(location, type));
    EMU_SEEK(home, homes,
             home->type == type && home->location.type == location.type
                 && home->location.id == location.id);
    *out = home != NULL ? home : home_make(location, type);
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static void
pool_free(struct emu_pool *pool)
{
    emu_pool_regions_trim(pool, 0, false);
    EMU_UNLINK(pools, pool);
    free(pool);
}

/* Allocations outlive the handle: the last free ends the pool. */
void
emu_pool_delete(struct emu_pool *pool)
{
    for (struct emu_pool_home *h = homes; h != NULL; h = h->next) {
        if (h->current == pool) {
            h->current = h->default_pool;
        }
    }
    user_pools--;
    pool->dying = true;
    if (pool->live == 0) {
        pool_free(pool);
    }
}

CUresult
emu_pool_allocate(struct emu_pool *pool, size_t size, struct emu_allocation **out)
{
    enum emu_kind kind = pool->type == CU_MEM_ALLOCATION_TYPE_MANAGED         ? EMU_MANAGED
                         : pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? EMU_DEVICE
                                                                              : EMU_PINNED;
    struct emu_device *device = pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE
                                    ? emu_device(pool->location.id)
                                    : emu_current();
    size_t reserved;

    if (pool->max_size != 0 && (size > pool->max_size || pool->used > pool->max_size - size)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    EMU_TRY(emu_allocate(kind, size, device == NULL ? emu_device(0) : device, pool, out));
    (*out)->attach = (*out)->first_attach = CU_MEM_ATTACH_GLOBAL;
    pool->live++;
    pool->used += size;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    reserved = emu_pool_regions_bytes(pool);
    pool->reserved_high = reserved > pool->reserved_high ? reserved : pool->reserved_high;
    return CUDA_SUCCESS;
}

void
emu_pool_queue_release(struct emu_allocation *allocation)
{
    allocation->freed = true;
    allocation->pool->queued++;
    allocation->pool->used -= allocation->size;
}

void
emu_pool_release(struct emu_allocation *allocation)
{
    struct emu_pool *pool = allocation->pool;

    pool->live--;
    if (allocation->freed) {
        pool->queued--;
    } else {
        pool->used -= allocation->size;
    }
    emu_release(allocation);
    if (pool->dying && pool->live == 0) {
        pool_free(pool);
        return;
    }
    emu_pool_regions_trim(pool, (size_t)pool->threshold, false);
}
