/* plan_object.c: the type PrefetchPlan: pairs of memory and location, prepared for the driver. */
#include "plan_object.h"

#include <stdlib.h>
#include <string.h>

#include "../memory/unsupported.h"
#include "location_object.h"
#include "oversubscription.h"
#include "stream_object.h"
#include "targets.h"

PyDoc_STRVAR(plan_clear_doc, "clear($self, /)\n--\n\n"
                             "Remove all entries and release their targets.\n"
                             "\n"
                             "Executions under way in other threads finish with their entries.");

static PyObject *
plan_clear(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_plan_object *self = mm_plan_of(op);
    PyObject *kept;

    MM_LOCK(op);
    kept = self->kept;
    self->kept = NULL;
    self->count = 0;
    mm_plan_drop_prepared(self);
    MM_UNLOCK();
    /* Outside of the lock, because releasing targets can run Python code. */
    Py_XDECREF(kept);
    Py_RETURN_NONE;
}

/* --- executing -------------------------------------------------------------------------- */

/* The entries of a plan at one moment, with their targets kept alive. */
typedef struct {
    mm_plan *plan; /* prepared; NULL if no operation was named, and for an empty plan */
    PyObject *kept;
    mm_plan_entry *entries; /* a copy; or NULL */
    size_t count;
    mm_transfer
        *large; /* if the plan was prepared just now and may not fit on a device; or NULL */
    size_t large_count;
} plan_use;

