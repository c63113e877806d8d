/* plan_fill.c: filling a PrefetchPlan: add, from pairs, a module, a policy, by a budget. */
#include <stdlib.h>

#include "foreign_memory.h"
#include "foreign_location.h"
#include "plan_object.h"
#include "targets.h"

/* --- adding ----------------------------------------------------------------------------- */

/* An entry that is read and checked, on its way into a plan. */
typedef struct {
    mm_plan_entry entry;
    PyObject *kept; /* what the plan keeps for it: its target, and a memoryview or None */
} addition;

static int
grow(mm_plan_object *self)
{
    size_t capacity = self->capacity ? 2 * self->capacity : 8;
    mm_plan_entry *entries;

    if (self->count < self->capacity) {
        return 0;
    }
    entries = realloc(self->entries, capacity * sizeof *entries);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->entries = entries;
    self->capacity = capacity;
    return 0;
}

/* Makes a list where there is none. Making one may run the garbage collector, and so Python code
 * that uses the same plan. */
static int
need_list(PyObject **list)
{
    PyObject *fresh;

    if (*list != NULL) {
        return 0;
    }
    fresh = PyList_New(0);
    if (*list == NULL) {
        *list = fresh;
    } else {
        Py_XDECREF(fresh);
    }
    return *list ? 0 : -1;
}

void
mm_plan_drop_prepared(mm_plan_object *self)
{
    if (self->prefetch != NULL) {
        mm_plan_release(self->prefetch);
    }
    if (self->discard_prefetch != NULL) {
        mm_plan_release(self->discard_prefetch);
    }
    self->prefetch = self->discard_prefetch = NULL;
}

/* Takes over what is kept. */
static int
append(mm_plan_object *self, const addition *new)
{
    int rc = 0;

    MM_LOCK((PyObject *)self);
    if (need_list(&self->kept) < 0 || grow(self) < 0 || PyList_Append(self->kept, new->kept) < 0) {
        rc = -1;
    } else {
        self->entries[self->count++] = new->entry;
        mm_plan_drop_prepared(self);
    }
    MM_UNLOCK();
    Py_DECREF(new->kept);
    return rc;
}

/* Cuts the range down to nbytes from an offset; both are NULL or None where they are not given. */
static int
read_part(PyObject *offset, PyObject *nbytes, mm_range *range)
{
    long long from = 0;
    size_t bytes;

    if (offset != NULL && mm_read_index(offset, "offset", PyExc_TypeError, &from) < 0) {
        return -1;
    }
    if (from < 0 || (size_t)from > range->size) {
        PyErr_Format(PyExc_ValueError,
                     "offset must be from 0 to %zu, the size of the target in bytes; got %lld",
                     range->size, from);
        return -1;
    }
    range->start += (CUdeviceptr)from;
    range->size -= (size_t)from;
    if (nbytes == NULL || nbytes == Py_None) {
        return 0;
    }
    if (mm_read_size(nbytes, "nbytes", &bytes) < 0) {
        return -1;
    }
    if (bytes > range->size) {
        PyErr_Format(PyExc_ValueError,
                     "nbytes must be at most %zu, what the target has from "
                     "offset %lld on; got %zu",
                     range->size, from, bytes);
        return -1;
    }
    range->size = bytes;
    return 0;
}

/* Reads a target; its location is for the caller to fill. */
static int
read_target(mm_state *state, PyObject *value, addition *new)
{
    mm_driver *cu = mm_open(state);
    mm_target target;
    int read_only;

    *new = (addition){.kept = NULL};
    if (cu == NULL || mm_target_read(state, cu, value, MM_PREFETCH, &target) < 0) {
        return -1;
    }
    read_only = mm_is_read_only(&target);
    new->kept =
        read_only < 0 ? NULL : PyTuple_Pack(2, value, target.export ? target.export : Py_None);
    Py_XDECREF(target.export);
    if (new->kept == NULL) {
        return -1;
    }
    new->entry.transfer.range = target.range;
    new->entry.dense = target.dense;
    new->entry.read_only = read_only != 0;
    if (mm_is_buffer(state, value)) {
        mm_buffer *b = mm_buffer_of(value);
        new->entry.memory = &b->memory->guard;
        new->entry.view = b->is_view ? &b->guard : NULL;
    }
    return 0;
}

PyObject *
mm_plan_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"target", "location", "offset", "nbytes"};
    static const mm_parameters parameters = {"add", names, 2, 2, 4};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *given[4];
    addition new;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || read_target(state, given[0], &new) < 0) {
        return NULL;
    }
    if (read_part(given[2], given[3], &new.entry.transfer.range) < 0
        || mm_read_location(state, given[1], &new.entry.transfer.where) < 0) {
        Py_DECREF(new.kept);
        return NULL;
    }
    return append(mm_plan_of(op), &new) < 0 ? NULL : Py_NewRef(op);
}

/* --- making ----------------------------------------------------------------------------- */

