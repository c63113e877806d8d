/* guard.h: one word that keeps a resource alive while it is used, and lets it be closed once.
 *
 * Calls under way are short (a driver call that queues work), and closing waits for them. Exports
 * live as long as their Python objects, and make closing fail. Works from every thread, with or
 * without a GIL, and holds no lock. */
#ifndef MM_GUARD_H
#define MM_GUARD_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../driver/status.h"

/* Bit 63: closed; bits 32 to 62: exports; bits 0 to 31: calls under way. */
typedef struct {
    _Atomic uint64_t state;
} mm_guard;

#define MM_GUARD_CLOSED ((uint64_t)1 << 63)
#define MM_GUARD_ONE_EXPORT ((uint64_t)1 << 32)
#define MM_GUARD_ONE_CALL ((uint64_t)1)
#define MM_GUARD_ALL_EXPORTS (MM_GUARD_CLOSED - MM_GUARD_ONE_EXPORT)
#define MM_GUARD_ALL_CALLS (MM_GUARD_ONE_EXPORT - MM_GUARD_ONE_CALL)

/* The guards that the calling thread has entered, for assertions. */
#ifndef NDEBUG
void mm_guard_note_entered(const mm_guard *g);
void mm_guard_note_left(const mm_guard *g);
bool mm_guard_is_entered(const mm_guard *g);
unsigned mm_guards_entered(void); /* their number */
#else
#define mm_guard_note_entered(g) ((void)(g))
#define mm_guard_note_left(g) ((void)(g))
#endif

/* Inline, because every call enters and leaves. */
static inline bool
mm_guard_add_user(mm_guard *g, uint64_t one)
{
    uint64_t state = atomic_load_explicit(&g->state, memory_order_relaxed);

    do {
        if (state & MM_GUARD_CLOSED) {
            return false;
        }
        assert((state & MM_GUARD_ALL_CALLS) < MM_GUARD_ALL_CALLS);
    } while (!atomic_compare_exchange_weak_explicit(&g->state, &state, state + one,
                                                    memory_order_acquire, memory_order_relaxed));
    return true;
}

/* mm_guard_enter and mm_guard_export return false if the resource is closed. The thread that
 * enters also leaves, and runs no Python code in between: that could close the resource, and
 * closing would wait for the same thread. */
static inline bool
mm_guard_enter(mm_guard *g)
{
    if (!mm_guard_add_user(g, MM_GUARD_ONE_CALL)) {
        return false;
    }
    mm_guard_note_entered(g);
    return true;
}

static inline bool
mm_guard_export(mm_guard *g)
{
    return mm_guard_add_user(g, MM_GUARD_ONE_EXPORT);
}

static inline void
mm_guard_leave(mm_guard *g)
{
    assert((atomic_load(&g->state) & MM_GUARD_ALL_CALLS) != 0);
    mm_guard_note_left(g);
    atomic_fetch_sub_explicit(&g->state, MM_GUARD_ONE_CALL, memory_order_release);
}

static inline void
mm_guard_unexport(mm_guard *g)
{
    assert((atomic_load(&g->state) & MM_GUARD_ALL_EXPORTS) != 0);
    atomic_fetch_sub_explicit(&g->state, MM_GUARD_ONE_EXPORT, memory_order_release);
}

static inline bool
mm_guard_is_closed(const mm_guard *g)
{
    return (atomic_load_explicit(&g->state, memory_order_acquire) & MM_GUARD_CLOSED) != 0;
}

typedef enum { MM_CLOSED_NOW, MM_CLOSED_BEFORE, MM_STILL_EXPORTED, MM_STILL_USED } mm_guard_answer;

/* MM_CLOSED_NOW: this call closed it, no other call is under way, and the caller may free the
 * resource. A forked child waits for nothing, because it does not have the threads that made
 * the calls. MM_STILL_USED: another thread's call is under way, and may wait for the host
 * function in which the caller runs. */
mm_guard_answer mm_guard_close(mm_guard *g, bool forked);

/* The failure for MM_STILL_USED; returns -1. */
int mm_fail_still_used(mm_status *st);

/* Undoes MM_CLOSED_NOW, for a caller that could not free the resource. */
void mm_guard_reopen(mm_guard *g);

unsigned mm_guard_exports(const mm_guard *g);

#endif
