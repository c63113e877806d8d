/* buffer_exports.c: exports without a copy: the buffer protocol for the host, DLPack, and
 * __cuda_array_interface__. Each host view and DLPack tensor counts as an export, so that the
 * memory cannot be closed while it lives. */
#include <stdlib.h>

#include "buffer.h"
#include "dlpack_abi.h"
#include "interpreter.h"
#include "leak_warnings.h"
#include "stream_object.h"

/* --- host views ------------------------------------------------------------------------- */

/* The address of empty host views, because consumers may take NULL as a failure. */
static const _Alignas(16) unsigned char no_bytes[16];

static int
export_to_host(mm_buffer *b, PyObject **held)
{
    mm_driver *cu = mm_open(b->state);

    if (cu == NULL) {
        return -1;
    }
    if (!mm_guard_export(&b->guard)) { /* raced */
        return mm_buffer_raise_closed(b);
    }
    if (!mm_guard_export(&b->memory->guard)) { /* raced */
        mm_guard_unexport(&b->guard);
        return mm_buffer_raise_closed(b);
    }
    if (mm_prepare_host_access(b, cu, held) < 0) {
        mm_guard_unexport(&b->memory->guard);
        mm_guard_unexport(&b->guard);
        return -1;
    }
    return 0;
}

int
mm_buffer_getbuffer(PyObject *op, Py_buffer *view, int flags)
{
    mm_buffer *b = mm_buffer_of(op);
    PyObject *held = NULL;

    view->obj = NULL;
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && b->dimensions > 1 && b->size > 0) {
        return MM_ERROR(PyExc_BufferError, "a ManagedBuffer is C-contiguous, not Fortran");
    }
    if ((flags & PyBUF_WRITABLE) && b->memory->access.read_only) {
        return MM_ERROR(PyExc_BufferError, "the memory is read-only, as its owner is");
    }
    if (mm_buffer_check_open(b) < 0) {
        return -1;
    }
    if ((flags & PyBUF_FORMAT) && mm_is_plain_bytes(b->dtype)) { /* NumPy then calls __array__() */
        return MM_ERROR(
            PyExc_BufferError,
            "the buffer protocol has no format for %s: use buf.numpy(), or the bits, as in "
            "buf.view(\"%s\")",
            b->dtype->name, mm_dtype_bits(b->dtype));
    }
    if (export_to_host(b, &held) < 0) {
        return -1;
    }
    view->obj = Py_NewRef(op);
    view->buf = b->start ? (void *)(uintptr_t)b->start : (void *)(uintptr_t)no_bytes;
    view->len = (Py_ssize_t)b->size;
    view->readonly = b->memory->access.read_only;
    view->itemsize = b->dtype->itemsize;
    view->format = flags & PyBUF_FORMAT ? (char *)(uintptr_t)b->dtype->format : NULL;
    view->ndim = flags & PyBUF_ND ? b->dimensions : 1;
    view->shape = flags & PyBUF_ND && view->ndim > 0 ? b->shape : NULL;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES && view->ndim > 0 ? b->strides : NULL;
    view->suboffsets = NULL;
    view->internal = held;
    return 0;
}

void
mm_buffer_releasebuffer(PyObject *op, Py_buffer *view)
{
    mm_exception saved;

    assert(mm_guard_exports(&mm_buffer_of(op)->memory->guard) > 0);
    assert(mm_guard_exports(&mm_buffer_of(op)->guard) > 0);
    if (view->internal != NULL) {
        mm_exception_save(&saved);
        Py_DECREF((PyObject *)view->internal);
        mm_exception_restore(&saved);
    }
    mm_guard_unexport(&mm_buffer_of(op)->memory->guard);
    mm_guard_unexport(&mm_buffer_of(op)->guard);
}

/* --- the DLPack device of the memory ----------------------------------------------------- */

/* The DLPack device of wrapped memory, from the driver's pointer attributes. -1 with an
 * exception. */
static int
dlpack_device_of(mm_driver *cu, const mm_buffer *b, const mm_pointer_attributes *attributes,
                 dl_device *device)
{
    assert(!b->memory->owned);
    *device = (dl_device){DL_DEVICE_CPU, 0};
    if (attributes->managed) {
        device->device_type = DL_DEVICE_CUDA_MANAGED;
    } else if (attributes->type == CU_MEMORYTYPE_HOST) {
        device->device_type = DL_DEVICE_CUDA_HOST;
    } else if (attributes->type != 0) {
        *device = (dl_device){DL_DEVICE_CUDA, attributes->device};
    }
    if (mm_check_range_inside(b->memory->start, b->memory->size, attributes) < 0) {
        return -1;
    }
    if (device->device_type == DL_DEVICE_CUDA
        && (attributes->device < 0 || attributes->device >= cu->device_count)) {
        return MM_ERROR(PyExc_BufferError,
                        "the memory at %p belongs to device %d, which this process does not see",
                        (void *)(uintptr_t)b->memory->start, attributes->device);
    }
    return 0;
}

