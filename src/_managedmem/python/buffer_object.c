/* buffer_object.c: the type ManagedBuffer: from_handle(), its properties and its tables. Its
 * methods are in the other buffer_*.c files. */
#include "buffer.h"

#include <stdio.h>
#include <unistd.h>

#include "foreign_resource.h"

static PyMethodDef buffer_methods[];

/* The module's state, found from ManagedBuffer or a class that is derived from it in Python. */
static mm_state *
buffer_class_state(PyTypeObject *type)
{
    while (PyType_GetSlot(type, Py_tp_methods) != (void *)buffer_methods) {
        type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base);
        assert(type != NULL);
    }
    return mm_type_state(type);
}

PyDoc_STRVAR(
    buffer_doc,
    "Managed memory: bytes that the host and every device can access at one address.\n"
    "\n"
    "Made by managedmem.empty(), ManagedMemoryResource().allocate() and\n"
    "ManagedBuffer.from_handle(), not directly. buf[i], buf[a:b] of the first axis and buf.view()\n"
    "are buffers over the same memory, which they keep alive; operations on them act on just\n"
    "their bytes. On an empty buffer operations check their arguments and do nothing. A buffer\n"
    "ends with close(), a `with` block, or its last reference.\n"
    "\n"
    "The host reads a result with buf.numpy(), which waits for the stream. memoryview(buf),\n"
    "numpy.asarray(buf) and numpy.from_dlpack(buf) read and write without waiting. Devices use\n"
    "__cuda_array_interface__ and DLPack. All of these share the memory without a copy.\n"
    "\n"
    "Every method can be called from every thread; closing in one thread while another uses the buffer\n"
    "is safe.");

static PyObject *
buffer_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError,
                    "ManagedBuffer cannot be made directly: use managedmem.empty(), "
                    "ManagedMemoryResource().allocate() or ManagedBuffer.from_handle()");
    return NULL;
}

PyDoc_STRVAR(buffer_enter_block_doc,
             "__enter__($self, /)\n--\n\nReturn the buffer; RuntimeError when closed.");

static PyObject *
buffer_enter_block(PyObject *op, PyObject *Py_UNUSED(none))
{
    return mm_buffer_check_open(mm_buffer_of(op)) < 0 ? NULL : Py_NewRef(op);
}

/* --- making from memory that exists already --------------------------------------------- */

static PyObject *
raise_mr_with_owner(void)
{
    PyErr_SetString(PyExc_ValueError,
                    "mr and owner exclude each other: the memory is freed through mr, or kept "
                    "alive by owner");
    return NULL;
}

/* Makes the tuple of mm_foreign_resource_stream, for the stream that mr.deallocate() gets. */
static PyObject *
read_deallocation_stream(mm_state *state, PyObject *resource, PyObject *stream)
{
    if (resource == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "stream needs mr: it is the stream that mr.deallocate() is called with");
        return NULL;
    }
    return mm_foreign_resource_check(resource) < 0
               ? NULL
               : mm_foreign_resource_stream(state, resource, stream);
}

/* Makes a buffer over memory that its resource deallocates. Steals the references to memory and
 * streams. */
static PyObject *
new_foreign_buffer(mm_state *state, PyTypeObject *type, mm_memory *memory, PyObject *resource,
                   PyObject *streams)
{
    PyObject *buffer;

    assert(resource != NULL && streams != NULL && !memory->owned);
    buffer = mm_buffer_new_bytes(state, type, memory, NULL, resource);
    if (buffer == NULL) {
        Py_DECREF(streams);
        return NULL;
    }
    mm_buffer_of(buffer)->stream = streams;
    mm_buffer_of(buffer)->foreign_pid = getpid();
    return buffer;
}

/* Wraps memory; NULL with an exception. `lives` is true if the memory ends with its buffer. The
 * name is set before a buffer exists: dropping a buffer after a failure would call the
 * resource. */
