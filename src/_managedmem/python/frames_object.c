/* frames_object.c: the type _Frames, by which working sets and managedmem.torch move their
 * parts. */
#include <stdlib.h>

#include "../working/part_frames.h"
#include "args.h"
#include "stream_object.h"
#include "targets.h"

/* --- _Frames ------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    mm_frames *frames;
} frames_object;

static mm_frames *
frames_of(PyObject *op)
{
    return ((frames_object *)op)->frames;
}

/* The frames of an object; NULL with an exception in a forked child, which must not use them. */
static mm_frames *
open_frames_of(PyObject *op)
{
    return mm_open(mm_type_state(Py_TYPE(op))) == NULL ? NULL : frames_of(op);
}

PyDoc_STRVAR(
    frames_doc,
    "_Frames(device, nbytes, host_waits, is_managed=False, suspendable=False)\n--\n\n"
    "Frames on a device for parts of memory whose home is the host. With is_managed it has no\n"
    "frames: parts of managed memory are prefetched instead. Safe from every thread; releases the\n"
    "GIL. Driver: cuMemAlloc, cuMemcpyAsync, cuMemPrefetchAsync,\n"
    "cuMemDiscardAndPrefetchBatchAsync, cuEventRecord, cuStreamWaitEvent.");

static PyObject *
frames_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { DEVICE, NBYTES, HOST_WAITS, IS_MANAGED, SUSPENDABLE, ARGC };
    static mm_signature signature = {.doc = frames_doc};
    mm_state *state = mm_type_state(type);
    PyObject *argv[ARGC], *self;
    bool host_waits = false, is_managed = false, can_suspend = false;
    mm_frames *frames;
    mm_driver *cu;
    size_t size, device;
    mm_status st;

    if (mm_signature_args_new(&signature, args, kwargs, argv) < 0
        || mm_read_size(argv[DEVICE], "device", &device) < 0
        || mm_read_size(argv[NBYTES], "nbytes", &size) < 0
        || mm_read_flag(state, argv[HOST_WAITS], "host_waits", &host_waits) < 0
        || (argv[IS_MANAGED] != NULL
            && mm_read_flag(state, argv[IS_MANAGED], "is_managed", &is_managed) < 0)
        || (argv[SUSPENDABLE] != NULL
            && mm_read_flag(state, argv[SUSPENDABLE], "suspendable", &can_suspend) < 0)
        || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    frames = mm_frames_new(cu, (int)device, size, host_waits, is_managed, can_suspend, &st);
    Py_END_ALLOW_THREADS
    if (frames == NULL) {
        return mm_raise(state, &st);
    }
    self = mm_alloc_object(type);
    if (self == NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_frames_free(frames);
        Py_END_ALLOW_THREADS
        return NULL;
    }
    ((frames_object *)self)->frames = frames;
    return self;
}

static void
frames_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_BEGIN_ALLOW_THREADS
    mm_frames_free(frames_of(op));
    Py_END_ALLOW_THREADS
    mm_free_object(op);
}

