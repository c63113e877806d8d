/* interpreter.c: releasing objects in their interpreter from any thread: finding the
 * interpreter of a thread, attaching to another one, and the end of an interpreter, which waits
 * for attached threads. */
#include "interpreter.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "../driver/clock.h"
#include "../trace/recorder.h"
#include "errors.h"

struct mm_interpreter {
    PyInterpreterState *state;
    atomic_size_t references;
    atomic_size_t visitors; /* threads attached from outside, or about to attach */
    atomic_bool ending; /* no thread may attach any more */
};

/* A subinterpreter has loaded this module. */
static atomic_bool in_subinterpreters;

/* --- the interpreter of a thread ------------------------------------------------------------- */

/* PyGILState of CPython 3.11 knows one thread state for each thread. A thread in a
 * subinterpreter has two, and would wait for itself if it took the GIL with the wrong one. */
static bool
can_identify_interpreter(void)
{
    return mm_swap_is_local() || !atomic_load(&in_subinterpreters)
           || PyGILState_GetThisThreadState() == NULL;
}

/* The attached thread state of the calling thread, or NULL. */
static PyThreadState *
attached_state(void)
{
    PyThreadState *own;
    PyGILState_STATE before;

    if (mm_swap_is_local()) {
        own = PyThreadState_Swap(NULL);
        return own ? (PyThreadState_Swap(own), own) : NULL;
    }
    own = PyGILState_GetThisThreadState();
    if (own == NULL) {
        return NULL;
    }
    before = PyGILState_Ensure();
    PyGILState_Release(before);
    return before == PyGILState_LOCKED ? own : NULL;
}

bool
mm_interpreter_is_current(const mm_interpreter *interpreter)
{
    PyThreadState *own = can_identify_interpreter() ? attached_state() : NULL;

    return own != NULL && PyThreadState_GetInterpreter(own) == interpreter->state;
}

/* --- work without the GIL -------------------------------------------------------------------- */

typedef struct {
    void (*work)(void *);
    void *argument;
} detached_call;

static void *
run_detached_call(void *argument)
{
    detached_call *call = argument;

    call->work(call->argument);
    free(call);
    return NULL;
}

void
mm_run_elsewhere(void (*work)(void *), void *argument)
{
    detached_call *call = malloc(sizeof *call);
    pthread_t thread;

    if (call == NULL) {
        return;
    }
    *call = (detached_call){work, argument};
    if (pthread_create(&thread, NULL, run_detached_call, call) == 0) {
        (void)pthread_detach(thread);
    } else {
        free(call); /* unreached: only without threads left */
    }
}

void
mm_run_detached(void (*work)(void *), void *argument)
{
    if (can_identify_interpreter()) {
        mm_run_here(work, argument);
    } else {
        mm_run_elsewhere(work, argument);
    }
}

void
mm_run_here(void (*work)(void *), void *argument)
{
    PyThreadState *own = can_identify_interpreter() ? attached_state() : NULL;

    MM_ASSERT_LEFT();
    if (own != NULL) {
        (void)PyEval_SaveThread();
    }
    work(argument);
    if (own != NULL) {
        PyEval_RestoreThread(own);
    }
}

/* --- releasing in another interpreter -------------------------------------------------------- */

/* False if the interpreter is ending. Counts the visitor before it reads `ending`, so that either
 * this call sees the flag, or end_interpreter waits for the visitor. */
static bool
enter_interpreter(mm_interpreter *interpreter)
{
    atomic_fetch_add(&interpreter->visitors, 1);
    if (!atomic_load(&interpreter->ending)) {
        return true;
    }
    atomic_fetch_sub(&interpreter->visitors, 1);
    return false;
}

bool
mm_interpreter_is_ending(const mm_interpreter *interpreter)
{
    return atomic_load(&interpreter->ending);
}

static void
leave_interpreter(mm_interpreter *interpreter)
{
    assert(atomic_load(&interpreter->visitors) > 0);
    atomic_fetch_sub(&interpreter->visitors, 1);
}

static void
release_attached(PyThreadState *state, PyObject *object, bool is_new)
{
    MM_ASSERT_LEFT();
    PyEval_RestoreThread(state);
    Py_DECREF(object);
    if (is_new) {
        PyThreadState_Clear(state);
    }
    (void)PyEval_SaveThread();
    if (is_new) {
        PyThreadState_Delete(state);
    }
}

/* A thread attaches with its thread state in this interpreter, if it has one. With a second thread
 * state, code that takes the GIL through PyGILState would wait for its own thread. */
void
mm_interpreter_release_object(mm_interpreter *interpreter, PyObject *object)
{
    PyThreadState *own, *added;

    assert(atomic_load(&interpreter->references) > 0);
    if (mm_driver_forked() || !enter_interpreter(interpreter)) {
        return;
    }
    own = PyGILState_GetThisThreadState();
    if (own != NULL && PyThreadState_GetInterpreter(own) == interpreter->state) {
        release_attached(own, object, false);
    } else if ((added = PyThreadState_New(interpreter->state)) != NULL) {
        release_attached(added, object, true);
    }
    leave_interpreter(interpreter);
}

/* --- life ------------------------------------------------------------------------------------ */

void
mm_interpreter_retain(mm_interpreter *interpreter)
{
    assert(atomic_load(&interpreter->references) > 0);
    atomic_fetch_add(&interpreter->references, 1);
}

void
mm_interpreter_release(mm_interpreter *interpreter)
{
    if (interpreter != NULL && atomic_fetch_sub(&interpreter->references, 1) == 1) {
        assert(atomic_load(&interpreter->visitors) == 0 || mm_driver_forked());
        free(interpreter);
    }
}

/* Runs at interpreter exit: ends the recording of this interpreter, and waits for its visitors. A
 * visitor's thread state that outlived the interpreter would abort the process. */
static PyObject *
end_interpreter(PyObject *module, PyObject *Py_UNUSED(none))
{
    mm_interpreter *interpreter = mm_module_state(module)->interpreter;

    atomic_store(&interpreter->ending, true);
    if (!mm_driver_forked()) { /* a forked child does not have its parent's threads */
        Py_BEGIN_ALLOW_THREADS
        mm_recordings_end(interpreter);
        while (atomic_load(&interpreter->visitors) > 0) { /* raced */
            mm_nap();
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef end_method = {"_end_interpreter", end_interpreter, METH_NOARGS, NULL};

int
mm_interpreter_init(PyObject *module, mm_state *state)
{
    PyObject *callback, *answer = NULL;

    assert(state->interpreter == NULL);
    state->interpreter = calloc(1, sizeof *state->interpreter);
    if (state->interpreter == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    atomic_init(&state->interpreter->references, 1);
    state->interpreter->state = PyInterpreterState_Get();
    if (PyInterpreterState_GetID(state->interpreter->state) != 0) {
        atomic_store(&in_subinterpreters, true);
    }
    callback = PyCFunction_NewEx(&end_method, module, NULL);
    if (callback != NULL) {
        answer = mm_call_python("atexit", "register", "(O)", callback);
        Py_DECREF(callback);
    }
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}
