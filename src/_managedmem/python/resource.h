/* resource.h: memory resources: the struct and the members of both types, and allocating a
 * buffer. */
#ifndef MM_RESOURCE_H
#define MM_RESOURCE_H

#include "buffer.h"
#include "policy_object.h"

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_pool *pool; /* NULL without a pool; used only while the guard is entered */
    bool pooled;
    bool has_policy; /* a default for allocations without a pool */
    CUmemLocation location; /* the device of a pool, or the preferred location */
    size_t max_size; /* of the pool of a device; 0 for no bound */
    mm_policy policy;
    mm_guard guard;
} mm_resource;

static inline mm_resource *
mm_resource_of(PyObject *op)
{
    return (mm_resource *)op;
}

/* True for a resource of this package, false for one of another library. */
static inline bool
mm_is_resource(const mm_state *state, PyObject *op)
{
    return Py_TYPE(op) == state->managed_resource_type
           || Py_TYPE(op) == state->device_resource_type;
}

/* The place of new memory. */
typedef struct {
    const mm_policy *policy; /* its advice; NULL for the resource's */
    CUmemLocation prefetch; /* where its pages are populated; of type NONE: nowhere yet */
    CUmemAttach_flags attach; /* to every device, or to the host */
} mm_placement;

/* Reads the arguments policy, prefetch and attach, each of which may be NULL; the first two may be
 * None. */
int mm_read_placement(mm_state *state, PyObject *policy, PyObject *prefetch, PyObject *attach,
                      mm_placement *out);

/* A new ManagedBuffer. `resource` is of this package, or NULL. `stream` is any stream object, or
 * NULL: pool memory is allocated, and any memory is prefetched, in the order of the stream. */
PyObject *mm_allocate(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
                      const mm_layout *layout, const mm_placement *placement);

/* Enters the resource and returns the driver; NULL with an exception if the resource is closed. No
 * other guard may be entered before. No Python code may run before mm_resource_leave, which needs
 * no GIL. */
mm_driver *mm_resource_enter(PyObject *op);
void mm_resource_leave(PyObject *op);

/* -1 with a RuntimeError for a resource without a pool. */
int mm_resource_check_pooled(PyObject *op);

/* RuntimeError; returns -1. */
int mm_resource_raise_closed(void);

/* Called before managed memory is allocated. Warns once in a process whose devices lack concurrent
 * access, at the line that calls this package. A warning runs Python code; -1 with an exception. */
int mm_check_access(const mm_driver *cu);

/* For both types. max_size bounds the pool of a device; 0 for no bound. */
PyObject *mm_resource_new(PyTypeObject *type, bool pooled, bool managed, CUmemLocation location,
                          size_t max_size);
void mm_resource_dealloc(PyObject *op);
extern PyMethodDef mm_resource_methods[];
PyObject *mm_resource_get_attributes(PyObject *op, void *closure);
PyObject *mm_resource_get_is_closed(PyObject *op, void *closure);
PyObject *mm_resource_get_handle(PyObject *op, void *closure);
PyObject *mm_resource_get_is_handle_owned(PyObject *op, void *closure);
PyObject *mm_resource_get_true(PyObject *op, void *closure);
PyObject *mm_resource_get_false(PyObject *op, void *closure);
PyObject *mm_resource_get_none(PyObject *op, void *closure);
extern PyMemberDef mm_resource_members[];

/* The properties of both types. */
/* clang-format off */
#define MM_RESOURCE_GETSET                                                                        \
    {"attributes", mm_resource_get_attributes, NULL,                                              \
     "The pool's attributes, as PoolAttributes. RuntimeError without a pool, and once closed.",   \
     NULL},                                                                                       \
    {"is_closed", mm_resource_get_is_closed, NULL, "True once close() was called.", NULL},        \
    {"handle", mm_resource_get_handle, NULL,                                                      \
     "The CUmemoryPool of the pool as an int; 0 without a pool, and once closed.", NULL},         \
    {"is_handle_owned", mm_resource_get_is_handle_owned, NULL,                                    \
     "True while there is a pool: the resource created it, and close() releases it.", NULL},      \
    {"is_ipc_enabled", mm_resource_get_false, NULL,                                               \
     "False: the memory cannot be shared with other processes.", NULL},                           \
    {"is_mapped", mm_resource_get_false, NULL,                                                    \
     "False: the pool was not imported from another process.", NULL},                             \
    {"uuid", mm_resource_get_none, NULL,                                                          \
     "None: only pools that are shared between processes have one.", NULL}
/* clang-format on */

/* resource.peer_accessible_by. */
PyObject *mm_peers_get(PyObject *op, void *closure);
int mm_peers_set(PyObject *op, PyObject *value, void *closure);

#endif
