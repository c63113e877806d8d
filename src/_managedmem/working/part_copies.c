/* part_copies.c: the copies between the homes of parts and their frames, or the prefetches of
 * managed parts, at once or ahead of a use. */
#include "part_frames_state.h"

#include "../memory/prefetch.h"

#include <assert.h>

enum { LEAST_AHEAD = 3, ENOUGH_AHEAD = 32 << 20 };

void
mm_frames_note_failure(mm_frames *f, const mm_status *failure)
{
    mm_frames_lock(f);
    f->report.failures++;
    f->report.error = *failure;
    mm_frames_unlock(f);
}

/* --- copies, under the lock and in a scope ------------------------------------------------ */

void
mm_frames_recover(mm_frames *f, const mm_status *failure)
{
    f->report.failures++;
    f->report.error = *failure;
    f->troubles++;
}

/* Makes a stream of the set wait for the uses of a part. */
static int
follow_uses(mm_frames *f, CUstream stream, const frame_part *part, mm_status *st)
{
    for (const mm_release_list *r = part->releases; r != NULL; r = r->next) {
        if (!mm_context_has_ended(f->cu, &r->context)) {
            MM_TRY(f->cu, StreamWaitEvent, st, stream, r->event, CU_EVENT_WAIT_DEFAULT);
        }
    }
    return 0;
}

/* Prefetches managed memory. A large prefetch is deferred behind a host function (prefetch.h). */
static int
prefetch(mm_frames *f, mm_range range, CUmemLocation location, CUstream stream, mm_status *st)
{
    if (mm_is_deferred(range.size, location, MM_DEFER_AUTO)
        && mm_queue_host_function(f->cu, stream, st) < 0) {
        return -1;
    }
    return mm_range_issue(f->cu, MM_PREFETCH, range, location, stream, st);
}

/* Prefetches a part home. Discards the whole pages of scratch that was used, if the driver can;
 * never contents that were written at home for the next use. */
static int
send_away(mm_frames *f, const frame_part *part, mm_range range, mm_status *st)
{
    mm_range inside = range;
    mm_status ignored;

    if (part->access == MM_PART_SCRATCH && part->was_used
        && f->cu->MemDiscardAndPrefetchBatchAsync != NULL
        && mm_range_whole_pages(&inside, &ignored) == 0
        && mm_range_issue(f->cu, MM_DISCARD_PREFETCH, inside, f->host, f->outward, st) < 0) {
        return -1;
    }
    return prefetch(f, range, f->host, f->outward, st);
}

/* Prefetches managed memory to the device or home, unless it was closed. */
static int
move_memory(mm_frames *f, const frame_part *part, size_t bytes, bool inward, mm_status *st)
{
    const mm_range range = {.start = part->home, .size = bytes};
    const CUmemLocation device = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, f->device);
    int rc;

    if (part->memory != NULL && !mm_guard_enter(part->memory)) {
        return 0;
    }
    rc = inward ? prefetch(f, range, device, f->inward, st) : send_away(f, part, range, st);
    if (part->memory != NULL) {
        mm_guard_leave(part->memory);
    }
    return rc;
}

/* Makes the inward stream wait until the room of an evicted part is free. */
static int
make_room(mm_frames *f, uint32_t number, mm_status *st)
{
    frame_part *part = &f->parts[number];

    if (!f->is_managed) {
        if (follow_uses(f, f->inward, part, st) < 0) {
            return -1;
        }
    } else {
        const size_t bytes = f->places[number].bytes;
        if (follow_uses(f, f->outward, part, st) < 0
            || move_memory(f, part, bytes, false, st) < 0) {
            return -1;
        }
        MM_TRY(f->cu, EventRecord, st, part->sent, f->outward);
        part->is_sent = true;
        f->report.bytes_home += bytes;
    }
    if (part->is_sent) {
        MM_TRY(f->cu, StreamWaitEvent, st, f->inward, part->sent, CU_EVENT_WAIT_DEFAULT);
    }
    return 0;
}

/* Takes out the first part that lies in these bytes; MM_UNEXPECTED if there is none. */
static uint32_t
take_part(mm_frames *f, size_t offset, size_t bytes)
{
    uint32_t taken = mm_placement_take(&f->placement, f->places, offset, bytes);

    if (taken != MM_UNEXPECTED) {
        f->report.drops++;
        f->report.present -= f->places[taken].bytes;
    }
    return taken;
}

int
mm_frames_clear(mm_frames *f, size_t offset, size_t bytes, mm_status *st)
{
    uint32_t taken;
    int rc = 0;

    while ((taken = take_part(f, offset, bytes)) != MM_UNEXPECTED) {
        rc = rc == 0 ? make_room(f, taken, st) : rc;
        mm_release_keep(f->parts[taken].releases, &f->pool);
        f->parts[taken].releases = NULL;
    }
    return rc;
}

static int
bring_part(mm_frames *f, const frame_part *part, size_t offset, size_t bytes, mm_status *st)
{
    if (f->is_managed) {
        return move_memory(f, part, bytes, true, st);
    }
    if (part->access != MM_PART_SCRATCH) {
        MM_TRY(f->cu, MemcpyAsync, st, f->slab->start + offset, part->home, bytes, f->inward);
    }
    return 0;
}

static int
copy_inward(mm_frames *f, uint32_t number, size_t offset, mm_status *st)
{
    frame_part *part = &f->parts[number];
    size_t bytes = f->places[number].bytes;

    if (part->is_sent) {
        MM_TRY(f->cu, StreamWaitEvent, st, f->inward, part->sent, CU_EVENT_WAIT_DEFAULT);
    }
    if (bring_part(f, part, offset, bytes, st) < 0) {
        return -1;
    }
    MM_TRY(f->cu, EventRecord, st, part->filled, f->inward);
    part->was_loaded = true;
    f->report.loads++;
    f->report.bytes_loaded += f->is_managed || part->access != MM_PART_SCRATCH ? bytes : 0;
    return 0;
}