static int
add_pair(mm_plan_object *self, mm_state *state, PyObject *value)
{
    bool sequence = PyTuple_Check(value) || PyList_Check(value);
    /* Of our own, because reading runs Python code, which may change a list. */
    PyObject *pair = sequence ? PySequence_Tuple(value) : Py_NewRef(value);
    addition new;
    int rc = -1;

    if (pair == NULL) {
        return -1;
    }
    if (!sequence) {
        (void)mm_refuse_foreign(PyExc_TypeError, value, "is no pair (target, location)");
    } else if (PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "a pair (target, location) is needed, got %zd items",
                     PyTuple_Size(pair));
    } else if (read_target(state, PyTuple_GetItem(pair, 0), &new) == 0) {
        if (mm_read_location(state, PyTuple_GetItem(pair, 1), &new.entry.transfer.where) == 0) {
            rc = append(self, &new);
        } else {
            Py_DECREF(new.kept);
        }
    }
    Py_DECREF(pair);
    return rc;
}

static int
add_pairs(mm_plan_object *self, mm_state *state, PyObject *pairs)
{
    bool iterable = PyType_GetSlot(Py_TYPE(pairs), Py_tp_iter) || PySequence_Check(pairs);
    PyObject *iterator, *pair;
    int rc = 0;

    if (!iterable) {
        return mm_refuse_foreign(PyExc_TypeError, pairs,
                                 "is not an iterable of pairs (target, location)");
    }
    iterator = PyObject_GetIter(pairs);
    if (iterator == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; rc == 0 && (pair = PyIter_Next(iterator)) != NULL; i++) {
        rc = add_pair(self, state, pair);
        if (rc < 0) {
            mm_name_item("entries", i);
        }
        Py_DECREF(pair);
    }
    Py_DECREF(iterator);
    return rc < 0 || PyErr_Occurred() ? -1 : 0;
}

PyObject *
mm_plan_tp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"entries"};
    static const mm_parameters parameters = {"PrefetchPlan", names, 0, 1, 1};
    PyObject *given[1], *self;

    if (mm_args_new(&parameters, args, kwargs, given) < 0) {
        return NULL;
    }
    self = mm_alloc_object(type);
    if (self != NULL && given[0] != NULL
        && add_pairs(mm_plan_of(self), mm_type_state(type), given[0]) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

/* A plan of one or several targets, all to one place. */
static PyObject *
plan_to(PyTypeObject *type, PyObject *targets, CUmemLocation where)
{
    mm_state *state = mm_type_state(type);
    PyObject *self, *items;
    bool several;

    items = mm_targets_tuple(state, targets, &several);
    self = items ? mm_alloc_object(type) : NULL;
    for (Py_ssize_t i = 0; self != NULL && i < PyTuple_Size(items); i++) {
        addition new;
        int rc = read_target(state, PyTuple_GetItem(items, i), &new);
        if (rc == 0) {
            new.entry.transfer.where = where;
            rc = append(mm_plan_of(self), &new);
        } else if (several) {
            mm_name_item("targets", i);
        }
        if (rc < 0) {
            Py_CLEAR(self);
        }
    }
    Py_XDECREF(items);
    return self;
}

PyObject *
mm_plan_from_policy(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"targets", "policy"};
    static const mm_parameters parameters = {"from_policy", names, 2, 2, 2};
    PyObject *given[2], *location;
    CUmemLocation where;
    int found, rc = -1;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || (found = mm_get_optional(given[1], "preferred_location", &location)) < 0) {
        return NULL;
    }
    if (found == 0) {
        (void)mm_refuse_foreign(PyExc_TypeError, given[1],
                                "is no policy: it has no preferred_location");
        return NULL;
    }
    if (location == Py_None) {
        PyErr_Format(PyExc_ValueError, "%R prefers no location: there is nowhere to prefetch to",
                     given[1]);
    } else {
        rc = mm_read_location(mm_type_state((PyTypeObject *)type), location, &where);
    }
    Py_DECREF(location);
    return rc < 0 ? NULL : plan_to((PyTypeObject *)type, given[0], where);
}

/* Appends what module.name() yields to a list. */
static int
extend_by(PyObject *list, PyObject *module, const char *name)
{
    PyObject *method, *found = NULL, *more = NULL;
    int there = mm_get_optional(module, name, &method), rc = -1;

    if (there == 0) {
        (void)mm_refuse_foreign(
            PyExc_TypeError, module,
            "is not a module: it needs the methods parameters() and buffers()");
    } else if (there > 0) {
        found = PyObject_CallNoArgs(method);
        Py_DECREF(method);
    }
    if (found != NULL) {
        more = PySequence_List(found);
        Py_DECREF(found);
    }
    if (more != NULL) {
        rc = PyList_SetSlice(list, PyList_Size(list), PyList_Size(list), more);
        Py_DECREF(more);
    }
    return rc;
}

