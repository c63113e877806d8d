/* buffer_arrays.c: the methods numpy(), torch() and cupy(): arrays of other libraries over a
 * buffer. The methods wait for the work on a stream, or order later work behind it. The arrays use
 * the exports of buffer_exports.c. */
#include "buffer.h"
#include "module_functions.h"
#include "result_object.h"
#include "stream_object.h"

/* --- NumPy ------------------------------------------------------------------------------ */

/* Finds the operation to enter the buffer with before the host reads it: MM_QUERY for managed
 * memory, MM_WAIT for other memory that the host can read, which has no pages to prefetch. */
static int
find_read_operation(mm_buffer *b, mm_operation *out)
{
    PyObject *held;
    mm_pointer_attributes attributes;
    mm_driver *cu;

    assert(!PyErr_Occurred());
    *out = MM_QUERY;
    if (b->size > 0 && b->memory->device != MM_ANY_DEVICE) {
        return mm_refuse_device_memory(b, PyExc_ValueError);
    }
    if (b->size == 0 || mm_memory_is_known(b->memory)) {
        return 0;
    }
    if (mm_buffer_query(b, &attributes, &cu) < 0) {
        return -1;
    }
    if (attributes.managed) {
        return 0;
    }
    if (attributes.type == CU_MEMORYTYPE_DEVICE) {
        return mm_refuse_device_memory(b, PyExc_ValueError);
    }
    *out = MM_WAIT;
    if (mm_prepare_host_access(b, cu, &held) < 0) {
        return -1;
    }
    Py_XDECREF(held); /* the export that follows checks again */
    return 0;
}

/* Prefetches the range to the host behind the work on the stream, and waits for both. With MM_WAIT
 * it only waits for the stream, and so it does without concurrent access: the export that follows
 * then waits for all devices, or for the stream that the memory is attached to. */
static int
prefetch_to_host(const mm_buffer_use *use, mm_operation op, CUstream stream, mm_status *st)
{
    assert(op == MM_QUERY || op == MM_WAIT);
    if (op == MM_QUERY && use->cu->concurrent_access) {
        return mm_range_view_on_host(use->cu, use->range, stream, st);
    }
    return mm_stream_refuse_capture(use->cu, stream, "a wait for the stream", st) < 0
               ? -1
               : mm_stream_synchronize(use->cu, (mm_device_stream){stream, MM_ANY_DEVICE}, st);
}

