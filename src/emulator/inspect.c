/* The controls by which tests look into the emulated machine, arm faults and drive streams. */
#include "control.h"

#include <string.h>

static bool
can_fail(const char *function)
{
    const char *name;

    if (strcmp(function, "*") == 0) {
        return true;
    }
    for (size_t i = 0; (name = emu_fail_name(i)) != NULL; i++) {
        if (strcmp(name, function) == 0) {
            return true;
        }
    }
    return false;
}

int
emu_fail(const char *function, unsigned int nth, int code, int flags)
{
    bool armed;

    if (!can_fail(function)) {
        return -2;
    }
    emu_lock();
    armed = emu_fault_arm(function, nth, (CUresult)code, flags);
    emu_unlock();
    return armed ? 0 : -1;
}

/* A count of living objects, which the emulated machine's mutex guards. */
#define LIVE(function, counted) \
    size_t function(void)       \
    {                           \
        size_t count;           \
                                \
        emu_lock();             \
        count = counted();      \
        emu_unlock();           \
        return count;           \
    }

LIVE(emu_live_allocations, emu_allocation_count)
LIVE(emu_live_bytes, emu_allocation_bytes)
LIVE(emu_live_streams, emu_stream_count)
LIVE(emu_live_events, emu_event_count)
LIVE(emu_live_pools, emu_pool_count)
LIVE(emu_live_contexts, emu_context_count)

size_t
emu_context_depth(void)
{
    return (size_t)emu_thread()->depth;
}

static size_t
frame_bytes(const struct emu_device *device, enum emu_frame_use use)
{
    return device->frames[use].count * EMU_BLOCK;
}

int
emu_frames(int device, struct emu_frames *out)
{
    const struct emu_device *d;

    emu_lock();
    emu_regions_observe(-1);
    d = emu_device(device);
    if (d != NULL) {
        out->kept = frame_bytes(d, EMU_FRAME_UNUSED);
        out->used = frame_bytes(d, EMU_FRAME_DISCARDED) + frame_bytes(d, EMU_FRAME_USED);
        out->plain = d->allocated;
        out->peak = d->peak;
    }
    emu_unlock();
    return d == NULL ? -1 : 0;
}

struct places_summary {
    bool any, mixed;
    uint64_t places;
};

static void
merge_places(const union emu_value *value, size_t first, size_t end, void *argument)
{
    struct places_summary *s = argument;

    (void)first;
    (void)end;
    s->mixed = s->mixed || (s->any && s->places != value->page.places);
    s->places = value->page.places;
    s->any = true;
}

static void
describe_places(const struct places_summary *s, int *type, int *id)
{
    int bit = 0;

    *id = 0;
    if (s->mixed || (s->places & (s->places - 1)) != 0) {
        *type = 0;
        return;
    }
    if (s->places == 0) {
        *type = -1;
        return;
    }
    while ((s->places >> bit & 1) == 0) {
        bit++;
    }
    *type = bit < EMU_HOST_BIT ? 1 : 2;
    *id = bit < EMU_HOST_BIT ? bit : bit - EMU_HOST_BIT;
}

int
emu_residency(CUdeviceptr ptr, size_t size, int *type, int *id)
{
    struct emu_allocation *allocation;
    struct places_summary s = {0};
    size_t first, end;
    int status = -1;

    emu_lock();
    allocation = emu_find_range(ptr, size);
    if (allocation != NULL && allocation->kind == EMU_MANAGED) {
        emu_page_span(allocation->region, ptr, size, &first, &end);
        emu_pages_observe(allocation->region, first, end);
        emu_runs_visit(&allocation->region->pages, first, end, merge_places, &s);
        describe_places(&s, type, id);
        status = 0;
    }
    emu_unlock();
    return status;
}

int
emu_touch(CUdeviceptr ptr, size_t size, int device, int write)
{
    struct emu_allocation *allocation;
    int status = -1;

    emu_lock();
    allocation = emu_find_range(ptr, size);
    if (allocation != NULL && allocation->kind == EMU_MANAGED
        && (device < 0 || emu_device(device) != NULL)) {
        emu_pages_touch(allocation->region, ptr, size, device, write != 0);
        status = 0;
    }
    emu_unlock();
    return status;
}

void
emu_counters(struct emu_counters *out)
{
    emu_lock();
    emu_regions_observe(-1);
    *out = emu_counted;
    emu_unlock();
}

void
emu_counters_clear(void)
{
    emu_lock();
    emu_regions_observe(-1);
    memset(&emu_counted, 0, sizeof emu_counted);
    for (int i = 0; i < emu_config()->devices; i++) {
        emu_device(i)->peak = emu_device_taken(emu_device(i));
    }
    emu_unlock();
}

uint64_t
emu_used_in_place(void)
{
    uint64_t bytes;

    emu_lock();
    emu_regions_observe(-1);
    bytes = emu_bytes_in_place;
    emu_unlock();
    return bytes;
}

void
emu_schedule(int lazy)
{
    emu_lock();
    emu_streams_schedule(lazy != 0);
    emu_unlock();
}

int
emu_launch(CUstream handle, void (*fn)(void *argument), void *argument)
{
    const struct emu_op op = {.kind = EMU_OP_KERNEL, .function = fn, .argument = argument};
    struct emu_stream *stream = NULL;
    CUresult result;

    emu_lock();
    result = fn == NULL ? CUDA_ERROR_INVALID_VALUE : emu_stream_find(handle, &stream);
    if (result == CUDA_SUCCESS) {
        result = stream->capture != NULL ? emu_capture_add(stream, &op)
                                         : emu_stream_submit(stream, &op);
    }
    emu_unlock();
    return (int)result;
}

int
emu_numa_nodes(void)
{
    return emu_config()->numa_nodes;
}
