/* buffer.c: functions shared by all parts of ManagedBuffer: making a buffer or a view, its
 * references to other objects and its name, and entering and leaving it for a call. The type is
 * in buffer_object.c. */
#include "buffer.h"

#include <string.h>

/* --- making ----------------------------------------------------------------------------- */

void
mm_buffer_release(mm_memory *memory)
{
    if (mm_memory_release_hold(memory) && mm_memory_closing_blocks(memory)) {
        /* Freeing waits for work on the memory, which may itself wait for the GIL. */
        Py_BEGIN_ALLOW_THREADS
        mm_memory_retire(memory);
        Py_END_ALLOW_THREADS
    }
    mm_memory_release_reference(memory);
}

/* Makes a buffer without a layout. Steals the reference to the memory, even on failure. */
static mm_buffer *
allocate_buffer(mm_state *state, PyTypeObject *type, mm_memory *memory)
{
    mm_buffer *b = mm_buffer_of(mm_alloc_object(type));

    assert(state != NULL && memory != NULL);
    if (b == NULL) {
        mm_buffer_release(memory);
        return NULL;
    }
    b->state = state;
    b->memory = memory;
    return b;
}

static inline void
set_layout(mm_buffer *b, const mm_layout *layout)
{
    Py_ssize_t stride = layout->dtype->itemsize;
    bool empty = false;

    assert(layout->dimensions >= 0 && layout->dimensions <= MM_MAX_DIMENSIONS);
    b->dtype = layout->dtype;
    b->dimensions = layout->dimensions;
    for (int i = layout->dimensions - 1; i >= 0; i--) {
        Py_ssize_t length = layout->shape[i];
        assert(length >= 0);
        b->shape[i] = length;
        b->strides[i] = stride;
        stride *= length > 0 ? length : 1; /* a length of 0 counts as 1, as in torch */
        empty = empty || length == 0;
    }
    b->size = empty ? 0 : (size_t)stride;
}

/* Makes the root buffer over a memory that was just made. Steals the reference to the memory. */
static inline PyObject *
new_root(mm_state *state, PyTypeObject *type, mm_memory *memory, const mm_layout *layout,
         PyObject *owner, PyObject *resource)
{
    mm_buffer *b = allocate_buffer(state, type, memory);

    if (b != NULL) {
        b->owner = Py_XNewRef(owner);
        b->resource = Py_XNewRef(resource);
        b->start = memory->start;
        set_layout(b, layout);
        assert(b->size == memory->size);
        mm_allocation_entry_describe(&memory->entry, b->dtype->name, b->dimensions, b->shape);
    }
    return (PyObject *)b;
}

PyObject *
mm_buffer_new(mm_state *state, PyTypeObject *type, mm_memory *memory, const mm_layout *layout,
              PyObject *owner, PyObject *resource)
{
    return new_root(state, type, memory, layout, owner, resource);
}

PyObject *
mm_buffer_new_bytes(mm_state *state, PyTypeObject *type, mm_memory *memory, PyObject *owner,
                    PyObject *resource)
{
    Py_ssize_t length = (Py_ssize_t)memory->size;
    mm_layout layout = mm_layout_of_bytes(&length);

    return new_root(state, type, memory, &layout, owner, resource);
}

PyObject *
mm_buffer_view(mm_buffer *from, size_t offset, const mm_layout *layout)
{
    PyObject *root = mm_buffer_root(from);
    mm_buffer *b;

    if (root == NULL) {
        return NULL;
    }
    mm_memory_retain(from->memory);
    b = allocate_buffer(from->state, Py_TYPE((PyObject *)from), from->memory);
    if (b == NULL) {
        Py_DECREF(root);
        return NULL;
    }
    b->is_view = true;
    b->root = root;
    b->start = from->start ? from->start + offset : 0; /* 0 bytes of memory have no address */
    set_layout(b, layout);
    assert(b->size == 0 || (offset < from->size && b->size <= from->size - offset));
    return (PyObject *)b;
}

/* --- references to other objects -------------------------------------------------------- */

/* A new reference to the object in the field, which another thread may be releasing. */
static PyObject *
get_field(mm_buffer *b, PyObject *const *field)
{
    PyObject *value;

    MM_ASSERT_LEFT();
    MM_LOCK(b);
    value = Py_XNewRef(*field);
    MM_UNLOCK();
    return value;
}

PyObject *
mm_buffer_find_root(mm_buffer *b)
{
    return b->is_view ? get_field(b, &b->root) : Py_NewRef((PyObject *)b);
}

