/* foreign_stream.h: reading the streams of other libraries. */
#ifndef MM_FOREIGN_STREAM_H
#define MM_FOREIGN_STREAM_H

#include "args.h"

/* Reads a handle: an int of 0 or more, which messages call `name`. */
int mm_read_stream_handle(PyObject *value, const char *name, CUstream *out);

/* Reads the handle of an object with __cuda_stream__, of a stream of torch, CuPy, numba or
 * cuda.bindings that lacks this method, or of an object with __index__. The object must outlive
 * the use of the handle. */
int mm_read_foreign_stream(mm_state *state, PyObject *value, CUstream *out);

#endif
