/* Residency: the places of pages, and the operations that change them: prefetch, discard,
 * touch, eviction.
 *
 * The bytes exist once, in host memory: a move changes the books only, when the operation runs
 * in its stream. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { POISON = 0xDB };

static const uint64_t DEVICES = ((uint64_t)1 << EMU_HOST_BIT) - 1;
static uint64_t clock_of_use;
struct emu_counters emu_counted;

struct page_move {
    struct emu_region *region;
    uint64_t bit;                /* of the destination */
    bool write;                  /* touches only */
    const union emu_value *policy;
};

uint64_t
emu_place_bit(CUmemLocation location)
{
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        return (uint64_t)1 << location.id;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return (uint64_t)1 << (EMU_HOST_BIT + location.id);
    default:
        return (uint64_t)1 << EMU_HOST_BIT;
    }
}

static unsigned char *
page_bytes(const struct emu_region *region, size_t page)
{
    return (unsigned char *)(uintptr_t)region->base + page * emu_config()->page;
}

static void
count_resident(uint64_t places, size_t bytes, bool arrives)
{
    for (int i = 0; i < emu_config()->devices; i++) {
        if ((places >> i & 1) != 0) {
            struct emu_device *device = emu_device(i);
            device->resident = arrives ? device->resident + bytes : device->resident - bytes;
        }
    }
}

static void
set_places(union emu_value *value, uint64_t places, size_t pages)
{
    size_t bytes = pages * emu_config()->page;

    count_resident(value->page.places & ~places, bytes, false);
    count_resident(places & ~value->page.places, bytes, true);
    value->page.places = places;
}

static void
count_transfer(uint64_t from, uint64_t to, size_t pages)
{
    uint64_t bytes = (uint64_t)pages * emu_config()->page;
    bool from_device = (from & DEVICES) != 0 && (from & ~DEVICES) == 0;

    if ((to & DEVICES) == 0) {
        emu_counted.bytes_dtoh += from_device ? bytes : 0;
    } else if (from_device) {
        emu_counted.bytes_dtod += bytes;
    } else {
        emu_counted.bytes_htod += bytes;
    }
}

/* ---- touches by the host ---- */

static void
populate_on_host(union emu_value *value, size_t first, size_t end, void *argument)
{
    (void)argument;
    if (value->page.places == 0) {
        set_places(value, (uint64_t)1 << EMU_HOST_BIT, end - first);
    }
}

struct span {
    struct emu_region *region;
    size_t first, end;
};

static void
first_unpopulated(const union emu_value *value, size_t first, size_t end, void *argument)
{
    struct span *span = argument;

    if (value->page.places == 0 && span->first == span->end) {
        span->first = first;
        span->end = end;
    }
}

/* The kernel knows the pages of the mapping that exist. The host has touched those that no
 * operation has populated. */
void
emu_pages_observe(struct emu_region *region, size_t first, size_t end)
{
    size_t system = (size_t)sysconf(_SC_PAGESIZE), per = emu_config()->page / system;
    size_t at = first;

    while (at < end && per > 0) {
        struct span span = {region, 0, 0};
        unsigned char *present;
        size_t from = 0;

        emu_runs_visit(&region->pages, at, end, first_unpopulated, &span);
        if (span.first == span.end) {
            return;
        }
        present = malloc((span.end - span.first) * per);
        if (present == NULL
            || mincore(page_bytes(region, span.first), (span.end - span.first) * per * system,
                       present)
                   != 0) {
            free(present);
            return;
        }
        for (size_t page = 0; page <= span.end - span.first; page++) {
            bool exists = page < span.end - span.first && (present[page * per] & 1) != 0;
            if (!exists) {
                (void)emu_runs_change(&region->pages, span.first + from, span.first + page,
                                      populate_on_host, NULL);
                from = page + 1;
            }
        }
        free(present);
        at = span.end;
    }
}

/* ---- discarded pages ---- */

static uint64_t
checksum(const unsigned char *bytes, size_t size)
{
    uint64_t sum = 1469598103934665603u, word;

    for (size_t i = 0; i + sizeof word <= size; i += sizeof word) {
        memcpy(&word, bytes + i, sizeof word);
        sum = (sum ^ word) * 1099511628211u;
    }
    return sum;
}

static void
discard_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct emu_region *region = argument;
    size_t page = emu_config()->page;

    /* Measured (topic "discarded bytes"): pages that only a device holds keep their bytes. */
    if (emu_config()->discard == EMU_DISCARD_KEEP && value->page.places != 0
        && (value->page.places & ~DEVICES) == 0) {
        return;
    }
    value->page.discarded = 1;
    for (size_t i = first; i < end; i++) {
        unsigned char *bytes = page_bytes(region, i);
        if (emu_config()->discard == EMU_DISCARD_POISON) {
            memset(bytes, POISON, page);
        } else if (emu_config()->discard == EMU_DISCARD_ZERO) {
            memset(bytes, 0, page);
        }
        if (region->checksums != NULL) {
            region->checksums[i] = checksum(bytes, page);
        }
    }
}

