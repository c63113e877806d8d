/* working_set_groups.c: WorkingSet.add() and WorkingSet.remove(): groups join a set and leave it. */
#include "working_objects.h"

#include <stdlib.h>

#include "targets.h"

/* --- adding ------------------------------------------------------------------------------- */

static int
read_group_access(PyObject *value, mm_group_access *out)
{
    *out = MM_GROUP_READ;
    if (value == NULL) {
        return 0;
    }
    for (mm_group_access a = MM_GROUP_READ; PyUnicode_Check(value) && a <= MM_GROUP_SCRATCH; a++) {
        if (PyUnicode_CompareWithASCIIString(value, mm_group_access_name(a)) == 0) {
            *out = a;
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
                    mm_group_id *id)
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
        rc = mm_loader_add(loader, ranges, count, access, at_home, id, &st);
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
        group->id.place = MM_NO_GROUP;
    }
    return op;
}

/* Takes the group out of the set's groups, which the collector may have cleared; keeps the exception
 * that is set. */
static void
unlist_group(mm_working_set_object *set, PyObject *op)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    if (PyDict_DelItem(set->groups, op) < 0) {
        PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
}

/* Adds the group to the loader and to the set's groups; to these first, so that nothing can fail after
 * the group is known to the loader. */
static int
register_group(mm_loader *loader, PyObject *op, mm_targets *t, bool at_home)
{
    mm_working_group_object *group = mm_working_group_of(op);
    mm_working_set_object *set = mm_working_set_of(group->set);
    mm_loader_group_report report;

    if (PyDict_SetItem(set->groups, op, Py_None) < 0) {
        return -1;
    }
    if (add_entered_targets(loader, t, group->access, at_home, &group->id) < 0) {
        unlist_group(set, op);
        return -1;
    }
    mm_loader_read_group(loader, group->id, &report);
    group->bytes = report.bytes;
    group->added = true;
    PyObject_GC_Track(op);
    if (mm_loader_has_ended(loader)) {
        mm_working_group_release_targets(op); /* close() may not have seen it as added */
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
                     mm_group_access_name(access));
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
    rc = mm_loader_remove(loader, group->id, &st);
    mm_loader_read_group(loader, group->id, &report);
    Py_END_ALLOW_THREADS
    if (report.removed) { /* else another thread may have removed it since */
        atomic_store(&group->removed, true);
    }
    if (rc == 0) {
        unlist_group(mm_working_set_of(op), value);
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
