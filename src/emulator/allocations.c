/* Allocations: the addresses that are taken. A region holds one allocation, or several small ones.
 *
 * Measured (topic "small allocations"): managed allocations of up to 1 MiB are parts of a larger
 * mapping. They share its pages, and so their advice and residency. Larger allocations take whole
 * blocks of 2 MiB. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

/* The unit of sizes in a shared region, and the largest managed allocation in one. */
enum { UNIT = 512, SHARED_MAX = 1 << 20 };

/* Sorted by address. */
static struct emu_allocation **table;
static size_t table_count, table_capacity, live_bytes;
static uint64_t last_id, waits;

size_t
emu_allocation_count(void)
{
    return table_count;
}

size_t
emu_allocation_bytes(void)
{
    return live_bytes;
}

void
emu_notice_frees(void)
{
    waits++;
}

static void
drop_region(struct emu_region *region)
{
    emu_pages_forget(region);
    emu_region_delete(region);
}

/* The index of the first allocation whose base is above `ptr`. */
static size_t
upper_bound(CUdeviceptr ptr)
{
    size_t low = 0, high = table_count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table[middle]->base <= ptr) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

struct emu_allocation *
emu_find(CUdeviceptr ptr)
{
    size_t i = upper_bound(ptr);

    if (i == 0 || ptr - table[i - 1]->base >= table[i - 1]->size) {
        return NULL;
    }
    return table[i - 1];
}

struct emu_allocation *
emu_find_range(CUdeviceptr ptr, size_t size)
{
    struct emu_allocation *allocation = emu_find(ptr);

    if (allocation == NULL || size == 0 || size > allocation->size - (ptr - allocation->base)) {
        return NULL;
    }
    return allocation;
}

struct emu_allocation *
emu_find_managed(CUdeviceptr ptr, size_t size)
{
    struct emu_allocation *allocation = emu_find_range(ptr, size);

    return allocation != NULL && allocation->kind == EMU_MANAGED ? allocation : NULL;
}

bool
emu_is_attached(CUdeviceptr ptr, const struct emu_stream *stream)
{
    const struct emu_allocation *allocation = emu_find(ptr);
    unsigned int attach = CU_MEM_ATTACH_GLOBAL;

    if (allocation != NULL && allocation->kind == EMU_MANAGED && !emu_config()->concurrent) {
        attach = allocation->attach == CU_MEM_ATTACH_SINGLE
                         && emu_stream_by_id(allocation->attach_stream) == NULL
                     ? allocation->first_attach
                     : allocation->attach;
    }
    return attach == CU_MEM_ATTACH_GLOBAL
           || (attach == CU_MEM_ATTACH_SINGLE && allocation->attach_stream == stream->id);
}

/* The first gap of at least `size` bytes in a region, or 0. */
static CUdeviceptr
find_gap(const struct emu_region *region, size_t size)
{
    CUdeviceptr candidate = region->base, end = region->base + region->size;
    size_t i = upper_bound(region->base == 0 ? 0 : region->base - 1);

    for (; i < table_count && table[i]->base < end; i++) {
        if (table[i]->base - candidate >= size) {
            return candidate;
        }
        candidate = table[i]->base + emu_round_up(table[i]->size, UNIT);
    }
    return end >= candidate && end - candidate >= size ? candidate : 0;
}

/* Memory of a device is taken at the allocation, so managed pages are evicted to make room for
 * it. */
static struct emu_region *
make_region(enum emu_kind kind, size_t size, struct emu_device *device, struct emu_pool *pool)
{
    return kind == EMU_DEVICE && !emu_room_make(device, size, 0)
               ? NULL
               : emu_region_new(kind, size, device, pool);
}

/* Finds a gap in a region of the pool or, without a pool, in a region of small allocations. Makes a
 * region of at least 2 MiB if all are full. 0: out of memory. */
static CUdeviceptr
place_in_shared_region(enum emu_kind kind, size_t size, struct emu_device *device,
                       struct emu_pool *pool, struct emu_region **out)
{
    for (struct emu_region *r = emu_regions(); r != NULL; r = r->next) {
        bool fits = pool != NULL ? r->pool == pool : r->small && r->device == device;
        CUdeviceptr place = fits ? find_gap(r, size) : 0;
        if (place != 0) {
            *out = r;
            return place;
        }
    }
    *out = make_region(kind, emu_round_up(size, EMU_BLOCK), device, pool);
    if (*out == NULL) {
        return 0;
    }
    (*out)->small = pool == NULL;
    return (*out)->base;
}