/* Measured (topic "discarded bytes"): only pages inside the range are discarded, not those that
 * it cuts. */
void
emu_pages_discard(struct emu_region *region, CUdeviceptr ptr, size_t size)
{
    size_t page = emu_config()->page, start = (size_t)(ptr - region->base);
    size_t first = (start + page - 1) / page, end = (start + size) / page;

    if (first >= end) {
        return;
    }
    if (region->checksums == NULL && emu_config()->discard == EMU_DISCARD_KEEP) {
        region->checksums = calloc(region->size / page, sizeof *region->checksums);
    }
    emu_pages_observe(region, first, end);
    (void)emu_runs_change(&region->pages, first, end, discard_run, region);
}

/* Writes through the kernel: where the memory is unmapped or read-only by now, the write fails
 * without a signal. The bytes stay if the kernel forbids such writes. */
void
emu_system_discard(CUdeviceptr ptr, size_t size)
{
    unsigned char bytes[4096];
    size_t page = emu_config()->page;
    CUdeviceptr at = (ptr + page - 1) / page * page, end = (ptr + size) / page * page;

    if (emu_config()->discard == EMU_DISCARD_KEEP) {
        return;
    }
    memset(bytes, emu_config()->discard == EMU_DISCARD_POISON ? POISON : 0, sizeof bytes);
    while (at < end) {
        size_t part = end - at < sizeof bytes ? (size_t)(end - at) : sizeof bytes;
        struct iovec from = {bytes, part}, to = {(void *)(uintptr_t)at, part};
        if (process_vm_writev(getpid(), &from, 1, &to, 1, 0) != (ssize_t)part) {
            return;
        }
        at += part;
    }
}

/* A discarded page arrives at its destination as zeros, unless it was written in between. Host
 * writes cannot be seen, so the bytes are compared with those that the discard left. A write of
 * the same bytes goes unnoticed. */
static void
end_discard(struct emu_region *region, union emu_value *value, size_t first, size_t end)
{
    size_t page = emu_config()->page;

    if (value->page.discarded != 0 && region->checksums != NULL) {
        for (size_t i = first; i < end; i++) {
            unsigned char *bytes = page_bytes(region, i);
            if (checksum(bytes, page) == region->checksums[i]) {
                memset(bytes, 0, page);
            }
        }
    }
    value->page.discarded = 0;
}

/* ---- moving ---- */

static void
move_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;
    uint64_t places = value->page.places, bit = move->bit;
    size_t pages = end - first;
    bool was_discarded = value->page.discarded != 0;

    if ((places & bit) != 0) {
        value->page.discarded = 0;
        return;
    }
    end_discard(move->region, value, first, end);
    if (places == 0 || was_discarded) {
        set_places(value, bit, pages);
        return;
    }
    count_transfer(places, bit, pages);
    if (move->policy->policy.read_mostly != 0) {
        emu_counted.duplications += pages;
        set_places(value, places | bit, pages);
    } else {
        set_places(value, bit, pages);
    }
}

static void
move_with_policy(const union emu_value *policy, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;

    move->policy = policy;
    (void)emu_runs_change(&move->region->pages, first, end, move_run, move);
}

/* ---- eviction ---- */

static void
evict_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    const uint64_t *bit = argument;
    uint64_t rest = value->page.places & ~*bit;

    if ((value->page.places & *bit) == 0) {
        return;
    }
    if (rest == 0) {
        rest = (uint64_t)1 << EMU_HOST_BIT;
        if (value->page.discarded == 0) {
            count_transfer(*bit, rest, end - first);
        }
    }
    set_places(value, rest, end - first);
}

/* Makes room for `bytes` on a device: the regions that moved there longest ago go to the host.
 * Returns the number of bytes that fit. */
static size_t
evict_until_free(struct emu_device *device, size_t bytes, const struct emu_region *keep)
{
    uint64_t bit = (uint64_t)1 << device->ordinal;

    for (;;) {
        size_t taken = device->allocated + device->resident, capacity = emu_config()->capacity;
        struct emu_region *oldest = NULL;

        if (taken <= capacity && capacity - taken >= bytes) {
            return bytes;
        }
        for (struct emu_region *r = emu_regions(); r != NULL; r = r->next) {
            if (r != keep && r->kind == EMU_MANAGED && r->used != 0
                && (oldest == NULL || r->used < oldest->used)) {
                oldest = r;
            }
        }
        if (oldest == NULL) {
            return taken < capacity ? capacity - taken : 0;
        }
        oldest->used = 0;
        (void)emu_runs_change(&oldest->pages, 0, oldest->pages.pages, evict_run, &bit);
    }
}

