/* slab_object.c: the type _Slab: memory for the homes and frames of working sets and of
 * managedmem.torch. */
#include <string.h>

#include "../memory/copy.h"
#include "../working/slab.h"
#include "args.h"
#include "foreign_memory.h"

typedef struct {
    PyObject_HEAD
    mm_slab *slab;
} slab_object;

static slab_object *
slab_of(PyObject *op)
{
    return (slab_object *)op;
}

/* A new _Slab, which takes over the caller's hold on the slab; a failure ends the hold. */
static PyObject *
wrap_slab(PyTypeObject *type, mm_slab *slab)
{
    PyObject *self = mm_alloc_object(type);

    if (self == NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_slab_free(slab);
        Py_END_ALLOW_THREADS
        return NULL;
    }
    slab_of(self)->slab = slab;
    return self;
}

static mm_slab *
make_slab(mm_driver *cu, int device, size_t size, bool on_host, bool can_suspend, mm_status *st)
{
    return on_host ? mm_slab_on_host(device, size, st)
                   : mm_slab_on_device(cu, device, size, can_suspend, st);
}

PyDoc_STRVAR(
    slab_doc,
    "_Slab(device, nbytes, on_host, suspendable=False)\n--\n\n"
    "Plain memory that is freed with its last reference. With on_host it is memory of the\n"
    "host, which lock() page-locks so that the device reaches it; else memory of the device,\n"
    "which suspend() gives back for a while if it is suspendable.");

static PyObject *
slab_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { DEVICE, NBYTES, ON_HOST, SUSPENDABLE, ARGC };
    static mm_signature signature = {.doc = slab_doc};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC];
    bool on_host = false, can_suspend = false;
    mm_driver *cu;
    size_t size, device;
    mm_slab *slab;
    mm_status st;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || mm_read_size(argv[DEVICE], "device", &device) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0
        || mm_read_flag(state, argv[ON_HOST], "on_host", &on_host) < 0
        || (argv[SUSPENDABLE] != NULL
            && mm_read_flag(state, argv[SUSPENDABLE], "suspendable", &can_suspend) < 0)
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    slab = make_slab(cu, (int)device, size, on_host, can_suspend, &st);
    Py_END_ALLOW_THREADS
    return slab != NULL ? wrap_slab(type, slab) : mm_raise(state, &st);
}

PyDoc_STRVAR(
    slab_of_file_doc,
    "of_file(device, file)\n--\n\n"
    "Host memory that other processes map too: the whole file of a descriptor of memfd_create,\n"
    "which is sealed with F_SEAL_SHRINK. The descriptor can be closed afterwards.");

static PyObject *
slab_of_file(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { DEVICE, FILE, ARGC };
    static mm_signature signature = {.doc = slab_of_file_doc};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    PyObject *argv[ARGC];
    size_t device;
    int file;
    mm_slab *slab;
    mm_status st;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_size(argv[DEVICE], "device", &device) < 0
        || (file = PyObject_AsFileDescriptor(argv[FILE])) < 0 || mm_open(state) == NULL) {
        return NULL;
    }
    slab = mm_slab_of_file((int)device, file, &st);
    return slab != NULL ? wrap_slab((PyTypeObject *)type, slab) : mm_raise(state, &st);
}

PyDoc_STRVAR(slab_at_doc, "at(address, nbytes)\n--\n\n"
                          "Another _Slab over the host memory with these bytes, or None.");

static PyObject *
slab_at(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { ADDRESS, NBYTES, ARGC };
    static mm_signature signature = {.doc = slab_at_doc};
    PyObject *argv[ARGC];
    size_t address, size;
    mm_slab *slab;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_size(argv[ADDRESS], "address", &address) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0) {
        return NULL;
    }
    slab = mm_slab_hold(address, size);
    return slab != NULL ? wrap_slab((PyTypeObject *)type, slab) : Py_NewRef(Py_None);
}

static void
slab_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_BEGIN_ALLOW_THREADS
    mm_slab_free(slab_of(op)->slab);
    Py_END_ALLOW_THREADS
    mm_free_object(op);
}

