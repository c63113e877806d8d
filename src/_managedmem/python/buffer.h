/* buffer.h: the struct behind ManagedBuffer, for the files that make up the type.
 *
 * A buffer is a range of a mm_memory with a dtype and a shape. The first buffer over a memory is
 * the root. Views share the memory of their root, and only the root closes it. Closing clears the
 * references to other objects, so these are read under the object's lock. All other fields are
 * fixed once the object is made, except the guard, hold_released and unclosed_tried. */
#ifndef MM_BUFFER_H
#define MM_BUFFER_H

#include "../memory/copy.h"
#include "../memory/driver_records.h"
#include "../memory/memory.h"
#include "args.h"
#include "dtype.h"
#include "stream_object.h"

#include <sys/types.h>

enum { MM_MAX_DIMENSIONS = 8 };

/* An array without gaps in C order. shape has a length for each dimension. */
typedef struct {
    const mm_dtype *dtype;
    int dimensions;
    const Py_ssize_t *shape;
} mm_layout;

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_state *state;
    mm_memory *memory;
    PyObject *root; /* of a view: the root buffer; NULL in the root itself, and once closed */
    PyObject *owner; /* keeps wrapped memory alive; or NULL */
    PyObject *resource; /* the memory resource that the memory is from; or NULL */
    PyObject *stream; /* another library's stream, in whose order pool memory is freed; or NULL.
                         * For a foreign resource, the tuple of mm_foreign_resource_stream */
    CUdeviceptr start;
    size_t size;
    mm_guard guard; /* of this object: counts its memoryviews; the memory has another guard */
    const mm_dtype *dtype;
    int dimensions;
    pid_t foreign_pid; /* the process that must deallocate through a foreign resource; or 0 */
    bool is_view; /* a closed view is still a view */
    bool hold_released; /* a closed view has released its hold on the memory */
    bool unclosed_tried; /* deallocating foreign memory without close() was tried */
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    Py_ssize_t strides[MM_MAX_DIMENSIONS];
} mm_buffer;

static inline mm_buffer *
mm_buffer_of(PyObject *op)
{
    return (mm_buffer *)op;
}

/* True for a ManagedBuffer or a subclass of it. */
static inline int
mm_is_buffer(mm_state *state, PyObject *op)
{
    return Py_TYPE(op) == state->buffer_type || PyType_IsSubtype(Py_TYPE(op), state->buffer_type);
}

/* --- buffer.c --------------------------------------------------------------------------- */

/* The layout of one axis of uint8 elements. *length is the number of bytes, and is not copied. */
static inline mm_layout
mm_layout_of_bytes(const Py_ssize_t *length)
{
    return (mm_layout){&mm_dtypes[0], 1, length};
}

static inline mm_layout
mm_buffer_layout(const mm_buffer *b)
{
    return (mm_layout){b->dtype, b->dimensions, b->shape};
}

/* Returns a new ManagedBuffer over all of a memory. The layout must have the size of the memory.
 * Steals the reference to the memory, even on failure. owner and resource may be NULL. */
PyObject *mm_buffer_new(mm_state *state, PyTypeObject *type, mm_memory *memory,
                        const mm_layout *layout, PyObject *owner, PyObject *resource);

/* mm_buffer_new with one axis of uint8 elements. */
PyObject *mm_buffer_new_bytes(mm_state *state, PyTypeObject *type, mm_memory *memory,
                              PyObject *owner, PyObject *resource);

/* Returns a new view of the bytes from offset on. The layout must fit into these bytes. */
PyObject *mm_buffer_view(mm_buffer *from, size_t offset, const mm_layout *layout);

/* Releases a reference to a memory, and its hold. Detaches while it does so if that can block. */
void mm_buffer_release(mm_memory *memory);

/* These functions return new references. The root of a buffer that is not a view is the buffer
 * itself. A closed view has no root: mm_buffer_root then raises RuntimeError, mm_buffer_find_root
 * returns NULL without an exception. The other functions return NULL, also without an exception,
 * if the root has no such object or the buffer is closed. */
PyObject *mm_buffer_root(mm_buffer *b);
PyObject *mm_buffer_find_root(mm_buffer *b);
PyObject *mm_buffer_owner(mm_buffer *b);
PyObject *mm_buffer_resource(mm_buffer *b);
PyObject *mm_buffer_stream(mm_buffer *b);

static inline bool
mm_buffer_is_closed(const mm_buffer *b)
{
    return mm_guard_is_closed(&b->guard) || mm_guard_is_closed(&b->memory->guard);
}

/* Raises the RuntimeError of a closed buffer, with its name; returns -1. */
int mm_buffer_raise_closed(const mm_buffer *b);

/* mm_buffer_raise_closed if the buffer is closed; else 0. */
static inline int
mm_buffer_check_open(const mm_buffer *b)
{
    return mm_buffer_is_closed(b) ? mm_buffer_raise_closed(b) : 0;
}

/* A buffer and a stream that a call has entered: they cannot be closed until it leaves them. */
typedef struct {
    mm_driver *cu;
    mm_range range;
    mm_memory *memory;
    const mm_stream_use *stream;
} mm_buffer_use;

