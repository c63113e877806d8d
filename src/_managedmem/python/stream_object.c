/* stream_object.c: the type Stream. It owns a stream that it created, but not one from a
 * handle. */
#include "stream_object.h"

#include "../memory/pool_teardown.h"
#include "foreign_stream.h"
#include "leak_warnings.h"

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    CUstream handle;
    mm_stream *shared; /* the stream that this object made, until it is closed; else NULL */
    bool can_end; /* the stream ends with its context, which a user made and can destroy */
    mm_guard guard;
} stream_object;

static stream_object *
stream_of(PyObject *op)
{
    return (stream_object *)op;
}

int
mm_stream_raise_closed(void)
{
    MM_ASSERT_LEFT();
    assert(!PyErr_Occurred());
    return MM_ERROR(PyExc_RuntimeError, "Stream is closed");
}

static int
stream_check_open(PyObject *op)
{
    return mm_guard_is_closed(&stream_of(op)->guard) ? mm_stream_raise_closed() : 0;
}

/* CUDAError for a stream that ended with its context: drivers crash in calls with such a stream. */
static int
refuse_ended(mm_state *state, stream_object *s)
{
    mm_driver *cu = mm_driver_usable();
    bool ended = false;
    mm_status st;

    if (cu != NULL && mm_guard_enter(&s->guard)) {
        ended = mm_context_has_ended(cu, &s->shared->context);
        mm_guard_leave(&s->guard);
    }
    if (!ended) {
        return 0;
    }
    (void)mm_fail_call(&st, "cuCtxGetId", CUDA_ERROR_CONTEXT_IS_DESTROYED);
    mm_status_add(&st, "the context of the stream was destroyed, and the stream with it: make "
                       "another Stream in a context that lives");
    return mm_raise_failure(state, -1, &st);
}

int
mm_stream_read(mm_state *state, PyObject *value, mm_stream_use *use)
{
    MM_ASSERT_LEFT();
    assert(!PyErr_Occurred());
    *use = (mm_stream_use){.handle = NULL};
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (Py_TYPE(value) == state->stream_type) {
        if (stream_check_open(value) < 0
            || (stream_of(value)->can_end && refuse_ended(state, stream_of(value)) < 0)) {
            return -1;
        }
        use->guard = &stream_of(value)->guard;
        use->shared = stream_of(value)->shared;
        use->handle = stream_of(value)->handle;
        return 0;
    }
    if (PyLong_Check(value)) {
        return mm_read_stream_handle(value, "a stream handle", &use->handle);
    }
    return mm_read_foreign_stream(state, value, &use->handle);
}

int
mm_stream_read_and_enter(mm_state *state, PyObject *value, mm_stream_use *use)
{
    if (mm_stream_read(state, value, use) < 0) {
        return -1;
    }
    return mm_stream_enter(use) ? 0 : mm_stream_raise_closed();
}

static PyObject *
new_stream(PyTypeObject *type, CUstream handle, mm_stream *shared)
{
    PyObject *self = mm_alloc_object(type);

    assert(shared == NULL || shared->handle == handle);
    if (self != NULL) {
        stream_of(self)->handle = handle;
        stream_of(self)->shared = shared;
        stream_of(self)->can_end = shared != NULL && !shared->lasts;
    }
    return self;
}

PyObject *
mm_stream_duplicate(mm_state *state, mm_stream *shared)
{
    PyObject *self = new_stream(state->stream_type, shared->handle, shared);

    if (self == NULL) {
        mm_stream_drop(shared);
    }
    return self;
}

static mm_stream *
create_stream(mm_driver *cu, mm_status *st)
{
    CUstream handle = NULL;
    mm_stream *shared;

    if (mm_stream_create(cu, &handle, st) < 0) {
        return NULL;
    }
    shared = mm_stream_share(cu, handle, st);
    if (shared == NULL) {
        mm_leak_note(cu->StreamDestroy(handle), "cuStreamDestroy", 0);
    }
    return shared;
}

