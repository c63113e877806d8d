/* buffer_operations.c: the methods of a buffer that work in a stream: prefetch, discard, copies
 * and fills. Each method reads its arguments (Python code may run), enters the stream and the
 * buffer, detaches, calls the driver, leaves, attaches and raises. */
#include <string.h>

#include "../memory/result_blocks.h"
#include "buffer.h"
#include "copies.h"
#include "foreign_resource.h"
#include "foreign_location.h"
#include "oversubscription.h"
#include "resource.h"
#include "stream_object.h"
#include "targets.h"

/* Runs the code of the free function on this one target, because it also reads `unsupported`. */
MM_COLD static PyObject *
call_targets(mm_buffer *b, mm_operation op, PyObject *location, PyObject *stream, PyObject *defer,
             PyObject *unsupported)
{
    return mm_run_on_targets(b->state, op,
                             (PyObject *[MM_CALL_ARGC]){[MM_CALL_TARGETS] = (PyObject *)b,
                                                        [MM_CALL_LOCATION] = location,
                                                        [MM_CALL_STREAM] = stream,
                                                        [MM_CALL_DEFER] = defer,
                                                        [MM_CALL_UNSUPPORTED] = unsupported});
}

const char mm_prefetch_doc[] =
    "prefetch($self, location, *, stream=None, defer=None, unsupported='raise')\n--\n\n"
    "Move the pages to a Device or Host before they are used there, in stream order.\n"
    "\n"
    "defer=True queues an empty host function first, so that the call returns at once and the\n"
    "stream does the work; defer=None does this for large buffers. With unsupported=\"skip\" the\n"
    "call returns 1 and does nothing if managedmem.prefetch() passes over the buffer, and\n"
    "otherwise returns 0; by default it returns None. Raises as managedmem.prefetch() does. Safe\n"
    "from every thread; releases the GIL.\n"
    "Driver: cuMemPrefetchAsync.";

