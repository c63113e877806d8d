/* foreign_resource.h: memory lent by another library's memory resource, which deallocates it through its method
 * deallocate(ptr, size, stream=stream). */
#ifndef MM_FOREIGN_RESOURCE_H
#define MM_FOREIGN_RESOURCE_H

#include "args.h"

/* Raises TypeError for a resource without a method deallocate. */
int mm_lender_check(PyObject *resource);

/* The stream for the calls of a resource, as a tuple: the stream object to pass, and the object that
 * keeps the stream alive. NULL and None are the default stream. */
PyObject *mm_lender_stream(mm_state *state, PyObject *resource, PyObject *stream);

/* Calls deallocate; -1 with the exception of the resource. */
int mm_lender_deallocate(PyObject *resource, CUdeviceptr start, size_t size, PyObject *order);

/* True if the current exception is an ImportError at the interpreter's end, when the modules of the
 * resource are gone. */
bool mm_lender_modules_gone(void);

/* Calls allocate(size, stream=stream) and returns its result. */
PyObject *mm_lender_allocate(mm_state *state, PyObject *resource, size_t size, PyObject *stream);

#endif