static int
read_part_access(PyObject *value, mm_part_access *out)
{
    static const char *const names[] = {
        [MM_PART_READ] = "read", [MM_PART_WRITE] = "write", [MM_PART_SCRATCH] = "scratch"};

    for (mm_part_access a = MM_PART_READ; PyUnicode_Check(value) && a <= MM_PART_SCRATCH; a++) {
        if (PyUnicode_CompareWithASCIIString(value, names[a]) == 0) {
            *out = a;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "access must be \"read\", \"write\" or \"scratch\", got %R",
                 value);
    return -1;
}

PyDoc_STRVAR(
    frames_add_doc,
    "add($self, /, home, nbytes, access, numbers=None)\n--\n\n"
    "Add a part over memory that the caller keeps alive. Returns the number of the part, and\n"
    "appends it to the list numbers.");

static PyObject *
frames_add(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { HOME, NBYTES, ACCESS, NUMBERS, ARGC };
    static mm_signature signature = {.doc = frames_add_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    PyObject *argv[ARGC], *number;
    mm_part_access access;
    CUdeviceptr home;
    uint32_t part = 0;
    size_t size;
    mm_status st;
    int rc;

    if (frames == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_address_range(argv[HOME], argv[NBYTES], &home, &size) < 0
        || read_part_access(argv[ACCESS], &access) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_add(frames, home, size, access, &part, &st);
    Py_END_ALLOW_THREADS
    number = rc < 0 ? mm_raise(state, &st) : PyLong_FromUnsignedLong(part);
    if (number != NULL && argv[NUMBERS] != NULL && PyList_Append(argv[NUMBERS], number) < 0) {
        Py_CLEAR(number);
    }
    return number;
}

/* Adds a part for each range that is not empty, and appends the number of the part to the list. */
static int
add_ranges(mm_frames *frames, const mm_targets *t, mm_part_access access, PyObject *numbers)
{
    for (size_t i = 0; i < t->batch.count; i++) {
        const mm_range range = t->batch.transfers[i].range;
        PyObject *number = NULL;
        uint32_t part;
        mm_status st;
        int rc;
        if (range.size == 0) {
            continue;
        }
        Py_BEGIN_ALLOW_THREADS
        rc = mm_frames_add(frames, range.start, range.size, access, &part, &st);
        Py_END_ALLOW_THREADS
        if (mm_raise_failure(t->state, rc, &st) < 0
            || (number = PyLong_FromUnsignedLong(part)) == NULL
            || PyList_Append(numbers, number) < 0) {
            Py_XDECREF(number);
            return -1; /* the caller removes the added parts */
        }
        Py_DECREF(number);
    }
    return 0;
}

/* Gives each part over a ManagedBuffer the guard of its memory; the caller keeps the buffer alive.
 * Parts have the order of the ranges that are not empty. */
static int
guard_parts(mm_frames *frames, const mm_targets *t, PyObject *numbers)
{
    Py_ssize_t next = 0;

    for (size_t i = 0; i < t->batch.count; i++) {
        PyObject *item = PyTuple_GetItem(t->items, (Py_ssize_t)i), *number;
        if (t->batch.transfers[i].range.size == 0) {
            continue;
        }
        number = PyList_GetItem(numbers, next++);
        if (number == NULL) {
            return -1;
        }
        if (mm_is_buffer(t->state, item)) {
            const uint32_t part = (uint32_t)PyLong_AsUnsignedLong(number);
            Py_BEGIN_ALLOW_THREADS
            mm_frames_guard(frames, part, &mm_buffer_of(item)->memory->guard);
            Py_END_ALLOW_THREADS
        }
    }
    return 0;
}

static size_t
bytes_of_targets(const mm_targets *t)
{
    size_t bytes = 0;

    for (size_t i = 0; i < t->batch.count; i++) {
        bytes += t->batch.transfers[i].range.size;
    }
    return bytes;
}

PyDoc_STRVAR(
    frames_add_targets_doc,
    "add_targets($self, /, targets, access, numbers)\n--\n\n"
    "Add a part for each target that has bytes, and append the number of the part to the list.\n"
    "After a failure the list has the numbers of the parts that were added. Returns the sum of\n"
    "the bytes, and the objects that keep the memory alive.");

static PyObject *
frames_add_targets(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TARGETS, ACCESS, NUMBERS, ARGC };
    static mm_signature signature = {.doc = frames_add_targets_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    PyObject *argv[ARGC], *kept = NULL;
    mm_part_access access;
    mm_targets t;

    if (frames == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_part_access(argv[ACCESS], &access) < 0
        || mm_targets_read(state, argv[TARGETS], access == MM_PART_SCRATCH ? MM_DISCARD : MM_QUERY,
                           &t)
               < 0) {
        return NULL;
    }
    if (mm_targets_hold_roots(&t) == 0 && add_ranges(frames, &t, access, argv[NUMBERS]) == 0) {
        kept = Py_BuildValue("(nOO)", (Py_ssize_t)bytes_of_targets(&t), t.items,
                             t.exports != NULL ? t.exports : Py_None);
    }
    if (kept != NULL && guard_parts(frames, &t, argv[NUMBERS]) < 0) {
        Py_CLEAR(kept);
    }
    mm_targets_release(&t);
    return kept;
}

/* Reads the number of a part. If `frame` is not NULL, reads the number of a use instead: its lower
 * half is the part, its upper half the number of the frame in a graph. */
static int
read_part_number(PyObject *op, PyObject *value, uint32_t *part, uint32_t *frame)
{
    uint32_t count;
    size_t number;

    if (mm_read_size(value, frame != NULL ? "use" : "part", &number) < 0) {
        return -1;
    }
    if (frame != NULL) {
        *frame = (uint32_t)((uint64_t)number >> 32);
        number &= UINT32_MAX;
    }
    Py_BEGIN_ALLOW_THREADS
    count = mm_frames_count(frames_of(op));
    Py_END_ALLOW_THREADS
    if (number >= count) {
        PyErr_Format(PyExc_ValueError, "part must be less than %u, got %zu", count, number);
        return -1;
    }
    *part = (uint32_t)number;
    return 0;
}

/* Reads the part numbers of a list or tuple. If `in_graphs` is not NULL, reads numbers of uses,
 * and *in_graphs points to their frames, in the same block. The caller frees the result with
 * PyMem_Free. NULL with an exception. */
static uint32_t *
read_part_numbers(PyObject *op, PyObject *value, uint32_t **in_graphs, Py_ssize_t *count)
{
    PyObject *given = PySequence_Tuple(value);
    uint32_t *parts = NULL;

    if (given == NULL) {
        return NULL;
    }
    *count = PyTuple_Size(given);
    parts = PyMem_Calloc(2 * (size_t)*count + 1, sizeof *parts);
    if (parts == NULL) {
        (void)PyErr_NoMemory();
    } else if (in_graphs != NULL) {
        *in_graphs = parts + *count;
    }
    for (Py_ssize_t i = 0; parts != NULL && i < *count; i++) {
        uint32_t *frame = in_graphs != NULL ? &(*in_graphs)[i] : NULL;
        if (read_part_number(op, PyTuple_GetItem(given, i), &parts[i], frame) < 0) {
            PyMem_Free(parts);
            parts = NULL;
        }
    }
    Py_DECREF(given);
    return parts;
}

/* Removes the first `done` numbers from a list. */
static int
cut_list(PyObject *list, Py_ssize_t done)
{
    return done > 0 ? PyList_SetSlice(list, 0, done, NULL) : 0;
}

/* Removes parts until one fails; returns the number of removed parts. */
static Py_ssize_t
remove_parts(mm_frames *frames, const uint32_t *parts, Py_ssize_t count, mm_status *st)
{
    Py_ssize_t done = 0;

    while (done < count && mm_frames_remove(frames, parts[done], st) == 0) {
        done++;
    }
    return done;
}

PyDoc_STRVAR(frames_remove_doc,
             "remove($self, parts, /)\n--\n\n"
             "Remove parts, which must not be in use, and remove their numbers from the list.");

/* Removes the parts and their numbers in one call, so that no signal is raised in between. */
static PyObject *
frames_remove(PyObject *op, PyObject *value)
{
    mm_frames *frames = open_frames_of(op);
    Py_ssize_t count = 0, done;
    uint32_t *parts = frames != NULL ? read_part_numbers(op, value, NULL, &count) : NULL;
    mm_status st;

    if (parts == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    done = remove_parts(frames, parts, count, &st);
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    if (cut_list(value, done) < 0) {
        return NULL;
    }
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), done < count ? -1 : 0, &st);
}

/* Returns a tuple of the addresses of uses. Appends the number of each that has one to `held`. */
static PyObject *
list_acquired(const mm_part_use *uses, Py_ssize_t count, PyObject *held)
{
    PyObject *found = PyTuple_New(count);

    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        const mm_part_use *use = &uses[i];
        const unsigned long long both = (unsigned long long)use->frame << 32 | use->part;
        PyObject *address = PyLong_FromUnsignedLongLong(use->address);
        PyObject *number = use->address != 0 ? PyLong_FromUnsignedLongLong(both) : NULL;
        if (address == NULL || PyTuple_SetItem(found, i, address) < 0
            || (use->address != 0 && (number == NULL || PyList_Append(held, number) < 0))) {
            Py_CLEAR(found);
        }
        Py_XDECREF(number);
    }
    return found;
}

static PyObject *
acquire_parts(mm_frames *frames, const uint32_t *parts, Py_ssize_t count, bool writes,
              const mm_stream_use *stream, PyObject *held)
{
    mm_part_use *uses = calloc((size_t)count + 1, sizeof *uses);
    PyObject *found;
    mm_status ignored;

    if (uses == NULL) {
        mm_stream_leave(stream);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) {
        uses[i] = mm_frames_acquire(frames, parts[i], writes, stream->handle);
    }
    mm_stream_leave(stream);
    Py_END_ALLOW_THREADS
    found = list_acquired(uses, count, held);
    if (found == NULL) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++) {
            if (uses[i].address != 0) {
                MM_IGNORE(mm_frames_release(frames, uses[i], false, false, NULL, &ignored));
            }
        }
        Py_END_ALLOW_THREADS
        MM_IGNORE(PyList_SetSlice(held, 0, PyList_Size(held), NULL));
    }
    free(uses);
    return found;
}

