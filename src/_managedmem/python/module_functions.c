/* module_functions.c: advise, prefetch, discard and discard_prefetch on one target or many;
 * empty() and is_managed(); selecting and describing the driver; presets for other libraries'
 * allocators. All arguments are read and checked before the first call that changes anything. */
#include "module_functions.h"

#include <string.h>

#include "../memory/allocator.h"
#include "../memory/unsupported.h"

#include "copies.h"
#include "foreign_location.h"
#include "location_set.h"
#include "oversubscription.h"
#include "resource.h"
#include "targets.h"

PyDoc_STRVAR(
    prefetch_doc,
    "prefetch(targets, location, *, stream=None, dispatch='auto', defer=None, unsupported='raise')\n"
    "--\n\n"
    "Move memory to a location before it is used there, in stream order.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : target or sequence of targets\n"
    "    As for advise().\n"
    "location : Device or Host, or an iterable with one for each target\n"
    "    The destination of the pages.\n"
    "stream : Stream, object with __cuda_stream__, int, or None\n"
    "    The stream to work in; None is the default stream.\n"
    "dispatch : \"auto\", \"batch\" or \"loop\"\n"
    "    How several targets reach the driver; \"auto\" chooses the fastest call for each.\n"
    "defer : bool, optional\n"
    "    True queues an empty host function in front, so that the call returns while the stream does\n"
    "    the work; None queues one for large prefetches.\n"
    "unsupported : \"raise\" or \"skip\"\n"
    "    \"skip\" passes over the targets that cannot be prefetched here: memory that is not managed, and\n"
    "    prefetches that the driver refuses because a device lacks concurrent_managed_access. With\n"
    "    dispatch=\"batch\", it passes over all targets where there is no batch call.\n"
    "\n"
    "Returns None; with unsupported=\"skip\" the number of targets that were passed over.\n"
    "\n"
    "Neighbouring ranges of one allocation are merged. Where targets overlap or share a page, the\n"
    "last one given wins. Raises TypeError or ValueError for bad arguments before anything moves;\n"
    "CUDAError with code 900 for a stream that captures a graph, and the graph stays intact;\n"
    "NotImplementedError for dispatch=\"batch\" before CUDA 13.0. Safe from every thread;\n"
    "releases the GIL. A device that the process has not used gets its primary context, without\n"
    "which nothing would move.\n"
    "Driver: cuMemPrefetchAsync, cuMemPrefetchBatchAsync; cuDevicePrimaryCtxRetain once per\n"
    "device.");

static PyObject *
module_prefetch(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = prefetch_doc};
    PyObject *argv[MM_CALL_ARGC];

    return mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
               ? NULL
               : mm_run_on_targets(mm_module_state(module), MM_PREFETCH, argv);
}

PyDoc_STRVAR(
    discard_doc,
    "discard(targets, *, stream=None, dispatch='auto', unsupported='raise')\n--\n\n"
    "Discard contents, in stream order, so that they need not be moved.\n"
    "\n"
    "The contents are undefined until they are written; write only after a prefetch or\n"
    "discard_prefetch. Only whole pages inside each target are discarded: bytes on the pages at its\n"
    "ends may stay, and neighbours never lose a byte. targets, stream and dispatch are as for\n"
    "prefetch(). The discard waits for work on the stream that the __cuda_array_interface__ of an\n"
    "array names. System memory needs pageable_memory_access of every device.\n"
    "\n"
    "unsupported=\"skip\" passes over memory that is not managed and targets without a whole page; and over\n"
    "all targets before CUDA 13.0, or if a device lacks concurrent_managed_access.\n"
    "\n"
    "Returns None; with unsupported=\"skip\" the number of targets that were passed over.\n"
    "\n"
    "Raises ValueError for a target that has no whole page, has gaps, or is read-only,\n"
    "NotImplementedError before CUDA 13.0. Other errors are those of prefetch(). Safe from every\n"
    "thread. Driver: cuMemDiscardBatchAsync, cuEventRecord, cuStreamWaitEvent.");

static PyObject *
module_discard(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { DISCARD_TARGETS, DISCARD_STREAM, DISCARD_DISPATCH, DISCARD_UNSUPPORTED, ARGC };
    static mm_signature signature = {.doc = discard_doc};
    PyObject *argv[ARGC];

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    return mm_run_on_targets(
        mm_module_state(module), MM_DISCARD,
        (PyObject *[MM_CALL_ARGC]){[MM_CALL_TARGETS] = argv[DISCARD_TARGETS],
                                   [MM_CALL_STREAM] = argv[DISCARD_STREAM],
                                   [MM_CALL_DISPATCH] = argv[DISCARD_DISPATCH],
                                   [MM_CALL_UNSUPPORTED] = argv[DISCARD_UNSUPPORTED]});
}