static int
read_back(mm_buffer *b, const mm_stream_use *stream, mm_operation op)
{
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, op, stream, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = prefetch_to_host(&use, op, stream->handle, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(b->state, rc, &st);
}

/* Makes a result object with a copy of managed memory. Pages that are on a device stay there. */
static PyObject *
copy_result(mm_buffer *b, const mm_stream_use *stream)
{
    PyObject *result = mm_result_new(b);
    mm_result_block *block;
    mm_buffer_use use;
    mm_status st;

    if (result == NULL || mm_buffer_enter(b, MM_QUERY, stream, &use) < 0) {
        Py_XDECREF(result);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    block = mm_result_copy(use.cu, use.range, stream->handle, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    if (block == NULL) {
        Py_DECREF(result);
        return mm_raise(b->state, &st);
    }
    mm_result_set(result, block);
    return result;
}

static PyObject *
import_numpy(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy");

    if (numpy == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_SetString(PyExc_ImportError,
                        "numpy() needs NumPy, which is not installed: pip install numpy; "
                        "memoryview(buf) needs nothing");
    }
    return numpy;
}

/* Sets *type to a type of ml_dtypes if NumPy lacks the buffer's element type, else to NULL. */
static int
find_numpy_type(const mm_buffer *b, PyObject **type)
{
    bool lacks = mm_is_plain_bytes(b->dtype);

    *type = lacks
                ? mm_call_python("managedmem._narrow_floats", "numpy_type", "(s)", b->dtype->name)
                : NULL;
    return lacks && *type == NULL ? -1 : 0;
}

/* numpy.array(object, dtype=dtype, copy=copy). */
static PyObject *
numpy_array(PyObject *numpy, PyObject *object, PyObject *dtype, PyObject *copy)
{
    PyObject *make = PyObject_GetAttrString(numpy, "array");
    PyObject *args = make ? PyTuple_Pack(1, object) : NULL;
    PyObject *kwargs = args ? Py_BuildValue("{s:O,s:O}", "dtype", dtype, "copy", copy) : NULL;
    PyObject *array = kwargs ? PyObject_Call(make, args, kwargs) : NULL;

    Py_XDECREF(make);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return array;
}

/* Makes the array of a memoryview of the buffer. From the buffer itself, NumPy would drop the
 * error of a refused view, and make an array of one object instead. */
static PyObject *
array_of_view(PyObject *op, PyObject *numpy, PyObject *dtype, PyObject *copy)
{
    PyObject *view = PyMemoryView_FromObject(op);
    PyObject *array = view ? numpy_array(numpy, view, dtype, copy) : NULL;

    Py_XDECREF(view);
    return array;
}

/* Makes the array of a buffer. Its bits are read as `type`, the type of find_numpy_type(), or
 * NULL. */
static PyObject *
array_of_buffer(mm_buffer *b, PyObject *numpy, PyObject *type, PyObject *dtype, PyObject *copy)
{
    return type == NULL ? array_of_view((PyObject *)b, numpy, dtype, copy)
                        : mm_call_python("managedmem._narrow_floats", "array_of_bits", "(OsOOO)",
                                         b, mm_dtype_bits(b->dtype), type, dtype, copy);
}

const char mm_buffer_array_doc[] =
    "__array__($self, /, dtype=None, copy=None)\n--\n\n"
    "The buffer as a NumPy array over the same memory, unless dtype or copy requires a copy.\n"
    "\n"
    "NumPy calls this method only if the buffer refuses a host view. The method then raises the\n"
    "reason: RuntimeError when closed, BufferError for memory that the host cannot reach. For\n"
    "bfloat16 and the 8-bit floats, which have no format in the buffer protocol, it returns an\n"
    "array of a type of ml_dtypes (ImportError without it). Waits for no stream. Safe from every\n"
    "thread. Driver: cuPointerGetAttributes for wrapped memory.";

PyObject *
mm_buffer_array(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_buffer_array_doc};
    PyObject *argv[2], *numpy, *type, *array;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    numpy = import_numpy();
    if (numpy == NULL || find_numpy_type(mm_buffer_of(op), &type) < 0) {
        Py_XDECREF(numpy);
        return NULL;
    }
    array = array_of_buffer(mm_buffer_of(op), numpy, type, argv[0] ? argv[0] : Py_None,
                            argv[1] ? argv[1] : Py_None);
    Py_DECREF(numpy);
    Py_XDECREF(type);
    return array;
}

/* Smaller copies are not worth page-locked memory: the host copies them itself. */
static const size_t SMALLEST_RESULT = (size_t)64 << 10;

static PyObject *
make_array(mm_buffer *b, PyObject *numpy, PyObject *type, PyObject *stream_object, bool copy)
{
    mm_stream_use stream;
    PyObject *result, *array, *viewed;
    mm_operation op;

    if (mm_stream_read(b->state, stream_object, &stream) < 0 || find_read_operation(b, &op) < 0) {
        return NULL;
    }
    if (!copy || op != MM_QUERY || b->size < SMALLEST_RESULT) {
        return read_back(b, &stream, op) < 0
                   ? NULL
                   : array_of_buffer(b, numpy, type, Py_None, copy ? Py_True : Py_False);
    }
    result = copy_result(b, &stream);
    array = result ? array_of_view(result, numpy, Py_None, Py_False) : NULL;
    Py_XDECREF(result);
    if (array == NULL || type == NULL) {
        return array;
    }
    viewed = PyObject_CallMethod(array, "view", "O", type);
    Py_DECREF(array);
    return viewed;
}

const char mm_numpy_doc[] =
    "numpy($self, /, stream=None, *, copy=False)\n--\n\n"
    "The buffer as a NumPy array, ready to read.\n"
    "\n"
    "Prefetches the pages to the host behind the work on the stream, waits for both, and returns an\n"
    "ndarray over the same memory: no copy, writable, of the buffer's dtype and shape. Does not wait for\n"
    "other streams. While the array or a view of it lives, close() raises BufferError. For wrapped host\n"
    "memory that is not managed the call only waits for the stream.\n"
    "\n"
    "copy=True returns a complete copy, which does not keep the buffer open. The device copies a\n"
    "managed buffer of 64 KiB or more to page-locked memory of managedmem.result_cache, or to\n"
    "ordinary memory if the cache has no room. Pages of the buffer on the device stay there;\n"
    "pages on the host move to the device, unless the host is their preferred location. Smaller\n"
    "buffers move to the host, which copies them. The memory of a copy is used again when the\n"
    "array and its views have died: keep these until work of other libraries that uses them on a\n"
    "device is done. A forked child that touches them ends with SIGSEGV.\n"
    "\n"
    "Without concurrent_managed_access nothing can be prefetched, and a host access to managed memory\n"
    "during the work of a device ends the process. The call then waits for the stream, the current device\n"
    "and every device that this library has used; do not use the array while a device works again. For\n"
    "attached memory see attach(); the stream of the attachment can be passed here.\n"
    "\n"
    "Arrays of bfloat16 and the 8-bit floats have types of ml_dtypes, which must be installed\n"
    "(ImportError).\n"
    "\n"
    "Raises ImportError without NumPy, RuntimeError when closed, ValueError for plain device memory,\n"
    "BufferError for wrapped memory that the host may not be able to read (from_handle()), CUDAError\n"
    "while the stream captures a graph, which stays intact. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemPrefetchAsync, cuStreamSynchronize; cuMemcpyAsync and cuMemHostAlloc for a copy.";

PyObject *
mm_buffer_numpy(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_numpy_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[2], *numpy, *type, *array;
    bool copy = false;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || (argv[1] != NULL && mm_read_flag(b->state, argv[1], "copy", &copy) < 0)
        || mm_buffer_check_open(b) < 0) {
        return NULL;
    }
    numpy = import_numpy();
    if (numpy == NULL || find_numpy_type(b, &type) < 0) {
        Py_XDECREF(numpy);
        return NULL;
    }
    array = make_array(b, numpy, type, argv[0], copy);
    Py_DECREF(numpy);
    Py_XDECREF(type);
    return array;
}

/* --- torch and CuPy --------------------------------------------------------------------- */

/* Prefetches to the host and waits, as numpy() does. */
static int
wait_for_host(mm_buffer *b, PyObject *stream_object)
{
    mm_stream_use stream;
    mm_operation op;

    return mm_stream_read(b->state, stream_object, &stream) < 0 || find_read_operation(b, &op) < 0
               ? -1
               : read_back(b, &stream, op);
}

/* Waits for a stream, as numpy() does, but does not prefetch. */
static int
wait_for_stream(mm_buffer *b, PyObject *stream_object)
{
    bool managed = b->memory->device == MM_ANY_DEVICE;
    mm_stream_use stream;
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_stream_read(b->state, stream_object, &stream) < 0
        || mm_buffer_enter(b, managed ? MM_QUERY : MM_COPY, &stream, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_stream_refuse_capture(use.cu, stream.handle, "a wait for the stream", &st) < 0
                 || mm_stream_synchronize(use.cu, (mm_device_stream){stream.handle, MM_ANY_DEVICE},
                                          &st)
                        < 0
             ? -1
             : 0;
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(b->state, rc, &st);
}

const char mm_synchronize_doc[] =
    "_synchronize(buffer, stream, to_host, /)\n--\n\n"
    "Wait for the work on a stream and, with to_host, for a prefetch of the buffer to the host\n"
    "behind it.";

PyObject *
mm_synchronize(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    enum { BUFFER, STREAM, TO_HOST, ARGC };
    static mm_signature signature = {.doc = mm_synchronize_doc};
    mm_state *state = mm_module_state(module);
    PyObject *argv[ARGC];
    bool to_host;
    int rc;

    if (mm_signature_args(&signature, args, nargs, NULL, argv) < 0
        || mm_read_flag(state, argv[TO_HOST], "to_host", &to_host) < 0) {
        return NULL;
    }
    if (!mm_is_buffer(state, argv[BUFFER])) {
        return PyErr_Format(PyExc_TypeError, "_synchronize() takes a ManagedBuffer, got %R",
                            argv[BUFFER]);
    }
    rc = to_host ? wait_for_host(mm_buffer_of(argv[BUFFER]), argv[STREAM])
                 : wait_for_stream(mm_buffer_of(argv[BUFFER]), argv[STREAM]);
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

const char mm_torch_doc[] =
    "torch($self, /, device=None, *, stream=None)\n--\n\n"
    "The buffer as a torch tensor over the same memory, of its dtype and shape.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "device : torch.device, Device, Host, str or int, optional\n"
    "    The CUDA device of the tensor, or the CPU. None: the device of memory from a device pool, else\n"
    "    torch's current CUDA device, or the CPU if torch has none or the driver is emulated.\n"
    "stream : Stream, object with __cuda_stream__, int, or None\n"
    "    The call waits for the work on this stream. None: the later work of torch's current\n"
    "    stream comes after the work of the default stream; for a tensor on the CPU the call\n"
    "    waits for the default stream.\n"
    "\n"
    "No copy. For the CPU the pages are moved to the host, as by numpy(). While the tensor or a view of\n"
    "it lives, close() raises BufferError. torch.asarray(buf) ignores the shape and, before torch\n"
    "2.15, the dtype too: it then reads the bytes as float32, so that ints become other numbers.\n"
    "\n"
    "Raises ImportError without torch, RuntimeError when closed, or for a CUDA device with the emulated\n"
    "driver, TypeError for an 8-bit float that torch lacks, ValueError for a device of another kind,\n"
    "BufferError for a device that cannot use this memory, CUDAError as numpy() does. Safe from every\n"
    "thread. Driver: cuMemPrefetchAsync, cuStreamSynchronize.";

PyObject *
mm_buffer_torch(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_torch_doc};
    PyObject *argv[2];

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_buffer_check_open(mm_buffer_of(op)) < 0) {
        return NULL;
    }
    return mm_call_python("managedmem._arrays", "to_torch", "(OOO)", op,
                          argv[0] ? argv[0] : Py_None, argv[1] ? argv[1] : Py_None);
}

const char mm_cupy_doc[] =
    "cupy($self, /, *, stream=None)\n--\n\n"
    "The buffer as a CuPy array over the same memory, of its dtype and shape. It is on CuPy's current\n"
    "device; memory from a device pool is on its own device.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "stream : Stream, object with __cuda_stream__, int, or None\n"
    "    The call waits for the work on this stream. None: the later work of CuPy's current\n"
    "    stream comes after the work of the default stream.\n"
    "\n"
    "No copy. While the array or a view of it lives, close() raises BufferError.\n"
    "\n"
    "Raises ImportError without CuPy, RuntimeError when closed, or with the emulated driver, CUDAError\n"
    "while the stream captures a graph. Safe from every thread. Driver: cuStreamSynchronize.";

PyObject *
mm_buffer_cupy(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_cupy_doc};
    PyObject *argv[1];

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_buffer_check_open(mm_buffer_of(op)) < 0) {
        return NULL;
    }
    return mm_call_python("managedmem._arrays", "to_cupy", "(OO)", op,
                          argv[0] ? argv[0] : Py_None);
}
