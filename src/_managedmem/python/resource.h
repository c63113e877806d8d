/* resource.h: memory resources: the struct behind both types, what they share, and allocating a
 * buffer from one. */
#ifndef MM_RESOURCE_H
#define MM_RESOURCE_H

#include "buffer.h"

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_pool *pool; /* NULL: cuMemAllocManaged. To be used between begin and end only */
    bool pooled;
    CUmemLocation where; /* of the pool */
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

/* A new ManagedBuffer of that layout. resource is one of ours or NULL; stream any stream object or
 * NULL, for memory of a pool. */
PyObject *mm_allocate(mm_state *state, PyObject *resource, PyObject *stream, size_t bytes,
                      const mm_layout *layout);

/* Enters the resource and returns the driver; NULL with an exception if the resource is closed. No other
 * guard may be entered before. Between begin and end no Python code may run. The end needs no GIL. */
mm_driver *mm_resource_begin(PyObject *op);
void mm_resource_end(PyObject *op);

/* RuntimeError for a resource without a pool. */
int mm_resource_check_pooled(PyObject *op);
int mm_resource_raise_closed(void);

/* What both types are made of. */
PyObject *mm_resource_new(PyTypeObject *type, bool pooled, bool managed, CUmemLocation where);
void mm_resource_dealloc(PyObject *op);
extern PyMethodDef mm_resource_methods[];
PyObject *mm_resource_get_attributes(PyObject *op, void *closure);
PyObject *mm_resource_get_is_closed(PyObject *op, void *closure);
PyObject *mm_resource_get_handle(PyObject *op, void *closure);
PyObject *mm_resource_get_is_handle_owned(PyObject *op, void *closure);
PyObject *mm_resource_get_false(PyObject *op, void *closure);
PyObject *mm_resource_get_none(PyObject *op, void *closure);
extern const char mm_resource_attributes_doc[], mm_resource_is_closed_doc[],
    mm_resource_handle_doc[], mm_resource_is_handle_owned_doc[], mm_resource_is_ipc_enabled_doc[],
    mm_resource_is_mapped_doc[], mm_resource_uuid_doc[];

/* The members of both types, for weak references. */
extern PyMemberDef mm_resource_members[];

/* The live set behind resource.peer_accessible_by, and assignment to it. */
PyObject *mm_peers_get(PyObject *op, void *closure);
int mm_peers_set(PyObject *op, PyObject *value, void *closure);

#endif
