/* part_uses.c: the uses of parts in the streams of the callers, their rounds, and writes at
 * home. */
#include "part_frames_state.h"

#include <assert.h>

enum { MANY_ENDS = 16 }; /* ends to tolerate, beside twice those last seen under way */
#define ALL_PARTS UINT32_MAX

/* --- uses --------------------------------------------------------------------------------- */

/* Under the lock. */
static void
count_uses(mm_frames *f, uint32_t number, int change)
{
    assert(change > 0 || f->parts[number].held >= (unsigned)-change);
    f->parts[number].held += (unsigned)change;
    f->places[number].fixed = f->parts[number].held > 0;
}

/* Under the lock. */
static void
note_rate(mm_frames *f, uint32_t number)
{
    if (mm_use_rate_note(&f->clock, &f->parts[number].rate, &f->places[number].heat,
                         f->order.live)) {
        for (uint32_t i = 0; i < f->count; i++) {
            f->places[i].heat *= MM_USE_COOLING;
        }
    }
}

/* Holds the part if it is in a frame, or can get one. Under the lock. */
static bool
hold(mm_frames *f, uint32_t number, bool writes)
{
    frame_part *part = &f->parts[number];
    bool present = f->places[number].present;

    if (part->held == 0) {
        /* Nested uses tell nothing of the order. */
        mm_use_order_note(&f->order, number, part->access == MM_PART_WRITE && !writes);
    }
    note_rate(f, number);
    f->report.acquired++;
    mm_frames_expect_replay(f, number);
    if (part->is_stale) {
        f->report.mapped++;
        return false;
    }
    f->report.hits += present;
    if (!present) {
        mm_frames_measure_distances(f);
        present = mm_frames_load(f, number, 0);
    }
    part->was_used = present;
    count_uses(f, number, present ? 1 : 0);
    part->writers += present && writes;
    f->report.mapped += !present;
    return present;
}

static int
wait_for_copy(mm_frames *f, CUevent event, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, f->device, f->cu, EventSynchronize, st, event);
    return 0;
}

/* Makes the stream wait for an event of the set; with `host_waits` the host waits instead. */
static int
follow_copy(mm_frames *f, CUevent event, mm_device_stream stream, mm_status *st)
{
    if (f->host_waits) {
        return wait_for_copy(f, event, st);
    }
    MM_TRY_IN(mm_scope_enter_stream, stream, f->cu, StreamWaitEvent, st, stream.handle, event,
              CU_EVENT_WAIT_DEFAULT);
    return 0;
}

/* A wait for the device would destroy a capture. */
static int
synchronize(mm_frames *f, mm_status *st)
{
    bool capturing = false;

    if (mm_streams_are_capturing(f->cu, &capturing, st) < 0) {
        return -1;
    }
    if (capturing) {
        return mm_fail(st, MM_REFUSED,
                       "the device cannot be waited for while a stream captures a graph");
    }
    MM_TRY_IN(mm_scope_enter_relaxed, f->device, f->cu, CtxSynchronize, st);
    return 0;
}

/* Waits for the device, because the driver refused to order two streams. */
static int
wait_for_device(mm_frames *f, mm_status *st)
{
    mm_frames_note_failure(f, st);
    return synchronize(f, st);
}

/* Waits for the device after a failure that needs it. */
static void
settle_troubles(mm_frames *f)
{
    uint64_t troubles, waited;
    mm_status ignored;

    mm_frames_lock(f);
    troubles = f->troubles;
    waited = f->waited;
    mm_frames_unlock(f);
    if (troubles != waited && synchronize(f, &ignored) == 0) {
        mm_frames_lock(f);
        f->waited = troubles > f->waited ? troubles : f->waited;
        mm_frames_unlock(f);
    }
}

/* If the stream cannot follow the copy, the host waits for it. */
static int
follow_filled(mm_frames *f, CUevent filled, mm_device_stream stream)
{
    mm_status st;

    if (follow_copy(f, filled, stream, &st) == 0) {
        return 0;
    }
    mm_frames_note_failure(f, &st);
    return wait_for_copy(f, filled, &st);
}

static CUdeviceptr
acquire_entered(mm_frames *f, uint32_t number, bool writes, mm_device_stream stream)
{
    CUdeviceptr address = 0;
    CUevent filled = NULL;
    bool was_there;

    mm_frames_lock(f);
    was_there = f->places[number].present;
    if (f->parts[number].is_live && hold(f, number, writes)) {
        address = mm_frames_address(f, number);
        filled = f->parts[number].filled;
    }
    mm_frames_look_ahead(f);
    mm_frames_unlock(f);
    if (address != 0 && follow_filled(f, filled, stream) < 0) {
        mm_frames_lock(f);
        count_uses(f, number, -1);
        f->parts[number].writers -= writes;
        f->report.hits -= was_there;
        f->report.mapped++;
        mm_frames_unlock(f);
        return 0;
    }
    return address;
}

/* True if no use can be ordered on the stream: it captures a graph, or the driver does not
 * answer. */
