/* policy_object.c: the type MigrationPolicy: all that can be advised about memory, as a value. */
#include "policy_object.h"

#include "foreign_location.h"
#include "location_object.h"
#include "location_set.h"

static const mm_policy *
policy_of(PyObject *op)
{
    return &((mm_policy_object *)op)->policy;
}

static bool
is_set(CUmemLocation where)
{
    return (int)where.type != CU_MEM_LOCATION_TYPE_INVALID;
}

static PyObject *
new_policy(PyTypeObject *type, const mm_policy *policy)
{
    PyObject *self = mm_alloc_object(type);

    if (self != NULL) {
        ((mm_policy_object *)self)->policy = *policy;
    }
    return self;
}

/* --- construction ----------------------------------------------------------------------- */

static PyObject *
policy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"read_mostly", "preferred_location", "accessed_by"};
    static const mm_parameters parameters = {"MigrationPolicy", names, 0, 0, 3};
    mm_state *state = mm_type_state(type);
    mm_policy policy = {0};
    PyObject *given[3];

    if (mm_args_new(&parameters, args, kwargs, given) < 0) {
        return NULL;
    }
    if (given[0] != NULL
        && mm_read_flag(state, given[0], "read_mostly", &policy.read_mostly) < 0) {
        return NULL;
    }
    if (given[1] != NULL && given[1] != Py_None
        && mm_read_location(state, given[1], &policy.preferred) < 0) {
        return NULL;
    }
    if (given[2] != NULL && mm_read_members(state, given[2], true, &policy.accessed_by) < 0) {
        return NULL;
    }
    return new_policy(type, &policy);
}

static PyObject *
policy_default(PyObject *type, PyObject *Py_UNUSED(none))
{
    return new_policy((PyTypeObject *)type, &(mm_policy){0});
}

static PyObject *
policy_read_duplicated(PyObject *type, PyObject *Py_UNUSED(none))
{
    return new_policy((PyTypeObject *)type, &(mm_policy){.read_mostly = true});
}

static PyObject *
policy_prefer(PyObject *type, PyObject *location)
{
    mm_policy policy = {0};

    if (mm_read_location(mm_type_state((PyTypeObject *)type), location, &policy.preferred) < 0) {
        return NULL;
    }
    return new_policy((PyTypeObject *)type, &policy);
}

static PyObject *
policy_shared(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"accessed_by"};
    static const mm_parameters parameters = {"shared", names, 0, 1, 1};
    mm_state *state = mm_type_state((PyTypeObject *)type);
    mm_policy policy = {0};
    PyObject *given[1];
    mm_driver *cu;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    if (given[0] != NULL && given[0] != Py_None) {
        return mm_read_members(state, given[0], true, &policy.accessed_by) < 0
                   ? NULL
                   : new_policy((PyTypeObject *)type, &policy);
    }
    cu = mm_open(state);
    if (cu == NULL) {
        return NULL;
    }
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
policy_richcompare(PyObject *op, PyObject *other, int how)
{
    if (Py_TYPE(other) != Py_TYPE(op) || (how != Py_EQ && how != Py_NE)) {
        return Py_NewRef(Py_NotImplemented);
    }
    return PyBool_FromLong(mm_same_policy(policy_of(op), policy_of(other)) == (how == Py_EQ));
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

/* Appends to a list of texts and drops the text; -1 also for a NULL text. */
static int
append_text(PyObject *list, PyObject *text)
{
    int rc = text ? PyList_Append(list, text) : -1;

    Py_XDECREF(text);
    return rc;
}

/* Joins a list of texts by commas and drops it, or only drops it. */
static PyObject *
join(PyObject *list, int rc)
{
    PyObject *comma = rc < 0 ? NULL : PyUnicode_FromString(", ");
    PyObject *text = comma ? PyUnicode_Join(comma, list) : NULL;

    Py_XDECREF(comma);
    Py_XDECREF(list);
    return text;
}

/* The members as Python would spell them, devices ascending and then the host. */
static PyObject *
members_text(mm_location_set set)
{
    PyObject *list = PyList_New(0);
    char name[MM_LOCATION_TEXT];
    int rc = list ? 0 : -1;
    CUmemLocation where;

    while (rc == 0 && mm_next_location(&set, &where)) {
        rc = append_text(list, PyUnicode_FromString(mm_location_text(where, name)));
    }
    return join(list, rc);
}

static PyObject *
policy_repr(PyObject *op)
{
    const mm_policy *p = policy_of(op);
    PyObject *list = PyList_New(0), *inner, *text;
    char name[MM_LOCATION_TEXT];
    int rc = list ? 0 : -1;

    if (rc == 0 && p->read_mostly) {
        rc = append_text(list, PyUnicode_FromString("read_mostly=True"));
    }
    if (rc == 0 && is_set(p->preferred)) {
        rc = append_text(list, PyUnicode_FromFormat("preferred_location=%s",
                                                    mm_location_text(p->preferred, name)));
    }
    if (rc == 0 && p->accessed_by != 0) {
        inner = members_text(p->accessed_by);
        rc = append_text(list, inner ? PyUnicode_FromFormat("accessed_by={%U}", inner) : NULL);
        Py_XDECREF(inner);
    }
    inner = join(list, rc);
    text = inner ? PyUnicode_FromFormat("MigrationPolicy(%U)", inner) : NULL;
    Py_XDECREF(inner);
    return text;
}

static PyObject *
policy_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    PyObject *copyreg = PyImport_ImportModule("copyreg");
    PyObject *make = copyreg ? PyObject_GetAttrString(copyreg, "__newobj_ex__") : NULL;

    Py_XDECREF(copyreg);
    return make ? Py_BuildValue("(N(O(){s:N,s:N,s:N}))", make, Py_TYPE(op), "read_mostly",
                                policy_get_read_mostly(op, NULL), "preferred_location",
                                policy_get_preferred_location(op, NULL), "accessed_by",
                                policy_get_accessed_by(op, NULL))
                : NULL;
}

