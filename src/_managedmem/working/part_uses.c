/* part_uses.c: the uses of parts in the streams of the callers, rounds of them, and writes at home. */
#include "part_frames_state.h"

#include <assert.h>

/* --- uses --------------------------------------------------------------------------------- */

/* Under the lock. */
static void
count_uses(mm_frames *f, uint32_t number, int change)
{
    f->parts[number].held += (unsigned)change;
    f->places[number].fixed = f->parts[number].held > 0;
}

/* Holds the part if it is in a frame, or a frame can be had. Under the lock. */
static bool
hold(mm_frames *f, uint32_t number, bool writes)
{
    frame_part *part = &f->parts[number];
    bool present = f->places[number].present;

    if (part->held == 0) {
        /* Not the uses inside of another one. */
        mm_working_order_note(&f->order, number, part->is_written && !writes);
    }
    f->places[number].used = ++f->turns;
    f->report.acquired++;
    f->report.hits += present;
    if (!present) {
        mm_frames_measure_distances(f);
        present = mm_frames_load(f, number, 0);
    }
    count_uses(f, number, present ? 1 : 0);
    f->report.mapped += !present;
    return present;
}

/* Makes the stream wait for an event of the set, or the host. */
static int
follow_copy(mm_frames *f, CUevent event, mm_device_stream stream, mm_status *st)
{
    if (f->host_waits) {
        MM_TRY_IN(mm_scope_enter_relaxed, f->device, f->cu, EventSynchronize, st, event);
    } else {
        MM_TRY_IN(mm_scope_enter_stream, stream, f->cu, StreamWaitEvent, st, stream.handle, event,
                  CU_EVENT_WAIT_DEFAULT);
    }
    return 0;
}

/* In place of an order between streams that the driver refused. */
static int
wait_for_device(mm_frames *f, mm_status *st)
{
    CUresult code;

    mm_frames_lock(f);
    f->report.failures++;
    f->report.error = *st;
    mm_frames_unlock(f);
    MM_CALL_IN(code, mm_scope_enter_relaxed, f->device, f->cu, CtxSynchronize, st);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuCtxSynchronize", (int)code);
}

static CUdeviceptr
acquire_entered(mm_frames *f, uint32_t number, bool writes, mm_device_stream stream)
{
    CUdeviceptr address = 0;
    CUevent filled = NULL;
    mm_status st;

    mm_frames_lock(f);
    if (hold(f, number, writes)) {
        address = f->slab->start + f->places[number].offset;
        filled = f->parts[number].filled;
    }
    mm_frames_look_ahead(f);
    mm_frames_unlock(f);
    if (address != 0 && follow_copy(f, filled, stream, &st) < 0) {
        mm_frames_lock(f);
        count_uses(f, number, -1);
        f->report.failures++;
        f->report.error = st;
        mm_frames_unlock(f);
        return 0;
    }
    return address;
}

/* True if no use can be ordered on the stream: it captures a graph, or the driver says nothing of it. */
static bool
is_unordered(mm_frames *f, mm_device_stream stream)
{
    bool capturing = true;
    mm_status ignored;
    mm_scope scope;

    if (mm_scope_enter_stream(&scope, f->cu, stream, &ignored) == 0) {
        MM_IGNORE(mm_stream_is_capturing(f->cu, stream.handle, &capturing, &ignored));
        mm_scope_leave(&scope);
    }
    return capturing;
}

/* --- writes at home ------------------------------------------------------------------------- */

/* Drops the parts from `first` on that are not in use, and makes later copies inward wait for `written`. After
 * a failure the device was waited for instead. Under the lock. */
static int
forget_copies(mm_frames *f, uint32_t first, uint32_t end, const mm_release_list *written,
              mm_status *st)
{
    mm_scope scope;
    mm_status later;
    int rc;

    if (mm_scope_enter_relaxed(&scope, f->cu, f->device, st) < 0) {
        f->missed = true;
        return -1;
    }
    f->missed = f->missed && (first > 0 || end < f->count);
    rc = written == NULL ? -1 : 0;
    for (uint32_t i = first; i < end; i++) {
        rc = mm_frames_drop(f, i, rc == 0 ? st : &later) < 0 ? -1 : rc;
    }
    if (rc == 0) {
        CUresult code = f->cu->StreamWaitEvent(f->inward, written->event, CU_EVENT_WAIT_DEFAULT);
        rc = code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuStreamWaitEvent", (int)code);
    }
    if (rc < 0) {
        mm_frames_recover(f, st);
    }
    mm_scope_leave(&scope);
    return rc;
}