PyDoc_STRVAR(
    frames_acquire_doc,
    "acquire($self, /, parts, writes, stream, held)\n--\n\n"
    "The addresses of parts for work on the stream until release(); 0 for a part that has to be\n"
    "used at home. Appends the numbers of the other uses to the list held. A signal is raised\n"
    "before all of this or after it.");

static PyObject *
frames_acquire(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { PARTS, WRITES, STREAM, HELD, ARGC };
    static mm_signature signature = {.doc = frames_acquire_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    PyObject *argv[ARGC], *found = NULL;
    mm_stream_use stream;
    bool writes = false;
    Py_ssize_t count = 0;
    uint32_t *parts;

    if (frames == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_flag(state, argv[WRITES], "writes", &writes) < 0
        || (parts = read_part_numbers(op, argv[PARTS], NULL, &count)) == NULL) {
        return NULL;
    }
    if (mm_stream_read_and_enter(state, argv[STREAM], &stream) == 0) {
        found = acquire_parts(frames, parts, count, writes, &stream, argv[HELD]);
    }
    PyMem_Free(parts);
    return found;
}

PyDoc_STRVAR(frames_release_doc,
             "release($self, /, held, written, stream, goes_on)\n--\n\n"
             "Copy written parts home and, unless goes_on, end the uses. Removes the numbers of\n"
             "uses that have ended from the list. If a release fails, the part stays in its\n"
             "frame.");

static PyObject *
frames_release(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { HELD, WRITTEN, STREAM, GOES_ON, ARGC };
    static mm_signature signature = {.doc = frames_release_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    bool written = false, goes_on = false;
    Py_ssize_t count = 0, done = 0;
    PyObject *argv[ARGC];
    mm_stream_use stream;
    uint32_t *parts, *in_graphs = NULL;
    mm_status st;
    int rc = 0;

    if (frames == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_flag(state, argv[WRITTEN], "written", &written) < 0
        || mm_read_flag(state, argv[GOES_ON], "goes_on", &goes_on) < 0
        || (parts = read_part_numbers(op, argv[HELD], &in_graphs, &count)) == NULL) {
        return NULL;
    }
    if (mm_stream_read_and_enter(state, argv[STREAM], &stream) < 0) {
        PyMem_Free(parts);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    while (rc == 0 && done < count) {
        const mm_part_use use = {.part = parts[done], .frame = in_graphs[done]};
        rc = mm_frames_release(frames, use, written, goes_on, stream.handle, &st);
        done += rc == 0;
    }
    mm_stream_leave(&stream);
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    if (!goes_on && cut_list(argv[HELD], done) < 0) {
        return NULL;
    }
    return mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(frames_has_doc,
             "has($self, part, /)\n--\n\nTrue if the part is on the device or on its way there.");

static PyObject *
frames_has(PyObject *op, PyObject *value)
{
    mm_frames *frames = open_frames_of(op);
    uint32_t part;
    bool present;

    if (frames == NULL || read_part_number(op, value, &part, NULL) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    present = mm_frames_have(frames, part);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(present);
}

PyDoc_STRVAR(frames_give_order_doc,
             "give_order($self, parts, /)\n--\n\n"
             "Expect rounds of uses in this order; () lets the set learn the order.");

static PyObject *
frames_give_order(PyObject *op, PyObject *value)
{
    mm_frames *frames = open_frames_of(op);
    Py_ssize_t count = 0;
    uint32_t *parts = frames != NULL ? read_part_numbers(op, value, NULL, &count) : NULL;
    mm_status st;
    int rc;

    if (parts == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_give_order(frames, parts, (size_t)count, &st);
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

/* Calls a function of the frames that takes only a stream. */
static PyObject *
call_with_stream(PyObject *op, PyObject *value, int (*call)(mm_frames *, CUstream, mm_status *))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    mm_stream_use stream;
    mm_status st;
    int rc;

    if (frames == NULL || mm_stream_read_and_enter(state, value, &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = call(frames, stream.handle, &st);
    mm_stream_leave(&stream);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(frames_settle_doc,
             "settle($self, stream, /)\n--\n\nMake the stream wait for all copies home so far.");

static PyObject *
frames_settle(PyObject *op, PyObject *value)
{
    return call_with_stream(op, value, mm_frames_settle);
}

PyDoc_STRVAR(
    frames_begin_round_doc,
    "begin_round($self, stream, /)\n--\n\n"
    "Forget all copies that are not in use. From now on load parts ahead, behind the work on the\n"
    "stream.");

static PyObject *
frames_begin_round(PyObject *op, PyObject *value)
{
    return call_with_stream(op, value, mm_frames_begin_round);
}

/* Calls a function of the frames that takes nothing else. */
static PyObject *
call_alone(PyObject *op, int (*call)(mm_frames *, mm_status *))
{
    mm_frames *frames = open_frames_of(op);
    mm_status st;
    int rc;

    if (frames == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = call(frames, &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(frames_wait_doc, "wait($self, /)\n--\n\nWait for all copies home so far.");

static PyObject *
frames_wait(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_alone(op, mm_frames_wait);
}

PyDoc_STRVAR(
    frames_synchronize_doc,
    "synchronize($self, /)\n--\n\nWait for the device, unless a stream captures a graph.");

static PyObject *
frames_synchronize(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_alone(op, mm_frames_synchronize);
}

PyDoc_STRVAR(frames_suspend_doc,
             "suspend($self, /)\n--\n\n"
             "Give the memory of the frames back to the driver. Parts are used at home until\n"
             "resume().");

static PyObject *
frames_suspend(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_alone(op, mm_frames_suspend);
}

PyDoc_STRVAR(frames_resume_doc,
             "resume($self, /)\n--\n\nTake memory of the device for the frames again.");

static PyObject *
frames_resume(PyObject *op, PyObject *Py_UNUSED(none))
{
    return call_alone(op, mm_frames_resume);
}

PyDoc_STRVAR(frames_end_round_doc,
             "end_round($self, /)\n--\n\nLoad nothing ahead until the next round.");

static PyObject *
frames_end_round(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_frames *frames = open_frames_of(op);

    if (frames == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_frames_end_round(frames);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(frames_changed_doc,
             "changed($self, /, part, stream)\n--\n\n"
             "Forget the copy of a part that the work on the stream has written at home.");

static PyObject *
frames_changed(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = frames_changed_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    mm_frames *frames = open_frames_of(op);
    mm_stream_use stream;
    PyObject *argv[2];
    uint32_t part;
    mm_status st;
    int rc;

    if (frames == NULL || mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_part_number(op, argv[0], &part, NULL) < 0
        || mm_stream_read_and_enter(state, argv[1], &stream) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_frames_changed(frames, part, stream.handle, &st);
    mm_stream_leave(&stream);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(state, rc, &st);
}

PyDoc_STRVAR(frames_close_doc,
             "close($self, /)\n--\n\nFree the frames after a wait for the device.");

static PyObject *
frames_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    Py_BEGIN_ALLOW_THREADS
    mm_frames_close(frames_of(op));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    frames_stats_doc,
    "stats($self, /)\n--\n\nThe counters as a dict, and the text of the last failure or None.");

static PyObject *
frames_stats(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_frames *frames = open_frames_of(op);
    mm_frames_report r;
    PyObject *text;

    if (frames == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_frames_read_report(frames, &r);
    Py_END_ALLOW_THREADS
    text = mm_status_text(mm_type_state(Py_TYPE(op)), &r.error);
    if (text == NULL) {
        return NULL;
    }
    return Py_BuildValue(
        "({sn sn sn sI sK sK sK sK sK sK sK sK sK}N)", "room", (Py_ssize_t)r.room, "present",
        (Py_ssize_t)r.present, "kept", (Py_ssize_t)r.kept, "parts", r.parts, "acquired",
        (unsigned long long)r.acquired, "hits", (unsigned long long)r.hits, "mapped",
        (unsigned long long)r.mapped, "loads", (unsigned long long)r.loads, "ahead",
        (unsigned long long)r.ahead, "drops", (unsigned long long)r.drops, "bytes_loaded",
        (unsigned long long)r.bytes_loaded, "bytes_home", (unsigned long long)r.bytes_home,
        "failures", (unsigned long long)r.failures, text);
}

static PyMethodDef frames_methods[] = {
    MM_METHOD("add", frames_add, frames_add_doc),
    MM_METHOD("add_targets", frames_add_targets, frames_add_targets_doc),
    {"remove", frames_remove, METH_O, frames_remove_doc},
    {"has", frames_has, METH_O, frames_has_doc},
    {"give_order", frames_give_order, METH_O, frames_give_order_doc},
    MM_METHOD("changed", frames_changed, frames_changed_doc),
    {"begin_round", frames_begin_round, METH_O, frames_begin_round_doc},
    {"end_round", frames_end_round, METH_NOARGS, frames_end_round_doc},
    {"settle", frames_settle, METH_O, frames_settle_doc},
    {"wait", frames_wait, METH_NOARGS, frames_wait_doc},
    {"suspend", frames_suspend, METH_NOARGS, frames_suspend_doc},
    {"resume", frames_resume, METH_NOARGS, frames_resume_doc},
    {"synchronize", frames_synchronize, METH_NOARGS, frames_synchronize_doc},
    MM_METHOD("acquire", frames_acquire, frames_acquire_doc),
    MM_METHOD("release", frames_release, frames_release_doc),
    {"stats", frames_stats, METH_NOARGS, frames_stats_doc},
    {"close", frames_close, METH_NOARGS, frames_close_doc},
    {NULL, NULL, 0, NULL},
};

/* clang-format off */
static PyType_Slot frames_slots[] = {
    {Py_tp_doc, (void *)frames_doc},
    {Py_tp_new, frames_new},
    {Py_tp_dealloc, frames_dealloc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_methods, frames_methods},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec frames_spec = {
    .name = "managedmem._managedmem._Frames",
    .basicsize = sizeof(frames_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = frames_slots,
};

int
mm_frames_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &frames_spec, &state->frames_type);
}
