/* Places: which processors hold a copy of a run of pages, the counters of moves, and the bytes of
 * discarded pages.
 *
 * The bytes exist once, in host memory. A page that the host loses is unmapped, so that the next
 * access of the host shows in the kernel's page map. */
#include "emulator.h"

#include <string.h>
#include <sys/mman.h>

/* A larger move to the host leaves the pages unmapped until they are accessed: pages that were
 * never written would all take memory. */
static const size_t MAPPED_AT_ONCE = (size_t)256 << 20;

struct emu_counters emu_counted;

uint64_t
emu_holder_bit(int device)
{
    return (uint64_t)1 << (device < 0 || emu_config()->integrated ? EMU_HOST_BIT : device);
}

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

CUdeviceptr
emu_page_address(const struct emu_region *region, size_t page)
{
    return region->base + page * emu_config()->page;
}

static unsigned char *
page_bytes(const struct emu_region *region, size_t page)
{
    return emu_bytes(emu_page_address(region, page));
}

uint64_t
emu_preferred_bit(const struct emu_policy *policy)
{
    return policy->preferred_type == 0 ? 0
           : policy->preferred_type == CU_MEM_LOCATION_TYPE_DEVICE
               ? emu_holder_bit(policy->preferred_id)
               : emu_place_bit((CUmemLocation){.type = (CUmemLocationType)policy->preferred_type,
                                               .id = policy->preferred_id});
}

void
emu_places_unmap(struct emu_region *region, size_t first, size_t end)
{
    if (!region->blind) {
        region->blind = !emu_map_advise(emu_page_address(region, first),
                                        (end - first) * emu_config()->page, MADV_DONTNEED);
    }
}

void
emu_places_map(struct emu_region *region, union emu_value *value, size_t first, size_t end)
{
    size_t size = (end - first) * emu_config()->page;

    if (size <= MAPPED_AT_ONCE) {
        emu_map_fill(emu_page_address(region, first), size);
    }
    value->page.unmapped = size > MAPPED_AT_ONCE;
}

void
emu_places_set(struct emu_region *region, union emu_value *value, size_t first, size_t end,
               uint64_t places)
{
    size_t bytes = (end - first) * emu_config()->page;
    uint64_t before = value->page.places;

    emu_frames_count(region, first, end, before & ~places, false);
    emu_frames_count(region, first, end, places & ~before, true);
    value->page.places = places;
    value->page.remote = 0;
    if ((before & (before - 1)) != 0 && (places & (places - 1)) == 0) {
        emu_uvm_unduplicated(emu_page_address(region, first), bytes, places);
    }
    if ((places & ~EMU_DEVICE_BITS) == 0) {
        value->page.unmapped = 0;
        if ((before & ~EMU_DEVICE_BITS) != 0) {
            emu_places_unmap(region, first, end);
        }
    }
}

void
emu_places_moved(const struct emu_region *region, size_t first, size_t end, uint64_t from,
                 uint64_t to, enum emu_uvm_cause cause)
{
    uint64_t bytes = (uint64_t)(end - first) * emu_config()->page;
    bool from_device = (from & EMU_DEVICE_BITS) != 0 && (from & ~EMU_DEVICE_BITS) == 0;

    if ((to & EMU_DEVICE_BITS) == 0) {
        emu_counted.bytes_dtoh += from_device ? bytes : 0;
    } else if (from_device) {
        emu_counted.bytes_dtod += bytes;
    } else {
        emu_counted.bytes_htod += bytes;
    }
    if (from_device || (to & EMU_DEVICE_BITS) != 0) {
        emu_uvm_migrated(emu_page_address(region, first), bytes, from, to, cause);
    }
}

void
emu_places_duplicated(const struct emu_region *region, size_t first, size_t end, uint64_t places)
{
    emu_counted.duplications += end - first;
    emu_uvm_duplicated(emu_page_address(region, first), (end - first) * emu_config()->page,
                       places);
}

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

void
emu_page_discard(struct emu_region *region, size_t page)
{
    unsigned char *bytes = page_bytes(region, page);
    size_t size = emu_config()->page;

    if (emu_config()->discard != EMU_DISCARD_KEEP) {
        memset(bytes, emu_config()->discard == EMU_DISCARD_POISON ? EMU_POISON : 0, size);
    }
    if (region->checksums != NULL) {
        region->checksums[page] = checksum(bytes, size);
    }
}

bool
emu_page_untouched(const struct emu_region *region, size_t page)
{
    const unsigned char *bytes = page_bytes(region, page);
    size_t size = emu_config()->page;

    if (emu_config()->discard == EMU_DISCARD_KEEP) {
        return region->checksums != NULL && checksum(bytes, size) == region->checksums[page];
    }
    return bytes[0] == (emu_config()->discard == EMU_DISCARD_POISON ? EMU_POISON : 0)
           && memcmp(bytes, bytes + 1, size - 1) == 0;
}