struct missing {
    uint64_t bit;
    size_t pages;
};

static void
count_missing(const union emu_value *value, size_t first, size_t end, void *argument)
{
    struct missing *missing = argument;

    if ((value->page.places & missing->bit) == 0) {
        missing->pages += end - first;
    }
}

void
emu_pages_prefetch(struct emu_region *region, CUdeviceptr ptr, size_t size, CUmemLocation location)
{
    struct page_move move = {.region = region, .bit = emu_place_bit(location)};
    struct missing missing = {move.bit, 0};
    size_t first, end, page = emu_config()->page;

    emu_page_span(region, ptr, size, &first, &end);
    emu_pages_observe(region, first, end);
    if ((move.bit & DEVICES) != 0) {
        struct emu_device *device = emu_device(location.id);
        size_t room;

        emu_runs_visit(&region->pages, first, end, count_missing, &missing);
        room = evict_until_free(device, missing.pages * page, region) / page;
        /* Pages that do not fit stay in place; the call has already returned success. */
        if (room < missing.pages) {
            end = first + (room < end - first ? room : end - first);
        }
        region->used = ++clock_of_use;
    }
    emu_runs_visit(&region->policies, first, end, move_with_policy, &move);
}

/* ---- touches by a processor ---- */

static bool
mapped_remotely(const struct emu_policy *policy, uint64_t places, uint64_t bit)
{
    /* On a PCIe machine the host never maps device memory. */
    if ((bit & DEVICES) == 0) {
        return false;
    }
    if ((policy->accessed_by & bit) != 0) {
        return true;
    }
    return policy->preferred_type != 0
           && (emu_place_bit((CUmemLocation){.type = (CUmemLocationType)policy->preferred_type,
                                             .id = policy->preferred_id})
               & places)
                  != 0;
}

static void
touch_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;
    uint64_t places = value->page.places, bit = move->bit;
    size_t pages = end - first;
    bool host = (bit & DEVICES) == 0;

    if (move->write) {
        value->page.discarded = 0;
    }
    if (host && (places & ~DEVICES) != 0) {
        bit = places & ~DEVICES;
    }
    if ((places & bit) == 0) {
        if (places != 0 && move->policy->policy.read_mostly == 0
            && mapped_remotely(&move->policy->policy, places, bit)) {
            return;
        }
        emu_counted.cpu_faults += host ? pages : 0;
        emu_counted.gpu_faults += host ? 0 : pages;
        if (places != 0) {
            count_transfer(places, bit, pages);
        }
        if (places != 0 && move->policy->policy.read_mostly != 0 && !move->write) {
            emu_counted.duplications += pages;
            bit |= places;
        }
    } else if (!move->write || move->policy->policy.read_mostly == 0) {
        return;
    }
    set_places(value, bit, pages);
}

static void
touch_with_policy(const union emu_value *policy, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;

    move->policy = policy;
    (void)emu_runs_change(&move->region->pages, first, end, touch_run, move);
}

void
emu_pages_touch(struct emu_region *region, CUdeviceptr ptr, size_t size, int device, bool write)
{
    struct page_move move = {.region = region,
                             .write = write,
                             .bit = (uint64_t)1 << (device < 0 ? EMU_HOST_BIT : device)};
    size_t first, end;

    if (region->kind != EMU_MANAGED || size == 0) {
        return;
    }
    emu_page_span(region, ptr, size, &first, &end);
    if (device >= 0) {
        emu_pages_observe(region, first, end);
        region->used = ++clock_of_use;
    }
    emu_runs_visit(&region->policies, first, end, touch_with_policy, &move);
}

static void
collapse_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    const uint64_t *preferred = argument;
    uint64_t places = value->page.places, host = places & ~DEVICES;
    uint64_t kept = (places & *preferred) != 0 ? places & *preferred : host != 0 ? host : places;

    if ((places & (places - 1)) != 0) {
        set_places(value, kept & (~kept + 1), end - first);
    }
}

void
emu_pages_collapse(struct emu_region *region, size_t first, size_t end, uint64_t preferred)
{
    (void)emu_runs_change(&region->pages, first, end, collapse_run, &preferred);
}

static void
forget_run(const union emu_value *value, size_t first, size_t end, void *argument)
{
    (void)argument;
    count_resident(value->page.places, (end - first) * emu_config()->page, false);
}

void
emu_pages_forget(struct emu_region *region)
{
    if (region->kind == EMU_MANAGED) {
        emu_runs_visit(&region->pages, 0, region->pages.pages, forget_run, NULL);
    }
}
