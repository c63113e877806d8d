/* guard.c: the state word: bit 63 closed, bits 32 to 62 exports, bits 0 to 31 calls under way. */
#include "guard.h"

#include <assert.h>
#include <sched.h>
#include <stddef.h>
#include <time.h>

#define CLOSED ((uint64_t)1 << 63)
#define ONE_EXPORT ((uint64_t)1 << 32)
#define ONE_CALL ((uint64_t)1)
#define EXPORTS(state) (((state) & ~CLOSED) >> 32)
#define CALLS(state) ((state) & 0xffffffffu)

/* --- what this thread is in, for assertions ----------------------------------------------- */

#ifndef NDEBUG
enum { MOST_KNOWN = 64 };

static _Thread_local unsigned entered;
static _Thread_local const mm_guard *known[MOST_KNOWN]; /* the first ones */

static void
note_entered(const mm_guard *g)
{
    if (entered < MOST_KNOWN) {
        known[entered] = g;
    }
    entered++;
}

/* Guards are left in any order. */
static void
note_left(const mm_guard *g)
{
    unsigned count = entered < MOST_KNOWN ? entered : MOST_KNOWN;

    assert(entered > 0);
    for (unsigned i = 0; i < count; i++) {
        if (known[i] == g) {
            known[i] = known[count - 1];
            known[count - 1] = NULL;
            break;
        }
    }
    entered--;
}

static bool
is_in(const mm_guard *g)
{
    for (unsigned i = 0; i < entered && i < MOST_KNOWN; i++) {
        if (known[i] == g) {
            return true;
        }
    }
    return false;
}

unsigned
mm_guards_entered(void)
{
    return entered;
}
#else
#define note_entered(g) ((void)(g))
#define note_left(g) ((void)(g))

unsigned
mm_guards_entered(void)
{
    return 0;
}
#endif

/* --- the state word ---------------------------------------------------------------------- */

static bool
add_user(mm_guard *g, uint64_t one)
{
    uint64_t state = atomic_load_explicit(&g->state, memory_order_relaxed);

    do {
        if (state & CLOSED) {
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(&g->state, &state, state + one,
                                                    memory_order_acquire, memory_order_relaxed));
    return true;
}

bool
mm_guard_enter(mm_guard *g)
{
    if (!add_user(g, ONE_CALL)) {
        return false;
    }
    note_entered(g);
    return true;
}

bool
mm_guard_export(mm_guard *g)
{
    return add_user(g, ONE_EXPORT);
}

void
mm_guard_leave(mm_guard *g)
{
    note_left(g);
    atomic_fetch_sub_explicit(&g->state, ONE_CALL, memory_order_release);
}

void
mm_guard_unexport(mm_guard *g)
{
    atomic_fetch_sub_explicit(&g->state, ONE_EXPORT, memory_order_release);
}

static void
wait_for_calls(mm_guard *g)
{
    const struct timespec nap = {.tv_nsec = 50000};

    for (int round = 0; CALLS(atomic_load_explicit(&g->state, memory_order_acquire)) > 0;
         round++) {
        if (round < 100) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&nap, NULL);
        }
    }
}

mm_guard_answer
mm_guard_close(mm_guard *g, bool forked)
{
    uint64_t state = atomic_load(&g->state);

    assert(forked || !is_in(g)); /* it would wait for itself */
    do {
        if (state & CLOSED) {
            return MM_CLOSED_BEFORE;
        }
        if (EXPORTS(state) > 0) {
            return MM_STILL_EXPORTED;
        }
    } while (!atomic_compare_exchange_weak(&g->state, &state, state | CLOSED));
    if (!forked) {
        wait_for_calls(g);
    }
    return MM_CLOSED_NOW;
}

void
mm_guard_reopen(mm_guard *g)
{
    atomic_fetch_and(&g->state, ~CLOSED);
}

bool
mm_guard_is_closed(const mm_guard *g)
{
    return (atomic_load_explicit(&g->state, memory_order_acquire) & CLOSED) != 0;
}

unsigned
mm_guard_exports(const mm_guard *g)
{
    return (unsigned)EXPORTS(atomic_load_explicit(&g->state, memory_order_acquire));
}
