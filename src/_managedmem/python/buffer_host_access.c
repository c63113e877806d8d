/* buffer_host_access.c: the check that the host may read and write the memory of a buffer.
 *
 * Memory that was allocated here or that the driver knows is trusted. Reading any other address
 * can end the process, so the caller or the resource must state that it is accessible, or the
 * owner must hold that memory. */
#include "targets.h"

/* --- arguments of from_handle() --------------------------------------------------------- */

/* 1 if the owner exports this memory read-only, 0 if not, -1 with an exception. */
static int
owner_is_read_only(mm_state *state, PyObject *owner, CUdeviceptr start, size_t size)
{
    mm_foreign exported;
    int answer;

    if (mm_is_buffer(state, owner)) {
        return mm_buffer_of(owner)->memory->access.read_only;
    }
    answer = mm_read_owner(state, owner, &exported);
    if (answer <= 0) { /* no interface, or the owner refuses to export now */
        return answer;
    }
    answer = exported.range.start < start + size
             && start < exported.range.start + exported.range.size && exported.read_only;
    Py_XDECREF(exported.export);
    return answer;
}

int
mm_read_access(mm_state *state, PyObject *stated, PyObject *owner, CUdeviceptr start, size_t size,
               mm_access *out)
{
    int read_only = 0;
    bool accessible;

    assert(out->host == MM_HOST_UNSPECIFIED);
    if (stated != NULL && stated != Py_None) {
        if (mm_read_flag(state, stated, "is_host_accessible", &accessible) < 0) {
            return -1;
        }
        out->host = accessible ? MM_HOST_ACCESSIBLE : MM_HOST_INACCESSIBLE;
    }
    if (owner != NULL && size > 0) {
        read_only = owner_is_read_only(state, owner, start, size);
    }
    out->read_only = read_only > 0;
    return read_only < 0 ? -1 : 0;
}

/* --- vouching for memory ---------------------------------------------------------------- */

/* The is_host_accessible of the resource, as cuda.core defines it: 1, 0 or -1 with an
 * exception. */
static int
resource_vouches(mm_buffer *b)
{
    PyObject *resource = mm_buffer_resource(b), *value;
    int answer = 0;

    if (resource != NULL) {
        answer = mm_get_optional(resource, "is_host_accessible", &value);
        Py_DECREF(resource);
        if (answer > 0) {
            answer = PyObject_IsTrue(value);
            Py_DECREF(value);
        }
    }
    return answer;
}

/* Counts as recursion, because the __buffer__ of an object may query another object. */
static int
object_vouches(mm_buffer *b, PyObject *owner, PyObject **held)
{
    int answer;

    assert(!mm_is_buffer(b->state, owner));
    if (Py_EnterRecursiveCall(" while querying the memory of an owner")) {
        return -1;
    }
    answer = mm_holds_memory(b->state, owner, b->start, b->size, held);
    Py_LeaveRecursiveCall();
    return answer;
}

static bool
contains_part(const mm_buffer *b, const mm_buffer *part)
{
    return !mm_buffer_is_closed(b) && b->start <= part->start && part->start - b->start <= b->size
           && part->size <= b->size - (part->start - b->start);
}

/* Returns a new reference to the buffer that decides if the host may access the memory: the first
 * one whose caller stated the access, or whose owner is not a buffer with this memory. *owner is a
 * new reference to that owner, or NULL. Owners are followed in a loop, as they can be many
 * thousands deep. */
static PyObject *
find_decider(mm_buffer *b, PyObject **owner)
{
    PyObject *decider = Py_NewRef((PyObject *)b);

    *owner = NULL;
    while (mm_buffer_of(decider)->memory->access.host == MM_HOST_UNSPECIFIED
           && (*owner = mm_buffer_owner(mm_buffer_of(decider))) != NULL
           && mm_is_buffer(b->state, *owner) && contains_part(mm_buffer_of(*owner), b)) {
        Py_DECREF(decider);
        decider = *owner;
        *owner = NULL;
    }
    return decider;
}

