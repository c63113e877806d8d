/* part_copies.c: the copies between the homes of parts and their frames, at once or ahead of a use. */
#include "part_frames_state.h"

#include <assert.h>

/* --- copies, under the lock and in a scope ------------------------------------------------ */

/* After a failure the device is waited for, so that all frames can be used again. */
void
mm_frames_recover(mm_frames *f, const mm_status *failure)
{
    f->report.failures++;
    f->report.error = *failure;
    f->broken = f->broken || f->cu->CtxSynchronize() != CUDA_SUCCESS;
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

/* Takes the parts out that lie there; the inward stream follows what still reads or writes them. */
static int
clear_frames(mm_frames *f, size_t offset, size_t bytes, mm_status *st)
{
    uint32_t left;
    int rc = 0;

    while ((left = mm_placement_take(&f->placement, f->places, offset, bytes)) != MM_UNEXPECTED) {
        frame_part *part = &f->parts[left];
        f->report.drops++;
        f->report.present -= f->places[left].bytes;
        if (rc == 0) {
            rc = follow_uses(f, f->inward, part, st);
        }
        if (rc == 0 && part->is_sent) {
            CUresult code = f->cu->StreamWaitEvent(f->inward, part->sent, CU_EVENT_WAIT_DEFAULT);
            rc = code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuStreamWaitEvent", (int)code);
        }
        mm_release_keep(part->releases, &f->pool);
        part->releases = NULL;
    }
    return rc;
}

static int
copy_inward(mm_frames *f, uint32_t number, size_t offset, mm_status *st)
{
    frame_part *part = &f->parts[number];
    size_t bytes = f->places[number].bytes;

    if (part->is_sent) {
        MM_TRY(f->cu, StreamWaitEvent, st, f->inward, part->sent, CU_EVENT_WAIT_DEFAULT);
    }
    MM_TRY(f->cu, MemcpyAsync, st, f->slab->start + offset, part->home, bytes, f->inward);
    MM_TRY(f->cu, EventRecord, st, part->filled, f->inward);
    f->report.loads++;
    f->report.bytes_loaded += bytes;
    return 0;
}

/* Loads a part, for which only parts with a distance of at least `least` go. False if that leaves no
 * room, or the driver refuses. */
bool
mm_frames_load(mm_frames *f, uint32_t number, uint32_t least)
{
    size_t bytes = f->places[number].bytes, offset = 0;
    mm_scope scope;
    mm_status st;
    int rc;

    if (f->broken || !mm_placement_find(&f->placement, f->places, bytes, least, &offset)
        || mm_scope_enter_relaxed(&scope, f->cu, f->device, &st) < 0) {
        return false;
    }
    rc = clear_frames(f, offset, bytes, &st);
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

/* Copies a part home, behind its uses. */
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

/* Takes a part out that is not in use; its frame still follows its uses. Under the lock, in a scope. */
int
mm_frames_drop(mm_frames *f, uint32_t number, mm_status *st)
{
    if (!f->places[number].present || f->parts[number].held > 0) {
        return 0;
    }
    return clear_frames(f, f->places[number].offset, f->places[number].bytes, st);
}

/* --- what comes next, under the lock -------------------------------------------------------- */

/* Stores the number of uses before the next one of each part. The steps reach every part of a loop that
 * goes forward and then back. */
void
mm_frames_measure_distances(mm_frames *f)
{
    mm_order_walk walk = mm_working_order_walk(&f->order);
    uint64_t steps = 2 * (uint64_t)f->count + MM_MOST_TRUST;
    uint32_t missing = f->count;
    bool ignored;

    for (uint32_t i = 0; i < f->count; i++) {
        f->places[i].distance = MM_UNEXPECTED;
    }
    for (uint32_t step = 0; step < steps && missing > 0; step++) {
        uint32_t next = mm_order_walk_next(&f->order, &walk, &ignored);
        if (next == MM_NO_GROUP) {
            return;
        }
        if (f->places[next].distance == MM_UNEXPECTED) {
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
    mm_order_walk walk = mm_working_order_walk(&f->order);

    if (!has_ended_here(f, &walk)) {
        f->ends[f->end_count++ % ROUND_ENDS] = (round_end){walk.first, walk.second, walk.times};
    }
}

/* Loads the parts that are expected next, as long as only parts with a later use go for them. */
void
mm_frames_look_ahead(mm_frames *f)
{
    mm_order_walk walk = mm_working_order_walk(&f->order);
    int trust = mm_working_order_trust(&f->order);
    bool measured = false; /* which takes long for many parts */

    if (f->rounds == 0) {
        return;
    }
    for (int step = 0; step < trust; step++) {
        bool ignored;
        uint32_t next;
        if (has_ended_here(f, &walk)) {
            return;
        }
        next = mm_order_walk_next(&f->order, &walk, &ignored);
        if (next == MM_NO_GROUP || walk.is_doubtful) {
            return;
        }
        if (f->places[next].present) {
            continue;
        }
        if (!measured) {
            mm_frames_measure_distances(f);
            measured = true;
        }
        if (!mm_frames_load(f, next, f->places[next].distance + 1)) {
            return;
        }
        f->report.ahead++;
    }
}