PyObject *
mm_buffer_root(mm_buffer *b)
{
    PyObject *root = mm_buffer_find_root(b);

    if (root == NULL) { /* raced */
        (void)mm_buffer_raise_closed(b);
    }
    return root;
}

PyObject *
mm_buffer_owner(mm_buffer *b)
{
    PyObject *root = mm_buffer_find_root(b);
    PyObject *owner = root ? get_field(mm_buffer_of(root), &mm_buffer_of(root)->owner) : NULL;

    Py_XDECREF(root);
    return owner;
}

PyObject *
mm_buffer_resource(mm_buffer *b)
{
    PyObject *root = mm_buffer_find_root(b);
    PyObject *resource =
        root ? get_field(mm_buffer_of(root), &mm_buffer_of(root)->resource) : NULL;

    Py_XDECREF(root);
    return resource;
}

PyObject *
mm_buffer_stream(mm_buffer *b)
{
    return get_field(b, &b->stream);
}

/* --- calls ------------------------------------------------------------------------------ */

int
mm_buffer_raise_closed(const mm_buffer *b)
{
    char name[MM_NAME_BYTES + 1];

    MM_ASSERT_LEFT();
    if (mm_allocation_entry_read_name(&b->memory->entry, name)) {
        PyErr_Format(PyExc_RuntimeError, "ManagedBuffer '%s' is closed", name);
    } else {
        PyErr_SetString(PyExc_RuntimeError, "ManagedBuffer is closed");
    }
    return -1;
}

static int
read_range(mm_buffer *b, mm_driver *cu, mm_operation op, mm_range *range, mm_status *st)
{
    /* An empty buffer allows everything; its size is compared last, off the fast path. */
    if (mm_memory_check(cu, b->memory, op, st) < 0 && b->size > 0) {
        return -1;
    }
    range->start = b->start;
    range->size = b->size;
    range->allocation = atomic_load_explicit(&b->memory->allocation, memory_order_relaxed);
    return 0;
}

/* The slow path of mm_buffer_enter, for memory that is not known to be managed. On failure, leaves
 * the buffer and raises. */
MM_COLD static int
check_entered(mm_buffer *b, mm_operation op, mm_buffer_use *use)
{
    mm_status st;

    assert(use->range.allocation == 0);
    if (read_range(b, use->cu, op, &use->range, &st) < 0) {
        mm_buffer_leave(use);
        return mm_raise_failure(b->state, -1, &st);
    }
    return 0;
}

int
mm_buffer_enter(mm_buffer *b, mm_operation op, const mm_stream_use *stream, mm_buffer_use *use)
{
    assert(b->state != NULL && b->memory != NULL && !PyErr_Occurred());
    if (mm_buffer_check_open(b) < 0 || (use->cu = mm_open(b->state)) == NULL) {
        return -1;
    }
    if (stream != NULL && !mm_stream_enter(stream)) { /* raced */
        return mm_stream_raise_closed();
    }
    use->stream = stream;
    use->memory = b->memory;
    if (!mm_guard_enter(&b->memory->guard)) { /* raced */
        if (stream != NULL) {
            mm_stream_leave(stream);
        }
        return mm_buffer_raise_closed(b);
    }
    use->range.start = b->start;
    use->range.size = b->size;
    use->range.allocation = atomic_load_explicit(&b->memory->allocation, memory_order_relaxed);
    return use->range.allocation != 0 ? 0 : check_entered(b, op, use);
}

