/* errors.c: the exceptions, and the only function that turns a status into one. */
#include "errors.h"

#include <errno.h>
#include <string.h>

/* A remedy for the codes that users meet, or "". */
static const char *
remedy_for(const mm_status *st)
{
    switch (st->code) {
    case CUDA_ERROR_OUT_OF_MEMORY:
        if (st->function != NULL && strcmp(st->function, "cuMemAllocFromPoolAsync") == 0) {
            return "Free buffers that are no longer needed, request less, or give the pool a larger "
                   "max_size if it has one.";
        }
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

/* Raises an exception with a message and a dict of attributes, and steals both. If one is NULL,
 * the exception from making it stays. */
static void
raise_with(PyObject *type, PyObject *message, PyObject *attributes)
{
    PyObject *error =
        message && attributes ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;
    PyObject *dict = error ? PyObject_GenericGetDict(error, NULL) : NULL;

    if (dict != NULL && PyDict_Update(dict, attributes) == 0) {
        PyErr_SetObject(type, error);
    }
    Py_XDECREF(dict);
    Py_XDECREF(error);
    Py_XDECREF(message);
    Py_XDECREF(attributes);
}

/* The attributes of a CUDAError. A code of 0 and a NULL text become None. */
static PyObject *
cuda_attributes(int code, const char *name, const char *function)
{
    return Py_BuildValue("{s:N,s:z,s:z}", "code",
                         code != 0 ? PyLong_FromLong(code) : Py_NewRef(Py_None), "name", name,
                         "function", function);
}

static void
raise_driver_call(mm_state *state, const mm_status *st)
{
    mm_driver *cu = mm_driver_peek();
    const char *name = NULL, *text = NULL, *more = remedy_for(st);
    PyObject *type =
        st->code == CUDA_ERROR_OUT_OF_MEMORY ? state->out_of_memory_error : state->cuda_error;
    PyObject *message;

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
    raise_with(type, message, message ? cuda_attributes(st->code, name, st->function) : NULL);
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

    raise_with(type, message, message ? cuda_attributes(0, NULL, NULL) : NULL);
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
        tried = message ? Py_BuildValue("{s:[(sOO)]}", "tried", source, code, detail) : NULL;
        raise_with(type, message, tried);
    }
    Py_XDECREF(code);
    Py_XDECREF(detail);
}

static void
raise_trace_busy(PyObject *type, const mm_status *st)
{
    PyObject *message = detail_text(st);

    raise_with(type, message, message ? Py_BuildValue("{s:[]}", "tried") : NULL);
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
    default: /* MM_FORKED, MM_REFUSED */
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

typedef struct {
    PyObject **type; /* of the module's state, where it is stored */
    const char *name, *doc;
    PyObject **base, **second_base; /* the second may be NULL */
    PyObject *members; /* a dict, or NULL for none of its own */
} exception_row;

static int
add_exception(PyObject *module, const exception_row *row)
{
    PyObject *bases =
        row->second_base ? PyTuple_Pack(2, *row->base, *row->second_base) : Py_NewRef(*row->base);

    if (bases == NULL) {
        return -1;
    }
    *row->type = PyErr_NewExceptionWithDoc(row->name, row->doc, bases, row->members);
    Py_DECREF(bases);
    return *row->type ? PyModule_AddType(module, (PyTypeObject *)*row->type) : -1;
}

int
mm_errors_init(PyObject *module, mm_state *state)
{
    PyObject *nothing = cuda_attributes(0, NULL, NULL);
    PyObject *untried = nothing ? Py_BuildValue("{s:()}", "tried") : NULL;
    const exception_row rows[] = {
        {&state->cuda_error, "managedmem.CUDAError", cuda_error_doc, &PyExc_RuntimeError, NULL,
         nothing},
        {&state->out_of_memory_error, "managedmem.CUDAOutOfMemoryError", out_of_memory_doc,
         &state->cuda_error, &PyExc_MemoryError, NULL},
        {&state->export_error, "managedmem.ExportError", export_doc, &PyExc_BufferError,
         &PyExc_AttributeError, NULL},
        {&state->ipc_error, "managedmem.IPCNotSupportedError", ipc_doc, &PyExc_NotImplementedError,
         &PyExc_AttributeError, NULL},
        {&state->not_found_error, "managedmem.DriverNotFoundError", not_found_doc,
         &state->cuda_error, NULL, NULL},
        {&state->too_old_error, "managedmem.DriverTooOldError", too_old_doc, &state->cuda_error,
         NULL, NULL},
        {&state->trace_unavailable_error, "managedmem.TraceUnavailableError",
         trace_unavailable_doc, &PyExc_RuntimeError, NULL, untried},
        {&state->trace_busy_error, "managedmem.TraceBusyError", trace_busy_doc,
         &state->trace_unavailable_error, NULL, NULL},
    };
    int rc = untried ? 0 : -1;

    for (size_t i = 0; rc == 0 && i < sizeof rows / sizeof *rows; i++) {
        rc = add_exception(module, &rows[i]);
    }
    Py_XDECREF(nothing);
    Py_XDECREF(untried);
    return rc;
}

PyObject *
mm_status_text(mm_state *state, const mm_status *st)
{
    mm_exception raised;
    PyObject *text;

    if (st->kind == MM_OK) {
        Py_RETURN_NONE;
    }
    (void)mm_raise(state, st);
    mm_exception_save(&raised);
    PyErr_NormalizeException(&raised.type, &raised.value, &raised.traceback);
    text = PyObject_Str(raised.value);
    mm_exception_drop(&raised);
    return text;
}
