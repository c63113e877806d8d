/* working_groups.c: the groups of a working set at work: adding, ordering and removing them. */
#include "working_groups.h"

#include <stdlib.h>

#include "../driver/clock.h"
#include "growth.h"
#include "working_claims.h"

/* --- events ------------------------------------------------------------------------------- */

/* A new event, or that of a group that was removed. In the turn. */
static int
provide_event(mm_loader *l, CUevent *event, mm_status *st)
{
    size_t needed = l->events + 1;

    mm_loader_lock(l);
    *event = l->spare_count > 0 ? l->spare_events[--l->spare_count] : NULL;
    l->spare_events =
        mm_grow(l->spare_events, &l->spare_capacity, needed, sizeof *l->spare_events, st);
    mm_loader_unlock(l);
    if (*event != NULL) {
        return 0;
    }
    if (l->spare_capacity < needed) {
        return -1;
    }
    MM_TRY_IN(mm_scope_enter_relaxed, l->device, l->cu, EventCreate, st, event,
              CU_EVENT_DISABLE_TIMING);
    l->events++;
    return 0;
}

/* Keeps the event for another group, because a thread may be about to query it. A set that is closed has
 * destroyed it. Under the lock. */
static void
spare_event(mm_loader *l, mm_loader_group *g)
{
    if (g->done != NULL) {
        l->spare_events[l->spare_count++] = g->done;
        g->done = NULL;
    }
}

/* --- adding ------------------------------------------------------------------------------- */

/* Makes the group known to the callers and the thread, which brings it home unless it is there. */
static int
publish_group(mm_loader *l, mm_loader_group *g, mm_group_id *group, mm_status *st)
{
    size_t needed = (size_t)l->set.order.count + 1;
    int rc = -1;

    mm_loader_lock(l);
    l->groups = mm_grow(l->groups, &l->group_capacity, needed, sizeof(mm_loader_group *), st);
    if (l->group_capacity >= needed) {
        rc = mm_working_set_add(&l->set, g->memory.bytes, g->memory.access, g->was_home, st);
    }
    if (rc == 0) {
        *group = (mm_group_id){g->memory.number, l->set.order.newest};
        l->groups[group->place] = g;
        l->added++;
        (void)pthread_cond_signal(&l->wanted);
    }
    mm_loader_unlock(l);
    return rc;
}

/* Undone by the caller on failure. */
static int
advise_and_publish(mm_loader *l, mm_loader_group *g, mm_group_id *group, mm_status *st)
{
    bool mapped = g->memory.bytes > l->set.budget;

    g->stream = l->streams[l->added % MM_LOAD_STREAMS];
    if (provide_event(l, &g->done, st) < 0
        || mm_working_memory_advise(l->cu, &g->memory, l->device, mapped, st) < 0) {
        return -1;
    }
    return publish_group(l, g, group, st);
}

/* All or nothing. In the turn. */
static int
place_group(mm_loader *l, mm_loader_group *g, mm_group_id *group, mm_status *st)
{
    mm_status later;

    g->memory.set = l;
    g->memory.number = l->added;
    if (mm_claim_memory(&g->memory, st) < 0) {
        return -1;
    }
    if (advise_and_publish(l, g, group, st) < 0) {
        MM_IGNORE(mm_working_memory_restore(l->cu, &g->memory, &later)); /* st has the reason */
        mm_loader_lock(l);
        spare_event(l, g);
        mm_loader_unlock(l);
        mm_give_back_claim(&g->memory);
        return -1;
    }
    return 0;
}

static int
add_in_turn(mm_loader *l, mm_loader_group *g, mm_group_id *group, mm_status *st)
{
    if (mm_guard_is_closed(&l->guard)) {
        return mm_fail(st, MM_REFUSED, "WorkingSet is closed");
    }
    return place_group(l, g, group, st);
}