static bool
is_unordered(mm_frames *f, mm_device_stream stream)
{
    bool capturing = true;
    mm_status ignored;
    mm_scope scope;

    if (mm_scope_enter_stream(&scope, f->cu, stream, &ignored) == 0) {
        if (mm_stream_is_capturing(f->cu, stream.handle, &capturing, &ignored) < 0) {
            capturing = true;
        }
        mm_scope_leave(&scope);
    }
    return capturing;
}

/* --- writes at home ------------------------------------------------------------------------- */

/* Drops the parts from `first` to before `end` that are not in use, and makes later copies inward
 * wait for `written`. After a failure no part is loaded until the device has been waited for.
 * Under the lock. */
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
        f->parts[i].was_used = f->parts[i].held > 0;
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

/* Forgets copies of parts that the work on the stream may have written at home, at once or later;
 * of every part if `end` is ALL_PARTS. */
static int
follow_writes(mm_frames *f, uint32_t first, uint32_t end, mm_device_stream stream, mm_status *st)
{
    mm_release_list *written;
    int rc;

    if (is_unordered(f, stream)) {
        mm_frames_lock(f);
        f->missed = true;
        mm_frames_unlock(f);
        mm_frames_follow_captured(f, stream);
        return 0;
    }
    written = mm_release_record(f->cu, stream, &f->lock, &f->pool, st);
    mm_frames_lock(f);
    rc = forget_copies(f, first, end < f->count ? end : f->count, written, st);
    mm_release_keep(written, &f->pool);
    mm_frames_unlock(f);
    return rc;
}

/* Drops frames that may be older than their homes; false on failure. Outside of rounds, the caller
 * may have written the part at home since its last use. */
static bool
have_followed(mm_frames *f, uint32_t part, mm_device_stream stream)
{
    mm_status ignored;
    bool missed, alone;

    mm_frames_lock(f);
    mm_frames_prune_captures(f);
    missed = f->missed;
    alone = f->rounds == 0 || f->parts[part].is_written_by_graph;
    mm_frames_unlock(f);
    if (missed) {
        return follow_writes(f, 0, ALL_PARTS, stream, &ignored) == 0;
    }
    return !alone || follow_writes(f, part, part + 1, stream, &ignored) == 0;
}

/* --- calls ----------------------------------------------------------------------------------- */

/* A use that is captured, or at home. */
static void
note_other_use(mm_frames *f, bool in_frame)
{
    mm_frames_lock(f);
    f->report.acquired++;
    f->report.mapped += !in_frame;
    mm_frames_unlock(f);
}

mm_part_use
mm_frames_acquire(mm_frames *f, uint32_t part, bool writes, CUstream stream)
{
    mm_device_stream ordered = {stream, f->device};
    mm_part_use use = {.part = part};

    if (!mm_guard_enter(&f->guard)) {
        return use;
    }
    if (is_unordered(f, ordered)) {
        use = mm_frames_capture(f, part, ordered);
        note_other_use(f, use.address != 0);
    } else {
        settle_troubles(f);
        if (have_followed(f, part, ordered)) {
            use.address = acquire_entered(f, part, writes, ordered);
        } else {
            note_other_use(f, false);
        }
    }
    mm_guard_leave(&f->guard);
    return use;
}

/* Ends a use. The last end drops a part that was written at home meanwhile. Under the lock. */
static void
end_hold(mm_frames *f, uint32_t number)
{
    frame_part *part = &f->parts[number];
    mm_scope scope;
    mm_status st;

    count_uses(f, number, -1);
    if (part->held > 0 || !part->is_stale) {
        return;
    }
    part->is_stale = false;
    if (mm_scope_enter_relaxed(&scope, f->cu, f->device, &st) < 0) {
        f->missed = true; /* all copies are dropped before the next use */
        return;
    }
    if (mm_frames_drop(f, number, &st) < 0) {
        mm_frames_recover(f, &st);
    }
    mm_scope_leave(&scope);
}

/* Sends a written part home, and lets it go unless the use goes on. On failure it stays held.
 * Under the lock. */
static int
let_go(mm_frames *f, uint32_t number, bool written, bool goes_on, mm_status *st)
{
    mm_scope scope;
    int rc = 0;

    if (written && !f->is_managed && f->parts[number].access != MM_PART_SCRATCH) {
        rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
        if (rc == 0) {
            rc = mm_frames_send_home(f, number, st);
            mm_scope_leave(&scope);
        }
    }
    if (rc == 0 && written && f->parts[number].writers > 0) {
        f->parts[number].writers--;
    }
    if (rc == 0 && !goes_on) {
        end_hold(f, number);
        mm_frames_look_ahead(f);
    } else if (rc < 0) {
        f->report.failures++;
        f->report.error = *st;
    }
    return rc;
}

/* Forgets ends of uses that have passed, if a part has many ends: a part that is never evicted
 * would keep an end for each stream that ever used it. The part is in use. Queries without the
 * lock, because a host function may run during a query. */
