/* home.h: releasing objects in their own interpreter, from any thread.
 *
 * The deleter of a DLPack tensor may be called in a thread of any interpreter, with or without the GIL,
 * or in a thread that Python does not know. */
#ifndef MM_HOME_H
#define MM_HOME_H

#include <stdbool.h>

#include "state.h"

/* An interpreter; kept for as long as it or a tensor of it lives. */
typedef struct mm_home mm_home;

void mm_home_retain(mm_home *home);
void mm_home_release(mm_home *home);

/* True if the calling thread is attached to that interpreter. */
bool mm_home_is_here(const mm_home *home);

/* Releases a reference to an object of that interpreter. The calling thread must be detached. Once the
 * interpreter has begun to end, the object is left alone. */
void mm_home_release_object(mm_home *home, PyObject *kept);

/* Calls work(argument), which may block, without the GIL. Detaches the thread for it; if its interpreter
 * cannot be identified, the call is made in a new thread. */
void mm_run_detached(void (*work)(void *), void *argument);

#endif
