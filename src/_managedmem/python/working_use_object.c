/* working_use_object.c: the uses of a group: acquire(), release() and use() of WorkingGroup, and
 * WorkingUse, the `with` block of a use. */
#include "working_objects.h"

#include "args.h"
#include "stream_object.h"

/* --- acquiring and releasing -------------------------------------------------------------- */

static int
refuse_removed_group(PyObject *op)
{
    const mm_working_group_object *group = mm_working_group_of(op);

    if (!atomic_load(&group->removed)) {
        return 0;
    }
    if (group->name != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "group %llu, %R, was removed from the working set: add its memory again",
                     (unsigned long long)group->id.number, group->name);
    } else {
        PyErr_Format(PyExc_RuntimeError,
                     "group %llu was removed from the working set: add its memory again",
                     (unsigned long long)group->id.number);
    }
    return -1;
}

/* Reads and enters the stream of a call; NULL is the default stream. */
static mm_loader *
enter_use(PyObject *op, PyObject *stream, mm_stream_use *use)
{
    mm_loader *loader = mm_working_loader_of(mm_working_group_of(op)->set);

    return loader == NULL || mm_stream_read_and_enter(mm_type_state(Py_TYPE(op)), stream, use) < 0
               ? NULL
               : loader;
}

static bool
is_access(PyObject *value, mm_group_access access)
{
    return PyUnicode_Check(value)
           && PyUnicode_CompareWithASCIIString(value, mm_group_access_name(access)) == 0;
}

/* Reads the access of one use; NULL and None are that of the group. */
static int
read_use_access(PyObject *op, PyObject *value, bool *reads)
{
    mm_group_access own = mm_working_group_of(op)->access;

    *reads = value != NULL && own == MM_GROUP_WRITE && is_access(value, MM_GROUP_READ);
    if (value == NULL || value == Py_None || *reads || is_access(value, own)) {
        return 0;
    }
    if (own == MM_GROUP_WRITE) {
        PyErr_Format(PyExc_ValueError, "access must be None, \"read\" or \"write\", got %R",
                     value);
    } else {
        PyErr_Format(PyExc_ValueError,
                     "access of a group that was added with access=\"%s\" must be None or \"%s\", "
                     "got %R: add it with access=\"write\" for uses that differ",
                     mm_group_access_name(own), mm_group_access_name(own), value);
    }
    return -1;
}

