/* buffer_life.c: closing a buffer, finalizing and deallocating it, and the stream of its
 * deallocation. */
#include <unistd.h>

#include "buffer.h"
#include "foreign_resource.h"
#include "leak_warnings.h"

/* --- references to other objects -------------------------------------------------------- */

/* Stores a reference in the field and returns the previous one. */
static PyObject *
exchange_field(mm_buffer *b, PyObject **field, PyObject *value)
{
    PyObject *before;

    MM_LOCK(b);
    before = *field;
    *field = value;
    MM_UNLOCK();
    return before;
}

/* Releases all references, which may run Python code. */
static void
release_objects(mm_buffer *b)
{
    MM_ASSERT_LEFT();
    Py_XDECREF(exchange_field(b, &b->root, NULL));
    Py_XDECREF(exchange_field(b, &b->owner, NULL));
    Py_XDECREF(exchange_field(b, &b->resource, NULL));
    Py_XDECREF(exchange_field(b, &b->stream, NULL));
}

int
mm_buffer_traverse(PyObject *op, visitproc visit, void *arg)
{
    mm_buffer *b = mm_buffer_of(op);

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(b->root);
    Py_VISIT(b->owner);
    Py_VISIT(b->resource);
    Py_VISIT(b->stream);
    return 0;
}

/* --- deallocation ----------------------------------------------------------------------- */

/* Closes foreign memory, without the GIL if calls may be under way. *first is true if this call
 * closed it. */
