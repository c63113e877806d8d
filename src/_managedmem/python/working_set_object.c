/* working_set_object.c: the type WorkingSet: groups of memory that a device holds in turn, within a
 * budget; and WorkingSetStats. */
#include "working_objects.h"

#include <stdlib.h>

#include "args.h"
#include "foreign_location.h"
#include "interpreter.h"
#include "location_object.h"

/* --- life --------------------------------------------------------------------------------- */

static int
read_set_budget(PyObject *value, size_t *out)
{
    if (mm_read_size(value, "budget", out) < 0) {
        return -1;
    }
    if (*out == 0) {
        PyErr_SetString(PyExc_ValueError, "budget must be 1 byte or more, got 0");
        return -1;
    }
    return 0;
}

/* NULL and None are the current device. */
static int
read_set_device(mm_state *state, PyObject *value, int *ordinal)
{
    CUmemLocation location;

    if (value != NULL && value != Py_None) {
        return mm_read_device(state, value, ordinal);
    }
    if (mm_current_device_location(state, &location) < 0) {
        return -1;
    }
    *ordinal = location.id;
    return 0;
}

/* Without concurrent access the driver neither prefetches nor keeps memory at home. */
static int
check_concurrent_access(mm_driver *cu, int device, mm_status *st)
{
    int answer = 0;

    MM_TRY(cu, DeviceGetAttribute, st, &answer, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
           device);
    return answer ? 0
                  : mm_fail(st, MM_UNSUPPORTED,
                            "a working set needs concurrent_managed_access, which Device(%d) "
                            "lacks: its memory moves as a whole",
                            device);
}

/* If the interpreter is ending, a set that started too late to be ended with it ends here. */
static mm_loader *
start_loader(mm_driver *cu, int device, size_t budget, const mm_interpreter *interpreter,
             mm_status *st)
{
    mm_loader *loader = check_concurrent_access(cu, device, st) < 0
                            ? NULL
                            : mm_loader_new(cu, device, budget, interpreter, st);

    if (loader != NULL && mm_interpreter_is_ending(interpreter)) {
        mm_loader_free(loader);
        (void)mm_fail(st, MM_REFUSED, "a working set cannot start while the interpreter ends");
        return NULL;
    }
    return loader;
}

static PyObject *
working_set_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { BUDGET, DEVICE, ARGC };
    static const char *const names[ARGC] = {[BUDGET] = "budget", [DEVICE] = "device"};
    static const mm_parameters parameters = {
        .function = "WorkingSet", .names = names, .required = 1, .positional = 2, .total = ARGC};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC], *self;
    mm_working_set_object *set;
    mm_driver *cu;
    size_t budget;
    int device;
    mm_status st;

    if (mm_args_new(&parameters, args, kwargs, argv) < 0
        || read_set_budget(argv[BUDGET], &budget) < 0 || (cu = mm_open(state)) == NULL
        || read_set_device(state, argv[DEVICE], &device) < 0
        || (self = mm_alloc_object(type)) == NULL) {
        return NULL;
    }
    PyObject_GC_UnTrack(self); /* until it has a loader, gc.get_objects() must not show it */
    set = mm_working_set_of(self);
    set->budget = budget;
    set->device = device;
    set->groups = PyDict_New();
    if (set->groups != NULL) {
        Py_BEGIN_ALLOW_THREADS
        set->loader = start_loader(cu, device, budget, state->interpreter, &st);
        Py_END_ALLOW_THREADS
        if (set->loader != NULL) {
            PyObject_GC_Track(self);
            return self;
        }
        (void)mm_raise(state, &st);
    }
    Py_DECREF(self);
    return NULL;
}

/* A tuple of the groups that are added, without or with those whose removal has failed; NULL with an
 * exception. */