static int
copy_entries(const mm_plan_object *self, mm_plan_entry **copy)
{
    assert(self->count <= self->capacity);
    *copy = malloc((self->count + 1) * sizeof **copy);
    if (*copy == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (self->count > 0) {
        memcpy(*copy, self->entries, self->count * sizeof **copy);
    }
    return 0;
}

/* Copies the transfers if they may not fit on a device, for the warning outside of the lock. */
static int
copy_large(const mm_plan_object *self, plan_use *use)
{
    size_t bytes = 0;

    for (size_t i = 0; i < self->count; i++) {
        bytes += self->entries[i].transfer.range.size;
    }
    if (!mm_may_not_fit(bytes)) {
        return 0;
    }
    use->large = malloc(self->count * sizeof *use->large);
    if (use->large == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < self->count; i++) {
        use->large[i] = self->entries[i].transfer;
    }
    use->large_count = self->count;
    return 0;
}

/* Stores a new reference to the plan, which is prepared if needed; NULL if there are no entries.
 * Under the lock. */
static int
prepare_plan(mm_plan_object *self, mm_state *state, mm_operation op, plan_use *use)
{
    mm_plan **plan = &use->plan,
            **slot = op == MM_PREFETCH ? &self->prefetch : &self->discard_prefetch;
    mm_status st;

    assert(op == MM_PREFETCH || op == MM_DISCARD_PREFETCH);
    *plan = NULL;
    if (self->count == 0) {
        return 0;
    }
    if (*slot == NULL && copy_large(self, use) < 0) {
        return -1;
    }
    if (*slot == NULL) {
        *slot = mm_plan_new(self->entries, self->count, op, &st);
        if (*slot == NULL) {
            return mm_raise_failure(state, -1, &st);
        }
    }
    mm_plan_retain(*slot);
    *plan = *slot;
    return 0;
}

static void
plan_use_release(plan_use *use)
{
    if (use->plan != NULL) {
        mm_plan_release(use->plan);
    }
    free(use->entries);
    free(use->large);
    Py_XDECREF(use->kept);
}

/* Prepares for *op unless op is NULL. */
static int
plan_use_acquire(mm_plan_object *self, const mm_operation *op, bool copy, plan_use *use)
{
    mm_state *state = mm_type_state(Py_TYPE((PyObject *)self));
    int rc = 0;

    assert(!PyErr_Occurred());
    *use = (plan_use){.plan = NULL};
    MM_LOCK((PyObject *)self);
    if ((op != NULL && prepare_plan(self, state, *op, use) < 0)
        || (copy && copy_entries(self, &use->entries) < 0)) {
        rc = -1;
    }
    use->count = self->count;
    use->kept = Py_XNewRef(self->kept);
    MM_UNLOCK();
    if (rc < 0) {
        plan_use_release(use);
    }
    return rc;
}

/* The parameters of discard_prefetch; explain and execute have one more. */
enum { STREAM, DISPATCH, DEFER, DISCARD, EXPLAIN_ARGC };
enum { UNSUPPORTED = DISCARD, DISCARD_ARGC = DISCARD, EXECUTE_ARGC = EXPLAIN_ARGC };

static int
plan_enter_stream(mm_state *state, PyObject *const *argv, mm_stream_use *stream,
                  mm_dispatch_options *options)
{
    MM_ASSERT_LEFT(); /* reading runs Python code */
    if (mm_read_dispatch_options(state, argv[STREAM], argv[DISPATCH], argv[DEFER], stream, options)
        < 0) {
        return -1;
    }
    return mm_stream_enter(stream) ? 0 : mm_stream_raise_closed();
}

/* If the warning became an error, drops the prepared plans: the next execution warns again. */
static int
warn_of_large(mm_plan_object *self, const plan_use *use)
{
    if (use->large == NULL || mm_warn_of_places(use->large, use->large_count) == 0) {
        return 0;
    }
    MM_LOCK((PyObject *)self);
    mm_plan_drop_prepared(self);
    MM_UNLOCK();
    return -1;
}

/* Runs a prepared plan. Only an execution that may pass over entries copies the entries. */
static PyObject *
plan_run(mm_plan_object *self, mm_operation op, bool skips, PyObject *const argv[DISCARD_ARGC])
{
    mm_state *state = mm_type_state(Py_TYPE((PyObject *)self));
    mm_driver *cu = mm_open(state);
    mm_dispatch_options options;
    mm_stream_use stream;
    size_t skipped = 0;
    plan_use use;
    mm_status st;
    int rc;

    if (cu == NULL || plan_use_acquire(self, &op, skips && mm_may_skip_prefetches(cu), &use) < 0) {
        return NULL;
    }
    if (warn_of_large(self, &use) < 0 || plan_enter_stream(state, argv, &stream, &options) < 0) {
        plan_use_release(&use);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = use.plan == NULL      ? 0
         : use.entries == NULL ? mm_plan_execute(cu, use.plan, &options, &st)
                               : mm_plan_execute_or_skip(cu, use.plan, use.entries, use.count,
                                                         &options, &skipped, &st);
    mm_stream_leave(&stream);
    Py_END_ALLOW_THREADS
    plan_use_release(&use);
    return rc == 0 && skips ? PyLong_FromSize_t(skipped) : mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(
    plan_execute_doc,
    "execute($self, /, *, stream=None, dispatch='auto', defer=None, unsupported='raise')\n--\n\n"
    "Prefetch every entry to its location, in stream order.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "stream : Stream, object with __cuda_stream__, int, or None\n"
    "    The stream to work in; None is the default stream.\n"
    "dispatch, defer\n"
    "    As for prefetch().\n"
    "unsupported : \"raise\" or \"skip\"\n"
    "    \"skip\" passes over the entries that cannot be prefetched here, as prefetch() does.\n"
    "\n"
    "Returns None; with unsupported=\"skip\" the number of entries that were passed over.\n"
    "\n"
    "An empty plan does nothing. Raises RuntimeError for a closed buffer and ValueError for freed\n"
    "memory of another library, before anything moves; the message has the number of the entry.\n"
    "Other errors are those of prefetch(). Safe from every thread; releases the GIL. Driver:\n"
    "cuMemPrefetchAsync, cuMemPrefetchBatchAsync.");

static PyObject *
plan_execute(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = plan_execute_doc};
    PyObject *argv[EXECUTE_ARGC];
    bool skips;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_unsupported(argv[UNSUPPORTED], &skips) < 0) {
        return NULL;
    }
    return plan_run(mm_plan_of(op), MM_PREFETCH, skips, argv);
}

PyDoc_STRVAR(
    plan_discard_prefetch_doc,
    "discard_prefetch($self, /, *, stream=None, dispatch='auto', defer=None)\n--\n\n"
    "Discard the contents of every entry and populate its pages at its location, in stream order.\n"
    "\n"
    "It is otherwise like execute(). The function discard_prefetch() describes which contents are\n"
    "lost. Raises ValueError for entries without a whole page or with gaps. Driver:\n"
    "cuMemDiscardAndPrefetchBatchAsync.");

static PyObject *
plan_discard_prefetch(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = plan_discard_prefetch_doc};
    PyObject *argv[DISCARD_ARGC];

    return mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
               ? NULL
               : plan_run(mm_plan_of(op), MM_DISCARD_PREFETCH, false, argv);
}

