/* interpreter.h: releasing objects in their own interpreter, from any thread.
 *
 * The deleter of a DLPack tensor may be called in a thread of any interpreter, with or without
 * the GIL, or in a thread that Python does not know. */
#ifndef MM_INTERPRETER_H
#define MM_INTERPRETER_H

#include <stdbool.h>

#include "state.h"

/* An interpreter. The struct lives as long as the module's state, or a tensor that keeps an object
 * of the interpreter. */
typedef struct mm_interpreter mm_interpreter;

void mm_interpreter_retain(mm_interpreter *interpreter);
void mm_interpreter_release(mm_interpreter *interpreter);

/* True if the calling thread is attached to the interpreter. */
bool mm_interpreter_is_current(const mm_interpreter *interpreter);

/* True once the interpreter has begun to end. */
bool mm_interpreter_is_ending(const mm_interpreter *interpreter);

/* Releases a reference to an object of the interpreter. The calling thread must be detached.
 * Once the interpreter has begun to end, the reference is leaked. */
void mm_interpreter_release_object(mm_interpreter *interpreter, PyObject *object);

/* Calls work(argument), which may block, in the detached calling thread. If the thread's
 * interpreter cannot be identified, a new thread makes the call. */
void mm_run_detached(void (*work)(void *), void *argument);

/* mm_run_detached, but always in the calling thread, which stays attached if its interpreter
 * cannot be identified. */
void mm_run_here(void (*work)(void *), void *argument);

/* Calls work(argument) in a new thread, so that the calling thread may stay attached. The call is
 * dropped if memory or threads are exhausted. */
void mm_run_elsewhere(void (*work)(void *), void *argument);

#endif
