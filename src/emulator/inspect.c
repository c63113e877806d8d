/* The controls by which tests look into the emulated machine, arm faults and drive streams. */
#include "control.h"
#include "entries.h"

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

/* Includes reserved ranges and memory that is not mapped. */
static size_t
count_allocations(void)
{
    return emu_allocation_count() + emu_virtual_count();
}

LIVE(emu_live_allocations, count_allocations)
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

/* Names the place of pages with copies in `places`. */
static void
describe_places(uint64_t places, int *type, int *id)
{
    int bit = places == 0 ? 0 : __builtin_ctzll(places);

    *id = 0;
    if (places == 0) {
        *type = -1;
    } else if ((places & (places - 1)) != 0) {
        *type = 0;
    } else {
        *type = bit < EMU_HOST_BIT ? 1 : 2;
        *id = bit < EMU_HOST_BIT ? bit : bit - EMU_HOST_BIT;
    }
}

int
emu_residency(CUdeviceptr ptr, size_t size, int *type, int *id)
{
    const struct emu_allocation *allocation;
    size_t first, end;

    emu_lock();
    allocation = emu_find_managed(ptr, size);
    if (allocation != NULL) {
        const struct emu_runs *pages = &allocation->region->pages;

        emu_page_span(allocation->region, ptr, size, &first, &end);
        emu_pages_observe(allocation->region, first, end);
        describe_places(emu_runs_at(pages, first)->page.places, type, id);
        EMU_EACH_RUN(run, pages, first, end) {
            if (run.value->page.places != emu_runs_at(pages, first)->page.places) {
                *type = *id = 0;
            }
        }
    }
    emu_unlock();
    return allocation != NULL ? 0 : -1;
}

int
emu_touch(CUdeviceptr ptr, size_t size, int device, int write)
{
    const struct emu_allocation *allocation;
    int status = -1;

    emu_lock();
    allocation = emu_find_managed(ptr, size);
    if (allocation != NULL && (device < 0 || emu_device(device) != NULL)) {
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
