/* policy_applied.c: applying a policy to targets, and the type AppliedPolicy, which restores the
 * earlier advice at the end of a `with` block. */
#include "policy_object.h"

/* IDLE -> BUSY -> IN_FORCE -> BUSY -> IDLE. Whoever made it BUSY owns the other fields; `held` and
 * `before` have contents while it is IN_FORCE. */
enum { IDLE, BUSY, IN_FORCE };

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *policy;
    PyObject *targets; /* as given, but an iterable as a tuple; NULL once cleared */
    atomic_int stage;
    mm_targets held;
    mm_page_runs before;
} applied_object;

static applied_object *
applied_of(PyObject *op)
{
    return (applied_object *)op;
}

PyObject *
mm_applied_policy_new(mm_state *state, PyObject *policy, PyObject *targets)
{
    PyObject *self;
    mm_targets t;

    if (mm_targets_read(state, targets, MM_QUERY, &t) < 0) {
        return NULL;
    }
    self = mm_alloc_object(state->applied_policy_type);
    if (self != NULL) {
        applied_of(self)->policy = Py_NewRef(policy);
        applied_of(self)->targets = Py_NewRef(t.several ? t.items : PyTuple_GetItem(t.items, 0));
    }
    mm_targets_end(&t);
    return self;
}

static bool
advance(applied_object *a, int from, int to)
{
    return atomic_compare_exchange_strong(&a->stage, &from, to);
}

int
mm_policy_apply_to(mm_state *state, const mm_policy *policy, PyObject *targets, mm_targets *t,
                   mm_page_runs *before)
{
    mm_batch work;
    mm_status st;
    int rc;

    if (mm_targets_read(state, targets, MM_QUERY, t) < 0) {
        return -1;
    }
    if (mm_targets_hold_roots(t) < 0) {
        mm_targets_end(t);
        return -1;
    }
    rc = mm_targets_enter(t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = mm_batch_copy(&work, &t->batch, &st);
        if (rc == 0) {
            rc = mm_policy_apply(t->cu, &work, policy, before, &st);
        }
        mm_batch_free(&work);
        mm_targets_leave(t);
        Py_END_ALLOW_THREADS
    }
    if (rc < 0) {
        mm_targets_end(t);
        (void)mm_raise(state, &st);
    }
    return rc;
}

static PyObject *
applied_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    applied_object *a = applied_of(op);
    int rc;

    if (!advance(a, IDLE, BUSY)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "this object has applied its policy already: restore() or leave its with "
                        "block first, or call applied() again for another one");
        return NULL;
    }
    rc = mm_policy_apply_to(mm_type_state(Py_TYPE(op)), &((mm_policy_object *)a->policy)->policy,
                            a->targets ? a->targets : Py_None, &a->held, &a->before);
    atomic_store(&a->stage, rc < 0 ? IDLE : IN_FORCE);
    return rc < 0 ? NULL : Py_NewRef(op);
}

/* Puts back what was there on the targets that are still there; they are entered. */
static int
restore_entered(applied_object *a, mm_status *st)
{
    mm_batch work;
    int rc = mm_batch_copy(&work, &a->held.batch, st);

    if (rc == 0) {
        rc = mm_policy_restore(a->held.cu, &work, &a->before, st);
    }
    mm_batch_free(&work);
    return rc;
}

static int
restore(applied_object *a, mm_state *state)
{
    mm_status st;
    int rc;

    do {
        if (mm_targets_drop_gone(&a->held) < 0) {
            return -1;
        }
        rc = mm_targets_enter(&a->held, NULL, &st);
    } while (rc < 0); /* a buffer was closed in between */
    if (a->held.batch.count > 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = restore_entered(a, &st);
        mm_targets_leave(&a->held);
        Py_END_ALLOW_THREADS
        if (rc < 0) {
            (void)mm_raise(state, &st);
        }
    }
    return rc;
}

static PyObject *
applied_restore(PyObject *op, PyObject *Py_UNUSED(none))
{
    applied_object *a = applied_of(op);
    mm_state *state = mm_type_state(Py_TYPE(op));

    if (!advance(a, IN_FORCE, BUSY)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the policy is not applied: there is nothing to restore");
        return NULL;
    }
    /* The driver of a forked child's parent cannot be called. */
    if (mm_open(state) == NULL || restore(a, state) < 0) {
        atomic_store(&a->stage, IN_FORCE); /* so that it can be tried again */
        return NULL;
    }
    mm_targets_end(&a->held);
    mm_page_runs_free(&a->before);
    atomic_store(&a->stage, IDLE);
    Py_RETURN_NONE;
}

