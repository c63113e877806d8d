/* copies.c: reading the sides and the hints of copies, for the methods of a buffer too, and
 * managedmem.copy(). */
#include "copies.h"

#include "../memory/result_blocks.h"
#include "foreign_location.h"
#include "targets.h"

/* --- sides ------------------------------------------------------------------------------ */

static int
check_foreign_side(PyObject *value, bool writable, bool bytes, const mm_foreign *side)
{
    if (side->objects) {
        return mm_refuse_foreign(PyExc_ValueError, value, MM_PYTHON_OBJECTS);
    }
    if (side->swapped && !bytes) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "has elements of the other byte order, and a copy of their bytes "
                                 "would change their values: convert it, as "
                                 "array.astype(array.dtype.newbyteorder(\"=\")) does");
    }
    if (side->lazy) {
        return mm_refuse_foreign(PyExc_ValueError, value, MM_LAZY_TENSOR);
    }
    if (side->strided) {
        return mm_refuse_foreign(
            PyExc_ValueError, value,
            writable ? "cannot be written: it is not C-contiguous; copy into memory "
                       "that is, and from there"
                     : "cannot be copied: it is not C-contiguous; make a copy that "
                       "is, as numpy.ascontiguousarray() does");
    }
    return writable && side->read_only
               ? mm_refuse_foreign(PyExc_ValueError, value, MM_CANNOT_WRITE)
               : 0;
}

int
mm_read_copied(mm_state *state, PyObject *value, bool writable, bool bytes, mm_foreign *side)
{
    assert(!PyErr_Occurred());
    if (mm_is_buffer(state, value)) {
        mm_buffer *b = mm_buffer_of(value);
        *side = (mm_foreign){.range = {.start = b->start, .size = b->size}, .dense = true};
        return mm_buffer_check_open(b) < 0
                       || (writable && mm_refuse_read_only(value, MM_CANNOT_WRITE) < 0)
                   ? -1
                   : mm_check_copied(b, &side->export);
    }
    if (mm_read_foreign(state, value, true, side) < 0) {
        return -1;
    }
    if (check_foreign_side(value, writable, bytes, side) < 0
        || mm_check_foreign_copied(state, side) < 0) {
        Py_CLEAR(side->export);
        return -1;
    }
    return 0;
}

/* Reads all sources, or all destinations. Many are in one allocation, which is queried once. */
typedef struct {
    bool writable;
    mm_pointer_attributes known; /* the last answer of the driver */
} side_reader;

/* Stores the start of the allocation around a side in the range. It stays 0 for transient memory. */
static int
find_side_allocation(mm_targets *t, side_reader *reader, mm_range *range, int *device)
{
    mm_pointer_attributes *found = &reader->known;
    mm_status st;

    if (range->start - found->start >= found->size
        && mm_pointer_query(t->cu, range->start, found, &st) < 0) {
        (void)mm_raise(t->state, &st);
        return -1;
    }
    if (!mm_is_transient(found, range->start)) {
        range->allocation = found->start != 0 ? found->start : range->start;
    }
    *device =
        found->device >= 0 && found->device < t->cu->device_count ? found->device : MM_ANY_DEVICE;
    return 0;
}

static int
read_side(mm_targets *t, PyObject *value, void *context, mm_target *side, int *device)
{
    side_reader *reader = context;
    mm_memory *memory = mm_is_buffer(t->state, value) ? mm_buffer_of(value)->memory : NULL;

    if (mm_read_copied(t->state, value, reader->writable, false, side) < 0) {
        return -1;
    }
    if (memory != NULL) {
        side->range.allocation = atomic_load_explicit(&memory->allocation, memory_order_relaxed);
        if (side->range.allocation == 0 && memory->owned) {
            side->range.allocation = memory->start;
        }
    }
    if (side->range.size > 0 && side->range.allocation == 0
        && find_side_allocation(t, reader, &side->range, device) < 0) {
        Py_CLEAR(side->export);
        return -1;
    }
    return 0;
}

/* --- hints ------------------------------------------------------------------------------ */

