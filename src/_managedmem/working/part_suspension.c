/* part_suspension.c: suspending a set of frames, which gives its memory back, and resuming it. */
#include "part_frames_state.h"

/* Lets no part have a frame any more. MM_REFUSED while a part is in use. Under the lock. */
static int
close_frames(mm_frames *f, mm_status *st)
{
    for (uint32_t i = 0; i < f->count; i++) {
        if (f->parts[i].held > 0) {
            return mm_fail(st, MM_REFUSED,
                           "the frames are in use: end the uses, and drop the references to their "
                           "arrays");
        }
    }
    f->is_suspended = true;
    return 0;
}

/* Takes out all parts; the inward stream follows their copies home. Stores the offset where the
 * frames of graphs begin, which is the end of the slab if there are no graphs. Under the lock. */
static int
empty_frames(mm_frames *f, size_t *of_graphs, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (mm_scope_enter_relaxed(&scope, f->cu, f->device, st) < 0) {
        return -1;
    }
    mm_frames_prune_captures(f);
    *of_graphs = f->placement.room;
    rc = mm_frames_clear(f, 0, f->placement.room, st);
    if (rc < 0) {
        mm_frames_recover(f, st);
    }
    mm_scope_leave(&scope);
    return rc;
}

static void
open_frames_again(mm_frames *f)
{
    mm_frames_lock(f);
    f->is_suspended = false;
    mm_frames_unlock(f);
}

/* In the turn. */
static int
suspend_entered(mm_frames *f, mm_status *st)
{
    size_t of_graphs = 0;
    bool closed;
    int rc;

    mm_frames_lock(f);
    closed = close_frames(f, st) == 0;
    rc = closed ? empty_frames(f, &of_graphs, st) : -1;
    mm_frames_unlock(f);
    if (rc == 0) {
        rc = mm_slab_suspend(f->cu, f->slab, of_graphs, false, st);
    }
    if (rc < 0 && closed) {
        open_frames_again(f);
    }
    return rc;
}

int
mm_frames_suspend(mm_frames *f, mm_status *st)
{
    int rc = 0;

    if (!mm_guard_enter(&f->guard)) {
        return mm_fail(st, MM_REFUSED, "the frames are closed");
    }
    mm_operation_lock_take(&f->turn);
    if (f->slab == NULL || f->slab->mapping.bytes == 0) {
        rc = mm_fail(st, MM_REFUSED, "the set cannot be suspended: make it with suspendable=True");
    } else if (!f->is_suspended) { /* is_suspended changes only in the turn */
        rc = suspend_entered(f, st);
    }
    mm_operation_lock_release(&f->turn);
    mm_guard_leave(&f->guard);
    return rc;
}

int
mm_frames_resume(mm_frames *f, mm_status *st)
{
    int rc = 0;

    if (!mm_guard_enter(&f->guard)) {
        return mm_fail(st, MM_REFUSED, "the frames are closed");
    }
    mm_operation_lock_take(&f->turn);
    if (f->is_suspended) {
        rc = mm_slab_resume(f->cu, f->slab, st);
        if (rc == 0) {
            open_frames_again(f);
        }
    }
    mm_operation_lock_release(&f->turn);
    mm_guard_leave(&f->guard);
    return rc;
}