static PyObject *
list_groups(PyObject *op, bool with_removed)
{
    PyObject *all = PyDict_Keys(mm_working_set_of(op)->groups);
    PyObject *found = all ? PyList_New(0) : NULL, *tuple = NULL;
    Py_ssize_t count = all ? PyList_Size(all) : 0;
    int rc = found ? 0 : -1;

    for (Py_ssize_t i = 0; rc == 0 && i < count; i++) {
        const mm_working_group_object *group = mm_working_group_of(PyList_GetItem(all, i));
        bool listed =
            atomic_load(&group->added) && (with_removed || !atomic_load(&group->removed));
        rc = listed ? PyList_Append(found, PyList_GetItem(all, i)) : 0;
    }
    if (rc == 0) {
        tuple = PyList_AsTuple(found);
    }
    Py_XDECREF(found);
    Py_XDECREF(all);
    return tuple;
}

/* Takes over the reference to the tuple. */
static void
release_targets_of(PyObject *groups)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(groups); i++) {
        mm_working_group_release_targets(PyTuple_GetItem(groups, i));
    }
    Py_DECREF(groups);
}

static PyObject *
working_set_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_working_set_object *set = mm_working_set_of(op);
    PyObject *groups;
    mm_status st;
    int rc;

    if (mm_driver_forked()) {
        Py_RETURN_NONE; /* the set belongs to the parent */
    }
    groups = list_groups(op, true);
    if (groups == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_loader_close(set->loader, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        Py_DECREF(groups);
        return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
    }
    release_targets_of(groups);
    groups = list_groups(op, true); /* another thread may have added some meanwhile */
    if (groups == NULL) {
        return NULL;
    }
    release_targets_of(groups);
    Py_RETURN_NONE;
}

static PyObject *
working_set_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    if (mm_working_loader_of(op) == NULL) {
        return NULL;
    }
    if (mm_loader_is_closed(mm_working_set_of(op)->loader)) {
        PyErr_SetString(PyExc_RuntimeError, "WorkingSet is closed");
        return NULL;
    }
    return Py_NewRef(op);
}

static PyObject *
working_set_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return working_set_close(op, NULL);
}

static int
working_set_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(mm_working_set_of(op)->groups);
    Py_VISIT(mm_working_set_of(op)->order);
    return 0;
}

/* Leaves an ended set without groups, because other garbage may still use it. */
static int
working_set_clear(PyObject *op)
{
    mm_working_set_end(op);
    if (mm_working_set_of(op)->groups != NULL) {
        PyDict_Clear(mm_working_set_of(op)->groups);
    }
    Py_CLEAR(mm_working_set_of(op)->order);
    return 0;
}

static void
working_set_dealloc(PyObject *op)
{
    mm_working_set_object *set = mm_working_set_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    if (set->loader != NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_loader_free(set->loader);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(set->groups);
    Py_CLEAR(set->order);
    mm_free_object(op);
}

/* --- the order ---------------------------------------------------------------------------- */

static int
read_ordered_group(PyObject *op, PyObject *value, Py_ssize_t i, mm_group_id *id)
{
    mm_state *state = mm_type_state(Py_TYPE(op));

    if (Py_TYPE(value) != state->working_group_type) {
        PyErr_Format(PyExc_TypeError, "order[%zd] must be a WorkingGroup, got %R", i, value);
        return -1;
    }
    if (mm_working_group_of(value)->set != op) {
        PyErr_Format(PyExc_ValueError, "order[%zd] is a group of another working set: %R", i,
                     value);
        return -1;
    }
    if (atomic_load(&mm_working_group_of(value)->removed)) {
        PyErr_Format(PyExc_ValueError, "order[%zd] was removed from the working set: %R", i,
                     value);
        return -1;
    }
    *id = mm_working_group_of(value)->id;
    return 0;
}

/* Reads a tuple of groups; NULL with an exception. */
static mm_group_id *
read_order(PyObject *op, PyObject *groups)
{
    Py_ssize_t count = PyTuple_Size(groups);
    mm_group_id *ids = calloc((size_t)count + 1, sizeof *ids);

    if (ids == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_ordered_group(op, PyTuple_GetItem(groups, i), i, &ids[i]) < 0) {
            free(ids);
            return NULL;
        }
    }
    return ids;
}

