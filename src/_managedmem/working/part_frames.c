/* part_frames.c: the life of a set of frames, its parts and its counters. */
#include "part_frames_state.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/growth.h"

/* --- life --------------------------------------------------------------------------------- */

/* In a scope. */
static int
make_streams(mm_frames *f, mm_status *st)
{
    MM_TRY(f->cu, StreamCreate, st, &f->inward, CU_STREAM_NON_BLOCKING);
    MM_TRY(f->cu, StreamCreate, st, &f->outward, CU_STREAM_NON_BLOCKING);
    MM_TRY(f->cu, EventCreate, st, &f->all_sent, CU_EVENT_DISABLE_TIMING);
    return 0;
}

static int
open_frames(mm_frames *f, size_t room, mm_status *st)
{
    mm_scope scope;
    int rc;

    f->slab = mm_slab_on_device(f->cu, f->device, room, st);
    if (f->slab == NULL || mm_scope_enter_relaxed(&scope, f->cu, f->device, st) < 0) {
        return -1;
    }
    rc = make_streams(f, st);
    mm_scope_leave(&scope);
    return rc;
}

mm_frames *
mm_frames_new(mm_driver *cu, int device, size_t room, bool host_waits, mm_status *st)
{
    mm_frames *f = calloc(1, sizeof *f);

    if (f == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for frames");
        return NULL;
    }
    f->cu = cu;
    f->device = device;
    f->host_waits = host_waits;
    f->placement.room = room;
    mm_working_order_init(&f->order);
    (void)pthread_mutex_init(&f->lock, NULL);
    if (open_frames(f, room, st) < 0) {
        mm_frames_free(f);
        return NULL;
    }
    return f;
}

static void
destroy_event(mm_frames *f, CUevent *event)
{
    if (*event != NULL) {
        mm_event_destroy(f->cu, *event);
        *event = NULL;
    }
}

static void
destroy_stream(mm_frames *f, CUstream *stream)
{
    for (int attempt = 0; attempt < 2 && *stream != NULL; attempt++) {
        if (f->cu->StreamDestroy(*stream) == CUDA_SUCCESS) {
            *stream = NULL;
        }
    }
}

/* Frees the driver's objects. What fails twice stays with the driver. */
static void
destroy_objects(mm_frames *f)
{
    for (uint32_t i = 0; i < f->count; i++) {
        destroy_event(f, &f->parts[i].filled);
        destroy_event(f, &f->parts[i].sent);
        mm_releases_free(f->cu, f->parts[i].releases);
        f->parts[i].releases = NULL;
    }
    mm_releases_free(f->cu, f->pool);
    f->pool = NULL;
    destroy_event(f, &f->all_sent);
    destroy_stream(f, &f->inward);
    destroy_stream(f, &f->outward);
}

/* The slab waits for the device when it is freed, so that no copy is under way after it. */
static void
end_frames(mm_frames *f)
{
    mm_status ignored;
    mm_scope scope;
    const bool entered = mm_scope_enter_relaxed(&scope, f->cu, f->device, &ignored) == 0;

    destroy_objects(f); /* which needs no context, but may disturb a capture without a scope */
    if (entered) {
        mm_scope_leave(&scope);
    }
    mm_slab_free(f->slab);
    f->slab = NULL;
}

void
mm_frames_close(mm_frames *f)
{
    if (!mm_driver_forked() && mm_guard_close(&f->guard, false) == MM_CLOSED_NOW) {
        end_frames(f);
    }
}

void
mm_frames_free(mm_frames *f)
{
    if (f == NULL || mm_driver_forked()) {
        return;
    }
    mm_frames_close(f);
    if (f->slab != NULL) {
        return; /* a call of another thread waits for the host function that the caller runs in */
    }
    mm_working_order_free(&f->order);
    mm_placement_free(&f->placement);
    free(f->places);
    free(f->parts);
    (void)pthread_mutex_destroy(&f->lock);
    free(f);
}

/* --- parts -------------------------------------------------------------------------------- */

/* In a scope. */
static int
make_events(mm_frames *f, frame_part *part, mm_status *st)
{
    MM_TRY(f->cu, EventCreate, st, &part->filled, CU_EVENT_DISABLE_TIMING);
    MM_TRY(f->cu, EventCreate, st, &part->sent, CU_EVENT_DISABLE_TIMING);
    return 0;
}

/* Under the lock, in a scope. */
static int
add_part(mm_frames *f, frame_part *part, size_t bytes, mm_status *st)
{
    size_t needed = (size_t)f->count + 1;

    f->parts = mm_grow(f->parts, &f->part_capacity, needed, sizeof *f->parts, st);
    f->places = mm_grow(f->places, &f->place_capacity, needed, sizeof *f->places, st);
    if (f->part_capacity < needed || f->place_capacity < needed
        || mm_placement_reserve(&f->placement, needed, st) < 0 || make_events(f, part, st) < 0
        || mm_working_order_add(&f->order, part->is_written, st) < 0) {
        destroy_event(f, &part->filled);
        destroy_event(f, &part->sent);
        return -1;
    }
    f->places[f->count] = (mm_place){.bytes = bytes};
    f->parts[f->count++] = *part;
    return 0;
}

int
mm_frames_add(mm_frames *f, CUdeviceptr home, size_t bytes, bool is_written, uint32_t *part,
              mm_status *st)
{
    frame_part added = {.home = home, .is_written = is_written};
    mm_scope scope;
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return mm_fail(st, MM_REFUSED, "the frames are closed");
    }
    rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
    if (rc == 0) {
        mm_frames_lock(f);
        rc = add_part(f, &added, bytes, st);
        *part = f->count - 1;
        mm_frames_unlock(f);
        mm_scope_leave(&scope);
    }
    mm_guard_leave(&f->guard);
    return rc;
}

/* --- reading ------------------------------------------------------------------------------ */

uint32_t
mm_frames_count(mm_frames *f)
{
    uint32_t count;

    mm_frames_lock(f);
    count = f->count;
    mm_frames_unlock(f);
    return count;
}

void
mm_frames_read_report(mm_frames *f, mm_frames_report *report)
{
    mm_frames_lock(f);
    *report = f->report;
    report->room = mm_guard_is_closed(&f->guard) ? 0 : f->placement.room;
    report->present = mm_guard_is_closed(&f->guard) ? 0 : report->present;
    report->parts = f->count;
    mm_frames_unlock(f);
}