/* Calls a function that needs only the slab, without the GIL. */
static PyObject *
call_slab(PyObject *op, int (*call)(mm_driver *, mm_slab *, mm_status *))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = call(cu, slab_of(op)->slab, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(slab_lock_doc, "lock($self, /)\n--\n\nPage-lock memory of the host.");

static PyObject *
slab_lock(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_slab(op, mm_slab_lock);
}

static int
suspend_all(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    return mm_slab_suspend(cu, slab, 0, true, st);
}

PyDoc_STRVAR(slab_suspend_doc,
             "suspend($self, /)\n--\n\n"
             "Give the memory of the device back to the driver. Until resume(), the address has\n"
             "host memory with the contents. Nothing may use the memory or call methods during\n"
             "this call.");

static PyObject *
slab_suspend(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_slab(op, suspend_all);
}

PyDoc_STRVAR(slab_resume_doc,
             "resume($self, /)\n--\n\n"
             "Take memory of the device again, with the contents. Nothing may use the memory or\n"
             "call methods during this call.");

static PyObject *
slab_resume(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_slab(op, mm_slab_resume);
}

PyDoc_STRVAR(slab_add_reader_doc,
             "add_reader($self, device, /)\n--\n\n"
             "Note that another device reads the host memory, so that freeing waits for it too.");

static PyObject *
slab_add_reader(PyObject *op, PyObject *value)
{
    mm_driver *cu = mm_open(mm_type_state(Py_TYPE(op)));
    size_t device;

    if (cu == NULL || mm_read_size(value, "device", &device) < 0) {
        return NULL;
    }
    if (device >= (size_t)cu->device_count) {
        return PyErr_Format(PyExc_ValueError, "device must be below %d, got %zu", cu->device_count,
                            device);
    }
    mm_slab_add_reader(slab_of(op)->slab, (int)device);
    Py_RETURN_NONE;
}

/* Reads another library's array, whose bytes can be copied as they lie in memory. */
static int
read_source(mm_state *state, PyObject *value, mm_foreign *source)
{
    if (mm_read_foreign(state, value, true, source) < 0) {
        return -1;
    }
    if (!source->strided && !source->swapped && !source->lazy) {
        return 0;
    }
    Py_CLEAR(source->export);
    return mm_refuse_foreign(
        PyExc_ValueError, value,
        source->lazy      ? MM_LAZY_TENSOR
        : source->strided ? "cannot be copied: it is not C-contiguous; make a copy that is, as "
                            "numpy.ascontiguousarray() or Tensor.contiguous() does"
                          : "has elements of the other byte order: convert it, as "
                            "array.astype(array.dtype.newbyteorder(\"=\")) does");
}

/* Copies device memory after the work of its producer. The copy is complete at the return. */
static int
copy_source(mm_driver *cu, const mm_slab *slab, size_t offset, const mm_foreign *source,
            mm_status *st)
{
    const mm_device_stream stream = {NULL, slab->device};
    mm_pointer_attributes attributes;

    if (mm_pointer_query(cu, source->range.start, &attributes, st) < 0) {
        return -1;
    }
    if (attributes.type == 0) {
        memcpy((char *)(uintptr_t)slab->start + offset,
               (const void *)(uintptr_t)source->range.start, source->range.size);
        return 0;
    }
    if (source->producer != NULL
        && mm_stream_follow(cu, stream, (mm_device_stream){source->producer, MM_ANY_DEVICE}, st)
               < 0) {
        return -1;
    }
    return mm_copy(cu, slab->start + offset, source->range.start, source->range.size, stream, true,
                   st);
}

PyDoc_STRVAR(slab_fill_doc,
             "fill($self, /, offset, nbytes, source)\n--\n\n"
             "Copy an array, which must have nbytes bytes, into the host memory at an offset.");

static PyObject *
slab_fill(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { OFFSET, NBYTES, SOURCE, ARGC };
    static mm_signature signature = {.doc = slab_fill_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    const mm_slab *slab = slab_of(op)->slab;
    mm_driver *cu = mm_open(state);
    PyObject *argv[ARGC];
    mm_foreign source;
    size_t offset, size;
    mm_status st;
    int rc = 0;

    if (cu == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_size(argv[OFFSET], "offset", &offset) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0
        || read_source(state, argv[SOURCE], &source) < 0) {
        return NULL;
    }
    if (source.range.size != size) {
        PyErr_Format(PyExc_ValueError, "%R has %zu bytes, but its shape and dtype need %zu",
                     argv[SOURCE], source.range.size, size);
        rc = -1;
    } else if (!slab->on_host || offset > slab->size || source.range.size > slab->size - offset) {
        PyErr_Format(PyExc_ValueError,
                     "%zu bytes at offset %zu do not fit in the host memory of %zu bytes",
                     source.range.size, offset, slab->size);
        rc = -1;
    } else if (source.range.size > 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = copy_source(cu, slab, offset, &source, &st);
        Py_END_ALLOW_THREADS
        rc = mm_raise_failure(state, rc, &st);
    }
    Py_XDECREF(source.export);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
slab_get_device_id(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(slab_of(op)->slab->device);
}

static PyObject *
slab_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(slab_of(op)->slab->start);
}

static PyObject *
slab_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(slab_of(op)->slab->size);
}

static PyObject *
slab_get_is_suspended(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(slab_of(op)->slab->mapping.is_suspended);
}

static PyObject *
slab_get_has_home(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(slab_of(op)->slab->mapping.has_home);
}

static PyObject *
slab_get_is_shared(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(slab_of(op)->slab->is_shared);
}

static PyMethodDef slab_methods[] = {
    MM_CLASS_METHOD("of_file", slab_of_file, slab_of_file_doc),
    MM_CLASS_METHOD("at", slab_at, slab_at_doc),
    {"lock", slab_lock, METH_NOARGS, slab_lock_doc},
    {"suspend", slab_suspend, METH_NOARGS, slab_suspend_doc},
    {"resume", slab_resume, METH_NOARGS, slab_resume_doc},
    {"add_reader", slab_add_reader, METH_O, slab_add_reader_doc},
    MM_METHOD("fill", slab_fill, slab_fill_doc),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slab_properties[] = {
    {"device_id", slab_get_device_id, NULL, "The ordinal of the device.", NULL},
    {"handle", slab_get_handle, NULL, "The address.", NULL},
    {"nbytes", slab_get_nbytes, NULL, "The size in bytes, in whole pages on the host.", NULL},
    {"is_suspended", slab_get_is_suspended, NULL, "True between suspend() and resume().", NULL},
    {"has_home", slab_get_has_home, NULL, "True once the host has memory for suspend().", NULL},
    {"is_shared", slab_get_is_shared, NULL, "True if other processes map it too.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slab_slots[] = {
    {Py_tp_doc, (void *)slab_doc},
    {Py_tp_new, slab_new},
    {Py_tp_dealloc, slab_dealloc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_methods, slab_methods},
    {Py_tp_getset, slab_properties},
    {0, NULL},
};

int
mm_slab_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem._managedmem._Slab", sizeof(slab_object), 0,
                             slab_slots, &state->slab_type);
}
