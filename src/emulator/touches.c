/* Touches: accesses by processors, which fault and move or copy pages.
 *
 * Those of the emulated devices and of emu_touch are calls. Those of the host are its own loads and
 * stores: a page that the host does not hold is not mapped, so one that the kernel's page map shows
 * as mapped has been touched. Reads and writes look alike. */
#include "emulator.h"

#include <sys/mman.h>

struct touch {
    struct emu_region *region;
    uint64_t bit; /* of the toucher */
    bool write;
    bool seen; /* in the page map, where the pages are mapped already */
    const union emu_value *policy;
};

uint64_t emu_bytes_in_place;

static bool
mapped_remotely(const struct emu_policy *policy, uint64_t places, uint64_t bit)
{
    /* On a PCIe machine the host never maps device memory. */
    if ((bit & EMU_DEVICE_BITS) == 0
        || (emu_config()->confidential && (places & ~EMU_DEVICE_BITS) != 0)) {
        return false;
    }
    if ((policy->accessed_by & bit) != 0) {
        return true;
    }
    return (emu_preferred_bit(policy) & places) != 0;
}

/* A device that may not, or need not, have the page itself. */
static void
access_remotely(union emu_value *value, size_t first, size_t end, const struct touch *touch)
{
    emu_bytes_in_place += (end - first) * emu_config()->page;
    if ((value->page.remote & touch->bit) == 0) {
        value->page.remote |= touch->bit;
        emu_uvm_mapped_remotely(emu_page_address(touch->region, first),
                                (end - first) * emu_config()->page, touch->bit,
                                value->page.places);
    }
}

/* As the kernel module does: pages that nothing holds are populated at their preferred location, if the
 * toucher reaches them there. A host that is preferred does not map them. */
static uint64_t
first_place(const struct touch *touch)
{
    const struct emu_policy *policy = &touch->policy->policy;
    uint64_t preferred = emu_preferred_bit(policy);
    bool elsewhere = !emu_config()->confidential && (touch->bit & EMU_DEVICE_BITS) != 0
                     && policy->read_mostly == 0 && (preferred & ~EMU_DEVICE_BITS) != 0;

    return elsewhere ? preferred : touch->bit;
}

/* Counts and records the faults of a run, and what they copy. Returns the places after them. */
static uint64_t
fault_run(const union emu_value *value, size_t first, size_t end, const struct touch *touch)
{
    uint64_t places = value->page.places, bit = touch->bit;
    size_t size = (end - first) * emu_config()->page;

    if ((bit & EMU_DEVICE_BITS) == 0) {
        emu_counted.cpu_faults += end - first;
        emu_uvm_host_faulted(emu_page_address(touch->region, first), size, touch->write);
    } else {
        emu_counted.gpu_faults += end - first;
        emu_uvm_device_faulted(emu_page_address(touch->region, first), size, bit, touch->write);
    }
    if (places != 0 && value->page.discarded == 0) {
        emu_places_moved(touch->region, first, end, places, bit, EMU_UVM_COHERENCE);
    }
    if (places != 0 && touch->policy->policy.read_mostly != 0 && !touch->write) {
        bit |= places;
        emu_places_duplicated(touch->region, first, end, bit);
    }
    return bit;
}

static void
touch_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct touch *touch = argument;
    uint64_t places = value->page.places, bit = touch->bit;
    bool host = (bit & EMU_DEVICE_BITS) == 0;

    if (host && (places & ~EMU_DEVICE_BITS) != 0) {
        bit = places & ~EMU_DEVICE_BITS;
        if (value->page.unmapped != 0 && !touch->seen) {
            emu_places_map(touch->region, value, first, end);
        }
    }
    if ((places & bit) == 0) {
        if (places != 0 && touch->policy->policy.read_mostly == 0
            && mapped_remotely(&touch->policy->policy, places, bit)) {
            access_remotely(value, first, end, touch);
        } else if (places == 0 && first_place(touch) != bit) {
            (void)fault_run(value, first, end, touch);
            emu_places_set(touch->region, value, first, end, first_place(touch));
            value->page.unmapped = 1;
            access_remotely(value, first, end, touch);
        } else {
            emu_places_set(touch->region, value, first, end, fault_run(value, first, end, touch));
            if (host && !touch->seen) {
                emu_places_map(touch->region, value, first, end);
            }
        }
    } else if (touch->write && touch->policy->policy.read_mostly != 0) {
        emu_places_set(touch->region, value, first, end, bit);
    }
    if (touch->write) {
        value->page.discarded = 0;
    }
}

static void
touch_with_policy(const union emu_value *policy, size_t first, size_t end, void *argument)
{
    struct touch *touch = argument;

    touch->policy = policy;
    (void)emu_runs_change(&touch->region->pages, first, end, touch_run, touch);
}

/* ---- touches that the page map shows ---- */

static void
clear_discard(union emu_value *value, size_t first, size_t end, void *argument)
{
    (void)first;
    (void)end;
    (void)argument;
    value->page.discarded = 0;
}

