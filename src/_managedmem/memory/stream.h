/* stream.h: streams as memory operations need them. */
#ifndef MM_STREAM_H
#define MM_STREAM_H

#include "../driver/context.h"
#include "late_frees.h"

/* The default stream that other blocking streams wait for; NULL is its other name. */
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

/* A stream with several holders: the object that made it, and memory that will be freed in its
 * order. The last holder destroys it. */
typedef struct {
    mm_late_free late;
    atomic_size_t references;
    CUstream handle;
} mm_stream;

/* With one reference; NULL when there is no memory. */
mm_stream *mm_stream_share(CUstream handle);
void mm_stream_retain(mm_stream *stream);

/* Releases a reference. The last one destroys the stream, later if the driver refuses inside a host
 * function. A forked child does not destroy its parent's streams. */
MM_NODISCARD int mm_stream_release(mm_stream *stream, mm_status *st);

/* A non-blocking stream on the calling thread's device. */
MM_NODISCARD int mm_stream_create(mm_driver *cu, CUstream *stream, mm_status *st);
MM_NODISCARD int mm_stream_synchronize(mm_driver *cu, CUstream stream, mm_status *st);

/* The same; a default stream is that of the device. */
MM_NODISCARD int mm_stream_synchronize_on(mm_driver *cu, CUstream stream, int device,
                                          mm_status *st);

MM_NODISCARD int mm_stream_query(mm_driver *cu, CUstream stream, bool *done, mm_status *st);

/* Whether the stream is recording a graph, or is the legacy one while a blocking stream does. */
MM_NODISCARD int mm_stream_is_capturing(mm_driver *cu, CUstream stream, bool *capturing,
                                        mm_status *st);

/* Fails when the stream is recording a graph: no graph node exists for prefetch and discard, and
 * trying would destroy the capture. `what` names the operation for the message. */
MM_NODISCARD int mm_stream_refuse_capture(mm_driver *cu, CUstream stream, const char *what,
                                          mm_status *st);

/* Makes later work on `stream` wait for the present work of `producer` (cuStreamWaitEvent). The devices
 * are those of default streams. Fails if either stream captures a graph; does nothing for one stream. */
MM_NODISCARD int mm_stream_follow(mm_driver *cu, CUstream stream, int device, CUstream producer,
                                  int producer_device, mm_status *st);

/* A scope for work on pool memory, which drivers want issued with the stream's own context current.
 * On a default stream it is that of the device, or the caller's for MM_ANY_DEVICE. */
MM_NODISCARD int mm_scope_enter_stream(mm_scope *s, mm_driver *cu, CUstream stream, int device,
                                       mm_status *st);

/* The driver's batch and discard calls refuse the legacy stream. A blocking stream of the same
 * context is ordered with the legacy stream in both directions, so the call goes there instead and
 * the user sees legacy-stream order. A context must be current. */
typedef struct {
    CUstream stream; /* what to give to the driver */
    bool temporary; /* destroyed on release; the driver lets queued work finish */
} mm_batch_stream;

MM_NODISCARD int mm_batch_stream_get(mm_driver *cu, CUstream asked, mm_batch_stream *out,
                                     mm_status *st);
void mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s);

#endif
