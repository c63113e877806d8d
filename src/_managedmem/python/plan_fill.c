/* plan_fill.c: filling a PrefetchPlan: by add(), from pairs, a module, a policy or a budget. */
#include <stdlib.h>

#include "foreign_memory.h"
#include "foreign_location.h"
#include "plan_object.h"
#include "targets.h"

/* --- adding ----------------------------------------------------------------------------- */

/* A checked entry, to be appended. */
typedef struct {
    mm_plan_entry entry;
    PyObject *kept; /* a tuple of its target and a memoryview or None */
} new_entry;

static int
plan_grow(mm_plan_object *self)
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

/* Makes the list if there is none. Making a list can run the garbage collector, and so Python code
 * that makes the list of the same plan first. */
static int
ensure_list(PyObject **list)
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

/* Takes ownership of new->kept. */
static int
plan_append(mm_plan_object *self, const new_entry *new)
{
    int rc = 0;

    assert(new->kept != NULL);
    MM_LOCK((PyObject *)self);
    if (ensure_list(&self->kept) < 0 || plan_grow(self) < 0
        || PyList_Append(self->kept, new->kept) < 0) {
        rc = -1;
    } else {
        self->entries[self->count++] = new->entry;
        mm_plan_drop_prepared(self);
    }
    MM_UNLOCK();
    Py_DECREF(new->kept);
    return rc;
}

/* Cuts the range to nbytes from an offset. NULL stands for the default; nbytes may also be None. */
static int
read_part(PyObject *offset, PyObject *nbytes, mm_range *range)
{
    long long from = 0;
    size_t bytes;

    if (offset != NULL && mm_read_index(offset, "offset", PyExc_TypeError, &from) < 0) {
        return -1;
    }
    if (from < 0 || (size_t)from > range->size) {
        return MM_ERROR(PyExc_ValueError,
                        "offset must be from 0 to %zu, the size of the target in bytes; got %lld",
                        range->size, from);
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
        return MM_ERROR(PyExc_ValueError,
                        "nbytes must be at most %zu, the bytes of the target from "
                        "offset %lld on; got %zu",
                        range->size, from, bytes);
    }
    range->size = bytes;
    return 0;
}

/* Reads a target; the caller sets its location. */
static int
read_plan_target(mm_state *state, PyObject *value, new_entry *new)
{
    mm_target target;
    mm_driver *cu;

    assert(!PyErr_Occurred());
    *new = (new_entry){.kept = NULL};
    if ((cu = mm_open(state)) == NULL
        || mm_target_read(state, cu, value, MM_PREFETCH, &target) < 0) {
        return -1;
    }
    new->kept = PyTuple_Pack(2, value, target.export ? target.export : Py_None);
    Py_XDECREF(target.export);
    if (new->kept == NULL) {
        return -1;
    }
    new->entry.transfer.range = target.range;
    new->entry.dense = target.dense;
    new->entry.read_only = target.read_only;
    if (mm_is_buffer(state, value)) {
        mm_buffer *b = mm_buffer_of(value);
        new->entry.memory = &b->memory->guard;
        new->entry.view = b->is_view ? &b->guard : NULL;
    }
    return 0;
}

const char mm_plan_add_doc[] =
    "add($self, /, target, location, *, offset=0, nbytes=None)\n--\n\n"
    "Add a target, or a part of it, with its destination, and return the plan.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "target : one target\n"
    "    As for advise(). An object with the buffer protocol stays exported until clear() or the\n"
    "    plan's end; a ManagedBuffer is not exported.\n"
    "location : Device or Host\n"
    "    The destination of its pages.\n"
    "offset : int\n"
    "    Bytes of the target to skip.\n"
    "nbytes : int, optional\n"
    "    Bytes to take from the offset on. None: all.\n"
    "\n"
    "Raises ValueError if the part leaves the target or the target is not managed memory, TypeError for\n"
    "wrong types; the plan is then unchanged. Driver:\n"
    "cuPointerGetAttributes for memory of other libraries.";

PyObject *
mm_plan_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TARGET, LOCATION, OFFSET, NBYTES, ARGC };
    static mm_signature signature = {.doc = mm_plan_add_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *argv[ARGC];
    new_entry new;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_plan_target(state, argv[TARGET], &new) < 0) {
        return NULL;
    }
    if (read_part(argv[OFFSET], argv[NBYTES], &new.entry.transfer.range) < 0
        || mm_read_location(state, argv[LOCATION], &new.entry.transfer.location) < 0) {
        Py_DECREF(new.kept);
        return NULL;
    }
    return plan_append(mm_plan_of(op), &new) < 0 ? NULL : Py_NewRef(op);
}

