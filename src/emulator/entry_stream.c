/* Entry points: streams, capture, host functions, attachment, events. */
#include "entries.h"

/* ---- streams ---- */

EMU_ENTRY(cuStreamCreate, CUstream *phStream, unsigned int Flags)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamCreate", EMU_CALL_WORK, "flags=%u", Flags);
    if (emu_context() == NULL) {
        return emu_call_end(&call, emu_no_context());
    }
    if (phStream == NULL || (Flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) != 0) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    result = emu_stream_new(emu_context(), EMU_STREAM_OWN, Flags, &stream);
    if (result == CUDA_SUCCESS) {
        *phStream = (CUstream)stream;
        emu_call_out(&call, ", stream=0x%llx", emu_handle_number(stream));
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamDestroy_v2, CUstream hStream)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamDestroy", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    result = hStream == NULL || hStream == CU_STREAM_LEGACY || hStream == CU_STREAM_PER_THREAD
                 ? CUDA_ERROR_INVALID_HANDLE
                 : emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        emu_stream_delete(stream);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamSynchronize, CUstream hStream)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamSynchronize", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_refuse(stream);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_unsafe();
    }
    if (result == CUDA_SUCCESS) {
        emu_stream_drain(stream);
        emu_notice_frees();
    }
    return emu_call_end(&call, result);
}

/* A lazy stream with queued operations answers NOT_READY once and then runs them, so that
 * polling ends. In an eager one they wait for another thread. */
EMU_ENTRY(cuStreamQuery, CUstream hStream)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamQuery", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_refuse(stream);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_unsafe();
    }
    if (result == CUDA_SUCCESS && !emu_stream_idle(stream)) {
        struct emu_point end = {.stream = stream->id, .serial = stream->queued};
        bool ready = emu_point_poll(end) && !emu_streams_lazy();
        result = ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamGetCtx, CUstream hStream, CUcontext *pctx)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamGetCtx", EMU_CALL_BOOKKEEPING, "stream=0x%llx", emu_handle_number(hStream));
    result = pctx == NULL ? CUDA_ERROR_INVALID_VALUE : emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        *pctx = (CUcontext)stream->context;
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamGetId, CUstream hStream, unsigned long long *streamId)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamGetId", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    result = streamId == NULL ? CUDA_ERROR_INVALID_VALUE : emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        *streamId = stream->id;
    }
    return emu_call_end(&call, result);
}

/* ---- capture ---- */

/* Writes an output that the caller can leave out. */
#define STORE(output, value)     \
    do {                         \
        if ((output) != NULL) {  \
            *(output) = (value); \
        }                        \
    } while (0)

EMU_ENTRY(cuStreamIsCapturing, CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    struct emu_stream *stream = NULL;
    struct emu_graph *graph = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamIsCapturing", EMU_CALL_BOOKKEEPING, "stream=0x%llx",
              emu_handle_number(hStream));
    result = captureStatus == NULL ? CUDA_ERROR_INVALID_VALUE : emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_status(stream, captureStatus, NULL, &graph);
    }
    return emu_call_end(&call, result);
}

