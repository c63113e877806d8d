/* resource.c: the type ManagedMemoryResource. It draws from cuMemAllocManaged and not from a driver
 * pool, because drivers refuse all advice on pool memory. */
#include "resource.h"

#include "stream.h"

PyObject *
mm_allocate(mm_state *state, PyObject *resource, size_t bytes, const mm_dtype *dtype,
            int dimensions, const Py_ssize_t *shape)
{
    mm_driver *cu = mm_open(state);
    mm_memory *memory;
    mm_status st;

    if (cu == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    memory = mm_memory_allocate(cu, bytes, &st);
    Py_END_ALLOW_THREADS
    if (memory == NULL) {
        return mm_raise(state, &st);
    }
    return mm_buffer_new(state, state->buffer_type, memory, dtype, dimensions, shape, NULL,
                         resource);
}

static PyObject *
resource_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const mm_parameters parameters = {"ManagedMemoryResource", NULL, 0, 0, 0};

    return mm_args_new(&parameters, args, kwargs, NULL) < 0 ? NULL : mm_alloc_object(type);
}

static void
resource_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    mm_free_object(op);
}

static PyObject *
resource_allocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"size", "stream"};
    static const mm_parameters parameters = {"allocate", names, 1, 1, 2};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_stream_use use;
    PyObject *given[2];
    Py_ssize_t shape;
    size_t size;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_size(given[0], "size", &size) < 0
        || mm_stream_begin(state, given[1], &use) < 0) {
        return NULL;
    }
    mm_stream_end(&use); /* checked only: the memory is there at once, for every stream */
    shape = (Py_ssize_t)size;
    return mm_allocate(state, op, size, mm_read_dtype(NULL), 1, &shape);
}

static PyObject *
resource_deallocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"ptr", "size", "stream"};
    static const mm_parameters parameters = {"deallocate", names, 2, 2, 3};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *given[3];
    mm_stream_use use;
    CUdeviceptr start;
    mm_driver *cu;
    mm_status st;
    size_t size;
    int rc = 0;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_address(given[0], &start) < 0 || mm_read_size(given[1], "size", &size) < 0
        || (cu = mm_open(state)) == NULL || mm_stream_begin(state, given[2], &use) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (given[2] != NULL && given[2] != Py_None) {
        rc = mm_stream_synchronize(cu, use.handle, &st);
    }
    rc = rc < 0 ? rc : mm_free(cu, start, &st);
    Py_END_ALLOW_THREADS
    mm_stream_end(&use);
    if (rc < 0) {
        return mm_raise(state, &st);
    }
    Py_RETURN_NONE;
}

static PyObject *
resource_get_true(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_TRUE;
}

static PyObject *
resource_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_status st;
    int device;

    if (cu == NULL) {
        return NULL;
    }
    return mm_current_device(cu, &device, &st) < 0 ? mm_raise(state, &st)
                                                   : PyLong_FromLong(device);
}

static PyObject *
resource_repr(PyObject *Py_UNUSED(op))
{
    return PyUnicode_FromString("ManagedMemoryResource()");
}

PyDoc_STRVAR(
    resource_doc,
    "ManagedMemoryResource()\n"
    "--\n"
    "\n"
    "Allocates managed memory, each buffer on pages of its own.\n"
    "\n"
    "It uses cuMemAllocManaged and no driver pool, so every advice works on what it gives. Making one\n"
    "opens no driver. Safe from every thread.");

PyDoc_STRVAR(
    resource_allocate_doc,
    "allocate($self, size, *, stream=None)\n--\n\n"
    "A new ManagedBuffer of size bytes (dtype uint8, one axis), with undefined contents.\n"
    "\n"
    "The memory is usable at once, on every stream; stream is accepted so that resources are\n"
    "interchangeable. No page is populated before its first use or prefetch. Raises ValueError for a\n"
    "size below 1, TypeError for no int, CUDAOutOfMemoryError when there is no memory.\n"
    "Driver: cuMemAllocManaged.");

PyDoc_STRVAR(
    resource_deallocate_doc,
    "deallocate($self, ptr, size, *, stream=None)\n--\n\n"
    "Free memory by its address; what a ManagedBuffer made with from_handle(mr=...) calls.\n"
    "\n"
    "With a stream, after everything queued on it. Driver: cuMemFree.");

static PyMethodDef resource_methods[] = {
    {"allocate", (PyCFunction)(void (*)(void))resource_allocate, METH_FASTCALL | METH_KEYWORDS,
     resource_allocate_doc},
    {"deallocate", (PyCFunction)(void (*)(void))resource_deallocate, METH_FASTCALL | METH_KEYWORDS,
     resource_deallocate_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef resource_getset[] = {
    {"is_host_accessible", resource_get_true, NULL, "True: the host can use the memory.", NULL},
    {"is_device_accessible", resource_get_true, NULL, "True: every device can use the memory.",
     NULL},
    {"device_id", resource_get_device_id, NULL,
     "The calling thread's current device, on which allocations are accounted.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot resource_slots[] = {
    {Py_tp_doc, (void *)resource_doc},  {Py_tp_new, resource_new},
    {Py_tp_traverse, mm_traverse_type}, {Py_tp_dealloc, resource_dealloc},
    {Py_tp_repr, resource_repr},        {Py_tp_methods, resource_methods},
    {Py_tp_getset, resource_getset},    {0, NULL},
};

static PyType_Spec resource_spec = {
    .name = "managedmem.ManagedMemoryResource",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = resource_slots,
};

int
mm_resource_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &resource_spec, &state->resource_type);
}