/* Takes over the reference to the tuple, which is NULL for none. */
static int
give_order(PyObject *op, mm_loader *loader, PyObject *groups, const mm_group_id *ids)
{
    mm_working_set_object *set = mm_working_set_of(op);
    size_t count = groups ? (size_t)PyTuple_Size(groups) : 0;
    PyObject *earlier = groups;
    mm_status st;
    int rc;

    MM_LOCK(op);
    rc = mm_loader_give_order(loader, ids, count, &st);
    if (rc == 0) {
        earlier = set->order;
        set->order = groups;
    }
    MM_UNLOCK();
    Py_XDECREF(earlier);
    return mm_raise_failure(mm_type_state(Py_TYPE(op)), rc, &st);
}

static int
working_set_set_order(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_loader *loader = mm_working_loader_of(op);
    PyObject *groups;
    mm_group_id *ids;
    int rc;

    if (loader == NULL) {
        return -1;
    }
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError, "order cannot be deleted: set it to None");
        return -1;
    }
    if (value == Py_None) {
        return give_order(op, loader, NULL, NULL);
    }
    groups = PySequence_Tuple(value);
    ids = groups ? read_order(op, groups) : NULL;
    if (ids == NULL) {
        Py_XDECREF(groups);
        return -1;
    }
    if (PyTuple_Size(groups) == 0) {
        Py_CLEAR(groups);
    }
    rc = give_order(op, loader, groups, ids);
    free(ids);
    return rc;
}

/* The order without the groups that were removed since; takes over the reference. */
static PyObject *
without_removed(PyObject *order)
{
    PyObject *left = PyList_New(0), *tuple = NULL;
    int rc = left ? 0 : -1;

    for (Py_ssize_t i = 0; rc == 0 && i < PyTuple_Size(order); i++) {
        PyObject *group = PyTuple_GetItem(order, i);
        rc = atomic_load(&mm_working_group_of(group)->removed) ? 0 : PyList_Append(left, group);
    }
    if (rc == 0) {
        tuple = PyList_Size(left) > 0 ? PyList_AsTuple(left) : Py_NewRef(Py_None);
    }
    Py_XDECREF(left);
    Py_DECREF(order);
    return tuple;
}

static PyObject *
working_set_get_order(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *order;

    MM_LOCK(op);
    order = Py_XNewRef(mm_working_set_of(op)->order);
    MM_UNLOCK();
    return order ? without_removed(order) : Py_NewRef(Py_None);
}

/* --- reading ------------------------------------------------------------------------------ */

static PyObject *
working_set_get_budget(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(mm_working_set_of(op)->budget);
}

static PyObject *
working_set_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_location_object_new(
        mm_type_state(Py_TYPE(op)),
        mm_location(CU_MEM_LOCATION_TYPE_DEVICE, mm_working_set_of(op)->device));
}

/* -1 with an exception in a forked child. */
static int
read_set_report(PyObject *op, mm_loader_report *report)
{
    mm_loader *loader = mm_working_loader_of(op);

    if (loader == NULL) {
        return -1;
    }
    mm_loader_read_report(loader, report);
    return 0;
}

static PyObject *
working_set_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    mm_loader_report report;

    return read_set_report(op, &report) < 0 ? NULL : PyLong_FromSize_t(report.reserved);
}

static PyObject *
working_set_get_is_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_driver_forked()
                           || mm_loader_is_closed(mm_working_set_of(op)->loader));
}

static Py_ssize_t
working_set_length(PyObject *op)
{
    mm_loader_report report;

    return read_set_report(op, &report) < 0 ? -1 : (Py_ssize_t)report.groups;
}

static PyObject *
working_set_iter(PyObject *op)
{
    PyObject *groups = list_groups(op, false), *iterator = NULL;

    if (groups != NULL) {
        iterator = PyObject_GetIter(groups);
        Py_DECREF(groups);
    }
    return iterator;
}

