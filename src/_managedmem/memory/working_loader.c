/* working_loader.c: a working set at work: its life, its groups, their uses. */
#include "working_thread.h"

#include <assert.h>
#include <stdlib.h>

#include "../driver/clock.h"
#include "growth.h"
#include "working_claims.h"

/* Guards the list of sets; held while their threads end. */
static pthread_mutex_t loaders_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_loader *all_loaders;

/* --- the life of a set -------------------------------------------------------------------- */

/* In a scope. */
static int
make_streams(mm_loader *l, mm_status *st)
{
    for (size_t i = 0; i < MM_LOAD_STREAMS; i++) {
        MM_TRY(l->cu, StreamCreate, st, &l->streams[i], CU_STREAM_NON_BLOCKING);
    }
    MM_TRY(l->cu, StreamCreate, st, &l->away, CU_STREAM_NON_BLOCKING);
    MM_TRY(l->cu, EventCreate, st, &l->left, CU_EVENT_DISABLE_TIMING);
    return 0;
}

static int
open_streams(mm_loader *l, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (mm_scope_enter_relaxed(&scope, l->cu, l->device, st) < 0) {
        return -1;
    }
    rc = make_streams(l, st);
    mm_scope_leave(&scope);
    return rc;
}

static void
destroy_stream(mm_loader *l, CUstream *stream)
{
    for (int attempt = 0; attempt < 2 && *stream != NULL; attempt++) {
        if (l->cu->StreamDestroy(*stream) == CUDA_SUCCESS) {
            *stream = NULL;
        }
    }
}

static void
destroy_event(mm_loader *l, CUevent *event)
{
    if (*event != NULL) {
        mm_event_destroy(l->cu, *event);
        *event = NULL;
    }
}

/* Frees the driver's objects, in a scope. What fails twice stays with the driver. */
static void
destroy_objects(mm_loader *l)
{
    for (uint32_t i = 0; i < l->set.count; i++) {
        destroy_event(l, &l->groups[i]->done);
        mm_releases_free(l->cu, l->set.groups[i].releases);
        l->set.groups[i].releases = NULL;
    }
    mm_releases_free(l->cu, l->pool);
    l->pool = NULL;
    for (size_t i = 0; i < l->spare_count; i++) {
        destroy_event(l, &l->spare_events[i]);
    }
    l->spare_count = 0;
    destroy_event(l, &l->left);
    for (size_t i = 0; i < MM_LOAD_STREAMS; i++) {
        destroy_stream(l, &l->streams[i]);
    }
    destroy_stream(l, &l->away);
}

static void
free_driver_objects(mm_loader *l)
{
    mm_status ignored;
    mm_scope scope;
    int rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored);

    if (rc < 0) {
        rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored); /* the second attempt */
    }
    if (rc == 0) {
        destroy_objects(l);
        mm_scope_leave(&scope);
    }
}

static void
free_loader(mm_loader *l)
{
    free_driver_objects(l);
    for (uint32_t i = 0; i < l->set.count; i++) {
        mm_give_back_claim(&l->groups[i]->memory);
        mm_working_memory_free(&l->groups[i]->memory);
        free(l->groups[i]);
    }
    free(l->groups);
    free(l->spare_events);
    mm_working_set_free(&l->set);
    (void)pthread_cond_destroy(&l->issued_more);
    (void)pthread_cond_destroy(&l->wanted);
    (void)pthread_mutex_destroy(&l->lock);
    mm_turn_destroy(&l->turn);
    free(l);
}

static void
list_loader(mm_loader *l)
{
    (void)pthread_mutex_lock(&loaders_mutex);
    l->next = all_loaders;
    all_loaders = l;
    (void)pthread_mutex_unlock(&loaders_mutex);
}