/* The DLPack device of a buffer; *reached is true if devices can access the memory. Memory that
 * was allocated here needs no query. -1 with an exception. */
static int
find_dlpack_device(mm_buffer *b, dl_device *device, bool *reached)
{
    int owner = b->memory->device;
    mm_pointer_attributes attributes;
    mm_driver *cu;

    *reached = true;
    if (b->memory->owned) {
        *device = owner == MM_ANY_DEVICE ? (dl_device){DL_DEVICE_CUDA_MANAGED, 0}
                                         : (dl_device){DL_DEVICE_CUDA, owner};
        return mm_buffer_check_open(b);
    }
    if (mm_buffer_query(b, &attributes, &cu) < 0) {
        return -1;
    }
    *reached = mm_device_reaches(cu, &attributes);
    return dlpack_device_of(cu, b, &attributes, device);
}

/* --- __cuda_array_interface__ ----------------------------------------------------------- */

PyObject *
mm_buffer_array_interface(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    dl_device device;
    PyObject *shape, *stream;
    bool reached;

    if (find_dlpack_device(b, &device, &reached) < 0) {
        return NULL;
    }
    if (!reached) {
        return PyErr_Format(
            b->state->export_error,
            "no __cuda_array_interface__: this is system memory, which no device here "
            "reaches. Copy it to a buffer of managedmem.empty().");
    }
    shape = PyObject_GetAttrString(op, "shape");
    if (shape == NULL) {
        return NULL;
    }
    /* The legacy default stream. None for wrapped memory that is not managed, such as a frame:
     * with a stream, consumers would wait on the host for work on other memory. */
    stream = b->memory->owned || device.device_type == DL_DEVICE_CUDA_MANAGED ? PyLong_FromLong(1)
                                                                              : Py_NewRef(Py_None);
    return Py_BuildValue("{s:N,s:s,s:(KO),s:O,s:N,s:i}", "shape", shape, "typestr",
                         b->dtype->typestr, "data",
                         b->size > 0 ? (unsigned long long)b->start : 0ULL,
                         b->memory->access.read_only ? Py_True : Py_False, "strides", Py_None,
                         "stream", stream, "version", 3);
}

/* --- DLPack ----------------------------------------------------------------------------- */

/* An exported tensor, in one block, with a reference to the memory and an export of it. A buffer
 * with an owner or a stream is kept too, because only Python can release these. */
typedef struct {
    union {
        dl_managed_tensor plain;
        dl_managed_tensor_versioned versioned;
    } as;
    mm_memory *memory;
    PyObject *kept;
    mm_interpreter *interpreter; /* the interpreter of `kept`; NULL without it */
    int64_t shape[MM_MAX_DIMENSIONS], strides[MM_MAX_DIMENSIONS];
} exported_tensor;

static void
retire_memory(void *memory)
{
    mm_memory_retire(memory);
    mm_memory_release_reference(memory);
    mm_report_leaks_soon();
}

static void
release_kept(void *argument)
{
    exported_tensor *t = argument;

    mm_interpreter_release_object(t->interpreter, t->kept);
    mm_interpreter_release(t->interpreter);
    free(t);
}

/* The kept object refers to the memory, so that the tensor's own reference can be released
 * first. */
static void
free_tensor_with_kept(exported_tensor *t)
{
    mm_exception saved;

    assert(t->interpreter != NULL);
    mm_memory_release(t->memory);
    if (!mm_interpreter_is_current(t->interpreter)) {
        mm_run_detached(release_kept, t);
        return;
    }
    mm_exception_save(&saved);
    Py_DECREF(t->kept);
    mm_exception_restore(&saved);
    mm_interpreter_release(t->interpreter);
    free(t);
}

/* Callable in any thread, with or without the GIL, even after the interpreter ended. */
static void
free_tensor(exported_tensor *t)
{
    assert(mm_guard_exports(&t->memory->guard) > 0);
    mm_guard_unexport(&t->memory->guard);
    if (t->kept != NULL) {
        free_tensor_with_kept(t);
        return;
    }
    if (mm_memory_release_hold(t->memory) && mm_memory_closing_blocks(t->memory)) {
        /* Freeing waits for work on the memory, which may itself wait for the GIL. */
        mm_run_detached(retire_memory, t->memory);
    } else {
        mm_memory_release_reference(t->memory);
    }
    free(t);
}