int
mm_buffer_advise(mm_buffer *b, mm_advice_change change, const void *arguments)
{
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_ADVISE, NULL, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = change(use.cu, use.range, arguments, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(b->state, rc, &st);
}

int
mm_buffer_check(mm_buffer *b, mm_driver *cu, mm_operation op, mm_range *range, mm_status *st)
{
    MM_ASSERT_LEFT();
    if (mm_buffer_check_open(b) < 0) {
        return -1;
    }
    if (read_range(b, cu, op, range, st) < 0) {
        if (mm_buffer_is_closed(b)) { /* raced */
            return mm_buffer_raise_closed(b); /* by another thread */
        }
        return 1;
    }
    return 0;
}

int
mm_buffer_query_entered(const mm_buffer *b, mm_driver *cu, mm_pointer_attributes *attributes,
                        mm_status *st)
{
    int device = b->memory->device;

    assert(b->size <= b->memory->size);
    if (b->memory->size > 0) {
        /* An empty view may start behind the last byte, where other memory may begin. */
        return mm_pointer_query(cu, b->size > 0 ? b->start : b->memory->start, attributes, st);
    }
    *attributes = (mm_pointer_attributes){
        .managed = device == MM_ANY_DEVICE, .type = CU_MEMORYTYPE_DEVICE, .device = device};
    return device == MM_ANY_DEVICE ? mm_current_device(cu, &attributes->device, st) : 0;
}

int
mm_buffer_query(mm_buffer *b, mm_pointer_attributes *attributes, mm_driver **cu)
{
    mm_status st;
    int rc;

    if (mm_buffer_check_open(b) < 0 || (*cu = mm_open(b->state)) == NULL) {
        return -1;
    }
    if (!mm_guard_enter(&b->memory->guard)) { /* raced */
        return mm_buffer_raise_closed(b);
    }
    rc = mm_buffer_query_entered(b, *cu, attributes, &st);
    mm_guard_leave(&b->memory->guard);
    return mm_raise_failure(b->state, rc, &st);
}

int
mm_buffer_is_managed(mm_buffer *b, bool *managed)
{
    mm_range range = {.start = b->start, .size = b->size};
    mm_pointer_attributes attributes;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_buffer_query(b, &attributes, &cu) < 0) {
        return -1;
    }
    *managed = attributes.managed != 0;
    if (!*managed || mm_range_end(range) <= attributes.start + attributes.size) {
        return 0; /* the usual buffer, in one allocation */
    }
    if (!mm_guard_enter(&b->memory->guard)) { /* raced */
        return mm_buffer_raise_closed(b);
    }
    rc = mm_range_is_managed(cu, range, managed, &st);
    mm_guard_leave(&b->memory->guard);
    return mm_raise_failure(b->state, rc, &st);
}

/* --- ManagedBuffer.name, and the name= of the functions that make buffers --------------------- */

/* Raises `error` with the reason and the start of the value, which may be long. */
static int
refuse_buffer_name(PyObject *error, const char *reason, PyObject *value)
{
    return MM_ERROR(error, "name %s, got %.300R", reason, value);
}

int
mm_read_name(PyObject *value, const char **name)
{
    Py_ssize_t length;

    *name = NULL;
    if (value == NULL || value == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(value)) {
        return refuse_buffer_name(PyExc_TypeError, "must be a str or None", value);
    }
    *name = PyUnicode_AsUTF8AndSize(value, &length);
    if (*name == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_Clear(); /* its message does not name the argument */
            (void)refuse_buffer_name(PyExc_ValueError, "must be text without surrogates", value);
        }
        return -1;
    }
    if (length == 0) {
        return refuse_buffer_name(PyExc_ValueError, "must not be empty (None is no name)", value);
    }
    if (strlen(*name) != (size_t)length) {
        return refuse_buffer_name(PyExc_ValueError, "must not contain a null character", value);
    }
    if (length > MM_NAME_BYTES) {
        return MM_ERROR(PyExc_ValueError,
                        "name must have at most %d bytes of UTF-8, got %zd: %.300R", MM_NAME_BYTES,
                        length, value);
    }
    return 0;
}

PyObject *
mm_buffer_named(PyObject *buffer, const char *name)
{
    bool done;
    mm_status st;

    if (buffer == NULL || name == NULL) {
        return buffer;
    }
    if (mm_memory_set_name(mm_buffer_of(buffer)->memory, name, &done, &st) < 0) {
        (void)mm_raise(mm_buffer_of(buffer)->state, &st);
        Py_DECREF(buffer);
        return NULL;
    }
    return buffer;
}

/* A view has the name of its memory, and so of its root. */
PyObject *
mm_buffer_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    char name[MM_NAME_BYTES + 1];

    return mm_allocation_entry_read_name(&mm_buffer_of(op)->memory->entry, name)
               ? PyUnicode_FromString(name)
               : Py_NewRef(Py_None);
}

int
mm_buffer_set_name(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_buffer *b = mm_buffer_of(op);
    const char *name;
    bool done;
    mm_status st;

    if (value == NULL) {
        return MM_ERROR(PyExc_AttributeError, "name cannot be deleted; assign None");
    }
    if (mm_read_name(value, &name) < 0) {
        return -1;
    }
    if (b->is_view) {
        return MM_ERROR(
            PyExc_ValueError,
            "a view has the name of its whole buffer, so name=%.300R cannot be set here: "
            "set it on the whole buffer, or name the part in a trace with "
            "trace.name(view, label)",
            value);
    }
    if (mm_memory_set_name(b->memory, name, &done, &st) < 0) {
        return mm_raise_failure(b->state, -1, &st);
    }
    return done ? 0 : mm_buffer_raise_closed(b);
}
