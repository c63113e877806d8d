/* Regions: mappings of real memory in whole pages, with the values of their pages.
 *
 * Regions lie in one reserved window of addresses, one after the other, so that successive
 * allocations are adjacent as on a real driver. A freed region becomes inaccessible, and its
 * addresses are reused only after the rest of the window: a use after free crashes. Forked children
 * do not inherit managed memory, as on a real system.
 *
 * The memory of the window is shared memory without a name, mapped twice: for the host, and for the
 * emulated devices. So pages can be unmapped for the host without losing their bytes, and the
 * devices reach the bytes without mapping them for the host. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The window is smaller where a process cannot have that many addresses, as under valgrind. */
static const size_t SMALLEST_WINDOW = (size_t)1 << 31;

static CUdeviceptr window, cursor;
static CUdeviceptr
    devices_offset; /* from an address of the window to the devices' mapping of it */
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

struct mapping {
    void *host, *devices;
};

static void *
map_file(int file, size_t size)
{
    return mmap(NULL, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
}

/* The descriptor of a file in memory, or -1. Older C libraries lack memfd_create(), and older
 * headers its number. */
static int
open_memory(void)
{
#ifdef SYS_memfd_create
    enum { CLOSE_ON_EXEC = 1 };

    return (int)syscall(SYS_memfd_create, "managedmem", CLOSE_ON_EXEC);
#else
    return -1;
#endif
}

/* The descriptor is closed, because the mappings keep the file. A file larger than RLIMIT_FSIZE
 * would end the process. */
static bool
map_file_twice(size_t size, struct mapping *out)
{
    struct rlimit limit;
    bool allowed = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur >= size;
    int file = allowed ? open_memory() : -1;

    *out = (struct mapping){MAP_FAILED, MAP_FAILED};
    if (file < 0) {
        return false;
    }
    if (ftruncate(file, (off_t)size) == 0) {
        out->host = map_file(file, size);
        out->devices = map_file(file, size);
    }
    (void)close(file);
    return out->host != MAP_FAILED && out->devices != MAP_FAILED;
}

/* Maps without a file, for example under valgrind, which does not support the other way. */
static bool
map_anonymous_twice(size_t size, struct mapping *out)
{
    int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;

    out->devices = MAP_FAILED;
    out->host = mmap(NULL, size, PROT_NONE, flags, -1, 0);
    if (out->host != MAP_FAILED) {
        out->devices = mremap(out->host, 0, size, MREMAP_MAYMOVE);
    }
    return out->devices != MAP_FAILED;
}

static void
unmap(const struct mapping *mapping, size_t size)
{
    if (mapping->host != MAP_FAILED) {
        (void)munmap(mapping->host, size);
    }
    if (mapping->devices != MAP_FAILED) {
        (void)munmap(mapping->devices, size);
    }
}

static bool
map_window(size_t size, struct mapping *out)
{
    if (map_file_twice(size, out)) {
        return true;
    }
    unmap(out, size);
    if (map_anonymous_twice(size, out)) {
        return true;
    }
    unmap(out, size);
    return false;
}

static bool
open_window(void)
{
    struct mapping mapping;
    bool mapped = false;

    if (window != 0) {
        return true;
    }
    for (window_size = 2 * EMU_WINDOW; !mapped && window_size > SMALLEST_WINDOW;) {
        window_size /= 2;
        mapped = map_window(window_size + EMU_BLOCK, &mapping);
    }
    if (!mapped) {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        void *base = i == 0 ? mapping.host : mapping.devices;
        (void)madvise(base, window_size + EMU_BLOCK, MADV_DONTFORK);
        (void)madvise(base, window_size + EMU_BLOCK, MADV_NOHUGEPAGE);
    }
    (void)madvise(mapping.devices, window_size + EMU_BLOCK, MADV_DONTDUMP);
    window = emu_round_up((size_t)(uintptr_t)mapping.host, EMU_BLOCK);
    devices_offset =
        (CUdeviceptr)(uintptr_t)mapping.devices - (CUdeviceptr)(uintptr_t)mapping.host;
    cursor = window;
    (void)emu_map_open();
    return true;
}

unsigned char *
emu_bytes(CUdeviceptr ptr)
{
    bool inside = window != 0 && ptr >= window && ptr - window < window_size;

    return (unsigned char *)(uintptr_t)(inside ? ptr + devices_offset : ptr);
}

/* Makes the pages of a region accessible or inaccessible in both mappings. */
static bool
protect(const struct emu_region *region, int protection)
{
    return mprotect(pointer_to(region->base), region->size, protection) == 0
           && mprotect(emu_bytes(region->base), region->size, protection) == 0;
}

void
emu_region_open(CUdeviceptr ptr, size_t size, bool open)
{
    const int protection = open ? PROT_READ | PROT_WRITE : PROT_NONE;

    (void)mprotect(pointer_to(ptr), size, protection);
    (void)mprotect(emu_bytes(ptr), size, protection);
}

/* The end of a region that overlaps [ptr, ptr + size), or 0. */
static CUdeviceptr
end_of_overlap(CUdeviceptr ptr, size_t size)
{
    const struct emu_region *r;

    EMU_SEEK(r, regions, r->base < ptr + size && ptr < r->base + r->size);
    return r != NULL ? r->base + r->size : 0;
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

/* Makes the addresses of a region inaccessible and frees its record. */
static void
end_region(struct emu_region *region)
{
    if (region->base != 0) {
        (void)protect(region, PROT_NONE);
    }
    emu_runs_free(&region->policies);
    emu_runs_free(&region->records);
    emu_runs_free(&region->pages);
    free(region->checksums);
    free(region->frames);
    free(region);
}

void
emu_region_delete(struct emu_region *region)
{
    EMU_UNLINK(regions, region);
    if (region->kind == EMU_DEVICE) {
        region->device->allocated -= region->size;
    }
    /* The addresses stay reserved and inaccessible, without memory. Even if the kernel cannot take
     * the pages back, the next region here must begin with zeros. */
    if (!emu_map_advise(region->base, region->size, MADV_REMOVE)) {
        memset(emu_bytes(region->base), 0, region->size);
    }
    end_region(region);
}

static bool
make_frames(struct emu_region *region)
{
    size_t blocks = region->size / EMU_BLOCK;

    region->frames = calloc(blocks * (size_t)emu_config()->devices, sizeof *region->frames);
    return region->frames != NULL;
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
        || (kind == EMU_MANAGED && !make_frames(region))
        || !protect(region, PROT_READ | PROT_WRITE)) {
        end_region(region);
        return NULL;
    }
    region->blind = emu_config()->page % emu_map_page_size() != 0;
    if (kind == EMU_MANAGED) {
        emu_map_keep(region->base, region->size);
    }
    if (kind == EMU_DEVICE) {
        device->allocated += size;
        emu_device_note_peak(device);
    }
    EMU_LINK(regions, region);
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