static void
delete_plain_tensor(dl_managed_tensor *self)
{
    free_tensor(self->context);
}

static void
delete_versioned_tensor(dl_managed_tensor_versioned *self)
{
    free_tensor(self->context);
}

/* Frees a tensor that no consumer has taken. The caller has the GIL. */
static void
free_unused_tensor(exported_tensor *t)
{
    assert(mm_guard_exports(&t->memory->guard) > 0);
    mm_guard_unexport(&t->memory->guard);
    mm_buffer_release(t->memory);
    if (t->kept != NULL) {
        Py_DECREF(t->kept);
        mm_interpreter_release(t->interpreter);
    }
    free(t);
}

/* A capsule owns its tensor until a consumer takes the tensor and renames the capsule. */
static void
destroy_capsule(PyObject *capsule)
{
    mm_exception saved;

    mm_exception_save(&saved);
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_tensor_versioned *t = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        free_unused_tensor(t->context);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed_tensor *t = PyCapsule_GetPointer(capsule, "dltensor");
        free_unused_tensor(t->context);
    }
    mm_exception_restore(&saved);
}

static void
fill_dl_tensor(dl_tensor *t, exported_tensor *block, const mm_buffer *b, dl_device device)
{
    for (int i = 0; i < b->dimensions; i++) {
        assert(b->strides[i] % b->dtype->itemsize == 0);
        block->shape[i] = b->shape[i];
        block->strides[i] = b->strides[i] / b->dtype->itemsize;
    }
    t->data = b->size > 0 ? (void *)(uintptr_t)b->start : NULL;
    t->device = device;
    t->ndim = b->dimensions;
    t->dtype.code = b->dtype->dlpack_code;
    t->dtype.bits = (uint8_t)(b->dtype->itemsize * 8);
    t->dtype.lanes = 1;
    t->shape = block->shape;
    t->strides = block->strides;
    t->byte_offset = 0;
}

typedef struct {
    bool versioned;
    bool copied;
    dl_device device;
} dlpack_request;

/* The objects that a tensor must keep besides the memory; *kept is NULL if there are none. */
static int
find_objects_to_keep(mm_buffer *b, PyObject *held, PyObject **kept)
{
    PyObject *root = mm_buffer_root(b);

    if (root == NULL) {
        return -1;
    }
    if (held != NULL) {
        *kept = PyTuple_Pack(2, root, held);
    } else if (mm_buffer_of(root)->owner != NULL || mm_buffer_of(root)->stream != NULL) {
        *kept = Py_NewRef(root);
    } else {
        *kept = NULL;
    }
    Py_DECREF(root);
    return held != NULL && *kept == NULL ? -1 : 0;
}

/* A new tensor, which still has to be filled, with an export of the memory. */
static exported_tensor *
new_tensor(mm_buffer *b, PyObject *held)
{
    PyObject *kept;
    exported_tensor *t;

    if (find_objects_to_keep(b, held, &kept) < 0) {
        return NULL;
    }
    t = calloc(1, sizeof *t);
    if (t == NULL) {
        Py_XDECREF(kept);
        (void)PyErr_NoMemory();
        return NULL;
    }
    if (!mm_guard_export(&b->memory->guard)) { /* raced */
        free(t);
        Py_XDECREF(kept);
        (void)mm_buffer_raise_closed(b);
        return NULL;
    }
    mm_memory_retain(b->memory);
    t->memory = b->memory;
    if (kept != NULL) {
        t->kept = kept;
        t->interpreter = b->state->interpreter;
        mm_interpreter_retain(t->interpreter);
    }
    return t;
}

static PyObject *
new_capsule(mm_buffer *b, const dlpack_request *request, PyObject *held)
{
    exported_tensor *t = new_tensor(b, held);
    PyObject *capsule;

    if (t == NULL) {
        return NULL;
    }
    if (request->versioned) {
        fill_dl_tensor(&t->as.versioned.tensor, t, b, request->device);
        t->as.versioned.version.major = DLPACK_MAJOR;
        t->as.versioned.version.minor = DLPACK_MINOR;
        t->as.versioned.flags = (request->copied ? DL_FLAG_IS_COPIED : 0U)
                                | (b->memory->access.read_only ? DL_FLAG_READ_ONLY : 0U);
        t->as.versioned.context = t;
        t->as.versioned.deleter = delete_versioned_tensor;
        capsule = PyCapsule_New(&t->as.versioned, "dltensor_versioned", destroy_capsule);
    } else {
        fill_dl_tensor(&t->as.plain.tensor, t, b, request->device);
        t->as.plain.context = t;
        t->as.plain.deleter = delete_plain_tensor;
        capsule = PyCapsule_New(&t->as.plain, "dltensor", destroy_capsule);
    }
    if (capsule == NULL) {
        free_unused_tensor(t);
    }
    return capsule;
}

