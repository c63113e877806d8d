/* frames_object.c: the types _Slab and _Frames, over which managedmem.torch streams the parts of a
 * model. */
#include "../working/part_frames.h"
#include "../working/slab.h"
#include "args.h"
#include "foreign_stream.h"

/* --- _Slab -------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    mm_slab *slab;
} slab_object;

static slab_object *
slab_of(PyObject *op)
{
    return (slab_object *)op;
}

static mm_slab *
make_slab(mm_driver *cu, int device, size_t size, bool on_host, mm_status *st)
{
    return on_host ? mm_slab_on_host(device, size, st) : mm_slab_on_device(cu, device, size, st);
}

static PyObject *
slab_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { DEVICE, NBYTES, ON_HOST, ARGC };
    static const char *const names[ARGC] = {
        [DEVICE] = "device", [NBYTES] = "nbytes", [ON_HOST] = "on_host"};
    static const mm_parameters parameters = {
        .function = "_Slab", .names = names, .required = ARGC, .positional = ARGC, .total = ARGC};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC], *self;
    bool on_host = false;
    mm_driver *cu;
    size_t size, device;
    mm_slab *slab;
    mm_status st;

    if (mm_args_new(&parameters, args, kwargs, argv) < 0
        || mm_read_size(argv[DEVICE], "device", &device) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0
        || mm_read_flag(state, argv[ON_HOST], "on_host", &on_host) < 0
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    slab = make_slab(cu, (int)device, size, on_host, &st);
    Py_END_ALLOW_THREADS
    if (slab == NULL) {
        return mm_raise(state, &st);
    }
    self = mm_alloc_object(type);
    if (self == NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_slab_free(slab);
        Py_END_ALLOW_THREADS
        return NULL;
    }
    slab_of(self)->slab = slab;
    return self;
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

static PyObject *
slab_lock(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_driver *cu = mm_open(state);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_slab_lock(cu, slab_of(op)->slab, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(state, rc, &st);
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

PyDoc_STRVAR(
    slab_doc,
    "_Slab(device, nbytes, on_host)\n--\n\n"
    "Plain memory that is freed with its last reference: on the device, or host memory that\n"
    "lock() page-locks, so that the device reaches it.");

static PyMethodDef slab_methods[] = {
    {"lock", slab_lock, METH_NOARGS, "lock($self, /)\n--\n\nPage-lock memory of the host."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef slab_properties[] = {
    {"handle", slab_get_handle, NULL, "The address.", NULL},
    {"nbytes", slab_get_nbytes, NULL, "The size in bytes, in whole pages on the host.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* clang-format off */
static PyType_Slot slab_slots[] = {
    {Py_tp_doc, (void *)slab_doc},
    {Py_tp_new, slab_new},
    {Py_tp_dealloc, slab_dealloc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_methods, slab_methods},
    {Py_tp_getset, slab_properties},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec slab_spec = {
    .name = "managedmem._managedmem._Slab",
    .basicsize = sizeof(slab_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slab_slots,
};

/* --- _Frames ------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    mm_frames *frames;
} frames_object;

static mm_frames *
frames_of(PyObject *op)
{
    return ((frames_object *)op)->frames;
}

/* The set at work, or NULL with an exception in a forked child, which must not touch it. */
static mm_frames *
open_frames_of(PyObject *op)
{
    return mm_open(mm_type_state(Py_TYPE(op))) == NULL ? NULL : frames_of(op);
}

static PyObject *
frames_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { DEVICE, NBYTES, HOST_WAITS, ARGC };
    static const char *const names[ARGC] = {
        [DEVICE] = "device", [NBYTES] = "nbytes", [HOST_WAITS] = "host_waits"};
    static const mm_parameters parameters = {.function = "_Frames",
                                             .names = names,
                                             .required = ARGC,
                                             .positional = ARGC,
                                             .total = ARGC};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC], *self;
    bool host_waits = false;
    mm_frames *frames;
    mm_driver *cu;
    size_t size, device;
    mm_status st;

    if (mm_args_new(&parameters, args, kwargs, argv) < 0
        || mm_read_size(argv[DEVICE], "device", &device) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0
        || mm_read_flag(state, argv[HOST_WAITS], "host_waits", &host_waits) < 0
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    frames = mm_frames_new(cu, (int)device, size, host_waits, &st);
    Py_END_ALLOW_THREADS
    if (frames == NULL) {
        return mm_raise(state, &st);
    }
    self = mm_alloc_object(type);
    if (self == NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_frames_free(frames);
        Py_END_ALLOW_THREADS
        return NULL;
    }
    ((frames_object *)self)->frames = frames;
    return self;
}

static void
frames_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_BEGIN_ALLOW_THREADS
    mm_frames_free(frames_of(op));
    Py_END_ALLOW_THREADS
    mm_free_object(op);
}

