/* home.c: releasing objects in their interpreter from any thread: finding the interpreter of a thread,
 * attaching to another one, and the end of an interpreter, which waits for attached threads. */
#include "home.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "errors.h"

struct mm_home {
    PyInterpreterState *interpreter;
    atomic_size_t references;
    atomic_size_t visitors; /* threads that are attached from outside, or are about to */
    atomic_bool ended; /* no thread may attach any more */
};

/* A subinterpreter has loaded this module. */
static atomic_bool in_subinterpreters;

/* --- which interpreter a thread is in -------------------------------------------------------- */

/* PyGILState of CPython 3.11 knows one thread state for each thread. A thread in a subinterpreter has
 * two, and taking the GIL with the wrong one waits for itself. */
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
mm_home_is_here(const mm_home *home)
{
    PyThreadState *own = can_identify_interpreter() ? attached_state() : NULL;

    return own != NULL && PyThreadState_GetInterpreter(own) == home->interpreter;
}

/* --- work without the GIL -------------------------------------------------------------------- */

typedef struct {
    void (*work)(void *);
    void *argument;
} detached_work;

static void *
run_detached_work(void *given)
{
    detached_work *e = given;

    e->work(e->argument);
    free(e);
    return NULL;
}

/* The work is lost if no memory or thread can be had for it. */
static void
run_in_new_thread(void (*work)(void *), void *argument)
{
    detached_work *e = malloc(sizeof *e);
    pthread_t thread;

    if (e == NULL) {
        return;
    }
    *e = (detached_work){work, argument};
    if (pthread_create(&thread, NULL, run_detached_work, e) == 0) {
        (void)pthread_detach(thread);
    } else {
        free(e);
    }
}

void
mm_run_detached(void (*work)(void *), void *argument)
{
    PyThreadState *own;

    if (!can_identify_interpreter()) {
        run_in_new_thread(work, argument);
        return;
    }
    own = attached_state();
    if (own != NULL) {
        (void)PyEval_SaveThread();
    }
    work(argument);
    if (own != NULL) {
        PyEval_RestoreThread(own);
    }
}

/* --- releasing in another interpreter -------------------------------------------------------- */

/* False if the interpreter ends. Counts the visitor before it reads `ended`, so that either this call
 * sees the end, or the end waits for the visitor. */
static bool
enter(mm_home *home)
{
    atomic_fetch_add(&home->visitors, 1);
    if (!atomic_load(&home->ended)) {
        return true;
    }
    atomic_fetch_sub(&home->visitors, 1);
    return false;
}

static void
drop_with(PyThreadState *state, PyObject *kept, bool made)
{
    PyEval_RestoreThread(state);
    Py_DECREF(kept);
    if (made) {
        PyThreadState_Clear(state);
    }
    (void)PyEval_SaveThread();
    if (made) {
        PyThreadState_Delete(state);
    }
}

/* A thread that has a thread state in this interpreter attaches with that one. With a second one, code
 * that takes the GIL through PyGILState would wait for its own thread. */
void
mm_home_release_object(mm_home *home, PyObject *kept)
{
    PyThreadState *own, *made;

    if (mm_driver_forked() || !enter(home)) {
        return;
    }
    own = PyGILState_GetThisThreadState();
    if (own != NULL && PyThreadState_GetInterpreter(own) == home->interpreter) {
        drop_with(own, kept, false);
    } else if ((made = PyThreadState_New(home->interpreter)) != NULL) {
        drop_with(made, kept, true);
    }
    atomic_fetch_sub(&home->visitors, 1);
}

/* --- life ------------------------------------------------------------------------------------ */

void
mm_home_retain(mm_home *home)
{
    atomic_fetch_add(&home->references, 1);
}

void
mm_home_release(mm_home *home)
{
    if (home != NULL && atomic_fetch_sub(&home->references, 1) == 1) {
        free(home);
    }
}

/* Runs at interpreter exit. A thread state that is left after it would abort the process. */
static PyObject *
end_home(PyObject *module, PyObject *Py_UNUSED(none))
{
    mm_home *home = mm_module_state(module)->home;
    const struct timespec nap = {.tv_nsec = 50000};

    atomic_store(&home->ended, true);
    if (!mm_driver_forked()) { /* a forked child does not have its parent's threads */
        Py_BEGIN_ALLOW_THREADS
        while (atomic_load(&home->visitors) > 0) {
            (void)nanosleep(&nap, NULL);
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef end_method = {"_end_home", end_home, METH_NOARGS, NULL};

int
mm_home_init(PyObject *module, mm_state *state)
{
    PyObject *atexit, *callback, *answer = NULL;

    state->home = calloc(1, sizeof *state->home);
    if (state->home == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    atomic_init(&state->home->references, 1);
    state->home->interpreter = PyInterpreterState_Get();
    if (PyInterpreterState_GetID(state->home->interpreter) != 0) {
        atomic_store(&in_subinterpreters, true);
    }
    atexit = PyImport_ImportModule("atexit");
    callback = atexit ? PyCFunction_NewEx(&end_method, module, NULL) : NULL;
    if (callback != NULL) {
        answer = PyObject_CallMethod(atexit, "register", "O", callback);
    }
    Py_XDECREF(callback);
    Py_XDECREF(atexit);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}
