/* Entry points: streams, capture, host functions, attachment, events. */
#include "entries.h"

/* ---- streams ---- */

EMU_ENTRY(cuStreamCreate, CUstream *phStream, unsigned int Flags)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamCreate", EMU_CALL_WORK, "flags=%u", Flags);
    EMU_NEED(emu_context() != NULL, emu_no_context());
    EMU_NEED(phStream != NULL && (Flags & ~(unsigned int)CU_STREAM_NON_BLOCKING) == 0,
             CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_stream_new(emu_context(), EMU_STREAM_OWN, Flags, &stream));
    *phStream = (CUstream)stream;
    emu_call_out(&call, ", stream=0x%llx", emu_handle_number(stream));
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Streams have no priorities. */
EMU_ENTRY(cuStreamCreateWithPriority, CUstream *phStream, unsigned int flags, int priority)
{
    (void)priority;
    return emu_cuStreamCreate(phStream, flags);
}

EMU_ENTRY(cuStreamDestroy_v2, CUstream hStream)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamDestroy", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    EMU_NEED(hStream != NULL && hStream != CU_STREAM_LEGACY && hStream != CU_STREAM_PER_THREAD,
             CUDA_ERROR_INVALID_HANDLE);
    EMU_STEP(emu_stream_find(hStream, &stream));
    emu_stream_delete(stream);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* The stream of a handle, for calls that are refused during a capture. */
static CUresult
find_uncaptured(CUstream handle, struct emu_stream **out)
{
    EMU_TRY(emu_stream_find(handle, out));
    EMU_TRY(emu_capture_refuse(*out));
    return emu_capture_unsafe();
}

EMU_ENTRY(cuStreamSynchronize, CUstream hStream)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamSynchronize", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    EMU_STEP(find_uncaptured(hStream, &stream));
    emu_stream_drain(stream);
    emu_notice_frees();
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* If streams are lazy, a query runs the queued operations, but still answers NOT_READY once, so
 * that polling ends. If they are eager, queued operations are those that wait for another
 * thread. */
