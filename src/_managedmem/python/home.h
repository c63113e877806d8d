/* home.h: objects given up by any thread, in the interpreter that they belong to.
 *
 * The deleter of a tensor may be called by a thread of any interpreter, by one that gave up its GIL,
 * or by one that Python has never seen. */
#ifndef MM_HOME_H
#define MM_HOME_H

#include <stdbool.h>

#include "state.h"

/* An interpreter, for as long as it or a tensor from it lives. */
typedef struct mm_home mm_home;

void mm_home_retain(mm_home *home);
void mm_home_release(mm_home *home);

/* Whether the calling thread runs Python code of that interpreter right now. */
bool mm_home_is_here(const mm_home *home);

/* Gives up a reference to an object of that interpreter, from a thread that runs no Python code. Once
 * the interpreter has begun to end the object is left alone. */
void mm_home_release_object(mm_home *home, PyObject *kept);

/* Calls work(argument), which may block, without the GIL, whether the thread holds it or not. Where
 * that cannot be told, another thread makes the call. */
void mm_run_detached(void (*work)(void *), void *argument);

#endif
