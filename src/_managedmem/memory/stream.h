/* stream.h: streams as memory operations need them. */
#ifndef MM_STREAM_H
#define MM_STREAM_H

#include "../driver/context.h"

/* The default stream that other blocking streams wait for; NULL is its other name. */
static inline bool
mm_is_legacy_stream(CUstream stream)
{
    return stream == NULL || stream == CU_STREAM_LEGACY;
}

/* A non-blocking stream on the calling thread's device. */
MM_NODISCARD int mm_stream_create(mm_driver *cu, CUstream *stream, mm_status *st);
MM_NODISCARD int mm_stream_destroy(mm_driver *cu, CUstream stream, mm_status *st);
MM_NODISCARD int mm_stream_synchronize(mm_driver *cu, CUstream stream, mm_status *st);
MM_NODISCARD int mm_stream_query(mm_driver *cu, CUstream stream, bool *done, mm_status *st);

/* Fails when the stream is recording a graph: no graph node exists for prefetch and discard, and
 * trying would destroy the capture. `what` names the operation for the message. */
MM_NODISCARD int mm_stream_refuse_capture(mm_driver *cu, CUstream stream, const char *what,
                                          mm_status *st);

/* The driver's batch and discard calls refuse the legacy stream. A blocking stream of the same
 * context is ordered with the legacy stream in both directions, so the call goes there instead and
 * the user sees legacy-stream order. A context must be current. */
typedef struct {
    CUstream stream; /* what to give to the driver */
    bool temporary;  /* destroyed on release; the driver lets queued work finish */
} mm_batch_stream;

MM_NODISCARD int mm_batch_stream_get(mm_driver *cu, CUstream asked, mm_batch_stream *out,
                                     mm_status *st);
void mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s);

#endif