static void
unlist_loader(const mm_loader *l)
{
    (void)pthread_mutex_lock(&loaders_mutex);
    for (mm_loader **link = &all_loaders; *link != NULL; link = &(*link)->next) {
        if (*link == l) {
            *link = l->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&loaders_mutex);
}

mm_loader *
mm_loader_new(mm_driver *cu, int device, size_t budget, const void *owner, mm_status *st)
{
    mm_loader *l = calloc(1, sizeof *l);

    if (l == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for a working set");
        return NULL;
    }
    l->cu = cu;
    l->device = device;
    l->owner = owner;
    l->use_began = MM_NO_USE;
    mm_working_set_init(&l->set, budget);
    mm_turn_init(&l->turn);
    (void)pthread_mutex_init(&l->lock, NULL);
    (void)pthread_cond_init(&l->wanted, NULL);
    (void)pthread_cond_init(&l->issued_more, NULL);
    if (open_streams(l, st) < 0 || mm_loader_start_thread(l, st) < 0) {
        free_loader(l);
        return NULL;
    }
    list_loader(l);
    return l;
}

/* Restores the advice of as many groups as it can; the first failure is reported. */
static int
restore_groups(mm_loader *l, mm_status *st)
{
    mm_status later;
    int rc = 0;

    for (uint32_t i = 0; i < l->set.count; i++) {
        mm_working_memory *m = &l->groups[i]->memory;
        if (mm_working_memory_restore(l->cu, m, rc == 0 ? st : &later) < 0) {
            rc = -1;
        } else {
            mm_give_back_claim(m);
        }
    }
    return rc;
}

int
mm_loader_close(mm_loader *l, mm_status *st)
{
    int rc;

    mm_turn_take(&l->turn);
    rc = mm_loader_end_thread(l, st);
    if (rc == 0) {
        rc = restore_groups(l, st);
        free_driver_objects(l);
    }
    atomic_store(&l->has_ended, rc == 0);
    mm_turn_release(&l->turn);
    return rc;
}

bool
mm_loader_has_ended(const mm_loader *l)
{
    return atomic_load(&l->has_ended);
}

bool
mm_loader_is_closed(const mm_loader *l)
{
    return mm_guard_is_closed(&l->guard);
}

/* In a forked child the thread of the parent may have been changing all of it. */
void
mm_loader_end(mm_loader *l)
{
    mm_status ignored;

    if (mm_driver_forked()) {
        return;
    }
    if (mm_loader_close(l, &ignored) < 0) {
        MM_IGNORE(mm_loader_close(l, &ignored)); /* the second attempt; no caller is left */
    }
    for (uint32_t i = 0; i < l->set.count; i++) {
        l->groups[i]->memory.advised = false; /* the memory may end now */
        mm_give_back_claim(&l->groups[i]->memory);
    }
}

void
mm_loader_free(mm_loader *l)
{
    if (l == NULL || mm_driver_forked()) {
        return;
    }
    unlist_loader(l);
    mm_loader_end(l);
    if (!l->has_thread) {
        free_loader(l);
    }
}

void
mm_loaders_end(const void *owner)
{
    mm_status ignored;

    if (mm_driver_forked()) {
        return;
    }
    (void)pthread_mutex_lock(&loaders_mutex); /* so that no thread frees one */
    for (mm_loader *l = all_loaders; l != NULL; l = l->next) {
        if (l->owner == owner) {
            mm_turn_take(&l->turn);
            MM_IGNORE(mm_loader_end_thread(l, &ignored)); /* the process ends anyway */
            mm_turn_release(&l->turn);
        }
    }
    (void)pthread_mutex_unlock(&loaders_mutex);
}

/* --- groups ------------------------------------------------------------------------------- */

/* Makes the group known to the callers and the thread, which brings it home unless it is there. */
static int
publish_group(mm_loader *l, mm_loader_group *g, uint32_t *group, mm_status *st)
{
    size_t needed = (size_t)l->set.count + 1;
    int rc = -1;

    mm_loader_lock(l);
    l->groups = mm_grow(l->groups, &l->group_capacity, needed, sizeof(mm_loader_group *), st);
    if (l->group_capacity >= needed) {
        rc = mm_working_set_add(&l->set, g->memory.bytes, g->memory.access, g->was_home, st);
    }
    if (rc == 0) {
        *group = l->set.count - 1;
        l->groups[*group] = g;
        (void)pthread_cond_signal(&l->wanted);
    }
    mm_loader_unlock(l);
    return rc;
}

/* A new event, or that of a group that was removed. */
static int
provide_event(mm_loader *l, CUevent *event, mm_status *st)
{
    mm_loader_lock(l);
    *event = l->spare_count > 0 ? l->spare_events[--l->spare_count] : NULL;
    mm_loader_unlock(l);
    if (*event != NULL) {
        return 0;
    }
    MM_TRY_IN(mm_scope_enter_relaxed, l->device, l->cu, EventCreate, st, event,
              CU_EVENT_DISABLE_TIMING);
    return 0;
}

/* Keeps the event for another group, because a thread may be about to query it. Under the lock. */
static void
spare_event(mm_loader *l, mm_loader_group *g)
{
    size_t needed = l->spare_count + 1;
    mm_status ignored;

    l->spare_events =
        mm_grow(l->spare_events, &l->spare_capacity, needed, sizeof *l->spare_events, &ignored);
    if (g->done != NULL && l->spare_capacity >= needed) {
        l->spare_events[l->spare_count++] = g->done;
        g->done = NULL;
    }
}

/* Undone by the caller on failure. */
static int
advise_and_publish(mm_loader *l, mm_loader_group *g, uint32_t *group, mm_status *st)
{
    bool mapped = g->memory.bytes > l->set.budget;

    g->stream = l->streams[l->set.count % MM_LOAD_STREAMS];
    if (provide_event(l, &g->done, st) < 0
        || mm_working_memory_advise(l->cu, &g->memory, l->device, mapped, st) < 0) {
        return -1;
    }
    return publish_group(l, g, group, st);
}

/* All or nothing. In the turn. */
static int
place_group(mm_loader *l, mm_loader_group *g, uint32_t *group, mm_status *st)
{
    mm_status later;

    g->memory.set = l;
    g->memory.number = l->set.count;
    if (mm_claim_memory(&g->memory, st) < 0) {
        return -1;
    }
    if (advise_and_publish(l, g, group, st) < 0) {
        MM_IGNORE(mm_working_memory_restore(l->cu, &g->memory, &later)); /* st has the reason */
        mm_loader_lock(l);
        spare_event(l, g); /* it may be that of a removed group */
        mm_loader_unlock(l);
        destroy_event(l, &g->done); /* a new one that could not be kept */
        mm_give_back_claim(&g->memory);
        return -1;
    }
    return 0;
}

static int
add_in_turn(mm_loader *l, mm_loader_group *g, uint32_t *group, mm_status *st)
{
    if (mm_guard_is_closed(&l->guard)) {
        return mm_fail(st, MM_REFUSED, "WorkingSet is closed");
    }
    return place_group(l, g, group, st);
}

int
mm_loader_add(mm_loader *l, const mm_working_range *ranges, size_t count, mm_group_access access,
              bool at_home, uint32_t *group, mm_status *st)
{
    mm_loader_group *g = calloc(1, sizeof *g);
    int rc;

    if (g == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for a group");
    }
    g->was_home = at_home;
    rc = mm_working_memory_init(&g->memory, ranges, count, access, st);
    if (rc == 0) {
        mm_turn_take(&l->turn);
        rc = add_in_turn(l, g, group, st);
        mm_turn_release(&l->turn);
    }
    if (rc < 0) {
        mm_working_memory_free(&g->memory);
        free(g);
    }
    return rc;
}

int
mm_loader_give_order(mm_loader *l, const uint32_t *round, size_t count, mm_status *st)
{
    int rc;

    mm_loader_lock(l);
    rc = mm_working_order_give(&l->set.order, round, count, st);
    mm_loader_unlock(l);
    return rc;
}

/* --- uses --------------------------------------------------------------------------------- */

static void
wake_thread(mm_loader *l)
{
    if (l->sleeping && l->set.queued > 0) {
        (void)pthread_cond_signal(&l->wanted);
    }
}

/* Waits until the thread has queued the command of the ticket. */
static void
wait_until_issued(mm_loader *l, uint64_t ticket)
{
    mm_loader_lock(l);
    if (atomic_load(&l->awaited) < ticket) {
        atomic_store(&l->awaited, ticket);
    }
    while (atomic_load(&l->issued) < ticket) {
        (void)pthread_cond_wait(&l->issued_more, &l->lock);
    }
    mm_loader_unlock(l);
}

/* Makes the stream wait for the command of a ticket. */
static int
follow_ticket(mm_loader *l, const mm_loader_group *g, mm_device_stream stream, uint64_t ticket,
              mm_status *st)
{
    if (mm_loader_has_completed(l, ticket)) {
        return 0;
    }
    wait_until_issued(l, ticket);
    MM_TRY_IN(mm_scope_enter_stream, stream, l->cu, StreamWaitEvent, st, stream.handle, g->done,
              CU_EVENT_WAIT_DEFAULT);
    return 0;
}

static int
refuse_capture_of_use(mm_loader *l, mm_device_stream stream, const char *op, mm_status *st)
{
    mm_scope scope;
    int rc = mm_scope_enter_stream(&scope, l->cu, stream, st);

    if (rc == 0) {
        rc = mm_stream_refuse_capture(l->cu, stream.handle, op, st);
        mm_scope_leave(&scope);
    }
    return rc;
}

/* Under the lock. */
static int
refuse_removed(const mm_loader *l, uint32_t group, mm_status *st)
{
    return l->groups[group]->removal == MM_NOT_REMOVED
               ? 0
               : mm_fail(st, MM_REFUSED,
                         "group %u was removed from the working set: add its memory again", group);
}

/* The memory of a group that is removed may have ended with its guards. */
static mm_loader_group *
find_usable_group(mm_loader *l, uint32_t group, mm_status *st)
{
    mm_loader_group *found;

    mm_loader_lock(l);
    found = refuse_removed(l, group, st) == 0 ? l->groups[group] : NULL;
    if (found != NULL && mm_working_memory_check(&found->memory, st) < 0) {
        found = NULL;
    }
    mm_loader_unlock(l);
    return found;
}

/* The load behind an acquisition goes at once: it may be the next that the caller needs. Later ones give
 * way to the use. */
static void
note_use(mm_loader *l, uint64_t ticket)
{
    uint64_t issued = atomic_load(&l->issued);

    atomic_store(&l->use_began, issued > ticket ? issued : ticket);
}

static int
acquire_entered(mm_loader *l, uint32_t group, bool reads, mm_device_stream stream,
                mm_working_use *use, mm_status *st)
{
    mm_loader_group *g = find_usable_group(l, group, st);
    uint64_t ticket = 0;
    int rc;

    if (g == NULL || refuse_capture_of_use(l, stream, "the acquisition of a group", st) < 0) {
        return -1;
    }
    mm_loader_lock(l);
    rc = refuse_removed(l, group, st); /* it may have been removed meanwhile */
    if (rc == 0) {
        *use = mm_working_set_acquire(&l->set, group, reads && g->memory.access == MM_GROUP_WRITE,
                                      &ticket);
        note_use(l, ticket);
        wake_thread(l);
    }
    mm_loader_unlock(l);
    if (rc < 0) {
        return -1;
    }
    if (follow_ticket(l, g, stream, ticket, st) < 0) {
        atomic_store(&l->use_began, MM_NO_USE);
        mm_loader_lock(l);
        mm_working_set_give_back(&l->set, group);
        mm_loader_unlock(l);
        return -1;
    }
    return 0;
}

int
mm_loader_acquire(mm_loader *l, uint32_t group, bool reads, CUstream stream, mm_working_use *use,
                  mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&l->guard)) {
        return mm_fail(st, MM_REFUSED, "WorkingSet is closed");
    }
    rc = acquire_entered(l, group, reads, (mm_device_stream){stream, l->device}, use, st);
    mm_guard_leave(&l->guard);
    return rc;
}

