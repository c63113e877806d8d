/* recorder_object.c: the type Recorder, one recording of this process, for managedmem/_trace.py:
 * its life, and its results as tuples and bytes. */
#include "../trace/recorder.h"

#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "interpreter.h"

/* ROW in managedmem/_trace_results.py has this layout. */
_Static_assert(sizeof(mm_sums_row) == 2 * sizeof(uint32_t) + 33 * sizeof(uint64_t), "no padding");

typedef struct {
    PyObject_HEAD
    mm_recording_options options;
    atomic_bool started; /* a start has begun, and has not failed */
    _Atomic(mm_recording *)
        recording; /* NULL before the start; then kept until the object is freed */
    /* The results of the last attribution. */
    PyObject *pieces; /* bytes; NULL before the first attribution */
    mm_recorded_part *parts;
    size_t part_count;
    uint64_t ambiguous;
} recorder_object;

static recorder_object *
recorder_of(PyObject *op)
{
    return (recorder_object *)op;
}

/* --- life --------------------------------------------------------------------------------- */

static int
read_limit(PyObject *value, size_t *out)
{
    long long limit = 1000000;

    if (value != NULL && mm_read_index(value, "limit", PyExc_TypeError, &limit) < 0) {
        return -1;
    }
    if (limit < MM_LEAST_LIMIT || limit > MM_MOST_LIMIT) {
        return MM_ERROR(PyExc_ValueError, "limit must be from %d to %d, got %lld", MM_LEAST_LIMIT,
                        MM_MOST_LIMIT, limit);
    }
    *out = (size_t)limit;
    return 0;
}

PyDoc_STRVAR(
    recorder_doc,
    "Recorder(*, limit=1000000, faults=True, sync=True)\n--\n\n"
    "One recording of the events of managed memory in this process, made by trace().\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "limit : int\n"
    "    Events to keep, between 1,000 and 10**9; events beyond the limit are in the sums only.\n"
    "faults : bool\n"
    "    Record page faults too.\n"
    "sync : bool\n"
    "    Wait for the current context, and for every device that this library has worked on, at the\n"
    "    start, at marks and at the end.\n"
    "\n"
    "It can be started once. If it is dropped while it runs, or the interpreter exits, it stops\n"
    "without results. A forked child does not have it: there, running is False and stop() does\n"
    "nothing. Raises TypeError and ValueError for bad arguments. Safe from every thread; every\n"
    "method that waits releases the GIL.");

static PyObject *
recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { LIMIT, FAULTS, SYNC, ARGC };
    static mm_signature signature = {.doc = recorder_doc};
    mm_state *state = mm_type_state(type);
    mm_recording_options options = {
        .faults = true, .synchronize = true, .owner = state->interpreter};
    PyObject *argv[ARGC], *self;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || read_limit(argv[LIMIT], &options.limit) < 0
        || (argv[FAULTS] != NULL
            && mm_read_flag(state, argv[FAULTS], "faults", &options.faults) < 0)
        || (argv[SYNC] != NULL
            && mm_read_flag(state, argv[SYNC], "sync", &options.synchronize) < 0)) {
        return NULL;
    }
    self = mm_alloc_object(type);
    if (self != NULL) {
        recorder_of(self)->options = options;
    }
    return self;
}

