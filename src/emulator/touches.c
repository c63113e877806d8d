/* Touches: accesses by processors, which fault and move or copy pages, and the room that this
 * takes.
 *
 * Emulated devices and emu_touch touch by calls. The host touches by its own loads and stores:
 * pages that it does not hold are not mapped, so a page that the kernel's page map shows as mapped
 * has been touched. Reads and writes look alike. */
#include "emulator.h"

#include <sys/mman.h>

struct touch {
    struct emu_region *region;
    uint64_t bit; /* of the toucher */
    bool write;
    bool seen; /* the page map shows the touch, so the pages are mapped already */
    bool full; /* the toucher has no room for the pages */
    const union emu_value *policy;
};

uint64_t emu_bytes_in_place;
static bool take_room(struct emu_region *region, size_t page, uint64_t device, bool seen);

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

/* Counts and records that a device accesses a run in place. */
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

/* The place where pages without any copy are populated: the toucher's, or the host if a device has
 * no room. As in the kernel module, it is also the host if the pages prefer it and the device can
 * access them there. The host does not map them. */
static uint64_t
first_place(const struct touch *touch)
{
    const struct emu_policy *policy = &touch->policy->policy;
    uint64_t preferred = emu_preferred_bit(policy);
    bool elsewhere = !emu_config()->confidential && (touch->bit & EMU_DEVICE_BITS) != 0
                     && policy->read_mostly == 0 && (preferred & ~EMU_DEVICE_BITS) != 0;

    if (touch->full) {
        return (uint64_t)1 << EMU_HOST_BIT;
    }
    return elsewhere ? preferred : touch->bit;
}

enum outcome {
    STAYS, /* the toucher has the page */
    REMOTE, /* the toucher accesses the page in place */
    ELSEWHERE, /* the page is populated at another place, and accessed there */
    COMES, /* the page comes to the toucher */
};

static enum outcome
outcome_of(const union emu_value *value, const struct touch *touch)
{
    const struct emu_policy *policy = &touch->policy->policy;
    uint64_t places = value->page.places, host = places & ~EMU_DEVICE_BITS;

    if ((places & touch->bit) != 0 || ((touch->bit & EMU_DEVICE_BITS) == 0 && host != 0)) {
        return STAYS;
    }
    if (places == 0) {
        return first_place(touch) == touch->bit ? COMES : ELSEWHERE;
    }
    if (touch->full || (policy->read_mostly == 0 && mapped_remotely(policy, places, touch->bit))) {
        return REMOTE;
    }
    return COMES;
}

/* Counts and records the faults on a run, and the moves and copies by them. Returns the places of
 * the run after that. */