/* max_version is None or (major, minor); consumers understand versioned tensors from major 1
 * on. */
static int
read_max_version(PyObject *value, bool *versioned)
{
    long long major;

    *versioned = false;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        return MM_ERROR(PyExc_TypeError, "max_version must be None or (major, minor), got %R",
                        value);
    }
    if (mm_read_index(PyTuple_GetItem(value, 0), "max_version", PyExc_TypeError, &major) < 0) {
        return -1;
    }
    *versioned = major >= 1;
    return 0;
}

/* Managed memory can be exported for any device as managed memory, as plain CUDA memory for
 * consumers that do not know managed memory, and for the CPU. Pinned memory can be exported for
 * the CPU and as memory of a device, which reads it over the bus. */
static bool
can_export_as(dl_device device, int devices, long long type, long long id)
{
    switch (device.device_type) {
    case DL_DEVICE_CUDA_MANAGED:
        return type == DL_DEVICE_CPU ? id == 0
                                     : (type == DL_DEVICE_CUDA_MANAGED || type == DL_DEVICE_CUDA)
                                           && id >= 0 && id < devices;
    case DL_DEVICE_CUDA_HOST:
        return type == DL_DEVICE_CUDA
                   ? id >= 0 && id < devices
                   : (type == DL_DEVICE_CPU || type == DL_DEVICE_CUDA_HOST) && id == 0;
    default:
        return type == device.device_type && id == device.device_id;
    }
}

static void
raise_bad_dl_device(dl_device device, PyObject *value)
{
    const char *message;

    switch (device.device_type) {
    case DL_DEVICE_CUDA_MANAGED:
        message =
            "managed memory is exported as (13, a device: CUDA managed), (2, a device: CUDA) or "
            "(1, 0: CPU), not as %R";
        break;
    case DL_DEVICE_CUDA_HOST:
        message =
            "pinned memory is exported as (3, 0: CUDA host), (2, a device: CUDA) or (1, 0: CPU), "
            "not as %R";
        break;
    case DL_DEVICE_CUDA:
        message = "memory of a device is exported as (2, its ordinal: CUDA), not as %R";
        break;
    default:
        message = "system memory is exported as (1, 0: CPU), not as %R";
    }
    PyErr_Format(PyExc_BufferError, message, value);
}

/* Reads dl_device: None, or a device that replaces *device if the memory can be exported for
 * it. */
static int
read_dl_device(PyObject *value, int devices, dl_device *device)
{
    long long device_type, device_id;

    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        return MM_ERROR(PyExc_TypeError, "dl_device must be None or (type, id), got %R", value);
    }
    if (mm_read_index(PyTuple_GetItem(value, 0), "dl_device", PyExc_TypeError, &device_type) < 0
        || mm_read_index(PyTuple_GetItem(value, 1), "dl_device", PyExc_TypeError, &device_id)
               < 0) {
        return -1;
    }
    if (!can_export_as(*device, devices, device_type, device_id)) {
        raise_bad_dl_device(*device, value);
        return -1;
    }
    device->device_type = (int32_t)device_type;
    /* The specification requires id 0 for managed memory and the CPU. */
    device->device_id = device_type == DL_DEVICE_CUDA ? (int32_t)device_id : 0;
    return 0;
}

/* Orders the consumer's stream behind the default stream, on which this library works by default.
 * CUDA itself orders the default streams (1 and 2); for any other stream the call waits for the
 * default stream. */