/* Sets *held to a memoryview of the part of `whole`, which keeps `whole` from being closed. */
static int
hold_part(mm_buffer *whole, const mm_buffer *part, PyObject **held)
{
    Py_ssize_t length = (Py_ssize_t)part->size;
    mm_layout layout = mm_layout_of_bytes(&length);
    PyObject *view = mm_buffer_view(whole, part->start - whole->start, &layout);

    assert(*held == NULL);
    *held = view ? PyMemoryView_FromObject(view) : NULL;
    Py_XDECREF(view);
    return *held ? 0 : -1;
}

/* For memory that the driver does not know: 1 if the decider vouches for it, 0 if not, -1 with an
 * exception. */
static int
decider_vouches(mm_buffer *b, mm_buffer *decider, PyObject *owner, PyObject **held)
{
    mm_host_accessible stated = decider->memory->access.host;

    if (stated != MM_HOST_UNSPECIFIED) {
        return stated == MM_HOST_ACCESSIBLE;
    }
    if (owner == NULL) {
        return resource_vouches(decider);
    }
    return mm_is_buffer(b->state, owner) ? 0 : object_vouches(b, owner, held);
}

/* mm_host_access for memory that an owner or resource must vouch for, or must hold. */
static int
query_owners(mm_buffer *b, bool known, PyObject **held)
{
    PyObject *owner, *found = find_decider(b, &owner);
    mm_buffer *decider = mm_buffer_of(found);
    int answer = known ? 1 : decider_vouches(b, decider, owner, held);

    if (answer > 0 && held != NULL && *held == NULL && decider != b
        && hold_part(decider, b, held) < 0) {
        answer = -1;
    }
    Py_XDECREF(owner);
    Py_DECREF(found);
    return answer;
}

static bool
is_known(const mm_pointer_attributes *attributes)
{
    return attributes->managed || attributes->type != 0;
}

int
mm_host_access(mm_buffer *b, const mm_pointer_attributes *attributes, PyObject **held)
{
    bool known = is_known(attributes);

    assert(!PyErr_Occurred());
    if (held != NULL) {
        *held = NULL;
    }
    if (b->memory->access.host == MM_HOST_INACCESSIBLE
        || (known && !mm_host_reaches(attributes))) {
        return 0;
    }
    return known && (held == NULL || b->memory->owned) ? 1 : query_owners(b, known, held);
}

/* --- host views ------------------------------------------------------------------------- */

static int
refuse_unknown(mm_buffer *b)
{
    PyObject *owner = mm_buffer_owner(b);

    PyErr_Format(PyExc_BufferError,
                 "the host may not be able to read the memory at %p, which is not managed and "
                 "not known to the CUDA driver. If it can, pass is_host_accessible=True to "
                 "from_handle(), or the object that holds the memory as owner%s",
                 (void *)(uintptr_t)b->start,
                 owner ? "; the present owner does not show all of it through the buffer protocol"
                       : "");
    Py_XDECREF(owner);
    return -1;
}

int
mm_refuse_device_memory(const mm_buffer *b, PyObject *error)
{
    /* copy_to() takes no wrapped memory of a device, such as a frame of a WorkingSet. */
    bool copied = b->memory->device != MM_ANY_DEVICE;

    return MM_ERROR(
        error, "the host cannot reach the memory at %p: it is plain device memory; %s reads it",
        (void *)(uintptr_t)b->start,
        copied ? "buf.copy_to(array)" : "copy_from(buf) of managedmem.empty_like(buf)");
}

static int
refuse_host_access(mm_buffer *b, const mm_pointer_attributes *attributes)
{
    void *start = (void *)(uintptr_t)b->start;

    assert(b->size > 0);
    if (b->memory->access.host == MM_HOST_INACCESSIBLE) {
        PyErr_Format(PyExc_BufferError,
                     "the host cannot reach the memory at %p: from_handle() was called with "
                     "is_host_accessible=False",
                     start);
    } else if (is_known(attributes)) {
        return mm_refuse_device_memory(b, PyExc_BufferError);
    } else {
        return refuse_unknown(b);
    }
    return -1;
}