/* Appends (name, location), with None for a location that does not matter. */
static int
add_advice(mm_state *state, PyObject *list, CUmem_advise advice, CUmemLocation where)
{
    PyObject *pair =
        Py_BuildValue("(sN)", mm_advice_name(advice),
                      mm_advice_needs_location(advice) ? mm_location_object_new(state, where)
                                                       : Py_NewRef(Py_None));
    int rc = pair ? PyList_Append(list, pair) : -1;

    Py_XDECREF(pair);
    return rc;
}

static PyObject *
policy_advice(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    const mm_policy *p = policy_of(op);
    mm_location_set accessed_by = p->accessed_by;
    PyObject *list = PyList_New(0);
    int rc = list ? 0 : -1;
    CUmemLocation where;

    if (rc == 0 && is_set(p->preferred)) {
        rc = add_advice(state, list, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, p->preferred);
    }
    if (rc == 0 && p->read_mostly) {
        rc = add_advice(state, list, CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host());
    }
    while (rc == 0 && mm_next_location(&accessed_by, &where)) {
        rc = add_advice(state, list, CU_MEM_ADVISE_SET_ACCESSED_BY, where);
    }
    if (rc < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* --- memory ----------------------------------------------------------------------------- */

static PyObject *
policy_apply(PyObject *op, PyObject *targets)
{
    mm_page_runs before;
    mm_targets t;

    if (mm_policy_apply_to(mm_type_state(Py_TYPE(op)), policy_of(op), targets, &t, &before) < 0) {
        return NULL;
    }
    mm_page_runs_free(&before);
    mm_targets_end(&t);
    Py_RETURN_NONE;
}

static PyObject *
policy_applied(PyObject *op, PyObject *targets)
{
    return mm_applied_policy_new(mm_type_state(Py_TYPE(op)), op, targets);
}

/* The policy that all runs have. */
static PyObject *
common_policy(PyTypeObject *type, const mm_page_runs *runs)
{
    for (size_t i = 1; i < runs->count; i++) {
        if (!mm_same_policy(&runs->run[i].policy, &runs->run[0].policy)) {
            PyErr_SetString(PyExc_ValueError,
                            "the advice is not the same on all pages, so no policy says it all; "
                            "page_runs() of the buffer tells what each part has");
            return NULL;
        }
    }
    return new_policy(type, runs->count > 0 ? &runs->run[0].policy : &(mm_policy){0});
}

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
    mm_targets_end(&t);
    if (rc < 0) {
        return mm_raise(state, &st);
    }
    policy = common_policy((PyTypeObject *)type, &runs);
    mm_page_runs_free(&runs);
    return policy;
}

PyDoc_STRVAR(
    policy_doc,
    "MigrationPolicy(*, read_mostly=False, preferred_location=None, accessed_by=())\n"
    "--\n"
    "\n"
    "All that can be advised about memory, as a value to apply, compare, store and undo.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "read_mostly : bool\n"
    "    Each processor that reads gets a copy of its own; a write throws the copies away.\n"
    "preferred_location : Device or Host, optional\n"
    "    Where pages should stay; also one NUMA node of the host.\n"
    "accessed_by : iterable of Device and Host()\n"
    "    Who keeps a mapping of the pages, so that its accesses do not fault.\n"
    "\n"
    "What is not named is not advised: MigrationPolicy() is how memory comes from the allocator.\n"
    "default(), read_duplicated(), prefer() and shared() make the usual ones. Immutable and hashable;\n"
    "equal policies compare equal, repr() is the expression that makes it, pickle works.\n"
    "\n"
    "Raises TypeError for what is no location and ValueError for a NUMA host in accessed_by or a Device\n"
    "that this system does not have, also when unpickled here. Safe from every thread. Driver: none.");

PyDoc_STRVAR(policy_default_doc, "default()\n--\n\n"
                                 "No advice: pages move to whoever touches them.");

PyDoc_STRVAR(
    policy_read_duplicated_doc,
    "read_duplicated()\n--\n\n"
    "Read mostly: every processor that reads gets a copy, for memory that is seldom written.");

PyDoc_STRVAR(policy_prefer_doc,
             "prefer(location, /)\n--\n\n"
             "Pages stay at that Device or Host; others map them there where they can.\n"
             "\n"
             "Host(numa_id=N) prefers one NUMA node. Raises as MigrationPolicy() does.");

PyDoc_STRVAR(
    policy_shared_doc,
    "shared(accessed_by=None)\n--\n\n"
    "These Devices and Host() keep mappings of the pages; None: all devices and the host.\n"
    "\n"
    "Raises as MigrationPolicy() does. Driver: none, but None opens it.");

PyDoc_STRVAR(
    policy_of_doc,
    "of(targets, /)\n--\n\n"
    "The policy that is in force on memory now.\n"
    "\n"
    "targets as for managedmem.advise(); system memory, of which the driver tells nothing, is a\n"
    "ValueError. So is memory whose pages differ: see ManagedBuffer.page_runs(). A NUMA host reads\n"
    "back as Host() where there is one node, and the current node as the node it was.\n"
    "\n"
    "Asks once for each page, as page_runs() does. Raises RuntimeError for a closed buffer. Safe from\n"
    "every thread; other threads run meanwhile. Driver: cuMemRangeGetAttributes.");

PyDoc_STRVAR(
    policy_advice_doc,
    "advice($self, /)\n--\n\n"
    "The advices it stands for, as a list of (advice, location), for managedmem.advise().\n"
    "\n"
    "location is None where the advice takes none. The default policy stands for no advice.");

PyDoc_STRVAR(
    policy_apply_doc,
    "apply($self, targets, /)\n--\n\n"
    "Make the advice on all pages of the targets equal to this policy.\n"
    "\n"
    "Advice that the policy does not name is unset. targets as for managedmem.advise(); system memory,\n"
    "of which the driver does not tell its advice, is a ValueError.\n"
    "\n"
    "Reads what is there first, one query a page, and gives only the advice that differs, once for\n"
    "each stretch of pages; none when nothing does. All or nothing: when the driver fails in the\n"
    "middle, what was there is put back, page by page, and the error says so if that fails too. Where\n"
    "there is one NUMA node, drivers accept a node and keep nothing, so Host() is advised instead.\n"
    "Takes effect at once, in no stream's order. Raises TypeError, ValueError, and RuntimeError for a\n"
    "closed buffer, before anything is advised; CUDAError when the driver refuses. Safe from every\n"
    "thread; others run meanwhile; of two that advise the same pages the last wins, advice by advice.\n"
    "Driver: cuMemRangeGetAttributes, cuMemAdvise.");

PyDoc_STRVAR(
    policy_applied_doc,
    "applied($self, targets, /)\n--\n\n"
    "A context manager: the policy is in force in the `with` block, and then what was there before.\n"
    "\n"
    "targets as for apply(), read and checked now. See AppliedPolicy.");

static PyMethodDef policy_methods[] = {
    {"default", policy_default, METH_NOARGS | METH_CLASS, policy_default_doc},
    {"read_duplicated", policy_read_duplicated, METH_NOARGS | METH_CLASS,
     policy_read_duplicated_doc},
    {"prefer", policy_prefer, METH_O | METH_CLASS, policy_prefer_doc},
    MM_CLASS_METHOD("shared", policy_shared, policy_shared_doc),
    {"of", policy_from_memory, METH_O | METH_CLASS, policy_of_doc},
    {"advice", policy_advice, METH_NOARGS, policy_advice_doc},
    {"apply", policy_apply, METH_O, policy_apply_doc},
    {"applied", policy_applied, METH_O, policy_applied_doc},
    {"__reduce__", policy_reduce, METH_NOARGS,
     "__reduce__($self, /)\n--\n\nHow pickle and copy make it again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef policy_getset[] = {
    {"read_mostly", policy_get_read_mostly, NULL, "Whether pages are copied to each reader.",
     NULL},
    {"preferred_location", policy_get_preferred_location, NULL,
     "Where pages should stay: a Device, a Host, or None.", NULL},
    {"accessed_by", policy_get_accessed_by, NULL,
     "The Devices and Host() that keep a mapping, as a frozenset.", NULL},
    {"is_default", policy_get_is_default, NULL,
     "True for a policy without advice, such as MigrationPolicy.default().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef policy_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_policy_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static void
policy_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    mm_free_object(op);
}

static PyType_Slot policy_slots[] = {
    {Py_tp_doc, (void *)policy_doc},
    {Py_tp_new, policy_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, policy_dealloc},
    {Py_tp_repr, policy_repr},
    {Py_tp_hash, policy_hash},
    {Py_tp_richcompare, policy_richcompare},
    {Py_tp_methods, policy_methods},
    {Py_tp_getset, policy_getset},
    {Py_tp_members, policy_members},
    {0, NULL},
};

static PyType_Spec policy_spec = {
    .name = "managedmem.MigrationPolicy",
    .basicsize = sizeof(mm_policy_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = policy_slots,
};

int
mm_policy_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &policy_spec, &state->policy_type);
}
