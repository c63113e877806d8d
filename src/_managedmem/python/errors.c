/* errors.c: the exceptions, and the only function that turns a status into one. */
#include "errors.h"

#include <errno.h>
#include <string.h>

/* A remedy for the codes that users meet, or "". */
static const char *
remedy_for_code(int code)
{
    switch (code) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        return "Free managed buffers that are no longer needed, or request less.";
    case CUDA_ERROR_DEINITIALIZED:
        return "The driver is shutting down with the process.";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
        return "An earlier kernel failed and its context is unusable: restart the process.";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        return "A CUDA graph is being captured; make this call before the capture begins.";
    case CUDA_ERROR_NOT_PERMITTED:
        return "CUDA allows no driver calls inside a host function (cuLaunchHostFunc): make this call "
               "in another thread, or after the stream has been synchronized.";
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
        return "The stream or its context no longer exists.";
    default:
        return "";
    }
}

/* A new exception object with its three attributes; NULL stands for None. */
static PyObject *
new_cuda_error(PyObject *type, PyObject *message, PyObject *code, const char *name,
               const char *function)
{
    PyObject *error = PyObject_CallFunctionObjArgs(type, message, NULL);
    PyObject *name_text = name ? PyUnicode_FromString(name) : NULL;
    PyObject *function_text = function ? PyUnicode_FromString(function) : NULL;

    if (error != NULL
        && ((name && !name_text) || (function && !function_text)
            || PyObject_SetAttrString(error, "code", code ? code : Py_None) < 0
            || PyObject_SetAttrString(error, "name", name_text ? name_text : Py_None) < 0
            || PyObject_SetAttrString(error, "function", function_text ? function_text : Py_None)
                   < 0)) {
        Py_CLEAR(error);
    }
    Py_XDECREF(name_text);
    Py_XDECREF(function_text);
    return error;
}

static void
raise_and_release(PyObject *type, PyObject *error)
{
    if (error != NULL) {
        PyErr_SetObject(type, error);
        Py_DECREF(error);
    }
}

static void
raise_driver_call(mm_state *state, const mm_status *st)
{
    mm_driver *cu = mm_driver_peek();
    const char *name = NULL, *text = NULL, *more = remedy_for_code(st->code);
    PyObject *type =
        st->code == CUDA_ERROR_OUT_OF_MEMORY ? state->out_of_memory_error : state->cuda_error;
    PyObject *message, *code;

    assert(st->code != 0 && (st->kind == MM_CAPTURING || st->function != NULL));
    if (cu != NULL) {
        /* The texts of an unknown code stay NULL. */
        MM_IGNORE(cu->GetErrorName((CUresult)st->code, &name));
        MM_IGNORE(cu->GetErrorString((CUresult)st->code, &text));
    }
    name = name ? name : "an unknown error";
    if (st->kind == MM_CAPTURING) {
        message = PyUnicode_FromString(st->detail);
    } else {
        message = PyUnicode_FromFormat(
            "%s failed with %s (%d)%s%s%s%s%s%s", st->function, name, st->code, text ? ": " : "",
            text ? text : "", st->detail[0] ? ". " : "", st->detail, *more ? ". " : "", more);
    }
    code = PyLong_FromLong(st->code);
    if (message != NULL && code != NULL) {
        raise_and_release(type, new_cuda_error(type, message, code, name, st->function));
    }
    Py_XDECREF(message);
    Py_XDECREF(code);
}

/* A detail is ASCII except for paths, which may have any bytes and may be cut inside a
 * character. */
static PyObject *
detail_text(const mm_status *st)
{
    return PyUnicode_DecodeFSDefault(st->detail);
}

static void
raise_detail(PyObject *type, const mm_status *st)
{
    PyObject *message = detail_text(st);

    assert(st->detail[0] != '\0');
    if (message != NULL) {
        PyErr_SetObject(type, message);
        Py_DECREF(message);
    }
}

static void
raise_no_driver(PyObject *type, const mm_status *st)
{
    PyObject *message = detail_text(st);

    if (message != NULL) {
        raise_and_release(type, new_cuda_error(type, message, NULL, NULL, NULL));
        Py_DECREF(message);
    }
}

/* Raises with `tried`, and steals its reference. */
static void
raise_trace_error(PyObject *type, PyObject *message, PyObject *tried)
{
    PyObject *error = message && tried ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;

    if (error != NULL && PyObject_SetAttrString(error, "tried", tried) < 0) {
        Py_CLEAR(error);
    }
    Py_XDECREF(tried);
    raise_and_release(type, error);
}