struct written {
    const struct emu_region *region;
    size_t first, end; /* the first run of discarded pages with other bytes */
};

static void
find_written(const union emu_value *value, size_t first, size_t end, void *argument)
{
    struct written *written = argument;

    if (value->page.discarded == 0 || written->first != written->end) {
        return;
    }
    while (first < end && emu_page_untouched(written->region, first)) {
        first++;
    }
    written->first = written->end = first;
    while (written->end < end && !emu_page_untouched(written->region, written->end)) {
        written->end++;
    }
}

/* Discarded pages that the host has written are not discarded any more. A write of the very same
 * bytes is not noticed. */
static void
end_written_discards(struct emu_region *region, size_t first, size_t end)
{
    while (first < end) {
        struct written written = {region, 0, 0};

        emu_runs_visit(&region->pages, first, end, find_written, &written);
        if (written.first == written.end) {
            return;
        }
        (void)emu_runs_change(&region->pages, written.first, written.end, clear_discard, NULL);
        first = written.end;
    }
}

static void
unmap_without_host(const union emu_value *value, size_t first, size_t end, void *argument)
{
    if ((value->page.places & ~EMU_DEVICE_BITS) == 0) {
        emu_places_unmap(argument, first, end);
    }
}

/* Takes a run of mapped pages as touched. */
static void
touch_seen(CUdeviceptr start, CUdeviceptr stop, void *argument)
{
    struct touch *touch = argument;
    struct emu_region *region = touch->region;
    size_t first, end;

    emu_page_span(region, start, (size_t)(stop - start), &first, &end);
    end_written_discards(region, first, end);
    emu_runs_visit(&region->policies, first, end, touch_with_policy, touch);
    if ((touch->bit & EMU_DEVICE_BITS) != 0) {
        emu_runs_visit(&region->pages, first, end, unmap_without_host, region);
    }
}

static void
populate(union emu_value *value, size_t first, size_t end, void *argument)
{
    if (value->page.places == 0) {
        emu_counted.cpu_faults += end - first;
        emu_places_set(argument, value, first, end, (uint64_t)1 << EMU_HOST_BIT);
    }
}

/* Where the page map says nothing, only first touches show: the kernel knows the pages that exist. */
static void
observe_existing(struct emu_region *region, size_t first, size_t end)
{
    unsigned char exists[512];
    size_t page = emu_config()->page, system = emu_map_page_size(), per = page / system;
    size_t most = per == 0 ? 0 : sizeof exists / per, count;

    for (; first < end && per != 0; first += count) {
        void *address = (void *)(uintptr_t)emu_page_address(region, first);

        count = end - first < most ? end - first : most;
        if (mincore(address, count * page, exists) != 0) {
            return;
        }
        for (size_t i = 0; i < count * per; i++) {
            size_t at = first + i / per;
            if ((exists[i] & 1) != 0) {
                (void)emu_runs_change(&region->pages, at, at + 1, populate, region);
            }
        }
    }
}

struct unseen {
    size_t first, end; /* around all pages whose touches would show */
};

static void
extend_unseen(const union emu_value *value, size_t first, size_t end, void *argument)
{
    struct unseen *unseen = argument;

    if ((value->page.places & ~EMU_DEVICE_BITS) == 0 || value->page.discarded != 0) {
        unseen->first = unseen->first == unseen->end ? first : unseen->first;
        unseen->end = end;
    }
}

static void
observe(struct touch *touch, size_t first, size_t end)
{
    struct emu_region *region = touch->region;
    struct unseen unseen = {0, 0};

    if (region->kind != EMU_MANAGED || emu_forked()) {
        return;
    }
    emu_runs_visit(&region->pages, first, end, extend_unseen, &unseen);
    if (unseen.first == unseen.end) {
        return;
    }
    if (region->blind
        || !emu_map_visit(emu_page_address(region, unseen.first),
                          emu_page_address(region, unseen.end), touch_seen, touch)) {
        observe_existing(region, unseen.first, unseen.end);
    }
}

void
emu_pages_observe(struct emu_region *region, size_t first, size_t end)
{
    struct touch touch = {.region = region, .seen = true, .bit = (uint64_t)1 << EMU_HOST_BIT};

    observe(&touch, first, end);
}

void
emu_regions_observe(int device)
{
    for (struct emu_region *r = emu_regions(); r != NULL; r = r->next) {
        struct touch touch = {.region = r, .seen = true, .bit = emu_holder_bit(device)};
        observe(&touch, 0, r->pages.pages);
    }
}

/* ---- touches by calls ---- */

void
emu_pages_touch(struct emu_region *region, CUdeviceptr ptr, size_t size, int device, bool write)
{
    struct touch touch = {.region = region, .write = write, .bit = emu_holder_bit(device)};
    size_t first, end;

    if (region->kind != EMU_MANAGED || size == 0) {
        return;
    }
    emu_page_span(region, ptr, size, &first, &end);
    emu_pages_observe(region, first, end);
    if (device >= 0) {
        emu_region_use(region);
    }
    emu_runs_visit(&region->policies, first, end, touch_with_policy, &touch);
}