/* --- making ----------------------------------------------------------------------------- */

static int
add_pair(mm_plan_object *self, mm_state *state, PyObject *value)
{
    bool sequence = PyTuple_Check(value) || PyList_Check(value);
    /* A tuple, because reading runs Python code, which may change a list. */
    PyObject *pair = sequence ? PySequence_Tuple(value) : Py_NewRef(value);
    new_entry new;
    int rc = -1;

    if (pair == NULL) {
        return -1;
    }
    if (!sequence) {
        (void)mm_refuse_foreign(PyExc_TypeError, value, "is not a pair (target, location)");
    } else if (PyTuple_Size(pair) != 2) {
        PyErr_Format(PyExc_TypeError, "a pair (target, location) is needed, got %zd items",
                     PyTuple_Size(pair));
    } else if (read_plan_target(state, PyTuple_GetItem(pair, 0), &new) == 0) {
        if (mm_read_location(state, PyTuple_GetItem(pair, 1), &new.entry.transfer.location) == 0) {
            rc = plan_append(self, &new);
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

const char mm_plan_doc[] =
    "PrefetchPlan(entries=())\n--\n\n"
    "Prefetches that are prepared once and executed often.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "entries : iterable of pairs (target, location)\n"
    "    As for add().\n"
    "\n"
    "The plan keeps its targets alive. A ManagedBuffer in it can be closed; executing the plan then\n"
    "raises before anything is moved. The first execution after a change merges neighbouring ranges\n"
    "with the same location and prepares them for the driver; later ones allocate nothing. Where\n"
    "entries overlap or share a page, the last one wins. len() is the number of entries. Iteration\n"
    "yields a PlanEntry for each entry; plan[i] is one PlanEntry, a slice or copy.copy() a new plan\n"
    "over the same targets. Executing an empty plan does nothing.\n"
    "\n"
    "Safe from every thread: iterations and executions use the entries that the plan has when they\n"
    "begin. Raises TypeError or ValueError that names the bad entry.";

PyObject *
mm_plan_tp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static mm_signature signature = {.doc = mm_plan_doc};
    PyObject *argv[1], *self;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0) {
        return NULL;
    }
    self = mm_alloc_object(type);
    if (self != NULL && argv[0] != NULL
        && add_pairs(mm_plan_of(self), mm_type_state(type), argv[0]) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *
plan_of_targets(PyTypeObject *type, PyObject *targets, CUmemLocation location)
{
    mm_state *state = mm_type_state(type);
    PyObject *self, *items;
    bool is_collection;

    items = mm_targets_tuple(state, targets, &is_collection);
    self = items ? mm_alloc_object(type) : NULL;
    for (Py_ssize_t i = 0; self != NULL && i < PyTuple_Size(items); i++) {
        new_entry new;
        int rc = read_plan_target(state, PyTuple_GetItem(items, i), &new);
        if (rc == 0) {
            new.entry.transfer.location = location;
            rc = plan_append(mm_plan_of(self), &new);
        } else if (is_collection) {
            mm_name_item("targets", i);
        }
        if (rc < 0) {
            Py_CLEAR(self);
        }
    }
    Py_XDECREF(items);
    return self;
}

const char mm_plan_from_policy_doc[] =
    "from_policy(targets, policy)\n--\n\n"
    "A plan that prefetches targets to the preferred_location of a policy.\n"
    "\n"
    "Raises ValueError if the policy prefers no location.";

PyObject *
mm_plan_from_policy(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_plan_from_policy_doc};
    PyObject *argv[2], *preferred;
    CUmemLocation location;
    int found, rc = -1;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || (found = mm_get_optional(argv[1], "preferred_location", &preferred)) < 0) {
        return NULL;
    }
    if (found == 0) {
        (void)mm_refuse_foreign(PyExc_TypeError, argv[1],
                                "is not a policy: it has no preferred_location");
        return NULL;
    }
    if (preferred == Py_None) {
        PyErr_Format(PyExc_ValueError, "%R prefers no location: there is nowhere to prefetch to",
                     argv[1]);
    } else {
        rc = mm_read_location(mm_type_state((PyTypeObject *)type), preferred, &location);
    }
    Py_DECREF(preferred);
    return rc < 0 ? NULL : plan_of_targets((PyTypeObject *)type, argv[0], location);
}

/* Appends the items of module.name() to a list. */
static int
extend_by_method(PyObject *list, PyObject *module, const char *name)
{
    PyObject *method, *result = NULL, *more = NULL;
    int found = mm_get_optional(module, name, &method), rc = -1;

    if (found == 0) {
        (void)mm_refuse_foreign(
            PyExc_TypeError, module,
            "is not a module: it needs the methods parameters() and buffers()");
    } else if (found > 0) {
        result = PyObject_CallNoArgs(method);
        Py_DECREF(method);
    }
    if (result != NULL) {
        more = PySequence_List(result);
        Py_DECREF(result);
    }
    if (more != NULL) {
        rc = PyList_SetSlice(list, PyList_Size(list), PyList_Size(list), more);
        Py_DECREF(more);
    }
    return rc;
}

/* Adds the name of the parameter to the ValueError about a tensor of a torch module. If that fails,
 * the error is unchanged. */
static void
name_parameter(mm_state *state, PyObject *module)
{
    PyObject *error = NULL;
    mm_exception raised;

    if (!PyErr_ExceptionMatches(PyExc_ValueError)) {
        return;
    }
    mm_exception_save(&raised);
    if (mm_is_instance(state, module, "torch", "Module")) {
        error = mm_call_python("managedmem.torch._targets", "refusal_of", "(O)", module);
    }
    mm_exception_restore(&raised);
    if (error != NULL && error != Py_None) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    }
    Py_XDECREF(error);
}

