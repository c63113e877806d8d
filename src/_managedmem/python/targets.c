/* targets.c: reading one or several targets, ManagedBuffers and objects of other libraries, entering
 * their guards, and a prefetch or discard of them. All arguments are read and checked before the
 * first call that changes anything. */
#include "targets.h"

#include <stdlib.h>

#include "../memory/unsupported.h"

#include "foreign_location.h"
#include "foreign_memory.h"
#include "oversubscription.h"
#include "stream_object.h"

void
mm_name_item(const char *list, Py_ssize_t i)
{
    mm_exception raised;

    assert(PyErr_Occurred());
    mm_exception_save(&raised);
    if (raised.type == PyExc_ValueError || raised.type == PyExc_TypeError
        || raised.type == PyExc_RuntimeError) {
        PyObject *value = raised.value ? raised.value : Py_None;
        if (i < 0) {
            PyErr_Format(raised.type, "%s: %S", list, value);
        } else {
            PyErr_Format(raised.type, "%s[%zd]: %S", list, i, value);
        }
        mm_exception_drop(&raised);
    } else {
        mm_exception_restore(&raised);
    }
}

/* Keeps the export of a target, and takes ownership of it. */
static int
keep_export(mm_targets *t, PyObject *export)
{
    int rc = -1;

    if (t->exports == NULL) {
        t->exports = PyList_New(0);
    }
    if (t->exports != NULL) {
        rc = PyList_Append(t->exports, export);
    }
    Py_DECREF(export);
    return rc;
}

static int
refuse_read_only(PyObject *value)
{
    return mm_refuse_foreign(PyExc_ValueError, value, "cannot be discarded: it is read-only");
}

/* -1 with an exception if a discard would lose contents that must stay. */
static int
check_target_discard(PyObject *value, const mm_target *target)
{
    if (target->range.size > 0 && target->read_only) {
        return refuse_read_only(value);
    }
    if (target->objects) {
        return mm_refuse_foreign(PyExc_ValueError, value, MM_PYTHON_OBJECTS);
    }
    return target->dense ? 0
                         : mm_refuse_foreign(PyExc_ValueError, value,
                                             "cannot be discarded: it is not contiguous, and the "
                                             "bytes in its gaps would be lost");
}

/* 0; 1 with the status if the memory does not allow the operation; -1 with an exception. */
static int
read_one(mm_state *state, mm_driver *cu, PyObject *value, mm_operation op, mm_target *target,
         mm_status *st)
{
    int rc;

    assert(!PyErr_Occurred());
    st->kind = MM_OK;
    *target = (mm_target){.dense = true};
    if (mm_is_buffer(state, value)) {
        mm_buffer *b = mm_buffer_of(value);
        target->read_only = b->memory->access.read_only;
        rc = mm_buffer_check(b, cu, op, &target->range, st);
        return rc == 0 && mm_discards(op) ? check_target_discard(value, target) : rc;
    }
    if (mm_read_foreign(state, value, mm_discards(op), target) < 0) {
        return -1;
    }
    rc = mm_discards(op) ? check_target_discard(value, target) : 0;
    if (rc == 0 && mm_range_check(cu, &target->range, op, st) < 0) {
        rc = 1;
    }
    if (rc != 0) {
        Py_CLEAR(target->export);
    }
    return rc;
}

int
mm_target_read(mm_state *state, mm_driver *cu, PyObject *value, mm_operation op, mm_target *target)
{
    mm_status st;
    int rc = read_one(state, cu, value, op, target, &st);

    if (rc > 0) {
        (void)mm_raise(state, &st);
    }
    return rc == 0 ? 0 : -1;
}

/* Adds the stream of a producer, unless it is in the list. */
static int
keep_producer(mm_targets *t, mm_device_stream producer)
{
    mm_device_stream *more;

    for (size_t i = 0; i < t->producer_count; i++) {
        if (t->producers[i].handle == producer.handle
            && t->producers[i].device == producer.device) {
            return 0;
        }
    }
    more = realloc(t->producers, (t->producer_count + 1) * sizeof *more);
    if (more == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    t->producers = more;
    t->producers[t->producer_count++] = producer;
    return 0;
}

int
mm_targets_follow(const mm_targets *t, mm_device_stream stream, mm_status *st)
{
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < t->producer_count; i++) {
        rc = mm_stream_follow(t->cu, stream, t->producers[i], st);
    }
    return rc;
}