static PyObject *
describe_execution(mm_driver *cu, mm_state *state, const plan_use *use, PyObject *const *argv)
{
    mm_dispatch_options options;
    mm_plan_preview preview;
    mm_stream_use stream;
    PyObject *text;
    mm_status st;
    int rc;

    if (plan_enter_stream(state, argv, &stream, &options) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = use->plan != NULL ? mm_plan_make_preview(cu, use->plan, &options, &preview, &st) : 0;
    mm_stream_leave(&stream);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return mm_raise(state, &st);
    }
    if (use->plan == NULL) {
        return PyUnicode_FromString("0 driver calls: the plan is empty");
    }
    text = mm_plan_explanation(&preview, &options, use->entries, use->count);
    mm_plan_preview_free(&preview);
    return text;
}

PyDoc_STRVAR(
    plan_explain_doc,
    "explain($self, /, *, stream=None, dispatch='auto', defer=None, discard=False)\n--\n\n"
    "Describe the driver calls of execute() with these arguments, and their reasons.\n"
    "\n"
    "discard=True describes discard_prefetch(). Returns a str: a heading, a line for each kind of call\n"
    "with the number of calls, and remarks. It moves nothing, and raises the errors of the\n"
    "execution. The text is true until memory is moved. Driver: cuMemRangeGetAttribute for ranges\n"
    "that may share a call.");

static PyObject *
plan_explain(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = plan_explain_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *argv[EXPLAIN_ARGC], *text;
    mm_operation operation;
    mm_driver *cu;
    plan_use use;
    int discard;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || (discard = argv[DISCARD] ? PyObject_IsTrue(argv[DISCARD]) : 0) < 0
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    operation = discard ? MM_DISCARD_PREFETCH : MM_PREFETCH;
    if (plan_use_acquire(mm_plan_of(op), &operation, true, &use) < 0) {
        return NULL;
    }
    text = describe_execution(cu, state, &use, argv);
    plan_use_release(&use);
    return text;
}

/* --- reading entries -------------------------------------------------------------------- */

/* `kept` is the entry's tuple in the plan, or NULL with an exception. Each field is made only if
 * the fields before it were, because CPython must not be called with an exception set. */
static PyObject *
plan_entry_record(mm_state *state, const mm_plan_entry *entry, PyObject *kept)
{
    enum { POINTER, NBYTES, LOCATION, TARGET, FIELDS };
    PyObject *fields[FIELDS] = {NULL};

    if (kept != NULL && (fields[TARGET] = PySequence_GetItem(kept, 0)) != NULL
        && (fields[POINTER] = PyLong_FromUnsignedLongLong(entry->transfer.range.start)) != NULL
        && (fields[NBYTES] = PyLong_FromSize_t(entry->transfer.range.size)) != NULL) {
        fields[LOCATION] = mm_location_object_new(state, entry->transfer.location);
    }
    return mm_record_new(state->plan_entry_type, fields, FIELDS);
}

static PyObject *
plan_iter(PyObject *op)
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *records, *iterator = NULL;
    plan_use use;

    if (plan_use_acquire(mm_plan_of(op), NULL, true, &use) < 0) {
        return NULL;
    }
    records = PyTuple_New((Py_ssize_t)use.count);
    for (size_t i = 0; records != NULL && i < use.count; i++) {
        /* The list never shrinks, so the item exists. */
        PyObject *kept = PySequence_GetItem(use.kept, (Py_ssize_t)i);
        PyObject *record = plan_entry_record(state, &use.entries[i], kept);
        Py_XDECREF(kept);
        if (mm_set_item(records, (Py_ssize_t)i, record) < 0) {
            Py_CLEAR(records);
        }
    }
    plan_use_release(&use);
    if (records != NULL) {
        iterator = PyObject_GetIter(records);
        Py_DECREF(records);
    }
    return iterator;
}