PyDoc_STRVAR(
    discard_prefetch_doc,
    "discard_prefetch(targets, location, *, stream=None, dispatch='auto', defer=None,\n"
    "                 unsupported='raise')\n"
    "--\n\n"
    "Discard contents and populate the pages at a location, in stream order.\n"
    "\n"
    "Use it for a buffer that will be overwritten there: pages move without their bytes. The\n"
    "pages at the ends that a target shares with its neighbours are prefetched first, with their\n"
    "contents; when that fails, nothing is discarded. When the discard itself fails, contents of\n"
    "the targets may be lost, but nothing else. Targets that share pages and have different\n"
    "locations are processed one by one, so the targets before a failure are discarded.\n"
    "Parameters, result and errors are as for prefetch() and discard(); unsupported=\"skip\"\n"
    "passes over the same targets as discard() does, even where they could be prefetched.\n"
    "Driver: cuMemDiscardAndPrefetchBatchAsync, cuMemPrefetchAsync.");

static PyObject *
module_discard_prefetch(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static mm_signature signature = {.doc = discard_prefetch_doc};
    PyObject *argv[MM_CALL_ARGC];

    return mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
               ? NULL
               : mm_run_on_targets(mm_module_state(module), MM_DISCARD_PREFETCH, argv);
}

/* The enumerations of cuda.bindings have the driver's values. */
static bool
is_advice_member(mm_state *state, PyObject *value)
{
    return PyLong_Check(value) && !PyLong_CheckExact(value)
           && (mm_is_instance(state, value, "cuda", "CUmem_advise")
               || mm_is_instance(state, value, "cuda", "cudaMemoryAdvise"));
}

static int
read_advice(mm_state *state, PyObject *value, CUmem_advise *out)
{
    const char *name = mm_read_text(value);

    *out = (CUmem_advise)0;
    if (is_advice_member(state, value)) {
        int overflow;
        long number = PyLong_AsLongAndOverflow(value, &overflow); /* -1 if it overflows */
        bool known =
            number >= CU_MEM_ADVISE_SET_READ_MOSTLY && number <= CU_MEM_ADVISE_UNSET_ACCESSED_BY;
        *out = known ? (CUmem_advise)number : (CUmem_advise)0;
    } else if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError,
                     "advice must be a str, one of " MM_ADVICE_NAMES
                     ", or a CUmem_advise of cuda.bindings; got %R",
                     value);
        return -1;
    } else if (name != NULL) {
        *out = mm_advice_from_name(name);
    }
    if (*out == 0) {
        PyErr_Format(PyExc_ValueError, "there is no advice %R; there are " MM_ADVICE_NAMES, value);
        return -1;
    }
    return 0;
}