/* Enters the stream (NULL for none) and the buffer. Raises if one of them is closed, if no driver
 * is usable, or if the memory does not allow the operation; then nothing is entered. No Python
 * code may run until they are left. Leaving needs no GIL and must precede attaching. */
int mm_buffer_enter(mm_buffer *b, mm_operation op, const mm_stream_use *stream,
                    mm_buffer_use *use);
static inline void
mm_buffer_leave(const mm_buffer_use *use)
{
    mm_guard_leave(&use->memory->guard);
    if (use->stream != NULL) {
        mm_stream_leave(use->stream);
    }
}

/* mm_buffer_begin_query detaches if a query of the advice can take long, else it returns NULL.
 * mm_buffer_end_query leaves the buffer, which was entered for the query, and attaches again. */
static inline PyThreadState *
mm_buffer_begin_query(const mm_buffer_use *use)
{
    return mm_range_may_be_searched(use->range) ? PyEval_SaveThread() : NULL;
}

static inline void
mm_buffer_end_query(const mm_buffer_use *use, PyThreadState *detached)
{
    mm_buffer_leave(use);
    if (detached != NULL) {
        PyEval_RestoreThread(detached);
    }
}

/* A change of the advice on a range, with arguments of its own. */
typedef int mm_advice_change(mm_driver *cu, mm_range range, const void *arguments, mm_status *st);

/* Enters the buffer, detaches, calls `change`, leaves and attaches. Detaches because advice can
 * wait for migrations of other threads. Raises on failure. */
int mm_buffer_advise(mm_buffer *b, mm_advice_change change, const void *arguments);

/* Makes the checks of mm_buffer_enter and stores the range, but enters nothing: the buffer must be
 * entered later. Returns 0; 1 with the status if the memory does not allow the operation; -1 with
 * an exception if the buffer is closed. */
int mm_buffer_check(mm_buffer *b, mm_driver *cu, mm_operation op, mm_range *range, mm_status *st);

/* Queries the attributes of an entered buffer's memory. For 0 bytes, which the driver does not
 * know, stores those of a larger allocation, on the device of the pool or the current one. */
MM_NODISCARD int mm_buffer_query_entered(const mm_buffer *b, mm_driver *cu,
                                         mm_pointer_attributes *attributes, mm_status *st);

/* Sets *managed to true if all of the memory is managed. Raises on failure. */
int mm_buffer_is_managed(mm_buffer *b, bool *managed);

/* mm_buffer_query_entered for a buffer that is not entered. Stores the open driver in *cu. Raises
 * on failure. */
int mm_buffer_query(mm_buffer *b, mm_pointer_attributes *attributes, mm_driver **cu);

/* --- buffer_advice.c -------------------------------------------------------------------- */

mm_getter mm_buffer_get_read_mostly, mm_buffer_get_preferred_location, mm_buffer_get_accessed_by,
    mm_buffer_get_last_prefetch_location;
mm_setter mm_buffer_set_read_mostly, mm_buffer_set_preferred_location, mm_buffer_set_accessed_by;

mm_plain_method mm_buffer_page_runs;
extern const char mm_page_runs_doc[];

/* --- buffer_arrays.c -------------------------------------------------------------------- */

mm_keyword_method mm_buffer_numpy, mm_buffer_array, mm_buffer_torch, mm_buffer_cupy;
extern const char mm_numpy_doc[], mm_buffer_array_doc[], mm_torch_doc[], mm_cupy_doc[];

/* --- buffer_attachment.c ---------------------------------------------------------------- */

/* Reads the attach= of an allocation: "global" or "host". Only mm_read_attach takes NULL, which
 * means "global". */
int mm_read_attach_text(PyObject *value, CUmemAttach_flags *out);
static inline int
mm_read_attach(PyObject *value, CUmemAttach_flags *out)
{
    *out = CU_MEM_ATTACH_GLOBAL;
    return value == NULL ? 0 : mm_read_attach_text(value, out);
}

mm_keyword_method mm_buffer_attach;
mm_getter mm_buffer_get_attachment;
extern const char mm_attach_doc[], mm_attachment_doc[];

/* --- buffer_exports.c ------------------------------------------------------------------- */

int mm_buffer_getbuffer(PyObject *op, Py_buffer *view, int flags);
void mm_buffer_releasebuffer(PyObject *op, Py_buffer *view);
mm_getter mm_buffer_array_interface;
mm_keyword_method mm_buffer_dlpack;
mm_plain_method mm_buffer_dlpack_device;
extern const char mm_buffer_dlpack_doc[], mm_buffer_dlpack_device_doc[];

/* --- buffer_host_access.c: all may run Python code -------------------------------------- */

/* Finds how wrapped memory may be accessed, from two arguments of from_handle(): `stated`, which
 * is is_host_accessible, and owner. Each may be NULL. */
int mm_read_access(mm_state *state, PyObject *stated, PyObject *owner, CUdeviceptr start,
                   size_t size, mm_access *out);

/* 1 if the host can access the memory that the driver describes by attributes; 0 if it cannot, or
 * if nothing states that it can; -1 with an exception. If held is not NULL and the result is 1,
 * *held is a new reference that keeps the owner from giving up the memory, or NULL. */