static void
raise_trace_unavailable(PyObject *type, const mm_status *st)
{
    const mm_driver *cu = mm_driver_peek();
    const char *source = cu != NULL && cu->emulated ? "emulator" : "kernel";
    PyObject *detail = detail_text(st), *code, *message = NULL, *tried = NULL;

    code = detail == NULL ? NULL : st->code != 0 ? PyLong_FromLong(st->code) : Py_NewRef(Py_None);
    if (code != NULL) {
        message = PyUnicode_FromFormat("no source of unified-memory events. Tried:\n  %s: %U",
                                       source, detail);
        tried = message ? Py_BuildValue("[(sOO)]", source, code, detail) : NULL;
        raise_trace_error(type, message, tried);
    }
    Py_XDECREF(message);
    Py_XDECREF(code);
    Py_XDECREF(detail);
}

static void
raise_trace_busy(PyObject *type, const mm_status *st)
{
    PyObject *message = detail_text(st);

    raise_trace_error(type, message, message ? PyList_New(0) : NULL);
    Py_XDECREF(message);
}

PyObject *
mm_raise(mm_state *state, const mm_status *st)
{
    MM_ASSERT_LEFT();
    assert(st->kind != MM_OK && !PyErr_Occurred());
    switch (st->kind) {
    case MM_DRIVER_CALL:
    case MM_CAPTURING:
        raise_driver_call(state, st);
        break;
    case MM_NO_DRIVER:
        raise_no_driver(state->not_found_error, st);
        break;
    case MM_DRIVER_TOO_OLD:
        raise_no_driver(state->too_old_error, st);
        break;
    case MM_UNSUPPORTED:
        raise_detail(PyExc_NotImplementedError, st);
        break;
    case MM_BAD_VALUE:
    case MM_NOT_MANAGED:
        raise_detail(PyExc_ValueError, st);
        break;
    case MM_EXPORTED:
        raise_detail(PyExc_BufferError, st);
        break;
    case MM_NO_MEMORY:
        raise_detail(PyExc_MemoryError, st);
        break;
    case MM_SYSTEM_CALL:
        errno = st->code;
        (void)PyErr_SetFromErrnoWithFilename(PyExc_OSError, st->function);
        break;
    case MM_TRACE_UNAVAILABLE:
        raise_trace_unavailable(state->trace_unavailable_error, st);
        break;
    case MM_TRACE_BUSY:
        raise_trace_busy(state->trace_busy_error, st);
        break;
    default: /* forked, refused */
        raise_detail(PyExc_RuntimeError, st);
    }
    return NULL;
}

mm_driver *
mm_open_now(mm_state *state)
{
    mm_driver *cu;
    mm_status st;

    assert(!PyErr_Occurred());
    Py_BEGIN_ALLOW_THREADS
    cu = mm_driver_open(&st);
    Py_END_ALLOW_THREADS
    if (cu == NULL) {
        (void)mm_raise(state, &st);
    }
    return cu;
}

PyDoc_STRVAR(
    cuda_error_doc,
    "A driver call failed.\n"
    "\n"
    "Attributes\n"
    "----------\n"
    "code : int or None\n"
    "    The driver's result, such as 1.\n"
    "name : str or None\n"
    "    Its name, such as \"CUDA_ERROR_INVALID_VALUE\".\n"
    "function : str or None\n"
    "    The driver function that returned it, such as \"cuMemAdvise\"; None if the call was refused\n"
    "    before the driver was called.\n"
    "\n"
    "After a failed call buffers, advice and contents are as they were before it; of several\n"
    "prefetches or discards, those before the refused one may have been queued.");

PyDoc_STRVAR(out_of_memory_doc,
             "The driver has no memory left (CUDA_ERROR_OUT_OF_MEMORY); also a MemoryError.");

PyDoc_STRVAR(not_found_doc,
             "There is no usable CUDA driver: no library, or one without a device.\n"
             "\n"
             "The message lists what was tried. code, name and function are None.");

PyDoc_STRVAR(too_old_doc,
             "The CUDA driver is older than CUDA 12.2. code, name and function are None.");

PyDoc_STRVAR(
    export_doc,
    "The memory cannot be exported through this interface.\n"
    "\n"
    "Raised by __cuda_array_interface__ for memory that no device reaches. A BufferError, and an\n"
    "AttributeError, so that hasattr() is False and libraries try another interface.");

