/* lender.h: memory that is lent by a memory resource of somebody else, and goes back to it through
 * its method deallocate(ptr, size, stream=stream). */
#ifndef MM_LENDER_H
#define MM_LENDER_H

#include "args.h"

/* Raises TypeError for a resource that cannot take memory back. */
int mm_lender_check(PyObject *resource);

/* What the resource gets for a stream; NULL and None mean the default one. A tuple: the stream object
 * to pass, and what keeps its stream alive until then. */
PyObject *mm_lender_stream(mm_state *state, PyObject *resource, PyObject *stream);

/* Gives memory back; -1 with the exception of the resource. */
int mm_lender_deallocate(PyObject *resource, CUdeviceptr start, size_t size, PyObject *order);

/* Whether the exception that is set just says that the interpreter has ended around the resource. */
bool mm_lender_modules_gone(void);

/* What the resource's allocate(size, stream=stream) gives. */
PyObject *mm_lender_allocate(mm_state *state, PyObject *resource, size_t size, PyObject *stream);

#endif