static PyObject *
working_set_repr(PyObject *op)
{
    mm_working_set_object *set = mm_working_set_of(op);
    mm_loader_report report;

    if (mm_driver_forked()) {
        return PyUnicode_FromFormat("<WorkingSet of the parent process>");
    }
    mm_loader_read_report(set->loader, &report);
    return PyUnicode_FromFormat("<WorkingSet groups=%u nbytes=%zu budget=%zu Device(%d)%s>",
                                (unsigned)report.groups, report.reserved, set->budget, set->device,
                                mm_loader_is_closed(set->loader) ? ", closed" : "");
}

/* --- counters ----------------------------------------------------------------------------- */

static PyStructSequence_Field stats_fields[] = {
    {"acquired", "acquisitions"},
    {"hits", "acquisitions of groups that were on the device, or on the way there"},
    {"loaded", "acquisitions that began a load themselves"},
    {"mapped", "acquisitions without room: the device reached the group at home"},
    {"ahead", "loads that were queued before an acquisition"},
    {"loads", "loads that the set's thread has made, also those that failed"},
    {"drops", "drops that were queued"},
    {"bytes_loaded", "bytes brought to the device"},
    {"bytes_home", "bytes copied home by drops"},
    {"failures", "failures in the set's thread, mostly of driver calls"},
    {"last_error", "text of the last failure, or None; an attribute only"},
    {NULL, NULL},
};
enum { STATS_FIELDS = sizeof stats_fields / sizeof *stats_fields - 1 };

static PyStructSequence_Desc stats_desc = {"managedmem.WorkingSetStats",
                                           "Counters of a WorkingSet, from its beginning.",
                                           stats_fields, STATS_FIELDS - 1};

static PyObject *
working_set_stats(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *fields[STATS_FIELDS] = {NULL};
    mm_loader_report report;

    if (read_set_report(op, &report) < 0) {
        return NULL;
    }
    {
        const uint64_t values[STATS_FIELDS - 1] = {
            report.decided.acquired, report.decided.hits,  report.decided.loads_on_demand,
            report.decided.mapped,   report.decided.ahead, report.loads,
            report.decided.drops,    report.bytes_loaded,  report.bytes_home,
            report.failures,
        };
        bool made = true;
        for (int i = 0; made && i < STATS_FIELDS - 1; i++) {
            fields[i] = PyLong_FromUnsignedLongLong(values[i]);
            made = fields[i] != NULL;
        }
        if (made) {
            fields[STATS_FIELDS - 1] = mm_status_text(state, &report.error);
        }
    }
    return mm_record_new(state->working_stats_type, fields, STATS_FIELDS);
}

/* --- the type ----------------------------------------------------------------------------- */

PyDoc_STRVAR(
    working_set_doc,
    "WorkingSet(budget, device=None)\n"
    "--\n"
    "\n"
    "Groups of memory that are used in turn, within `budget` bytes of device memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "budget : int\n"
    "    Bytes of device memory, more than 0. Groups count with whole pages.\n"
    "device : Device, a device object of another library, or an ordinal\n"
    "    None is the calling thread's current device.\n"
    "\n"
    "Work that is queued on a stream inside of a group's use() finds the group on the device. The set\n"
    "loads expected groups ahead, and makes room by dropping those whose next use is farthest away:\n"
    "read-only groups without moving a byte, written ones by copying them home. The order is learned, or\n"
    "given in `order`. Results are right in any order, with any streams and threads: the device reaches a\n"
    "group without room at home, on the host.\n"
    "\n"
    "A use that loads and remove() look at all groups, so that a set is for some thousands of them. add()\n"
    "is not slower with more groups, and no call with groups that were removed.\n"
    "\n"
    "A thread of the set makes the driver calls that take long. Use the set in a with block, or close()\n"
    "it. len() is the number of groups, iteration yields them. TypeError and ValueError for bad\n"
    "arguments; NotImplementedError for a device without concurrent_managed_access. In a forked child the\n"
    "set is closed: uses raise RuntimeError, and close() does nothing. Safe from every thread. Driver:\n"
    "cuDeviceGetAttribute, cuStreamCreate, cuEventCreate.");

