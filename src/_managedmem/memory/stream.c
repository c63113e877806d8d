/* stream.c: stream calls, the check for graph capture, and the streams that stand in for the
 * legacy stream (one per device, kept for the life of the process). */
#include "stream.h"

static _Atomic(CUstream) stand_in[MM_MAX_DEVICES];

int
mm_stream_create(mm_driver *cu, CUstream *stream, mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->StreamCreate(stream, CU_STREAM_NON_BLOCKING);
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuStreamCreate", (int)code);
}

int
mm_stream_destroy(mm_driver *cu, CUstream stream, mm_status *st)
{
    MM_TRY(cu, StreamDestroy, st, stream);
    return 0;
}

int
mm_stream_synchronize(mm_driver *cu, CUstream stream, mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->StreamSynchronize(stream);
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuStreamSynchronize", (int)code);
}

int
mm_stream_query(mm_driver *cu, CUstream stream, bool *done, mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->StreamQuery(stream);
    mm_scope_leave(&scope);
    *done = code == CUDA_SUCCESS;
    return *done || code == CUDA_ERROR_NOT_READY ? 0
                                                 : mm_fail_call(st, "cuStreamQuery", (int)code);
}

int
mm_stream_refuse_capture(mm_driver *cu, CUstream stream, const char *what, mm_status *st)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult code = cu->StreamIsCapturing(stream, &status);

    /* IMPLICIT: the legacy stream cannot be used while a blocking stream captures. */
    if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        || (code == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE)) {
        (void)mm_fail(st, MM_CAPTURING,
                      "%s cannot be recorded in a CUDA graph, and the call would have destroyed "
                      "the capture on this stream: issue it before the capture begins, or on "
                      "another stream",
                      what);
        st->code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return -1;
    }
    /* INVALID_CONTEXT: the default stream of a thread without a context, so without a capture. */
    return code == CUDA_SUCCESS || code == CUDA_ERROR_INVALID_CONTEXT
               ? 0
               : mm_fail_call(st, "cuStreamIsCapturing", (int)code);
}

static int
create_blocking(mm_driver *cu, CUstream *stream, mm_status *st)
{
    MM_TRY(cu, StreamCreate, st, stream, CU_STREAM_DEFAULT);
    return 0;
}

int
mm_batch_stream_get(mm_driver *cu, CUstream asked, mm_batch_stream *out, mm_status *st)
{
    CUcontext context = NULL, primary = NULL;
    CUdevice device = 0;
    CUstream none = NULL;

    out->stream = asked;
    out->temporary = false;
    if (!mm_is_legacy_stream(asked)) {
        return 0;
    }
    MM_TRY(cu, CtxGetCurrent, st, &context);
    MM_TRY(cu, CtxGetDevice, st, &device);
    if (mm_primary_context(cu, device, &primary, st) < 0) {
        return -1;
    }
    if (context != primary) {
        /* A context of somebody's own making may be gone tomorrow: keep nothing of it. */
        out->temporary = true;
        return create_blocking(cu, &out->stream, st);
    }
    out->stream = atomic_load_explicit(&stand_in[device], memory_order_acquire);
    if (out->stream != NULL) {
        return 0;
    }
    if (create_blocking(cu, &out->stream, st) < 0) {
        return -1;
    }
    if (!atomic_compare_exchange_strong(&stand_in[device], &none, out->stream)) {
        (void)cu->StreamDestroy(out->stream);
        out->stream = none;
    }
    return 0;
}

void
mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s)
{
    if (s->temporary) {
        (void)cu->StreamDestroy(s->stream);
    }
}