static int
fail_unheld(uint32_t group, mm_status *st)
{
    return mm_fail(st, MM_REFUSED, "group %u is not acquired: nothing to release", group);
}

static int
refuse_unheld(mm_loader *l, uint32_t group, mm_status *st)
{
    bool held;

    mm_loader_lock(l);
    held = l->set.groups[group].held > 0;
    mm_loader_unlock(l);
    return held ? 0 : fail_unheld(group, st);
}

/* Releases the group with the recorded end of its use; NULL if that is not known. Another thread may
 * have released it meanwhile. */
static int
release_recorded(mm_loader *l, uint32_t group, mm_release_list *end, mm_status *st)
{
    mm_group_state *g;
    int rc = 0;

    atomic_store(&l->use_began, MM_NO_USE);
    mm_loader_lock(l);
    g = &l->set.groups[group];
    if (g->held == 0) {
        mm_release_keep(end, &l->pool);
        rc = fail_unheld(group, st);
    } else {
        l->groups[group]->uncertain = l->groups[group]->uncertain || end == NULL;
        mm_working_set_release(&l->set, group,
                               end ? mm_release_add(g->releases, end, &l->pool) : g->releases);
        wake_thread(l);
    }
    mm_loader_unlock(l);
    return rc;
}

static int
release_entered(mm_loader *l, uint32_t group, mm_device_stream stream, mm_status *st)
{
    mm_release_list *end;
    mm_status later;

    if (refuse_unheld(l, group, st) < 0) {
        return -1;
    }
    end = mm_release_record(l->cu, stream, &l->lock, &l->pool, st);
    if (end != NULL) {
        return release_recorded(l, group, end, st);
    }
    if (st->kind != MM_CAPTURING) {
        MM_IGNORE(release_recorded(l, group, NULL, &later)); /* st has the reason */
    }
    return -1;
}

