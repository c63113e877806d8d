/* policy_object.c: the type MigrationPolicy: all advice about memory, as a value. */
#include "policy_object.h"

#include "foreign_location.h"
#include "location_object.h"
#include "location_set.h"
#include "targets.h"

#include <string.h>

static const mm_policy *
policy_of(PyObject *op)
{
    return &((mm_policy_object *)op)->policy;
}

static bool
has_location(CUmemLocation location)
{
    return (int)location.type != CU_MEM_LOCATION_TYPE_INVALID;
}

static PyObject *
new_policy(PyTypeObject *type, const mm_policy *policy)
{
    PyObject *self = mm_alloc_object(type);

    assert(policy != NULL);
    if (self != NULL) {
        ((mm_policy_object *)self)->policy = *policy;
    }
    return self;
}

PyObject *
mm_policy_object_new(mm_state *state, const mm_policy *policy)
{
    return new_policy(state->policy_type, policy);
}

int
mm_read_given_policy(mm_state *state, PyObject *value, const mm_policy **policy)
{
    if (Py_TYPE(value) != state->policy_type) {
        return MM_ERROR(PyExc_TypeError, "policy must be a MigrationPolicy or None, got %R",
                        value);
    }
    *policy = policy_of(value);
    return 0;
}

/* --- construction ----------------------------------------------------------------------- */

PyDoc_STRVAR(
    policy_doc,
    "MigrationPolicy(*, read_mostly=False, preferred_location=None, accessed_by=())\n--\n\n"
    "All advice about memory, as one value to apply, compare, store and undo.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "read_mostly : bool\n"
    "    Each processor that reads a page gets a copy of it; a write discards the copies.\n"
    "preferred_location : Device or Host, optional\n"
    "    Where pages should stay; Host(numa_id=N) names one NUMA node.\n"
    "accessed_by : iterable of Device and Host()\n"
    "    The processors that keep a mapping of the pages, so that their accesses do not fault.\n"
    "\n"
    "MigrationPolicy() has no advice, like newly allocated memory. default(), read_duplicated(),\n"
    "prefer() and shared() make the usual policies. A policy is immutable and hashable, is\n"
    "compared by value, and can be pickled. Its repr() is an expression that makes an equal\n"
    "policy.\n"
    "\n"
    "Raises TypeError for an object that is not a location, ValueError for a NUMA host in accessed_by or\n"
    "a Device that this system does not have; unpickling raises the same. Safe from every thread.\n"
    "Driver: none.");

static PyObject *
policy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { READ_MOSTLY, PREFERRED_LOCATION, ACCESSED_BY, ARGC };
    static mm_signature signature = {.doc = policy_doc};
    mm_state *state = mm_type_state(type);
    mm_policy policy = {0};
    PyObject *argv[ARGC];

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || (argv[READ_MOSTLY] != NULL
            && mm_read_flag(state, argv[READ_MOSTLY], "read_mostly", &policy.read_mostly) < 0)
        || (argv[PREFERRED_LOCATION] != NULL && argv[PREFERRED_LOCATION] != Py_None
            && mm_read_location(state, argv[PREFERRED_LOCATION], &policy.preferred) < 0)
        || (argv[ACCESSED_BY] != NULL
            && mm_read_members(state, argv[ACCESSED_BY], true, &policy.accessed_by) < 0)) {
        return NULL;
    }
    return new_policy(type, &policy);
}

PyDoc_STRVAR(policy_default_doc, "default()\n--\n\n"
                                 "No advice: a page moves to the processor that touches it.");

static PyObject *
policy_default(PyObject *type, PyObject *Py_UNUSED(none))
{
    return new_policy((PyTypeObject *)type, &(mm_policy){0});
}

PyDoc_STRVAR(
    policy_read_duplicated_doc,
    "read_duplicated()\n--\n\n"
    "Read mostly: each processor that reads a page gets a copy. For memory that is seldom written.");

static PyObject *
policy_read_duplicated(PyObject *type, PyObject *Py_UNUSED(none))
{
    return new_policy((PyTypeObject *)type, &(mm_policy){.read_mostly = true});
}

PyDoc_STRVAR(policy_prefer_doc,
             "prefer(location, /)\n--\n\n"
             "Pages stay at that Device or Host; other processors access them there if they can.\n"
             "\n"
             "Host(numa_id=N) names one NUMA node. Raises as MigrationPolicy() does.");

