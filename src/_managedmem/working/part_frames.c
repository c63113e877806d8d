/* part_frames.c: the life of a set of frames, its parts and its counters. placement.c chooses the
 * parts to evict. */
#include "part_frames_state.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/growth.h"
#include "../memory/nearest_host.h"

/* --- the list of sets ---------------------------------------------------------------------- */

/* A forked child, which has no sets, does not take the lock. */
static pthread_mutex_t sets_lock = PTHREAD_MUTEX_INITIALIZER;
static mm_frames *sets;

static void
list_set(mm_frames *f)
{
    (void)pthread_mutex_lock(&sets_lock);
    f->next = sets;
    if (sets != NULL) {
        sets->previous = f;
    }
    sets = f;
    (void)pthread_mutex_unlock(&sets_lock);
}

static void
unlist_set(mm_frames *f)
{
    (void)pthread_mutex_lock(&sets_lock);
    *(f->previous != NULL ? &f->previous->next : &sets) = f->next;
    if (f->next != NULL) {
        f->next->previous = f->previous;
    }
    (void)pthread_mutex_unlock(&sets_lock);
}

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
open_frames(mm_frames *f, size_t room, bool can_suspend, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (!f->is_managed) {
        f->slab = mm_slab_on_device(f->cu, f->device, room, can_suspend, st);
    }
    if ((f->slab == NULL && !f->is_managed) || mm_nearest_host(f->cu, f->device, &f->host, st) < 0
        || mm_scope_enter_relaxed(&scope, f->cu, f->device, st) < 0) {
        return -1;
    }
    rc = make_streams(f, st);
    mm_scope_leave(&scope);
    return rc;
}