static uint64_t
fault_run(const union emu_value *value, size_t first, size_t end, const struct touch *touch)
{
    uint64_t places = value->page.places, bit = touch->bit;
    size_t size = (end - first) * emu_config()->page;

    if ((bit & EMU_DEVICE_BITS) == 0) {
        emu_counted.cpu_faults += end - first;
        emu_uvm_host_faulted(emu_page_address(touch->region, first), size, touch->write);
    } else {
        emu_counted.gpu_faults += emu_device_faults(emu_page_address(touch->region, first), size);
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

/* A write ends the discard of a page, and leaves only the copy that is written. */
static void
write_run(union emu_value *value, size_t first, size_t end, const struct touch *touch,
          uint64_t place)
{
    if (touch->policy->policy.read_mostly != 0 && (value->page.places & place) != 0) {
        emu_places_set(touch->region, value, first, end, place);
    }
    if (value->page.discarded != 0) {
        emu_frames_mark(touch->region, first, end, value->page.places, EMU_FRAME_USED);
    }
    value->page.discarded = 0;
}

static void
touch_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    struct touch *touch = argument;
    uint64_t place = touch->bit;
    bool host = (place & EMU_DEVICE_BITS) == 0;

    switch (outcome_of(value, touch)) {
    case STAYS:
        place = host ? value->page.places & ~EMU_DEVICE_BITS : place;
        if (host && value->page.unmapped != 0 && !touch->seen) {
            emu_places_map(touch->region, value, first, end);
        }
        break;
    case REMOTE:
        access_remotely(value, first, end, touch);
        break;
    case ELSEWHERE:
        (void)fault_run(value, first, end, touch);
        emu_places_set(touch->region, value, first, end, first_place(touch));
        value->page.unmapped = 1;
        access_remotely(value, first, end, touch);
        break;
    case COMES:
        emu_places_set(touch->region, value, first, end, fault_run(value, first, end, touch));
        if (host && !touch->seen) {
            emu_places_map(touch->region, value, first, end);
        }
        break;
    }
    if (touch->write) {
        write_run(value, first, end, touch, place);
    }
}

static void
touch_runs(struct touch *touch, size_t first, size_t end)
{
    EMU_EACH_RUN(part, &touch->region->policies, first, end) {
        touch->policy = part.value;
        (void)emu_runs_change(&touch->region->pages, part.first, part.end, touch_run, touch);
    }
}

/* True if any page would come to the toucher if it has room. */
static bool
needs_room(struct touch touch, size_t first, size_t end)
{
    touch.full = false;
    EMU_EACH_RUN(part, &touch.region->policies, first, end) {
        touch.policy = part.value;
        EMU_EACH_RUN(run, &touch.region->pages, part.first, part.end) {
            if (outcome_of(run.value, &touch) == COMES) {
                return true;
            }
        }
    }
    return false;
}

/* Pages come to a device block by block, because a block may evict another of the same memory. */
static void
touch_pages(struct touch *touch, size_t first, size_t end)
{
    if ((touch->bit & EMU_DEVICE_BITS) == 0) {
        touch_runs(touch, first, end);
        return;
    }
    for (size_t at = first, next; at < end; at = next) {
        next = emu_block_end(at, end);
        touch->full =
            needs_room(*touch, at, next) && !take_room(touch->region, at, touch->bit, touch->seen);
        touch_runs(touch, at, next);
    }
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

/* Discarded pages that the host has written are not discarded any more. A write of the very same
 * bytes is not noticed. */
static void
end_written_discards(struct emu_region *region, size_t first, size_t end)
{
    EMU_EACH_RUN(run, &region->pages, first, end) {
        size_t from = run.first;

        if (run.value->page.discarded == 0) {
            continue;
        }
        while (from < run.end && emu_page_untouched(region, from)) {
            from++;
        }
        for (size_t to = from; to < run.end; to++) {
            run.end = emu_page_untouched(region, to) ? to : run.end;
        }
        (void)emu_runs_change(&region->pages, from, run.end, clear_discard, NULL);
    }
}

/* Treats a run of mapped pages as touched. */
static void
touch_seen(CUdeviceptr start, CUdeviceptr stop, void *argument)
{
    struct touch *touch = argument;
    struct emu_region *region = touch->region;
    size_t first, end;

    emu_page_span(region, start, (size_t)(stop - start), &first, &end);
    end_written_discards(region, first, end);
    touch_pages(touch, first, end);
    if ((touch->bit & EMU_DEVICE_BITS) == 0) {
        return;
    }
    EMU_EACH_RUN(run, &region->pages, first, end) {
        if ((run.value->page.places & ~EMU_DEVICE_BITS) == 0) {
            emu_places_unmap(region, run.first, run.end);
        }
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

/* Without a page map, only first touches can be noticed: mincore() shows which pages exist. */
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

/* Reads the page map of the part with all pages whose touches would show: those that the host does
 * not hold, and discarded ones. */
static void
observe(struct touch *touch, size_t first, size_t end)
{
    struct emu_region *region = touch->region;
    size_t from = end, to = end;

    if (region->kind != EMU_MANAGED || emu_forked()) {
        return;
    }
    EMU_EACH_RUN(run, &region->pages, first, end) {
        if ((run.value->page.places & ~EMU_DEVICE_BITS) == 0 || run.value->page.discarded != 0) {
            from = run.first < from ? run.first : from;
            to = run.end;
        }
    }
    if (from == end) {
        return;
    }
    if (region->blind
        || !emu_map_visit(emu_page_address(region, from), emu_page_address(region, to), touch_seen,
                          touch)) {
        observe_existing(region, from, to);
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

/* ---- room on devices ---- */

struct eviction {
    struct emu_region *region;
    uint64_t bit; /* of the device */
    CUdeviceptr incoming; /* the memory that needs the room */
};

/* As the kernel module does: the host gets the pages, and other devices lose their copies. */
static void
evict_run(union emu_value *value, size_t first, size_t end, void *argument)
{
    const struct eviction *eviction = argument;
    uint64_t host = value->page.places & ~EMU_DEVICE_BITS;

    if ((value->page.places & eviction->bit) == 0) {
        return;
    }
    if (host == 0) {
        host = (uint64_t)1 << EMU_HOST_BIT;
        if (emu_uvm_wanted(EMU_UVM_EVICTION)) {
            emu_uvm_evicted(emu_page_address(eviction->region, first),
                            (end - first) * emu_config()->page, eviction->bit, host,
                            eviction->incoming);
        }
        if (value->page.discarded == 0) {
            emu_places_moved(eviction->region, first, end, eviction->bit, host, EMU_UVM_EVICTED);
        }
        value->page.unmapped = 1;
    }
    emu_places_set(eviction->region, value, first, end, host);
}

/* Evicts the next frame. First notices the touches of its block that the page map shows, as touches
 * by the place `seer`: they can make another frame the next one, and then nothing is evicted yet.
 * False: out of memory. */
static bool
evict_next(struct emu_device *device, CUdeviceptr incoming, uint64_t seer)
{
    struct emu_frame *frame = emu_frame_to_evict(device);
    struct eviction eviction = {frame->region, (uint64_t)1 << device->ordinal, incoming};
    struct touch touch = {.region = frame->region, .seen = true, .bit = seer};
    size_t end = emu_block_end(frame->first, frame->region->pages.pages);

    observe(&touch, frame->first, end);
    if (frame != emu_frame_to_evict(device)) {
        return true;
    }
    (void)emu_runs_change(&frame->region->pages, frame->first, end, evict_run, &eviction);
    if (frame->pages > 0) {
        return false;
    }
    emu_frame_give_back(frame, device->ordinal);
    return true;
}

static bool
make_room(struct emu_device *device, size_t bytes, CUdeviceptr incoming, uint64_t seer)
{
    size_t capacity = emu_config()->capacity;

    if (device->allocated > capacity || bytes > capacity - device->allocated) {
        return false;
    }
    while (emu_device_taken(device) > capacity - bytes) {
        if (!evict_next(device, incoming, seer)) {
            return false;
        }
    }
    return true;
}

bool
emu_room_make(struct emu_device *device, size_t bytes, CUdeviceptr incoming)
{
    return make_room(device, bytes, incoming, (uint64_t)1 << EMU_HOST_BIT);
}

/* With `seen`, mapped pages were touched by the device. */
static bool
take_room(struct emu_region *region, size_t page, uint64_t device, bool seen)
{
    int ordinal = __builtin_ctzll(device);

    if (!emu_frame_taken(region, page, ordinal)) {
        if (!make_room(emu_device(ordinal), EMU_BLOCK, emu_page_address(region, page),
                       seen ? device : (uint64_t)1 << EMU_HOST_BIT)) {
            return false;
        }
        emu_frame_take(region, page, ordinal);
    }
    return true;
}

bool
emu_room_take(struct emu_region *region, size_t page, int device)
{
    return take_room(region, page, (uint64_t)1 << device, false);
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
    touch_pages(&touch, first, end);
}