static PyObject *
policy_prefer(PyObject *type, PyObject *location)
{
    mm_policy policy = {0};

    if (mm_read_location(mm_type_state((PyTypeObject *)type), location, &policy.preferred) < 0) {
        return NULL;
    }
    return new_policy((PyTypeObject *)type, &policy);
}

PyDoc_STRVAR(
    policy_shared_doc,
    "shared(accessed_by=None)\n--\n\n"
    "The given Devices and Host() keep mappings of the pages; None: all devices and the host.\n"
    "\n"
    "Raises as MigrationPolicy() does. Driver: none, but None opens it to count the devices.");

static PyObject *
policy_shared(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = policy_shared_doc};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    mm_policy policy = {0};
    PyObject *argv[1];
    mm_driver *cu;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    if (argv[0] != NULL && argv[0] != Py_None) {
        return mm_read_members(state, argv[0], true, &policy.accessed_by) < 0
                   ? NULL
                   : new_policy((PyTypeObject *)type, &policy);
    }
    cu = mm_open(state);
    if (cu == NULL) {
        return NULL;
    }
    assert(cu->device_count < MM_HOST_BIT);
    policy.accessed_by =
        mm_location_bit(mm_host()) | (((mm_location_set)1 << cu->device_count) - 1);
    return new_policy((PyTypeObject *)type, &policy);
}

/* --- a value ---------------------------------------------------------------------------- */

static PyObject *
policy_get_read_mostly(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(policy_of(op)->read_mostly);
}

static PyObject *
policy_get_preferred_location(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_location_object_new(mm_type_state(Py_TYPE(op)), policy_of(op)->preferred);
}

static PyObject *
policy_get_accessed_by(PyObject *op, void *Py_UNUSED(closure))
{
    return mm_location_frozenset(mm_type_state(Py_TYPE(op)), policy_of(op)->accessed_by);
}

static PyObject *
policy_get_is_default(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_same_policy(policy_of(op), &(mm_policy){0}));
}

static PyObject *
policy_richcompare(PyObject *op, PyObject *other, int comparison)
{
    if (Py_TYPE(other) != Py_TYPE(op) || (comparison != Py_EQ && comparison != Py_NE)) {
        return Py_NewRef(Py_NotImplemented);
    }
    return PyBool_FromLong(mm_same_policy(policy_of(op), policy_of(other))
                           == (comparison == Py_EQ));
}

static Py_hash_t
policy_hash(PyObject *op)
{
    const mm_policy *p = policy_of(op);
    PyObject *parts = Py_BuildValue("(iiiK)", (int)p->read_mostly, (int)p->preferred.type,
                                    p->preferred.id, (unsigned long long)p->accessed_by);
    Py_hash_t hash = parts ? PyObject_Hash(parts) : -1;

    Py_XDECREF(parts);
    return hash;
}

enum { REPR_BYTES = 2048 }; /* enough with every location in accessed_by */

/* Appends a name and its value, each of which may be empty, to a list with commas. */
static void
add_text(char text[REPR_BYTES], const char *name, const char *value)
{
    size_t used = strlen(text);

    (void)PyOS_snprintf(text + used, REPR_BYTES - used, "%s%s%s", used > 0 ? ", " : "", name,
                        value);
}

static PyObject *
policy_repr(PyObject *op)
{
    const mm_policy *p = policy_of(op);
    char parts[REPR_BYTES] = "", members[REPR_BYTES] = "", name[MM_LOCATION_TEXT];
    mm_location_set accessed_by = p->accessed_by;
    CUmemLocation location;

    if (p->read_mostly) {
        add_text(parts, "read_mostly=", "True");
    }
    if (has_location(p->preferred)) {
        add_text(parts, "preferred_location=", mm_location_text(p->preferred, name));
    }
    while (mm_next_location(&accessed_by, &location)) {
        add_text(members, "", mm_location_text(location, name));
    }
    if (p->accessed_by == 0) {
        return PyUnicode_FromFormat("MigrationPolicy(%s)", parts);
    }
    add_text(parts, "accessed_by=", "");
    return PyUnicode_FromFormat("MigrationPolicy(%s{%s})", parts, members);
}

PyDoc_STRVAR(policy_reduce_doc, "__reduce__($self, /)\n--\n\nFor pickle and copy.");