/* The entry at an index; with from_end, negative indices count from the end. */
static PyObject *
plan_entry_at(PyObject *op, Py_ssize_t index, bool from_end)
{
    mm_plan_object *self = mm_plan_of(op);
    PyObject *kept = NULL, *record;
    Py_ssize_t count, position;
    mm_plan_entry entry;
    bool found;

    MM_LOCK(op);
    count = (Py_ssize_t)self->count;
    position = index + (from_end && index < 0 ? count : 0);
    found = position >= 0 && position < count;
    assert(count == 0 || PyList_Size(self->kept) >= count);
    if (found) {
        entry = self->entries[position];
        kept = PySequence_GetItem(self->kept, position);
    }
    MM_UNLOCK();
    if (!found) {
        return PyErr_Format(PyExc_IndexError,
                            "index %zd is outside the plan, which has length %zd", index, count);
    }
    record = plan_entry_record(mm_type_state(Py_TYPE(op)), &entry, kept);
    Py_XDECREF(kept);
    return record;
}

static PyObject *
plan_item(PyObject *op, Py_ssize_t index)
{
    return plan_entry_at(op, index, false);
}

/* A new plan with `count` entries: those at start, start + step, ... */
static PyObject *
plan_of_entries(PyTypeObject *type, const plan_use *use, Py_ssize_t start, Py_ssize_t step,
                Py_ssize_t count)
{
    PyObject *kept = count > 0 ? PyList_New(count) : NULL, *self;
    mm_plan_entry *entries = count > 0 ? malloc((size_t)count * sizeof *entries) : NULL;

    if (count > 0 && kept != NULL && entries == NULL) {
        PyErr_NoMemory();
    }
    self = count == 0 || (kept && entries) ? mm_alloc_object(type) : NULL;
    if (self == NULL) {
        free(entries);
        Py_XDECREF(kept);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t from = start + i * step;

        /* The list never shrinks, so the item exists. */
        (void)PyList_SetItem(kept, i, PySequence_GetItem(use->kept, from));
        entries[i] = use->entries[from];
    }
    mm_plan_of(self)->kept = kept;
    mm_plan_of(self)->entries = entries;
    mm_plan_of(self)->count = mm_plan_of(self)->capacity = (size_t)count;
    return self;
}

static PyObject *
plan_slice(PyObject *op, PyObject *slice)
{
    Py_ssize_t start = 0, stop = PY_SSIZE_T_MAX, step = 1, count;
    PyObject *part;
    plan_use use;

    if ((slice != NULL && PySlice_Unpack(slice, &start, &stop, &step) < 0)
        || plan_use_acquire(mm_plan_of(op), NULL, true, &use) < 0) {
        return NULL;
    }
    count = PySlice_AdjustIndices((Py_ssize_t)use.count, &start, &stop, step);
    part = plan_of_entries(Py_TYPE(op), &use, start, step, count);
    plan_use_release(&use);
    return part;
}

static PyObject *
plan_subscript(PyObject *op, PyObject *key)
{
    Py_ssize_t index;

    if (PySlice_Check(key)) {
        return plan_slice(op, key);
    }
    if (!PyIndex_Check(key)) {
        return PyErr_Format(PyExc_TypeError,
                            "a PrefetchPlan is indexed by an int or a slice, got %R", key);
    }
    index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    return index == -1 && PyErr_Occurred() ? NULL : plan_entry_at(op, index, true);
}

PyDoc_STRVAR(plan_deepcopy_doc,
             "__deepcopy__($self, memo, /)\n--\n\nThe same as __copy__(): a plan owns no memory.");

PyDoc_STRVAR(plan_copy_doc,
             "__copy__($self, /)\n--\n\nA new plan with the same entries, over the same targets.");

