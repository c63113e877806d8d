/* stream_object.h: the type Stream, and the way from any stream object to a handle. */
#ifndef MM_STREAM_OBJECT_H
#define MM_STREAM_OBJECT_H

#include "../memory/guard.h"
#include "../memory/stream.h"
#include "args.h"

/* A stream handle, and the guard that keeps it open. */
typedef struct {
    CUstream handle;
    mm_guard *guard;   /* of one of our streams, else NULL */
    mm_stream *shared; /* of one that a Stream made, else NULL */
} mm_stream_use;

/* Reads a stream object, which may run Python code; enters no guard. Accepts NULL and None (the default
 * stream), a Stream, any object with __cuda_stream__, streams of torch, CuPy, numba and cuda.bindings
 * that lack it, and an int. The object must outlive the use. */
int mm_stream_read(mm_state *state, PyObject *value, mm_stream_use *use);

/* Between enter and leave the handle cannot be closed, and no Python code may run. False if the stream
 * is closed: the caller leaves its other guards, then raises. Leaving needs no GIL. */
MM_NODISCARD static inline bool
mm_stream_enter(const mm_stream_use *use)
{
    return use->guard == NULL || mm_guard_enter(use->guard);
}

static inline void
mm_stream_leave(const mm_stream_use *use)
{
    if (use->guard != NULL) {
        mm_guard_leave(use->guard);
    }
}

/* Reads and enters, for calls that enter no other guard. */
int mm_stream_begin(mm_state *state, PyObject *value, mm_stream_use *use);

/* Sets the RuntimeError of a closed stream; returns -1. */
int mm_stream_raise_closed(void);

/* A second Stream object over one stream, which stays open when the first is closed. Takes ownership of
 * the reference to `shared`, even on failure. */
PyObject *mm_stream_duplicate(mm_state *state, mm_stream *shared);

#endif