PyObject *
mm_buffer_prefetch(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { LOCATION, STREAM, DEFER, UNSUPPORTED, ARGC };
    static mm_signature signature = {.doc = mm_prefetch_doc};
    mm_buffer *b = mm_buffer_of(op);
    CUmemLocation location;
    mm_buffer_use use;
    mm_stream_use stream;
    PyObject *argv[ARGC];
    mm_defer defer;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    if (argv[UNSUPPORTED] != NULL) {
        return call_targets(b, MM_PREFETCH, argv[LOCATION], argv[STREAM], argv[DEFER],
                            argv[UNSUPPORTED]);
    }
    if (mm_buffer_check_open(b) < 0 || mm_read_location(b->state, argv[LOCATION], &location) < 0
        || mm_read_defer(b->state, argv[DEFER], &defer) < 0
        || mm_stream_read(b->state, argv[STREAM], &stream) < 0
        || mm_warn_of_place(b->size, location) < 0
        || mm_buffer_enter(b, MM_PREFETCH, &stream, &use) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_prefetch(use.cu, use.range, location, stream.handle, defer, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(b->state, rc, &st);
}

/* Discards, and prefetches unless `location` is NULL. */
static PyObject *
discard_buffer(mm_buffer *b, PyObject *stream_object, const CUmemLocation *location,
               mm_defer defer)
{
    mm_operation op = location ? MM_DISCARD_PREFETCH : MM_DISCARD;
    mm_dispatch_options options;
    mm_buffer_use use;
    mm_stream_use stream;
    mm_batch batch;
    mm_status st;
    int rc;

    if (mm_refuse_read_only((PyObject *)b, "cannot be discarded: it is read-only") < 0
        || mm_stream_read(b->state, stream_object, &stream) < 0
        || mm_buffer_enter(b, op, &stream, &use) < 0) {
        return NULL;
    }
    options = (mm_dispatch_options){stream.handle, MM_DISPATCH_AUTO, defer};
    mm_batch_one(&batch, use.range, location ? *location : mm_host());
    Py_BEGIN_ALLOW_THREADS
    rc = mm_batch_run(use.cu, op, &batch, &options, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(b->state, rc, &st);
}

const char mm_discard_doc[] =
    "discard($self, *, stream=None, unsupported='raise')\n--\n\n"
    "Discard the contents, in stream order; until the next write a read returns undefined bytes.\n"
    "\n"
    "Acts on the whole pages inside the buffer. With unsupported=\"skip\" the call returns 1 and\n"
    "does nothing if managedmem.discard() passes over the buffer, and otherwise returns 0; by\n"
    "default it returns None. Raises as managedmem.discard() does. Safe from every thread;\n"
    "releases the GIL.\n"
    "Driver: cuMemDiscardBatchAsync.";

PyObject *
mm_buffer_discard(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { STREAM, UNSUPPORTED, ARGC };
    static mm_signature signature = {.doc = mm_discard_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[ARGC];

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    return argv[UNSUPPORTED] != NULL
               ? call_targets(b, MM_DISCARD, NULL, argv[STREAM], NULL, argv[UNSUPPORTED])
               : discard_buffer(b, argv[STREAM], NULL, MM_DEFER_NO);
}

const char mm_discard_prefetch_doc[] =
    "discard_prefetch($self, location, *, stream=None, defer=None, unsupported='raise')\n--\n\n"
    "Discard the contents and populate the pages at a Device or Host, in stream order.\n"
    "\n"
    "Use it for a buffer that will be overwritten there. Pages that the buffer fills only in part\n"
    "are prefetched first, with their contents. With unsupported=\"skip\" the call returns 1 and\n"
    "does nothing if managedmem.discard_prefetch() passes over the buffer, and otherwise returns\n"
    "0; by default it returns None. Raises as managedmem.discard_prefetch() does. Safe from every\n"
    "thread; releases the GIL.\n"
    "Driver: cuMemDiscardAndPrefetchBatchAsync, cuMemPrefetchAsync.";

PyObject *
mm_buffer_discard_prefetch(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames)
{
    enum { LOCATION, STREAM, DEFER, UNSUPPORTED, ARGC };
    static mm_signature signature = {.doc = mm_discard_prefetch_doc};
    mm_buffer *b = mm_buffer_of(op);
    CUmemLocation location;
    PyObject *argv[ARGC];
    mm_defer defer;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    if (argv[UNSUPPORTED] != NULL) {
        return call_targets(b, MM_DISCARD_PREFETCH, argv[LOCATION], argv[STREAM], argv[DEFER],
                            argv[UNSUPPORTED]);
    }
    if (mm_buffer_check_open(b) < 0 || mm_read_location(b->state, argv[LOCATION], &location) < 0
        || mm_read_defer(b->state, argv[DEFER], &defer) < 0
        || mm_warn_of_place(b->size, location) < 0) {
        return NULL;
    }
    return discard_buffer(b, argv[STREAM], &location, defer);
}

/* --- copies ----------------------------------------------------------------------------- */

/* The other side of a copy: a ManagedBuffer, or memory of another library. */
typedef struct {
    mm_range range;
    int device; /* the device that owns a ManagedBuffer from a device pool; else MM_ANY_DEVICE */
    mm_buffer *buffer; /* a ManagedBuffer, which must be entered; else NULL */
    CUstream producer; /* the stream in the interface of an array; else NULL */
    PyObject *export; /* keeps exported memory, or the owner of a buffer, alive; or NULL */
} other_side;

/* ValueError for unequal sizes, and for ranges that overlap without being the same, because the
 * driver copies in no defined order. */
static int
check_sides(const mm_buffer *b, mm_range other)
{
    CUdeviceptr gap = b->start > other.start ? b->start - other.start : other.start - b->start;

    if (other.size != b->size) {
        PyErr_Format(PyExc_ValueError,
                     "cannot copy: the buffer has %zu bytes, the other side has %zu", b->size,
                     other.size);
        return -1;
    }
    if (gap > 0 && gap < other.size) {
        PyErr_Format(PyExc_ValueError,
                     "cannot copy: source and destination share %zu of their %zu bytes; copy the "
                     "source first, with copy_to() without a destination",
                     other.size - (size_t)gap, other.size);
        return -1;
    }
    return 0;
}

static int
read_other_side(mm_buffer *b, PyObject *value, bool writable, other_side *o)
{
    mm_foreign side;

    assert(b->state != NULL);
    if (mm_read_copied(b->state, value, writable, b->dtype->itemsize == 1, &side) < 0) {
        return -1;
    }
    o->buffer = mm_is_buffer(b->state, value) ? mm_buffer_of(value) : NULL;
    o->device = o->buffer ? o->buffer->memory->device : MM_ANY_DEVICE;
    o->range = side.range;
    o->producer = side.producer;
    o->export = side.export;
    if (check_sides(b, o->range) < 0) {
        Py_CLEAR(o->export);
        return -1;
    }
    return 0;
}

/* Makes the stream of the copy wait for the producer's work on the array. */
static int
follow_producer(const mm_buffer_use *use, const other_side *other, mm_device_stream stream,
                const mm_pointer_attributes *attributes, mm_status *st)
{
    bool known = attributes->device >= 0 && attributes->device < use->cu->device_count;
    mm_device_stream producer = {other->producer, known ? attributes->device : MM_ANY_DEVICE};

    return producer.handle == NULL ? 0 : mm_stream_follow(use->cu, stream, producer, st);
}

static int
copy_with_hints(const mm_buffer_use *use, CUdeviceptr to, CUdeviceptr from,
                const mm_copy_hints *hints, mm_device_stream stream, mm_status *st)
{
    size_t size = use->range.size;
    mm_copy_options options = {stream, hints->options.order, hints->options.flags};

    return mm_copy_hinted(use->cu, (mm_transfer){{to, size, to}, hints->to},
                          (mm_transfer){{from, size, from}, hints->from}, &options, st);
}

/* Queues the copy, and waits for it if the memory of a side is transient. A default stream is that
 * of the device that owns the buffer or, if none does, the other side. */
static int
copy_entered(const mm_buffer_use *use, const other_side *other, bool to_other,
             const mm_copy_hints *hints, CUstream handle, mm_status *st)
{
    CUdeviceptr to = to_other ? other->range.start : use->range.start;
    CUdeviceptr from = to_other ? use->range.start : other->range.start;
    bool own_device = use->memory->device != MM_ANY_DEVICE;
    mm_device_stream stream = {handle, own_device ? use->memory->device : other->device};
    bool is_known = mm_memory_is_known(use->memory);
    mm_pointer_attributes attributes, own;
    bool transient;

    assert(other->range.size == use->range.size);
    if (use->range.size == 0) {
        return 0;
    }
    if (mm_pointer_query(use->cu, other->range.start, &attributes, st) < 0
        || follow_producer(use, other, stream, &attributes, st) < 0
        || (!is_known && mm_pointer_query(use->cu, use->range.start, &own, st) < 0)) {
        return -1;
    }
    transient = mm_is_transient(&attributes, other->range.start)
                || (!is_known && mm_is_transient(&own, use->range.start));
    return hints->given && !transient && to != from
               ? copy_with_hints(use, to, from, hints, stream, st)
               : mm_copy(use->cu, to, from, use->range.size, stream, transient, st);
}

/* Enters the buffer, the stream and the other side; after a failure none of them is entered. */
static int
enter_copy(mm_buffer *b, const mm_stream_use *stream, const other_side *other, mm_buffer_use *use)
{
    assert(other->range.size == b->size);
    if (mm_buffer_enter(b, MM_COPY, stream, use) < 0) {
        return -1;
    }
    if (other->buffer != NULL && !mm_guard_enter(&other->buffer->memory->guard)) { /* raced */
        mm_buffer_leave(use);
        return mm_buffer_raise_closed(other->buffer);
    }
    return 0;
}

static PyObject *
copy_while_held(mm_buffer *b, PyObject *value, PyObject *stream_object, const mm_copy_hints *hints,
                bool to_other)
{
    mm_stream_use stream;
    mm_buffer_use use;
    other_side other;
    mm_status st;
    int rc;

    if (read_other_side(b, value, to_other, &other) < 0) {
        return NULL;
    }
    if (mm_stream_read(b->state, stream_object, &stream) < 0
        || enter_copy(b, &stream, &other, &use) < 0) {
        Py_XDECREF(other.export);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = copy_entered(&use, &other, to_other, hints, stream.handle, &st);
    if (other.buffer != NULL) {
        mm_guard_leave(&other.buffer->memory->guard);
    }
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    Py_XDECREF(other.export);
    return mm_none_or_raise(b->state, rc, &st);
}

static PyObject *
copy_contents(mm_buffer *b, PyObject *value, PyObject *stream_object, const mm_copy_hints *hints,
              bool to_other)
{
    PyObject *held, *done;

    if (mm_buffer_check_open(b) < 0
        || (!to_other && mm_refuse_read_only((PyObject *)b, MM_CANNOT_WRITE) < 0)
        || mm_check_copied(b, &held) < 0) {
        return NULL;
    }
    done = copy_while_held(b, value, stream_object, hints, to_other);
    Py_XDECREF(held);
    return done;
}

const char mm_copy_from_doc[] =
    "copy_from($self, src, *, stream=None, options=None)\n--\n\n"
    "Copy the bytes of src into the buffer, in stream order.\n"
    "\n"
    "src is a ManagedBuffer, even of a pool or another device, or an object that shows its\n"
    "memory, such as an array of another library, a NumPy array or bytes. It must be\n"
    "C-contiguous, of the same size in bytes and, unless the dtype of the buffer has one byte, in\n"
    "the byte order of this machine (else ValueError). It must not overlap the buffer unless both\n"
    "are the same range (else ValueError). A copy from or to system memory, and from an array of\n"
    "numpy(copy=True), is complete when the call returns; other sources must live until the\n"
    "stream has copied. The stream's device needs access to pool memory on either side (else\n"
    "CUDAError). The default stream is that of the device whose pool holds the buffer, or else\n"
    "the source; otherwise that of the current device. A copy from an array waits for the stream\n"
    "in its interface. Raises RuntimeError when closed. Safe from every thread.\n"
    "\n"
    "options are the hints of copy(): a dict, or an object with these attributes, such as cuda.core's\n"
    "CopyOptions: src_access_order, src_location_hint, dst_location_hint, and overlap_mode, \"default\" or\n"
    "\"prefer_overlap_with_compute\". TypeError for other objects, ValueError for other values.\n"
    "Driver: cuMemcpyAsync, cuEventRecord, cuStreamWaitEvent; with options as copy().";

PyObject *
mm_buffer_copy_from(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SRC, STREAM, OPTIONS, ARGC };
    static mm_signature signature = {.doc = mm_copy_from_doc};
    mm_copy_hints hints;
    PyObject *argv[ARGC];

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_copy_hints(mm_buffer_of(op)->state, argv[OPTIONS], &hints) < 0) {
        return NULL;
    }
    return copy_contents(mm_buffer_of(op), argv[SRC], argv[STREAM], &hints, false);
}

/* A buffer with the layout of b over the memory of an object that another library's resource
 * allocated. The object is the owner, and frees the memory when it is released. */
static PyObject *
wrap_like(mm_buffer *b, PyObject *resource, PyObject *allocated)
{
    mm_layout layout = mm_buffer_layout(b);
    PyObject *buffer = NULL;
    mm_memory *memory;
    mm_foreign side;
    mm_status st;

    if (mm_read_foreign(b->state, allocated, true, &side) < 0) {
        return NULL;
    }
    if (!side.dense || side.range.size < b->size) {
        PyErr_Format(PyExc_TypeError, "%R.allocate(%zu) must return a buffer of that size, got %R",
                     resource, b->size, allocated);
    } else if (side.range.size > 0 && side.read_only) {
        PyErr_Format(PyExc_TypeError,
                     "%R.allocate(%zu) must return a buffer that can be written, got %R", resource,
                     b->size, allocated);
    } else if ((memory = mm_memory_wrap(side.range.start, b->size, &st)) == NULL) {
        (void)mm_raise(b->state, &st);
    } else {
        buffer = mm_buffer_new(
            b->state, b->state->buffer_type, memory, &layout,
            side.export && PyMemoryView_Check(side.export) ? side.export : allocated, resource);
    }
    Py_XDECREF(side.export);
    return buffer;
}

static PyObject *
allocate_foreign_like(mm_buffer *b, PyObject *resource, PyObject *stream)
{
    PyObject *allocated = mm_foreign_resource_allocate(b->state, resource, b->size, stream);
    PyObject *buffer;
    mm_layout layout = mm_buffer_layout(b);

    if (allocated == NULL) {
        return NULL;
    }
    buffer = mm_is_buffer(b->state, allocated) && mm_buffer_of(allocated)->size == b->size
                 ? mm_buffer_view(mm_buffer_of(allocated), 0, &layout)
                 : wrap_like(b, resource, allocated);
    Py_DECREF(allocated);
    return buffer;
}

/* A new buffer with the layout of b, from its resource if it has one. */
static PyObject *
new_like(mm_buffer *b, PyObject *stream)
{
    PyObject *resource = mm_buffer_resource(b), *buffer;
    mm_layout layout = mm_buffer_layout(b);

    if (resource != NULL && !mm_is_resource(b->state, resource)) {
        buffer = allocate_foreign_like(b, resource, stream);
    } else {
        buffer = mm_allocate(b->state, resource, stream, b->size, &layout,
                             &(mm_placement){.attach = CU_MEM_ATTACH_GLOBAL});
    }
    Py_XDECREF(resource);
    assert(buffer == NULL || mm_buffer_of(buffer)->size == b->size);
    return buffer;
}

const char mm_copy_to_doc[] =
    "copy_to($self, dst=None, *, stream=None, options=None)\n--\n\n"
    "Copy the bytes of the buffer to dst, in stream order, and return dst.\n"
    "\n"
    "dst=None allocates a new buffer of the same dtype and shape from the same resource; a pool\n"
    "allocates on the same stream. A resource of another library is called as allocate(size,\n"
    "stream=stream); its result is the owner of the new buffer. Any other dst is like src in\n"
    "copy_from(), but writable; options, errors and threads are the same. A copy to page-locked\n"
    "memory runs at the speed of the link. A copy from or to system memory, and to an array of\n"
    "numpy(copy=True), is complete when the call returns; a copy to other memory is complete when\n"
    "the stream has made it. Driver: cuMemcpyAsync.";

PyObject *
mm_buffer_copy_to(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { DST, STREAM, OPTIONS, ARGC };
    static mm_signature signature = {.doc = mm_copy_to_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[ARGC], *dst, *done;
    mm_copy_hints hints;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_copy_hints(b->state, argv[OPTIONS], &hints) < 0
        || mm_buffer_check_open(b) < 0) {
        return NULL;
    }
    dst = argv[DST] == NULL || argv[DST] == Py_None ? new_like(b, argv[STREAM])
                                                    : Py_NewRef(argv[DST]);
    done = dst ? copy_contents(b, dst, argv[STREAM], &hints, true) : NULL;
    if (done == NULL) {
        Py_XDECREF(dst);
        return NULL;
    }
    Py_DECREF(done);
    return dst;
}

PyObject *
mm_buffer_finished_copy(PyObject *op)
{
    PyObject *copy = mm_buffer_copy_to(op, NULL, 0, NULL);
    mm_state *state = mm_buffer_of(op)->state;
    mm_driver *cu = copy ? mm_open(state) : NULL;
    mm_status st;
    int rc;

    if (cu == NULL) {
        Py_XDECREF(copy);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_synchronize(cu, (mm_device_stream){NULL, mm_buffer_of(copy)->memory->device},
                               &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        Py_DECREF(copy);
        return mm_raise(state, &st);
    }
    return copy;
}

const char mm_deepcopy_doc[] =
    "__deepcopy__($self, memo, /)\n--\n\n"
    "For copy.deepcopy(): the same as __copy__(), which copies the memory.";

const char mm_copy_doc[] =
    "__copy__($self, /)\n--\n\n"
    "For copy.copy(): a new ManagedBuffer with the same contents, shape and dtype.\n"
    "\n"
    "The copy is from the same resource; a copy of a view has only the bytes of the view. Advice\n"
    "and owner are not copied. The copy follows the work on the default stream and is complete\n"
    "when the call returns; copy_to() copies in the order of a stream. Raises as copy_to() does.\n"
    "Safe from every thread.\n"
    "Driver: cuMemcpyAsync, cuStreamSynchronize.";

PyObject *
mm_buffer_copy(PyObject *op, PyObject *Py_UNUSED(none_or_memo))
{
    return mm_buffer_finished_copy(op);
}

/* --- fill ------------------------------------------------------------------------------- */

/* Reads an int of one byte, or an object of 1, 2 or 4 bytes. *width is the number of bytes. */
static int
read_pattern(PyObject *value, size_t size, unsigned char pattern[4], unsigned *width)
{
    long long number = -1;
    Py_buffer view;

    if (PyObject_CheckBuffer(value)) {
        if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0) {
            return -1;
        }
        *width = view.len > 4 ? 0 : (unsigned)view.len;
        memcpy(pattern, view.buf, *width);
        PyBuffer_Release(&view);
        if (*width == 0 || *width == 3 || size % *width != 0) {
            PyErr_Format(PyExc_ValueError,
                         "a pattern has 1, 2 or 4 bytes, and fits the %zu bytes of the buffer a "
                         "whole number of times; got %R",
                         size, value);
            return -1;
        }
        return 0;
    }
    if (PyBool_Check(value) || !PyIndex_Check(value)) {
        PyErr_Format(
            PyExc_TypeError,
            "fill() takes an int from 0 to 255 for every byte, or 1, 2 or 4 bytes such as "
            "numpy.float32(1.5), got %R",
            value);
        return -1;
    }
    if (mm_read_index(value, "value", PyExc_TypeError, &number) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear(); /* ValueError: an int beyond 64 bits, which exceeds a byte too */
        number = -1;
    }
    if (number < 0 || number > 255) {
        PyErr_Format(
            PyExc_OverflowError,
            "value must be in 0 to 255, got %R: fill() sets each byte; pass a wider value "
            "as its bytes, as in fill(numpy.uint16(300))",
            value);
        return -1;
    }
    pattern[0] = (unsigned char)number;
    *width = 1;
    return 0;
}

/* ValueError unless wrapped memory is writable, and known to the driver or vouched for. */
static int
check_filled(PyObject *op, PyObject **held)
{
    return mm_refuse_read_only(op, "cannot be filled: it is read-only") < 0
                   || mm_check_copied(mm_buffer_of(op), held) < 0
               ? -1
               : 0;
}

const char mm_fill_doc[] =
    "fill($self, value, *, stream=None)\n--\n\n"
    "Fill the buffer with a byte or a pattern, in stream order.\n"
    "\n"
    "value is an int in 0 to 255 (else OverflowError), or 1, 2 or 4 bytes whose number divides the size\n"
    "(else ValueError). Raises RuntimeError when closed, or when the memory is attached to the host or to\n"
    "another stream and the device has no concurrent_managed_access (see attach()). Safe from every thread.\n"
    "Driver: cuMemsetD8Async, cuMemsetD16Async, cuMemsetD32Async.";

PyObject *
mm_buffer_fill(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_fill_doc};
    mm_buffer *b = mm_buffer_of(op);
    mm_stream_use stream;
    unsigned char pattern[4] = {0};
    mm_buffer_use use;
    PyObject *argv[2], *held = NULL;
    unsigned width;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_buffer_check_open(b) < 0 || (!b->memory->owned && check_filled(op, &held) < 0)) {
        return NULL;
    }
    if (read_pattern(argv[0], b->size, pattern, &width) < 0
        || mm_stream_read(b->state, argv[1], &stream) < 0
        || mm_buffer_enter(b, MM_COPY, &stream, &use) < 0) {
        Py_XDECREF(held);
        return NULL;
    }
    assert(width > 0 && b->size % width == 0);
    Py_BEGIN_ALLOW_THREADS
    rc = mm_fill(use.cu, use.range, &use.memory->attachment, pattern, width,
                 (mm_device_stream){stream.handle, use.memory->device}, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    Py_XDECREF(held);
    return mm_none_or_raise(b->state, rc, &st);
}
