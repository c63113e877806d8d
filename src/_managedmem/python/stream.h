/* stream.h: the type Stream, and the way from any stream object to a handle. */
#ifndef MM_PY_STREAM_H
#define MM_PY_STREAM_H

#include "../memory/guard.h"
#include "../memory/stream.h"
#include "args.h"

/* A handle, and what keeps it from being closed. */
typedef struct {
    CUstream handle;
    mm_guard *guard;   /* of one of our streams, else NULL */
    mm_stream *shared; /* of one that a Stream made, else NULL */
} mm_stream_use;

/* Reads any stream object, which may run Python code, and enters nothing. Accepts NULL and None (the default stream), a Stream, anything with __cuda_stream__, streams of
 * torch, CuPy, numba and cuda.bindings that lack it, and an int. The object itself must outlive the
 * use. */
int mm_stream_read(mm_state *state, PyObject *value, mm_stream_use *use);

/* From enter to leave the handle is safe from being closed, and no Python code may run. False when
 * it is closed: then leave what else is entered, and raise. Leaving needs no GIL. */
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

/* Reads and enters, for a call that enters nothing else. */
int mm_stream_begin(mm_state *state, PyObject *value, mm_stream_use *use);

/* Sets the RuntimeError of a closed stream; returns -1. */
int mm_stream_raise_closed(void);

/* Another Stream over the stream that a Stream made, which lives on when that one is closed. Takes
 * over the reference to it, also when it fails. */
PyObject *mm_stream_duplicate(mm_state *state, mm_stream *shared);

#endif