static void
recorder_dealloc(PyObject *op)
{
    recorder_object *self = recorder_of(op);
    mm_recording *recording = atomic_load(&self->recording);

    PyObject_GC_UnTrack(op);
    if (recording != NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_recording_free(recording);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(self->pieces);
    free(self->parts);
    mm_free_object(op);
}

/* Starts a recording; NULL on failure. Fails while the interpreter ends, because a recording that
 * starts after the interpreter ended its recordings would never end. */
static mm_recording *
start_recording(mm_driver *cu, const mm_recording_options *options, bool wait,
                const mm_interpreter *interpreter, mm_status *st)
{
    mm_recording *recording = mm_recording_start(cu, options, wait, st);

    if (recording != NULL && mm_interpreter_is_ending(interpreter)) {
        mm_recording_free(recording);
        (void)mm_fail(st, MM_REFUSED, "a trace cannot start while the interpreter ends");
        return NULL;
    }
    return recording;
}

static int
read_wait(mm_state *state, mm_signature *signature, PyObject *const *args, Py_ssize_t nargs,
          PyObject *kwnames, bool *wait)
{
    PyObject *value;

    *wait = true;
    if (mm_signature_args(signature, args, nargs, kwnames, &value) < 0) {
        return -1;
    }
    return value != NULL ? mm_read_flag(state, value, "wait", wait) : 0;
}

PyDoc_STRVAR(
    recorder_start_doc,
    "start($self, /, *, wait=True)\n--\n\n"
    "Wait for devices, and begin to record.\n"
    "\n"
    "The first start of a process moves 64 KiB to check that the records are right. Raises\n"
    "TraceBusyError while a trace runs in this process, TraceUnavailableError where nothing can be\n"
    "recorded, RuntimeError for a second start, CUDAError when the driver refuses. wait=False does not\n"
    "wait, and neither does a start while a managedmem.Stream or a blocking stream captures a graph.\n"
    "Driver: cuCtxSynchronize, and the requests of /dev/nvidia-uvm-tools.");

static PyObject *
recorder_start(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = recorder_start_doc};
    recorder_object *self = recorder_of(op);
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_recording *recording;
    mm_driver *cu;
    mm_status st;
    bool wait;

    if (read_wait(state, &signature, args, nargs, kwnames, &wait) < 0
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    if (atomic_exchange(&self->started, true)) {
        return PyErr_Format(PyExc_RuntimeError,
                            "the trace was started already: make another one with trace()");
    }
    Py_BEGIN_ALLOW_THREADS
    recording = start_recording(cu, &self->options, wait, state->interpreter, &st);
    atomic_store(&self->recording, recording);
    Py_END_ALLOW_THREADS
    if (recording == NULL) {
        atomic_store(&self->started, false);
        return mm_raise(state, &st);
    }
    Py_RETURN_NONE;
}

/* NULL with an exception before the start. */
static mm_recording *
recording_of(PyObject *op)
{
    mm_recording *recording = atomic_load(&recorder_of(op)->recording);

    if (recording == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the trace was not started");
    }
    return recording;
}

PyDoc_STRVAR(
    recorder_mark_doc,
    "mark($self, /)\n--\n\n"
    "Wait for devices, and end a part of the recording.\n"
    "\n"
    "Raises RuntimeError, before it waits, if the recording does not run, or while a\n"
    "managedmem.Stream or a blocking stream captures a graph: the wait would destroy the capture.\n"
    "Raises CUDAError when the driver refuses; the part then goes on. Driver: cuCtxSynchronize.");

static PyObject *
recorder_mark(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_recording *recording = recording_of(op);
    mm_status st;
    int rc;

    if (recording == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_recording_mark(recording, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(
    recorder_stop_doc,
    "stop($self, /, *, wait=True)\n--\n\n"
    "Wait for devices, and end the last part and the recording; a second call does nothing.\n"
    "\n"
    "wait=False does not wait, and neither does a stop while a managedmem.Stream or a blocking stream\n"
    "captures a graph. Raises RuntimeError before the start. When the driver refuses the wait, it raises\n"
    "CUDAError after the recording has ended. Driver: cuCtxSynchronize.");

static PyObject *
recorder_stop(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = recorder_stop_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_recording *recording;
    mm_status st;
    bool wait;
    int rc;

    if (read_wait(state, &signature, args, nargs, kwnames, &wait) < 0
        || (recording = recording_of(op)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_recording_stop(recording, wait, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(state, rc, &st);
}

/* --- attribution: arguments --------------------------------------------------------------- */

static int
read_named_range(PyObject *item, mm_named_range *out)
{
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 3) {
        return MM_ERROR(PyExc_TypeError,
                        "a named range must be a tuple (address, nbytes, label), got %R", item);
    }
    if (mm_read_address_range(PyTuple_GetItem(item, 0), PyTuple_GetItem(item, 1), &out->start,
                              &out->size)
        < 0) {
        return -1;
    }
    out->label = mm_read_text(PyTuple_GetItem(item, 2));
    if (out->label == NULL) {
        return MM_ERROR(PyExc_TypeError, "a label must be a str without NUL, got %R",
                        PyTuple_GetItem(item, 2));
    }
    return 0;
}

/* Reads named ranges; their labels live as long as the tuple. NULL with an exception. */
static mm_named_range *
read_named_ranges(PyObject *items)
{
    size_t count = (size_t)PyTuple_Size(items);
    mm_named_range *named = calloc(count + 1, sizeof *named);

    if (named == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (read_named_range(PyTuple_GetItem(items, (Py_ssize_t)i), &named[i]) < 0) {
            free(named);
            return NULL;
        }
    }
    return named;
}

/* --- attribution: results ----------------------------------------------------------------- */

static PyObject *
traced_memory_tuple(const mm_traced_memory *m)
{
    static const char *const kinds[] = {
        [MM_MEMORY_BUFFER] = "buffer",
        [MM_MEMORY_NAMED] = "named",
        [MM_MEMORY_FOREIGN] = "foreign",
        [MM_MEMORY_UNKNOWN] = "unknown",
    };
    const char *text = m->label != NULL ? m->label : "";
    PyObject *label = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");

    if (label == NULL) {
        return NULL;
    }
    return Py_BuildValue("(sNKnKLO)", kinds[m->kind], label, (unsigned long long)m->start,
                         (Py_ssize_t)m->size, (unsigned long long)m->born,
                         m->died == UINT64_MAX ? -1LL : (long long)m->died,
                         m->pooled ? Py_True : Py_False);
}

static PyObject *
traced_memory_list(const mm_attribution *sums)
{
    const mm_traced_memory *memories = NULL;
    size_t count = mm_attribution_memories(sums, &memories);
    PyObject *list = PyList_New(0);

    for (size_t i = 0; list != NULL && i < count; i++) {
        if (mm_append_item(list, traced_memory_tuple(&memories[i])) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* The rows of finished parts, as the bytes of their structs. */
static PyObject *
sums_row_bytes(const mm_recorded_result *result)
{
    const mm_sums_row *rows = NULL;
    size_t count = mm_attribution_rows(result->sums, &rows), kept = 0;
    PyObject *bytes;

    for (size_t i = 0; i < count; i++) {
        kept += rows[i].part < result->part_count;
    }
    bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(kept * sizeof *rows));
    for (size_t i = 0, at = 0; bytes != NULL && i < count; i++) {
        if (rows[i].part < result->part_count) {
            memcpy(PyBytes_AsString(bytes) + at++ * sizeof *rows, &rows[i], sizeof *rows);
        }
    }
    return bytes;
}

/* Keeps the pieces and the parts of a result for events() and parts(). */
static int
keep_result(PyObject *op, mm_recorded_result *result)
{
    recorder_object *self = recorder_of(op);
    PyObject *earlier, *pieces;
    mm_recorded_part *parts;

    pieces = PyBytes_FromStringAndSize((const char *)result->pieces.items,
                                       (Py_ssize_t)(result->pieces.count * sizeof(mm_event)));
    if (pieces == NULL) {
        return -1;
    }
    MM_LOCK(op);
    earlier = self->pieces;
    self->pieces = pieces;
    parts = self->parts;
    self->parts = result->parts;
    self->part_count = result->part_count;
    self->ambiguous = mm_attribution_ambiguous(result->sums);
    MM_UNLOCK();
    result->parts = parts; /* freed with the result */
    Py_XDECREF(earlier);
    return 0;
}

static PyObject *
attribution_result(PyObject *op, mm_recorded_result *result)
{
    PyObject *memories = traced_memory_list(result->sums);
    PyObject *rows = memories ? sums_row_bytes(result) : NULL;

    if (rows == NULL || keep_result(op, result) < 0) {
        Py_XDECREF(memories);
        Py_XDECREF(rows);
        return NULL;
    }
    return Py_BuildValue("(NN)", memories, rows);
}

PyDoc_STRVAR(
    recorder_attribute_doc,
    "attribute($self, named, /)\n--\n\n"
    "Assign the events of the finished parts to memories; returns (memories, rows).\n"
    "\n"
    "named has tuples (address, nbytes, label); where they overlap, later ones win. Each memory\n"
    "is a tuple (kind, label, address, nbytes, born, died, pooled): kind is \"buffer\",\n"
    "\"named\", \"foreign\" or \"unknown\", times are in nanoseconds, born is 0 for memory that\n"
    "is older than the recording, died is -1 for memory that lives, pooled is True for a buffer\n"
    "from a pool. rows are bytes, 272 for each row, in the format \"<2I33Q\": the part, the index\n"
    "of a memory (0xffffffff for the total of the part), and the sums, which FIELDS of\n"
    "managedmem/_trace_results.py names. Raises TypeError or ValueError for bad ranges. Driver:\n"
    "cuPointerGetAttributes.");

static PyObject *
recorder_attribute(PyObject *op, PyObject *value)
{
    mm_recording *recording = recording_of(op);
    PyObject *items, *answer = NULL;
    mm_named_range *named;
    mm_recorded_result result;
    mm_status st;
    int rc;

    if (recording == NULL || (items = PySequence_Tuple(value)) == NULL) {
        return NULL;
    }
    named = read_named_ranges(items);
    if (named != NULL) {
        size_t count = (size_t)PyTuple_Size(items);
        Py_BEGIN_ALLOW_THREADS
        rc = mm_recording_attribute(recording, named, count, &result, &st);
        Py_END_ALLOW_THREADS
        answer =
            rc < 0 ? mm_raise(mm_type_state(Py_TYPE(op)), &st) : attribution_result(op, &result);
        mm_recorded_result_free(&result);
    }
    free(named);
    Py_DECREF(items);
    return answer;
}

/* --- other results ------------------------------------------------------------------------ */

PyDoc_STRVAR(
    recorder_events_doc,
    "events($self, /)\n--\n\n"
    "The events of the last attribute(): a read-only memoryview of bytes, 48 for each event.\n"
    "\n"
    "The format of an event is \"<4QI2h4BI\": start, end, address, amount, memory, source,\n"
    "destination, kind, cause, access, flags, extra. Later calls do not change the view.\n"
    "It is empty before the first attribute().");

static PyObject *
recorder_events(PyObject *op, PyObject *Py_UNUSED(none))
{
    recorder_object *self = recorder_of(op);
    PyObject *pieces, *view;

    MM_LOCK(op);
    pieces = self->pieces;
    Py_XINCREF(pieces);
    MM_UNLOCK();
    if (pieces == NULL && (pieces = PyBytes_FromStringAndSize(NULL, 0)) == NULL) {
        return NULL;
    }
    view = PyMemoryView_FromObject(pieces);
    Py_DECREF(pieces);
    return view;
}

/* The number of pieces of a part in the last attribution; 0 if the part ended after that. */
static size_t
count_pieces(recorder_object *self, size_t part)
{
    size_t pieces;

    MM_LOCK((PyObject *)self);
    pieces = part < self->part_count ? self->parts[part].pieces : 0;
    MM_UNLOCK();
    return pieces;
}

PyDoc_STRVAR(recorder_parts_doc,
             "parts($self, /)\n--\n\n"
             "The finished parts: tuples (start, end, number of events), times in nanoseconds.\n"
             "\n"
             "The numbers are those of the last attribute(); 0 for parts that ended after it.");

static PyObject *
recorder_parts(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_recording *recording = recording_of(op);
    mm_recorded_part *parts = NULL;
    size_t count = 0;
    mm_status st;
    PyObject *list;
    int rc;

    if (recording == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_recording_copy_parts(recording, &parts, &count, &st);
    Py_END_ALLOW_THREADS
    list = rc < 0 ? mm_raise(mm_type_state(Py_TYPE(op)), &st) : PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *part = Py_BuildValue("(KKn)", (unsigned long long)parts[i].start,
                                       (unsigned long long)parts[i].end,
                                       (Py_ssize_t)count_pieces(recorder_of(op), i));
        if (mm_append_item(list, part) < 0) {
            Py_CLEAR(list);
        }
    }
    free(parts);
    return list;
}

PyDoc_STRVAR(recorder_clock_doc,
             "clock($self, /)\n--\n\n"
             "The recording's start and the last part's end: (raw, monotonic, raw, monotonic).\n"
             "\n"
             "In nanoseconds. Events have raw times; time.perf_counter() is monotonic.");

static PyObject *
recorder_clock(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_recording *recording = recording_of(op);
    mm_clock_pair moments[2];

    if (recording == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_recording_read_clock(recording, moments);
    Py_END_ALLOW_THREADS
    return Py_BuildValue(
        "(KKKK)", (unsigned long long)moments[0].raw, (unsigned long long)moments[0].monotonic,
        (unsigned long long)moments[1].raw, (unsigned long long)moments[1].monotonic);
}

PyDoc_STRVAR(
    recorder_report_doc,
    "report($self, /)\n--\n\n"
    "Counters of the recording, as a dict.\n"
    "\n"
    "lost, rejected, ambiguous, fault_overflows and fatal_faults count events. overhead is the\n"
    "nanoseconds that were spent in recording, unlisted the number of memories that were new\n"
    "after the limit. truncated is True if events went beyond the limit, waited is False if the\n"
    "end did not wait, because a stream captured a graph.");

static PyObject *
recorder_report(PyObject *op, PyObject *Py_UNUSED(none))
{
    recorder_object *self = recorder_of(op);
    mm_recording *recording = recording_of(op);
    mm_recording_report report;
    uint64_t ambiguous;

    if (recording == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_recording_read_report(recording, &report);
    Py_END_ALLOW_THREADS
    MM_LOCK(op);
    ambiguous = self->ambiguous;
    MM_UNLOCK();
    return Py_BuildValue(
        "{sK sK sK sK sK sK sK sO sO}", "lost", (unsigned long long)report.lost, "rejected",
        (unsigned long long)report.rejected, "ambiguous", (unsigned long long)ambiguous,
        "fault_overflows", (unsigned long long)report.fault_overflows, "fatal_faults",
        (unsigned long long)report.fatal_faults, "overhead", (unsigned long long)report.overhead,
        "unlisted", (unsigned long long)report.unlisted, "truncated",
        report.truncated ? Py_True : Py_False, "waited", report.waited ? Py_True : Py_False);
}

static PyObject *
recorder_get_running(PyObject *op, void *Py_UNUSED(closure))
{
    mm_recording *recording = atomic_load(&recorder_of(op)->recording);

    return PyBool_FromLong(recording != NULL && mm_recording_is_running(recording));
}

static bool
is_emulated(void)
{
    const mm_driver *cu = mm_driver_peek();

    return cu != NULL && cu->emulated;
}

static PyObject *
recorder_get_source(PyObject *op, void *Py_UNUSED(closure))
{
    return recording_of(op) == NULL ? NULL
                                    : PyUnicode_FromString(is_emulated() ? "emulator" : "kernel");
}

static PyObject *
recorder_get_source_detail(PyObject *op, void *Py_UNUSED(closure))
{
    return recording_of(op) == NULL
               ? NULL
               : PyUnicode_FromString(is_emulated() ? "emulated " MM_UVM_TOOLS_DEVICE ", layout 1"
                                                    : MM_UVM_TOOLS_DEVICE ", layout 1");
}

/* --- the type ----------------------------------------------------------------------------- */

static PyMethodDef recorder_methods[] = {
    MM_METHOD("start", recorder_start, recorder_start_doc),
    {"mark", recorder_mark, METH_NOARGS, recorder_mark_doc},
    MM_METHOD("stop", recorder_stop, recorder_stop_doc),
    {"attribute", recorder_attribute, METH_O, recorder_attribute_doc},
    {"events", recorder_events, METH_NOARGS, recorder_events_doc},
    {"parts", recorder_parts, METH_NOARGS, recorder_parts_doc},
    {"clock", recorder_clock, METH_NOARGS, recorder_clock_doc},
    {"report", recorder_report, METH_NOARGS, recorder_report_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef recorder_getset[] = {
    {"running", recorder_get_running, NULL, "True between start() and stop().", NULL},
    {"source", recorder_get_source, NULL,
     "The source of the events: \"kernel\" or \"emulator\". RuntimeError before start().", NULL},
    {"source_detail", recorder_get_source_detail, NULL,
     "The device file of the events and the layout of its records. RuntimeError before start().",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot recorder_slots[] = {
    {Py_tp_doc, (void *)recorder_doc},
    {Py_tp_new, recorder_new},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, recorder_dealloc},
    {Py_tp_methods, recorder_methods},
    {Py_tp_getset, recorder_getset},
    {0, NULL},
};

int
mm_recorder_init(PyObject *module, mm_state *state)
{
    return mm_add_final_type(module, "managedmem._managedmem.Recorder", sizeof(recorder_object), 0,
                             recorder_slots, &state->recorder_type);
}