int
mm_loader_release(mm_loader *l, uint32_t group, CUstream stream, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&l->guard)) {
        return 0; /* the set has ended, and all uses with it */
    }
    rc = release_entered(l, group, (mm_device_stream){stream, l->device}, st);
    mm_guard_leave(&l->guard);
    return rc;
}

int
mm_loader_release_unrecorded(mm_loader *l, uint32_t group, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&l->guard)) {
        return 0;
    }
    rc = release_recorded(l, group, NULL, st);
    mm_guard_leave(&l->guard);
    return rc;
}

/* --- removing ----------------------------------------------------------------------------- */

/* Takes the group out of the decisions, so that nothing new is queued for it. Under the lock. */
static int
begin_removal(mm_loader *l, uint32_t group, uint64_t *ticket, mm_status *st)
{
    mm_loader_group *g = l->groups[group];

    if (g->removal == MM_NOT_RESTORED) {
        g->removal = MM_BEING_REMOVED;
        return 0;
    }
    if (refuse_removed(l, group, st) < 0) {
        return -1;
    }
    if (l->set.groups[group].held > 0) {
        return mm_fail(st, MM_REFUSED,
                       "group %u is acquired: it can be removed once all its uses are released",
                       group);
    }
    if (mm_working_set_remove(&l->set, group, ticket, st) < 0) {
        return -1;
    }
    g->removal = MM_BEING_REMOVED;
    wake_thread(l);
    return 0;
}

