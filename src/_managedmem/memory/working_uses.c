/* working_uses.c: the uses of groups: acquisitions and releases in the streams of the callers. */
#include "working_groups.h"

enum { MANY_RELEASES = 16 }; /* beside twice those that were seen to be under way */

/* Makes the stream wait for the command of a ticket. */
static int
follow_ticket(mm_loader *l, const mm_loader_group *g, mm_device_stream stream, uint64_t ticket,
              mm_status *st)
{
    if (mm_loader_has_completed(l, ticket)) {
        return 0;
    }
    mm_loader_wait_until_issued(l, ticket);
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

/* The memory of a group that is removed may have ended with its guards. */
static mm_loader_group *
find_usable_group(mm_loader *l, mm_group_id group, mm_status *st)
{
    mm_loader_group *found;

    mm_loader_lock(l);
    found = mm_loader_usable_group(l, group, st);
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
acquire_entered(mm_loader *l, mm_group_id group, bool reads, mm_device_stream stream,
                mm_working_use *use, mm_status *st)
{
    mm_loader_group *g = find_usable_group(l, group, st);
    uint64_t ticket = 0;

    if (g == NULL || refuse_capture_of_use(l, stream, "the acquisition of a group", st) < 0) {
        return -1;
    }
    mm_loader_lock(l);
    g = mm_loader_usable_group(l, group, st); /* it may have been removed meanwhile */
    if (g != NULL) {
        *use = mm_working_set_acquire(&l->set, group.place,
                                      reads && g->memory.access == MM_GROUP_WRITE, &ticket);
        note_use(l, ticket);
        mm_loader_wake_thread(l);
    }
    mm_loader_unlock(l);
    if (g == NULL) {
        return -1;
    }
    if (follow_ticket(l, g, stream, ticket, st) < 0) {
        atomic_store(&l->use_began, MM_NO_USE);
        mm_loader_lock(l);
        mm_working_set_give_back(&l->set, group.place);
        mm_loader_unlock(l);
        return -1;
    }
    return 0;
}

int
mm_loader_acquire(mm_loader *l, mm_group_id group, bool reads, CUstream stream,
                  mm_working_use *use, mm_status *st)
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
fail_unheld(mm_group_id group, mm_status *st)
{
    return mm_fail(st, MM_REFUSED, "group %llu is not acquired: nothing to release",
                   (unsigned long long)group.number);
}

/* Under the lock. */
static bool
is_held(const mm_loader *l, mm_group_id group)
{
    return mm_loader_find_group(l, group) != NULL && l->set.groups[group.place].held > 0;
}

static int
refuse_unheld(mm_loader *l, mm_group_id group, mm_status *st)
{
    bool held;

    mm_loader_lock(l);
    held = is_held(l, group);
    mm_loader_unlock(l);
    return held ? 0 : fail_unheld(group, st);
}

/* Releases the group with the recorded end of its use; NULL if that is not known. Another thread may
 * have released it meanwhile. */
static int
release_recorded(mm_loader *l, mm_group_id group, mm_release_list *end, mm_status *st)
{
    int rc = 0;

    atomic_store(&l->use_began, MM_NO_USE);
    mm_loader_lock(l);
    if (!is_held(l, group)) {
        mm_release_keep(end, &l->pool);
        rc = fail_unheld(group, st);
    } else {
        mm_loader_group *g = l->groups[group.place];
        mm_release_list *releases = l->set.groups[group.place].releases;
        g->uncertain = g->uncertain || end == NULL;
        mm_working_set_release(&l->set, group.place,
                               end ? mm_release_add(releases, end, &l->pool) : releases);
        mm_loader_wake_thread(l);
    }
    mm_loader_unlock(l);
    return rc;
}

/* Takes the whole list of ends of a group's uses, if it is long, and holds the group meanwhile, so that no
 * drop misses them. */
static mm_release_list *
take_many_releases(mm_loader *l, mm_group_id group)
{
    mm_release_list *taken = NULL;

    mm_loader_lock(l);
    if (is_held(l, group)) {
        mm_group_state *g = &l->set.groups[group.place];
        if (mm_releases_count(g->releases)
            >= MANY_RELEASES + 2 * l->groups[group.place]->ends_under_way) {
            taken = g->releases;
            g->releases = NULL;
            g->held++;
        }
    }
    mm_loader_unlock(l);
    return taken;
}

/* The ends of uses that have passed need not be waited for. A group that stays would have one for each
 * stream that ever used it. */
static void
forget_passed_releases(mm_loader *l, mm_group_id group)
{
    mm_release_list *left = take_many_releases(l, group), *passed = NULL;
    mm_status ignored;
    mm_scope scope;

    if (left == NULL) {
        return;
    }
    if (mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored) == 0) {
        passed = mm_releases_take_passed(l->cu, &left);
        mm_scope_leave(&scope);
    }
    mm_loader_lock(l);
    mm_release_keep(passed, &l->pool);
    l->groups[group.place]->ends_under_way = mm_releases_count(left);
    l->set.groups[group.place].releases =
        mm_releases_join(left, l->set.groups[group.place].releases);
    mm_working_set_give_back(&l->set, group.place);
    mm_loader_unlock(l);
}

static int
release_entered(mm_loader *l, mm_group_id group, mm_device_stream stream, mm_status *st)
{
    mm_release_list *end;
    mm_status later;

    if (refuse_unheld(l, group, st) < 0) {
        return -1;
    }
    forget_passed_releases(l, group);
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
mm_loader_release(mm_loader *l, mm_group_id group, CUstream stream, mm_status *st)
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
mm_loader_release_unrecorded(mm_loader *l, mm_group_id group, mm_status *st)
{
    int rc;

    if (!mm_guard_enter(&l->guard)) {
        return 0;
    }
    rc = release_recorded(l, group, NULL, st);
    mm_guard_leave(&l->guard);
    return rc;
}
