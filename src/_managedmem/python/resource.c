/* resource.c: both types of memory resources: their life, allocating and freeing, trimming. The
 * types are in resource_managed.c and resource_device.c, the attributes of a pool in
 * resource_attributes.c. */
#include "resource.h"

#include "../memory/prefetch.h"
#include "foreign_location.h"
#include "foreign_resource.h"
#include "leak_warnings.h"
#include "oversubscription.h"
#include "stream_object.h"

/* --- the warning of systems without concurrent access ------------------------------------ */

/* Issues a UserWarning once in a process, but not while an interpreter ends. If a filter turns it
 * into an error, each call fails. */
MM_COLD static int
warn_without_access(void)
{
    static atomic_bool warned;
    PyObject *module, *result = NULL;

    MM_ASSERT_LEFT();
    if (atomic_load(&warned) || mm_imports_have_ended() || atomic_exchange(&warned, true)) {
        return 0;
    }
    module = PyImport_ImportModule("managedmem._access_warning");
    if (module != NULL) {
        result = PyObject_CallMethod(module, "warn", NULL);
    }
    Py_XDECREF(module);
    if (result == NULL) {
        atomic_store(&warned, false);
        return -1;
    }
    Py_DECREF(result);
    return 0;
}

int
mm_check_access(const mm_driver *cu)
{
    return cu->concurrent_access ? 0 : warn_without_access();
}

/* --- life ------------------------------------------------------------------------------- */

/* Creates the object before the pool, so that a failed allocation leaves no pool to release. Sets
 * `pooled` after the pool, because other threads can find the object through the garbage
 * collector. */
PyObject *
mm_resource_new(PyTypeObject *type, bool pooled, bool managed, CUmemLocation location,
                size_t max_size)
{
    mm_state *state = mm_type_state(type);
    mm_driver *cu = pooled ? mm_open(state) : mm_driver_usable();
    mm_pool *pool = NULL;
    PyObject *self;
    mm_status st;

    if ((pooled && cu == NULL) || (managed && cu != NULL && mm_check_access(cu) < 0)
        || (self = mm_alloc_object(type)) == NULL) {
        return NULL;
    }
    if (pooled) {
        Py_BEGIN_ALLOW_THREADS
        pool = mm_pool_create(cu, managed, location, max_size, &st);
        Py_END_ALLOW_THREADS
        mm_report_leaks();
        if (pool == NULL) {
            Py_DECREF(self);
            return mm_raise(state, &st);
        }
    }
    mm_resource_of(self)->location = location;
    mm_resource_of(self)->max_size = max_size;
    mm_resource_of(self)->pool = pool;
    mm_resource_of(self)->pooled = pooled;
    return self;
}

/* Closes the resource and releases its pool, once. Buffers of the pool keep the pool alive. */
static int
close_resource(mm_resource *r, mm_status *st)
{
    mm_guard_answer answer = mm_guard_close(&r->guard, mm_driver_forked());

    if (answer == MM_STILL_USED) {
        return mm_fail_still_used(st);
    }
    return answer == MM_CLOSED_NOW && r->pool != NULL ? mm_pool_release(r->pool, st) : 0;
}

void
mm_resource_dealloc(PyObject *op)
{
    mm_status st;

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    Py_BEGIN_ALLOW_THREADS
    if (close_resource(mm_resource_of(op), &st) < 0) {
        mm_leak_note_status(&st, 0); /* a deallocation cannot raise */
    }
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    mm_free_object(op);
}

int
mm_resource_raise_closed(void)
{
    MM_ASSERT_LEFT();
    PyErr_SetString(PyExc_RuntimeError, "the memory resource is closed");
    return -1;
}

mm_driver *
mm_resource_enter(PyObject *op)
{
    mm_driver *cu;

    MM_ASSERT_LEFT();
    if (mm_guard_is_closed(&mm_resource_of(op)->guard)) {
        (void)mm_resource_raise_closed();
        return NULL;
    }
    cu = mm_open(mm_type_state(Py_TYPE(op)));
    if (cu != NULL && !mm_guard_enter(&mm_resource_of(op)->guard)) { /* raced */
        (void)mm_resource_raise_closed();
        return NULL;
    }
    return cu;
}

