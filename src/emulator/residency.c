/* Residency: prefetch and discard, which change the places of pages. Evictions are in touches.c.
 *
 * Both change the records of places and the host's page table when the operation runs in its
 * stream. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

struct page_move {
    struct emu_region *region;
    uint64_t bit; /* of the destination */
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

/* Blocks that one discard covers as a whole are evicted before blocks in use. */
static void
mark_discarded_blocks(const struct emu_region *region, size_t first, size_t end)
{
    size_t block = EMU_BLOCK / emu_config()->page;

    first = emu_round_up(first, block);
    end = end / block * block;
    if (first < end) {
        emu_frames_mark(region, first, end, EMU_DEVICE_BITS, EMU_FRAME_DISCARDED);
    }
}

/* Measured (topic "discarded bytes"): only pages that lie wholly inside the range are discarded. */
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
    mark_discarded_blocks(region, first, end);
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

/* Moves a run. If its destination is the host, also maps pages that were not mapped there. */
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
move_pages(struct page_move *move, size_t first, size_t end)
{
    EMU_EACH_RUN(part, &move->region->policies, first, end) {
        move->policy = part.value;
        (void)emu_runs_change(&move->region->pages, part.first, part.end, move_and_map_run, move);
    }
}

/* Moves block by block, because a block may evict another of the same memory. Pages that do not fit
 * stay in place; the call has already returned success. */
static void
move_to_device(struct page_move *move, size_t first, size_t end, int device)
{
    for (size_t at = first, next; at < end; at = next) {
        if (!emu_room_take(move->region, at, device)) {
            return;
        }
        next = emu_block_end(at, end);
        move_pages(move, at, next);
        emu_frames_mark(move->region, at, next, move->bit, EMU_FRAME_USED);
    }
}

void
emu_pages_prefetch(struct emu_region *region, CUdeviceptr ptr, size_t size, CUmemLocation location)
{
    bool to_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct page_move move = {.region = region,
                             .bit = to_device ? emu_holder_bit(location.id)
                                              : emu_place_bit(location)};
    size_t first, end;

    emu_page_span(region, ptr, size, &first, &end);
    emu_pages_observe(region, first, end);
    if ((move.bit & EMU_DEVICE_BITS) != 0) {
        move_to_device(&move, first, end, location.id);
    } else {
        move_pages(&move, first, end);
    }
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

void
emu_pages_forget(struct emu_region *region)
{
    if (region->kind == EMU_MANAGED) {
        emu_pages_observe(region, 0, region->pages.pages);
        emu_frames_release(region);
    }
}