const char mm_plan_from_module_doc[] =
    "from_module(module, location)\n--\n\n"
    "A plan of the parameters() and buffers() of a torch module, or of an object with such\n"
    "methods.\n"
    "\n"
    "Raises TypeError for an object without these methods, ValueError unless all tensors lie in\n"
    "managed memory: for a torch module a NotManagedError, with the name of the first tensor that\n"
    "does not.";

PyObject *
mm_plan_from_module(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_plan_from_module_doc};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    PyObject *argv[2], *tensors, *plan = NULL;
    CUmemLocation location;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_location(state, argv[1], &location) < 0) {
        return NULL;
    }
    tensors = PyList_New(0);
    if (tensors != NULL && extend_by_method(tensors, argv[0], "parameters") == 0
        && extend_by_method(tensors, argv[0], "buffers") == 0) {
        plan = plan_of_targets((PyTypeObject *)type, tensors, location);
        if (plan == NULL) {
            name_parameter(state, argv[0]);
        }
    }
    Py_XDECREF(tensors);
    return plan;
}

/* --- a budget --------------------------------------------------------------------------- */

/* The default budget leaves 1 / RESERVE_PARTS of the device's memory for kernels and libraries. */
enum { RESERVE_PARTS = 16 };

/* Reads the budget in bytes, at most the free memory of the device. */
static int
read_budget(mm_state *state, PyObject *value, CUmemLocation device, size_t *budget)
{
    bool is_set = value != NULL && value != Py_None;
    size_t wanted = 0, free_bytes = 0, total = 0;
    mm_driver *cu = mm_open(state);
    mm_status st;
    int rc;

    if (cu == NULL || (is_set && mm_read_size(value, "budget", &wanted) < 0)) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_device_memory(cu, device.id, &free_bytes, &total, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return mm_raise_failure(state, -1, &st);
    }
    if (is_set) {
        *budget = wanted < free_bytes ? wanted : free_bytes;
    } else {
        size_t reserve = total / RESERVE_PARTS;
        *budget = free_bytes > reserve ? free_bytes - reserve : 0;
    }
    return 0;
}

const char mm_plan_fit_doc[] =
    "fit(targets, device, budget=None)\n--\n\n"
    "A plan that sends the targets that fit a budget to a device, and the others to the host.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : target or sequence of targets\n"
    "    In the order of their importance. Each target is sent as a whole. A target that does not\n"
    "    fit in the rest of the budget is sent to Host(), and smaller targets behind it may still\n"
    "    fit.\n"
    "device : int, or a device of any library\n"
    "    The destination of the targets.\n"
    "budget : int, optional\n"
    "    Bytes to use at most; never more than the free memory of the device. None: the free memory\n"
    "    less a sixteenth of the device's memory.\n"
    "\n"
    "A target counts in whole pages, and equal targets count once. Pages of the targets that are\n"
    "on the device now do not count as free. Raises TypeError or ValueError for bad arguments.\n"
    "Driver: cuMemGetInfo.";

PyObject *
mm_plan_fit_targets(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TARGETS, DEVICE, BUDGET, ARGC };
    static mm_signature signature = {.doc = mm_plan_fit_doc};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    CUmemLocation device = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    PyObject *argv[ARGC], *plan;
    size_t budget;
    mm_status st;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_device(state, argv[DEVICE], &device.id) < 0) {
        return NULL;
    }
    plan = plan_of_targets((PyTypeObject *)type, argv[TARGETS], device);
    if (plan != NULL && read_budget(state, argv[BUDGET], device, &budget) < 0) {
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
