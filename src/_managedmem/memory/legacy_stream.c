/* legacy_stream.c: blocking streams in place of the legacy stream: one for each device, kept for
 * the life of the process. */
#include "legacy_stream.h"

#include <assert.h>

static _Atomic(CUstream) stand_in[MM_MAX_DEVICES];

static int
create_blocking_stream(mm_driver *cu, CUstream *stream, mm_status *st)
{
    MM_TRY(cu, StreamCreate, st, stream, CU_STREAM_DEFAULT);
    return 0;
}

int
mm_batch_stream_acquire(mm_driver *cu, CUstream requested, mm_batch_stream *out, mm_status *st)
{
    CUstream none = NULL;
    bool primary = false;
    int device = 0;

    assert(mm_in_scope());
    out->stream = requested;
    out->temporary = false;
    if (!mm_is_legacy_stream(requested)) {
        return 0;
    }
    if (mm_is_primary_current(cu, &device, &primary, st) < 0) {
        return -1;
    }
    if (!primary) {
        /* The owner of another context may destroy it at any time, so its streams are not kept. */
        out->temporary = true;
        return create_blocking_stream(cu, &out->stream, st);
    }
    out->stream = atomic_load_explicit(&stand_in[device], memory_order_acquire);
    if (out->stream != NULL) {
        return 0;
    }
    if (create_blocking_stream(cu, &out->stream, st) < 0) {
        return -1;
    }
    if (!atomic_compare_exchange_strong(&stand_in[device], &none, out->stream)) {
        mm_leak_note(cu->StreamDestroy(out->stream), "cuStreamDestroy", 0); /* another's serves */
        out->stream = none;
    }
    return 0;
}

void
mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s)
{
    assert(!s->temporary || s->stream != NULL);
    if (s->temporary) {
        mm_leak_note(cu->StreamDestroy(s->stream), "cuStreamDestroy", 0);
    }
}
