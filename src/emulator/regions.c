/* Regions: mappings of real memory in whole pages, with the values of their pages.
 *
 * Regions lie in one reserved window of addresses, each behind the one before, so that
 * successive allocations are adjacent as on a real driver. A freed region becomes inaccessible,
 * and its addresses are reused only after the rest of the window: a use after free crashes.
 * Forked children do not inherit managed memory, as on a real system. */
#include "emulator.h"

#include <stdlib.h>
#include <sys/mman.h>

/* The window is smaller where a process cannot have that many addresses, as under valgrind. */
static const size_t SMALLEST_WINDOW = (size_t)1 << 32;

static CUdeviceptr window, cursor;
static size_t window_size;
static struct emu_region *regions;

struct emu_region *
emu_regions(void)
{
    return regions;
}

size_t
emu_round_up(size_t value, size_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static void *
pointer_to(CUdeviceptr ptr)
{
    return (void *)(uintptr_t)ptr;
}

static bool
open_window(void)
{
    void *base = MAP_FAILED;

    if (window != 0) {
        return true;
    }
    for (window_size = 2 * EMU_WINDOW; base == MAP_FAILED && window_size > SMALLEST_WINDOW;) {
        window_size /= 2;
        base = mmap(NULL, window_size + EMU_BLOCK, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (base == MAP_FAILED) {
        return false;
    }
    window = emu_round_up((size_t)(uintptr_t)base, EMU_BLOCK);
    cursor = window;
    return true;
}

/* The end of a region that overlaps [ptr, ptr + size), or 0. */
static CUdeviceptr
end_of_overlap(CUdeviceptr ptr, size_t size)
{
    for (const struct emu_region *r = regions; r != NULL; r = r->next) {
        if (r->base < ptr + size && ptr < r->base + r->size) {
            return r->base + r->size;
        }
    }
    return 0;
}

static CUdeviceptr
find_addresses(size_t size)
{
    size_t alignment = size >= EMU_BLOCK ? EMU_BLOCK : emu_config()->page;
    CUdeviceptr candidate, end;
    bool again = false;

    if (!open_window() || size > window_size) {
        return 0;
    }
    candidate = emu_round_up(cursor, alignment);
    for (;;) {
        if (candidate + size > window + window_size) {
            if (again) {
                return 0;
            }
            again = true;
            candidate = window;
        }
        end = end_of_overlap(candidate, size);
        if (end == 0) {
            cursor = candidate + size;
            return candidate;
        }
        candidate = emu_round_up(end, alignment);
    }
}

void
emu_region_delete(struct emu_region *region)
{
    struct emu_region **link = &regions;

    while (*link != NULL && *link != region) {
        link = &(*link)->next;
    }
    if (*link != NULL) {
        *link = region->next;
    }
    if (region->kind == EMU_DEVICE) {
        region->device->allocated -= region->size;
    }
    /* The addresses stay reserved and inaccessible. If that fails, they are unmapped. */
    if (mmap(pointer_to(region->base), region->size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
        == MAP_FAILED) {
        (void)munmap(pointer_to(region->base), region->size);
    }
    emu_runs_free(&region->policies);
    emu_runs_free(&region->records);
    emu_runs_free(&region->pages);
    free(region->checksums);
    free(region);
}

struct emu_region *
emu_region_new(enum emu_kind kind, size_t size, struct emu_device *device, struct emu_pool *pool)
{
    struct emu_region *region = calloc(1, sizeof *region);
    size_t pages = size / emu_config()->page;

    if (region == NULL) {
        return NULL;
    }
    region->kind = kind;
    region->size = size;
    region->device = device;
    region->pool = pool;
    region->base = find_addresses(size);
    if (region->base == 0 || !emu_runs_init(&region->policies, pages)
        || !emu_runs_init(&region->records, pages) || !emu_runs_init(&region->pages, pages)
        || mmap(pointer_to(region->base), size, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0)
               == MAP_FAILED) {
        emu_runs_free(&region->policies);
        emu_runs_free(&region->records);
        emu_runs_free(&region->pages);
        free(region);
        return NULL;
    }
    (void)madvise(pointer_to(region->base), size, MADV_DONTFORK);
    if (kind == EMU_DEVICE) {
        device->allocated += size;
    }
    region->next = regions;
    regions = region;
    return region;
}

void
emu_page_span(const struct emu_region *region, CUdeviceptr ptr, size_t size, size_t *first,
              size_t *end)
{
    size_t page = emu_config()->page;

    *first = (size_t)(ptr - region->base) / page;
    *end = ((size_t)(ptr - region->base) + size + page - 1) / page;
}