/* 1: on the device; 0: mapped; -1 with an exception. */
static int
acquire_group(PyObject *op, PyObject *stream, bool reads)
{
    mm_working_use placed = MM_USE_MAPPED;
    mm_stream_use use;
    mm_loader *loader = refuse_removed_group(op) < 0 ? NULL : enter_use(op, stream, &use);
    mm_status st;
    int rc;

    if (loader == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_loader_acquire(loader, mm_working_group_of(op)->id, reads, use.handle, &placed, &st);
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(mm_type_state(Py_TYPE(op)), rc, &st) < 0 ? -1
                                                                     : placed != MM_USE_MAPPED;
}

/* Stores whether the stream could be used. */
static PyObject *
release_group(PyObject *op, PyObject *stream, bool *entered)
{
    mm_stream_use use;
    mm_loader *loader = enter_use(op, stream, &use);
    mm_status st;
    int rc;

    *entered = loader != NULL;
    if (loader == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_loader_release(loader, mm_working_group_of(op)->id, use.handle, &st);
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

/* Reads the arguments of acquire() and use(). */
static int
read_use(const char *function, PyObject *op, PyObject *const *args, Py_ssize_t nargs,
         PyObject *kwnames, PyObject **stream, bool *reads)
{
    enum { STREAM, ACCESS, ARGC };
    static const char *const names[ARGC] = {[STREAM] = "stream", [ACCESS] = "access"};
    const mm_parameters parameters = {.function = function, .names = names, .total = ARGC};
    PyObject *argv[ARGC];

    if (mm_args(&parameters, args, nargs, kwnames, argv) < 0) {
        return -1;
    }
    *stream = argv[STREAM];
    return read_use_access(op, argv[ACCESS], reads);
}

PyObject *
mm_working_group_acquire(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *stream;
    bool reads;
    int placed = read_use("acquire", op, args, nargs, kwnames, &stream, &reads) < 0
                     ? -1
                     : acquire_group(op, stream, reads);

    return placed < 0 ? NULL : PyBool_FromLong(placed);
}

const char mm_working_group_acquire_doc[] =
    "acquire($self, /, *, stream=None, access=None)\n--\n\n"
    "Let the work that is queued on the stream from now on find the group on the device.\n"
    "\n"
    "access='read' promises that this use does not write a group that was added with access='write':\n"
    "it gets a copy, which is dropped without a copy home. A broken promise loses no byte and no room:\n"
    "written pages go home when the group is dropped, but the device writes them by page faults. Else\n"
    "`access` is None or that of the group.\n"
    "\n"
    "Returns True, or False if there is no room, because other groups are acquired or the group is\n"
    "larger than the budget: the device then reaches it at home. Does not wait for a load, but until\n"
    "the load is queued, which follows the earlier uses of the groups that make room for it. Raises\n"
    "ValueError for another access, RuntimeError if the set or memory of the group is closed or the group\n"
    "was removed, and CUDAError when the driver refuses and for a stream that captures a graph; then the\n"
    "group is not acquired. Safe from every thread; releases the GIL. Driver: cuStreamWaitEvent.";

/* Ends a use whose stream is gone, with an exception set. */
static void
release_without_stream(PyObject *group)
{
    mm_loader *loader = mm_working_set_of(mm_working_group_of(group)->set)->loader;
    mm_status ignored;

    if (!mm_driver_forked()) {
        MM_IGNORE(mm_loader_release_unrecorded(loader, mm_working_group_of(group)->id, &ignored));
    }
}

PyObject *
mm_working_group_release(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream"};
    static const mm_parameters parameters = {.function = "release", .names = names, .total = 1};
    PyObject *stream, *done;
    bool entered;

    if (mm_args(&parameters, args, nargs, kwnames, &stream) < 0) {
        return NULL;
    }
    done = release_group(op, stream, &entered);
    if (!entered && PyErr_ExceptionMatches(mm_type_state(Py_TYPE(op))->cuda_error)) {
        release_without_stream(op); /* its work ended with the context */
    }
    return done;
}

const char mm_working_group_release_doc[] =
    "release($self, /, *, stream=None)\n--\n\n"
    "End one acquisition, with the work that is queued on the stream by now.\n"
    "\n"
    "Call it after the last work of the use is queued. The group stays on the device until that\n"
    "work is done and its room is needed, or until a use that writes replaces its copy. Raises\n"
    "RuntimeError if the group is not acquired; CUDAError for a stream that captures a graph, and the\n"
    "group stays acquired; CUDAError when the driver refuses, and the group is released all the same.\n"
    "Does nothing once the set is closed. Safe from every thread; releases the GIL. Driver:\n"
    "cuEventRecord.";

/* --- WorkingUse --------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *group;
    PyObject *stream; /* or NULL */
    bool reads;
} working_use_object;

static working_use_object *
working_use_of(PyObject *op)
{
    return (working_use_object *)op;
}

PyObject *
mm_working_group_use(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_stream_use checked;
    PyObject *stream, *self;
    bool reads;

    if (read_use("use", op, args, nargs, kwnames, &stream, &reads) < 0
        || mm_stream_read(state, stream, &checked) < 0
        || (self = mm_alloc_object(state->working_use_type)) == NULL) {
        return NULL;
    }
    working_use_of(self)->group = Py_NewRef(op);
    working_use_of(self)->stream = Py_XNewRef(stream);
    working_use_of(self)->reads = reads;
    return self;
}

const char mm_working_group_use_doc[] =
    "use($self, /, *, stream=None, access=None)\n--\n\n"
    "A `with` block that acquires the group at its beginning and releases it at its end.\n"
    "\n"
    "Both on this stream; None is the default stream of the set's device. `access` is as for acquire().\n"
    "The block gets the group. The object can be entered again. Raises TypeError for an object that is\n"
    "not a stream, and ValueError for an access that the group does not have; the block raises as\n"
    "acquire() and release() do.";

static PyObject *
working_use_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    const working_use_object *use = working_use_of(op);

    return acquire_group(use->group, use->stream, use->reads) < 0 ? NULL : Py_NewRef(use->group);
}

static PyObject *
working_use_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    PyObject *group = working_use_of(op)->group;
    bool entered;
    PyObject *done = release_group(group, working_use_of(op)->stream, &entered);

    if (!entered) {
        release_without_stream(group);
    }
    return done;
}

static int
working_use_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(working_use_of(op)->group);
    Py_VISIT(working_use_of(op)->stream);
    return 0;
}

static void
working_use_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_CLEAR(working_use_of(op)->group);
    Py_CLEAR(working_use_of(op)->stream);
    mm_free_object(op);
}

/* --- the type ----------------------------------------------------------------------------- */

PyDoc_STRVAR(
    working_use_doc,
    "A `with` block of a use, made by WorkingGroup.use().\n"
    "\n"
    "Blocks can be nested, and one object entered several times. Safe from every thread.");

static PyMethodDef working_use_methods[] = {
    {"__enter__", working_use_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nAcquire the group and return it."},
    MM_POSITIONAL_METHOD("__exit__", working_use_exit,
                         "__exit__($self, /, *exception)\n--\n\nRelease the group."),
    {NULL, NULL, 0, NULL},
};

/* clang-format off */
static PyType_Slot working_use_slots[] = {
    {Py_tp_doc, (void *)working_use_doc},
    {Py_tp_traverse, working_use_traverse},
    {Py_tp_dealloc, working_use_dealloc},
    {Py_tp_methods, working_use_methods},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec working_use_spec = {
    .name = "managedmem.WorkingUse",
    .basicsize = sizeof(working_use_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = working_use_slots,
};

int
mm_working_use_type_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &working_use_spec, &state->working_use_type);
}
