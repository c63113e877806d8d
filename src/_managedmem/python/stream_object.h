/* stream_object.h: the type Stream, and stream arguments of operations. */
#ifndef MM_STREAM_OBJECT_H
#define MM_STREAM_OBJECT_H

#include "../memory/guard.h"
#include "../memory/stream.h"
#include "args.h"

/* A stream handle, and the guard that keeps it open. */
typedef struct {
    CUstream handle;
    mm_guard *guard;   /* of a Stream, else NULL */
    mm_stream *shared; /* of a Stream that made its stream, else NULL */
} mm_stream_use;

/* Reads a stream argument without entering its guard; may run Python code. Accepts NULL and None
 * for the default stream, a Stream, an int, and all that mm_read_foreign_stream does. The object
 * must outlive the use. */
int mm_stream_read(mm_state *state, PyObject *value, mm_stream_use *use);

/* Between enter and leave the stream cannot be closed, and no Python code may run. False if the
 * stream is closed: the caller leaves its other guards, then raises. Leaving needs no GIL. */
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

/* Reads and enters a stream, for calls that enter no other guard. */
int mm_stream_read_and_enter(mm_state *state, PyObject *value, mm_stream_use *use);

/* Sets the RuntimeError of a closed stream; returns -1. */
int mm_stream_raise_closed(void);

/* A new Stream object, one of the holders of a stream that stays open until all have released it.
 * Takes over the caller's reference to `shared`, even on failure. */
PyObject *mm_stream_duplicate(mm_state *state, mm_stream *shared);

#endif