/* Reads the locations that the advice needs, and checks that it allows them. */
static int
read_advice_locations(mm_targets *t, PyObject *location, CUmem_advise advice)
{
    bool needed = mm_advice_needs_location(advice);

    if ((needed || (location != NULL && location != Py_None))
        && mm_targets_read_locations(t, location) < 0) {
        return -1;
    }
    if (!needed) {
        /* Host(), because some drivers accept such advice with a NUMA host and do nothing
         * (conformance: ignored locations). */
        for (size_t i = 0; i < t->batch.count; i++) {
            t->batch.transfers[i].location = mm_host();
        }
        return 0;
    }
    for (size_t i = 0; mm_is_accessed_by_advice(advice) && i < t->batch.count; i++) {
        if (mm_check_accessed_by(t->batch.transfers[i].location) < 0) {
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(
    advise_doc,
    "advise(targets, advice, location=None, *, unsupported='raise')\n--\n\n"
    "Tell the driver how memory will be used.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "targets : target or sequence of targets\n"
    "    ManagedBuffers, arrays and tensors of other libraries, cuda.core Buffers and views, NumPy views of\n"
    "    managed memory. A strided array stands for all bytes from its lowest to its highest. For\n"
    "    an empty sequence nothing is done.\n"
    "advice : str, or CUmem_advise or cudaMemoryAdvise of cuda.bindings\n"
    "    \"set_read_mostly\", \"set_preferred_location\", \"set_accessed_by\", or one of these\n"
    "    with \"unset_\" in place of \"set_\".\n"
    "location : Device or Host, or an iterable with one for each target\n"
    "    Required for set_preferred_location and accessed_by advice; accessed_by takes no NUMA\n"
    "    host.\n"
    "unsupported : \"raise\" or \"skip\"\n"
    "    \"skip\" passes over the targets that cannot take the advice here: memory that is not managed,\n"
    "    pool memory where the driver refuses advice on it, and targets whose location is a\n"
    "    device without concurrent_managed_access.\n"
    "\n"
    "Returns None; with unsupported=\"skip\" the number of targets that were passed over.\n"
    "\n"
    "Advice applies to whole pages, from the one that holds the first byte to the one that holds the\n"
    "last. It takes effect at once, not in stream order. It is all or nothing: the earlier advice\n"
    "of each target is queried first, and restored when the driver fails. If the pages of one\n"
    "target differ in this advice, they keep it when the driver refuses, and lose it when the\n"
    "driver sets it and then fails; MigrationPolicy.applied() restores every page. Advice that\n"
    "was set reads back: it is repeated where the driver did not record it. Where targets share a\n"
    "page, the last one given wins.\n"
    "\n"
    "Raises TypeError or ValueError for bad arguments before anything is advised, CUDAError when the\n"
    "driver refuses. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemAdvise, cuMemRangeGetAttribute, cuMemRangeGetAttributes, cuPointerGetAttributes.");

static PyObject *
module_advise(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { ADVISE_TARGETS, ADVICE, ADVISE_LOCATION, ADVISE_UNSUPPORTED, ARGC };
    static mm_signature signature = {.doc = advise_doc};
    mm_state *state = mm_module_state(module);
    PyObject *argv[ARGC];
    CUmem_advise advice;
    mm_targets t;
    mm_status st;
    bool skips;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_unsupported(argv[ADVISE_UNSUPPORTED], &skips) < 0
        || mm_targets_read_or_skip(state, argv[ADVISE_TARGETS], MM_ADVISE, skips, &t) < 0) {
        return NULL;
    }
    if (read_advice(state, argv[ADVICE], &advice) < 0
        || read_advice_locations(&t, argv[ADVISE_LOCATION], advice) < 0
        || (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION
            && mm_warn_of_places(t.batch.transfers, t.batch.count) < 0)) {
        mm_targets_release(&t);
        return NULL;
    }
    rc = mm_targets_enter(&t, NULL, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = skips ? mm_batch_advise_or_skip(t.cu, &t.batch, advice, &t.skipped, &st)
                   : mm_batch_advise(t.cu, &t.batch, advice, &st);
        mm_targets_leave(&t);
        Py_END_ALLOW_THREADS
    }
    return mm_targets_result(&t, rc, &st);
}

PyDoc_STRVAR(
    empty_doc,
    "empty(shape, dtype='uint8', *, name=None, policy=None, prefetch=None, attach='global')\n--\n\n"
    "Allocate managed memory for an array, with undefined contents.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "shape : int or sequence of int\n"
    "    The lengths of up to 8 axes. () has one element; a length of 0 needs no memory.\n"
    "dtype : str, NumPy or torch dtype, Python type\n"
    "    The element type, such as \"float32\" or \"f4\".\n"
    "name : str, optional\n"
    "    The name of the buffer, as ManagedBuffer.name has it.\n"
    "policy : MigrationPolicy, optional\n"
    "    The advice that the memory has from the start, before anything touches it.\n"
    "prefetch : Device or Host, optional\n"
    "    Where the pages are populated, in the order of the default stream, as by\n"
    "    ManagedBuffer.prefetch(). None: each page at its first use or prefetch.\n"
    "attach : str\n"
    "    \"global\", or \"host\" for memory that only the host uses until ManagedBuffer.attach()\n"
    "    is called. This matters where a device has no concurrent_managed_access.\n"
    "\n"
    "Returns a ManagedBuffer. Raises ValueError and TypeError for bad arguments, CUDAOutOfMemoryError when\n"
    "memory runs out, CUDAError for advice or a prefetch that the driver refuses; the memory is then freed.\n"
    "Safe from every thread; releases the GIL.\n"
    "Driver: cuMemAllocManaged, cuMemAdvise, cuMemRangeGetAttributes, cuMemPrefetchAsync.");

MM_GUARD_ARRAYS static PyObject *
module_empty(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SHAPE, DTYPE, NAME, POLICY, PREFETCH, ATTACH, ARGC };
    static mm_signature signature = {.doc = empty_doc};
    mm_state *state = mm_module_state(module);
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    PyObject *argv[ARGC];
    mm_placement placement;
    const char *name;
    mm_layout layout;
    size_t bytes;

    if (nargs > 1 && PyLong_Check(args[1])) {
        PyErr_Format(PyExc_TypeError,
                     "empty() takes all lengths as one tuple, empty((%R, %R%s)): the second "
                     "argument is the dtype",
                     args[0], args[1], nargs > 2 ? ", ..." : "");
        return NULL;
    }
    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || (layout.dtype = mm_read_dtype(argv[DTYPE])) == NULL
        || mm_read_shape(argv[SHAPE], &layout, shape, &bytes) < 0
        || mm_read_name(argv[NAME], &name) < 0
        || mm_read_placement(state, argv[POLICY], argv[PREFETCH], argv[ATTACH], &placement) < 0) {
        return NULL;
    }
    return mm_buffer_named(mm_allocate(state, NULL, NULL, bytes, &layout, &placement), name);
}