static mm_memory *
wrap_memory(mm_state *state, CUdeviceptr start, size_t size, const mm_access *access, bool lives,
            const char *name)
{
    mm_status st;
    mm_memory *memory = mm_memory_wrap(start, size, &st);
    bool done;

    if (memory != NULL && lives) {
        mm_memory_add_entry(memory);
    }
    if (memory != NULL && name != NULL && mm_memory_set_name(memory, name, &done, &st) < 0) {
        mm_buffer_release(memory);
        memory = NULL;
    }
    if (memory == NULL) {
        (void)mm_raise(state, &st);
        return NULL;
    }
    memory->access = *access;
    return memory;
}

PyDoc_STRVAR(
    buffer_from_handle_doc,
    "from_handle(ptr, size, mr=None, owner=None, *, stream=None, is_host_accessible=None, name=None)\n"
    "--\n\n"
    "Wrap memory that exists already.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "ptr : int\n"
    "    The address.\n"
    "size : int\n"
    "    The size in bytes. With size 0 the address may be 0.\n"
    "mr : object, optional\n"
    "    The resource that frees the memory: the end of the buffer calls\n"
    "    mr.deallocate(ptr, size, stream=stream).\n"
    "owner : object, optional\n"
    "    An object to keep alive until the buffer is closed, or the buffer and its views are gone.\n"
    "stream : stream, optional\n"
    "    The stream for mr.deallocate(), kept alive. None: the legacy default stream.\n"
    "is_host_accessible : bool, optional\n"
    "    For memory that the driver does not know, such as that of malloc() or mmap(). True: the\n"
    "    host can read and write it, so that host views and copies are allowed; a wrong True ends\n"
    "    the process. None: host views and copies are allowed if the owner holds that memory (an\n"
    "    object of the buffer protocol or a torch tensor), or if mr.is_host_accessible is true.\n"
    "    False: no host views of any memory.\n"
    "name : str, optional\n"
    "    The name of the buffer, as ManagedBuffer.name has it.\n"
    "\n"
    "Returns an instance of the class it is called on. The address is not checked here: an\n"
    "operation on memory that is not managed raises ValueError, and a host view of an unknown\n"
    "address BufferError. If the owner shows the memory as read-only, by the buffer protocol,\n"
    "__cuda_array_interface__ or __array_interface__, the buffer is read-only too: writes and\n"
    "discards raise ValueError. While a host view lives, the owner cannot release that memory.\n"
    "mr.deallocate() always gets a stream object: a cuda.core.Stream if mr is a resource of\n"
    "cuda.core, else stream itself or a Stream. Raises ValueError for mr together with owner,\n"
    "stream without mr, a bad address or name, or a size below 0; TypeError for mr without\n"
    "deallocate(). Safe from every thread. Driver: none.");

static PyObject *
buffer_from_handle(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { PTR, SIZE, MR, OWNER, STREAM, IS_HOST_ACCESSIBLE, NAME, ARGC };
    static mm_signature signature = {.doc = buffer_from_handle_doc};
    mm_state *state = buffer_class_state((PyTypeObject *)type);
    PyObject *argv[ARGC], *resource, *owner, *streams = NULL;
    mm_access access = {0};
    CUdeviceptr start;
    mm_memory *memory;
    const char *name;
    size_t size;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_address_range(argv[PTR], argv[SIZE], &start, &size) < 0
        || mm_read_name(argv[NAME], &name) < 0) {
        return NULL;
    }
    resource = argv[MR] == Py_None ? NULL : argv[MR];
    owner = argv[OWNER] == Py_None ? NULL : argv[OWNER];
    if (resource != NULL && owner != NULL) {
        return raise_mr_with_owner();
    }
    if ((owner != NULL || argv[IS_HOST_ACCESSIBLE] != NULL)
        && mm_read_access(state, argv[IS_HOST_ACCESSIBLE], owner, start, size, &access) < 0) {
        return NULL;
    }
    if ((resource != NULL || (argv[STREAM] != NULL && argv[STREAM] != Py_None))
        && (streams = read_deallocation_stream(state, resource, argv[STREAM])) == NULL) {
        return NULL;
    }
    memory = wrap_memory(state, start, size, &access, streams != NULL, name);
    if (memory == NULL) {
        Py_XDECREF(streams);
        return NULL;
    }
    return streams ? new_foreign_buffer(state, (PyTypeObject *)type, memory, resource, streams)
                   : mm_buffer_new_bytes(state, (PyTypeObject *)type, memory, owner, NULL);
}

