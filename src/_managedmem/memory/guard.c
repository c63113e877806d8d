/* guard.c: closing a guard; for assertions, the guards that each thread has entered. */
#include "guard.h"

#include <stddef.h>

#include "../driver/clock.h"
#include "../driver/context.h"

#define EXPORTS(state) (((state) & MM_GUARD_ALL_EXPORTS) / MM_GUARD_ONE_EXPORT)
#define CALLS(state) ((state) & MM_GUARD_ALL_CALLS)

/* --- the guards that a thread has entered, for assertions ---------------------------------- */

#ifndef NDEBUG
enum { MOST_RECORDED = 64 };

static _Thread_local unsigned entered;
static _Thread_local const mm_guard *entered_guards[MOST_RECORDED]; /* the first MOST_RECORDED */

void
mm_guard_note_entered(const mm_guard *g)
{
    if (entered < MOST_RECORDED) {
        entered_guards[entered] = g;
    }
    entered++;
}

/* Guards are left in any order. */
void
mm_guard_note_left(const mm_guard *g)
{
    unsigned count = entered < MOST_RECORDED ? entered : MOST_RECORDED;

    assert(entered > 0);
    for (unsigned i = 0; i < count; i++) {
        if (entered_guards[i] == g) {
            entered_guards[i] = entered_guards[count - 1];
            entered_guards[count - 1] = NULL;
            break;
        }
    }
    entered--;
}

static bool
is_recorded_guard(const mm_guard *g)
{
    for (unsigned i = 0; i < entered && i < MOST_RECORDED; i++) {
        if (entered_guards[i] == g) {
            return true;
        }
    }
    return false;
}

/* Also true if more guards are entered than are recorded: this guard may be among the rest. */
bool
mm_guard_is_entered(const mm_guard *g)
{
    return is_recorded_guard(g) || entered > MOST_RECORDED;
}

unsigned
mm_guards_entered(void)
{
    return entered;
}
#endif

/* --- the state word ---------------------------------------------------------------------- */

static void
wait_for_calls(mm_guard *g)
{
    for (int round = 0; CALLS(atomic_load_explicit(&g->state, memory_order_acquire)) > 0;
         round++) {
        mm_pause(round);
    }
}

mm_guard_answer
mm_guard_close(mm_guard *g, bool forked)
{
    uint64_t state = atomic_load(&g->state);

    assert(forked || !is_recorded_guard(g)); /* the thread would wait for itself */
    do {
        if (state & MM_GUARD_CLOSED) {
            return MM_CLOSED_BEFORE;
        }
        if (EXPORTS(state) > 0) {
            return MM_STILL_EXPORTED;
        }
        if (CALLS(state) > 0 && !forked && mm_in_host_function()) {
            return MM_STILL_USED;
        }
    } while (!atomic_compare_exchange_weak(&g->state, &state, state | MM_GUARD_CLOSED));
    if (!forked) {
        wait_for_calls(g);
    }
    return MM_CLOSED_NOW;
}

int
mm_fail_still_used(mm_status *st)
{
    (void)mm_fail_call(st, "cuCtxGetCurrent", CUDA_ERROR_NOT_PERMITTED);
    mm_status_add(
        st, "Another thread is in a call with this object, and may wait for the host function");
    return -1;
}

void
mm_guard_reopen(mm_guard *g)
{
    assert(mm_guard_is_closed(g));
    atomic_fetch_and(&g->state, ~MM_GUARD_CLOSED);
}

unsigned
mm_guard_exports(const mm_guard *g)
{
    return (unsigned)EXPORTS(atomic_load_explicit(&g->state, memory_order_acquire));
}