static void
prune_ends(mm_frames *f, uint32_t number)
{
    mm_release_list *ends = NULL, *passed = NULL;
    mm_status ignored;
    mm_scope scope;

    mm_frames_lock(f);
    if (mm_releases_count(f->parts[number].releases) > f->parts[number].most_ends) {
        ends = f->parts[number].releases;
        f->parts[number].releases = NULL;
    }
    mm_frames_unlock(f);
    if (ends == NULL) {
        return;
    }
    if (mm_scope_enter_relaxed(&scope, f->cu, f->device, &ignored) == 0) {
        passed = mm_releases_take_passed(f->cu, &ends);
        mm_scope_leave(&scope);
    }
    mm_frames_lock(f);
    f->parts[number].most_ends = MANY_ENDS + 2 * mm_releases_count(ends);
    f->parts[number].releases = mm_releases_join(ends, f->parts[number].releases);
    mm_release_keep(passed, &f->pool);
    mm_frames_unlock(f);
}

static int
release_entered(mm_frames *f, uint32_t number, bool written, bool goes_on, mm_device_stream stream,
                mm_status *st)
{
    mm_release_list *ended;
    int rc;

    /* A captured end would be no end for other streams. Other failures come again below. */
    if (mm_stream_refuse_capture_in(f->cu, stream, "the end of a use", st) < 0
        && st->kind == MM_CAPTURING) {
        return -1;
    }
    ended = mm_release_record(f->cu, stream, &f->lock, &f->pool, st);
    if (ended == NULL && wait_for_device(f, st) < 0) { /* a stream that is gone, say */
        return -1;
    }
    if (ended != NULL) {
        mm_frames_lock(f);
        f->parts[number].releases = mm_release_add(f->parts[number].releases, ended, &f->pool);
        mm_frames_unlock(f);
        prune_ends(f, number);
    }
    mm_frames_lock(f);
    rc = let_go(f, number, written, goes_on, st);
    mm_frames_unlock(f);
    return rc;
}

int
mm_frames_release(mm_frames *f, mm_part_use use, bool written, bool goes_on, CUstream stream,
                  mm_status *st)
{
    const mm_device_stream ordered = {stream, f->device};
    int rc = 0;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    if (use.frame != 0) {
        mm_frames_end_captured(f, use, written, goes_on, ordered);
    } else {
        rc = release_entered(f, use.part, written, goes_on, ordered, st);
    }
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
    rc = follow_writes(f, 0, ALL_PARTS, (mm_device_stream){stream, f->device}, st);
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
    if (f->rounds > 0) { /* else the set was closed when the round began */
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
    mm_frames_lock(f);
    f->parts[part].is_stale = f->parts[part].held > 0 && !f->is_managed;
    mm_frames_unlock(f);
    rc = follow_writes(f, part, part + 1, (mm_device_stream){stream, f->device}, st);
    mm_guard_leave(&f->guard);
    return rc;
}

/* Records all_sent behind all copies home that are queued so far. */
static int
mark_copies_home(mm_frames *f, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, f->device, f->cu, EventRecord, st, f->all_sent, f->outward);
    return 0;
}

/* Without a stream, the host waits. It waits without the lock, because other threads may queue
 * what it waits for. If they record the event again meanwhile, the wait covers more copies. */
static int
settle_entered(mm_frames *f, const mm_device_stream *stream, mm_status *st)
{
    const bool host_waits = stream == NULL || f->host_waits;
    int rc;

    mm_frames_lock(f);
    rc = mark_copies_home(f, st);
    if (rc == 0 && !host_waits) {
        rc = follow_copy(f, f->all_sent, *stream, st);
    }
    mm_frames_unlock(f);
    if (rc == 0 && host_waits) {
        rc = wait_for_copy(f, f->all_sent, st);
    }
    return rc == 0 ? 0 : wait_for_device(f, st);
}

int
mm_frames_settle(mm_frames *f, CUstream stream, mm_status *st)
{
    const mm_device_stream later = {stream, f->device};
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = settle_entered(f, is_unordered(f, later) ? NULL : &later, st);
    mm_guard_leave(&f->guard);
    return rc;
}

/* Launches of graphs are not seen: their writes are at home once the device is idle. */
static int
wait_for_graphs(mm_frames *f, mm_status *st)
{
    bool written = false;

    mm_frames_lock(f);
    for (uint32_t i = 0; i < f->count; i++) {
        written = written || f->parts[i].is_written_by_graph;
    }
    mm_frames_unlock(f);
    return written && synchronize(f, st) < 0 && st->kind != MM_REFUSED ? -1 : 0;
}

int
mm_frames_wait(mm_frames *f, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = settle_entered(f, NULL, st);
    if (rc == 0) {
        rc = wait_for_graphs(f, st);
    }
    mm_guard_leave(&f->guard);
    return rc;
}

int
mm_frames_synchronize(mm_frames *f, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = synchronize(f, st);
    mm_guard_leave(&f->guard);
    return rc;
}
