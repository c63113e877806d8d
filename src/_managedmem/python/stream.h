/* stream.h: the type Stream, and the way from any stream object to a handle. */
#ifndef MM_PY_STREAM_H
#define MM_PY_STREAM_H

#include "../memory/guard.h"
#include "../memory/stream.h"
#include "args.h"

/* A handle, safe from being closed until mm_stream_end. */
typedef struct {
    CUstream handle;
    mm_guard *guard;   /* of one of our streams, else NULL */
    mm_stream *shared; /* of one that a Stream made, else NULL */
} mm_stream_use;

/* Accepts NULL and None (the default stream), a Stream, anything with __cuda_stream__, streams of
 * torch, CuPy, numba and cuda.bindings that lack it, and an int. The object itself must outlive the
 * use. */
int mm_stream_begin(mm_state *state, PyObject *value, mm_stream_use *use);
void mm_stream_end(mm_stream_use *use);

#endif
