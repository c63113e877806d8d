/* buffer.c: the type ManagedBuffer: making one, views, what it is, and closing it. Its advice is
 * in buffer_advice.c, its operations in buffer_operations.c, its exports in buffer_exports.c. */
#include "buffer.h"

#include "buffer_advice.h"
#include "stream.h"

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

    b->dtype = dtype;
    b->dimensions = dimensions;
    for (int i = dimensions - 1; i >= 0; i--) {
        b->shape[i] = shape[i];
        b->strides[i] = stride;
        stride *= shape[i];
    }
    b->size = (size_t)stride;
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

static int
buffer_traverse(PyObject *op, visitproc visit, void *arg)
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

static int
buffer_clear(PyObject *op)
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

static void
buffer_dealloc(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    (void)buffer_clear(op);
    if (b->memory != NULL) {
        mm_buffer_release(b->memory);
    }
    Py_CLEAR(b->stream); /* not before: the memory is freed in its order */
    mm_free_object(op);
}

static PyObject *
buffer_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError,
                    "ManagedBuffer cannot be made directly: use managedmem.empty(), "
                    "ManagedMemoryResource().allocate() or ManagedBuffer.from_handle()");
    return NULL;
}

static PyMethodDef buffer_methods[];

/* The module's state, found from ManagedBuffer or a class made from it in Python. */
static mm_state *
state_of_class(PyTypeObject *type)
{
    while (PyType_GetSlot(type, Py_tp_methods) != (void *)buffer_methods) {
        type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base);
    }
    return mm_type_state(type);
}

