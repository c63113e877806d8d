/* stream.h: streams, events and the check for graph capture, for memory operations. */
#ifndef MM_STREAM_H
#define MM_STREAM_H

#include "../driver/context.h"
#include "leaks.h"

/* The default stream that other blocking streams wait for; NULL is another handle for it. */
static inline bool
mm_is_legacy_stream(CUstream stream)
{
    return stream == NULL || stream == CU_STREAM_LEGACY;
}

/* The legacy stream, or the calling thread's own default one. */
static inline bool
mm_is_default_stream(CUstream stream)
{
    return mm_is_legacy_stream(stream) || stream == CU_STREAM_PER_THREAD;
}

/* A stream and, for a default one, the device that it belongs to: each device has its own.
 * MM_ANY_DEVICE is the device of the caller's context. */
typedef struct {
    CUstream handle;
    int device;
} mm_device_stream;

/* A stream with several holders: the object that made it, and memory that is freed in its
 * order. */
typedef struct mm_stream {
    mm_deferred_free deferred;
    atomic_size_t references;
    CUstream handle;
    mm_context context; /* the stream ends with it */
    bool lasts; /* the context is a primary one, which the library holds */
    struct mm_stream *next,
        *previous; /* in the list of all of them, for mm_streams_are_capturing */
} mm_stream;

/* Wraps a stream, with one reference, and owns it from then on. NULL on failure: the caller still
 * owns the stream. */
mm_stream *mm_stream_share(mm_driver *cu, CUstream handle, mm_status *st);
void mm_stream_retain(mm_stream *stream);

/* Releases a reference. The last one destroys the stream, later if the driver refuses inside a
 * host function. A forked child does not destroy its parent's streams. */
MM_NODISCARD int mm_stream_release(mm_stream *stream, mm_status *st);

/* mm_stream_release where no caller can raise: a failure is noted (leaks.h). */
void mm_stream_drop(mm_stream *stream);

/* A non-blocking stream on the calling thread's device. */
MM_NODISCARD int mm_stream_create(mm_driver *cu, CUstream *stream, mm_status *st);
MM_NODISCARD int mm_stream_synchronize(mm_driver *cu, mm_device_stream stream, mm_status *st);
MM_NODISCARD int mm_stream_query(mm_driver *cu, CUstream stream, bool *done, mm_status *st);

/* Destroys an event that the driver may still have to reach. */
void mm_event_destroy(mm_driver *cu, CUevent event);

/* True if the stream captures a graph, or is the legacy one while a blocking stream does. */
MM_NODISCARD int mm_stream_is_capturing(mm_driver *cu, CUstream stream, bool *capturing,
                                        mm_status *st);

/* True if a stream is known to capture a graph: an mm_stream, the calling thread's own default
 * stream, or a blocking stream of the current context. Other streams cannot be found. */
MM_NODISCARD int mm_streams_are_capturing(mm_driver *cu, bool *capturing, mm_status *st);

/* Fails if the stream captures a graph: prefetch and discard have no graph node, and the call
 * would destroy the capture. `op` names the operation in the message. */
MM_NODISCARD int mm_stream_refuse_capture(mm_driver *cu, CUstream stream, const char *op,
                                          mm_status *st);

/* mm_stream_refuse_capture in the context of the stream, which a default stream needs. */
MM_NODISCARD int mm_stream_refuse_capture_in(mm_driver *cu, mm_device_stream stream,
                                             const char *op, mm_status *st);

/* Makes later work on `stream` wait for the present work of `producer` (cuStreamWaitEvent).
 * Fails if either captures a graph. Does nothing if both are one stream. */
MM_NODISCARD int mm_stream_follow(mm_driver *cu, mm_device_stream stream,
                                  mm_device_stream producer, mm_status *st);

/* A relaxed scope for work on the stream: its own context, or one of the device of a default
 * stream. Drivers require it for events and for pool memory. */
MM_NODISCARD int mm_scope_enter_stream(mm_scope *s, mm_driver *cu, mm_device_stream stream,
                                       mm_status *st);

/* --- batch and discard calls ------------------------------------------------------------------ */

/* The stream of a batch or discard call, which the driver refuses on the legacy stream. A blocking
 * stream of the same context is ordered with it in both directions, so a call on that stream keeps
 * the legacy stream's order. */
typedef struct {
    CUstream stream; /* to pass to the driver */
    bool temporary; /* destroyed on release; the driver lets queued work finish */
} mm_batch_stream;

/* In the caller's scope. */
MM_NODISCARD int mm_batch_stream_acquire(mm_driver *cu, CUstream requested, mm_batch_stream *out,
                                         mm_status *st);
void mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s);

#endif