/* Forgets copies of what the work on the stream may have written at home, at once or later. */
static int
follow_writes(mm_frames *f, uint32_t first, uint32_t end, mm_device_stream stream, mm_status *st)
{
    mm_release_list *written;
    int rc;

    if (is_unordered(f, stream)) {
        mm_frames_lock(f);
        f->missed = true;
        mm_frames_unlock(f);
        return 0;
    }
    written = mm_release_record(f->cu, stream, &f->lock, &f->pool, st);
    mm_frames_lock(f);
    rc = forget_copies(f, first, end, written, st);
    mm_release_keep(written, &f->pool);
    mm_frames_unlock(f);
    return rc;
}

/* True if no frame has what was at home before a write. Outside of rounds, code of the caller may have
 * written the part since its last use. */
static bool
have_followed(mm_frames *f, uint32_t part, mm_device_stream stream)
{
    mm_status ignored;
    bool missed, alone;

    mm_frames_lock(f);
    missed = f->missed;
    alone = f->rounds == 0;
    mm_frames_unlock(f);
    if (missed) {
        return follow_writes(f, 0, mm_frames_count(f), stream, &ignored) == 0;
    }
    return !alone || follow_writes(f, part, part + 1, stream, &ignored) == 0;
}

/* --- calls ----------------------------------------------------------------------------------- */

CUdeviceptr
mm_frames_acquire(mm_frames *f, uint32_t part, bool writes, CUstream stream)
{
    mm_device_stream ordered = {stream, f->device};
    CUdeviceptr address = 0;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    assert(part < f->count);
    if (!is_unordered(f, ordered) && have_followed(f, part, ordered)) {
        address = acquire_entered(f, part, writes, ordered);
    }
    mm_guard_leave(&f->guard);
    return address;
}

/* Sends a written part home, and lets it go. On failure it stays held. Under the lock. */
static int
let_go(mm_frames *f, uint32_t number, bool written, mm_status *st)
{
    mm_scope scope;
    int rc = 0;

    if (written) {
        rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
        if (rc == 0) {
            rc = mm_frames_send_home(f, number, st);
            mm_scope_leave(&scope);
        }
    }
    if (rc == 0) {
        count_uses(f, number, -1);
        mm_frames_look_ahead(f);
    } else {
        f->report.failures++;
        f->report.error = *st;
    }
    return rc;
}

static int
release_entered(mm_frames *f, uint32_t number, bool written, mm_device_stream stream,
                mm_status *st)
{
    mm_release_list *ended = mm_release_record(f->cu, stream, &f->lock, &f->pool, st);
    int rc;

    if (ended == NULL && wait_for_device(f, st) < 0) { /* a stream that is gone, say */
        return -1;
    }
    mm_frames_lock(f);
    if (ended != NULL) {
        f->parts[number].releases = mm_release_add(f->parts[number].releases, ended, &f->pool);
    }
    rc = let_go(f, number, written, st);
    mm_frames_unlock(f);
    return rc;
}

int
mm_frames_release(mm_frames *f, uint32_t part, bool written, CUstream stream, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = release_entered(f, part, written, (mm_device_stream){stream, f->device}, st);
    mm_guard_leave(&f->guard);
    return rc;
}

int
mm_frames_begin_round(mm_frames *f, CUstream stream, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = follow_writes(f, 0, mm_frames_count(f), (mm_device_stream){stream, f->device}, st);
    mm_frames_lock(f);
    f->rounds++;
    mm_frames_unlock(f);
    mm_guard_leave(&f->guard);
    return rc;
}

void
mm_frames_end_round(mm_frames *f)
{
    mm_frames_lock(f);
    if (f->rounds > 0) { /* it began before the set was closed */
        f->rounds--;
        mm_frames_note_round_end(f);
    }
    mm_frames_unlock(f);
}

int
mm_frames_changed(mm_frames *f, uint32_t part, CUstream stream, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = follow_writes(f, part, part + 1, (mm_device_stream){stream, f->device}, st);
    mm_guard_leave(&f->guard);
    return rc;
}

/* The event stands behind all copies home that were queued before. In a scope. */
static int
mark_copies_home(mm_frames *f, mm_status *st)
{
    MM_TRY(f->cu, EventRecord, st, f->all_sent, f->outward);
    return 0;
}

static int
settle_entered(mm_frames *f, mm_device_stream stream, mm_status *st)
{
    mm_scope scope;
    int rc;

    mm_frames_lock(f); /* no other thread marks others before the stream waits */
    rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
    if (rc == 0) {
        rc = mark_copies_home(f, st);
        mm_scope_leave(&scope);
    }
    if (rc == 0) {
        rc = follow_copy(f, f->all_sent, stream, st);
    }
    mm_frames_unlock(f);
    return rc == 0 ? 0 : wait_for_device(f, st);
}

int
mm_frames_settle(mm_frames *f, CUstream stream, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = settle_entered(f, (mm_device_stream){stream, f->device}, st);
    mm_guard_leave(&f->guard);
    return rc;
}