mm_frames *
mm_frames_new(mm_driver *cu, int device, size_t room, bool host_waits, bool is_managed,
              bool can_suspend, mm_status *st)
{
    mm_frames *f = calloc(1, sizeof *f);

    if (f == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for frames");
        return NULL;
    }
    f->cu = cu;
    f->device = device;
    f->host_waits = host_waits;
    f->is_managed = is_managed;
    f->placement.room = room;
    mm_use_order_init(&f->order);
    (void)pthread_mutex_init(&f->lock, NULL);
    mm_operation_lock_init(&f->turn);
    list_set(f);
    if (open_frames(f, room, can_suspend, st) < 0) {
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

/* Destroys streams and events; those that fail twice leak. False in a host function, where the
 * driver destroys nothing: try again later. */
static bool
destroy_objects(mm_frames *f)
{
    CUresult code = f->inward != NULL ? f->cu->StreamDestroy(f->inward) : CUDA_SUCCESS;

    if (code == CUDA_ERROR_NOT_PERMITTED) {
        return false;
    }
    f->inward = code == CUDA_SUCCESS ? NULL : f->inward;
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
    return true;
}

/* Freeing the slab waits for the device, so that no copy to frames is under way afterwards. */
static bool
end_frames(mm_frames *f)
{
    mm_status ignored;
    mm_scope scope;
    const bool entered = mm_scope_enter_relaxed(&scope, f->cu, f->device, &ignored) == 0;
    /* This needs no context, but outside of a scope it may disturb a capture. */
    const bool destroyed = destroy_objects(f);

    if (entered) {
        mm_scope_leave(&scope);
    }
    if (destroyed) {
        mm_slab_free(f->slab);
        f->slab = NULL;
        atomic_store(&f->has_ended, true);
    }
    return destroyed;
}

void
mm_frames_close(mm_frames *f)
{
    if (!mm_driver_forked() && mm_guard_close(&f->guard, false) == MM_CLOSED_NOW) {
        atomic_store(&f->is_idle, true);
        (void)end_frames(f);
    }
}

static void
free_struct(mm_frames *f)
{
    unlist_set(f);
    mm_frames_free_captures(f);
    mm_use_order_free(&f->order);
    mm_placement_free(&f->placement);
    free(f->places);
    free(f->parts);
    (void)pthread_mutex_destroy(&f->lock);
    mm_operation_lock_destroy(&f->turn);
    free(f);
}

static bool
attempt_frames(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
{
    mm_frames *f = (mm_frames *)entry;

    (void)cu;
    (void)conditions;
    if (!end_frames(f)) {
        return false;
    }
    free_struct(f);
    return true;
}

void
mm_frames_free(mm_frames *f)
{
    if (f == NULL || mm_driver_forked()) {
        return;
    }
    mm_frames_close(f);
    if (!atomic_load(&f->is_idle)) {
        return; /* it leaks: a call of another thread may wait for the caller, a host function */
    }
    if (atomic_load(&f->has_ended) || end_frames(f)) {
        free_struct(f);
    } else {
        mm_deferred_frees_append(&f->deferred, attempt_frames);
    }
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

/* Makes room for a new number, although the order may give the number of a removed part. */
static int
reserve_part(mm_frames *f, mm_status *st)
{
    size_t needed = (size_t)f->count + 1;

    f->parts = mm_grow(f->parts, &f->part_capacity, needed, sizeof *f->parts, st);
    f->places = mm_grow(f->places, &f->place_capacity, needed, sizeof *f->places, st);
    return f->part_capacity < needed || f->place_capacity < needed
                   || mm_placement_reserve(&f->placement, needed, st) < 0
               ? -1
               : 0;
}

/* Under the lock, in a scope. */
static int
add_part(mm_frames *f, frame_part *part, size_t bytes, uint32_t *number, mm_status *st)
{
    if (reserve_part(f, st) < 0 || make_events(f, part, st) < 0
        || mm_use_order_add(&f->order, part->access == MM_PART_WRITE, st) < 0) {
        destroy_event(f, &part->filled);
        destroy_event(f, &part->sent);
        return -1;
    }
    *number = f->order.newest;
    f->count = f->order.count;
    f->places[*number] = (mm_place){.bytes = bytes};
    f->parts[*number] = *part;
    return 0;
}

int
mm_frames_add(mm_frames *f, CUdeviceptr home, size_t bytes, mm_part_access access, uint32_t *part,
              mm_status *st)
{
    frame_part added = {.home = home, .access = access, .is_live = true};
    mm_scope scope;
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return mm_fail(st, MM_REFUSED, "the frames are closed");
    }
    rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
    if (rc == 0) {
        mm_frames_lock(f);
        rc = add_part(f, &added, bytes, part, st);
        mm_frames_unlock(f);
        mm_scope_leave(&scope);
    }
    mm_guard_leave(&f->guard);
    return rc;
}

void
mm_frames_guard(mm_frames *f, uint32_t part, mm_guard *memory)
{
    mm_frames_lock(f);
    f->parts[part].memory = memory;
    mm_frames_unlock(f);
}

/* Under the lock, in a scope. A failure of the driver is noted. */
static int
remove_part(mm_frames *f, uint32_t number, mm_status *st)
{
    frame_part *part = &f->parts[number];
    mm_status failure;

    if (part->held > 0 || mm_frames_is_captured(f, number) || !part->is_live) {
        return mm_fail(st, MM_REFUSED, part->is_live ? "the part is in use" : "the part is gone");
    }
    if (mm_frames_forget(f, number, &failure) < 0) {
        mm_frames_recover(f, &failure);
    }
    mm_frames_forget_captured(f, number);
    destroy_event(f, &part->filled);
    destroy_event(f, &part->sent);
    *part = (frame_part){0};
    mm_use_order_remove(&f->order, number);
    mm_use_order_vacate(&f->order, number);
    return 0;
}

int
mm_frames_remove(mm_frames *f, uint32_t part, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (!mm_guard_enter(&f->guard)) {
        return 0;
    }
    rc = mm_scope_enter_relaxed(&scope, f->cu, f->device, st);
    if (rc == 0) {
        mm_frames_lock(f);
        rc = remove_part(f, part, st);
        mm_frames_unlock(f);
        mm_scope_leave(&scope);
    }
    mm_guard_leave(&f->guard);
    return rc;
}

int
mm_frames_give_order(mm_frames *f, const uint32_t *parts, size_t count, mm_status *st)
{
    int rc;

    mm_frames_lock(f);
    rc = mm_use_order_give(&f->order, parts, count, st);
    mm_frames_unlock(f);
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

bool
mm_frames_have(mm_frames *f, uint32_t part)
{
    bool present;

    mm_frames_lock(f);
    present = part < f->count && f->places[part].present && !mm_guard_is_closed(&f->guard);
    mm_frames_unlock(f);
    return present;
}

/* The driver keeps device memory that managed pages have left, so all loaded parts count. */
static size_t
count_kept(const mm_frames *f)
{
    size_t kept = 0;

    for (uint32_t i = 0; i < f->count; i++) {
        kept += f->parts[i].was_loaded ? f->places[i].bytes : 0;
    }
    return kept;
}

void
mm_frames_read_report(mm_frames *f, mm_frames_report *report)
{
    mm_frames_lock(f);
    *report = f->report;
    report->room = mm_guard_is_closed(&f->guard) ? 0 : f->placement.room + f->ring;
    report->present = mm_guard_is_closed(&f->guard) ? 0 : report->present;
    report->kept = f->is_managed ? count_kept(f) : f->is_suspended ? 0 : report->room;
    report->parts = f->order.live;
    mm_frames_unlock(f);
}

void
mm_frames_add_kept(uint64_t kept[MM_MAX_DEVICES])
{
    mm_frames_report report;

    (void)pthread_mutex_lock(&sets_lock);
    for (mm_frames *f = sets; f != NULL; f = f->next) {
        mm_frames_read_report(f, &report);
        kept[f->device] += report.kept;
    }
    (void)pthread_mutex_unlock(&sets_lock);
}