/* Passes over a target whose memory does not allow the operation, or raises the reason. A discard
 * that would lose contents stays an error on every system. */
MM_COLD static int
skip_target(mm_targets *t, PyObject *value, mm_operation op, mm_target *target,
            const mm_status *st)
{
    if (!t->skips || st->kind != MM_NOT_MANAGED) {
        return mm_raise_failure(t->state, -1, st);
    }
    if (mm_discards(op) && target->read_only) {
        return refuse_read_only(value);
    }
    target->range.size = 0;
    t->skipped++;
    return 0;
}

/* True if the range will be discarded. False if it is empty, as that of a skipped target is, or if
 * it will be passed over because it has no whole page. */
static bool
is_discarded(const mm_targets *t, mm_operation op, mm_range range)
{
    mm_status ignored;

    return mm_discards(op) && range.size > 0
           && (!t->skips || mm_range_whole_pages(&range, &ignored) == 0);
}

/* Stores a target that was read, and takes over its export. If `follows`, keeps its producer, which
 * is a stream of `device`. */
static int
store_target(mm_targets *t, const mm_target *target, bool follows, int device,
             mm_transfer *transfer)
{
    if ((target->export != NULL && keep_export(t, target->export) < 0)
        || (follows && target->producer != NULL
            && keep_producer(t, (mm_device_stream){target->producer, device}) < 0)) {
        return -1;
    }
    *transfer = (mm_transfer){target->range, mm_host()};
    return 0;
}

static int
read_target(mm_targets *t, PyObject *value, mm_operation op, mm_transfer *transfer)
{
    mm_target target;
    mm_status st;
    int rc = read_one(t->state, t->cu, value, op, &target, &st);

    if (rc > 0) {
        rc = skip_target(t, value, op, &target, &st);
    }
    return rc < 0 ? -1
                  : store_target(t, &target, is_discarded(t, op, target.range), MM_ANY_DEVICE,
                                 transfer);
}

/* 1 for one target, 0 for a collection of them, -1 with an exception. */
static int
is_single_target(mm_state *state, PyObject *value)
{
    int array;

    if (mm_is_buffer(state, value)) {
        return 1;
    }
    if (PyList_Check(value) || PyTuple_Check(value)) {
        return 0;
    }
    array = mm_is_array(state, value);
    if (array != 0) {
        return array;
    }
    return PyUnicode_Check(value) || PyObject_CheckBuffer(value)
           || mm_is_from(state, value, "cuda")
           || !(PyType_GetSlot(Py_TYPE(value), Py_tp_iter) || PySequence_Check(value));
}

PyObject *
mm_targets_tuple(mm_state *state, PyObject *value, bool *is_collection)
{
    int single = is_single_target(state, value);

    *is_collection = !single;
    if (single < 0) {
        return NULL;
    }
    return single ? PyTuple_Pack(1, value) : PySequence_Tuple(value);
}

static int
targets_allocate(mm_targets *t, size_t count, mm_status *st)
{
    if (mm_batch_init(&t->batch, count, st) < 0) {
        return -1;
    }
    if (count > MM_INLINE_COUNT) {
        t->guards = malloc((count + 1) * sizeof(mm_guard *));
        if (t->guards == NULL) {
            return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
        }
    }
    return 0;
}

int
mm_targets_read(mm_state *state, PyObject *value, mm_operation op, mm_targets *t)
{
    return mm_targets_read_or_skip(state, value, op, false, t);
}

/* Makes space for the targets, which are still to be read. */
static int
targets_begin(mm_state *state, PyObject *value, const char *name, bool skips, mm_targets *t)
{
    mm_status st;

    MM_ASSERT_LEFT(); /* reading runs Python code */
    /* Field by field, because the arrays are most of the struct and need no zeros. */
    t->state = state;
    t->name = name;
    t->exports = NULL;
    t->guards = t->inline_guards;
    t->entered = 0;
    t->skips = skips;
    t->skipped = 0;
    t->producers = NULL;
    t->producer_count = 0;
    if ((t->cu = mm_open(state)) == NULL
        || (t->items = mm_targets_tuple(state, value, &t->is_collection)) == NULL) {
        return -1;
    }
    if (targets_allocate(t, (size_t)PyTuple_Size(t->items), &st) < 0) {
        mm_targets_release(t);
        return mm_raise_failure(state, -1, &st);
    }
    return 0;
}

