/* Frames: the blocks of 2 MiB that managed memory takes of a device.
 *
 * As in the kernel module (uvm_pmm_gpu.c, uvm_va_block.c), the first page of a block that comes to
 * a device takes a frame for the block. The frame stays when the pages leave, until the memory is
 * freed or something else needs memory. Frames without pages are evicted first, then frames of
 * discarded blocks, then the frames whose block came to the device longest ago. */
#include "emulator.h"

#include <assert.h>

static size_t
pages_of_block(void)
{
    return EMU_BLOCK / emu_config()->page;
}

size_t
emu_block_end(size_t page, size_t end)
{
    size_t next = (page / pages_of_block() + 1) * pages_of_block();

    return next < end ? next : end;
}

static struct emu_frame *
frame_at(const struct emu_region *region, size_t page, int device)
{
    size_t blocks = region->size / EMU_BLOCK;

    return &region->frames[(size_t)device * blocks + page / pages_of_block()];
}

static void
leave_list(struct emu_device *device, struct emu_frame *frame)
{
    struct emu_frame_list *list = &device->frames[frame->use];

    *(frame->previous != NULL ? &frame->previous->next : &list->first) = frame->next;
    *(frame->next != NULL ? &frame->next->previous : &list->last) = frame->previous;
    list->count--;
    frame->use = EMU_FRAME_NONE;
}

static void
enter_list(struct emu_device *device, struct emu_frame *frame, enum emu_frame_use use)
{
    struct emu_frame_list *list = &device->frames[use];

    frame->use = use;
    frame->previous = list->last;
    frame->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = frame;
    list->last = frame;
    list->count++;
}

bool
emu_frame_taken(const struct emu_region *region, size_t page, int device)
{
    return frame_at(region, page, device)->use != EMU_FRAME_NONE;
}

void
emu_frame_take(struct emu_region *region, size_t page, int device)
{
    struct emu_frame *frame = frame_at(region, page, device);

    if (frame->use == EMU_FRAME_NONE) {
        frame->region = region;
        frame->first = page / pages_of_block() * pages_of_block();
        frame->pages = 0;
        region->framed++;
        enter_list(emu_device(device), frame, EMU_FRAME_UNUSED);
        emu_device_note_peak(emu_device(device));
    }
}

void
emu_frame_give_back(struct emu_frame *frame, int device)
{
    leave_list(emu_device(device), frame);
    frame->region->framed--;
}

struct emu_frame *
emu_frame_to_evict(const struct emu_device *device)
{
    for (int use = EMU_FRAME_UNUSED; use < EMU_FRAME_USES; use++) {
        if (device->frames[use].first != NULL) {
            return device->frames[use].first;
        }
    }
    return NULL;
}

static void
mark(struct emu_frame *frame, int device, enum emu_frame_use use)
{
    if (frame->use != EMU_FRAME_NONE) {
        leave_list(emu_device(device), frame);
        enter_list(emu_device(device), frame, use);
    }
}

void
emu_frames_mark(const struct emu_region *region, size_t first, size_t end, uint64_t places,
                enum emu_frame_use use)
{
    for (int i = 0; i < emu_config()->devices; i++) {
        for (size_t at = first; (places >> i & 1) != 0 && at < end; at = emu_block_end(at, end)) {
            mark(frame_at(region, at, i), i, use);
        }
    }
}

static void
count_on_device(const struct emu_region *region, size_t first, size_t end, int device,
                bool arrives)
{
    for (size_t at = first, next; at < end; at = next) {
        struct emu_frame *frame = frame_at(region, at, device);

        assert(frame->use != EMU_FRAME_NONE);
        next = emu_block_end(at, end);
        frame->pages = arrives ? frame->pages + (next - at) : frame->pages - (next - at);
        if (arrives || frame->pages == 0) {
            mark(frame, device, arrives ? EMU_FRAME_USED : EMU_FRAME_UNUSED);
        }
    }
}

void
emu_frames_count(const struct emu_region *region, size_t first, size_t end, uint64_t places,
                 bool arrives)
{
    for (int i = 0; i < emu_config()->devices; i++) {
        if ((places >> i & 1) != 0) {
            count_on_device(region, first, end, i, arrives);
        }
    }
}

void
emu_frames_release(struct emu_region *region)
{
    for (int i = 0; i < emu_config()->devices && region->framed > 0; i++) {
        for (size_t page = 0; page < region->pages.pages; page += pages_of_block()) {
            if (emu_frame_taken(region, page, i)) {
                emu_frame_give_back(frame_at(region, page, i), i);
            }
        }
    }
}
