/* foreign_resource.h: calls of the memory resources of other libraries: allocate(size,
 * stream=stream) and deallocate(ptr, size, stream=stream). */
#ifndef MM_FOREIGN_RESOURCE_H
#define MM_FOREIGN_RESOURCE_H

#include "args.h"

/* TypeError for a resource without a method deallocate. */
int mm_foreign_resource_check(PyObject *resource);

/* The stream for the calls of a resource, as a tuple of the object to pass and the object, or
 * None, that keeps the stream alive. NULL and None mean the default stream. */
PyObject *mm_foreign_resource_stream(mm_state *state, PyObject *resource, PyObject *stream);

/* Calls allocate and returns its result. */
PyObject *mm_foreign_resource_allocate(mm_state *state, PyObject *resource, size_t size,
                                       PyObject *stream);

/* Calls deallocate; -1 with the exception of the resource. `streams` is from
 * mm_foreign_resource_stream. */
int mm_foreign_resource_deallocate(PyObject *resource, CUdeviceptr start, size_t size,
                                   PyObject *streams);

/* True if the current exception is an ImportError because the interpreter ends: the modules of the
 * resource are gone, and the end of the process frees the memory. */
bool mm_import_failed_at_exit(void);

/* True at the end of an interpreter, where nothing can be imported. */
bool mm_imports_have_ended(void);

#endif
