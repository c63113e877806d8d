/* working_thread.c: the thread of a working set: commands, the waits for their tickets, its sleep. */
#include "working_thread.h"

#include <assert.h>
#include <string.h>
#include <sys/prctl.h>

#include "../driver/clock.h"

#define AWAKE_NS UINT64_C(1000000) /* after the last command */
#define YIELDING_NS UINT64_C(200000) /* of these, without naps */
#define MOST_GIVE_WAY_NS UINT64_C(500000) /* the longest wait of a load for a caller */

/* --- tickets ------------------------------------------------------------------------------ */

static void
complete_tickets(mm_loader *l, uint64_t ticket)
{
    if (ticket > atomic_load(&l->completed)) {
        atomic_store_explicit(&l->completed, ticket, memory_order_release);
    }
}

/* Keeps the failure of a call of the thread. */
static void
note_failure(mm_loader *l, const mm_status *st)
{
    mm_loader_lock(l);
    l->report.failures++;
    l->report.error = *st;
    mm_loader_unlock(l);
}

/* True once the stream has nothing to do. One that fails twice counts as idle: a wait would not end. */
static bool
is_stream_idle(mm_loader *l, CUstream stream)
{
    CUresult code = l->cu->StreamQuery(stream);

    if (code != CUDA_SUCCESS && code != CUDA_ERROR_NOT_READY) {
        code = l->cu->StreamQuery(stream);
    }
    return code != CUDA_ERROR_NOT_READY;
}

static bool
is_idle(mm_loader *l)
{
    for (size_t i = 0; i < MM_LOAD_STREAMS; i++) {
        if (!is_stream_idle(l, l->streams[i])) {
            return false;
        }
    }
    return is_stream_idle(l, l->away);
}

void
mm_loader_wait_awake(uint64_t since)
{
    const struct timespec nap = {.tv_nsec = 10000};

    if (mm_monotonic_clock() - since < YIELDING_NS) {
        (void)sched_yield();
    } else {
        (void)nanosleep(&nap, NULL);
    }
}

/* Waits until all that the thread has queued is done. */
static void
wait_until_idle(mm_loader *l)
{
    uint64_t since = mm_monotonic_clock(), issued = atomic_load(&l->issued);

    while (!is_idle(l)) {
        mm_loader_wait_awake(since);
    }
    complete_tickets(l, issued);
}

/* Puts streams of the thread in order. If the driver refuses, the thread waits for them instead. */
static void
order_or_wait(mm_loader *l, CUresult code, const char *call)
{
    mm_status st = {.kind = MM_OK};

    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(&st, call, (int)code);
        note_failure(l, &st);
        wait_until_idle(l);
    }
}

static void
signal_ticket(mm_loader *l, mm_loader_group *g, CUstream stream, uint64_t ticket)
{
    order_or_wait(l, l->cu->EventRecord(g->done, stream), "cuEventRecord");
    mm_loader_lock(l);
    atomic_store(&l->issued, ticket);
    (void)pthread_cond_broadcast(&l->issued_more);
    mm_loader_unlock(l);
}

/* --- commands: the thread, in a scope of its device --------------------------------------- */

static void
count_physical(mm_loader *l, mm_loader_group *g, bool on_device)
{
    if (on_device && !g->on_device) {
        atomic_fetch_add(&l->physical, g->memory.bytes);
    } else if (!on_device && g->on_device) {
        atomic_fetch_sub(&l->physical, g->memory.bytes);
    }
    g->on_device = on_device;
}

/* Drops a group, or brings it home with its contents. Tries twice. What fails stays counted. */
static void
take_away(mm_loader *l, mm_loader_group *g, bool with_contents)
{
    mm_status st = {.kind = MM_OK};
    int rc = -1;

    for (int attempt = 0; rc < 0 && attempt < 2; attempt++) {
        rc = with_contents ? mm_working_memory_home(l->cu, &g->memory, g->copied, l->away, &st)
                           : mm_working_memory_drop(l->cu, &g->memory, l->away, &st);
        if (rc < 0) {
            note_failure(l, &st);
        }
    }
    /* Else it was advice, which queues nothing. */
    if (with_contents || g->memory.access != MM_GROUP_READ) {
        order_or_wait(l, l->cu->EventRecord(l->left, l->away), "cuEventRecord");
        l->away_is_busy = true;
    }
    g->left_over = rc < 0;
    g->copied = g->copied && rc < 0;
    g->leaving = true;
    g->was_home = g->was_home || rc == 0;
    count_physical(l, g, rc < 0);
}

