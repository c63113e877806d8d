/* traced_holders.c: brings together the events of the recording that runs, the births of memories
 * and the pages of ranges. */
#include "traced_holders.h"

#include <stdlib.h>

#include "holder_replay.h"
#include "recorder.h"

/* --- births ----------------------------------------------------------------------------- */

typedef struct {
    CUdeviceptr start, end;
    size_t index; /* in the batch */
} placed_range;

static int
compare_placed(const void *a, const void *b)
{
    const placed_range *left = a, *right = b;

    return (left->start > right->start) - (left->start < right->start);
}

/* Sorted, with the empty ones left out. */
static size_t
sort_ranges(const mm_batch *ranges, placed_range *out)
{
    size_t count = 0;

    for (size_t i = 0; i < ranges->count; i++) {
        mm_range range = ranges->transfers[i].range;
        if (range.size > 0) {
            out[count++] = (placed_range){range.start, mm_range_end(range), i};
        }
    }
    qsort(out, count, sizeof *out, compare_placed);
    return count;
}

static size_t
first_from(const placed_range *placed, size_t count, CUdeviceptr start)
{
    size_t low = 0;

    while (low < count) {
        size_t middle = low + (count - low) / 2;
        if (placed[middle].start >= start) {
            count = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The memory of a range has existed since the earliest birth of a life that covers all of it. */
static void
find_births(const placed_range *placed, size_t count, const mm_recorded_so_far *recorded,
            uint64_t *since)
{
    for (size_t i = 0; i < recorded->living_count; i++) {
        const mm_living *life = &recorded->living[i];
        CUdeviceptr end = life->start + life->size;
        for (size_t n = first_from(placed, count, life->start); n < count && placed[n].start < end;
             n++) {
            if (placed[n].end <= end && life->born < since[placed[n].index]) {
                since[placed[n].index] = life->born;
            }
        }
    }
}

/* --- all of it -------------------------------------------------------------------------- */

static int
init_holders(const mm_batch *ranges, const mm_recorded_so_far *recorded, mm_page_holders *out,
             mm_status *st)
{
    placed_range *placed = calloc(ranges->count + 1, sizeof *placed);
    uint64_t *since = calloc(ranges->count + 1, sizeof *since);
    int rc = -1;

    if (placed == NULL || since == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", ranges->count);
    } else {
        for (size_t i = 0; i < ranges->count; i++) {
            since[i] = MM_NO_BIRTH;
        }
        find_births(placed, sort_ranges(ranges, placed), recorded, since);
        rc = mm_page_holders_init(out, ranges, since, st);
    }
    free(placed);
    free(since);
    return rc;
}

static int
read_holders(mm_recording *recording, const mm_batch *ranges, bool *running, mm_page_holders *out,
             mm_status *st)
{
    mm_recorded_so_far recorded;
    int rc = mm_recording_read_so_far(recording, &recorded, st);

    *running = recorded.events != NULL;
    if (rc == 0 && *running) {
        rc = init_holders(ranges, &recorded, out, st);
    }
    if (rc == 0 && *running) {
        rc = mm_replay_holders(out, recorded.events, recorded.event_count, st);
    }
    free(recorded.living);
    return rc;
}

mm_trace_use
mm_traced_holders_read(const mm_batch *ranges, mm_page_holders *out, mm_status *reason)
{
    mm_recording *recording = mm_recording_acquire();
    bool running = false;
    int rc;

    *out = (mm_page_holders){.span = NULL};
    if (recording == NULL) {
        return MM_NO_TRACE;
    }
    rc = read_holders(recording, ranges, &running, out, reason);
    mm_recording_release(recording);
    if (rc < 0) {
        mm_page_holders_free(out);
        return MM_TRACE_UNUSABLE;
    }
    return running ? MM_TRACE_READ : MM_NO_TRACE;
}