PyDoc_STRVAR(
    stream_doc,
    "Stream()\n--\n\n"
    "A new non-blocking stream on the calling thread's current device.\n"
    "\n"
    "Work queued on it runs in order, and independently of the default stream. The stream ends\n"
    "with close(), at the end of a `with` block, or with its last reference; work that was queued\n"
    "before still runs.\n"
    "\n"
    "Streams over one handle are equal and have the same hash. A closed stream equals only itself and\n"
    "keeps its hash.\n"
    "\n"
    "A stream of a context that is not the device's primary one ends with that context. Work on\n"
    "it then raises CUDAError with code 709, and close() makes no driver call.\n"
    "\n"
    "Raises DriverNotFoundError without a driver, CUDAError when the driver refuses. Safe from every\n"
    "thread. Driver: cuStreamCreate with CU_STREAM_NON_BLOCKING, cuCtxGetId.");

static PyObject *
stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = stream_doc};
    mm_state *state = mm_type_state(type);
    mm_stream *shared;
    mm_driver *cu;
    mm_status st;

    if (mm_signature_args_new(&signature, args, kwargs, NULL) < 0
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    shared = create_stream(cu, &st);
    Py_END_ALLOW_THREADS
    return shared != NULL ? mm_stream_duplicate(state, shared) : mm_raise(state, &st);
}

PyDoc_STRVAR(
    stream_from_handle_doc,
    "from_handle(handle, /)\n--\n\n"
    "A Stream for a CUstream or cudaStream_t that another object owns.\n"
    "\n"
    "handle is its address as an int; 0 and 1 are the legacy default stream, 2 the per-thread one.\n"
    "Closing the Stream leaves the handle alone. ValueError for a negative handle.");

static PyObject *
stream_from_handle(PyObject *type, PyObject *value)
{
    CUstream handle;

    if (mm_read_stream_handle(value, "a stream handle", &handle) < 0) {
        return NULL;
    }
    return new_stream((PyTypeObject *)type, handle, NULL);
}

/* Releases the stream that this object made, once. */
static int
close_stream(stream_object *s, mm_status *st)
{
    mm_guard_answer answer = mm_guard_close(&s->guard, mm_driver_forked());

    if (answer == MM_STILL_USED) {
        return mm_fail_still_used(st);
    }
    return answer == MM_CLOSED_NOW && s->shared != NULL ? mm_stream_release(s->shared, st) : 0;
}

static void
stream_dealloc(PyObject *op)
{
    mm_status st;

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    Py_BEGIN_ALLOW_THREADS
    if (close_stream(stream_of(op), &st) < 0) {
        mm_leak_note_status(&st, 0); /* a deallocation cannot raise */
    }
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    mm_free_object(op);
}

PyDoc_STRVAR(
    stream_close_doc,
    "close($self, /)\n--\n\n"
    "End the stream; a second call does nothing. Work that was queued still runs.\n"
    "\n"
    "Waits only for calls that other threads are making with it; inside a host function it raises\n"
    "CUDAError instead, and the stream stays open. Pool memory that was allocated on the stream keeps\n"
    "the driver's stream until it is freed. Driver: cuStreamDestroy.");

static PyObject *
stream_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_status st;
    int rc;

    Py_BEGIN_ALLOW_THREADS
    rc = close_stream(stream_of(op), &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(stream_exit_doc, "__exit__($self, /, *exception)\n--\n\nClose the stream.");

static PyObject *
stream_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return stream_close(op, NULL);
}

PyDoc_STRVAR(stream_enter_doc, "__enter__($self, /)\n--\n\nThe stream itself.");

static PyObject *
stream_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    return stream_check_open(op) < 0 ? NULL : Py_NewRef(op);
}

PyDoc_STRVAR(stream_sync_doc, "sync($self, /)\n--\n\n"
                              "Wait until everything queued so far is done. Releases the GIL.\n"
                              "\n"
                              "Driver: cuStreamSynchronize.");