/* --- properties ------------------------------------------------------------------------- */

/* "name='weights' ", or an empty text. */
static PyObject *
repr_of_name(PyObject *op)
{
    PyObject *name = mm_buffer_get_name(op, NULL), *text = NULL;

    if (name != NULL) {
        text = name == Py_None ? PyUnicode_FromString("") : PyUnicode_FromFormat("name=%R ", name);
        Py_DECREF(name);
    }
    return text;
}

/* Names the kind of memory, in front of the class name, if it is open and not managed. Empty for
 * managed memory, and if the driver cannot be queried. */
static const char *
repr_of_kind(const mm_buffer *b)
{
    mm_driver *cu = mm_driver_usable();
    mm_pointer_attributes attributes;
    mm_status ignored;
    bool known;

    if (cu == NULL || (b->memory->owned && b->memory->device == MM_ANY_DEVICE)
        || !mm_guard_enter(&b->memory->guard)) {
        return "";
    }
    known = mm_buffer_query_entered(b, cu, &attributes, &ignored) == 0;
    mm_guard_leave(&b->memory->guard);
    if (!known || attributes.managed) {
        return "";
    }
    return attributes.type == CU_MEMORYTYPE_DEVICE ? "device memory in "
           : attributes.type == CU_MEMORYTYPE_HOST ? "pinned host memory in "
                                                   : "system memory in ";
}

static PyObject *
buffer_repr(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);
    PyObject *shape, *type, *name, *text = NULL;
    const char *kind = "";
    char state[32] = "closed";

    if (!mm_buffer_is_closed(b)) {
        (void)snprintf(state, sizeof state, "handle=0x%llx", (unsigned long long)b->start);
        kind = repr_of_kind(b);
    }
    type = PyType_GetName(Py_TYPE(op));
    shape = type ? mm_buffer_get_shape(op, NULL) : NULL;
    name = shape ? repr_of_name(op) : NULL;
    if (name != NULL) {
        text = PyUnicode_FromFormat("<%s%U %Ushape=%R dtype=%s %s>", kind, type, name, shape,
                                    b->dtype->name, state);
    }
    Py_XDECREF(type);
    Py_XDECREF(shape);
    Py_XDECREF(name);
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
buffer_get_dtype(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_dtype_object(mm_buffer_of(op)->state, mm_buffer_of(op)->dtype);
}

static PyObject *
buffer_get_itemsize(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(mm_buffer_of(op)->dtype->itemsize);
}

static PyObject *
buffer_get_owner(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *owner = mm_buffer_owner(mm_buffer_of(op));

    return owner ? owner : Py_NewRef(Py_None);
}

static PyObject *
buffer_get_resource(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *resource = mm_buffer_resource(mm_buffer_of(op));

    return resource ? resource : Py_NewRef(Py_None);
}

static PyObject *
buffer_get_is_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_buffer_is_closed(mm_buffer_of(op)));
}

static PyObject *
buffer_get_is_managed(PyObject *op, void *Py_UNUSED(closure))
{
    bool managed;

    return mm_buffer_is_managed(mm_buffer_of(op), &managed) < 0 ? NULL : PyBool_FromLong(managed);
}

static PyObject *
buffer_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_attributes attributes;
    mm_driver *cu;

    if (mm_buffer_query(mm_buffer_of(op), &attributes, &cu) < 0) {
        return NULL;
    }
    if (!attributes.managed && attributes.type == 0) {
        return PyLong_FromLong(-1);
    }
    return PyLong_FromLong(
        attributes.device >= 0 && attributes.device < cu->device_count ? attributes.device : 0);
}

