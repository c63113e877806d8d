/* policy_applied.c: applying a policy to targets, and the type AppliedPolicy, which restores the
 * earlier advice at the end of a `with` block. */
#include "policy_object.h"

#include "../memory/unsupported.h"
#include "oversubscription.h"

/* The stages IDLE -> BUSY -> IN_FORCE -> BUSY -> IDLE. The thread that made an object BUSY owns
 * its other fields; `held` and `before` have contents while it is IN_FORCE. */
enum { IDLE, BUSY, IN_FORCE };

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *policy;
    PyObject
        *targets; /* the argument, or a tuple of its items if it was iterable; NULL once cleared */
    bool skips; /* passes over targets that cannot take the policy */
    atomic_size_t skipped; /* targets that were passed over when the block was last entered */
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
mm_applied_policy_new(mm_state *state, PyObject *policy, PyObject *targets, bool skips)
{
    PyObject *self;
    mm_targets t;

    assert(Py_TYPE(policy) == state->policy_type);
    if (mm_targets_read_or_skip(state, targets, MM_ADVISE, skips, &t) < 0) {
        return NULL;
    }
    self = mm_alloc_object(state->applied_policy_type);
    if (self != NULL) {
        applied_of(self)->policy = Py_NewRef(policy);
        applied_of(self)->skips = skips;
        applied_of(self)->targets =
            Py_NewRef(t.is_collection ? t.items : PyTuple_GetItem(t.items, 0));
    }
    mm_targets_release(&t);
    return self;
}

static bool
exchange_stage(applied_object *a, int from, int to)
{
    assert(from != to && from >= IDLE && from <= IN_FORCE);
    return atomic_compare_exchange_strong(&a->stage, &from, to);
}

/* Applies the policy. t->batch keeps a transfer for each target, for the later restoration. */
static int
apply_to_entered(mm_targets *t, const mm_policy *policy, mm_page_runs *before, mm_status *st)
{
    mm_batch work;
    int rc;

    if (t->skips) {
        return mm_policy_apply_or_skip(t->cu, &t->batch, policy, before, &t->skipped, st);
    }
    rc = mm_batch_copy(&work, &t->batch, st);
    if (rc == 0) {
        rc = mm_policy_apply(t->cu, &work, policy, before, st);
    }
    mm_batch_free(&work);
    return rc;
}

int
mm_policy_apply_to(mm_state *state, const mm_policy *policy, PyObject *targets, bool skips,
                   mm_targets *t, mm_page_runs *before)
{
    mm_status st;
    int rc;

    assert(policy != NULL && !PyErr_Occurred());
    if (mm_targets_read_or_skip(state, targets, MM_ADVISE, skips, t) < 0) {
        return -1;
    }
    for (size_t i = 0; i < t->batch.count; i++) { /* only for the warning */
        t->batch.transfers[i].location = policy->preferred;
    }
    if (mm_warn_of_places(t->batch.transfers, t->batch.count) < 0
        || mm_targets_hold_roots(t) < 0) {
        mm_targets_release(t);
        return -1;
    }
    rc = mm_targets_enter(t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = apply_to_entered(t, policy, before, &st);
        mm_targets_leave(t);
        Py_END_ALLOW_THREADS
    }
    if (rc < 0) {
        mm_targets_release(t);
        (void)mm_raise(state, &st);
    }
    return rc;
}

PyDoc_STRVAR(applied_enter_doc,
             "__enter__($self, /)\n--\n\nApply the policy and return the object.");

static PyObject *
applied_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    applied_object *a = applied_of(op);
    int rc;

    if (!exchange_stage(a, IDLE, BUSY)) {
        return PyErr_Format(
            PyExc_RuntimeError,
            "this object has applied its policy already: restore() or leave its with "
            "block first, or call applied() for a new object");
    }
    rc = mm_policy_apply_to(mm_type_state(Py_TYPE(op)), &((mm_policy_object *)a->policy)->policy,
                            a->targets ? a->targets : Py_None, a->skips, &a->held, &a->before);
    if (rc == 0) {
        atomic_store(&a->skipped, a->held.skipped);
    }
    atomic_store(&a->stage, rc < 0 ? IDLE : IN_FORCE);
    return rc < 0 ? NULL : Py_NewRef(op);
}

/* Restores the earlier advice of the remaining targets, which must be entered. */
static int
restore_entered(applied_object *a, mm_status *st)
{
    mm_batch work;
    int rc = mm_batch_copy(&work, &a->held.batch, st);

    assert(atomic_load(&a->stage) == BUSY);
    if (rc == 0) {
        rc = mm_policy_restore(a->held.cu, &work, &a->before, st);
    }
    mm_batch_free(&work);
    return rc;
}