static PyObject *
stream_sync(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_stream_use use;
    mm_status st;
    int rc;

    if (cu == NULL || mm_stream_read_and_enter(state, op, &use) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_synchronize(cu, (mm_device_stream){use.handle, MM_ANY_DEVICE}, &st);
    mm_stream_leave(&use);
    mm_deferred_frees_attempt(cu, &(mm_free_conditions){.pools = true});
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    return mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(stream_query_doc,
             "query($self, /)\n--\n\n"
             "True if everything queued so far is done. Does not wait. Releases the GIL.\n"
             "\n"
             "Driver: cuStreamQuery.");

static PyObject *
stream_query(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_stream_use use;
    mm_status st;
    bool done = false;
    int rc;

    if (cu == NULL || mm_stream_read_and_enter(state, op, &use) < 0) {
        return NULL;
    }
    /* The query may run queued work and wait for a host function, which needs the GIL. */
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_query(cu, use.handle, &done, &st);
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    return rc < 0 ? mm_raise(state, &st) : PyBool_FromLong(done);
}

static PyObject *
stream_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    bool closed = mm_guard_is_closed(&stream_of(op)->guard);

    return PyLong_FromVoidPtr(closed ? NULL : (void *)stream_of(op)->handle);
}

static PyObject *
stream_get_is_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_guard_is_closed(&stream_of(op)->guard));
}

PyDoc_STRVAR(stream_cuda_stream_doc,
             "__cuda_stream__($self, /)\n--\n\nThe stream protocol: (0, handle).");

static PyObject *
stream_cuda_stream(PyObject *op, PyObject *Py_UNUSED(none))
{
    if (stream_check_open(op) < 0) {
        return NULL;
    }
    return Py_BuildValue("(iN)", 0, PyLong_FromVoidPtr((void *)stream_of(op)->handle));
}

static PyObject *
stream_repr(PyObject *op)
{
    CUstream handle = stream_of(op)->handle;

    if (mm_guard_is_closed(&stream_of(op)->guard)) {
        return PyUnicode_FromString("<Stream closed>");
    }
    /* %p formats NULL differently in each C library. */
    return handle == NULL ? PyUnicode_FromString("<Stream handle=0x0>")
                          : PyUnicode_FromFormat("<Stream handle=%p>", (void *)handle);
}

/* True if both objects stand for one stream. Two streams that this library made are never one: if
 * their handles are equal, the first ended with its context, and the driver gave its handle to the
 * second. */
static bool
are_one_stream(const stream_object *a, const stream_object *b)
{
    bool others = a->shared == NULL || b->shared == NULL || a->shared == b->shared;

    return a->handle == b->handle && others && !mm_guard_is_closed(&a->guard)
           && !mm_guard_is_closed(&b->guard);
}

/* A closed stream equals only itself, because the driver may reuse its handle. */
static PyObject *
stream_richcompare(PyObject *op, PyObject *other, int comparison)
{
    bool equal;

    if (Py_TYPE(other) != Py_TYPE(op) || (comparison != Py_EQ && comparison != Py_NE)) {
        return Py_NewRef(Py_NotImplemented);
    }
    equal = op == other || are_one_stream(stream_of(op), stream_of(other));
    return PyBool_FromLong(equal == (comparison == Py_EQ));
}

/* The hash of the handle, even after close(), so that a dict still finds the stream. */
static Py_hash_t
stream_hash(PyObject *op)
{
    uintptr_t handle = (uintptr_t)stream_of(op)->handle;
    Py_hash_t hash = (Py_hash_t)(handle >> 4 | handle << (8 * sizeof handle - 4));

    return hash == -1 ? -2 : hash;
}

static PyMethodDef stream_methods[] = {
    {"from_handle", stream_from_handle, METH_O | METH_CLASS, stream_from_handle_doc},
    {"sync", stream_sync, METH_NOARGS, stream_sync_doc},
    {"query", stream_query, METH_NOARGS, stream_query_doc},
    {"close", stream_close, METH_NOARGS, stream_close_doc},
    {"__cuda_stream__", stream_cuda_stream, METH_NOARGS, stream_cuda_stream_doc},
    {"__enter__", stream_enter, METH_NOARGS, stream_enter_doc},
    MM_POSITIONAL_METHOD("__exit__", stream_exit, stream_exit_doc),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"handle", stream_get_handle, NULL, "The CUstream as an int; 0 once closed.", NULL},
    {"is_closed", stream_get_is_closed, NULL, "True once close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef stream_members[] = MM_WEAK_MEMBERS(stream_object);

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_richcompare, stream_richcompare},
    {Py_tp_hash, stream_hash},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {Py_tp_members, stream_members},
    {0, NULL},
};

int
mm_stream_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem.Stream", sizeof(stream_object), 0, stream_slots,
                             &state->stream_type);
}