static PyObject *
frames_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { HOME, NBYTES, IS_WRITTEN, ARGC };
    static const char *const names[ARGC] = {
        [HOME] = "home", [NBYTES] = "nbytes", [IS_WRITTEN] = "is_written"};
    static const mm_parameters parameters = {
        .function = "add", .names = names, .required = ARGC, .positional = ARGC, .total = ARGC};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    bool is_written = false;
    PyObject *argv[ARGC];
    CUdeviceptr home;
    uint32_t part = 0;
    size_t size;
    mm_status st;
    int rc;

    if (frames == NULL || mm_args(&parameters, args, nargs, kwnames, argv) < 0
        || mm_read_address_range(argv[HOME], argv[NBYTES], &home, &size) < 0
        || mm_read_flag(state, argv[IS_WRITTEN], "is_written", &is_written) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_add(frames, home, size, is_written, &part, &st);
    Py_END_ALLOW_THREADS
    return rc < 0 ? mm_raise(state, &st) : PyLong_FromUnsignedLong(part);
}

static int
read_part_number(PyObject *op, PyObject *value, uint32_t *part)
{
    uint32_t count;
    size_t number;

    if (mm_read_size(value, "part", &number) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    count = mm_frames_count(frames_of(op));
    Py_END_ALLOW_THREADS
    if (number >= count) {
        PyErr_Format(PyExc_ValueError, "part must be less than %u, got %zu", count, number);
        return -1;
    }
    *part = (uint32_t)number;
    return 0;
}

/* The arguments of a use: the number of a part, a flag and the handle of a stream. */
static int
read_frames_use(PyObject *op, const mm_parameters *parameters, PyObject *const *args,
                Py_ssize_t nargs, PyObject *kwnames, uint32_t *part, bool *flag, CUstream *stream)
{
    enum { PART, FLAG, STREAM, ARGC };
    PyObject *argv[ARGC];

    if (mm_args(parameters, args, nargs, kwnames, argv) < 0
        || read_part_number(op, argv[PART], part) < 0
        || mm_read_flag(mm_type_state(Py_TYPE(op)), argv[FLAG], parameters->names[FLAG], flag) < 0
        || mm_read_stream_handle(argv[STREAM], "stream", stream) < 0) {
        return -1;
    }
    return 0;
}

static PyObject *
frames_acquire(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"part", "writes", "stream"};
    static const mm_parameters parameters = {
        .function = "acquire", .names = names, .required = 3, .positional = 3, .total = 3};
    mm_frames *frames = open_frames_of(op);
    CUstream stream = NULL;
    CUdeviceptr address;
    bool writes = false;
    uint32_t part;

    if (frames == NULL
        || read_frames_use(op, &parameters, args, nargs, kwnames, &part, &writes, &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    address = mm_frames_acquire(frames, part, writes, stream);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(address);
}

static PyObject *
frames_release(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"part", "written", "stream"};
    static const mm_parameters parameters = {
        .function = "release", .names = names, .required = 3, .positional = 3, .total = 3};
    mm_frames *frames = open_frames_of(op);
    CUstream stream = NULL;
    bool written = false;
    uint32_t part;
    mm_status st;
    int rc;

    if (frames == NULL
        || read_frames_use(op, &parameters, args, nargs, kwnames, &part, &written, &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_release(frames, part, written, stream, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

/* A call of the set with a stream alone. */
static PyObject *
call_with_stream(PyObject *op, PyObject *value, int (*call)(mm_frames *, CUstream, mm_status *))
{
    mm_frames *frames = open_frames_of(op);
    CUstream stream = NULL;
    mm_status st;
    int rc;

    if (frames == NULL || mm_read_stream_handle(value, "stream", &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = call(frames, stream, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

static PyObject *
frames_settle(PyObject *op, PyObject *value)
{
    return call_with_stream(op, value, mm_frames_settle);
}

static PyObject *
frames_begin_round(PyObject *op, PyObject *value)
{
    return call_with_stream(op, value, mm_frames_begin_round);
}

static PyObject *
frames_end_round(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_frames *frames = open_frames_of(op);

    if (frames == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_frames_end_round(frames);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
frames_changed(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"part", "stream"};
    static const mm_parameters parameters = {
        .function = "changed", .names = names, .required = 2, .positional = 2, .total = 2};
    mm_frames *frames = open_frames_of(op);
    CUstream stream = NULL;
    PyObject *argv[2];
    uint32_t part;
    mm_status st;
    int rc;

    if (frames == NULL || mm_args(&parameters, args, nargs, kwnames, argv) < 0
        || read_part_number(op, argv[0], &part) < 0
        || mm_read_stream_handle(argv[1], "stream", &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_changed(frames, part, stream, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

static PyObject *
frames_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
    mm_frames_close(frames_of(op));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
frames_stats(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_frames *frames = open_frames_of(op);
    mm_frames_report r;
    PyObject *text;

    if (frames == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_frames_read_report(frames, &r);
    Py_END_ALLOW_THREADS
    text = mm_status_text(mm_type_state(Py_TYPE(op)), &r.error);
    if (text == NULL) {
        return NULL;
    }
    return Py_BuildValue(
        "({sn sn sI sK sK sK sK sK sK sK sK sK}N)", "room", (Py_ssize_t)r.room, "present",
        (Py_ssize_t)r.present, "parts", r.parts, "acquired", (unsigned long long)r.acquired,
        "hits", (unsigned long long)r.hits, "mapped", (unsigned long long)r.mapped, "loads",
        (unsigned long long)r.loads, "ahead", (unsigned long long)r.ahead, "drops",
        (unsigned long long)r.drops, "bytes_loaded", (unsigned long long)r.bytes_loaded,
        "bytes_home", (unsigned long long)r.bytes_home, "failures", (unsigned long long)r.failures,
        text);
}

PyDoc_STRVAR(
    frames_doc,
    "_Frames(device, nbytes, host_waits)\n--\n\n"
    "Frames on a device for parts of memory whose home is the host. Safe from every thread;\n"
    "releases the GIL. Driver: cuMemAlloc, cuMemcpyAsync, cuEventRecord, cuStreamWaitEvent.");

static PyMethodDef frames_methods[] = {
    MM_METHOD("add", frames_add,
              "add($self, /, home, nbytes, is_written)\n--\n\n"
              "Add a part over page-locked memory, which the caller keeps; returns its number."),
    MM_METHOD(
        "acquire", frames_acquire,
        "acquire($self, /, part, writes, stream)\n--\n\n"
        "The address of the part for work on the stream until release(); 0: use it at home."),
    MM_METHOD(
        "release", frames_release,
        "release($self, /, part, written, stream)\n--\n\n"
        "End a use, and copy a written part home. If that fails, the part stays in its frame."),
    MM_METHOD("changed", frames_changed,
              "changed($self, /, part, stream)\n--\n\n"
              "The stream has written the part at home: forget the copy of it."),
    {"begin_round", frames_begin_round, METH_O,
     "begin_round($self, stream, /)\n--\n\n"
     "Forget all copies, and load parts ahead from now on, behind the work on the stream."},
    {"end_round", frames_end_round, METH_NOARGS,
     "end_round($self, /)\n--\n\nLoad nothing ahead until the next round."},
    {"settle", frames_settle, METH_O,
     "settle($self, stream, /)\n--\n\nLet the stream follow all copies home so far."},
    {"stats", frames_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nThe counters as a dict, and the text of the last failure or None."},
    {"close", frames_close, METH_NOARGS,
     "close($self, /)\n--\n\nFree the frames after a wait for the device."},
    {NULL, NULL, 0, NULL},
};

/* clang-format off */
static PyType_Slot frames_slots[] = {
    {Py_tp_doc, (void *)frames_doc},
    {Py_tp_new, frames_new},
    {Py_tp_dealloc, frames_dealloc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_methods, frames_methods},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec frames_spec = {
    .name = "managedmem._managedmem._Frames",
    .basicsize = sizeof(frames_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = frames_slots,
};

int
mm_frames_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &slab_spec, &state->slab_type) < 0
                   || mm_add_type(module, &frames_spec, &state->frames_type) < 0
               ? -1
               : 0;
}