static PyObject *
buffer_from_handle(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"ptr", "size", "mr", "owner"};
    static const mm_parameters parameters = {"from_handle", names, 2, 4, 4};
    PyObject *given[4], *resource, *owner;
    mm_state *state = state_of_class((PyTypeObject *)type);
    CUdeviceptr start;
    mm_memory *memory;
    Py_ssize_t length;
    mm_status st;
    size_t size;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_address(given[0], &start) < 0 || mm_read_size(given[1], "size", &size) < 0) {
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

/* --- use -------------------------------------------------------------------------------- */

bool
mm_buffer_is_closed(const mm_buffer *b)
{
    return mm_guard_is_closed(&b->guard) || mm_guard_is_closed(&b->memory->guard);
}

int
mm_buffer_raise_closed(void)
{
    PyErr_SetString(PyExc_RuntimeError, "ManagedBuffer is closed");
    return -1;
}

int
mm_buffer_check_open(const mm_buffer *b)
{
    if (mm_buffer_is_closed(b)) {
        return mm_buffer_raise_closed();
    }
    return 0;
}

static int
read_range(mm_buffer *b, mm_driver *cu, mm_operation op, mm_range *range)
{
    mm_status st;

    if (mm_memory_check(cu, b->memory, op, &st) < 0) {
        (void)mm_raise(b->state, &st);
        return -1;
    }
    range->start = b->start;
    range->size = b->size;
    range->allocation = atomic_load_explicit(&b->memory->allocation, memory_order_relaxed);
    return 0;
}

int
mm_buffer_begin(mm_buffer *b, mm_operation op, mm_buffer_use *use)
{
    if (mm_buffer_check_open(b) < 0 || (use->cu = mm_open(b->state)) == NULL) {
        return -1;
    }
    if (!mm_guard_enter(&b->memory->guard)) {
        return mm_buffer_raise_closed();
    }
    if (read_range(b, use->cu, op, &use->range) < 0) {
        mm_guard_leave(&b->memory->guard);
        return -1;
    }
    use->memory = b->memory;
    return 0;
}

int
mm_buffer_look(mm_buffer *b, mm_driver *cu, mm_operation op, mm_range *range)
{
    if (mm_buffer_check_open(b) < 0) {
        return -1;
    }
    if (read_range(b, cu, op, range) < 0) {
        return mm_buffer_is_closed(b) ? mm_buffer_raise_closed() : -1; /* closed meanwhile */
    }
    return 0;
}

void
mm_buffer_end(mm_buffer_use *use)
{
    mm_guard_leave(&use->memory->guard);
}

/* --- closing ---------------------------------------------------------------------------- */

/* What must be so before the memory is closed: pool memory is freed in the order of a stream, which
 * may not capture; other memory after the work of the stream that was given, if one was. */
static int
prepare_close(mm_buffer *b, const CUstream *stream)
{
    CUstream waited = stream ? *stream : NULL;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (has_foreign_resource(b) || (!b->memory->pooled && stream == NULL) || mm_driver_forked()) {
        return 0;
    }
    cu = mm_open(b->state);
    if (cu == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = b->memory->pooled ? mm_memory_refuse_capture(cu, b->memory, stream, &st)
                           : mm_stream_synchronize(cu, waited, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* Closes the root's memory. */
static PyObject *
close_root(mm_buffer *b, PyObject *stream)
{
    bool given = stream != NULL && stream != Py_None, first = false;
    mm_stream_use use;
    mm_status st;
    int rc;

    if (mm_guard_is_closed(&b->memory->guard)) {
        Py_RETURN_NONE;
    }
    if (mm_stream_begin(b->state, stream, &use) < 0) {
        return NULL;
    }
    if (prepare_close(b, given ? &use.handle : NULL) < 0) {
        mm_stream_end(&use);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_memory_close_on(b->memory, given ? &use.handle : NULL, &first, &st);
    Py_END_ALLOW_THREADS
    mm_stream_end(&use);
    if (rc < 0) {
        return mm_raise(b->state, &st);
    }
    if (first && has_foreign_resource(b) && give_back(b, stream) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
buffer_close(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

static PyObject *
buffer_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mm_buffer_check_open(mm_buffer_of(op)) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
buffer_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return buffer_close(op, NULL, 0, NULL);
}

/* --- what it is ------------------------------------------------------------------------- */

static Py_ssize_t
buffer_length(PyObject *op)
{
    return mm_buffer_of(op)->shape[0];
}

static PyObject *
shape_tuple(const mm_buffer *b)
{
    PyObject *shape = PyTuple_New(b->dimensions);

    for (int i = 0; shape != NULL && i < b->dimensions; i++) {
        PyObject *length = PyLong_FromSsize_t(b->shape[i]);
        if (length == NULL || PyTuple_SetItem(shape, i, length) < 0) {
            Py_CLEAR(shape);
        }
    }
    return shape;
}

static PyObject *
buffer_repr(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);
    PyObject *shape, *name, *text = NULL;

    name = PyType_GetName(Py_TYPE(op));
    shape = shape_tuple(b);
    if (name != NULL && shape != NULL) {
        text = mm_buffer_is_closed(b)
                   ? PyUnicode_FromFormat("<%U shape=%R dtype=%s closed>", name, shape,
                                          b->dtype->name)
                   : PyUnicode_FromFormat("<%U shape=%R dtype=%s handle=%p>", name, shape,
                                          b->dtype->name, (void *)(uintptr_t)b->start);
    }
    Py_XDECREF(name);
    Py_XDECREF(shape);
    return text;
}

static PyObject *
buffer_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);

    return PyLong_FromUnsignedLongLong(mm_buffer_is_closed(b) ? 0 : b->start);
}

static PyObject *
buffer_get_size(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(mm_buffer_of(op)->size);
}

static PyObject *
buffer_get_shape(PyObject *op, void *Py_UNUSED(closure))
{
    return shape_tuple(mm_buffer_of(op));
}

static PyObject *
buffer_get_dtype(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(mm_buffer_of(op)->dtype->name);
}

static PyObject *
buffer_get_itemsize(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mm_buffer_of(op)->dtype->itemsize);
}

/* A view answers for its root. */
static mm_buffer *
root_of(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    return b->root ? mm_buffer_of(b->root) : b;
}

static PyObject *
buffer_get_owner(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *owner = root_of(op)->owner;

    return Py_NewRef(owner ? owner : Py_None);
}

static PyObject *
buffer_get_resource(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *resource = root_of(op)->resource;

    return Py_NewRef(resource ? resource : Py_None);
}

static PyObject *
buffer_get_is_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_buffer_is_closed(mm_buffer_of(op)));
}

/* Asks the driver what it knows about the address; -1 with an exception. */
static int
look_up(mm_buffer *b, mm_pointer_facts *facts, mm_driver **cu)
{
    mm_status st;
    int rc;

    if (mm_buffer_check_open(b) < 0 || (*cu = mm_open(b->state)) == NULL) {
        return -1;
    }
    if (!mm_guard_enter(&b->memory->guard)) {
        return mm_buffer_raise_closed();
    }
    rc = mm_look_up(*cu, b->start, facts, &st);
    mm_guard_leave(&b->memory->guard);
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

static PyObject *
buffer_get_is_managed(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_facts facts;
    mm_driver *cu;

    return look_up(mm_buffer_of(op), &facts, &cu) < 0 ? NULL : PyBool_FromLong(facts.managed != 0);
}

static PyObject *
buffer_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_facts facts;
    mm_driver *cu;

    if (look_up(mm_buffer_of(op), &facts, &cu) < 0) {
        return NULL;
    }
    return PyLong_FromLong(facts.device >= 0 && facts.device < cu->device_count ? facts.device
                                                                                : 0);
}

/* Plain device memory is all that the host cannot reach. */
static PyObject *
buffer_get_is_host_accessible(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_facts facts;
    mm_driver *cu;

    if (look_up(mm_buffer_of(op), &facts, &cu) < 0) {
        return NULL;
    }
    return PyBool_FromLong(facts.managed || facts.type != CU_MEMORYTYPE_DEVICE);
}

/* System memory is all that a device cannot reach, unless it has pageable memory access. */
static PyObject *
buffer_get_is_device_accessible(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_facts facts;
    mm_driver *cu;
    int pageable = 0;

    if (look_up(mm_buffer_of(op), &facts, &cu) < 0) {
        return NULL;
    }
    if (!facts.managed && facts.type == 0) {
        (void)cu->DeviceGetAttribute(&pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0);
    }
    return PyBool_FromLong(facts.managed || facts.type != 0 || pageable);
}

static PyObject *
buffer_get_is_mapped(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_FALSE;
}

static PyObject *
buffer_get_ipc_descriptor(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    PyErr_SetString(PyExc_NotImplementedError,
                    "this memory cannot be shared between processes: the driver has no IPC for "
                    "managed memory, and the pools here are made without it. Copy it to other "
                    "device memory and share that.");
    return NULL;
}

static PyObject *
buffer_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    PyErr_Format(PyExc_TypeError, "%R cannot be pickled: send bytes(buf) instead", op);
    return NULL;
}