static PyObject *
policy_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    PyObject *copyreg = PyImport_ImportModule("copyreg");
    PyObject *make = copyreg ? PyObject_GetAttrString(copyreg, "__newobj_ex__") : NULL;
    PyObject *preferred = make ? policy_get_preferred_location(op, NULL) : NULL;
    PyObject *accessed_by = preferred ? policy_get_accessed_by(op, NULL) : NULL;

    Py_XDECREF(copyreg);
    if (accessed_by == NULL) {
        Py_XDECREF(make);
        Py_XDECREF(preferred);
        return NULL;
    }
    return Py_BuildValue("(N(O(){s:O,s:N,s:N}))", make, Py_TYPE(op), "read_mostly",
                         policy_of(op)->read_mostly ? Py_True : Py_False, "preferred_location",
                         preferred, "accessed_by", accessed_by);
}

/* Appends (name, location); the location is None if the advice takes none. */
static int
append_advice(mm_state *state, PyObject *list, CUmem_advise advice, CUmemLocation location)
{
    PyObject *pair =
        Py_BuildValue("(sN)", mm_advice_name(advice),
                      mm_advice_needs_location(advice) ? mm_location_object_new(state, location)
                                                       : Py_NewRef(Py_None));

    return mm_append_item(list, pair);
}

PyDoc_STRVAR(
    policy_advice_doc,
    "advice($self, /)\n--\n\n"
    "The policy as a list of (advice, location) for managedmem.advise().\n"
    "\n"
    "location is None for advice that takes none. The list of the default policy is empty.");

static PyObject *
policy_advice(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    const mm_policy *p = policy_of(op);
    mm_location_set accessed_by = p->accessed_by;
    PyObject *list = PyList_New(0);
    int rc = list ? 0 : -1;
    CUmemLocation location;

    if (rc == 0 && has_location(p->preferred)) {
        rc = append_advice(state, list, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, p->preferred);
    }
    if (rc == 0 && p->read_mostly) {
        rc = append_advice(state, list, CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host());
    }
    while (rc == 0 && mm_next_location(&accessed_by, &location)) {
        rc = append_advice(state, list, CU_MEM_ADVISE_SET_ACCESSED_BY, location);
    }
    if (rc < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* --- memory ----------------------------------------------------------------------------- */

/* The parameters of apply and applied. */
enum { TARGETS, UNSUPPORTED, APPLY_ARGC };

PyDoc_STRVAR(
    policy_apply_doc,
    "apply($self, targets, /, *, unsupported='raise')\n--\n\n"
    "Make the advice on all pages of the targets equal to this policy.\n"
    "\n"
    "Advice that the policy does not have is unset. targets are as for managedmem.advise().\n"
    "unsupported=\"skip\" passes over the targets that cannot take all of the policy here, and leaves\n"
    "their advice as it is. They are memory that is not managed (system memory that the current\n"
    "device reaches can take it), pool memory where the driver refuses advice on it, and all\n"
    "targets if the policy names a device without concurrent_managed_access.\n"
    "\n"
    "Returns None; with unsupported=\"skip\" the number of targets that were passed over.\n"
    "\n"
    "It queries the present advice of each page, and gives only the advice that differs, once for\n"
    "each run of pages. It is all or nothing: if the driver fails in the middle, the earlier\n"
    "advice is restored page by page; if that fails too, the error says so. The advice of system\n"
    "memory cannot be queried: all of the policy is given, and a failure leaves the memory\n"
    "without advice. On systems with one NUMA node drivers accept a node but record nothing, so\n"
    "Host() is advised instead. The advice takes effect at once, not in stream order. Raises\n"
    "TypeError and ValueError for bad arguments and RuntimeError for a closed buffer, before any\n"
    "advice; CUDAError if the driver refuses. Safe from every thread; releases the GIL. Of\n"
    "two threads that advise the same pages, the last one wins, advice by advice.\n"
    "Driver: cuMemRangeGetAttributes, cuMemAdvise.");

static PyObject *
policy_apply(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = policy_apply_doc};
    PyObject *argv[APPLY_ARGC];
    mm_page_runs before;
    mm_targets t;
    bool skips;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_unsupported(argv[UNSUPPORTED], &skips) < 0
        || mm_policy_apply_to(mm_type_state(Py_TYPE(op)), policy_of(op), argv[TARGETS], skips, &t,
                              &before)
               < 0) {
        return NULL;
    }
    mm_page_runs_free(&before);
    return mm_targets_result(&t, 0, NULL);
}

PyDoc_STRVAR(
    policy_applied_doc,
    "applied($self, targets, /, *, unsupported='raise')\n--\n\n"
    "A context manager: applies the policy for a `with` block, then restores the earlier advice.\n"
    "\n"
    "targets and unsupported are as for apply(). The targets are read and checked at this call.\n"
    "Returns an AppliedPolicy, whose description says more.");