/* Every output but the status may be missing. No edge of these graphs has data. */
EMU_ENTRY(cuStreamGetCaptureInfo_v3, CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
          cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out,
          const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
{
    struct emu_stream *stream = NULL;
    struct emu_graph *graph = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamGetCaptureInfo", EMU_CALL_BOOKKEEPING, "stream=0x%llx",
              emu_handle_number(hStream));
    result =
        captureStatus_out == NULL ? CUDA_ERROR_INVALID_VALUE : emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_status(stream, captureStatus_out, id_out, &graph);
    }
    if (result == CUDA_SUCCESS) {
        STORE(graph_out, (CUgraph)graph);
        STORE(dependencies_out, (const CUgraphNode *)stream->front.list);
        STORE(edgeData_out, NULL);
        STORE(numDependencies_out, stream->front.count);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamBeginCapture_v2, CUstream hStream, CUstreamCaptureMode mode)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamBeginCapture", EMU_CALL_WORK, "stream=0x%llx, mode=%d",
              emu_handle_number(hStream), (int)mode);
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_begin(stream, mode);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuStreamEndCapture, CUstream hStream, CUgraph *phGraph)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    EMU_BEGIN("cuStreamEndCapture", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    result = emu_stream_find(hStream, &stream);
    if (result == CUDA_SUCCESS) {
        result = emu_capture_end(stream, phGraph);
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode)
{
    struct emu_thread *thread = emu_thread();
    CUstreamCaptureMode before = thread->mode;

    EMU_BEGIN("cuThreadExchangeStreamCaptureMode", EMU_CALL_BOOKKEEPING, "%s", "");
    /* Measured (topic "capture mode"): modes that do not exist are accepted. */
    if (mode == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    thread->mode = *mode;
    *mode = before;
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* ---- work ---- */

static CUresult
launch_function(CUstream handle, CUhostFn fn, void *argument)
{
    const struct emu_op op = {.kind = EMU_OP_FUNCTION, .function = fn, .argument = argument};
    struct emu_stream *stream = NULL;
    bool captured = false;
    CUresult result = emu_stream_find(handle, &stream);

    if (result == CUDA_SUCCESS && fn == NULL) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_record(stream, &captured);
    }
    if (result == CUDA_SUCCESS) {
        result = captured ? emu_capture_add(stream, &op) : emu_stream_submit(stream, &op);
    }
    return result;
}

EMU_ENTRY(cuLaunchHostFunc, CUstream hStream, CUhostFn fn, void *userData)
{
    EMU_BEGIN("cuLaunchHostFunc", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    return emu_call_end(&call, launch_function(hStream, fn, userData));
}

/* syncMode chooses between blocking (0) and spinning (1) of the driver's worker thread. */
EMU_ENTRY(cuLaunchHostFunc_v2, CUstream hStream, CUhostFn fn, void *userData,
          unsigned int syncMode)
{
    EMU_BEGIN("cuLaunchHostFunc", EMU_CALL_WORK, "stream=0x%llx, sync_mode=%u",
              emu_handle_number(hStream), syncMode);
    return emu_call_end(&call, syncMode > 1 ? CUDA_ERROR_INVALID_VALUE
                                            : launch_function(hStream, fn, userData));
}

static CUresult
attach_memory(CUstream handle, CUdeviceptr ptr, size_t length, unsigned int flags)
{
    struct emu_allocation *allocation = emu_find(ptr);
    struct emu_stream *stream = NULL;
    CUresult result = emu_stream_find(handle, &stream);

    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (allocation == NULL || allocation->kind != EMU_MANAGED || allocation->base != ptr
        || (length != 0 && length != allocation->size)
        || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST
            && flags != CU_MEM_ATTACH_SINGLE)
        || (flags == CU_MEM_ATTACH_SINGLE && stream->kind == EMU_STREAM_LEGACY)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    result = emu_capture_refuse(stream);
    if (result == CUDA_SUCCESS) {
        allocation->attach = flags;
    }
    return result;
}

EMU_ENTRY(cuStreamAttachMemAsync, CUstream hStream, CUdeviceptr dptr, size_t length,
          unsigned int flags)
{
    EMU_BEGIN("cuStreamAttachMemAsync", EMU_CALL_WORK,
              "stream=0x%llx, ptr=0x%llx, length=%zu, flags=%u", emu_handle_number(hStream), dptr,
              length, flags);
    return emu_call_end(&call, attach_memory(hStream, dptr, length, flags));
}

/* ---- events ---- */

EMU_ENTRY(cuEventCreate, CUevent *phEvent, unsigned int Flags)
{
    const unsigned int known =
        CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
    struct emu_event *event = NULL;
    CUresult result;

    EMU_BEGIN("cuEventCreate", EMU_CALL_WORK, "flags=%u", Flags);
    if (emu_context() == NULL) {
        return emu_call_end(&call, emu_no_context());
    }
    if (phEvent == NULL || (Flags & ~known) != 0) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    result = emu_event_new(emu_context(), Flags, &event);
    if (result == CUDA_SUCCESS) {
        *phEvent = (CUevent)event;
        emu_call_out(&call, ", event=0x%llx", emu_handle_number(event));
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuEventDestroy_v2, CUevent hEvent)
{
    struct emu_event *event;

    EMU_BEGIN("cuEventDestroy", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    event = emu_event_find(hEvent);
    if (event == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_HANDLE);
    }
    emu_event_delete(event);
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
record_event_on_stream(CUevent handle, CUstream stream_handle)
{
    struct emu_event *event = emu_event_find(handle);
    struct emu_stream *stream = NULL;
    bool captured = false;
    CUresult result = emu_stream_find(stream_handle, &stream);

    if (result == CUDA_SUCCESS && event == NULL) {
        result = CUDA_ERROR_INVALID_HANDLE;
    }
    if (result == CUDA_SUCCESS && event->context != stream->context) {
        result = CUDA_ERROR_INVALID_HANDLE;
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_record(stream, &captured);
    }
    if (result == CUDA_SUCCESS && captured) {
        event->capture = stream->capture;
        return emu_nodes_set(&event->front, stream->front.list, stream->front.count);
    }
    return result == CUDA_SUCCESS ? emu_event_record(event, stream) : result;
}

EMU_ENTRY(cuEventRecord, CUevent hEvent, CUstream hStream)
{
    EMU_BEGIN("cuEventRecord", EMU_CALL_WORK, "event=0x%llx, stream=0x%llx",
              emu_handle_number(hEvent), emu_handle_number(hStream));
    return emu_call_end(&call, record_event_on_stream(hEvent, hStream));
}

static CUresult
queue_event_wait(CUstream handle, CUevent event_handle, unsigned int flags)
{
    struct emu_event *event = emu_event_find(event_handle);
    struct emu_stream *stream = NULL;
    bool captured = false;
    CUresult result = emu_stream_find(handle, &stream);

    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (event == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if ((flags & ~(unsigned int)CU_EVENT_WAIT_EXTERNAL) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (event->capture != NULL) {
        return emu_capture_join(stream, event);
    }
    result = emu_capture_record(stream, &captured);
    if (result == CUDA_SUCCESS && captured) {
        return event->recorded ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION : CUDA_SUCCESS;
    }
    return result == CUDA_SUCCESS && event->recorded
               ? emu_stream_submit_after(stream, event->point)
               : result;
}

EMU_ENTRY(cuStreamWaitEvent, CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    EMU_BEGIN("cuStreamWaitEvent", EMU_CALL_WORK, "stream=0x%llx, event=0x%llx, flags=%u",
              emu_handle_number(hStream), emu_handle_number(hEvent), Flags);
    return emu_call_end(&call, queue_event_wait(hStream, hEvent, Flags));
}

/* As for streams: a lazy event answers NOT_READY once, then the operations before it run. */
EMU_ENTRY(cuEventQuery, CUevent hEvent)
{
    struct emu_event *event;
    CUresult result = CUDA_SUCCESS;

    EMU_BEGIN("cuEventQuery", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    event = emu_event_find(hEvent);
    if (event == NULL) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else if (event->capture != NULL) {
        result = CUDA_ERROR_CAPTURED_EVENT;
    } else if (emu_capture_unsafe() != CUDA_SUCCESS) {
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else if (!emu_event_reached(event)) {
        bool ready = emu_event_poll(event) && !emu_streams_lazy();
        result = ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuEventSynchronize, CUevent hEvent)
{
    struct emu_event *event;
    CUresult result = CUDA_SUCCESS;

    EMU_BEGIN("cuEventSynchronize", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    event = emu_event_find(hEvent);
    if (event == NULL) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else if (event->capture != NULL) {
        result = CUDA_ERROR_CAPTURED_EVENT;
    } else if (emu_capture_unsafe() != CUDA_SUCCESS) {
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else {
        emu_event_drain(event);
        emu_notice_frees();
    }
    return emu_call_end(&call, result);
}

EMU_ENTRY(cuEventElapsedTime, float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    const struct emu_event *start, *end;

    EMU_BEGIN("cuEventElapsedTime", EMU_CALL_WORK, "start=0x%llx, end=0x%llx",
              emu_handle_number(hStart), emu_handle_number(hEnd));
    start = emu_event_find(hStart);
    end = emu_event_find(hEnd);
    if (pMilliseconds == NULL) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_VALUE);
    }
    if (start == NULL || end == NULL || !start->recorded || !end->recorded
        || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
        return emu_call_end(&call, CUDA_ERROR_INVALID_HANDLE);
    }
    if (!emu_event_reached(start) || !emu_event_reached(end)) {
        return emu_call_end(&call, CUDA_ERROR_NOT_READY);
    }
    *pMilliseconds = (float)(end->milliseconds - start->milliseconds);
    return emu_call_end(&call, CUDA_SUCCESS);
}