int
mm_check_range_inside(CUdeviceptr start, size_t size, const mm_pointer_attributes *attributes)
{
    size_t offset = start - attributes->start;

    if (attributes->size == 0 || size == 0
        || (offset <= attributes->size && size <= attributes->size - offset)) {
        return 0;
    }
    return MM_ERROR(
        PyExc_BufferError,
        "the range of %zu bytes at %p leaves its allocation, which has %zu bytes at %p", size,
        (void *)(uintptr_t)start, attributes->size, (void *)(uintptr_t)attributes->start);
}

/* mm_check_range_inside for a buffer, unless its memory was allocated here, or is not managed and
 * is stated to be accessible. */
static int
check_inside(const mm_buffer *b, const mm_pointer_attributes *attributes)
{
    bool trusted = !attributes->managed && b->memory->access.host == MM_HOST_ACCESSIBLE;

    return b->memory->owned || trusted ? 0 : mm_check_range_inside(b->start, b->size, attributes);
}

/* Enters the guard of the memory, because a DLPack export checks the access before it exports. */
static int
wait_for_devices(mm_buffer *b, mm_driver *cu)
{
    mm_status st;
    int rc;

    assert(!cu->concurrent_access);
    if (!mm_guard_enter(&b->memory->guard)) { /* raced */
        return mm_buffer_raise_closed(b);
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_attachment_wait(cu, &b->memory->attachment, &st);
    mm_guard_leave(&b->memory->guard);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(b->state, rc, &st);
}

int
mm_prepare_host_access(mm_buffer *b, mm_driver *cu, PyObject **held)
{
    mm_pointer_attributes attributes;
    mm_status st;
    int access;

    MM_ASSERT_LEFT();
    *held = NULL;
    if (b->size == 0) {
        return 0;
    }
    if (mm_pointer_query(cu, b->start, &attributes, &st) < 0) {
        return mm_raise_failure(b->state, -1, &st);
    }
    access = mm_host_access(b, &attributes, held);
    if (access <= 0) {
        return access < 0 ? -1 : refuse_host_access(b, &attributes);
    }
    if (check_inside(b, &attributes) < 0
        || (attributes.managed && !cu->concurrent_access && wait_for_devices(b, cu) < 0)) {
        Py_CLEAR(*held);
        return -1;
    }
    return 0;
}

/* --- copies ----------------------------------------------------------------------------- */

static int
refuse_copy(CUdeviceptr start)
{
    return MM_ERROR(
        PyExc_ValueError,
        "the memory at %p cannot be copied or filled: the CUDA driver does not know it, "
        "and would use it on the host. If the host can use it, pass the object that holds it, or "
        "use from_handle(..., is_host_accessible=True)",
        (void *)(uintptr_t)start);
}

int
mm_check_copied(mm_buffer *b, PyObject **held)
{
    mm_pointer_attributes attributes;
    mm_driver *cu;
    int access;

    *held = NULL;
    if (b->size == 0 || mm_memory_is_known(b->memory)) {
        return 0;
    }
    if (mm_buffer_query(b, &attributes, &cu) < 0) {
        return -1;
    }
    access = is_known(&attributes) ? 1 : mm_host_access(b, &attributes, held);
    if (access == 0) {
        return refuse_copy(b->start);
    }
    return access < 0 ? -1 : 0;
}

int
mm_check_foreign_copied(mm_state *state, const mm_foreign *side)
{
    mm_pointer_attributes attributes;
    mm_driver *cu;
    mm_status st;

    if (side->vouched || side->range.size == 0) {
        return 0;
    }
    if ((cu = mm_open(state)) == NULL) { /* unreached: only a fork closes the driver */
        return -1;
    }
    if (mm_pointer_query(cu, side->range.start, &attributes, &st) < 0) {
        return mm_raise_failure(state, -1, &st);
    }
    return is_known(&attributes) ? 0 : refuse_copy(side->range.start);
}

int
mm_refuse_read_only(PyObject *op, const char *reason)
{
    mm_buffer *b = mm_buffer_of(op);

    return b->memory->access.read_only && b->size > 0
               ? mm_refuse_foreign(PyExc_ValueError, op, reason)
               : 0;
}