/* Releases the targets after target i could not be read; returns -1. */
static int
targets_fail(mm_targets *t, Py_ssize_t i)
{
    if (t->is_collection) {
        mm_name_item(t->name, i);
    }
    mm_targets_release(t);
    return -1;
}

int
mm_targets_read_or_skip(mm_state *state, PyObject *value, mm_operation op, bool skips,
                        mm_targets *t)
{
    if (targets_begin(state, value, "targets", skips, t) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(t->items); i++) {
        if (read_target(t, PyTuple_GetItem(t->items, i), op, &t->batch.transfers[i]) < 0) {
            return targets_fail(t, i);
        }
    }
    return 0;
}

int
mm_targets_read_by(mm_state *state, PyObject *value, const char *name, mm_target_reader *reader,
                   void *context, mm_targets *t)
{
    if (targets_begin(state, value, name, false, t) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(t->items); i++) {
        mm_target target;
        int device = MM_ANY_DEVICE;
        if (reader(t, PyTuple_GetItem(t->items, i), context, &target, &device) < 0
            || store_target(t, &target, true, device, &t->batch.transfers[i]) < 0) {
            return targets_fail(t, i);
        }
    }
    return 0;
}

/* True for locations in an order: a list, tuple, generator or other iterable that is not a set.
 * Locations themselves cannot be iterated over. */
static bool
is_location_list(mm_state *state, PyObject *value)
{
    if (value == NULL || PyList_Check(value) || PyTuple_Check(value)) {
        return value != NULL;
    }
    return PyType_GetSlot(Py_TYPE(value), Py_tp_iter) != NULL && !PyAnySet_Check(value)
           && !PyUnicode_Check(value) && !PyDict_Check(value) && !PyWeakref_CheckProxy(value)
           && Py_TYPE(value) != state->accessed_by_type && Py_TYPE(value) != state->peers_type;
}

/* Explains the TypeError better if one target got a list of locations, or several got a set. */
static void
explain_location_list(const mm_targets *t, PyObject *value)
{
    if (t->is_collection && value != NULL && PyAnySet_Check(value)) {
        PyErr_Clear(); /* TypeError: its message is about a single location */
        PyErr_Format(PyExc_TypeError,
                     "location is a set, which has no order: pass one location, or a list or "
                     "tuple with one for each target, got %R",
                     value);
    } else if (!t->is_collection && is_location_list(t->state, value)) {
        PyErr_Clear(); /* TypeError: its message is about a single location */
        PyErr_Format(
            PyExc_TypeError,
            "location is a sequence, but %s is a single target: pass one Device or Host, got %R",
            t->name, value);
    }
}

/* Takes at most one location more than there are targets from a generator, which may have no end. */
static PyObject *
tuple_of_locations(PyObject *value, size_t most)
{
    PyObject *first, *tuple;

    if (PyList_Check(value) || PyTuple_Check(value)) {
        return PySequence_Tuple(value);
    }
    first = mm_call_python("itertools", "islice", "(On)", value, (Py_ssize_t)most + 1);
    tuple = first ? PySequence_Tuple(first) : NULL;
    Py_XDECREF(first);
    return tuple;
}

static int
refuse_location_count(const mm_targets *t, PyObject *locations, PyObject *value)
{
    bool cut = (size_t)PyTuple_Size(locations) > t->batch.count && !PyList_Check(value)
               && !PyTuple_Check(value);

    return MM_ERROR(
        PyExc_ValueError,
        "location has length %zd%s, but there are %zu targets: pass one location for all, "
        "or one for each",
        PyTuple_Size(locations), cut ? " or more" : "", t->batch.count);
}