PyDoc_STRVAR(
    is_managed_doc,
    "is_managed(x)\n--\n\n"
    "True if the memory of an object is CUDA managed memory.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "x : target\n"
    "    One ManagedBuffer, or one array, tensor or buffer of another library, as for advise().\n"
    "    For an address there is ManagedBuffer.from_handle(ptr, size).is_managed.\n"
    "\n"
    "Asks the driver, so it recognises memory of any origin, and touches no page. For a strided array,\n"
    "all bytes from the lowest to the highest count. False for an array without elements, which has no\n"
    "memory; for a ManagedBuffer the answer is its is_managed.\n"
    "\n"
    "Raises TypeError for an object that shows no memory, ValueError for a tensor without memory, such as a\n"
    "meta tensor, RuntimeError for a closed buffer. Safe from every thread.\n"
    "Driver: cuPointerGetAttributes.");

static PyObject *
module_is_managed(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = is_managed_doc};
    mm_state *state = mm_module_state(module);
    bool managed = false;
    mm_foreign shown;
    PyObject *argv[1];
    mm_driver *cu;
    mm_status st;
    int rc = 0;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    if (mm_is_buffer(state, argv[0])) {
        return mm_buffer_is_managed(mm_buffer_of(argv[0]), &managed) < 0
                   ? NULL
                   : PyBool_FromLong(managed);
    }
    if ((cu = mm_open(state)) == NULL || mm_read_foreign(state, argv[0], false, &shown) < 0) {
        return NULL;
    }
    if (shown.range.size > 0) {
        rc = mm_range_is_managed(cu, shown.range, &managed, &st);
    }
    Py_XDECREF(shown.export);
    return mm_raise_failure(state, rc, &st) < 0 ? NULL : PyBool_FromLong(managed);
}

/* --- the driver ------------------------------------------------------------------------- */

static PyObject *
split_lines(const char *text)
{
    PyObject *whole = PyUnicode_DecodeFSDefault(text), *lines;

    lines = whole ? PyUnicode_Splitlines(whole, 0) : NULL;
    Py_XDECREF(whole);
    return lines;
}

PyDoc_STRVAR(
    driver_info_doc,
    "_driver_info()\n--\n\n"
    "The driver in use, as a dict. Opens it if needed.\n"
    "\n"
    "path (str), version (int, 13000 is CUDA 13.0), version_string (str), emulated (bool),\n"
    "device_count (int), tried (list of str: each attempt to open a driver, with its result). Raises\n"
    "DriverNotFoundError or DriverTooOldError.");

static PyObject *
driver_info(PyObject *module, PyObject *Py_UNUSED(none))
{
    mm_driver *cu = mm_open(mm_module_state(module));
    char tried[2048];

    if (cu == NULL) {
        return NULL;
    }
    mm_driver_tried(tried, sizeof tried);
    return Py_BuildValue(
        "{s:N,s:i,s:N,s:O,s:i,s:N}", "path", PyUnicode_DecodeFSDefault(cu->path), "version",
        cu->version, "version_string",
        PyUnicode_FromFormat("%d.%d", cu->version / 1000, cu->version % 1000 / 10), "emulated",
        cu->emulated ? Py_True : Py_False, "device_count", cu->device_count, "tried",
        split_lines(tried));
}

PyDoc_STRVAR(select_driver_doc,
             "_select_driver(name, /)\n--\n\n"
             "Choose the driver before its first use: \"cuda\", \"emulator\" or a path.");