static bool
table_add(struct emu_allocation *allocation)
{
    size_t i = upper_bound(allocation->base);

    if (table_count == table_capacity) {
        size_t capacity = table_capacity == 0 ? 64 : table_capacity * 2;
        struct emu_allocation **bigger = realloc(table, capacity * sizeof *bigger);
        if (bigger == NULL) {
            return false;
        }
        table = bigger;
        table_capacity = capacity;
    }
    memmove(&table[i + 1], &table[i], (table_count - i) * sizeof *table);
    table[i] = allocation;
    table_count++;
    return true;
}

CUresult
emu_allocate(enum emu_kind kind, size_t size, struct emu_device *device, struct emu_pool *pool,
             struct emu_allocation **out)
{
    struct emu_allocation *allocation;
    struct emu_region *region = NULL;
    size_t unit = kind == EMU_MANAGED ? EMU_BLOCK : emu_config()->page;

    if (size > EMU_WINDOW) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    allocation = calloc(1, sizeof *allocation);
    if (allocation == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (pool != NULL || (kind == EMU_MANAGED && size <= SHARED_MAX)) {
        allocation->base = place_in_shared_region(kind, size, device, pool, &region);
    } else {
        region = make_region(kind, emu_round_up(size, unit), device, NULL);
        allocation->base = region == NULL ? 0 : region->base;
    }
    allocation->size = size;
    allocation->region = region;
    allocation->kind = kind;
    allocation->device = device;
    allocation->pool = pool;
    allocation->id = ++last_id;
    if (region == NULL || !table_add(allocation)) {
        if (region != NULL && region->allocations == 0) {
            drop_region(region);
        }
        free(allocation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->allocations++;
    live_bytes += size;
    *out = allocation;
    return CUDA_SUCCESS;
}

CUresult
emu_allocate_in(struct emu_region *region, CUdeviceptr base, size_t size, enum emu_kind kind,
                struct emu_device *device, struct emu_allocation **out)
{
    const size_t after = upper_bound(base);
    struct emu_allocation *made;

    if (emu_find(base) != NULL || (after < table_count && table[after]->base < base + size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct emu_allocation){.base = base,
                                    .size = size,
                                    .region = region,
                                    .kind = kind,
                                    .device = device,
                                    .id = ++last_id};
    if (!table_add(made)) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    region->allocations++;
    live_bytes += size;
    *out = made;
    return CUDA_SUCCESS;
}

static void
clear_value(union emu_value *value, size_t first, size_t end, void *argument)
{
    (void)first;
    (void)end;
    (void)argument;
    memset(value, 0, sizeof *value);
}

/* Measured (topic "records of freed memory"): a free also ends the advice of neighbours on a shared
 * page. The walk that clears the records can skip pages, so a new allocation in freed memory of a
 * small one can read old advice. */
static void
clear_advice(const struct emu_allocation *allocation)
{
    size_t first, end;

    emu_page_span(allocation->region, allocation->base, allocation->size, &first, &end);
    (void)emu_runs_change(&allocation->region->policies, first, end, clear_value, NULL);
    (void)emu_runs_walk(&allocation->region->records, first, end, clear_value, NULL);
}

void
emu_release(struct emu_allocation *allocation)
{
    struct emu_region *region = allocation->region;
    size_t i = upper_bound(allocation->base) - 1, first, end;

    emu_page_span(region, allocation->base, allocation->size, &first, &end);
    emu_pages_observe(region, first, end); /* earlier touches belong to this allocation */
    clear_advice(allocation);
    table_count--;
    memmove(&table[i], &table[i + 1], (table_count - i) * sizeof *table);
    live_bytes -= allocation->size;
    region->allocations--;
    region->emptied = waits;
    if (region->allocations == 0 && region->pool == NULL && region->kind != EMU_RESERVED) {
        drop_region(region);
    }
    free(allocation);
}

void
emu_release_context(const struct emu_context *context)
{
    for (size_t i = table_count; i-- > 0;) {
        if (table[i]->context == context) {
            emu_release(table[i]);
        }
    }
}

void
emu_pool_regions_trim(struct emu_pool *pool, size_t keep, bool noticed)
{
    struct emu_region *region = emu_regions(), *next;
    size_t held = emu_pool_regions_bytes(pool);

    for (; region != NULL; region = next) {
        next = region->next;
        bool known = !noticed || region->emptied < waits;
        if (region->pool == pool && region->allocations == 0 && known
            && held - region->size >= keep && held >= region->size) {
            held -= region->size;
            drop_region(region);
        }
    }
}

size_t
emu_pool_regions_bytes(const struct emu_pool *pool)
{
    size_t bytes = 0;

    for (const struct emu_region *r = emu_regions(); r != NULL; r = r->next) {
        bytes += r->pool == pool ? r->size : 0;
    }
    return bytes;
}