void
mm_resource_leave(PyObject *op)
{
    mm_guard_leave(&mm_resource_of(op)->guard);
}

int
mm_resource_check_pooled(PyObject *op)
{
    if (!mm_resource_of(op)->pooled) {
        PyErr_Format(PyExc_RuntimeError, "%R has no pool: make one with pooled=True", op);
        return -1;
    }
    return 0;
}

/* --- allocating and freeing ------------------------------------------------------------- */

/* Advises new memory before anything can touch it. Frees it if that fails. */
MM_COLD static mm_memory *
advise_new(mm_driver *cu, mm_memory *memory, const mm_policy *policy, mm_status *st)
{
    mm_range range = {memory->start, memory->size, atomic_load(&memory->allocation)};

    if (mm_policy_advise_new(cu, range, policy, st) < 0) {
        mm_memory_release(memory);
        return NULL;
    }
    return memory;
}

/* Memory without a pool is usable at once, on every stream. */
static inline PyObject *
allocate_unpooled(mm_state *state, PyObject *resource, size_t bytes, const mm_layout *layout,
                  const mm_policy *policy, CUmemAttach_flags to)
{
    mm_driver *cu = mm_open(state);
    mm_memory *memory;
    mm_status st;

    if (cu == NULL || mm_check_access(cu) < 0 || mm_warn_of_allocation(cu, bytes) < 0
        || (policy != NULL && mm_warn_of_place(bytes, policy->preferred) < 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    memory = mm_memory_allocate(cu, bytes, to, &st);
    if (policy != NULL && memory != NULL) {
        memory = advise_new(cu, memory, policy, &st);
    }
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    return memory ? mm_buffer_new(state, state->buffer_type, memory, layout, NULL, resource)
                  : mm_raise(state, &st);
}

static PyObject *
allocate_pooled(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
                const mm_layout *layout)
{
    mm_stream_use use;
    mm_memory *memory;
    PyObject *buffer;
    mm_driver *cu;
    mm_status st;

    if (mm_stream_read(state, stream, &use) < 0
        || (Py_TYPE(resource) == state->managed_resource_type && (cu = mm_driver_usable()) != NULL
            && mm_warn_of_allocation(cu, bytes) < 0)
        || (cu = mm_resource_enter(resource)) == NULL) {
        return NULL;
    }
    if (!mm_stream_enter(&use)) { /* raced */
        mm_resource_leave(resource);
        (void)mm_stream_raise_closed();
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    memory = mm_memory_allocate_from(cu, mm_resource_of(resource)->pool, bytes, use.handle,
                                     use.shared, &st);
    mm_stream_leave(&use);
    mm_resource_leave(resource);
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    if (memory == NULL) {
        return mm_raise(state, &st);
    }
    buffer = mm_buffer_new(state, state->buffer_type, memory, layout, NULL, resource);
    if (buffer != NULL && use.handle != NULL
        && use.shared == NULL) { /* a stream of another library */
        mm_buffer_of(buffer)->stream = Py_NewRef(stream);
    }
    return buffer;
}

/* Populates the pages of a new buffer in the order of the stream. Releases the buffer if that
 * fails. */
MM_COLD static PyObject *
prefetch_new(mm_state *state, PyObject *buffer, CUmemLocation location, PyObject *stream_object)
{
    mm_stream_use stream;
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_stream_read(state, stream_object, &stream) < 0
        || mm_buffer_enter(mm_buffer_of(buffer), MM_PREFETCH, &stream, &use) < 0) {
        Py_DECREF(buffer);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_populate(use.cu, use.range, location, stream.handle, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    if (mm_raise_failure(state, rc, &st) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

MM_COLD static PyObject *
refuse_prefetch(PyObject *resource)
{
    PyErr_Format(PyExc_ValueError,
                 "prefetch needs managed memory, and the memory of %R stays on its device",
                 resource);
    return NULL;
}

MM_COLD static PyObject *
refuse_policy(PyObject *resource)
{
    PyErr_Format(PyExc_ValueError,
                 "policy needs memory without a pool, because drivers refuse all advice on the "
                 "memory of %R",
                 resource);
    return NULL;
}

MM_COLD static PyObject *
refuse_attach(PyObject *resource)
{
    PyErr_Format(PyExc_ValueError,
                 "attach=\"host\" needs memory without a pool, because the driver attaches whole "
                 "allocations and not the memory of %R",
                 resource);
    return NULL;
}

static inline PyObject *
allocate_in_pool(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
                 const mm_layout *layout, const mm_placement *placement)
{
    if (placement->policy != NULL) {
        return refuse_policy(resource);
    }
    return placement->attach == CU_MEM_ATTACH_GLOBAL
               ? allocate_pooled(state, resource, stream, bytes, layout)
               : refuse_attach(resource);
}

static inline PyObject *
allocate_unpopulated(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
                     const mm_layout *layout, const mm_placement *placement)
{
    const mm_policy *policy = placement->policy;
    mm_stream_use use;

    assert(resource == NULL || mm_is_resource(state, resource));
    if (resource != NULL && mm_guard_is_closed(&mm_resource_of(resource)->guard)) {
        (void)mm_resource_raise_closed();
        return NULL;
    }
    if (resource != NULL && mm_resource_of(resource)->pooled) {
        return allocate_in_pool(state, resource, stream, bytes, layout, placement);
    }
    if (mm_stream_read(state, stream, &use) < 0) { /* the stream is only checked */
        return NULL;
    }
    if (policy == NULL && resource != NULL && mm_resource_of(resource)->has_policy) {
        policy = &mm_resource_of(resource)->policy;
    }
    return allocate_unpooled(state, resource, bytes, layout, policy, placement->attach);
}

int
mm_read_placement(mm_state *state, PyObject *policy, PyObject *prefetch, PyObject *attach,
                  mm_placement *out)
{
    out->prefetch = (CUmemLocation){0};
    if (mm_read_policy(state, policy, &out->policy) < 0
        || mm_read_attach(attach, &out->attach) < 0) {
        return -1;
    }
    return prefetch == NULL || prefetch == Py_None
               ? 0
               : mm_read_location(state, prefetch, &out->prefetch);
}

static inline PyObject *
allocate(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
         const mm_layout *layout, const mm_placement *placement)
{
    PyObject *buffer;

    if (placement->prefetch.type == CU_MEM_LOCATION_TYPE_NONE) {
        return allocate_unpopulated(state, resource, stream, bytes, layout, placement);
    }
    if (resource != NULL && Py_TYPE(resource) == state->device_resource_type) {
        return refuse_prefetch(resource);
    }
    if (mm_warn_of_place(bytes, placement->prefetch) < 0) {
        return NULL;
    }
    buffer = allocate_unpopulated(state, resource, stream, bytes, layout, placement);
    return buffer ? prefetch_new(state, buffer, placement->prefetch, stream) : NULL;
}

PyObject *
mm_allocate(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
            const mm_layout *layout, const mm_placement *placement)
{
    return allocate(state, resource, stream, bytes, layout, placement);
}

PyDoc_STRVAR(
    allocate_doc,
    "allocate($self, size, *, stream=None, name=None, policy=None, prefetch=None, attach='global')\n--\n\n"
    "A new ManagedBuffer of size bytes (dtype uint8, one axis), with undefined contents.\n"
    "\n"
    "Memory of a pool is allocated in the order of the stream, and usable there from that point\n"
    "on; other streams and the host must wait for that point. close() and the last reference free\n"
    "the memory in the same order. Without a pool the memory is usable at once, on every stream;\n"
    "stream is then only checked, and used for the prefetch. Size 0 allocates nothing. name\n"
    "becomes ManagedBuffer.name.\n"
    "\n"
    "prefetch is a Device or Host where the pages are populated, in the order of the stream. None: no page\n"
    "of managed memory is populated before its first use or prefetch. If the prefetch fails, the memory\n"
    "is freed.\n"
    "\n"
    "policy is a MigrationPolicy that the memory has from the start, before anything touches it; None\n"
    "takes the policy of the resource. If the driver refuses the advice, the memory is freed.\n"
    "\n"
    "attach is \"global\", or \"host\" for memory without a pool that only the host uses at first: see\n"
    "ManagedBuffer.attach().\n"
    "\n"
    "Raises ValueError for a size below 0, a bad name or attach, a policy or \"host\" with a pool, or a\n"
    "prefetch with the pool of a device; TypeError for a size that is not an int or a policy or\n"
    "location of another type; RuntimeError when the resource is closed; CUDAError for a pool or\n"
    "a prefetch on a stream that captures a graph, and for advice or a prefetch that the driver\n"
    "refuses; CUDAOutOfMemoryError when memory runs out. Safe from every thread; releases the\n"
    "GIL.\n"
    "Driver: cuMemAllocManaged, cuMemAdvise, cuMemRangeGetAttributes, cuMemAllocFromPoolAsync,\n"
    "cuMemPrefetchAsync.");

static PyObject *
resource_allocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SIZE, STREAM, NAME, POLICY, PREFETCH, ATTACH, ARGC };
    static mm_signature signature = {.doc = allocate_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *argv[ARGC];
    mm_placement placement;
    const char *name;
    Py_ssize_t length;
    mm_layout layout;
    size_t size;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_size(argv[SIZE], "size", &size) < 0 || mm_read_name(argv[NAME], &name) < 0
        || mm_read_placement(state, argv[POLICY], argv[PREFETCH], argv[ATTACH], &placement) < 0) {
        return NULL;
    }
    length = (Py_ssize_t)size;
    layout = mm_layout_of_bytes(&length);
    return mm_buffer_named(allocate(state, op, argv[STREAM], size, &layout, &placement), name);
}

/* Frees memory of the pool by its address. A closed resource does not keep the pool, which may be
 * gone, so the free is then not recorded among the pool's queued frees. */
static int
free_pooled(mm_resource *r, mm_driver *cu, CUdeviceptr start, CUstream stream, mm_status *st)
{
    bool on_device = r->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    mm_device_stream order = {stream, on_device ? r->location.id : MM_ANY_DEVICE};
    bool open = mm_guard_enter(&r->guard);
    int rc = mm_pool_refuse_capture(cu, order, st);

    if (rc == 0) {
        rc = mm_pool_free_address(cu, open ? r->pool : NULL, start, order, st);
    }
    if (open) {
        mm_guard_leave(&r->guard);
    }
    return rc;
}

/* Frees memory that the resource allocated, even after the resource is closed. */
static int
free_by_address(mm_resource *r, mm_driver *cu, CUdeviceptr start, CUstream stream, bool wait,
                mm_status *st)
{
    if (r->pooled) {
        return free_pooled(r, cu, start, stream, st);
    }
    if (wait && mm_stream_synchronize(cu, (mm_device_stream){stream, MM_ANY_DEVICE}, st) < 0) {
        return -1;
    }
    return mm_free(cu, start, st);
}

PyDoc_STRVAR(
    deallocate_doc,
    "deallocate($self, ptr, size, *, stream=None)\n--\n\n"
    "Free memory by its address. A ManagedBuffer made with from_handle(mr=...) calls it.\n"
    "\n"
    "Memory of a pool is freed in the order of the stream, other memory after all work queued on\n"
    "the stream.\n"
    "Driver: cuMemFree, cuMemFreeAsync.");

static PyObject *
resource_deallocate(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { PTR, SIZE, STREAM, ARGC };
    static mm_signature signature = {.doc = deallocate_doc};
    mm_state *state = mm_type_state(Py_TYPE(op));
    PyObject *argv[ARGC];
    mm_stream_use use;
    CUdeviceptr start;
    mm_driver *cu;
    mm_status st;
    size_t size;
    bool wait;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_address_range(argv[PTR], argv[SIZE], &start, &size) < 0
        || (cu = mm_open(state)) == NULL
        || mm_stream_read_and_enter(state, argv[STREAM], &use) < 0) {
        return NULL;
    }
    wait = argv[STREAM] != NULL && argv[STREAM] != Py_None;
    Py_BEGIN_ALLOW_THREADS
    rc = start == 0 ? 0 : free_by_address(mm_resource_of(op), cu, start, use.handle, wait, &st);
    mm_stream_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(state, rc, &st);
}

/* --- pools ------------------------------------------------------------------------------ */

PyDoc_STRVAR(
    trim_doc,
    "trim($self, /, keep=0)\n--\n\n"
    "Release memory that the pool does not use to the system, down to keep bytes.\n"
    "\n"
    "Memory can stay if the host has not waited for its free. Raises ValueError for a negative\n"
    "keep, RuntimeError without a pool or when closed. Releases the GIL.\n"
    "Driver: cuMemPoolTrimTo.");

static PyObject *
resource_trim(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = trim_doc};
    PyObject *argv[1];
    long long keep = 0;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || (argv[0] != NULL && mm_read_index(argv[0], "keep", PyExc_TypeError, &keep) < 0)) {
        return NULL;
    }
    if (keep < 0) {
        PyErr_Format(PyExc_ValueError, "keep must be at least 0 bytes, got %R", argv[0]);
        return NULL;
    }
    if (mm_resource_check_pooled(op) < 0 || (cu = mm_resource_enter(op)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_pool_trim(cu, mm_resource_of(op)->pool, (size_t)keep, &st);
    mm_resource_leave(op);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(
    close_doc,
    "close($self, /)\n--\n\n"
    "Stop allocating. Closing a second time does nothing. Buffers of the resource stay valid.\n"
    "\n"
    "A pool ends after its last buffer, once its queued frees have run. Waits only for calls that other\n"
    "threads are making with the resource. Raises CUDAError inside a host function, instead of\n"
    "waiting (the resource stays open), and when the driver refuses (the resource counts as\n"
    "closed). Safe from every thread.\n"
    "Driver: cuMemPoolDestroy.");

static PyObject *
resource_close(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_status st;
    int rc;

    Py_BEGIN_ALLOW_THREADS
    rc = close_resource(mm_resource_of(op), &st);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(mm_type_state(Py_TYPE(op)), rc, &st);
}

PyDoc_STRVAR(resource_enter_doc, "__enter__($self, /)\n--\n\nThe resource itself.");

static PyObject *
resource_enter(PyObject *op, PyObject *Py_UNUSED(none))
{
    if (mm_guard_is_closed(&mm_resource_of(op)->guard)) {
        (void)mm_resource_raise_closed();
        return NULL;
    }
    return Py_NewRef(op);
}

PyDoc_STRVAR(resource_exit_doc, "__exit__($self, /, *exception)\n--\n\nClose the resource.");

static PyObject *
resource_exit(PyObject *op, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return resource_close(op, NULL);
}

PyObject *
mm_resource_get_is_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(mm_guard_is_closed(&mm_resource_of(op)->guard));
}

PyObject *
mm_resource_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    mm_resource *r = mm_resource_of(op);
    CUmemoryPool handle = NULL;

    if (r->pool != NULL && mm_guard_enter(&r->guard)) {
        handle = r->pool->driver_pool.handle;
        mm_guard_leave(&r->guard);
    }
    return PyLong_FromVoidPtr((void *)handle);
}

PyObject *
mm_resource_get_is_handle_owned(PyObject *op, void *Py_UNUSED(closure))
{
    mm_resource *r = mm_resource_of(op);

    return PyBool_FromLong(r->pooled && !mm_guard_is_closed(&r->guard));
}

PyObject *
mm_resource_get_true(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_TRUE;
}

PyObject *
mm_resource_get_false(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_FALSE;
}

PyObject *
mm_resource_get_none(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    Py_RETURN_NONE;
}

PyMemberDef mm_resource_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_resource, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyMethodDef mm_resource_methods[] = {
    MM_METHOD("allocate", resource_allocate, allocate_doc),
    MM_METHOD("deallocate", resource_deallocate, deallocate_doc),
    MM_METHOD("trim", resource_trim, trim_doc),
    {"close", resource_close, METH_NOARGS, close_doc},
    {"__enter__", resource_enter, METH_NOARGS, resource_enter_doc},
    MM_POSITIONAL_METHOD("__exit__", resource_exit, resource_exit_doc),
    {NULL, NULL, 0, NULL},
};