bool
mm_frames_load(mm_frames *f, uint32_t number, uint32_t least)
{
    size_t bytes = f->places[number].bytes, offset = 0;
    mm_scope scope;
    mm_status st;
    int rc;

    if (f->is_suspended || f->troubles != f->waited
        || !mm_placement_find(&f->placement, f->places, bytes, least, &offset)
        || mm_scope_enter_relaxed(&scope, f->cu, f->device, &st) < 0) {
        return false;
    }
    rc = mm_frames_clear(f, offset, bytes, &st);
    if (rc == 0) {
        rc = copy_inward(f, number, offset, &st);
    }
    if (rc == 0) {
        mm_placement_put(&f->placement, f->places, number, offset);
        f->report.present += bytes;
    } else {
        mm_frames_recover(f, &st);
    }
    mm_scope_leave(&scope);
    return rc == 0;
}

int
mm_frames_send_home(mm_frames *f, uint32_t number, mm_status *st)
{
    frame_part *part = &f->parts[number];
    size_t bytes = f->places[number].bytes;

    if (follow_uses(f, f->outward, part, st) < 0) {
        return -1;
    }
    MM_TRY(f->cu, MemcpyAsync, st, part->home, f->slab->start + f->places[number].offset, bytes,
           f->outward);
    MM_TRY(f->cu, EventRecord, st, part->sent, f->outward);
    part->is_sent = true;
    f->report.bytes_home += bytes;
    return 0;
}

int
mm_frames_drop(mm_frames *f, uint32_t number, mm_status *st)
{
    if (!f->places[number].present || f->parts[number].held > 0) {
        return 0;
    }
    return mm_frames_clear(f, f->places[number].offset, f->places[number].bytes, st);
}

int
mm_frames_forget(mm_frames *f, uint32_t number, mm_status *st)
{
    frame_part *part = &f->parts[number];

    if (!f->is_managed) {
        return mm_frames_drop(f, number, st);
    }
    if (f->places[number].present) {
        (void)take_part(f, f->places[number].offset, f->places[number].bytes);
    }
    mm_release_keep(part->releases, &f->pool);
    part->releases = NULL;
    return 0;
}

/* --- what comes next, under the lock -------------------------------------------------------- */

/* There are enough steps to reach every part of a loop that goes forward and then back. The order
 * predicts little for a part that is used irregularly. Such a part has a distance only if it may
 * be loaded ahead, because it must then stay until its use. */
void
mm_frames_measure_distances(mm_frames *f)
{
    mm_order_walk walk = mm_use_order_walk(&f->order);
    uint64_t steps = 2 * (uint64_t)f->count + MM_MOST_TRUST;
    const uint32_t trust = (uint32_t)mm_use_order_trust(&f->order);
    uint32_t missing = f->order.live;
    bool ignored;

    for (uint32_t i = 0; i < f->count; i++) {
        f->places[i].distance = MM_UNEXPECTED;
    }
    for (uint32_t step = 0; step < steps && missing > 0; step++) {
        uint32_t next = mm_order_walk_next(&f->order, &walk, &ignored);
        if (next == MM_NO_PART) {
            return;
        }
        if (f->places[next].distance == MM_UNEXPECTED
            && (step < trust || mm_use_rate_is_regular(&f->parts[next].rate))) {
            f->places[next].distance = step;
            missing--;
        }
    }
}

/* True if a round has ended with the uses that the walk has come to. */
static bool
has_ended_here(const mm_frames *f, const mm_order_walk *walk)
{
    for (unsigned i = 0; i < f->end_count && i < ROUND_ENDS; i++) {
        const round_end *end = &f->ends[i];
        if (end->first == walk->first && end->second == walk->second
            && end->times == walk->times) {
            return true;
        }
    }
    return false;
}

/* Copies that were loaded for the next round would be dropped when it begins. */
void
mm_frames_note_round_end(mm_frames *f)
{
    mm_order_walk walk = mm_use_order_walk(&f->order);

    if (!has_ended_here(f, &walk)) {
        f->ends[f->end_count++ % ROUND_ENDS] = (round_end){walk.first, walk.second, walk.times};
    }
}

/* True if the parts passed so far keep the link busy long enough. Loading more takes the room of
 * parts that would stay for the next round. */
static bool
is_far_ahead(const mm_frames *f, int steps, size_t bytes)
{
    return steps >= LEAST_AHEAD && (bytes >= ENOUGH_AHEAD || bytes >= f->placement.room / 4);
}

void
mm_frames_look_ahead(mm_frames *f)
{
    mm_order_walk walk = mm_use_order_walk(&f->order);
    int trust = mm_use_order_trust(&f->order);
    bool measured = false; /* which takes long for many parts */
    size_t bytes = 0;

    if (f->rounds == 0) {
        return;
    }
    for (int step = 0; step < trust && !is_far_ahead(f, step, bytes); step++) {
        bool ignored;
        uint32_t next;
        if (has_ended_here(f, &walk)) {
            return;
        }
        next = mm_order_walk_next(&f->order, &walk, &ignored);
        if (next == MM_NO_PART || walk.is_doubtful) {
            return;
        }
        bytes += f->places[next].bytes;
        if (f->places[next].present) {
            continue;
        }
        if (!measured) {
            mm_frames_measure_distances(f);
            measured = true;
        }
        if (!mm_frames_load(f, next, (uint32_t)step + 1)) {
            return;
        }
        f->report.ahead++;
    }
}