int
mm_targets_read_locations(mm_targets *t, PyObject *value)
{
    bool one_each = t->is_collection && is_location_list(t->state, value);
    PyObject *locations = one_each ? tuple_of_locations(value, t->batch.count) : NULL;
    CUmemLocation location = mm_host();
    int rc = 0;

    assert((size_t)PyTuple_Size(t->items) == t->batch.count);
    if (one_each && locations == NULL) {
        return -1;
    }
    if (!one_each) {
        rc = mm_read_location(t->state, value, &location);
        if (rc < 0) {
            explain_location_list(t, value);
        }
    } else if ((size_t)PyTuple_Size(locations) != t->batch.count) {
        rc = refuse_location_count(t, locations, value);
    }
    for (size_t i = 0; rc == 0 && i < t->batch.count; i++) {
        if (one_each) {
            rc = mm_read_location(t->state, PyTuple_GetItem(locations, (Py_ssize_t)i), &location);
            if (rc < 0) {
                mm_name_item("location", (Py_ssize_t)i);
            }
        }
        t->batch.transfers[i].location = location;
    }
    Py_XDECREF(locations);
    return rc;
}

int
mm_read_dispatch_options(mm_state *state, PyObject *stream, PyObject *dispatch, PyObject *defer,
                         mm_stream_use *use, mm_dispatch_options *options)
{
    if (mm_read_dispatch(dispatch, &options->dispatch) < 0
        || mm_read_defer(state, defer, &options->defer) < 0
        || mm_stream_read(state, stream, use) < 0) {
        return -1;
    }
    options->stream = use->handle;
    return 0;
}

/* The guard to enter for a target. NULL if the target is not a ManagedBuffer, or if its memory is
 * *last, the memory of the target before it, which is entered already. */
static mm_guard *
target_guard(const mm_targets *t, Py_ssize_t i, mm_memory **last)
{
    PyObject *item = PyTuple_GetItem(t->items, i);
    mm_memory *memory = mm_is_buffer(t->state, item) ? mm_buffer_of(item)->memory : NULL;
    bool same = memory == *last;

    *last = memory;
    return memory == NULL || same ? NULL : &memory->guard;
}

static bool
targets_enter_guard(mm_targets *t, mm_guard *guard)
{
    if (guard != NULL) {
        assert(t->entered <= t->batch.count);
        if (!mm_guard_enter(guard)) { /* raced */
            mm_targets_leave(t);
            return false;
        }
        t->guards[t->entered++] = guard;
    }
    return true;
}

int
mm_targets_enter(mm_targets *t, const mm_stream_use *stream, mm_status *st)
{
    Py_ssize_t count = PyTuple_Size(t->items);
    mm_memory *last = NULL;

    assert(t->entered == 0); /* else the entered guards would be lost */
    assert(PyTuple_Size(t->items) == (Py_ssize_t)t->batch.count);
    if (stream != NULL && !targets_enter_guard(t, stream->guard)) { /* raced */
        return mm_fail(st, MM_REFUSED, "Stream is closed");
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!targets_enter_guard(t, target_guard(t, i, &last))) { /* raced */
            return t->is_collection
                       ? mm_fail(st, MM_REFUSED, "%s[%zd]: ManagedBuffer is closed", t->name, i)
                       : mm_fail(st, MM_REFUSED, "ManagedBuffer is closed");
        }
    }
    return 0;
}

void
mm_targets_leave(mm_targets *t)
{
    for (size_t i = 0; i < t->entered; i++) {
        assert(t->guards[i] != NULL);
        mm_guard_leave(t->guards[i]);
    }
    t->entered = 0;
}

void
mm_targets_release(mm_targets *t)
{
    assert(t->entered == 0);
    if (t->guards != t->inline_guards) {
        free(t->guards);
        t->guards = t->inline_guards;
    }
    mm_batch_free(&t->batch);
    if (t->producers != NULL) {
        free(t->producers);
        t->producers = NULL;
        t->producer_count = 0;
    }
    Py_CLEAR(t->items);
    Py_CLEAR(t->exports);
}

int
mm_targets_hold_roots(mm_targets *t)
{
    Py_ssize_t count = PyTuple_Size(t->items);
    PyObject *roots = PyTuple_New(count), *views = t->items;

    assert(t->entered == 0);
    if (roots == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(views, i);
        PyObject *root =
            mm_is_buffer(t->state, item) ? mm_buffer_find_root(mm_buffer_of(item)) : NULL;
        PyTuple_SetItem(roots, i, root ? root : Py_NewRef(item));
    }
    t->items = roots;
    Py_DECREF(views); /* last, because it can run Python code */
    return 0;
}

