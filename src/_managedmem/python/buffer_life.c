/* buffer_life.c: how a ManagedBuffer begins and ends: making one and its views, closing, what the
 * garbage collector and the last reference do. */
#include "buffer.h"

/* --- life ------------------------------------------------------------------------------- */

void
mm_buffer_release(mm_memory *memory)
{
    if (!mm_memory_drop(memory)) {
        return;
    }
    if (mm_memory_end_blocks(memory)) {
        /* Freeing waits for work on the memory, which may itself wait for the GIL. */
        Py_BEGIN_ALLOW_THREADS
        mm_memory_end(memory);
        Py_END_ALLOW_THREADS
    } else {
        mm_memory_end(memory);
    }
}

static mm_buffer *
allocate_object(mm_state *state, PyTypeObject *type, mm_memory *memory)
{
    mm_buffer *b = mm_buffer_of(mm_alloc_object(type));

    if (b == NULL) {
        mm_buffer_release(memory);
        return NULL;
    }
    b->state = state;
    b->memory = memory;
    return b;
}

static void
set_layout(mm_buffer *b, const mm_dtype *dtype, int dimensions, const Py_ssize_t *shape)
{
    Py_ssize_t stride = dtype->itemsize;
    bool empty = false;

    b->dtype = dtype;
    b->dimensions = dimensions;
    for (int i = dimensions - 1; i >= 0; i--) {
        b->shape[i] = shape[i];
        b->strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1; /* as torch counts */
        empty = empty || shape[i] == 0;
    }
    b->size = empty ? 0 : (size_t)stride;
}

PyObject *
mm_buffer_new(mm_state *state, PyTypeObject *type, mm_memory *memory, const mm_dtype *dtype,
              int dimensions, const Py_ssize_t *shape, PyObject *owner, PyObject *resource)
{
    mm_buffer *b = allocate_object(state, type, memory);

    if (b != NULL) {
        b->owner = Py_XNewRef(owner);
        b->resource = Py_XNewRef(resource);
        b->start = memory->start;
        set_layout(b, dtype, dimensions, shape);
    }
    return (PyObject *)b;
}

PyObject *
mm_buffer_view(mm_buffer *from, size_t offset, const mm_dtype *dtype, int dimensions,
               const Py_ssize_t *shape)
{
    mm_buffer *b;

    mm_memory_retain(from->memory);
    b = allocate_object(from->state, Py_TYPE((PyObject *)from), from->memory);
    if (b != NULL) {
        b->root = Py_NewRef(from->root ? from->root : (PyObject *)from);
        b->stream = Py_XNewRef(from->stream);
        b->start = from->start + offset;
        set_layout(b, dtype, dimensions, shape);
    }
    return (PyObject *)b;
}

int
mm_buffer_traverse(PyObject *op, visitproc visit, void *arg)
{
    mm_buffer *b = mm_buffer_of(op);

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(b->root);
    Py_VISIT(b->owner);
    Py_VISIT(b->resource);
    Py_VISIT(b->stream);
    return 0;
}

/* Memory of a foreign resource goes back to it; our own resource's memory is freed in C. */
static bool
has_foreign_resource(const mm_buffer *b)
{
    return b->root == NULL && b->resource != NULL && !b->memory->owned;
}

static int
give_back(mm_buffer *b, PyObject *stream)
{
    PyObject *method = PyObject_GetAttrString(b->resource, "deallocate");
    PyObject *args = NULL, *kwargs = NULL, *answer = NULL;

    if (method != NULL) {
        args = Py_BuildValue("(Kn)", (unsigned long long)b->memory->start,
                             (Py_ssize_t)b->memory->size);
        kwargs = Py_BuildValue("{s:O}", "stream", stream ? stream : Py_None);
    }
    if (args != NULL && kwargs != NULL) {
        answer = PyObject_Call(method, args, kwargs);
    }
    Py_XDECREF(method);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Gives memory back to a foreign resource while the resource is still there. */
static void
give_back_at_end(mm_buffer *b)
{
    mm_exception saved;
    mm_status ignored;
    bool first = false;

    if (!has_foreign_resource(b) || mm_driver_forked()) {
        return;
    }
    mm_exception_save(&saved);
    if (mm_memory_close(b->memory, &first, &ignored) == 0 && first && give_back(b, NULL) < 0) {
        PyErr_WriteUnraisable(b->resource);
    }
    mm_exception_restore(&saved);
}

int
mm_buffer_clear(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    if (b->memory != NULL) {
        give_back_at_end(b);
    }
    Py_CLEAR(b->root);
    Py_CLEAR(b->owner);
    Py_CLEAR(b->resource);
    return 0;
}

void
mm_buffer_dealloc(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    (void)mm_buffer_clear(op);
    if (b->memory != NULL) {
        mm_buffer_release(b->memory);
    }
    Py_CLEAR(b->stream); /* not before: the memory is freed in its order */
    mm_free_object(op);
}

PyObject *
mm_buffer_from_handle(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"ptr", "size", "mr", "owner"};
    static const mm_parameters parameters = {"from_handle", names, 2, 4, 4};
    PyObject *given[4], *resource, *owner;
    mm_state *state = mm_buffer_class_state((PyTypeObject *)type);
    CUdeviceptr start;
    mm_memory *memory;
    Py_ssize_t length;
    mm_status st;
    size_t size;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_block(given[0], given[1], &start, &size) < 0) {
        return NULL;
    }
    resource = given[2] == Py_None ? NULL : given[2];
    owner = given[3] == Py_None ? NULL : given[3];
    if (resource != NULL && owner != NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "mr and owner exclude each other: the memory is freed through mr, or kept "
                        "alive by owner");
        return NULL;
    }
    if (size > UINT64_MAX - start) {
        PyErr_Format(PyExc_ValueError, "%zu bytes at %p leave the address space", size,
                     (void *)(uintptr_t)start);
        return NULL;
    }
    memory = mm_memory_wrap(start, size, &st);
    if (memory == NULL) {
        return mm_raise(state, &st);
    }
    length = (Py_ssize_t)size;
    return mm_buffer_new(state, (PyTypeObject *)type, memory, mm_read_dtype(NULL), 1, &length,
                         owner, resource);
}