static PyObject *
select_driver(PyObject *module, PyObject *name)
{
    PyObject *path;
    const char *text;
    mm_status st;
    int rc;

    if (!PyUnicode_Check(name)) {
        PyErr_Format(PyExc_TypeError, "the driver's name must be a str, got %R", name);
        return NULL;
    }
    if (!PyUnicode_FSConverter(name, &path)) {
        return NULL;
    }
    text = PyBytes_AsString(path);
    /* Waits while another thread opens a driver. */
    Py_BEGIN_ALLOW_THREADS
    rc = mm_driver_select(text, &st);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return mm_none_or_raise(mm_module_state(module), rc, &st);
}

/* --- presets of advice with the names of exported functions ----------------------------------- */

enum { PREFERRED, ACCESSED_BY, READ_MOSTLY, OWN_DEVICE, ARGC };

static int
read_preset(mm_state *state, PyObject *const argv[ARGC], mm_preset *preset)
{
    *preset = (mm_preset){.own_device = argv[OWN_DEVICE] == Py_True};
    if (mm_read_flag(state, argv[READ_MOSTLY], "read_mostly", &preset->read_mostly) < 0
        || (argv[PREFERRED] != Py_None
            && mm_read_location(state, argv[PREFERRED], &preset->preferred) < 0)) {
        return -1;
    }
    return mm_read_members(state, argv[ACCESSED_BY], true, &preset->accessed_by);
}

static const char register_preset_doc[] =
    "_register_preset(preferred_location, accessed_by, read_mostly, own_device)\n--\n\n"
    "The names of two exported functions: one allocates memory with this advice, one frees it.\n"
    "\n"
    "With own_device, each block prefers, and is accessed by, the device it is allocated for. A page\n"
    "is allocated and advised as a trial. Equal presets share one function, for the life of the\n"
    "process. Raises TypeError and ValueError for bad arguments, CUDAError for advice that the driver\n"
    "refuses, RuntimeError when no function is left.";

static PyObject *
module_register_preset(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
    static mm_signature signature = {.doc = register_preset_doc};
    mm_state *state = mm_module_state(module);
    char name[MM_ALLOCATOR_NAME];
    PyObject *argv[ARGC];
    mm_preset preset;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_preset(state, argv, &preset) < 0 || (cu = mm_open(state)) == NULL
        || mm_check_access(cu) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_preset_register(cu, &preset, name, &st);
    Py_END_ALLOW_THREADS
    return rc < 0 ? mm_raise(state, &st) : Py_BuildValue("(ss)", name, MM_FREE_NAME);
}

/* --- the table ---------------------------------------------------------------------------------- */

PyMethodDef mm_functions[] = {
    MM_METHOD("advise", module_advise, advise_doc),
    MM_METHOD("prefetch", module_prefetch, prefetch_doc),
    MM_METHOD("discard", module_discard, discard_doc),
    MM_METHOD("discard_prefetch", module_discard_prefetch, discard_prefetch_doc),
    MM_METHOD("copy", mm_copy_function, mm_copy_function_doc),
    MM_METHOD("residency", mm_residency, mm_residency_doc),
    MM_METHOD("empty", module_empty, empty_doc),
    MM_METHOD("is_managed", module_is_managed, is_managed_doc),
    {"_driver_info", driver_info, METH_NOARGS, driver_info_doc},
    {"_select_driver", select_driver, METH_O, select_driver_doc},
    MM_METHOD("_register_preset", module_register_preset, register_preset_doc),
    MM_METHOD("_numpy_handler", mm_numpy_handler, mm_numpy_handler_doc),
    {"_set_numpy_handler", mm_set_numpy_handler, METH_O, mm_set_numpy_handler_doc},
    MM_POSITIONAL_METHOD("_synchronize", mm_synchronize, mm_synchronize_doc),
    {"_results_usage", mm_results_usage, METH_NOARGS, mm_results_usage_doc},
    {"_results_limit", mm_results_limit, METH_O, mm_results_limit_doc},
    {"_results_trim", mm_results_trim, METH_O, mm_results_trim_doc},
    {"_memory_counts", mm_memory_counts_read, METH_O, mm_memory_counts_doc},
    {"_memory_kept", mm_memory_kept, METH_NOARGS, mm_memory_kept_doc},
    {"_device_memory", mm_device_memory_totals, METH_NOARGS, mm_device_memory_totals_doc},
    {"_memory_living", mm_memory_living, METH_NOARGS, mm_memory_living_doc},
    {NULL, NULL, 0, NULL},
};
