/* watch_object.c: the type _Watch, the events of another process's managed memory, for `managedmem top`. */
#include <stdlib.h>
#include <unistd.h>

#include "../driver/threads.h"
#include "../trace/watch.h"
#include "args.h"
#include "interpreter.h"

typedef struct {
    PyObject_HEAD
    mm_operation_lock turn;
    mm_watch *watch; /* NULL: closed */
    pid_t owner;
} watch_object;

static watch_object *
watch_of(PyObject *op)
{
    return (watch_object *)op;
}

PyDoc_STRVAR(
    watch_doc,
    "_Watch(process)\n--\n\n"
    "Record the events of the managed memory of a process until close(), at the cost of a trace.\n"
    "\n"
    "It opens no driver, unless the process is this one. The process can be of any program that uses\n"
    "CUDA. Raises RuntimeError, with the reason, if the process has no managed memory, has ended,\n"
    "or may not be traced by this user. Safe from every thread; releases the GIL. System calls:\n"
    "pidfd_getfd, and those of the nvidia-uvm kernel module.");

static PyObject *
watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = watch_doc};
    mm_state *state = mm_type_state(type);
    mm_driver *cu = NULL;
    PyObject *value, *self;
    long long process;
    mm_watch *watch;
    mm_status st;

    if (mm_signature_args_new(&signature, args, kwargs, &value) < 0
        || mm_read_index(value, "process", PyExc_TypeError, &process) < 0) {
        return NULL;
    }
    if (process < 1 || process > INT32_MAX) {
        (void)MM_ERROR(PyExc_ValueError, "process must be a process ID, got %lld", process);
        return NULL;
    }
    if ((pid_t)process == getpid() && (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    self = mm_alloc_object(type);
    if (self == NULL) {
        return NULL;
    }
    mm_operation_lock_init(&watch_of(self)->turn);
    watch_of(self)->owner = getpid();
    Py_BEGIN_ALLOW_THREADS
    watch = mm_watch_start(cu, (pid_t)process, &st);
    Py_END_ALLOW_THREADS
    watch_of(self)->watch = watch;
    if (watch == NULL) {
        Py_DECREF(self);
        st.kind = st.kind == MM_TRACE_UNAVAILABLE ? MM_REFUSED : st.kind; /* a RuntimeError */
        return mm_raise(state, &st);
    }
    return self;
}

/* Takes the turn. False if the watch is closed, and in a forked child, where the turn may belong to
 * a thread of the parent for ever. The caller has released the GIL. */
static bool
enter_watch(watch_object *self)
{
    if (self->owner != getpid()) {
        return false;
    }
    mm_operation_lock_take(&self->turn);
    if (self->watch == NULL) {
        mm_operation_lock_release(&self->turn);
        return false;
    }
    return true;
}

/* Ends the recording; does nothing if it has ended. The caller has released the GIL. */
static void
end_watch(watch_object *self)
{
    if (enter_watch(self)) {
        mm_watch_free(self->watch);
        self->watch = NULL;
        mm_operation_lock_release(&self->turn);
    }
}

static void
watch_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_BEGIN_ALLOW_THREADS
    end_watch(watch_of(op));
    Py_END_ALLOW_THREADS
    if (watch_of(op)->owner == getpid()) { /* in a child, it would wait for the parent's threads */
        mm_operation_lock_destroy(&watch_of(op)->turn);
    }
    mm_free_object(op);
}

PyDoc_STRVAR(
    watch_read_doc,
    "read($self)\n--\n\n"
    "The events since the last read(), as the bytes of records, and two counts since the start:\n"
    "records that were lost, and records that are not as the kernel module writes them. Raises\n"
    "RuntimeError after close() and in a forked child.");

static PyObject *
watch_read(PyObject *op, PyObject *Py_UNUSED(none))
{
    enum { MOST = 1 << 16 };
    watch_object *self = watch_of(op);
    mm_event *events = malloc(MOST * sizeof *events);
    mm_watch_report report = {0};
    PyObject *result = NULL;
    size_t count = 0;
    bool is_open;

    if (events == NULL) {
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    is_open = enter_watch(self);
    if (is_open) {
        count = mm_watch_read(self->watch, events, MOST);
        report = mm_watch_read_report(self->watch);
        mm_operation_lock_release(&self->turn);
    }
    Py_END_ALLOW_THREADS
    if (is_open) {
        result = Py_BuildValue(
            "(NKK)",
            PyBytes_FromStringAndSize((const char *)events, (Py_ssize_t)(count * sizeof *events)),
            (unsigned long long)report.lost, (unsigned long long)report.rejected);
    } else {
        (void)MM_ERROR(PyExc_RuntimeError, "the watch is closed");
    }
    free(events);
    return result;
}

PyDoc_STRVAR(watch_close_doc, "close($self)\n--\n\n"
                              "End the recording; a second call does nothing.");

static PyObject *
watch_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
    end_watch(watch_of(op));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef watch_methods[] = {
    {"read", watch_read, METH_NOARGS, watch_read_doc},
    {"close", watch_close, METH_NOARGS, watch_close_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_doc, (void *)watch_doc}, {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc}, {Py_tp_traverse, mm_traverse_type},
    {Py_tp_methods, watch_methods}, {0, NULL},
};

int
mm_watch_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem._managedmem._Watch", sizeof(watch_object), 0,
                             watch_slots, &state->watch_type);
}