/* --- closing ---------------------------------------------------------------------------- */

/* What must be so before the memory is closed: pool memory is freed in the order of a stream, which
 * may not capture; other memory after the work of the stream that was given, if one was. */
static int
prepare_close(mm_driver *cu, mm_memory *memory, const CUstream *stream, mm_status *st)
{
    return memory->pooled ? mm_memory_refuse_capture(cu, memory, stream, st)
                          : mm_stream_synchronize(cu, stream ? *stream : NULL, st);
}

static bool
needs_preparing(const mm_buffer *b, bool stream_given)
{
    return !has_foreign_resource(b) && (b->memory->pooled || stream_given) && !mm_driver_forked();
}

/* Closes the root's memory. */
static PyObject *
close_root(mm_buffer *b, PyObject *stream)
{
    bool given = stream != NULL && stream != Py_None, first = false;
    mm_driver *cu = NULL;
    mm_stream_use use;
    mm_status st;
    int rc = 0;

    if (mm_guard_is_closed(&b->memory->guard)) {
        Py_RETURN_NONE;
    }
    if (mm_stream_read(b->state, stream, &use) < 0
        || (needs_preparing(b, given) && (cu = mm_open(b->state)) == NULL)) {
        return NULL;
    }
    if (!mm_stream_enter(&use)) {
        (void)mm_stream_raise_closed();
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (cu != NULL) {
        rc = prepare_close(cu, b->memory, given ? &use.handle : NULL, &st);
    }
    if (rc == 0) {
        rc = mm_memory_close_on(b->memory, given ? &use.handle : NULL, &first, &st);
    }
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return mm_raise(b->state, &st);
    }
    if (first && has_foreign_resource(b) && give_back(b, stream) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *
mm_buffer_close(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream"};
    static const mm_parameters parameters = {"close", names, 0, 1, 1};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *given[1];

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    if (b->root == NULL) {
        return close_root(b, given[0]);
    }
    /* In one step, as a memoryview may be made meanwhile. No waiting: calls enter the memory, not
     * the view. */
    if (mm_guard_close(&b->guard, true) == MM_STILL_EXPORTED) {
        PyErr_SetString(PyExc_BufferError,
                        "this view cannot be closed: a memoryview or NumPy array of it lives");
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *
mm_buffer_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return mm_buffer_close(op, NULL, 0, NULL);
}

const char mm_buffer_from_handle_doc[] =
    "from_handle(ptr, size, mr=None, owner=None)\n--\n\n"
    "Wrap memory that exists already.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "ptr : int\n"
    "    Its address.\n"
    "size : int\n"
    "    Its size in bytes. With 0 the address may be anything, 0 too.\n"
    "mr : object, optional\n"
    "    What frees it: close() calls mr.deallocate(ptr, size, stream=stream).\n"
    "owner : object, optional\n"
    "    Kept alive as long as the buffer and its views.\n"
    "\n"
    "Gives an instance of the class it is called on. The address is not checked here; an operation on\n"
    "memory that is not managed raises ValueError. Raises ValueError for mr together with owner, an\n"
    "address that is none, a size below 0. Driver: none.";

const char mm_buffer_close_doc[] =
    "close($self, /, stream=None)\n--\n\n"
    "Free the memory; again is allowed.\n"
    "\n"
    "Waits for work that uses the memory, and with a stream for everything queued on it. Memory of a\n"
    "pool is freed without waiting, in the order of the stream, or without one of the stream it was\n"
    "allocated on. Closing a view ends that view only. Raises BufferError while a memoryview, NumPy\n"
    "array or DLPack tensor of the memory lives; CUDAError for pool memory on a stream that captures a\n"
    "graph, and when the driver refuses, after which the buffer counts as closed.\n"
    "Driver: cuMemFree, cuMemFreeAsync.";