int
mm_loader_add(mm_loader *l, const mm_working_range *ranges, size_t count, mm_group_access access,
              bool at_home, mm_group_id *group, mm_status *st)
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
mm_loader_give_order(mm_loader *l, const mm_group_id *round, size_t count, mm_status *st)
{
    uint32_t *places = malloc((count + 1) * sizeof *places);
    size_t left = 0;
    int rc;

    if (places == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for an order of %zu groups", count);
    }
    mm_loader_lock(l);
    for (size_t i = 0; i < count; i++) {
        if (mm_loader_find_group(l, round[i]) != NULL) {
            places[left++] = round[i].place;
        }
    }
    rc = mm_working_order_give(&l->set.order, places, left, st);
    mm_loader_unlock(l);
    free(places);
    return rc;
}

/* --- removing ----------------------------------------------------------------------------- */

mm_loader_group *
mm_loader_find_group(const mm_loader *l, mm_group_id group)
{
    mm_loader_group *found = group.place < l->set.order.count ? l->groups[group.place] : NULL;

    return found != NULL && found->memory.number == group.number ? found : NULL;
}

static mm_loader_group *
fail_removed(mm_group_id group, mm_status *st)
{
    (void)mm_fail(st, MM_REFUSED,
                  "group %llu was removed from the working set: add its memory again",
                  (unsigned long long)group.number);
    return NULL;
}

mm_loader_group *
mm_loader_usable_group(const mm_loader *l, mm_group_id group, mm_status *st)
{
    mm_loader_group *found = mm_loader_find_group(l, group);

    return found != NULL && found->removal == MM_NOT_REMOVED ? found : fail_removed(group, st);
}

/* Takes the group out of the decisions, so that nothing new is queued for it. NULL on failure. Under the
 * lock. */
static mm_loader_group *
begin_removal(mm_loader *l, mm_group_id group, uint64_t *ticket, mm_status *st)
{
    mm_loader_group *g = mm_loader_find_group(l, group);

    if (g == NULL || g->removal == MM_BEING_REMOVED) {
        return fail_removed(group, st);
    }
    if (g->removal == MM_NOT_RESTORED) {
        g->removal = MM_BEING_REMOVED;
        return g;
    }
    if (l->set.groups[group.place].held > 0) {
        (void)mm_fail(st, MM_REFUSED,
                      "group %llu is acquired: it can be removed once all its uses are released",
                      (unsigned long long)group.number);
        return NULL;
    }
    if (mm_working_set_remove(&l->set, group.place, ticket, st) < 0) {
        return NULL;
    }
    g->removal = MM_BEING_REMOVED;
    mm_loader_wake_thread(l);
    return g;
}

/* Waits until the device has done what was queued for the group, or the set closes, which waits for it. */
static void
wait_until_done(mm_loader *l, const mm_loader_group *g, uint64_t ticket)
{
    uint64_t since = mm_monotonic_clock();
    mm_status ignored;
    mm_scope scope;
    int rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored);

    mm_loader_wait_until_issued(l, ticket);
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

/* A set that was closed meanwhile has restored the advice, or does it here. Frees the group. In the turn. */
static int
end_removal(mm_loader *l, mm_loader_group *g, uint32_t place, mm_status *st)
{
    int rc = mm_working_memory_restore(l->cu, &g->memory, st);

    if (rc < 0) {
        mm_loader_lock(l);
        g->removal = MM_NOT_RESTORED;
        mm_loader_unlock(l);
        return -1;
    }
    mm_give_back_claim(&g->memory);
    mm_loader_lock(l);
    spare_event(l, g);
    l->groups[place] = NULL;
    mm_working_set_vacate(&l->set, place);
    mm_loader_unlock(l);
    mm_working_memory_free(&g->memory);
    free(g);
    return 0;
}

int
mm_loader_remove(mm_loader *l, mm_group_id group, mm_status *st)
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
    g = begin_removal(l, group, &ticket, st);
    mm_loader_unlock(l);
    if (g != NULL && ticket != 0) {
        wait_until_done(l, g, ticket);
    }
    mm_guard_leave(&l->guard); /* close() takes the turn, and then waits for the calls under way */
    if (g == NULL) {
        return -1;
    }
    mm_turn_take(&l->turn);
    rc = end_removal(l, g, group.place, st);
    mm_turn_release(&l->turn);
    return rc;
}