/* True if the device has a copy only, which a drop by advice removes. */
static bool
has_copy_at_home(const mm_loader_group *g)
{
    return g->memory.access == MM_GROUP_READ && g->was_home;
}

/* The first group from the place *i on of which something is left on the device; NULL if there is none.
 * It lives until its removal, which is a command. */
static mm_loader_group *
next_left_over(mm_loader *l, uint32_t *i)
{
    mm_loader_group *found = NULL;

    mm_loader_lock(l);
    while (*i < l->set.order.count && (l->groups[*i] == NULL || !l->groups[*i]->left_over)) {
        ++*i;
    }
    if (*i < l->set.order.count) {
        found = l->groups[*i];
    }
    mm_loader_unlock(l);
    return found;
}

/* Drops what earlier drops left on the device. First waits for loads that no use has followed. */
static void
try_left_overs(mm_loader *l)
{
    mm_loader_group *g;

    wait_until_idle(l);
    for (uint32_t i = 0; (g = next_left_over(l, &i)) != NULL; i++) {
        take_away(l, g, !has_copy_at_home(g));
    }
}

/* True if the contents are at home, and no copy is in the way of uses that write. */
static bool
can_load(const mm_loader_group *g, bool copy)
{
    return g->was_home && (copy || !g->copied);
}

/* Makes the load wait for what leaves. A stream that waits is not idle, which makes a load start late. */
static void
follow_what_leaves(mm_loader *l, const mm_loader_group *g)
{
    if (l->away_is_busy && l->cu->EventQuery(l->left) == CUDA_SUCCESS) {
        l->away_is_busy = false;
    }
    if (l->away_is_busy) {
        order_or_wait(l, l->cu->StreamWaitEvent(g->stream, l->left, CU_EVENT_WAIT_DEFAULT),
                      "cuStreamWaitEvent");
    }
}

/* Pages that go home while they are read_mostly would stay on the device too. */
static void
wait_until_home(mm_loader *l, mm_loader_group *g)
{
    uint64_t since = mm_monotonic_clock();

    while (g->leaving && !is_stream_idle(l, l->away)) {
        mm_loader_wait_awake(since);
    }
    g->leaving = false;
}

/* True while a caller uses a group that it acquired before the latest load, and none waits for a load. */
static bool
is_in_the_way(const mm_loader *l)
{
    uint64_t issued = atomic_load(&l->issued);

    return issued > atomic_load(&l->use_began) && issued >= atomic_load(&l->awaited)
           && !mm_guard_is_closed(&l->guard);
}

/* Leaves the lock of the context to the caller, who has lost it to one load. A prefetch keeps that
 * lock, and a kernel launch that sleeps for it wakes up after the next prefetch has taken it. */
static void
give_way(const mm_loader *l)
{
    const struct timespec nap = {.tv_nsec = 10000};
    uint64_t since = mm_monotonic_clock();
    uint64_t most = 2 * l->call_ns < MOST_GIVE_WAY_NS ? 2 * l->call_ns : MOST_GIVE_WAY_NS;

    while (is_in_the_way(l) && mm_monotonic_clock() - since < most) {
        (void)nanosleep(&nap, NULL);
    }
}

/* Measures the load for the next give_way(). */
static int
load_and_measure(mm_loader *l, mm_loader_group *g, bool copy, mm_status *st)
{
    uint64_t since = mm_monotonic_clock();
    int rc = mm_working_memory_load(l->cu, &g->memory, l->device, copy, g->stream, st);

    l->call_ns = mm_monotonic_clock() - since;
    return rc;
}

/* The bytes on the device stay within the budget also after a drop that failed. */
static int
load_within_budget(mm_loader *l, mm_loader_group *g, bool copy, mm_status *st)
{
    size_t bytes;

    if (!can_load(g, copy)) {
        take_away(l, g, true);
    }
    bytes = g->on_device ? 0 : g->memory.bytes;
    if (atomic_load(&l->physical) + bytes > l->set.budget) {
        try_left_overs(l);
    }
    if (!can_load(g, copy) || atomic_load(&l->physical) + bytes > l->set.budget) {
        return mm_fail(st, MM_REFUSED,
                       "a group of %zu bytes was not loaded, because memory that should have left "
                       "the device is still there",
                       g->memory.bytes);
    }
    g->left_over = false;
    count_physical(l, g, true);
    follow_what_leaves(l, g);
    if (copy) {
        wait_until_home(l, g);
        g->copied = true;
    }
    return load_and_measure(l, g, copy, st);
}