/* 1 if a target's memory is still the allocation that was read, 0 if not, -1 with an exception. */
static int
is_target_present(const mm_targets *t, Py_ssize_t i)
{
    PyObject *item = PyTuple_GetItem(t->items, i);
    mm_range range = t->batch.transfers[i].range;
    mm_pointer_attributes attributes;
    mm_status st;

    if (range.size == 0
        || (mm_is_buffer(t->state, item) && mm_buffer_is_closed(mm_buffer_of(item)))) {
        return 0;
    }
    if (range.allocation == 0) {
        int rc = mm_pointer_query(t->cu, range.start, &attributes, &st);
        return rc == 0 ? !attributes.managed && attributes.type == 0
                       : mm_raise_failure(t->state, rc, &st);
    }
    if (mm_range_check(t->cu, &range, MM_QUERY, &st) == 0) {
        return range.allocation == t->batch.transfers[i].range.allocation;
    }
    if (mm_is_bad_argument(&st)) {
        return 0;
    }
    return mm_raise_failure(t->state, -1, &st);
}

int
mm_targets_remove_freed(mm_targets *t)
{
    Py_ssize_t count = PyTuple_Size(t->items), left = 0;
    PyObject *kept, *replaced;

    assert(t->entered == 0);
    assert((size_t)count == t->batch.count);
    for (Py_ssize_t i = 0; i < count; i++) {
        int present = is_target_present(t, i);
        if (present < 0) {
            return -1;
        }
        t->batch.transfers[i].range.size *= (size_t)present; /* 0 marks a freed target */
        left += present;
    }
    kept = PyTuple_New(left);
    if (kept == NULL) {
        return -1;
    }
    left = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (t->batch.transfers[i].range.size > 0) {
            t->batch.transfers[left] = t->batch.transfers[i];
            PyTuple_SetItem(kept, left++, Py_NewRef(PyTuple_GetItem(t->items, i)));
        }
    }
    t->batch.count = (size_t)left;
    replaced = t->items;
    t->items = kept;
    Py_DECREF(replaced); /* last, because it can run Python code */
    return 0;
}

/* --- one prefetch or discard of targets ------------------------------------------------------- */

PyObject *
mm_targets_result(mm_targets *t, int rc, const mm_status *st)
{
    mm_state *state = t->state;
    size_t skipped = t->skipped;
    bool counts = t->skips;

    mm_targets_release(t);
    if (rc < 0) {
        return mm_raise(state, st);
    }
    return counts ? PyLong_FromSize_t(skipped) : Py_NewRef(Py_None);
}

PyObject *
mm_run_on_targets(mm_state *state, mm_operation op, PyObject *const argv[MM_CALL_ARGC])
{
    mm_dispatch_options options;
    mm_stream_use stream;
    bool skips;
    mm_targets t;
    mm_status st;
    int rc;

    assert(op == MM_PREFETCH || mm_discards(op));
    if (mm_read_unsupported(argv[MM_CALL_UNSUPPORTED], &skips) < 0
        || mm_targets_read_or_skip(state, argv[MM_CALL_TARGETS], op, skips, &t) < 0) {
        return NULL;
    }
    if ((op != MM_DISCARD && mm_targets_read_locations(&t, argv[MM_CALL_LOCATION]) < 0)
        || mm_read_dispatch_options(state, argv[MM_CALL_STREAM], argv[MM_CALL_DISPATCH],
                                    argv[MM_CALL_DEFER], &stream, &options)
               < 0) {
        mm_targets_release(&t);
        return NULL;
    }
    t.skipped += skips ? mm_skip_unsupported(t.cu, op, &t.batch, options.dispatch) : 0;
    if (op != MM_DISCARD && mm_warn_of_places(t.batch.transfers, t.batch.count) < 0) {
        mm_targets_release(&t);
        return NULL;
    }
    rc = mm_targets_enter(&t, &stream, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = t.producer_count > 0 && !(skips && mm_batch_is_empty(&t.batch))
                 ? mm_targets_follow(&t, (mm_device_stream){options.stream, MM_ANY_DEVICE}, &st)
                 : 0;
        if (rc == 0) {
            rc = skips ? mm_batch_run_or_skip(t.cu, op, &t.batch, &options, &t.skipped, &st)
                       : mm_batch_run(t.cu, op, &t.batch, &options, &st);
        }
        mm_targets_leave(&t);
        Py_END_ALLOW_THREADS
    }
    return mm_targets_result(&t, rc, &st);
}