static PyObject *
plan_copy(PyObject *op, PyObject *Py_UNUSED(none))
{
    return plan_slice(op, NULL);
}

static void
plan_measure(mm_plan_object *self, size_t *count, size_t *bytes)
{
    MM_LOCK((PyObject *)self);
    *count = self->count;
    *bytes = 0;
    for (size_t i = 0; i < self->count; i++) {
        *bytes += self->entries[i].transfer.range.size;
    }
    MM_UNLOCK();
}

static Py_ssize_t
plan_length(PyObject *op)
{
    size_t count, bytes;

    plan_measure(mm_plan_of(op), &count, &bytes);
    return (Py_ssize_t)count;
}

static PyObject *
plan_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    size_t count, bytes;

    plan_measure(mm_plan_of(op), &count, &bytes);
    return PyLong_FromSize_t(bytes);
}

static PyObject *
plan_repr(PyObject *op)
{
    size_t count, bytes;

    plan_measure(mm_plan_of(op), &count, &bytes);
    return PyUnicode_FromFormat("<PrefetchPlan entries=%zu nbytes=%zu>", count, bytes);
}

/* --- the type --------------------------------------------------------------------------- */

static int
plan_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(mm_plan_of(op)->kept);
    return 0;
}

/* Leaves an empty plan, because other garbage may still use it. */
static int
plan_tp_clear(PyObject *op)
{
    mm_plan_object *self = mm_plan_of(op);

    self->count = 0;
    mm_plan_drop_prepared(self);
    Py_CLEAR(self->kept);
    return 0;
}

static void
plan_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    (void)plan_tp_clear(op);
    free(mm_plan_of(op)->entries);
    mm_free_object(op);
}

static PyMethodDef plan_methods[] = {
    MM_METHOD("add", mm_plan_add, mm_plan_add_doc),
    MM_METHOD("execute", plan_execute, plan_execute_doc),
    MM_METHOD("discard_prefetch", plan_discard_prefetch, plan_discard_prefetch_doc),
    MM_METHOD("explain", plan_explain, plan_explain_doc),
    MM_CLASS_METHOD("fit", mm_plan_fit_targets, mm_plan_fit_doc),
    MM_CLASS_METHOD("from_module", mm_plan_from_module, mm_plan_from_module_doc),
    MM_CLASS_METHOD("from_policy", mm_plan_from_policy, mm_plan_from_policy_doc),
    {"clear", plan_clear, METH_NOARGS, plan_clear_doc},
    {"__copy__", plan_copy, METH_NOARGS, plan_copy_doc},
    {"__deepcopy__", plan_copy, METH_O, plan_deepcopy_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_getset[] = {
    {"nbytes", plan_get_nbytes, NULL, "The bytes of all entries together.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef plan_members[] = MM_WEAK_MEMBERS(mm_plan_object);

/* clang-format off */
static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)mm_plan_doc},
    {Py_tp_new, mm_plan_tp_new},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_clear, plan_tp_clear},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_repr, plan_repr},
    {Py_tp_iter, plan_iter},
    {Py_sq_length, plan_length},
    {Py_sq_item, plan_item},
    {Py_mp_subscript, plan_subscript},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_getset},
    {Py_tp_members, plan_members},
    {0, NULL},
};
/* clang-format on */

static PyStructSequence_Field plan_entry_fields[] = {
    {"pointer", "address of the first byte"},
    {"nbytes", "size in bytes"},
    {"location", "destination"},
    {"target", "the object that was added; an attribute only"},
    {NULL, NULL},
};

static PyStructSequence_Desc plan_entry_desc = {
    "managedmem.typing.PlanEntry", "One entry of a PrefetchPlan: pointer, nbytes and location.",
    plan_entry_fields, 3};

int
mm_plan_init(PyObject *module, mm_state *state)
{
    state->plan_entry_type = PyStructSequence_NewType(&plan_entry_desc);
    if (state->plan_entry_type == NULL || PyModule_AddType(module, state->plan_entry_type) < 0) {
        return -1;
    }
    return mm_add_final_type(module, "managedmem.PrefetchPlan", sizeof(mm_plan_object), 0,
                             plan_slots, &state->plan_type);
}
