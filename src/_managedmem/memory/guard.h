/* guard.h: one word that keeps a resource alive while somebody uses it and lets it be closed once.
 *
 * Calls under way are short (a driver call that queues work) and closing waits for them. Exports
 * live as long as Python likes and make closing fail. Works from every thread, with or without a
 * GIL, and holds no lock. */
#ifndef MM_GUARD_H
#define MM_GUARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    _Atomic uint64_t state;
} mm_guard;

/* Both return false when the resource is closed. A thread leaves what it entered itself, and runs no
 * Python code in between: that could close the resource, and closing waits for the call. */
bool mm_guard_enter(mm_guard *g);
bool mm_guard_export(mm_guard *g);

void mm_guard_leave(mm_guard *g);
void mm_guard_unexport(mm_guard *g);

/* How many guards the calling thread is in. For assertions only: 0 where those are compiled out. */
unsigned mm_guards_entered(void);

typedef enum { MM_CLOSED_NOW, MM_CLOSED_BEFORE, MM_STILL_EXPORTED } mm_guard_answer;

/* MM_CLOSED_NOW: the caller closed it, no call is under way, and it may free the resource. In a
 * forked child there is nothing to wait for: the threads that made the calls are not there. */
mm_guard_answer mm_guard_close(mm_guard *g, bool forked);

/* Undoes MM_CLOSED_NOW, for the caller who got it and could not free the resource. */
void mm_guard_reopen(mm_guard *g);

bool mm_guard_is_closed(const mm_guard *g);
unsigned mm_guard_exports(const mm_guard *g);

#endif