static int
close_memory(mm_buffer *b, bool *first, mm_status *st)
{
    int rc;

    assert(b->foreign_pid != 0 && !b->is_view);
    if (!mm_memory_closing_blocks(b->memory)) {
        return mm_memory_close(b->memory, NULL, first, st);
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_memory_close(b->memory, NULL, first, st);
    Py_END_ALLOW_THREADS
    return rc;
}

/* Gives memory, which the caller has just closed, back to its resource. On failure, opens it
 * again. */
static int
deallocate_foreign(mm_buffer *b, PyObject *streams)
{
    int rc;

    assert(b->resource != NULL && streams != NULL && mm_guard_is_closed(&b->memory->guard));
    rc = mm_foreign_resource_deallocate(b->resource, b->memory->start, b->memory->size, streams);
    if (rc < 0) {
        mm_memory_reopen(b->memory);
    }
    return rc;
}

/* Deallocates unclosed memory of a foreign resource, once; a failure goes to sys.unraisablehook.
 * Does nothing while a host view lives, which can be part of the same garbage cycle. */
static void
deallocate_unclosed(mm_buffer *b)
{
    mm_exception saved;
    mm_status ignored;
    bool first = false;

    if (b->foreign_pid == 0 || b->unclosed_tried || b->foreign_pid != getpid()) {
        return;
    }
    mm_exception_save(&saved);
    if (close_memory(b, &first, &ignored) == 0) {
        b->unclosed_tried = true;
        /* The resource still exists: close() and tp_clear release it after the memory. */
        if (first && deallocate_foreign(b, b->stream) < 0) {
            if (!mm_import_failed_at_exit()) {
                /* Reports the type, because the repr of a cleared object may fail. */
                PyErr_WriteUnraisable((PyObject *)Py_TYPE(b->resource));
            }
            PyErr_Clear(); /* an ImportError at exit; others were reported above */
        }
    }
    mm_exception_restore(&saved);
}

/* Called before any object of a garbage cycle is cleared, so the resource still works. */
void
mm_buffer_finalize(PyObject *op)
{
    deallocate_unclosed(mm_buffer_of(op));
}

/* Releases the hold of a closed view on its memory, and its references. */
static void
release_hold(mm_buffer *b)
{
    assert(b->is_view && !b->hold_released);
    b->hold_released = true;
    if (mm_memory_release_hold(b->memory)) {
        Py_BEGIN_ALLOW_THREADS
        mm_memory_retire(b->memory);
        Py_END_ALLOW_THREADS
        mm_report_leaks();
    }
    release_objects(b);
}

/* Does nothing while a host view in the same cycle uses the memory: clearing the view breaks the
 * cycle. */
int
mm_buffer_clear(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    if (mm_guard_exports(&b->memory->guard) > 0) {
        return 0;
    }
    if (b->is_view) {
        if (mm_guard_close(&b->guard, true) == MM_CLOSED_NOW) {
            release_hold(b);
        }
        return 0;
    }
    deallocate_unclosed(b); /* a __del__ of a subclass may have replaced the finalizer */
    release_objects(b);
    return 0;
}

/* Releases the memory before the objects that free it or keep it alive. */
static void
buffer_dealloc(mm_buffer *b)
{
    if (b->foreign_pid != 0) {
        deallocate_unclosed(b);
    }
    if (b->hold_released) {
        mm_memory_release_reference(b->memory);
    } else {
        mm_buffer_release(b->memory);
        mm_report_leaks();
    }
    Py_XDECREF(b->root);
    Py_XDECREF(b->owner);
    Py_XDECREF(b->resource);
    Py_XDECREF(b->stream);
    mm_free_object((PyObject *)b);
}

/* Buffers can own buffers, thousands deep, and their deallocations would nest. Beyond the limit
 * they are put on a list, which the deepest allowed deallocation empties. The list is linked
 * through the field for weak references, which is then unused. */
enum { MAX_NESTED_DEALLOCS = 32 };
static _Thread_local struct {
    int depth;
    mm_state *state; /* of the interpreter of the deepest deallocation */
    PyObject *waiting;
} nested;

static void
dealloc_waiting(mm_state *state)
{
    assert(nested.depth == MAX_NESTED_DEALLOCS);
    nested.state = state;
    while (nested.waiting != NULL) {
        mm_buffer *b = mm_buffer_of(nested.waiting);
        nested.waiting = b->weakrefs;
        b->weakrefs = NULL;
        buffer_dealloc(b);
    }
    nested.state = NULL;
}

static void
dealloc_nested(mm_buffer *b)
{
    mm_state *state = b->state;

    if (nested.depth >= MAX_NESTED_DEALLOCS && nested.state == state) {
        b->weakrefs = nested.waiting;
        nested.waiting = (PyObject *)b;
        return;
    }
    nested.depth++;
    if (nested.depth == MAX_NESTED_DEALLOCS) {
        nested.waiting = (PyObject *)b;
        dealloc_waiting(state);
    } else {
        buffer_dealloc(b);
    }
    nested.depth--;
}

void
mm_buffer_last_reference(PyObject *op)
{
    mm_buffer *b = mm_buffer_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    assert(b->weakrefs == NULL);
    if (b->root == NULL && b->owner == NULL && b->resource == NULL) {
        buffer_dealloc(b); /* releases no buffer, so nothing can nest */
    } else {
        dealloc_nested(b);
    }
}

/* --- closing ---------------------------------------------------------------------------- */

/* Prepares closing. Pool memory is freed in the order of a stream, which must not capture a graph.
 * For other memory, waits for the stream. */
static int
prepare_close(mm_driver *cu, mm_memory *memory, const CUstream *stream, mm_status *st)
{
    return memory->pooled
               ? mm_memory_refuse_capture(cu, memory, stream, st)
               : mm_stream_synchronize(
                     cu, (mm_device_stream){stream ? *stream : NULL, MM_ANY_DEVICE}, st);
}

static bool
needs_preparing(const mm_buffer *b, bool has_stream)
{
    return (b->memory->pooled || has_stream) && !mm_driver_forked();
}

/* Closes memory that was allocated here, or is wrapped without a resource. */
static int
close_own(mm_buffer *b, PyObject *stream)
{
    bool has_stream = stream != NULL && stream != Py_None, first = false;
    mm_driver *cu = NULL;
    mm_stream_use use;
    mm_status st;
    int rc = 0;

    if (mm_stream_read(b->state, stream, &use) < 0
        || (needs_preparing(b, has_stream) && (cu = mm_open(b->state)) == NULL)) {
        return -1;
    }
    if (!mm_stream_enter(&use)) { /* raced */
        return mm_stream_raise_closed();
    }
    Py_BEGIN_ALLOW_THREADS
    if (cu != NULL) {
        rc = prepare_close(cu, b->memory, has_stream ? &use.handle : NULL, &st);
    }
    if (rc == 0) {
        rc = mm_memory_close(b->memory, has_stream ? &use.handle : NULL, &first, &st);
    }
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    if (first) {
        release_objects(b);
    }
    return rc;
}

/* Closes memory of a foreign resource. A forked child does not deallocate the memory of its
 * parent. */
static int
close_foreign(mm_buffer *b, PyObject *stream)
{
    bool has_stream = stream != NULL && stream != Py_None, first = false;
    PyObject *resource = mm_buffer_resource(b), *streams;
    mm_status st;
    int rc;

    if (resource == NULL) { /* raced */
        return 0; /* another thread has just closed it */
    }
    streams =
        has_stream ? mm_foreign_resource_stream(b->state, resource, stream) : mm_buffer_stream(b);
    Py_DECREF(resource);
    if (streams == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_memory_close(b->memory, NULL, &first, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    } else if (first && b->foreign_pid == getpid()) {
        rc = deallocate_foreign(b, streams);
    }
    Py_DECREF(streams);
    if (first && rc == 0) {
        release_objects(b);
    }
    return rc;
}

/* Closes in one atomic step, because another thread may make a memoryview. Waits for no call: calls
 * enter the guard of the memory, not the view's. */
static int
close_view(mm_buffer *b)
{
    mm_guard_answer answer = mm_guard_close(&b->guard, true);

    assert(answer != MM_STILL_USED);
    if (answer == MM_STILL_EXPORTED) {
        PyErr_SetString(PyExc_BufferError,
                        "this view cannot be closed: a memoryview or NumPy array of it lives");
        return -1;
    }
    if (answer == MM_CLOSED_NOW) {
        release_hold(b);
    }
    return 0;
}

/* Returns the hint of managedmem._notebook about views that IPython keeps. Returns NULL outside
 * IPython, and with an exception on failure. */
static PyObject *
notebook_hint(PyObject *op)
{
    PyObject *name = PyUnicode_FromString("IPython"), *notebook = NULL, *hint = NULL;
    PyObject *loaded = name ? PyImport_GetModule(name) : NULL;

    if (loaded != NULL) {
        notebook = PyImport_ImportModule("managedmem._notebook");
    }
    if (notebook != NULL) {
        hint = PyObject_CallMethod(notebook, "hint", "O", op);
    }
    Py_XDECREF(name);
    Py_XDECREF(loaded);
    Py_XDECREF(notebook);
    return hint;
}

/* Adds the hint to a BufferError about views, but not to one from a memory resource. If the hint
 * fails, the error is unchanged. */
static void
add_notebook_hint(PyObject *op)
{
    mm_exception raised;
    PyObject *hint;

    assert(PyErr_Occurred());
    if (!PyErr_ExceptionMatches(PyExc_BufferError)
        || mm_guard_exports(&mm_buffer_of(op)->memory->guard) == 0) {
        return;
    }
    mm_exception_save(&raised);
    hint = notebook_hint(op);
    if (hint != NULL) {
        PyErr_Format(PyExc_BufferError, "%S%S", raised.value, hint);
        Py_DECREF(hint);
    } else if (PyErr_Occurred() == NULL || PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* any Exception from making the hint */
        mm_exception_restore(&raised);
        return;
    }
    Py_XDECREF(raised.type);
    Py_XDECREF(raised.value);
    Py_XDECREF(raised.traceback);
}

const char mm_buffer_close_doc[] =
    "close($self, /, stream=None)\n--\n\n"
    "Free the memory. Closing a second time does nothing.\n"
    "\n"
    "Waits for work that uses the memory and, with a stream, for all work queued there. Memory of\n"
    "a pool is freed without waiting, in the order of the stream. If no stream is passed, this is\n"
    "the stream of the allocation, or of set_deallocation_stream(). Releases the owner, the\n"
    "memory resource and the parent of a view. Closing a view ends only that view.\n"
    "\n"
    "After these errors the buffer stays open and can be closed again: BufferError while a memoryview,\n"
    "NumPy array or DLPack tensor of the memory lives; CUDAError for pool memory on a stream that captures\n"
    "a graph, and inside a host function; any exception of mr.deallocate(). After any other CUDAError the\n"
    "buffer counts as closed. Safe from every thread; releases the GIL.\n"
    "Driver: cuMemFree, cuMemFreeAsync, cuStreamSynchronize.";

PyObject *
mm_buffer_close(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_buffer_close_doc};
    mm_buffer *b = mm_buffer_of(op);
    PyObject *argv[1];
    int rc = 0;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0) {
        return NULL;
    }
    if (b->is_view) {
        rc = close_view(b);
    } else if (!mm_guard_is_closed(&b->memory->guard)) {
        rc = b->foreign_pid != 0 ? close_foreign(b, argv[0]) : close_own(b, argv[0]);
    }
    if (rc < 0) {
        add_notebook_hint(op);
        return NULL;
    }
    Py_RETURN_NONE;
}