static PyObject *
policy_applied(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = policy_applied_doc};
    PyObject *argv[APPLY_ARGC];
    bool skips;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_unsupported(argv[UNSUPPORTED], &skips) < 0) {
        return NULL;
    }
    return mm_applied_policy_new(mm_type_state(Py_TYPE(op)), op, argv[TARGETS], skips);
}

/* The policy that all runs have; ValueError if they differ. */
static PyObject *
common_policy(PyTypeObject *type, const mm_page_runs *runs)
{
    for (size_t i = 1; i < runs->count; i++) {
        if (!mm_same_policy(&runs->run[i].policy, &runs->run[0].policy)) {
            return PyErr_Format(
                PyExc_ValueError,
                "the advice is not the same on all pages, so that no policy describes "
                "them: page_runs() of the buffer gives the advice of each part");
        }
    }
    return new_policy(type, runs->count > 0 ? &runs->run[0].policy : &(mm_policy){0});
}

PyDoc_STRVAR(
    policy_of_doc,
    "of(targets, /)\n--\n\n"
    "The policy that memory has now.\n"
    "\n"
    "targets as for managedmem.advise(). Raises ValueError for system memory, whose advice cannot be\n"
    "queried, and for pages that differ: see ManagedBuffer.page_runs(). A NUMA host reads back as Host()\n"
    "on systems with one node; Host.numa_current() reads back as the node that was current.\n"
    "\n"
    "Queries the driver once for each page, as page_runs() does. Raises RuntimeError for a closed buffer.\n"
    "Safe from every thread; releases the GIL. Driver: cuMemRangeGetAttributes.");

static PyObject *
policy_from_memory(PyObject *type, PyObject *targets)
{
    mm_state *state = mm_type_state((PyTypeObject *)type);
    mm_page_runs runs = {0};
    PyObject *policy;
    mm_targets t;
    mm_status st;
    int rc;

    if (mm_targets_read(state, targets, MM_QUERY, &t) < 0) {
        return NULL;
    }
    rc = mm_targets_enter(&t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = mm_policy_read(t.cu, &t.batch, &runs, &st);
        mm_targets_leave(&t);
        Py_END_ALLOW_THREADS
    }
    mm_targets_release(&t);
    if (rc < 0) {
        return mm_raise(state, &st);
    }
    policy = common_policy((PyTypeObject *)type, &runs);
    mm_page_runs_free(&runs);
    return policy;
}

static PyMethodDef policy_methods[] = {
    {"default", policy_default, METH_NOARGS | METH_CLASS, policy_default_doc},
    {"read_duplicated", policy_read_duplicated, METH_NOARGS | METH_CLASS,
     policy_read_duplicated_doc},
    {"prefer", policy_prefer, METH_O | METH_CLASS, policy_prefer_doc},
    MM_CLASS_METHOD("shared", policy_shared, policy_shared_doc),
    {"of", policy_from_memory, METH_O | METH_CLASS, policy_of_doc},
    {"advice", policy_advice, METH_NOARGS, policy_advice_doc},
    MM_METHOD("apply", policy_apply, policy_apply_doc),
    MM_METHOD("applied", policy_applied, policy_applied_doc),
    {"__reduce__", policy_reduce, METH_NOARGS, policy_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef policy_getset[] = {
    {"read_mostly", policy_get_read_mostly, NULL, "True if pages are copied to each reader.",
     NULL},
    {"preferred_location", policy_get_preferred_location, NULL,
     "Where pages should stay: a Device, a Host, or None.", NULL},
    {"accessed_by", policy_get_accessed_by, NULL,
     "The Devices and Host() that keep a mapping, as a frozenset.", NULL},
    {"is_default", policy_get_is_default, NULL,
     "True for a policy without advice, such as MigrationPolicy.default().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef policy_members[] = MM_WEAK_MEMBERS(mm_policy_object);

static PyType_Slot policy_slots[] = {
    {Py_tp_doc, (void *)policy_doc},
    {Py_tp_new, policy_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, mm_dealloc_value},
    {Py_tp_repr, policy_repr},
    {Py_tp_hash, policy_hash},
    {Py_tp_richcompare, policy_richcompare},
    {Py_tp_methods, policy_methods},
    {Py_tp_getset, policy_getset},
    {Py_tp_members, policy_members},
    {0, NULL},
};

int
mm_policy_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem.MigrationPolicy", sizeof(mm_policy_object), 0,
                             policy_slots, &state->policy_type);
}