static int
order_consumer(const mm_buffer *b, dl_device device, PyObject *value)
{
    int ordinal = device.device_type == DL_DEVICE_CUDA ? device.device_id : MM_ANY_DEVICE;
    long long stream = 1;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (value != NULL && value != Py_None
        && mm_read_index(value, "stream", PyExc_TypeError, &stream) < 0) {
        return -1;
    }
    if (stream == 0 || stream < -1) {
        return MM_ERROR(
            PyExc_ValueError,
            "stream must be -1 (no order), 1 (legacy), 2 (per-thread) or a handle, got "
            "%lld: 0 is ambiguous",
            stream);
    }
    if (stream <= 2) {
        return 0;
    }
    cu = mm_open(b->state);
    if (cu == NULL) { /* unreached: only a fork closes the driver */
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_synchronize(cu, (mm_device_stream){NULL, ordinal}, &st);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(b->state, rc, &st);
}

static int
read_copy_flag(const mm_buffer *b, PyObject *value, dlpack_request *request)
{
    request->copied = value == Py_True;
    if (value != NULL && value != Py_None && !PyBool_Check(value)) {
        return MM_ERROR(PyExc_TypeError, "copy must be None, True or False, got %R", value);
    }
    if (request->copied && !b->memory->owned
        && request->device.device_type != DL_DEVICE_CUDA_MANAGED) {
        return MM_ERROR(PyExc_BufferError,
                        "wrapped memory that is not managed cannot be copied here: export it with "
                        "copy=None, and let the consumer copy it");
    }
    return 0;
}

/* Exports a buffer or a copy of it; the memory of a copy may be of another kind. */
static PyObject *
export_capsule(mm_buffer *b, mm_driver *cu, PyObject *requested, dlpack_request *request)
{
    PyObject *held = NULL, *capsule;
    bool reached;

    if (find_dlpack_device(b, &request->device, &reached) < 0
        || read_dl_device(requested, cu->device_count, &request->device) < 0) {
        return NULL;
    }
    if (b->memory->access.read_only && !request->versioned) {
        return PyErr_Format(
            PyExc_BufferError,
            "the memory is read-only, which an unversioned DLPack tensor cannot say: "
            "use max_version=(1, 0), or copy=True");
    }
    if ((request->device.device_type == DL_DEVICE_CPU
         || request->device.device_type == DL_DEVICE_CUDA_HOST)
        && mm_prepare_host_access(b, cu, &held) < 0) {
        return NULL;
    }
    capsule = new_capsule(b, request, held);
    Py_XDECREF(held);
    return capsule;
}

const char mm_buffer_dlpack_doc[] =
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "A DLPack capsule of the memory, for the device of __dlpack_device__() unless dl_device names\n"
    "another.\n"
    "\n"
    "The tensor is versioned if max_version is (1, 0) or more. For consumers that know neither\n"
    "managed nor pinned memory, dl_device (1, 0) exports it as CPU memory, and (2, n) as memory\n"
    "of device n. copy=True exports a new buffer with a copy. stream is the stream of the\n"
    "consumer: its later work comes after the work of the default stream; -1 means no order. The\n"
    "memory cannot be closed while the tensor lives. Raises RuntimeError when closed, BufferError\n"
    "for a device that the memory cannot be exported for, ValueError for stream 0. Safe from\n"
    "every thread. Driver: cuPointerGetAttributes for wrapped memory.";

PyObject *
mm_buffer_dlpack(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { STREAM, MAX_VERSION, DEVICE, COPY, ARGC };
    static mm_signature signature = {.doc = mm_buffer_dlpack_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[ARGC], *source, *capsule;
    dlpack_request request = {0};
    dl_device requested;
    mm_driver *cu;
    bool reached;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_max_version(argv[MAX_VERSION], &request.versioned) < 0
        || mm_buffer_check_open(b) < 0 || (cu = mm_open(b->state)) == NULL
        || find_dlpack_device(b, &request.device, &reached) < 0) {
        return NULL;
    }
    requested = request.device;
    if (read_copy_flag(b, argv[COPY], &request) < 0
        || read_dl_device(argv[DEVICE], cu->device_count, &requested) < 0
        || order_consumer(b, request.device, argv[STREAM]) < 0) {
        return NULL;
    }
    source = request.copied ? mm_buffer_finished_copy(op) : Py_NewRef(op);
    capsule = source ? export_capsule(mm_buffer_of(source), cu, argv[DEVICE], &request) : NULL;
    Py_XDECREF(source);
    return capsule;
}

const char mm_buffer_dlpack_device_doc[] =
    "__dlpack_device__($self, /)\n--\n\n"
    "(13, 0) for CUDA managed memory, (2, ordinal) for memory of a device, (3, 0) for wrapped host\n"
    "memory that CUDA has pinned, (1, 0) for other host memory.\n"
    "\n"
    "Raises RuntimeError when closed. Safe from every thread. Driver: cuPointerGetAttributes for wrapped\n"
    "memory.";

PyObject *
mm_buffer_dlpack_device(PyObject *op, PyObject *Py_UNUSED(none))
{
    dl_device device = {0};
    bool reached;

    return find_dlpack_device(mm_buffer_of(op), &device, &reached) < 0
               ? NULL
               : Py_BuildValue("(ii)", (int)device.device_type, (int)device.device_id);
}
