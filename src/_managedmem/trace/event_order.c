/* event_order.c: sorts events of which most are in order. */
#include "event_order.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

void
mm_event_order_free(mm_event_order *order)
{
    free(order->positions);
    order->positions = NULL;
}

static bool
is_before(const mm_event *events, uint32_t a, uint32_t b)
{
    return events[a].start < events[b].start || (events[a].start == events[b].start && a < b);
}

/* Merges sorted positions from `left` and `right` to `out`. */
static void
merge_positions(const mm_event *events, const uint32_t *left, size_t lefts, const uint32_t *right,
                size_t rights, uint32_t *out)
{
    while (lefts > 0 && rights > 0) {
        if (is_before(events, *left, *right)) {
            *out++ = *left++;
            lefts--;
        } else {
            *out++ = *right++;
            rights--;
        }
    }
    memcpy(out, left, lefts * sizeof *left);
    memcpy(out + lefts, right, rights * sizeof *right);
}

/* Sorts by insertion if that takes few steps; false if it would take more, which leaves the
 * positions in another order. */
static bool
insert_positions(const mm_event *events, uint32_t *positions, size_t count)
{
    size_t steps = 16 * count;

    for (size_t i = 1; i < count; i++) {
        uint32_t inserted = positions[i];
        size_t to = i;
        for (; to > 0 && steps > 0 && is_before(events, inserted, positions[to - 1]); to--) {
            positions[to] = positions[to - 1];
            steps--;
        }
        positions[to] = inserted;
    }
    return steps > 0;
}

/* Sorts positions; `other` is scratch space for as many. */
static void
sort_positions(const mm_event *events, uint32_t *positions, size_t count, uint32_t *other)
{
    if (insert_positions(events, positions, count)) {
        return;
    }
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t from = 0; from < count; from += 2 * width) {
            size_t lefts = count - from < width ? count - from : width;
            size_t rights = count - from - lefts < width ? count - from - lefts : width;
            merge_positions(events, positions + from, lefts, positions + from + lefts, rights,
                            other + from);
        }
        memcpy(positions, other, count * sizeof *positions);
    }
}

/* Puts the events that are in order at the front, and the late ones, which start before an event
 * ahead of them, at the end in reverse. Returns the number of events in order. */
static size_t
split_late(const mm_event *events, size_t count, uint32_t *positions)
{
    uint64_t latest = 0;
    size_t kept = 0, late = count;

    for (size_t i = 0; i < count; i++) {
        if (events[i].start >= latest) {
            latest = events[i].start;
            positions[kept++] = (uint32_t)i;
        } else {
            positions[--late] = (uint32_t)i;
        }
    }
    return kept;
}

static void
reverse_positions(uint32_t *positions, size_t count)
{
    for (size_t i = 0; i < count / 2; i++) {
        uint32_t first = positions[i];
        positions[i] = positions[count - 1 - i];
        positions[count - 1 - i] = first;
    }
}

static bool
events_are_sorted(const mm_event *events, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        if (events[i].start < events[i - 1].start) {
            return false;
        }
    }
    return true;
}

int
mm_event_order_make(mm_event_order *order, const mm_event *events, size_t count, mm_status *st)
{
    uint32_t *split = NULL, *merged = NULL;
    size_t kept;

    order->positions = NULL;
    if (events_are_sorted(events, count)) {
        return 0;
    }
    if (count < UINT32_MAX) {
        split = malloc(count * sizeof *split);
        merged = malloc(count * sizeof *merged);
    }
    if (split == NULL || merged == NULL) {
        free(split);
        free(merged);
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for the order of %zu events", count);
    }
    kept = split_late(events, count, split);
    reverse_positions(split + kept, count - kept);
    sort_positions(events, split + kept, count - kept, merged);
    merge_positions(events, split, kept, split + kept, count - kept, merged);
    free(split);
    order->positions = merged;
    return 0;
}
