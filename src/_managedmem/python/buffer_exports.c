/* buffer_exports.c: exports without a copy: the buffer protocol for the host, DLPack, and
 * __cuda_array_interface__. Each host view and DLPack tensor counts as an export, so that the memory
 * cannot be closed under it. */
#include <stdlib.h>

#include "buffer.h"
#include "dlpack_abi.h"
#include "home.h"
#include "stream_object.h"

/* --- the host's view -------------------------------------------------------------------- */

/* The address of empty host views, because consumers may take NULL for a failure. */
static const _Alignas(16) unsigned char no_bytes[16];

static int
export_to_host(mm_buffer *b, PyObject **held)
{
    mm_driver *cu = mm_open(b->state);

    if (cu == NULL) {
        return -1;
    }
    if (!mm_guard_export(&b->guard)) {
        return mm_buffer_raise_closed();
    }
    if (!mm_guard_export(&b->memory->guard)) {
        mm_guard_unexport(&b->guard);
        return mm_buffer_raise_closed();
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
        PyErr_SetString(PyExc_BufferError, "a ManagedBuffer is C-contiguous, not Fortran");
        return -1;
    }
    if ((flags & PyBUF_WRITABLE) && b->memory->access.read_only) {
        PyErr_SetString(PyExc_BufferError, "the memory is read-only, as its owner is");
        return -1;
    }
    if (mm_buffer_check_open(b) < 0 || export_to_host(b, &held) < 0) {
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

    if (view->internal != NULL) {
        mm_exception_save(&saved);
        Py_DECREF((PyObject *)view->internal);
        mm_exception_restore(&saved);
    }
    mm_guard_unexport(&mm_buffer_of(op)->memory->guard);
    mm_guard_unexport(&mm_buffer_of(op)->guard);
}

/* --- the DLPack device of the memory ----------------------------------------------------- */

/* The DLPack device of wrapped memory, as the driver describes its address. */
static int
place_of(mm_driver *cu, const mm_buffer *b, const mm_pointer_attributes *attributes,
         dl_device *place, mm_status *st)
{
    size_t offset = b->memory->start - attributes->start;

    *place = (dl_device){DL_DEVICE_CPU, 0};
    if (attributes->managed) {
        place->device_type = DL_DEVICE_CUDA_MANAGED;
    } else if (attributes->type == CU_MEMORYTYPE_HOST) {
        place->device_type = DL_DEVICE_CUDA_HOST;
    } else if (attributes->type != 0) {
        *place = (dl_device){DL_DEVICE_CUDA, attributes->device};
    }
    if (attributes->size > 0 && b->memory->size > 0
        && (offset > attributes->size || b->memory->size > attributes->size - offset)) {
        return mm_fail(st, MM_NO_EXPORT,
                       "the range of %zu bytes at 0x%llx leaves its allocation, which has %zu "
                       "bytes at 0x%llx",
                       b->memory->size, (unsigned long long)b->memory->start, attributes->size,
                       (unsigned long long)attributes->start);
    }
    if (place->device_type == DL_DEVICE_CUDA
        && (attributes->device < 0 || attributes->device >= cu->device_count)) {
        return mm_fail(
            st, MM_NO_EXPORT,
            "the memory at 0x%llx belongs to device %d, which this process does not see",
            (unsigned long long)b->memory->start, attributes->device);
    }
    return 0;
}

/* The DLPack device of a buffer; *reached is true if devices can access the memory. Memory that was
 * allocated here needs no query. -1 with an exception. */
static int
find_place(mm_buffer *b, dl_device *place, bool *reached)
{
    int device = b->memory->device;
    mm_pointer_attributes attributes;
    mm_driver *cu;
    mm_status st;
    int rc;

    *reached = true;
    if (b->memory->owned) {
        *place = device == MM_ANY_DEVICE ? (dl_device){DL_DEVICE_CUDA_MANAGED, 0}
                                         : (dl_device){DL_DEVICE_CUDA, device};
        return mm_buffer_check_open(b);
    }
    if (mm_buffer_check_open(b) < 0 || (cu = mm_open(b->state)) == NULL) {
        return -1;
    }
    if (!mm_guard_enter(&b->memory->guard)) {
        (void)mm_buffer_raise_closed();
        return -1;
    }
    rc = mm_buffer_query_entered(b, cu, &attributes, &st);
    if (rc == 0) {
        rc = place_of(cu, b, &attributes, place, &st);
        *reached = mm_device_reaches(cu, &attributes);
    }
    mm_guard_leave(&b->memory->guard);
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* --- __cuda_array_interface__ ----------------------------------------------------------- */

PyObject *
mm_buffer_array_interface(PyObject *op, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    dl_device place;
    PyObject *shape;
    bool reached;

    if (find_place(b, &place, &reached) < 0) {
        return NULL;
    }
    if (!reached) {
        PyErr_SetString(b->state->export_error,
                        "no __cuda_array_interface__: this is system memory, which no device here "
                        "reaches. Copy it to a buffer of managedmem.empty().");
        return NULL;
    }
    shape = PyObject_GetAttrString(op, "shape");
    if (shape == NULL) {
        return NULL;
    }
    /* Stream 1 is the legacy default stream. */
    return Py_BuildValue("{s:N,s:s,s:(KO),s:O,s:i,s:i}", "shape", shape, "typestr",
                         b->dtype->typestr, "data",
                         b->size > 0 ? (unsigned long long)b->start : 0ULL,
                         b->memory->access.read_only ? Py_True : Py_False, "strides", Py_None,
                         "stream", 1, "version", 3);
}

/* --- DLPack ----------------------------------------------------------------------------- */

/* What a tensor given away needs, in one block. The memory's reference and export belong to it. A
 * buffer with an owner, or a foreign resource or stream, is kept as well, as only Python can let go
 * of those. */
typedef struct {
    union {
        dl_managed_tensor plain;
        dl_managed_tensor_versioned versioned;
    } as;
    mm_memory *memory;
    PyObject *keep;
    mm_home *home; /* the interpreter of `keep` */
    int64_t shape[MM_MAX_DIMENSIONS], strides[MM_MAX_DIMENSIONS];
} tensor_block;

static void
retire_memory(void *memory)
{
    mm_memory_retire(memory);
    mm_memory_release_reference(memory);
}

static void
release_kept(void *given)
{
    tensor_block *t = given;

    mm_home_release_object(t->home, t->keep);
    mm_home_release(t->home);
    free(t);
}

/* The kept object has a reference to the memory, so the tensor's own is released first. */
static void
free_kept(tensor_block *t)
{
    mm_exception saved;

    mm_memory_release(t->memory);
    if (!mm_home_is_here(t->home)) {
        mm_run_detached(release_kept, t);
        return;
    }
    mm_exception_save(&saved);
    Py_DECREF(t->keep);
    mm_exception_restore(&saved);
    mm_home_release(t->home);
    free(t);
}

/* May be called by any thread, with or without the GIL, also after the interpreter ended. */
static void
free_block(tensor_block *t)
{
    mm_guard_unexport(&t->memory->guard);
    if (t->keep != NULL) {
        free_kept(t);
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
delete_plain(dl_managed_tensor *self)
{
    free_block(self->context);
}

static void
delete_versioned(dl_managed_tensor_versioned *self)
{
    free_block(self->context);
}

/* What nobody consumed; with the GIL. */
static void
free_unused_block(tensor_block *t)
{
    mm_guard_unexport(&t->memory->guard);
    mm_buffer_release(t->memory);
    if (t->keep != NULL) {
        Py_DECREF(t->keep);
        mm_home_release(t->home);
    }
    free(t);
}

/* A capsule that nobody consumed still owns its tensor; a consumer renames it. */
static void
drop_capsule(PyObject *capsule)
{
    mm_exception saved;

    mm_exception_save(&saved);
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_managed_tensor_versioned *t = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        free_unused_block(t->context);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed_tensor *t = PyCapsule_GetPointer(capsule, "dltensor");
        free_unused_block(t->context);
    }
    mm_exception_restore(&saved);
}

static void
fill_tensor(dl_tensor *t, tensor_block *block, const mm_buffer *b, dl_device place)
{
    for (int i = 0; i < b->dimensions; i++) {
        block->shape[i] = b->shape[i];
        block->strides[i] = b->strides[i] / b->dtype->itemsize;
    }
    t->data = b->size > 0 ? (void *)(uintptr_t)b->start : NULL;
    t->device = place;
    t->ndim = b->dimensions;
    t->dtype.code = b->dtype->dlpack_code;
    t->dtype.bits = (uint8_t)(b->dtype->itemsize * 8);
    t->dtype.lanes = 1;
    t->shape = block->shape;
    t->strides = block->strides;
    t->byte_offset = 0;
}

/* What the consumer asked for. */
typedef struct {
    bool versioned;
    bool copied;
    dl_device place;
} dlpack_form;

/* Finds what a tensor must keep, besides the memory; *keep is NULL for nothing. */
static int
find_kept(mm_buffer *b, PyObject *held, PyObject **keep)
{
    PyObject *root = mm_buffer_root(b);

    if (root == NULL) {
        return -1;
    }
    if (held != NULL) {
        *keep = PyTuple_Pack(2, root, held);
    } else if (mm_buffer_of(root)->owner != NULL || mm_buffer_of(root)->stream != NULL) {
        *keep = Py_NewRef(root);
    } else {
        *keep = NULL;
    }
    Py_DECREF(root);
    return held != NULL && *keep == NULL ? -1 : 0;
}

/* The block of a new tensor, with the memory exported. */
static tensor_block *
new_block(mm_buffer *b, PyObject *held)
{
    PyObject *keep;
    tensor_block *t;

    if (find_kept(b, held, &keep) < 0) {
        return NULL;
    }
    t = calloc(1, sizeof *t);
    if (t == NULL) {
        Py_XDECREF(keep);
        (void)PyErr_NoMemory();
        return NULL;
    }
    if (!mm_guard_export(&b->memory->guard)) {
        free(t);
        Py_XDECREF(keep);
        (void)mm_buffer_raise_closed();
        return NULL;
    }
    mm_memory_retain(b->memory);
    t->memory = b->memory;
    if (keep != NULL) {
        t->keep = keep;
        t->home = b->state->home;
        mm_home_retain(t->home);
    }
    return t;
}

static PyObject *
new_capsule(mm_buffer *b, const dlpack_form *form, PyObject *held)
{
    tensor_block *t = new_block(b, held);
    PyObject *capsule;

    if (t == NULL) {
        return NULL;
    }
    if (form->versioned) {
        fill_tensor(&t->as.versioned.tensor, t, b, form->place);
        t->as.versioned.version.major = DLPACK_MAJOR;
        t->as.versioned.version.minor = DLPACK_MINOR;
        t->as.versioned.flags = (form->copied ? DL_FLAG_IS_COPIED : 0U)
                                | (b->memory->access.read_only ? DL_FLAG_READ_ONLY : 0U);
        t->as.versioned.context = t;
        t->as.versioned.deleter = delete_versioned;
        capsule = PyCapsule_New(&t->as.versioned, "dltensor_versioned", drop_capsule);
    } else {
        fill_tensor(&t->as.plain.tensor, t, b, form->place);
        t->as.plain.context = t;
        t->as.plain.deleter = delete_plain;
        capsule = PyCapsule_New(&t->as.plain, "dltensor", drop_capsule);
    }
    if (capsule == NULL) {
        free_unused_block(t);
    }
    return capsule;
}

/* max_version is None or (major, minor); from 1 on the consumer understands versioned tensors. */
static int
read_max_version(PyObject *value, bool *versioned)
{
    long long major;

    *versioned = false;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        PyErr_Format(PyExc_TypeError, "max_version must be None or (major, minor), got %R", value);
        return -1;
    }
    if (mm_read_index(PyTuple_GetItem(value, 0), "max_version", PyExc_TypeError, &major) < 0) {
        return -1;
    }
    *versioned = major >= 1;
    return 0;
}

/* Managed memory may be exported for any device, as managed, as plain CUDA memory for consumers that do
 * not know managed memory, and for the CPU. Pinned memory is for the CPU as well. Memory of a device
 * is for that device only. */
static bool
can_be_on(dl_device place, int devices, long long type, long long id)
{
    switch (place.device_type) {
    case DL_DEVICE_CUDA_MANAGED:
        return type == DL_DEVICE_CPU ? id == 0
                                     : (type == DL_DEVICE_CUDA_MANAGED || type == DL_DEVICE_CUDA)
                                           && id >= 0 && id < devices;
    case DL_DEVICE_CUDA_HOST:
        return (type == DL_DEVICE_CPU || type == DL_DEVICE_CUDA_HOST) && id == 0;
    default:
        return type == place.device_type && id == place.device_id;
    }
}

static void
refuse_device(dl_device place, PyObject *value)
{
    const char *message;

    switch (place.device_type) {
    case DL_DEVICE_CUDA_MANAGED:
        message =
            "managed memory is exported as (13, a device: CUDA managed), (2, a device: CUDA) or "
            "(1, 0: CPU), not as %R";
        break;
    case DL_DEVICE_CUDA_HOST:
        message = "pinned memory is exported as (3, 0: CUDA host) or (1, 0: CPU), not as %R";
        break;
    case DL_DEVICE_CUDA:
        message = "memory of a device is exported as (2, its ordinal: CUDA), not as %R";
        break;
    default:
        message = "system memory is exported as (1, 0: CPU), not as %R";
    }
    PyErr_Format(PyExc_BufferError, message, value);
}

/* Reads dl_device: None, or a device that replaces *place if the memory can be exported for it. */
static int
read_device(PyObject *value, int devices, dl_device *place)
{
    long long device_type, device_id;

    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        PyErr_Format(PyExc_TypeError, "dl_device must be None or (type, id), got %R", value);
        return -1;
    }
    if (mm_read_index(PyTuple_GetItem(value, 0), "dl_device", PyExc_TypeError, &device_type) < 0
        || mm_read_index(PyTuple_GetItem(value, 1), "dl_device", PyExc_TypeError, &device_id)
               < 0) {
        return -1;
    }
    if (!can_be_on(*place, devices, device_type, device_id)) {
        refuse_device(*place, value);
        return -1;
    }
    place->device_type = (int32_t)device_type;
    /* 0 is what the specification asks for managed memory and the CPU. */
    place->device_id = device_type == DL_DEVICE_CUDA ? (int32_t)device_id : 0;
    return 0;
}

/* Makes the work of the default stream, where this library works by default, precede the
 * consumer's: blocking streams wait by themselves, for others the default stream is awaited. */
static int
order_consumer(const mm_buffer *b, dl_device place, PyObject *value)
{
    int device = place.device_type == DL_DEVICE_CUDA ? place.device_id : MM_ANY_DEVICE;
    long long stream = 1;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (value != NULL && value != Py_None
        && mm_read_index(value, "stream", PyExc_TypeError, &stream) < 0) {
        return -1;
    }
    if (stream == 0 || stream < -1) {
        PyErr_Format(PyExc_ValueError,
                     "stream must be -1 (no order), 1 (legacy), 2 (per-thread) or a handle, got "
                     "%lld: 0 is ambiguous",
                     stream);
        return -1;
    }
    if (stream <= 2) {
        return 0;
    }
    cu = mm_open(b->state);
    if (cu == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_synchronize(cu, (mm_device_stream){NULL, device}, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

static int
read_copy(const mm_buffer *b, PyObject *value, dlpack_form *form)
{
    form->copied = value == Py_True;
    if (value != NULL && value != Py_None && !PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "copy must be None, True or False, got %R", value);
        return -1;
    }
    if (form->copied && !b->memory->owned && form->place.device_type != DL_DEVICE_CUDA_MANAGED) {
        PyErr_SetString(PyExc_BufferError,
                        "wrapped memory that is not managed cannot be copied here: export it with "
                        "copy=None, and let the consumer copy it");
        return -1;
    }
    return 0;
}

/* Exports a buffer or a copy of it, whose memory may be of another kind. */
static PyObject *
export_capsule(mm_buffer *b, mm_driver *cu, PyObject *device, dlpack_form *form)
{
    PyObject *held = NULL, *capsule;
    bool reached;

    if (find_place(b, &form->place, &reached) < 0
        || read_device(device, cu->device_count, &form->place) < 0) {
        return NULL;
    }
    if (b->memory->access.read_only && !form->versioned) {
        PyErr_SetString(PyExc_BufferError,
                        "the memory is read-only, which an unversioned DLPack tensor cannot say: "
                        "use max_version=(1, 0), or copy=True");
        return NULL;
    }
    if ((form->place.device_type == DL_DEVICE_CPU
         || form->place.device_type == DL_DEVICE_CUDA_HOST)
        && mm_prepare_host_access(b, cu, &held) < 0) {
        return NULL;
    }
    capsule = new_capsule(b, form, held);
    Py_XDECREF(held);
    return capsule;
}

PyObject *
mm_buffer_dlpack(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy"};
    static const mm_parameters parameters = {"__dlpack__", names, 0, 0, 4};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *given[4], *source, *capsule;
    dlpack_form form = {0};
    dl_device requested;
    mm_driver *cu;
    bool reached;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || read_max_version(given[1], &form.versioned) < 0 || mm_buffer_check_open(b) < 0
        || (cu = mm_open(b->state)) == NULL || find_place(b, &form.place, &reached) < 0) {
        return NULL;
    }
    requested = form.place;
    if (read_copy(b, given[3], &form) < 0
        || read_device(given[2], cu->device_count, &requested) < 0
        || order_consumer(b, form.place, given[0]) < 0) {
        return NULL;
    }
    source = form.copied ? mm_buffer_finished_copy(op) : Py_NewRef(op);
    capsule = source ? export_capsule(mm_buffer_of(source), cu, given[2], &form) : NULL;
    Py_XDECREF(source);
    return capsule;
}

PyObject *
mm_buffer_dlpack_device(PyObject *op, PyObject *Py_UNUSED(none))
{
    dl_device place = {0};
    bool reached;

    return find_place(mm_buffer_of(op), &place, &reached) < 0
               ? NULL
               : Py_BuildValue("(ii)", (int)place.device_type, (int)place.device_id);
}

const char mm_buffer_dlpack_doc[] =
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "A DLPack capsule of the memory, on the device of __dlpack_device__() unless dl_device asks for\n"
    "another.\n"
    "\n"
    "Versioned if max_version is (1, 0) or more. dl_device (1, 0) exports managed or pinned memory as\n"
    "CPU memory, (2, n) exports managed memory as memory of device n, for consumers that do not know\n"
    "managed memory. copy=True exports a new buffer. stream is the consumer's, which is ordered behind\n"
    "the default stream; -1 asks for no order. The memory cannot be closed while the tensor lives.\n"
    "Raises RuntimeError when closed, BufferError for another device, ValueError for stream 0. Safe from\n"
    "every thread. Driver: cuPointerGetAttributes for wrapped memory.";

const char mm_buffer_dlpack_device_doc[] =
    "__dlpack_device__($self, /)\n--\n\n"
    "(13, 0) for CUDA managed memory, (2, ordinal) for memory of a device, (3, 0) for wrapped host\n"
    "memory that CUDA has pinned, (1, 0) for other host memory.\n"
    "\n"
    "Raises RuntimeError when closed. Driver: cuPointerGetAttributes for wrapped memory.";