/* --- tables ----------------------------------------------------------------------------- */

PyDoc_STRVAR(
    buffer_doc,
    "Managed memory: bytes that the host and every device can use, wherever they are.\n"
    "\n"
    "Made by managedmem.empty(), ManagedMemoryResource().allocate() and ManagedBuffer.from_handle(),\n"
    "not directly. A slice of the first axis, buf[a:b], and buf.view() are buffers over the same\n"
    "memory: every operation acts on just their bytes, and they keep the memory alive. A buffer ends\n"
    "with close(), a `with` block, or its last reference.\n"
    "\n"
    "The host reads a result with buf.numpy(), which waits for the devices; it reads and writes\n"
    "through memoryview(buf), numpy.asarray(buf) and numpy.from_dlpack(buf) as well. Devices use\n"
    "__cuda_array_interface__ and DLPack. All of these share the memory without a copy.\n"
    "\n"
    "Every method may be called from every thread; closing in one thread while another uses the\n"
    "buffer is safe.");

PyDoc_STRVAR(
    buffer_from_handle_doc,
    "from_handle(ptr, size, mr=None, owner=None)\n--\n\n"
    "Wrap memory that exists already.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "ptr : int\n"
    "    Its address.\n"
    "size : int\n"
    "    Its size in bytes, at least 1.\n"
    "mr : object, optional\n"
    "    What frees it: close() calls mr.deallocate(ptr, size, stream=stream).\n"
    "owner : object, optional\n"
    "    Kept alive as long as the buffer and its views.\n"
    "\n"
    "Gives an instance of the class it is called on. The address is not checked here; an operation on\n"
    "memory that is not managed raises ValueError. Raises ValueError for mr together with owner, an\n"
    "address or size below 1. Driver: none.");