/* Waits until the device has done what was queued for the group, or the set closes, which waits for it. */
static void
wait_until_done(mm_loader *l, const mm_loader_group *g, uint64_t ticket)
{
    uint64_t since = mm_monotonic_clock();
    mm_status ignored;
    mm_scope scope;
    int rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored);

    wait_until_issued(l, ticket);
    while (!mm_loader_has_completed(l, ticket) && !mm_guard_is_closed(&l->guard)
           && !mm_event_has_passed(l->cu, g->done)) {
        mm_loader_wait_awake(since);
    }
    if (rc == 0) {
        mm_scope_leave(&scope);
    }
}

/* The set's thread may wait for the end of a use behind the host function, which would wait for it. */
static int
refuse_in_host_function(mm_status *st)
{
    return mm_in_host_function()
               ? mm_fail_call(st, "cuCtxGetCurrent", (int)CUDA_ERROR_NOT_PERMITTED)
               : 0;
}

/* A set that was closed meanwhile has restored the advice, or does it here. In the turn. */
static int
end_removal(mm_loader *l, mm_loader_group *g, mm_status *st)
{
    int rc = mm_working_memory_restore(l->cu, &g->memory, st);

    if (rc == 0) {
        mm_give_back_claim(&g->memory);
    }
    mm_loader_lock(l);
    g->removal = rc == 0 ? MM_REMOVED : MM_NOT_RESTORED;
    if (rc == 0) {
        mm_working_memory_free(&g->memory);
        spare_event(l, g);
    }
    mm_loader_unlock(l);
    return rc;
}