static void
run_load(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    mm_status st = {.kind = MM_OK};
    int rc;

    give_way(l);
    rc = load_within_budget(l, g, command->copy, &st);
    if (rc < 0) {
        note_failure(l, &st);
        wait_until_idle(l); /* for the part that is loaded, and for a discard before the load */
        if (g->on_device) {
            take_away(l, g, !has_copy_at_home(g));
        }
    }
    mm_loader_lock(l);
    l->report.loads++;
    l->report.bytes_loaded += rc == 0 ? g->memory.bytes : 0;
    if (rc < 0) {
        mm_working_set_lost(&l->set, command->group, command->ticket);
    }
    mm_loader_unlock(l);
}

/* Waits for the load, which nobody may have used, and the ends of the uses. False if the set closes
 * meanwhile: it waits for its callers, who may wait for the next command. */
static bool
wait_for_uses(mm_loader *l, const mm_loader_group *g, const mm_release_list *releases)
{
    uint64_t since = mm_monotonic_clock();

    while (!mm_event_has_passed(l->cu, g->done) || !mm_releases_have_passed(l->cu, releases)) {
        if (mm_guard_is_closed(&l->guard)) {
            return false;
        }
        mm_loader_wait_awake(since);
    }
    return true;
}

/* True if the contents are to go home: nothing may be discarded that a use may still need, also the
 * first one. */
static bool
keeps_contents(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    bool keeps;

    mm_loader_lock(l);
    mm_release_keep(command->releases, &l->pool);
    keeps = g->memory.access == MM_GROUP_WRITE || g->uncertain || !g->was_home || command->unused;
    mm_loader_unlock(l);
    return keeps && !has_copy_at_home(g);
}

static void
run_drop(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    bool passed = wait_for_uses(l, g, command->releases);
    bool with_contents = keeps_contents(l, g, command), copied = g->copied;

    g->left_over = !passed && g->on_device;
    if (passed && g->on_device) {
        take_away(l, g, with_contents);
        mm_loader_lock(l);
        l->report.bytes_home += with_contents && !copied && !g->left_over ? g->memory.bytes : 0;
        mm_loader_unlock(l);
    }
}

/* The ticket comes behind the loads of the group, and behind all that leaves the device. */
static void
run_removal(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    mm_loader_lock(l);
    mm_release_keep(command->releases, &l->pool);
    mm_loader_unlock(l);
    order_or_wait(l, l->cu->StreamWaitEvent(g->stream, l->left, CU_EVENT_WAIT_DEFAULT),
                  "cuStreamWaitEvent");
}

static void
run_in_scope(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    bool brings = command->kind == MM_COMMAND_LOAD || command->kind == MM_COMMAND_REMOVE;
    CUstream stream = brings ? g->stream : l->away;

    switch (command->kind) {
    case MM_COMMAND_HOME:
        take_away(l, g, true);
        break;
    case MM_COMMAND_DROP:
        run_drop(l, g, command);
        break;
    case MM_COMMAND_REMOVE:
        run_removal(l, g, command);
        break;
    default:
        run_load(l, g, command);
        break;
    }
    if (command->ticket != 0) {
        signal_ticket(l, g, stream, command->ticket);
    }
}

/* A set that is closed carries out nothing more: its groups stay where they are. Its callers go on, on
 * streams that follow what was queued for the group before. */
static void
pass_over(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    g->left_over = g->on_device; /* in case the set could not be closed */
    mm_loader_lock(l);
    mm_release_keep(command->releases, &l->pool);
    if (command->kind == MM_COMMAND_LOAD) {
        mm_working_set_lost(&l->set, command->group, command->ticket);
    }
    if (command->ticket != 0) {
        atomic_store(&l->issued, command->ticket);
        (void)pthread_cond_broadcast(&l->issued_more);
    }
    mm_loader_unlock(l);
}