PyDoc_STRVAR(
    buffer_close_doc,
    "close($self, /, stream=None)\n--\n\n"
    "Free the memory; again is allowed.\n"
    "\n"
    "Waits for work that uses the memory, and with a stream for everything queued on it. Memory of a\n"
    "pool is freed without waiting, in the order of the stream, or without one of the stream it was\n"
    "allocated on. Closing a view ends that view only. Raises BufferError while a memoryview, NumPy\n"
    "array or DLPack tensor of the memory lives; CUDAError for pool memory on a stream that captures a\n"
    "graph, and when the driver refuses, after which the buffer counts as closed.\n"
    "Driver: cuMemFree, cuMemFreeAsync.");

static PyMethodDef buffer_methods[] = {
    {"from_handle", (PyCFunction)(void (*)(void))buffer_from_handle,
     METH_FASTCALL | METH_KEYWORDS | METH_CLASS, buffer_from_handle_doc},
    {"view", (PyCFunction)(void (*)(void))mm_buffer_view_method, METH_FASTCALL | METH_KEYWORDS,
     mm_view_doc},
    {"range", (PyCFunction)(void (*)(void))mm_buffer_range, METH_FASTCALL | METH_KEYWORDS,
     mm_range_doc},
    {"page_runs", mm_buffer_page_runs, METH_NOARGS, mm_page_runs_doc},
    {"prefetch", (PyCFunction)(void (*)(void))mm_buffer_prefetch, METH_FASTCALL | METH_KEYWORDS,
     mm_prefetch_doc},
    {"discard", (PyCFunction)(void (*)(void))mm_buffer_discard, METH_FASTCALL | METH_KEYWORDS,
     mm_discard_doc},
    {"discard_prefetch", (PyCFunction)(void (*)(void))mm_buffer_discard_prefetch,
     METH_FASTCALL | METH_KEYWORDS, mm_discard_prefetch_doc},
    {"copy_from", (PyCFunction)(void (*)(void))mm_buffer_copy_from, METH_FASTCALL | METH_KEYWORDS,
     mm_copy_from_doc},
    {"copy_to", (PyCFunction)(void (*)(void))mm_buffer_copy_to, METH_FASTCALL | METH_KEYWORDS,
     mm_copy_to_doc},
    {"fill", (PyCFunction)(void (*)(void))mm_buffer_fill, METH_FASTCALL | METH_KEYWORDS,
     mm_fill_doc},
    {"numpy", (PyCFunction)(void (*)(void))mm_buffer_numpy, METH_FASTCALL | METH_KEYWORDS,
     mm_numpy_doc},
    {"close", (PyCFunction)(void (*)(void))buffer_close, METH_FASTCALL | METH_KEYWORDS,
     buffer_close_doc},
    {"__array__", (PyCFunction)(void (*)(void))mm_buffer_array, METH_FASTCALL | METH_KEYWORDS,
     mm_buffer_array_doc},
    {"__dlpack__", (PyCFunction)(void (*)(void))mm_buffer_dlpack, METH_FASTCALL | METH_KEYWORDS,
     mm_buffer_dlpack_doc},
    {"__dlpack_device__", mm_buffer_dlpack_device, METH_NOARGS, mm_buffer_dlpack_device_doc},
    {"__enter__", buffer_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nThe buffer itself."},
    {"__exit__", (PyCFunction)(void (*)(void))buffer_exit, METH_FASTCALL,
     "__exit__($self, /, *exception)\n--\n\nClose the buffer."},
    {"__reduce__", buffer_reduce, METH_NOARGS,
     "__reduce__($self, /)\n--\n\nRaises TypeError: memory cannot be pickled."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"handle", buffer_get_handle, NULL, "The address as an int; 0 once closed.", NULL},
    {"size", buffer_get_size, NULL, "The size in bytes.", NULL},
    {"nbytes", buffer_get_size, NULL, "The size in bytes.", NULL},
    {"shape", buffer_get_shape, NULL, "The lengths of the axes, as a tuple.", NULL},
    {"dtype", buffer_get_dtype, NULL, "The element type's name, such as \"float32\".", NULL},
    {"itemsize", buffer_get_itemsize, NULL, "Bytes of an element.", NULL},
    {"owner", buffer_get_owner, NULL,
     "What from_handle() was told to keep alive, until the buffer object ends; or None.", NULL},
    {"memory_resource", buffer_get_resource, NULL, "What allocated the memory, or None.", NULL},
    {"device_id", buffer_get_device_id, NULL,
     "The owner of device memory; of managed memory the device that was current at the allocation or\n"
     "that its pool prefers, not where the pages are.\n\n"
     "Driver: cuPointerGetAttributes.",
     NULL},
    {"is_managed", buffer_get_is_managed, NULL,
     "Whether this is managed memory. Driver: cuPointerGetAttributes.", NULL},
    {"is_host_accessible", buffer_get_is_host_accessible, NULL,
     "Whether the host can use it. Driver: cuPointerGetAttributes.", NULL},
    {"is_device_accessible", buffer_get_is_device_accessible, NULL,
     "Whether devices can use it. Driver: cuPointerGetAttributes.", NULL},
    {"is_closed", buffer_get_is_closed, NULL, "Whether the buffer can no longer be used.", NULL},
    {"is_mapped", buffer_get_is_mapped, NULL,
     "False: the memory is not mapped from a file or another process.", NULL},
    {"ipc_descriptor", buffer_get_ipc_descriptor, NULL,
     "Raises NotImplementedError: the memory cannot be shared with other processes.", NULL},
    {"read_mostly", mm_buffer_get_read_mostly, mm_buffer_set_read_mostly,
     "Whether every page is advised to be read mostly: copied to each reader, not moved.\n\n"
     "Read from and written to the driver each time; takes True and False.\n"
     "Driver: cuMemRangeGetAttribute, cuMemAdvise.",
     NULL},
    {"preferred_location", mm_buffer_get_preferred_location, mm_buffer_set_preferred_location,
     "Where the pages should stay: a Device, a Host, or None where unset or not the same for all\n"
     "pages.\n\nAssigning None unsets it. Read from and written to the driver each time.\n"
     "Driver: cuMemRangeGetAttributes, cuMemAdvise.",
     NULL},
    {"accessed_by", mm_buffer_get_accessed_by, mm_buffer_set_accessed_by,
     "The locations that keep a mapping of every page: a live set of Device and Host().\n\n"
     "Assigning an iterable applies the difference, all or nothing.\n"
     "Driver: cuMemRangeGetAttribute, cuMemAdvise.",
     NULL},
    {"last_prefetch_location", mm_buffer_get_last_prefetch_location, NULL,
     "Where the pages were last asked to go: a Device, a Host, or None where never or not the\n"
     "same for all pages.\n\nWhat was asked, not where pages are now.\n"
     "Driver: cuMemRangeGetAttributes.",
     NULL},
    {"__cuda_array_interface__", mm_buffer_array_interface, NULL,
     "The CUDA array interface, version 3, for torch, CuPy, numba and others.\n\n"
     "Its stream is the legacy default one, on which this library works unless told otherwise;\n"
     "after work on another stream synchronise that first.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef buffer_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_buffer, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot buffer_slots[] = {
    {Py_tp_doc, (void *)buffer_doc},
    {Py_tp_new, buffer_new},
    {Py_tp_traverse, buffer_traverse},
    {Py_tp_clear, buffer_clear},
    {Py_tp_dealloc, buffer_dealloc},
    {Py_tp_repr, buffer_repr},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_mp_length, buffer_length},
    {Py_mp_subscript, mm_buffer_subscript},
    {Py_bf_getbuffer, mm_buffer_getbuffer},
    {Py_bf_releasebuffer, mm_buffer_releasebuffer},
    {0, NULL},
};

static PyType_Spec buffer_spec = {
    .name = "managedmem.ManagedBuffer",
    .basicsize = sizeof(mm_buffer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = buffer_slots,
};

int
mm_buffer_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &buffer_spec, &state->buffer_type);
}
