/* working_group_object.c: the type WorkingGroup, its making by WorkingSet.add(), and WorkingUse, the
 * `with` block of a use. */
#include "working_objects.h"

#include <stdlib.h>

#include "targets.h"

static const char *const access_names[] = {
    [MM_GROUP_READ] = "read",
    [MM_GROUP_WRITE] = "write",
    [MM_GROUP_SCRATCH] = "scratch",
};

/* --- adding ------------------------------------------------------------------------------- */

static int
read_group_access(PyObject *value, mm_group_access *out)
{
    *out = MM_GROUP_READ;
    if (value == NULL) {
        return 0;
    }
    for (size_t i = 0; PyUnicode_Check(value) && i < sizeof access_names / sizeof *access_names;
         i++) {
        if (PyUnicode_CompareWithASCIIString(value, access_names[i]) == 0) {
            *out = (mm_group_access)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "access must be \"read\", \"write\" or \"scratch\", got %R",
                 value);
    return -1;
}

/* The ranges of targets that are not empty; NULL if memory is exhausted. */
static mm_working_range *
list_ranges(const mm_targets *t, size_t *count)
{
    mm_working_range *ranges = malloc((t->batch.count + 1) * sizeof *ranges);

    *count = 0;
    for (size_t i = 0; ranges != NULL && i < t->batch.count; i++) {
        PyObject *item = PyTuple_GetItem(t->items, (Py_ssize_t)i);
        if (t->batch.transfers[i].range.size > 0) {
            ranges[(*count)++] = (mm_working_range){
                .range = t->batch.transfers[i].range,
                .guard = mm_is_buffer(t->state, item) ? &mm_buffer_of(item)->memory->guard : NULL,
                .target = i,
            };
        }
    }
    return ranges;
}

/* Adds a group over the targets, without the GIL. */
static int
add_entered_targets(mm_loader *loader, mm_targets *t, mm_group_access access, bool at_home,
                    uint32_t *number)
{
    size_t count;
    mm_working_range *ranges = list_ranges(t, &count);
    mm_status st;
    int rc;

    if (ranges == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    rc = mm_targets_enter(t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = mm_loader_add(loader, ranges, count, access, at_home, number, &st);
        mm_targets_leave(t);
        Py_END_ALLOW_THREADS
    }
    free(ranges);
    return mm_raise_failure(t->state, rc, &st);
}

/* A group without a number yet, which keeps the targets. Until it has one, gc.get_objects() must not
 * show it. */
static PyObject *
new_group(mm_state *state, PyObject *set, const mm_targets *t, PyObject *name,
          mm_group_access access)
{
    PyObject *op = mm_alloc_object(state->working_group_type);
    mm_working_group_object *group = mm_working_group_of(op);

    if (op != NULL) {
        PyObject_GC_UnTrack(op);
        group->set = Py_NewRef(set);
        group->name = name != Py_None ? Py_XNewRef(name) : NULL;
        group->items = Py_NewRef(t->items);
        group->exports = Py_XNewRef(t->exports);
        group->access = access;
    }
    return op;
}

/* A place in the set's list: one whose group could not be added, or a new one. The list never gets
 * shorter, because another thread may be about to fill its last place. */
static int
provide_place(mm_working_set_object *set)
{
    size_t spare = atomic_load(&set->spare_places);

    while (spare > 0) {
        if (atomic_compare_exchange_weak(&set->spare_places, &spare, spare - 1)) {
            return 0;
        }
    }
    return PyList_Append(set->groups, Py_None);
}

/* Adds the group to the loader and to the set's list. A place in the list is made first, so that
 * nothing can fail after the group is known to the loader. */
static int
register_group(mm_loader *loader, PyObject *op, mm_targets *t, bool at_home)
{
    mm_working_group_object *group = mm_working_group_of(op);
    mm_working_set_object *set = mm_working_set_of(group->set);
    mm_loader_group_report report;

    if (provide_place(set) < 0) {
        return -1;
    }
    if (add_entered_targets(loader, t, group->access, at_home, &group->number) < 0) {
        (void)atomic_fetch_add(&set->spare_places, 1);
        return -1;
    }
    mm_loader_read_group(loader, group->number, &report);
    group->bytes = report.bytes;
    group->added = true;
    PyObject_GC_Track(op);
    (void)PyList_SetItem(set->groups, (Py_ssize_t)group->number, Py_NewRef(op));
    if (mm_loader_has_ended(loader)) {
        mm_working_group_release_targets(op); /* close() may not have seen it in the list */
    }
    return 0;
}

/* For read groups alone: a device may write to a copy of unmapped pages, which a drop loses. */
static int
read_at_home(mm_state *state, PyObject *value, mm_group_access access, bool *at_home)
{
    if (value == NULL) {
        return 0;
    }
    if (mm_read_flag(state, value, "at_home", at_home) < 0) {
        return -1;
    }
    if (*at_home && access != MM_GROUP_READ) {
        PyErr_Format(PyExc_ValueError,
                     "at_home=True is for groups with access=\"read\", got \"%s\"",
                     access_names[access]);
        return -1;
    }
    return 0;
}

PyObject *
mm_working_set_add_group(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TARGETS, ACCESS, NAME, AT_HOME, ARGC };
    static const char *const names[ARGC] = {
        [TARGETS] = "targets", [ACCESS] = "access", [NAME] = "name", [AT_HOME] = "at_home"};
    static const mm_parameters parameters = {
        .function = "add", .names = names, .required = 1, .positional = AT_HOME, .total = ARGC};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_loader *loader = mm_working_loader_of(op);
    PyObject *argv[ARGC], *group = NULL;
    mm_group_access access;
    bool at_home = false;
    const char *name;
    mm_targets t;

    if (loader == NULL || mm_args(&parameters, args, nargs, kwnames, argv) < 0
        || read_group_access(argv[ACCESS], &access) < 0 || mm_read_name(argv[NAME], &name) < 0
        || read_at_home(state, argv[AT_HOME], access, &at_home) < 0
        || mm_targets_read(state, argv[TARGETS],
                           access == MM_GROUP_SCRATCH ? MM_DISCARD : MM_QUERY, &t)
               < 0) {
        return NULL;
    }
    if (mm_targets_hold_roots(&t) == 0) {
        group = new_group(state, op, &t, argv[NAME], access);
    }
    if (group != NULL && register_group(loader, group, &t, at_home) < 0) {
        Py_CLEAR(group);
    }
    mm_targets_release(&t);
    return group;
}

const char mm_working_set_add_doc[] =
    "add($self, /, targets, access='read', name=None, *, at_home=False)\n--\n\n"
    "Add a group of memory that is used together; returns it as a WorkingGroup.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : a target or a sequence of them\n"
    "    As for advise(), but no system memory, and no page of another group.\n"
    "access : {'read', 'write', 'scratch'}\n"
    "    'read': the program does not write the memory while it is in the set; a drop moves no byte.\n"
    "    'write': a drop copies the contents home, unless they were loaded for uses with access='read'.\n"
    "    'scratch': the contents are not needed after the last release, and may be discarded.\n"
    "name : str, optional\n"
    "    For messages and repr.\n"
    "at_home : bool\n"
    "    For access='read'. True: all pages are on the host, so the set does not prefetch them there first.\n"
    "    That prefetch maps the pages for the host, and copies of mapped pages load more slowly. Pages that\n"
    "    are on the device stay there, beyond the budget. What a device writes to the copy of a page\n"
    "    that the host has not mapped is lost.\n"
    "\n"
    "Until the group is removed or the set is closed, the host is the memory's preferred location, the set\n"
    "switches read_mostly, and the device has a mapping of a group larger than the budget (accessed_by).\n"
    "The set moves the memory home first, unless at_home is True. It keeps the targets. A ManagedBuffer of\n"
    "a group can be closed; acquiring the group then raises RuntimeError.\n"
    "Raises ValueError for memory of another group, TypeError and ValueError for bad targets, CUDAError\n"
    "when the driver refuses; then nothing is added. Safe from every thread; releases the GIL. Driver:\n"
    "cuEventCreate, cuMemRangeGetAttributes, cuMemAdvise; later cuMemPrefetchAsync.";

/* --- removing ----------------------------------------------------------------------------- */

static int
check_group_of(PyObject *set, PyObject *value)
{
    if (Py_TYPE(value) != mm_type_state(Py_TYPE(set))->working_group_type) {
        PyErr_Format(PyExc_TypeError, "group must be a WorkingGroup, got %R", value);
        return -1;
    }
    if (mm_working_group_of(value)->set != set) {
        PyErr_Format(PyExc_ValueError, "group is one of another working set: %R", value);
        return -1;
    }
    return 0;
}

PyObject *
mm_working_set_remove_group(PyObject *op, PyObject *value)
{
    mm_loader *loader = mm_working_loader_of(op);
    mm_loader_group_report report;
    mm_working_group_object *group;
    mm_status st;
    int rc;

    if (loader == NULL || check_group_of(op, value) < 0) {
        return NULL;
    }
    group = mm_working_group_of(value);
    Py_BEGIN_ALLOW_THREADS
    rc = mm_loader_remove(loader, group->number, &st);
    mm_loader_read_group(loader, group->number, &report);
    Py_END_ALLOW_THREADS
    if (report.removed) { /* else another thread may have removed it since */
        atomic_store(&group->removed, true);
    }
    if (rc == 0) {
        (void)PyList_SetItem(mm_working_set_of(op)->groups, (Py_ssize_t)group->number,
                             Py_NewRef(Py_None));
        mm_working_group_release_targets(value);
    }
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

const char mm_working_set_remove_doc[] =
    "remove($self, group, /)\n--\n\n"
    "Take a group out of the set, which goes on, and restore the advice that its memory had before.\n"
    "\n"
    "Contents stay as they are. Pages stay where they are, but read-only copies on the device are\n"
    "dropped with read_mostly, and the budget does not count the pages any more. Releases the targets,\n"
    "which can be added again.\n"
    "The order forgets the group. Other groups keep their numbers, and its number is not used again.\n"
    "Waits for the moves of the group that are queued, and so until the set's thread has come to them.\n"
    "\n"
    "Raises TypeError and ValueError for anything but a group of this set; RuntimeError if the group is\n"
    "acquired or was removed, or the set is closed, and CUDAError inside a host function; then nothing\n"
    "changes. Raises CUDAError if the driver fails: the group is not used any more, and another remove()\n"
    "tries to restore the rest. Safe from every thread; releases the GIL. Driver: cuEventQuery,\n"
    "cuMemRangeGetAttributes, cuMemAdvise.";

/* --- uses --------------------------------------------------------------------------------- */

static int
refuse_removed_group(PyObject *op)
{
    const mm_working_group_object *group = mm_working_group_of(op);

    if (!atomic_load(&group->removed)) {
        return 0;
    }
    if (group->name != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "group %u, %R, was removed from the working set: add its memory again",
                     (unsigned)group->number, group->name);
    } else {
        PyErr_Format(PyExc_RuntimeError,
                     "group %u was removed from the working set: add its memory again",
                     (unsigned)group->number);
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
           && PyUnicode_CompareWithASCIIString(value, access_names[access]) == 0;
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
                     access_names[own], access_names[own], value);
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
    rc = mm_loader_acquire(loader, mm_working_group_of(op)->number, reads, use.handle, &placed,
                           &st);
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
    rc = mm_loader_release(loader, mm_working_group_of(op)->number, use.handle, &st);
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

static PyObject *
group_acquire(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *stream;
    bool reads;
    int placed = read_use("acquire", op, args, nargs, kwnames, &stream, &reads) < 0
                     ? -1
                     : acquire_group(op, stream, reads);

    return placed < 0 ? NULL : PyBool_FromLong(placed);
}

/* Ends a use whose stream is gone, with an exception set. */
static void
release_without_stream(PyObject *group)
{
    mm_loader *loader = mm_working_set_of(mm_working_group_of(group)->set)->loader;
    mm_status ignored;

    if (!mm_driver_forked()) {
        MM_IGNORE(
            mm_loader_release_unrecorded(loader, mm_working_group_of(group)->number, &ignored));
    }
}

static PyObject *
group_release(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

static PyObject *
group_use(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

/* --- reading ------------------------------------------------------------------------------ */

static PyObject *
group_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(mm_working_group_of(op)->bytes);
}

static PyObject *
group_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *name = mm_working_group_of(op)->name;

    return Py_NewRef(name ? name : Py_None);
}

static PyObject *
group_get_access(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(access_names[mm_working_group_of(op)->access]);
}

static PyObject *
group_get_set(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(mm_working_group_of(op)->set);
}

static PyObject *
group_get_is_resident(PyObject *op, void *Py_UNUSED(closure))
{
    mm_loader *loader = mm_working_loader_of(mm_working_group_of(op)->set);
    mm_loader_group_report report;

    if (loader == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_loader_read_group(loader, mm_working_group_of(op)->number, &report);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(report.resident);
}

static PyObject *
group_repr(PyObject *op)
{
    const mm_working_group_object *group = mm_working_group_of(op);
    PyObject *name =
        group->name ? PyUnicode_FromFormat(" name=%R", group->name) : PyUnicode_FromString("");
    PyObject *text = NULL;

    if (name != NULL) {
        text = PyUnicode_FromFormat("<WorkingGroup number=%u%U access=%s nbytes=%zu%s>",
                                    (unsigned)group->number, name, access_names[group->access],
                                    group->bytes, atomic_load(&group->removed) ? ", removed" : "");
        Py_DECREF(name);
    }
    return text;
}

/* --- life --------------------------------------------------------------------------------- */

void
mm_working_group_release_targets(PyObject *op)
{
    mm_working_group_object *group = mm_working_group_of(op);
    PyObject *items, *exports;

    MM_LOCK(op);
    items = group->items;
    exports = group->exports;
    group->items = group->exports = NULL;
    MM_UNLOCK();
    /* Outside of the lock, because releasing targets can run Python code. */
    Py_XDECREF(items);
    Py_XDECREF(exports);
}

static int
group_traverse(PyObject *op, visitproc visit, void *arg)
{
    const mm_working_group_object *group = mm_working_group_of(op);

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(group->set);
    Py_VISIT(group->items);
    Py_VISIT(group->exports);
    return 0;
}

/* A group is garbage with its set, or was removed. The collector may clear the set's list before the
 * set, which must not use the memory after its end. */
static void
end_set_of(const mm_working_group_object *group)
{
    if (group->added && group->items != NULL) {
        mm_working_set_end(group->set);
    }
}

/* The reference to the set stays, because other garbage may use the group. */
static int
group_clear(PyObject *op)
{
    end_set_of(mm_working_group_of(op));
    mm_working_group_release_targets(op);
    return 0;
}

static void
group_dealloc(PyObject *op)
{
    mm_working_group_object *group = mm_working_group_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    end_set_of(group);
    Py_CLEAR(group->items);
    Py_CLEAR(group->exports);
    Py_CLEAR(group->name);
    Py_CLEAR(group->set);
    mm_free_object(op);
}

/* --- the types ---------------------------------------------------------------------------- */

PyDoc_STRVAR(
    group_doc,
    "A group of memory in a WorkingSet, made by WorkingSet.add().\n"
    "\n"
    "`with group.use(stream=s):` around the code that queues work on s. Uses of one group may nest and\n"
    "overlap, on several streams and in several threads. Keeps its set. repr() shows its number, from 0\n"
    "on in the order of adding. Safe from every thread.");

PyDoc_STRVAR(
    group_use_doc,
    "use($self, /, *, stream=None, access=None)\n--\n\n"
    "A `with` block that acquires the group at its beginning and releases it at its end.\n"
    "\n"
    "Both on this stream; None is the default stream of the set's device. `access` is as for acquire().\n"
    "The block gets the group. The object can be entered again. Raises TypeError for an object that is\n"
    "not a stream, and ValueError for an access that the group does not have; the block raises as\n"
    "acquire() and release() do.");

PyDoc_STRVAR(
    group_acquire_doc,
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
    "group is not acquired. Safe from every thread; releases the GIL. Driver: cuStreamWaitEvent.");

PyDoc_STRVAR(
    group_release_doc,
    "release($self, /, *, stream=None)\n--\n\n"
    "End one acquisition, with the work that is queued on the stream by now.\n"
    "\n"
    "Call it after the last work of the use is queued. The group stays on the device until that\n"
    "work is done and its room is needed, or until a use that writes replaces its copy. Raises\n"
    "RuntimeError if the group is not acquired; CUDAError for a stream that captures a graph, and the\n"
    "group stays acquired; CUDAError when the driver refuses, and the group is released all the same.\n"
    "Does nothing once the set is closed. Safe from every thread; releases the GIL. Driver:\n"
    "cuEventRecord.");

static PyMethodDef group_methods[] = {
    MM_METHOD("use", group_use, group_use_doc),
    MM_METHOD("acquire", group_acquire, group_acquire_doc),
    MM_METHOD("release", group_release, group_release_doc),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"nbytes", group_get_nbytes, NULL, "Its bytes on the device, in whole pages.", NULL},
    {"name", group_get_name, NULL, "Its name, or None.", NULL},
    {"access", group_get_access, NULL, "\"read\", \"write\" or \"scratch\".", NULL},
    {"set", group_get_set, NULL, "The WorkingSet that it belongs to.", NULL},
    {"is_resident", group_get_is_resident, NULL,
     "True while the set keeps all of it on the device; calls outside of the set do not\n"
     "change it. Driver: cuEventQuery.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_working_group_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

/* clang-format off */
static PyType_Slot group_slots[] = {
    {Py_tp_doc, (void *)group_doc},
    {Py_tp_traverse, group_traverse},
    {Py_tp_clear, group_clear},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_repr, group_repr},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_getset},
    {Py_tp_members, group_members},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec group_spec = {
    .name = "managedmem.WorkingGroup",
    .basicsize = sizeof(mm_working_group_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_slots,
};

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
mm_working_group_type_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &group_spec, &state->working_group_type) < 0
               ? -1
               : mm_add_type(module, &working_use_spec, &state->working_use_type);
}