PyDoc_STRVAR(
    working_set_stats_doc,
    "stats($self, /)\n--\n\n"
    "Counters from the beginning, as a WorkingSetStats.\n"
    "\n"
    "Failures in the set's thread are counted here and raise nowhere: uses go on with the memory\n"
    "where it is. Safe from every thread. Driver: none.");

PyDoc_STRVAR(
    working_set_close_doc,
    "close($self, /)\n--\n\n"
    "End the set: finish what its thread does, and restore the advice that the memory had before.\n"
    "\n"
    "Contents stay as they are. Pages stay where they are, but read-only copies on the device are\n"
    "dropped with read_mostly. Uses under way end with the set: their release() does nothing then.\n"
    "Releases the targets. Closing again does nothing. Raises CUDAError if the driver fails: the advice\n"
    "that could be restored is restored, and another close() tries the rest again. Raises RuntimeError\n"
    "inside a host function while another thread uses the set. Safe from every thread; releases the\n"
    "GIL. Driver: cuStreamQuery, cuMemRangeGetAttributes, cuMemAdvise.");

static PyMethodDef working_set_methods[] = {
    MM_METHOD("add", mm_working_set_add_group, mm_working_set_add_doc),
    {"remove", mm_working_set_remove_group, METH_O, mm_working_set_remove_doc},
    {"stats", working_set_stats, METH_NOARGS, working_set_stats_doc},
    {"close", working_set_close, METH_NOARGS, working_set_close_doc},
    {"__enter__", working_set_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nReturn the set. RuntimeError if it is closed."},
    MM_POSITIONAL_METHOD("__exit__", working_set_exit,
                         "__exit__($self, /, *exception)\n--\n\nClose the set."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef working_set_getset[] = {
    {"budget", working_set_get_budget, NULL, "The bytes that the device may hold.", NULL},
    {"device", working_set_get_device, NULL, "The Device that holds them.", NULL},
    {"nbytes", working_set_get_nbytes, NULL,
     "The bytes of the groups that are on the device, or on the way there.", NULL},
    {"order", working_set_get_order, working_set_set_order,
     "One round of uses, as a tuple of groups; None: the set learns the order.\n"
     "\n"
     "Set it to the groups in the order of their uses; they may come several times. Uses in\n"
     "another order are slower, not wrong. TypeError or ValueError for anything but groups of\n"
     "this set.",
     NULL},
    {"is_closed", working_set_get_is_closed, NULL, "True once the set is closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef working_set_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_working_set_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* clang-format off */
static PyType_Slot working_set_slots[] = {
    {Py_tp_doc, (void *)working_set_doc},
    {Py_tp_new, working_set_new},
    {Py_tp_traverse, working_set_traverse},
    {Py_tp_clear, working_set_clear},
    {Py_tp_dealloc, working_set_dealloc},
    {Py_tp_repr, working_set_repr},
    {Py_tp_iter, working_set_iter},
    {Py_sq_length, working_set_length},
    {Py_tp_methods, working_set_methods},
    {Py_tp_getset, working_set_getset},
    {Py_tp_members, working_set_members},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec working_set_spec = {
    .name = "managedmem.WorkingSet",
    .basicsize = sizeof(mm_working_set_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = working_set_slots,
};

int
mm_working_set_type_init(PyObject *module, mm_state *state)
{
    state->working_stats_type = PyStructSequence_NewType(&stats_desc);
    if (state->working_stats_type == NULL
        || PyModule_AddType(module, state->working_stats_type) < 0) {
        return -1;
    }
    return mm_add_type(module, &working_set_spec, &state->working_set_type);
}