PyObject *
mm_plan_from_module(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"module", "location"};
    static const mm_parameters parameters = {"from_module", names, 2, 2, 2};
    PyObject *given[2], *tensors, *plan = NULL;
    CUmemLocation where;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_location(mm_type_state((PyTypeObject *)type), given[1], &where) < 0) {
        return NULL;
    }
    tensors = PyList_New(0);
    if (tensors != NULL && extend_by(tensors, given[0], "parameters") == 0
        && extend_by(tensors, given[0], "buffers") == 0) {
        plan = plan_to((PyTypeObject *)type, tensors, where);
    }
    Py_XDECREF(tensors);
    return plan;
}

/* --- a budget --------------------------------------------------------------------------- */

/* What is left alone where no budget is given, for the allocations of kernels and libraries. */
enum { RESERVE_PARTS = 16 };

/* Reads the budget in bytes; never more than the device has free. */
static int
read_budget(mm_state *state, PyObject *value, CUmemLocation device, size_t *budget)
{
    bool given = value != NULL && value != Py_None;
    size_t free_bytes = 0, total = 0;
    mm_driver *cu = mm_open(state);
    long long asked = 0;
    mm_status st;
    int rc;

    if (cu == NULL || (given && mm_read_index(value, "budget", PyExc_TypeError, &asked) < 0)) {
        return -1;
    }
    if (asked < 0) {
        PyErr_Format(PyExc_ValueError, "budget must be 0 bytes or more, got %lld", asked);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_device_memory(cu, device.id, &free_bytes, &total, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(state, &st);
        return -1;
    }
    if (given) {
        *budget = (size_t)asked < free_bytes ? (size_t)asked : free_bytes;
    } else {
        size_t reserve = total / RESERVE_PARTS;
        *budget = free_bytes > reserve ? free_bytes - reserve : 0;
    }
    return 0;
}

PyObject *
mm_plan_fit_targets(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"targets", "device", "budget"};
    static const mm_parameters parameters = {"fit", names, 2, 3, 3};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    CUmemLocation device;
    PyObject *given[3], *plan;
    size_t budget;
    mm_status st;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || mm_read_location(state, given[1], &device) < 0) {
        return NULL;
    }
    if (device.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        PyErr_Format(PyExc_ValueError, "fit() needs a Device to fit targets on, got %R", given[1]);
        return NULL;
    }
    plan = plan_to((PyTypeObject *)type, given[0], device);
    if (plan != NULL && read_budget(state, given[2], device, &budget) < 0) {
        Py_CLEAR(plan);
    }
    if (plan != NULL
        && mm_plan_fit(mm_plan_of(plan)->entries, mm_plan_of(plan)->count, device, budget, &st)
               < 0) {
        Py_CLEAR(plan);
        (void)mm_raise(state, &st);
    }
    return plan;
}

/* --- docstrings -------------------------------------------------------------------------- */

const char mm_plan_add_doc[] =
    "add($self, /, target, location, *, offset=0, nbytes=None)\n--\n\n"
    "Add a target, or a part of it, and where it shall go; gives the plan itself.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "target : one target\n"
    "    As for advise(). What it exports through the buffer protocol stays exported until clear()\n"
    "    or the plan's end; a ManagedBuffer is not exported.\n"
    "location : Device or Host\n"
    "    Where its pages shall go.\n"
    "offset : int\n"
    "    Bytes of the target to skip.\n"
    "nbytes : int, optional\n"
    "    Bytes to take from there. None: all that follow.\n"
    "\n"
    "Raises ValueError if the part leaves the target or the target is not managed memory, TypeError for\n"
    "wrong types; the plan is then as before. Driver:\n"
    "cuPointerGetAttributes for memory of other libraries.";

const char mm_plan_fit_doc[] =
    "fit(targets, device, budget=None)\n--\n\n"
    "A plan that puts on a device what fits there, and the rest on the host.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : target or sequence of targets\n"
    "    In the order of their importance. Each goes as a whole; one that does not fit into what is\n"
    "    left goes to Host(), and smaller ones behind it may still fit.\n"
    "device : Device\n"
    "    Where the targets shall go.\n"
    "budget : int, optional\n"
    "    Bytes to use at the most. Never more than the device has free are used. None: what is free,\n"
    "    less a sixteenth of the device's memory.\n"
    "\n"
    "Whole pages count, and equal targets once. Memory of the targets that is on the device now is\n"
    "not counted as free. Raises TypeError or ValueError for bad arguments. Driver: cuMemGetInfo.";

const char mm_plan_from_module_doc[] =
    "from_module(module, location)\n--\n\n"
    "A plan of all parameters and buffers of a torch module, or of what has such methods.\n"
    "\n"
    "Raises ValueError unless all of them lie in managed memory, TypeError for an object without these\n"
    "methods.";

const char mm_plan_from_policy_doc[] =
    "from_policy(targets, policy)\n--\n\n"
    "A plan that takes targets to the preferred_location of a policy.\n"
    "\n"
    "ValueError where the policy prefers none.";