static PyObject *
applied_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return applied_restore(op, NULL);
}

static PyObject *
applied_get_policy(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(applied_of(op)->policy);
}

static PyObject *
applied_repr(PyObject *op)
{
    bool in_force = atomic_load(&applied_of(op)->stage) == IN_FORCE;

    return PyUnicode_FromFormat("<AppliedPolicy of %R%s>", applied_of(op)->policy,
                                in_force ? ", in force" : "");
}

static PyObject *
applied_reduce(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(none))
{
    PyErr_SetString(
        PyExc_TypeError,
        "AppliedPolicy cannot be pickled: it belongs to its targets; pickle its policy");
    return NULL;
}

static int
applied_traverse(PyObject *op, visitproc visit, void *arg)
{
    applied_object *a = applied_of(op);

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(a->policy);
    Py_VISIT(a->targets);
    Py_VISIT(a->held.items);
    Py_VISIT(a->held.exports);
    return 0;
}

static int
applied_clear(PyObject *op)
{
    applied_object *a = applied_of(op);

    Py_CLEAR(a->targets);
    if (advance(a, IN_FORCE, IDLE)) {
        mm_page_runs_free(&a->before);
        mm_targets_end(&a->held);
    }
    return 0;
}

static void
applied_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    (void)applied_clear(op);
    Py_CLEAR(applied_of(op)->policy);
    mm_free_object(op);
}

PyDoc_STRVAR(
    applied_doc,
    "A policy that is in force in a `with` block; what policy.applied(targets) gives.\n"
    "\n"
    "Entering reads the advice of every page and then does as MigrationPolicy.apply(): all or nothing.\n"
    "Leaving, also by an exception, makes the advice of every page what it was, whatever the block\n"
    "changed, with only the advice that differs. Memory that was closed or freed meanwhile is left\n"
    "out; a closed view is restored as long as its buffer is open. Blocks can be nested, each with an\n"
    "object of its own; one object can be used again after its block, and is a RuntimeError while it\n"
    "is in force.\n"
    "\n"
    "When the driver fails while putting back, the rest is tried, the error names what is not restored,\n"
    "and restore() can be called again. Keeps its targets alive. Safe from every thread.\n"
    "Driver: cuMemRangeGetAttributes, cuMemAdvise.");

PyDoc_STRVAR(
    applied_restore_doc,
    "restore($self, /)\n--\n\n"
    "Put back what was there before, as leaving the block does.\n"
    "\n"
    "For the end of a block that failed to. Raises RuntimeError when the policy is not in force,\n"
    "CUDAError when the driver refuses; then it is still in force, and this can be tried again.");

static PyMethodDef applied_methods[] = {
    {"restore", applied_restore, METH_NOARGS, applied_restore_doc},
    {"__enter__", applied_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nApply the policy; the object itself."},
    MM_POSITIONAL_METHOD("__exit__", applied_exit,
                         "__exit__($self, /, *exception)\n--\n\nPut back what was there before."),
    {"__reduce__", applied_reduce, METH_NOARGS,
     "__reduce__($self, /)\n--\n\nRaises TypeError: it belongs to its targets."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef applied_getset[] = {
    {"policy", applied_get_policy, NULL, "The MigrationPolicy that is applied.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef applied_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(applied_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot applied_slots[] = {
    {Py_tp_doc, (void *)applied_doc},
    {Py_tp_traverse, applied_traverse},
    {Py_tp_clear, applied_clear},
    {Py_tp_dealloc, applied_dealloc},
    {Py_tp_repr, applied_repr},
    {Py_tp_methods, applied_methods},
    {Py_tp_getset, applied_getset},
    {Py_tp_members, applied_members},
    {0, NULL},
};

static PyType_Spec applied_spec = {
    .name = "managedmem.AppliedPolicy",
    .basicsize = sizeof(applied_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = applied_slots,
};

int
mm_applied_policy_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &applied_spec, &state->applied_policy_type);
}