static int
restore_held(applied_object *a, mm_state *state)
{
    mm_status st;
    int rc;

    assert(!PyErr_Occurred());
    do {
        if (mm_targets_remove_freed(&a->held) < 0) {
            return -1;
        }
        rc = mm_targets_enter(&a->held, NULL, &st);
    } while (rc < 0); /* fails if another thread closed a buffer between the two calls */
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

PyDoc_STRVAR(
    applied_restore_doc,
    "restore($self, /)\n--\n\n"
    "Restore the earlier advice, as the end of the block does. Call it when that end failed.\n"
    "\n"
    "Raises RuntimeError if the policy is not applied, CUDAError if the driver refuses: then the policy\n"
    "is still applied, and restore() can be called again.");

static PyObject *
applied_restore(PyObject *op, PyObject *Py_UNUSED(none))
{
    applied_object *a = applied_of(op);
    mm_state *state = mm_type_state(Py_TYPE(op));

    if (!exchange_stage(a, IN_FORCE, BUSY)) {
        return PyErr_Format(PyExc_RuntimeError,
                            "the policy is not applied: there is nothing to restore");
    }
    /* mm_open: a forked child must not call its parent's driver. */
    if (mm_open(state) == NULL || restore_held(a, state) < 0) {
        atomic_store(&a->stage, IN_FORCE); /* restore() can be called again */
        return NULL;
    }
    mm_targets_release(&a->held);
    mm_page_runs_free(&a->before);
    atomic_store(&a->stage, IDLE);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(applied_exit_doc,
             "__exit__($self, /, *exception)\n--\n\nRestore the earlier advice.");

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
applied_get_skipped(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(atomic_load(&applied_of(op)->skipped));
}

static PyObject *
applied_repr(PyObject *op)
{
    bool in_force = atomic_load(&applied_of(op)->stage) == IN_FORCE;

    return PyUnicode_FromFormat("<AppliedPolicy of %R%s>", applied_of(op)->policy,
                                in_force ? ", in force" : "");
}

PyDoc_STRVAR(applied_reduce_doc,
             "__reduce__($self, /)\n--\n\nRaises TypeError: the object belongs to its targets.");

static PyObject *
applied_reduce(PyObject *Py_UNUSED(op), PyObject *Py_UNUSED(none))
{
    return PyErr_Format(
        PyExc_TypeError,
        "AppliedPolicy cannot be pickled: it belongs to its targets; pickle its policy");
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
    if (exchange_stage(a, IN_FORCE, IDLE)) {
        mm_page_runs_free(&a->before);
        mm_targets_release(&a->held);
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
    "A policy that is applied for a `with` block; the result of policy.applied(targets).\n"
    "\n"
    "Entering the block applies the policy as MigrationPolicy.apply() does. Leaving it, even by\n"
    "an exception, restores the advice that every page had before, even where the block changed\n"
    "it; only advice that differs is given. The earlier advice of system memory cannot be read,\n"
    "so all advice on it is unset. Memory that was closed or freed is left out; a closed view is\n"
    "restored as long as its buffer is open. Blocks can be nested, each with an object of its\n"
    "own. An object can be entered again after its block; entering it while the policy is applied\n"
    "raises RuntimeError.\n"
    "\n"
    "If the driver fails while restoring, the rest is tried, the error names the parts that are not\n"
    "restored, and restore() can be called again. The object keeps its targets alive. Safe from\n"
    "every thread.\n"
    "Driver: cuMemRangeGetAttributes, cuMemAdvise.");

static PyMethodDef applied_methods[] = {
    {"restore", applied_restore, METH_NOARGS, applied_restore_doc},
    {"__enter__", applied_enter, METH_NOARGS, applied_enter_doc},
    MM_POSITIONAL_METHOD("__exit__", applied_exit, applied_exit_doc),
    {"__reduce__", applied_reduce, METH_NOARGS, applied_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef applied_getset[] = {
    {"policy", applied_get_policy, NULL, "The MigrationPolicy that is applied.", NULL},
    {"skipped", applied_get_skipped, NULL,
     "The number of targets that unsupported=\"skip\" passed over when the block was last entered.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef applied_members[] = MM_WEAK_MEMBERS(applied_object);

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

int
mm_applied_policy_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem.typing.AppliedPolicy", sizeof(applied_object),
                             Py_TPFLAGS_DISALLOW_INSTANTIATION, applied_slots,
                             &state->applied_policy_type);
}