const char mm_buffer_exit_doc[] =
    "__exit__($self, /, *exception)\n--\n\n"
    "Close the buffer. If an exception leaves the block while exports live, the exception propagates,\n"
    "the buffer stays open, and its memory is freed with the last export.";

/* A BufferError about exports must not hide an exception that leaves the block: the frames of that
 * exception may hold the exports, and the last export frees the memory. */
PyObject *
mm_buffer_exit(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    bool raised = nargs > 0 && args[0] != Py_None;
    PyObject *result = mm_buffer_close(op, NULL, 0, NULL);

    if (result == NULL && raised && PyErr_ExceptionMatches(PyExc_BufferError)
        && mm_guard_exports(&mm_buffer_of(op)->memory->guard) > 0) {
        PyErr_Clear(); /* BufferError: the exception of the block propagates */
        result = Py_NewRef(Py_None);
    }
    return result;
}

/* --- the stream of the deallocation ----------------------------------------------------- */

/* BufferError while exports live: they may outlive the buffer, which keeps the stream object
 * alive. */
static int
refuse_exported(mm_buffer *b)
{
    if (mm_guard_exports(&b->memory->guard) > 0) {
        PyErr_SetString(
            PyExc_BufferError,
            "the deallocation stream cannot be changed to one of another library while "
            "a memoryview, NumPy array or DLPack tensor of the memory lives");
        return -1;
    }
    return 0;
}