/* Finds a str among names; ValueError for other objects. */
static int
read_name(PyObject *value, const char *label, const char *const *names, unsigned count,
          const char *told, unsigned *out)
{
    for (unsigned i = 0; PyUnicode_Check(value) && i < count; i++) {
        if (PyUnicode_CompareWithASCIIString(value, names[i]) == 0) {
            *out = i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s must be %s, got %R", label, told, value);
    return -1;
}

/* Reads an access order. NULL means "stream". */
static int
read_order(PyObject *value, const char *label, CUmemcpySrcAccessOrder *out)
{
    static const char *const names[] = {"stream", "during_api_call", "any"};
    unsigned found = 0;

    if (value != NULL
        && read_name(value, label, names, 3, "\"stream\", \"during_api_call\" or \"any\"", &found)
               < 0) {
        return -1;
    }
    *out = (CUmemcpySrcAccessOrder)(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM + (int)found);
    return 0;
}

/* Reads an overlap mode. The index of its name is the flag: CU_MEMCPY_FLAG_DEFAULT is 0,
 * CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE is 1. */
static int
read_overlap(PyObject *value, unsigned *flags)
{
    static const char *const names[] = {"default", "prefer_overlap_with_compute"};

    return value == NULL ? 0
                         : read_name(value, "overlap_mode", names, 2,
                                     "\"default\" or \"prefer_overlap_with_compute\"", flags);
}

static int
read_hint(mm_state *state, PyObject *value, const char *name, CUmemLocation *out)
{
    if (value == NULL || mm_read_location(state, value, out) == 0) {
        return 0;
    }
    mm_name_item(name, -1);
    return -1;
}

int
mm_read_copy_hints(mm_state *state, PyObject *options, mm_copy_hints *hints)
{
    enum { ORDER, FROM, TO, OVERLAP, COUNT };
    static const char *const names[] = {"src_access_order", "src_location_hint",
                                        "dst_location_hint", "overlap_mode"};
    PyObject *values[COUNT];
    int rc;

    *hints = (mm_copy_hints){.options.order = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    if (options == NULL || options == Py_None) {
        return 0;
    }
    if (mm_read_options(options, names, COUNT, values) < 0) {
        return -1;
    }
    rc = read_order(values[ORDER], names[ORDER], &hints->options.order) < 0
                 || read_hint(state, values[FROM], names[FROM], &hints->from) < 0
                 || read_hint(state, values[TO], names[TO], &hints->to) < 0
                 || read_overlap(values[OVERLAP], &hints->options.flags) < 0
             ? -1
             : 0;
    for (size_t i = 0; i < COUNT; i++) {
        Py_XDECREF(values[i]);
    }
    hints->given = hints->options.order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
                   || hints->options.flags != 0 || hints->from.type != CU_MEM_LOCATION_TYPE_NONE
                   || hints->to.type != CU_MEM_LOCATION_TYPE_NONE;
    return rc;
}

/* Reads one location for all targets, one for each, or none. */
static int
read_side_locations(mm_targets *t, PyObject *value, const char *name)
{
    if (value != NULL && value != Py_None) {
        if (mm_targets_read_locations(t, value) < 0) {
            mm_name_item(name, -1);
            return -1;
        }
        return 0;
    }
    for (size_t i = 0; i < t->batch.count; i++) {
        t->batch.transfers[i].location = mm_location(CU_MEM_LOCATION_TYPE_NONE, 0);
    }
    return 0;
}

/* --- managedmem.copy() -------------------------------------------------------------------- */

typedef struct {
    mm_targets from, to;
    mm_copy_options options;
    mm_stream_use stream;
} copy_call;

/* The device that owns the first target from a device pool: its default stream does the work. */
static int
pool_device(const mm_targets *t)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(t->items); i++) {
        PyObject *item = PyTuple_GetItem(t->items, i);
        if (mm_is_buffer(t->state, item) && mm_buffer_of(item)->memory->device != MM_ANY_DEVICE) {
            return mm_buffer_of(item)->memory->device;
        }
    }
    return MM_ANY_DEVICE;
}

enum { SOURCES, DESTINATIONS, STREAM, ORDER, SRC_LOCATION, DST_LOCATION, ARGC };

/* Reads the other arguments once both sides are read. */
static int
read_rest(copy_call *call, PyObject *const argv[ARGC])
{
    int device;

    if (call->from.batch.count != call->to.batch.count) {
        PyErr_Format(PyExc_ValueError,
                     "sources has length %zu, and destinations %zu: pass one destination for each "
                     "source",
                     call->from.batch.count, call->to.batch.count);
        return -1;
    }
    if (read_order(argv[ORDER], "order", &call->options.order) < 0
        || read_side_locations(&call->from, argv[SRC_LOCATION], "src_location") < 0
        || read_side_locations(&call->to, argv[DST_LOCATION], "dst_location") < 0
        || mm_stream_read(call->from.state, argv[STREAM], &call->stream) < 0) {
        return -1;
    }
    device = pool_device(&call->to);
    device = device != MM_ANY_DEVICE ? device : pool_device(&call->from);
    call->options.flags = 0;
    call->options.stream = (mm_device_stream){call->stream.handle, device};
    return 0;
}

static int
copy_sides(const copy_call *call, mm_status *st)
{
    mm_copies copies;
    int rc = mm_copies_init(&copies, call->from.cu, &call->from.batch, &call->to.batch,
                            &call->options, st);

    if (rc == 0 && copies.count > 0) {
        rc = mm_targets_follow(&call->from, call->options.stream, st) < 0
                     || mm_targets_follow(&call->to, call->options.stream, st) < 0
                 ? -1
                 : mm_copies_issue(&copies, st);
    }
    mm_copies_free(&copies);
    return rc;
}

static int
run_copies(copy_call *call, mm_status *st)
{
    int rc = mm_targets_enter(&call->from, &call->stream, st);

    if (rc < 0) {
        return -1;
    }
    rc = mm_targets_enter(&call->to, NULL, st);
    if (rc < 0) { /* raced */
        mm_targets_leave(&call->from);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = copy_sides(call, st);
    mm_targets_leave(&call->to);
    mm_targets_leave(&call->from);
    Py_END_ALLOW_THREADS
    return rc;
}

const char mm_copy_function_doc[] =
    "copy(sources, destinations, *, stream=None, order='stream', src_location=None,\n"
    "     dst_location=None)\n"
    "--\n\n"
    "Copy the bytes of several buffers or arrays, in stream order.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "sources, destinations : target or sequence of targets\n"
    "    What ManagedBuffer.copy_from() and copy_to() take. Each source has the size of its\n"
    "    destination. A destination overlaps no other destination and no source: copies of one\n"
    "    call have no order.\n"
    "stream : Stream, object with __cuda_stream__, int, or None\n"
    "    The stream to work in. None is the default stream of a device: of the first one whose\n"
    "    pool holds a destination, else of the first one whose pool holds a source, else of the\n"
    "    current one.\n"
    "order : \"stream\", \"during_api_call\" or \"any\"\n"
    "    When the sources are read: after the earlier work of the stream; before the call returns; or at\n"
    "    any time until the copy is done. With the last two, no earlier work may be writing them.\n"
    "src_location, dst_location : Device or Host, or an iterable with one for each pair\n"
    "    Where the pages of managed memory are, which the driver does not look up for a copy. No hint\n"
    "    moves pages, and a wrong one costs time only. None is no hint.\n"
    "\n"
    "Pairs whose memory is adjacent on both sides become one. Small copies share one driver call,\n"
    "which passes on the locations and the order. Before CUDA 12.8, in a graph, with system\n"
    "memory, and where a device lacks concurrent_managed_access, each copy has a driver call of\n"
    "its own, which passes on neither; with \"during_api_call\" the function then waits for the\n"
    "copies. If no locations and no order are given, copies of 1 MiB or more and copies on the\n"
    "legacy default stream have calls of their own, too. Copies of system memory are complete\n"
    "when the call returns, like those of copy_from().\n"
    "\n"
    "Raises TypeError or ValueError for bad arguments before anything is copied; CUDAError when\n"
    "the driver refuses a copy, and other copies may have been made by then. Safe from every\n"
    "thread; releases the GIL.\n"
    "Driver: cuMemcpyBatchAsync, cuMemcpyWithAttributesAsync, cuMemcpyAsync.";

PyObject *
mm_copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_copy_function_doc};
    mm_state *state = mm_module_state(module);
    side_reader sources = {.writable = false}, destinations = {.writable = true};
    PyObject *argv[ARGC];
    copy_call call;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_targets_read_by(state, argv[SOURCES], "sources", read_side, &sources, &call.from)
               < 0) {
        return NULL;
    }
    if (mm_targets_read_by(state, argv[DESTINATIONS], "destinations", read_side, &destinations,
                           &call.to)
        < 0) {
        mm_targets_release(&call.from);
        return NULL;
    }
    if (read_rest(&call, argv) < 0) {
        mm_targets_release(&call.from);
        mm_targets_release(&call.to);
        return NULL;
    }
    rc = run_copies(&call, &st);
    mm_targets_release(&call.from);
    mm_targets_release(&call.to);
    return mm_none_or_raise(state, rc, &st);
}