PyDoc_STRVAR(
    ipc_doc,
    "The memory cannot be shared with other processes.\n"
    "\n"
    "A NotImplementedError, and an AttributeError, so that hasattr(buf, \"ipc_descriptor\") is\n"
    "False.");

PyDoc_STRVAR(
    trace_unavailable_doc,
    "No source of the events of unified memory works here, so nothing can be traced.\n"
    "\n"
    "Attributes\n"
    "----------\n"
    "tried : list of (source, code, sentence)\n"
    "    Each source that was tried: its name, such as \"kernel\", the number of its failure or None,\n"
    "    and the reason. The message has them too.");

PyDoc_STRVAR(trace_busy_doc,
             "A trace is already running in this process: there can be one at a time.\n"
             "\n"
             "tried is empty.");

/* Creates a class in the package's namespace and adds it to the module. */
static PyObject *
add_exception(PyObject *module, const char *full_name, const char *doc, PyObject *bases,
              PyObject *members)
{
    PyObject *type = PyErr_NewExceptionWithDoc(full_name, doc, bases, members);

    assert(strrchr(full_name, '.') != NULL);
    if (type != NULL && PyModule_AddObjectRef(module, strrchr(full_name, '.') + 1, type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}

/* Adds an exception class with two bases. */
static PyObject *
add_double(PyObject *module, const char *full_name, const char *doc, PyObject *first,
           PyObject *second)
{
    PyObject *bases = PyTuple_Pack(2, first, second);
    PyObject *type = bases ? add_exception(module, full_name, doc, bases, NULL) : NULL;

    Py_XDECREF(bases);
    return type;
}

/* The first failure ends the additions, because no call may begin with an exception set. */

static int
add_doubles(PyObject *module, mm_state *state)
{
    state->out_of_memory_error =
        add_double(module, "managedmem.CUDAOutOfMemoryError", out_of_memory_doc, state->cuda_error,
                   PyExc_MemoryError);
    if (state->out_of_memory_error == NULL) {
        return -1;
    }
    state->export_error = add_double(module, "managedmem.ExportError", export_doc,
                                     PyExc_BufferError, PyExc_AttributeError);
    if (state->export_error == NULL) {
        return -1;
    }
    state->ipc_error = add_double(module, "managedmem.IPCNotSupportedError", ipc_doc,
                                  PyExc_NotImplementedError, PyExc_AttributeError);
    return state->ipc_error ? 0 : -1;
}

static int
add_driver_errors(PyObject *module, mm_state *state)
{
    state->not_found_error = add_exception(module, "managedmem.DriverNotFoundError", not_found_doc,
                                           state->cuda_error, NULL);
    if (state->not_found_error == NULL) {
        return -1;
    }
    state->too_old_error = add_exception(module, "managedmem.DriverTooOldError", too_old_doc,
                                         state->cuda_error, NULL);
    return state->too_old_error ? 0 : -1;
}

static int
add_trace_errors(PyObject *module, mm_state *state)
{
    PyObject *members = Py_BuildValue("{s:()}", "tried");

    if (members == NULL) {
        return -1;
    }
    state->trace_unavailable_error =
        add_exception(module, "managedmem.TraceUnavailableError", trace_unavailable_doc,
                      PyExc_RuntimeError, members);
    Py_DECREF(members);
    if (state->trace_unavailable_error == NULL) {
        return -1;
    }
    state->trace_busy_error = add_exception(module, "managedmem.TraceBusyError", trace_busy_doc,
                                            state->trace_unavailable_error, NULL);
    return state->trace_busy_error ? 0 : -1;
}

int
mm_errors_init(PyObject *module, mm_state *state)
{
    PyObject *members =
        Py_BuildValue("{s:O,s:O,s:O}", "code", Py_None, "name", Py_None, "function", Py_None);

    if (members == NULL) {
        return -1;
    }
    state->cuda_error =
        add_exception(module, "managedmem.CUDAError", cuda_error_doc, PyExc_RuntimeError, members);
    Py_DECREF(members);
    if (state->cuda_error == NULL) {
        return -1;
    }
    return add_doubles(module, state) < 0 || add_driver_errors(module, state) < 0
                   || add_trace_errors(module, state) < 0
               ? -1
               : 0;
}

/* The text of a failure, as its exception would have it; None without one. */
PyObject *
mm_status_text(mm_state *state, const mm_status *st)
{
    PyObject *type, *value, *traceback, *text;

    if (st->kind == MM_OK) {
        Py_RETURN_NONE;
    }
    (void)mm_raise(state, st);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    text = PyObject_Str(value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return text;
}
