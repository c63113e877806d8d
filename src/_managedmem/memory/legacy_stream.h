/* legacy_stream.h: work on the legacy default stream, which the driver accepts for single
 * prefetches but refuses for batch and discard calls. A blocking stream of the same context is
 * ordered with it in both directions, so a call on that stream keeps the legacy stream's order. */
#ifndef MM_LEGACY_STREAM_H
#define MM_LEGACY_STREAM_H

#include "stream.h"

/* The stream of a batch or discard call. */
typedef struct {
    CUstream stream; /* the one to pass to the driver */
    bool temporary; /* destroyed on release; the driver lets queued work finish */
} mm_batch_stream;

/* In the caller's scope. */
MM_NODISCARD int mm_batch_stream_acquire(mm_driver *cu, CUstream requested, mm_batch_stream *out,
                                         mm_status *st);
void mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s);

#endif