static PyObject *
buffer_get_is_host_accessible(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_attributes attributes;
    mm_driver *cu;
    int access;

    if (mm_buffer_query(mm_buffer_of(op), &attributes, &cu) < 0) {
        return NULL;
    }
    access = mm_host_access(mm_buffer_of(op), &attributes, NULL);
    assert((access < 0) == (PyErr_Occurred() != NULL));
    return access < 0 ? NULL : PyBool_FromLong(access);
}

static PyObject *
buffer_get_is_device_accessible(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pointer_attributes attributes;
    mm_driver *cu;

    if (mm_buffer_query(mm_buffer_of(op), &attributes, &cu) < 0) {
        return NULL;
    }
    return PyBool_FromLong(mm_device_reaches(cu, &attributes));
}

static PyObject *
buffer_get_is_mapped(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_FALSE;
}

static PyObject *
raise_no_ipc(mm_state *state)
{
    PyErr_SetString(state->ipc_error,
                    "this memory cannot be shared between processes: the driver has no IPC for "
                    "managed memory, and the pools here are made without it. Copy it to other "
                    "device memory and share that.");
    return NULL;
}

static PyObject *
buffer_get_ipc_descriptor(PyObject *op, void *Py_UNUSED(closure))
{
    return raise_no_ipc(mm_buffer_of(op)->state);
}

PyDoc_STRVAR(
    buffer_from_ipc_descriptor_doc,
    "from_ipc_descriptor(mr, ipc_descriptor, *, stream=None)\n--\n\n"
    "Raises IPCNotSupportedError: the driver has no IPC for managed memory. Driver: none.");

static PyObject *
buffer_from_ipc_descriptor(PyObject *type, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    static mm_signature signature = {.doc = buffer_from_ipc_descriptor_doc};
    PyObject *argv[3];

    return mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
               ? NULL
               : raise_no_ipc(buffer_class_state((PyTypeObject *)type));
}

PyDoc_STRVAR(buffer_reduce_doc,
             "__reduce__($self, /)\n--\n\nRaises TypeError: memory cannot be pickled.");

static PyObject *
buffer_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    PyErr_Format(PyExc_TypeError, "%R cannot be pickled: send bytes(buf) instead", op);
    return NULL;
}

/* --- tables ----------------------------------------------------------------------------- */

