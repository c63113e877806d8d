/* foreign_resource.c: calls of the memory resources of other libraries, with a stream that they
 * accept. */
#include "foreign_resource.h"

#include "foreign_class.h"
#include "resource.h"
#include "stream_object.h"

int
mm_foreign_resource_check(PyObject *resource)
{
    PyObject *method;
    int found = mm_get_optional(resource, "deallocate", &method);
    bool callable = found > 0 && PyCallable_Check(method);

    Py_XDECREF(method);
    if (found >= 0 && !callable) {
        PyErr_Format(PyExc_TypeError,
                     "mr must have a method deallocate(ptr, size, *, stream), got %R", resource);
    }
    return callable ? 0 : -1;
}

/* --- streams ---------------------------------------------------------------------------- */

/* The module cuda.core if it is loaded and the resource is an instance of its MemoryResource; else
 * NULL without an exception. These resources accept streams of cuda.core only, not
 * __cuda_stream__. */
static PyObject *
core_module_of(PyObject *resource)
{
    PyObject *name = PyUnicode_FromString("cuda.core");
    PyObject *module = name ? PyImport_GetModule(name) : NULL, *base = NULL;
    int is_core = module ? mm_get_optional(module, "MemoryResource", &base) : 0;

    if (is_core > 0) {
        is_core = PyObject_IsInstance(resource, base);
        Py_DECREF(base);
    }
    if (is_core <= 0) {
        PyErr_Clear(); /* any error: a cuda.core that is half loaded has made no resource */
        Py_CLEAR(module);
    }
    Py_XDECREF(name);
    return module;
}

/* Calls stream_type.from_handle. A handle of 0 may be the per-thread default stream; 1 is always
 * the legacy one. */
static PyObject *
call_from_handle(PyObject *stream_type, CUstream handle)
{
    PyObject *number = PyLong_FromVoidPtr((void *)(handle ? handle : CU_STREAM_LEGACY));
    PyObject *stream =
        number ? PyObject_CallMethod(stream_type, "from_handle", "O", number) : NULL;

    Py_XDECREF(number);
    return stream;
}

static PyObject *
stream_for_core(mm_state *state, PyObject *core, PyObject *stream, CUstream handle)
{
    PyObject *type, *made;

    if (stream != NULL && mm_is_from(state, stream, "cuda")
        && !mm_is_instance(state, stream, "cuda", "CUstream")) {
        return Py_NewRef(stream);
    }
    type = PyObject_GetAttrString(core, "Stream");
    made = type ? call_from_handle(type, handle) : NULL;
    Py_XDECREF(type);
    return made;
}

/* An object with __cuda_stream__; None for a resource of this package if no stream was given. */
static PyObject *
stream_for_others(mm_state *state, PyObject *resource, PyObject *stream, CUstream handle)
{
    PyObject *method;
    int found;

    if (stream == NULL && mm_is_resource(state, resource)) {
        return Py_NewRef(Py_None);
    }
    found = stream ? mm_get_optional(stream, "__cuda_stream__", &method) : 0;
    if (found < 0) {
        return NULL;
    }
    if (found > 0) {
        Py_DECREF(method);
        return Py_NewRef(stream);
    }
    return call_from_handle((PyObject *)state->stream_type, handle);
}

/* Reads the handle, and the object that keeps it alive: a duplicate of a Stream, because closing
 * the Stream would destroy the handle. */
static int
keep_stream(mm_state *state, PyObject *stream, PyObject **kept, CUstream *handle)
{
    mm_stream_use use;

    if (mm_stream_read(state, stream, &use) < 0) {
        return -1;
    }
    if (!mm_stream_enter(&use)) { /* raced */
        return mm_stream_raise_closed();
    }
    *handle = use.handle;
    if (use.shared != NULL) {
        mm_stream_retain(use.shared);
    }
    mm_stream_leave(&use);
    *kept = use.shared ? mm_stream_duplicate(state, use.shared) : Py_XNewRef(stream);
    return *kept == NULL && stream != NULL ? -1 : 0;
}

/* Opens the driver, so that call_on_stream can give a thread a context when the memory is
 * deallocated. A resource of cuda.core has opened the driver anyway. */
static void
open_driver(void)
{
    mm_status ignored;

    if (mm_driver_peek() == NULL) {
        Py_BEGIN_ALLOW_THREADS
        MM_IGNORE(mm_driver_open(&ignored)); /* the resource reports failures itself */
        Py_END_ALLOW_THREADS
    }
}