/* Stores the handle for pool memory, and keeps a stream of another library alive. */
static int
set_stream_of_pool(mm_buffer *root, PyObject *stream)
{
    mm_driver *cu = mm_open(root->state);
    mm_stream_use use;
    bool done = true, foreign;
    mm_status st;
    int rc;

    if (cu == NULL || mm_stream_read(root->state, stream, &use) < 0) {
        return -1;
    }
    foreign = use.handle != NULL && use.shared == NULL;
    assert(!root->is_view && root->memory->pooled);
    if (foreign && refuse_exported(root) < 0) {
        return -1;
    }
    if (!mm_stream_enter(&use)) { /* raced */
        return mm_stream_raise_closed();
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_memory_set_stream(cu, root->memory, use.handle, use.shared, &done, &st);
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(root->state, &st);
    } else if (!done) { /* raced */
        rc = mm_buffer_raise_closed(root);
    } else {
        Py_XDECREF(exchange_field(root, &root->stream, foreign ? Py_NewRef(stream) : NULL));
    }
    return rc;
}

static int
set_stream_of_foreign(mm_buffer *root, PyObject *stream)
{
    PyObject *resource = mm_buffer_resource(root);
    PyObject *streams =
        resource ? mm_foreign_resource_stream(root->state, resource, stream) : NULL;

    if (streams != NULL) {
        Py_XDECREF(exchange_field(root, &root->stream, streams));
    } else if (resource == NULL) { /* raced */
        (void)mm_buffer_raise_closed(root);
    }
    Py_XDECREF(resource);
    return streams ? 0 : -1;
}

/* Other memory is freed after all work on it, or by its owner, so the stream is only checked. */
static int
check_deallocation_stream(mm_buffer *root, PyObject *stream)
{
    mm_stream_use use;

    return mm_stream_read(root->state, stream, &use);
}

const char mm_set_deallocation_stream_doc[] =
    "set_deallocation_stream($self, stream, /)\n--\n\n"
    "Set the stream that frees the memory when the buffer ends or is closed without a stream.\n"
    "\n"
    "Memory of a pool is freed in the order of the stream; for memory with mr= in from_handle(),\n"
    "mr.deallocate() gets the stream. Managed memory without a pool is freed after all work on it, and\n"
    "stream is only checked. The call does not wait: order the stream behind the work on the memory. A\n"
    "view sets it for the whole buffer. Raises TypeError for None and objects that are not streams,\n"
    "RuntimeError when closed, BufferError for pool memory with exports and a stream of another library.\n"
    "Safe from every thread. Driver: none.";

PyObject *
mm_buffer_set_deallocation_stream(PyObject *op, PyObject *stream)
{
    PyObject *held;
    mm_buffer *root;
    int rc;

    if (stream == Py_None) {
        PyErr_SetString(PyExc_TypeError,
                        "stream is required: a Stream, an object with __cuda_stream__ or an int "
                        "handle; Stream.from_handle(1) is the legacy default stream");
        return NULL;
    }
    if (mm_buffer_check_open(mm_buffer_of(op)) < 0
        || (held = mm_buffer_root(mm_buffer_of(op))) == NULL) {
        return NULL;
    }
    root = mm_buffer_of(held);
    if (root->foreign_pid != 0) {
        rc = set_stream_of_foreign(root, stream);
    } else {
        rc = root->memory->pooled ? set_stream_of_pool(root, stream)
                                  : check_deallocation_stream(root, stream);
    }
    Py_DECREF(held);
    if (rc < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}