static PyMethodDef buffer_methods[] = {
    MM_CLASS_METHOD("from_handle", buffer_from_handle, buffer_from_handle_doc),
    MM_CLASS_METHOD("from_ipc_descriptor", buffer_from_ipc_descriptor,
                    buffer_from_ipc_descriptor_doc),
    MM_METHOD("view", mm_buffer_view_method, mm_view_doc),
    MM_METHOD("range", mm_buffer_range, mm_range_doc),
    {"page_runs", mm_buffer_page_runs, METH_NOARGS, mm_page_runs_doc},
    {"residency", mm_buffer_residency, METH_NOARGS, mm_buffer_residency_doc},
    MM_METHOD("prefetch", mm_buffer_prefetch, mm_prefetch_doc),
    MM_METHOD("discard", mm_buffer_discard, mm_discard_doc),
    MM_METHOD("discard_prefetch", mm_buffer_discard_prefetch, mm_discard_prefetch_doc),
    MM_METHOD("attach", mm_buffer_attach, mm_attach_doc),
    MM_METHOD("copy_from", mm_buffer_copy_from, mm_copy_from_doc),
    MM_METHOD("copy_to", mm_buffer_copy_to, mm_copy_to_doc),
    {"__copy__", mm_buffer_copy, METH_NOARGS, mm_copy_doc},
    {"__deepcopy__", mm_buffer_copy, METH_O, mm_deepcopy_doc},
    MM_METHOD("fill", mm_buffer_fill, mm_fill_doc),
    MM_METHOD("numpy", mm_buffer_numpy, mm_numpy_doc),
    MM_METHOD("torch", mm_buffer_torch, mm_torch_doc),
    MM_METHOD("cupy", mm_buffer_cupy, mm_cupy_doc),
    MM_METHOD("close", mm_buffer_close, mm_buffer_close_doc),
    {"set_deallocation_stream", mm_buffer_set_deallocation_stream, METH_O,
     mm_set_deallocation_stream_doc},
    MM_METHOD("__array__", mm_buffer_array, mm_buffer_array_doc),
    MM_METHOD("__dlpack__", mm_buffer_dlpack, mm_buffer_dlpack_doc),
    {"__dlpack_device__", mm_buffer_dlpack_device, METH_NOARGS, mm_buffer_dlpack_device_doc},
    {"__enter__", buffer_enter_block, METH_NOARGS, buffer_enter_block_doc},
    MM_POSITIONAL_METHOD("__exit__", mm_buffer_exit, mm_buffer_exit_doc),
    {"__reduce__", buffer_reduce, METH_NOARGS, buffer_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef buffer_getset[] = {
    {"handle", buffer_get_handle, NULL,
     "The address as an int; 0 once closed, and for an allocation of 0 bytes.", NULL},
    {"size", buffer_get_size, NULL,
     "The size in bytes, as in cuda.core and unlike NumPy and torch.\n\n"
     "nbytes is the same number. The number of elements is nbytes // itemsize.",
     NULL},
    {"nbytes", buffer_get_size, NULL, "The size in bytes.", NULL},
    {"shape", mm_buffer_get_shape, NULL, "The lengths of the axes in elements, as a tuple.", NULL},
    {"strides", mm_buffer_get_strides, NULL,
     "Bytes from one item of each axis to the next, as a tuple. Always in C order.", NULL},
    {"ndim", mm_buffer_get_ndim, NULL, "The number of axes: 0 to 8.", NULL},
    {"dtype", buffer_get_dtype, NULL,
     "The element type, a DType: a str such as \"float32\" that is also equal to numpy.float32 and the\n"
     "dtype objects of other libraries.",
     NULL},
    {"itemsize", buffer_get_itemsize, NULL, "The size of an element in bytes.", NULL},
    {"name", mm_buffer_get_name, mm_buffer_set_name,
     "The name of the memory in traces and in repr: a str of at most 200 bytes of UTF-8, or None.\n\n"
     "Several buffers may have the same name. A view has the name of its whole buffer: assigning\n"
     "to the name of a view is a ValueError, but trace.name(view, label) names the part in a\n"
     "trace. A closed buffer keeps its name; copies have none. Assigning raises TypeError for\n"
     "other objects; ValueError for an empty, too long or unencodable str and one with a null\n"
     "character; RuntimeError when closed. Safe from every thread. Driver: none.",
     NULL},
    {"owner", buffer_get_owner, NULL,
     "The owner= of from_handle(); None without one, and once the buffer is closed.", NULL},
    {"memory_resource", buffer_get_resource, NULL,
     "The memory resource of the buffer; None without one, and once the buffer is closed.", NULL},
    {"device_id", buffer_get_device_id, NULL,
     "The ordinal of the device that owns the memory: for managed memory the device that was current at\n"
     "the allocation or that its pool prefers, wherever the pages are; -1 for system memory.\n\n"
     "Raises RuntimeError when closed. Driver: cuPointerGetAttributes.",
     NULL},
    {"is_managed", buffer_get_is_managed, NULL,
     "True for managed memory. Raises RuntimeError when closed. Driver: cuPointerGetAttributes.",
     NULL},
    {"is_host_accessible", buffer_get_is_host_accessible, NULL,
     "True if the host can access the memory: managed and pinned memory, and system memory that\n"
     "from_handle(..., is_host_accessible=True), the owner or the resource vouches for.\n\n"
     "Raises RuntimeError when closed. Driver: cuPointerGetAttributes.",
     NULL},
    {"is_device_accessible", buffer_get_is_device_accessible, NULL,
     "True if devices can access the memory. Raises RuntimeError when closed.\n\n"
     "Driver: cuPointerGetAttributes.",
     NULL},
    {"attachment", mm_buffer_get_attachment, NULL, mm_attachment_doc, NULL},
    {"is_closed", buffer_get_is_closed, NULL,
     "True once the buffer is closed; repr, size and close() still work.", NULL},
    {"is_mapped", buffer_get_is_mapped, NULL,
     "False: the memory is not mapped from a file or another process.", NULL},
    {"ipc_descriptor", buffer_get_ipc_descriptor, NULL,
     "Raises IPCNotSupportedError: the memory cannot be shared with other processes. The error is a\n"
     "NotImplementedError, and an AttributeError, so that hasattr() is False.",
     NULL},
    {"read_mostly", mm_buffer_get_read_mostly, mm_buffer_set_read_mostly,
     "True if every page is advised to be read mostly: copied to each reader, not moved.\n\n"
     "Reading the property queries the driver. Assigning to it advises the pages, all or nothing;\n"
     "a value that is not a bool is a TypeError. Raises RuntimeError when closed, ValueError if\n"
     "this is not managed memory. Safe from every thread.\n"
     "Driver: cuMemRangeGetAttribute, cuMemAdvise.",
     NULL},
    {"preferred_location", mm_buffer_get_preferred_location, mm_buffer_set_preferred_location,
     "Where the pages should stay: a Device, a Host, or None if unset or not the same for all pages.\n\n"
     "Reading the property queries the driver. Assigning to it advises the pages, all or nothing;\n"
     "None unsets the location. An object that is not a location is a TypeError. Raises\n"
     "RuntimeError when closed, ValueError if this is not managed memory. Safe from every thread.\n"
     "Driver: cuMemRangeGetAttributes, cuMemAdvise.",
     NULL},
    {"accessed_by", mm_buffer_get_accessed_by, mm_buffer_set_accessed_by,
     "The locations that keep a mapping of every page: a live set of Device and Host().\n\n"
     "Assigning an iterable advises the difference, all or nothing. See AccessedBySetProxy for errors\n"
     "and threads. Driver: cuMemRangeGetAttribute, cuMemAdvise.",
     NULL},
    {"last_prefetch_location", mm_buffer_get_last_prefetch_location, NULL,
     "The destination of the last prefetch: a Device, a Host, or None if there was none or it is not\n"
     "the same for all pages.\n\n"
     "The pages can have moved since. Raises as preferred_location does. Safe from every thread.\n"
     "Driver: cuMemRangeGetAttributes.",
     NULL},
    {"__cuda_array_interface__", mm_buffer_array_interface, NULL,
     "The CUDA array interface, version 3, for torch, CuPy, numba and others.\n\n"
     "Its stream is the legacy default stream, on which this library works by default, or None\n"
     "for wrapped memory that is not managed. After work on another stream synchronise that\n"
     "stream first. Raises ExportError, a BufferError and an AttributeError, for wrapped system\n"
     "memory that no device reaches; RuntimeError when closed. Safe from every thread.\n"
     "Driver: cuPointerGetAttributes for wrapped memory.",
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
    {Py_tp_traverse, mm_buffer_traverse},
    {Py_tp_clear, mm_buffer_clear},
    {Py_tp_finalize, mm_buffer_finalize},
    {Py_tp_dealloc, mm_buffer_last_reference},
    {Py_tp_repr, buffer_repr},
    {Py_tp_methods, buffer_methods},
    {Py_tp_getset, buffer_getset},
    {Py_tp_members, buffer_members},
    {Py_mp_length, mm_buffer_length},
    {Py_mp_subscript, mm_buffer_subscript},
    {Py_mp_ass_subscript, mm_buffer_refuse_assignment},
    {Py_sq_length, mm_buffer_length},
    {Py_sq_item, mm_buffer_item},
    {Py_sq_contains, mm_buffer_refuse_search},
    {Py_nb_bool, mm_buffer_bool},
    {Py_nb_int, mm_buffer_refuse_number},
    {Py_nb_float, mm_buffer_refuse_number},
    {Py_tp_iter, mm_buffer_iter},
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