/* Without a scope the group stays where it is, and what is queued is waited for instead. */
static void
fail_command(mm_loader *l, mm_loader_group *g, const mm_working_command *command,
             const mm_status *st)
{
    note_failure(l, st);
    mm_loader_lock(l);
    mm_release_keep(command->releases, &l->pool);
    if (command->kind == MM_COMMAND_LOAD) {
        mm_working_set_lost(&l->set, command->group, command->ticket);
    }
    mm_loader_unlock(l);
    count_physical(l, g, g->on_device || command->kind == MM_COMMAND_HOME);
    g->left_over = g->on_device;
    if (command->kind == MM_COMMAND_REMOVE) {
        wait_until_idle(l);
    }
    if (command->ticket != 0) {
        signal_ticket(l, g, l->away, command->ticket);
    }
}

static void
run_command(mm_loader *l, mm_loader_group *g, const mm_working_command *command)
{
    mm_status st = {.kind = MM_OK};
    mm_scope scope;

    if (command->kind == MM_COMMAND_REMOVE) {
        g->left_over = false;
        count_physical(l, g, false); /* its pages are no longer the set's, wherever they are */
    }
    if (mm_guard_is_closed(&l->guard)) {
        pass_over(l, g, command);
    } else if (mm_scope_enter_relaxed(&scope, l->cu, l->device, &st) < 0) {
        fail_command(l, g, command, &st);
    } else {
        run_in_scope(l, g, command);
        mm_scope_leave(&scope);
    }
}

/* --- the thread --------------------------------------------------------------------------- */

/* In a scope that a capture of another thread does not disturb. Without one the thread may sleep, but
 * nothing is known to be done. */
static bool
poll_streams(mm_loader *l)
{
    uint64_t issued = atomic_load(&l->issued);
    mm_status ignored;
    mm_scope scope;
    bool idle;

    if (mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored) < 0) {
        return true;
    }
    idle = is_idle(l);
    mm_scope_leave(&scope);
    if (idle) {
        complete_tickets(l, issued);
    }
    return idle;
}

/* Between commands: stays awake for a while, then sleeps until there is one. */
static void
rest(mm_loader *l, uint64_t since)
{
    bool done = atomic_load(&l->completed) >= atomic_load(&l->issued) || poll_streams(l);

    if (!done || mm_monotonic_clock() - since < AWAKE_NS) {
        mm_loader_wait_awake(since);
        return;
    }
    mm_loader_lock(l);
    while (l->set.queued == 0 && !l->ending) {
        l->sleeping = true;
        (void)pthread_cond_wait(&l->wanted, &l->lock);
        l->sleeping = false;
    }
    mm_loader_unlock(l);
}

/* Waits for what the streams have to do. */
static void
finish_streams(mm_loader *l)
{
    mm_status ignored;
    mm_scope scope;
    int rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored);

    wait_until_idle(l);
    if (rc == 0) {
        mm_scope_leave(&scope);
    }
}

static void *
run_loader(void *argument)
{
    mm_loader *l = argument;
    uint64_t since = mm_monotonic_clock();

    (void)prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* for short naps */
    for (;;) {
        mm_working_command command = {.group = MM_NO_GROUP};
        mm_loader_group *g = NULL;
        bool taken, ending;
        mm_loader_lock(l);
        taken = mm_working_set_take(&l->set, &command);
        g = taken ? l->groups[command.group] : NULL;
        ending = l->ending;
        mm_loader_unlock(l);
        if (taken) {
            run_command(l, g, &command);
            since = mm_monotonic_clock();
        } else if (ending) {
            break;
        } else {
            rest(l, since);
        }
    }
    finish_streams(l);
    return NULL;
}

/* --- for the callers -------------------------------------------------------------------- */

void
mm_loader_wake_thread(mm_loader *l)
{
    if (l->sleeping && l->set.queued > 0) {
        (void)pthread_cond_signal(&l->wanted);
    }
}

void
mm_loader_wait_until_issued(mm_loader *l, uint64_t ticket)
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

/* --- start and end -------------------------------------------------------------------------- */

int
mm_loader_start_thread(mm_loader *l, mm_status *st)
{
    if (mm_thread_start(&l->thread, run_loader, l, "the working set", st) < 0) {
        return -1;
    }
    l->has_thread = true;
    return 0;
}

int
mm_loader_end_thread(mm_loader *l, mm_status *st)
{
    if (!l->has_thread) {
        return 0;
    }
    if (mm_guard_close(&l->guard, false) == MM_STILL_USED) {
        return mm_fail_still_used(st);
    }
    mm_loader_lock(l);
    l->ending = true;
    (void)pthread_cond_signal(&l->wanted);
    mm_loader_unlock(l);
    (void)pthread_join(l->thread, NULL);
    l->has_thread = false;
    return 0;
}