EMU_ENTRY(cuStreamQuery, CUstream hStream)
{
    struct emu_stream *stream = NULL;
    bool ready = true;

    EMU_BEGIN("cuStreamQuery", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    EMU_STEP(find_uncaptured(hStream, &stream));
    if (!emu_stream_idle(stream)) {
        struct emu_point end = {.stream = stream->id, .serial = stream->queued};
        ready = emu_point_poll(end) && !emu_streams_lazy();
    }
    return emu_call_end(&call, ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EMU_ENTRY(cuStreamGetCtx, CUstream hStream, CUcontext *pctx)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamGetCtx", EMU_CALL_BOOKKEEPING, "stream=0x%llx", emu_handle_number(hStream));
    EMU_NEED(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_stream_find(hStream, &stream));
    *pctx = (CUcontext)stream->context;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuStreamGetCtx_v2, CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
    CUresult result = emu_cuStreamGetCtx(hStream, pCtx);

    if (result == CUDA_SUCCESS && pGreenCtx != NULL) {
        *pGreenCtx = NULL;
    }
    return result;
}

/* An entry point that stores one value of a stream. */
#define STREAM_GETTER(symbol, type, value)                                              \
    EMU_ENTRY(symbol, CUstream hStream, type *out)                                      \
    {                                                                                   \
        struct emu_stream *stream = NULL;                                               \
                                                                                        \
        EMU_BEGIN(#symbol, EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream)); \
        EMU_NEED(out != NULL, CUDA_ERROR_INVALID_VALUE);                                \
        EMU_STEP(emu_stream_find(hStream, &stream));                                    \
        *out = (value);                                                                 \
        return emu_call_end(&call, CUDA_SUCCESS);                                       \
    }

STREAM_GETTER(cuStreamGetFlags, unsigned int, stream->flags)
STREAM_GETTER(cuStreamGetPriority, int, 0)
STREAM_GETTER(cuStreamGetDevice, CUdevice, stream->device->ordinal)
STREAM_GETTER(cuStreamGetId, unsigned long long, stream->id)

/* ---- capture ---- */

EMU_ENTRY(cuStreamIsCapturing, CUstream hStream, CUstreamCaptureStatus *captureStatus)
{
    struct emu_stream *stream = NULL;
    struct emu_graph *graph = NULL;

    EMU_BEGIN("cuStreamIsCapturing", EMU_CALL_BOOKKEEPING, "stream=0x%llx",
              emu_handle_number(hStream));
    EMU_NEED(captureStatus != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_stream_find(hStream, &stream));
    return emu_call_end(&call, emu_capture_status(stream, captureStatus, NULL, &graph));
}

/* Every output but the status may be NULL. No edge of these graphs has data. */
EMU_ENTRY(cuStreamGetCaptureInfo_v3, CUstream hStream, CUstreamCaptureStatus *captureStatus_out,
          cuuint64_t *id_out, CUgraph *graph_out, const CUgraphNode **dependencies_out,
          const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)
{
    struct emu_stream *stream = NULL;
    struct emu_graph *graph = NULL;

    EMU_BEGIN("cuStreamGetCaptureInfo", EMU_CALL_BOOKKEEPING, "stream=0x%llx",
              emu_handle_number(hStream));
    EMU_NEED(captureStatus_out != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_STEP(emu_capture_status(stream, captureStatus_out, id_out, &graph));
    EMU_STORE(graph_out, (CUgraph)graph);
    EMU_STORE(dependencies_out, (const CUgraphNode *)stream->front.list);
    EMU_STORE(edgeData_out, NULL);
    EMU_STORE(numDependencies_out, stream->front.count);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuStreamBeginCapture_v2, CUstream hStream, CUstreamCaptureMode mode)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamBeginCapture", EMU_CALL_WORK, "stream=0x%llx, mode=%d",
              emu_handle_number(hStream), (int)mode);
    EMU_STEP(emu_stream_find(hStream, &stream));
    return emu_call_end(&call, emu_capture_begin(stream, mode));
}

EMU_ENTRY(cuStreamEndCapture, CUstream hStream, CUgraph *phGraph)
{
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamEndCapture", EMU_CALL_WORK, "stream=0x%llx", emu_handle_number(hStream));
    EMU_STEP(emu_stream_find(hStream, &stream));
    return emu_call_end(&call, emu_capture_end(stream, phGraph));
}

EMU_ENTRY(cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode)
{
    struct emu_thread *thread = emu_thread();
    CUstreamCaptureMode before = thread->mode;

    EMU_BEGIN("cuThreadExchangeStreamCaptureMode", EMU_CALL_BOOKKEEPING, "%s", "");
    /* Measured (topic "capture mode"): modes that do not exist are accepted. */
    EMU_NEED(mode != NULL, CUDA_ERROR_INVALID_VALUE);
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

    EMU_TRY(emu_stream_find(handle, &stream));
    if (fn == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(emu_capture_record(stream, &captured));
    return captured ? emu_capture_add(stream, &op) : emu_stream_submit(stream, &op);
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
    EMU_NEED(syncMode <= 1, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(&call, launch_function(hStream, fn, userData));
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
        allocation->attach_stream = stream->id;
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

    EMU_BEGIN("cuEventCreate", EMU_CALL_WORK, "flags=%u", Flags);
    EMU_NEED(emu_context() != NULL, emu_no_context());
    EMU_NEED(phEvent != NULL && (Flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_event_new(emu_context(), Flags, &event));
    *phEvent = (CUevent)event;
    emu_call_out(&call, ", event=0x%llx", emu_handle_number(event));
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuEventDestroy_v2, CUevent hEvent)
{
    struct emu_event *event;

    EMU_BEGIN("cuEventDestroy", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    event = emu_event_find(hEvent);
    EMU_NEED(event != NULL, CUDA_ERROR_INVALID_HANDLE);
    emu_event_delete(event);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuEventRecord, CUevent hEvent, CUstream hStream)
{
    struct emu_event *event;
    struct emu_stream *stream = NULL;
    bool captured = false;

    EMU_BEGIN("cuEventRecord", EMU_CALL_WORK, "event=0x%llx, stream=0x%llx",
              emu_handle_number(hEvent), emu_handle_number(hStream));
    event = emu_event_find(hEvent);
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_NEED(event != NULL && event->context == stream->context, CUDA_ERROR_INVALID_HANDLE);
    EMU_STEP(emu_capture_record(stream, &captured));
    if (captured) {
        event->capture = stream->capture;
        return emu_call_end(&call,
                            emu_nodes_set(&event->front, stream->front.list, stream->front.count));
    }
    return emu_call_end(&call, emu_event_record(event, stream));
}

static CUresult
queue_event_wait(struct emu_stream *stream, const struct emu_event *event)
{
    bool captured = false;

    if (event->capture != NULL) {
        return emu_capture_join(stream, event);
    }
    EMU_TRY(emu_capture_record(stream, &captured));
    if (!event->recorded) {
        return CUDA_SUCCESS;
    }
    return captured ? CUDA_ERROR_STREAM_CAPTURE_ISOLATION
                    : emu_stream_submit_after(stream, event->point);
}

EMU_ENTRY(cuStreamWaitEvent, CUstream hStream, CUevent hEvent, unsigned int Flags)
{
    const struct emu_event *event;
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamWaitEvent", EMU_CALL_WORK, "stream=0x%llx, event=0x%llx, flags=%u",
              emu_handle_number(hStream), emu_handle_number(hEvent), Flags);
    event = emu_event_find(hEvent);
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_NEED(event != NULL, CUDA_ERROR_INVALID_HANDLE);
    EMU_NEED((Flags & ~(unsigned int)CU_EVENT_WAIT_EXTERNAL) == 0, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(&call, queue_event_wait(stream, event));
}

/* The event of a handle, for calls that are refused during a capture. */
static CUresult
find_uncaptured_event(CUevent handle, const struct emu_event **out)
{
    *out = emu_event_find(handle);
    if (*out == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return (*out)->capture != NULL ? CUDA_ERROR_CAPTURED_EVENT : emu_capture_unsafe();
}

/* As cuStreamQuery: if streams are lazy, the operations before the event run, but the answer is
 * NOT_READY once. */
EMU_ENTRY(cuEventQuery, CUevent hEvent)
{
    const struct emu_event *event;
    bool ready;

    EMU_BEGIN("cuEventQuery", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    EMU_STEP(find_uncaptured_event(hEvent, &event));
    ready = emu_event_reached(event) || (emu_event_poll(event) && !emu_streams_lazy());
    return emu_call_end(&call, ready ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

EMU_ENTRY(cuEventSynchronize, CUevent hEvent)
{
    const struct emu_event *event;

    EMU_BEGIN("cuEventSynchronize", EMU_CALL_WORK, "event=0x%llx", emu_handle_number(hEvent));
    EMU_STEP(find_uncaptured_event(hEvent, &event));
    emu_event_drain(event);
    emu_notice_frees();
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuEventElapsedTime_v2, float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    return emu_cuEventElapsedTime(pMilliseconds, hStart, hEnd);
}

EMU_ENTRY(cuEventElapsedTime, float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
    const struct emu_event *start, *end;

    EMU_BEGIN("cuEventElapsedTime", EMU_CALL_WORK, "start=0x%llx, end=0x%llx",
              emu_handle_number(hStart), emu_handle_number(hEnd));
    start = emu_event_find(hStart);
    end = emu_event_find(hEnd);
    EMU_NEED(pMilliseconds != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_NEED(start != NULL && end != NULL && start->recorded && end->recorded
                 && ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) == 0,
             CUDA_ERROR_INVALID_HANDLE);
    EMU_NEED(emu_event_reached(start) && emu_event_reached(end), CUDA_ERROR_NOT_READY);
    *pMilliseconds = (float)(end->milliseconds - start->milliseconds);
    return emu_call_end(&call, CUDA_SUCCESS);
}