PyObject *
mm_foreign_resource_stream(mm_state *state, PyObject *resource, PyObject *stream)
{
    PyObject *kept = NULL, *core, *passed, *streams = NULL;
    CUstream handle = NULL;

    if (stream == Py_None) {
        stream = NULL;
    }
    if (keep_stream(state, stream, &kept, &handle) < 0) {
        return NULL;
    }
    core = core_module_of(resource);
    if (core != NULL) {
        open_driver();
    }
    passed = core ? stream_for_core(state, core, kept, handle)
                  : stream_for_others(state, resource, kept, handle);
    if (passed != NULL) {
        streams = PyTuple_Pack(2, passed, kept ? kept : Py_None);
        Py_DECREF(passed);
    }
    Py_XDECREF(core);
    Py_XDECREF(kept);
    return streams;
}

/* --- calls ------------------------------------------------------------------------------ */

/* The device that owns plain device memory, for its default stream; MM_ANY_DEVICE for other
 * memory. */
static int
owner_of(mm_driver *cu, CUdeviceptr start)
{
    mm_pointer_attributes attributes;
    mm_status ignored;

    return mm_pointer_query(cu, start, &attributes, &ignored) == 0 && !attributes.managed
                   && attributes.type == CU_MEMORYTYPE_DEVICE && attributes.device >= 0
                   && attributes.device < cu->device_count
               ? attributes.device
               : MM_ANY_DEVICE;
}

/* The garbage collector clears the functions of a class that is garbage, and CPython crashes when
 * a cleared function is called. A cleared function has no globals. */
static int
refuse_cleared(PyObject *method)
{
    PyObject *globals;
    int found = mm_get_optional(method, "__globals__", &globals);
    bool cleared = globals == Py_None;

    Py_XDECREF(globals);
    if (cleared) { /* no %R of the resource: its repr may be cleared too */
        PyErr_SetString(PyExc_RuntimeError,
                        "the memory cannot be deallocated: the garbage collector has cleared "
                        "deallocate() together with the buffer and a view of it; close the buffer "
                        "before");
    }
    return found < 0 || cleared ? -1 : 0;
}

/* Calls the method with the stream and with args, whose reference it steals. In a thread without a
 * context it enters one: the garbage collector may run there, and the driver needs a context for a
 * default stream. `start` is the memory to deallocate, or 0. */
static PyObject *
call_on_stream(PyObject *resource, const char *name, PyObject *args, PyObject *streams,
               CUdeviceptr start)
{
    mm_driver *cu = mm_driver_usable();
    PyObject *method = args ? PyObject_GetAttrString(resource, name) : NULL;
    PyObject *kwargs = method && refuse_cleared(method) == 0
                           ? Py_BuildValue("{s:O}", "stream", PyTuple_GetItem(streams, 0))
                           : NULL;
    bool by_default = PyTuple_GetItem(streams, 1) == Py_None && start != 0;
    PyObject *answer = NULL;
    mm_status ignored;
    mm_scope scope;

    MM_ASSERT_LEFT();
    assert(PyTuple_Check(streams) && PyTuple_Size(streams) == 2);
    if (kwargs != NULL) {
        int device = cu && by_default ? owner_of(cu, start) : MM_ANY_DEVICE;
        bool entered = cu != NULL && mm_scope_enter(&scope, cu, device, &ignored) == 0;
        answer = PyObject_Call(method, args, kwargs);
        if (entered) {
            mm_scope_leave(&scope);
        }
    }
    Py_XDECREF(args);
    Py_XDECREF(method);
    Py_XDECREF(kwargs);
    return answer;
}

bool
mm_imports_have_ended(void)
{
    PyObject *path = PySys_GetObject("meta_path");

    return path == NULL || path == Py_None;
}

bool
mm_import_failed_at_exit(void)
{
    assert(PyErr_Occurred());
    return PyErr_ExceptionMatches(PyExc_ImportError) && mm_imports_have_ended();
}

int
mm_foreign_resource_deallocate(PyObject *resource, CUdeviceptr start, size_t size,
                               PyObject *streams)
{
    PyObject *args = Py_BuildValue("(Kn)", (unsigned long long)start, (Py_ssize_t)size);
    PyObject *answer = call_on_stream(resource, "deallocate", args, streams, start);

    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Not part of mm_foreign_resource_check: most buffers of from_handle() need deallocate() only. */
static int
check_allocates(PyObject *resource)
{
    PyObject *method;
    int found = mm_get_optional(resource, "allocate", &method);

    Py_XDECREF(method);
    if (found == 0) {
        PyErr_Format(
            PyExc_TypeError,
            "%R has no method allocate(size, *, stream) for a new buffer: pass copy_to() a "
            "destination",
            resource);
    }
    return found > 0 ? 0 : -1;
}

PyObject *
mm_foreign_resource_allocate(mm_state *state, PyObject *resource, size_t size, PyObject *stream)
{
    PyObject *streams, *answer;

    if (check_allocates(resource) < 0
        || (streams = mm_foreign_resource_stream(state, resource, stream)) == NULL) {
        return NULL;
    }
    answer =
        call_on_stream(resource, "allocate", Py_BuildValue("(n)", (Py_ssize_t)size), streams, 0);
    Py_DECREF(streams);
    return answer;
}