int
mm_loader_remove(mm_loader *l, uint32_t group, mm_status *st)
{
    mm_loader_group *g;
    uint64_t ticket = 0;
    int rc;

    if (refuse_in_host_function(st) < 0) {
        return -1;
    }
    if (!mm_guard_enter(&l->guard)) {
        return mm_fail(st, MM_REFUSED, "WorkingSet is closed");
    }
    mm_loader_lock(l);
    g = l->groups[group];
    rc = begin_removal(l, group, &ticket, st);
    mm_loader_unlock(l);
    if (rc == 0 && ticket != 0) {
        wait_until_done(l, g, ticket);
    }
    mm_guard_leave(&l->guard); /* close() takes the turn, and then waits for the calls under way */
    if (rc == 0) {
        mm_turn_take(&l->turn);
        rc = end_removal(l, g, st);
        mm_turn_release(&l->turn);
    }
    return rc;
}

/* --- reports ------------------------------------------------------------------------------ */

void
mm_loader_read_report(mm_loader *l, mm_loader_report *report)
{
    mm_loader_lock(l);
    *report = l->report;
    report->decided = l->set.counts;
    report->reserved = mm_guard_is_closed(&l->guard) ? 0 : l->set.reserved;
    report->groups = l->set.live;
    mm_loader_unlock(l);
    report->physical = atomic_load(&l->physical);
}

/* True if the group's latest command with a ticket is done, as far as the driver says. */
static bool
is_group_done(mm_loader *l, CUevent done, uint64_t ticket)
{
    CUresult code = CUDA_ERROR_NOT_READY;
    mm_status ignored;
    mm_scope scope;

    if (atomic_load(&l->issued) < ticket || !mm_guard_enter(&l->guard)) {
        return false;
    }
    if (mm_loader_has_completed(l, ticket)) {
        code = CUDA_SUCCESS;
    } else if (mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored) == 0) {
        code = l->cu->EventQuery(done);
        mm_scope_leave(&scope);
    }
    mm_guard_leave(&l->guard);
    return code == CUDA_SUCCESS;
}

void
mm_loader_read_group(mm_loader *l, uint32_t group, mm_loader_group_report *report)
{
    const mm_group_state *g;
    uint64_t ticket;
    CUevent done;

    mm_loader_lock(l);
    done = l->groups[group]->done;
    g = &l->set.groups[group];
    *report = (mm_loader_group_report){.bytes = g->bytes,
                                       .resident = g->present,
                                       .held = g->held,
                                       .removed = l->groups[group]->removal != MM_NOT_REMOVED};
    ticket = g->ticket;
    mm_loader_unlock(l);
    report->resident = report->resident && is_group_done(l, done, ticket);
}
