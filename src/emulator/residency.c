/* Residency: the operations that change the places of pages: prefetch, discard, eviction.
 *
 * They change the books and the host's page table when the operation runs in its stream. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

struct page_move {
    struct emu_region *region;
    uint64_t bit;                /* of the destination */
    CUdeviceptr incoming;        /* evictions only: the memory that needs the room */
    const union emu_value *policy;
};

/* ---- discarded pages ---- */

static void
discard_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct emu_region *region = argument;
    /* Measured (topic "discarded bytes"): pages that only a device holds keep their bytes. */
    if (emu_config()->discard == EMU_DISCARD_KEEP && value->page.places != 0
        && (value->page.places & ~EMU_DEVICE_BITS) == 0) {
        return;
    }
    value->page.discarded = 1;
    for (size_t i = first; i < end; i++) {
        emu_page_discard(region, i);
    }
    if ((value->page.places & ~EMU_DEVICE_BITS) != 0) {
        value->page.unmapped = 1;
        emu_places_unmap(region, first, end);
    }
}

/* Measured (topic "discarded bytes"): only pages inside the range are discarded, not those that
 * it cuts. */
void
emu_pages_discard(struct emu_region *region, CUdeviceptr ptr, size_t size)
{
    size_t page = emu_config()->page, start = (size_t)(ptr - region->base);
    size_t first = (start + page - 1) / page, end = (start + size) / page;

    if (first >= end || emu_config()->integrated) {
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
    memset(bytes, emu_config()->discard == EMU_DISCARD_POISON ? EMU_POISON : 0, sizeof bytes);
    while (at < end) {
        size_t part = end - at < sizeof bytes ? (size_t)(end - at) : sizeof bytes;
        struct iovec from = {bytes, part}, to = {(void *)(uintptr_t)at, part};
        if (process_vm_writev(getpid(), &from, 1, &to, 1, 0) != (ssize_t)part) {
            return;
        }
        at += part;
    }
}

/* Measured (topic "discarded bytes"): a discarded page arrives at its destination as zeros, unless
 * it was written in between. */
static void
end_discard(struct emu_region *region, union emu_value *value, size_t first, size_t end)
{
    if (value->page.discarded != 0 && emu_config()->discard == EMU_DISCARD_KEEP) {
        for (size_t i = first; i < end; i++) {
            if (emu_page_untouched(region, i)) {
                memset(emu_bytes(emu_page_address(region, i)), 0, emu_config()->page);
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
    bool was_discarded = value->page.discarded != 0;

    if ((places & bit) != 0) {
        value->page.discarded = 0;
        return;
    }
    end_discard(move->region, value, first, end);
    if (places != 0 && !was_discarded) {
        emu_places_moved(move->region, first, end, places, bit, EMU_UVM_REQUESTED);
        if (move->policy->policy.read_mostly != 0) {
            bit |= places;
            emu_places_duplicated(move->region, first, end, bit);
        }
    }
    emu_places_set(move->region, value, first, end, bit);
}

/* A page that comes to the host is mapped, and one that was there unmapped too. */
static void
move_and_map_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;
    bool mapped = (value->page.places & ~EMU_DEVICE_BITS) != 0 && value->page.unmapped == 0;

    move_run(value, first, end, argument);
    if (!mapped && (move->bit & EMU_DEVICE_BITS) == 0) {
        emu_places_map(move->region, value, first, end);
    }
}

static void
move_with_policy(const union emu_value *policy, size_t first, size_t end, void *argument)
{
    struct page_move *move = argument;

    move->policy = policy;
    (void)emu_runs_change(&move->region->pages, first, end, move_and_map_run, move);
}

/* ---- eviction ---- */

static void
evict_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    const struct page_move *move = argument;
    uint64_t rest = value->page.places & ~move->bit;

    if ((value->page.places & move->bit) == 0) {
        return;
    }
    if (rest == 0) {
        rest = (uint64_t)1 << EMU_HOST_BIT;
        if (emu_uvm_wanted(EMU_UVM_EVICTION)) {
            emu_uvm_evicted(emu_page_address(move->region, first),
                            (end - first) * emu_config()->page, move->bit, rest, move->incoming);
        }
        if (value->page.discarded == 0) {
            emu_places_moved(move->region, first, end, move->bit, rest, EMU_UVM_EVICTED);
        }
        value->page.unmapped = 1;
    }
    emu_places_set(move->region, value, first, end, rest);
}

/* Makes room for `bytes` on a device: the regions that moved there longest ago go to the host.
 * Returns the number of bytes that fit. */
static size_t
evict_until_free(struct emu_device *device, size_t bytes, const struct emu_region *keep)
{
    struct page_move eviction = {.bit = (uint64_t)1 << device->ordinal, .incoming = keep->base};

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
        eviction.region = oldest;
        emu_pages_observe(oldest, 0, oldest->pages.pages);
        (void)emu_runs_change(&oldest->pages, 0, oldest->pages.pages, evict_run, &eviction);
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
    bool to_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct page_move move = {.region = region,
                             .bit = to_device ? emu_holder_bit(location.id)
                                              : emu_place_bit(location)};
    struct missing missing = {move.bit, 0};
    size_t first, end, page = emu_config()->page;

    emu_page_span(region, ptr, size, &first, &end);
    emu_pages_observe(region, first, end);
    if ((move.bit & EMU_DEVICE_BITS) != 0) {
        struct emu_device *device = emu_device(location.id);
        size_t room;

        emu_runs_visit(&region->pages, first, end, count_missing, &missing);
        room = evict_until_free(device, missing.pages * page, region) / page;
        /* Pages that do not fit stay in place; the call has already returned success. */
        if (room < missing.pages) {
            end = first + (room < end - first ? room : end - first);
        }
        emu_region_use(region);
    }
    emu_runs_visit(&region->policies, first, end, move_with_policy, &move);
}

static void
collapse_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    const struct page_move *preferred = argument;
    uint64_t places = value->page.places, host = places & ~EMU_DEVICE_BITS;
    uint64_t wanted = places & preferred->bit, kept = wanted != 0 ? wanted
                                                      : host != 0 ? host
                                                                  : places;

    if ((places & (places - 1)) != 0) {
        emu_places_set(preferred->region, value, first, end, kept & (~kept + 1));
    }
}

void
emu_pages_collapse(struct emu_region *region, size_t first, size_t end, uint64_t preferred)
{
    struct page_move kept = {.region = region, .bit = preferred};

    (void)emu_runs_change(&region->pages, first, end, collapse_run, &kept);
}

static void
forget_run(const union emu_value *value, size_t first, size_t end, void *argument)
{
    (void)argument;
    emu_count_resident(value->page.places, (end - first) * emu_config()->page, false);
}

void
emu_pages_forget(struct emu_region *region)
{
    if (region->kind == EMU_MANAGED) {
        emu_pages_observe(region, 0, region->pages.pages);
        emu_runs_visit(&region->pages, 0, region->pages.pages, forget_run, NULL);
    }
}