int mm_host_access(mm_buffer *b, const mm_pointer_attributes *attributes, PyObject **held);

/* BufferError unless the host can access the memory. Where a device lacks concurrent access, waits
 * for all devices, or for the stream that the memory is attached to: the host must not touch
 * managed memory while these work. As long as the host uses the memory, the caller keeps it open,
 * and keeps the reference in *held (see mm_host_access). */
int mm_prepare_host_access(mm_buffer *b, mm_driver *cu, PyObject **held);

/* BufferError for a range that leaves its allocation, because the memory behind the allocation may
 * not be mapped. */
int mm_check_range_inside(CUdeviceptr start, size_t size, const mm_pointer_attributes *attributes);

/* ValueError for memory that the driver would copy on the host, unless something vouches for it.
 * The caller keeps *held (see mm_host_access) until the copy is made. */
int mm_check_copied(mm_buffer *b, PyObject **held);

/* Raises the error for a host view of device memory; returns -1. */
int mm_refuse_device_memory(const mm_buffer *b, PyObject *error);

/* ValueError, with the reason, for a buffer over memory that is read-only. */
int mm_refuse_read_only(PyObject *op, const char *reason);

/* --- the name, in buffer.c ---------------------------------------------------------------- */

/* Reads the name= of a function: a str of 1 to MM_NAME_BYTES bytes of UTF-8. *name is borrowed
 * from the str, and NULL for None or a missing argument. Returns -1 with TypeError or
 * ValueError. */
int mm_read_name(PyObject *value, const char **name);

/* Gives a new buffer a name, unless name is NULL, and returns the buffer. If buffer is NULL,
 * returns NULL. On failure, releases the buffer and returns NULL with an exception. */
PyObject *mm_buffer_named(PyObject *buffer, const char *name);

mm_getter mm_buffer_get_name;
mm_setter mm_buffer_set_name;

/* --- buffer_life.c ---------------------------------------------------------------------- */

mm_keyword_method mm_buffer_close;
mm_positional_method mm_buffer_exit;
mm_plain_method mm_buffer_set_deallocation_stream;
int mm_buffer_traverse(PyObject *op, visitproc visit, void *arg);
int mm_buffer_clear(PyObject *op);
void mm_buffer_finalize(PyObject *op);
void mm_buffer_last_reference(PyObject *op); /* tp_dealloc */
extern const char mm_buffer_close_doc[], mm_buffer_exit_doc[], mm_set_deallocation_stream_doc[];

/* --- buffer_operations.c ---------------------------------------------------------------- */

mm_keyword_method mm_buffer_prefetch, mm_buffer_discard, mm_buffer_discard_prefetch,
    mm_buffer_copy_from, mm_buffer_copy_to, mm_buffer_fill;
mm_plain_method mm_buffer_copy;
extern const char mm_prefetch_doc[], mm_discard_doc[], mm_discard_prefetch_doc[],
    mm_copy_from_doc[], mm_copy_to_doc[], mm_copy_doc[], mm_deepcopy_doc[], mm_fill_doc[];

/* Copies to a new buffer of the same layout and waits for the copy. Does not call copy_to() of a
 * subclass, which could return anything. */
PyObject *mm_buffer_finished_copy(PyObject *op);

/* --- buffer_residency.c ----------------------------------------------------------------- */

mm_plain_method mm_buffer_residency;
extern const char mm_buffer_residency_doc[];

/* --- buffer_views.c --------------------------------------------------------------------- */

/* Reads a shape, which is an int or a sequence of ints of 0 or more, into a layout whose dtype is
 * set. Stores the lengths in shape, and the size of an array of this layout in *bytes. Returns 0,
 * or -1 with an exception. */
int mm_read_shape(PyObject *value, mm_layout *layout, Py_ssize_t shape[MM_MAX_DIMENSIONS],
                  size_t *bytes);

mm_keyword_method mm_buffer_view_method, mm_buffer_range;
PyObject *mm_buffer_subscript(PyObject *op, PyObject *key);
PyObject *mm_buffer_item(PyObject *op, Py_ssize_t i);
PyObject *mm_buffer_iter(PyObject *op);
Py_ssize_t mm_buffer_length(PyObject *op);
int mm_buffer_bool(PyObject *op);
mm_getter mm_buffer_get_shape, mm_buffer_get_strides, mm_buffer_get_ndim;

/* Operations that a buffer does not have; each raises a TypeError that names the replacement. */
int mm_buffer_refuse_assignment(PyObject *op, PyObject *key, PyObject *value);
int mm_buffer_refuse_search(PyObject *op, PyObject *value);
PyObject *mm_buffer_refuse_number(PyObject *op);
extern const char mm_view_doc[], mm_range_doc[];

/* --- location_set_accessed_by.c --------------------------------------------------------- */

/* The live set behind buf.accessed_by, and assignment to it. */
PyObject *mm_accessed_by_new(mm_state *state, PyObject *buffer);
int mm_accessed_by_assign(mm_buffer *b, PyObject *value);

#endif
