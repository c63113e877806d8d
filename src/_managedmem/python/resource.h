/* resource.h: allocating a buffer. */
#ifndef MM_RESOURCE_H
#define MM_RESOURCE_H

#include "buffer.h"

/* A new ManagedBuffer of that layout; resource may be NULL. */
PyObject *mm_allocate(mm_state *state, PyObject *resource, size_t bytes, const mm_dtype *dtype,
                      int dimensions, const Py_ssize_t *shape);

#endif
