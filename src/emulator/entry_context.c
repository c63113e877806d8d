/* Entry points: contexts, primary ones and those that users make. */
#include "entries.h"

/* True if the context can be made current. */
static bool
is_usable(const struct emu_context *context)
{
    return context != NULL && !context->destroyed
           && (!context->primary || context->device->retained > 0);
}

EMU_ENTRY(cuDevicePrimaryCtxRetain, CUcontext *pctx, CUdevice dev)
{
    EMU_BEGIN("cuDevicePrimaryCtxRetain", EMU_CALL_WORK, "device=%d", dev);
    EMU_STEP(emu_check_query(pctx, dev));
    emu_device(dev)->retained++;
    *pctx = (CUcontext)&emu_device(dev)->primary;
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
primary_release(CUdevice dev)
{
    struct emu_device *device = emu_device(dev);

    EMU_BEGIN("cuDevicePrimaryCtxRelease", EMU_CALL_WORK, "device=%d", dev);
    EMU_NEED(device != NULL, CUDA_ERROR_INVALID_DEVICE);
    EMU_NEED(device->retained > 0, CUDA_ERROR_INVALID_CONTEXT);
    device->retained--;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDevicePrimaryCtxRelease, CUdevice dev)
{
    return primary_release(dev);
}

EMU_ENTRY(cuDevicePrimaryCtxRelease_v2, CUdevice dev)
{
    return primary_release(dev);
}

EMU_ENTRY(cuDevicePrimaryCtxGetState, CUdevice dev, unsigned int *flags, int *active)
{
    EMU_BEGIN("cuDevicePrimaryCtxGetState", EMU_CALL_WORK, "device=%d", dev);
    EMU_NEED(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_check_query(active, dev));
    *flags = 0;
    *active = emu_device(dev)->retained > 0;
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Makes a context of the device and pushes it on the stack of the calling thread. */
EMU_ENTRY(cuCtxCreate_v2, CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    struct emu_thread *thread = emu_thread();
    struct emu_context *context;

    EMU_BEGIN("cuCtxCreate", EMU_CALL_WORK, "flags=%u, device=%d", flags, dev);
    EMU_NEED((flags & ~(unsigned int)CU_CTX_FLAGS_MASK) == 0, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_check_query(pctx, dev));
    EMU_NEED(thread->depth < EMU_CONTEXT_DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
    context = emu_context_new(emu_device(dev));
    EMU_NEED(context != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    emu_context_push(thread, context);
    *pctx = (CUcontext)context;
    emu_call_out(&call, ", ctx=0x%llx", emu_handle_number(context));
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* The parameters say how to share the device (execution affinity, CIG): here nothing is shared. */
EMU_ENTRY(cuCtxCreate_v4, CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags,
          CUdevice dev)
{
    (void)ctxCreateParams;
    return emu_cuCtxCreate_v2(pctx, flags, dev);
}

EMU_ENTRY(cuCtxDestroy_v2, CUcontext ctx)
{
    struct emu_thread *thread = emu_thread();
    struct emu_context *context;

    EMU_BEGIN("cuCtxDestroy", EMU_CALL_WORK, "ctx=0x%llx", emu_handle_number(ctx));
    context = emu_context_find(ctx);
    EMU_NEED(context != NULL && !context->primary && !context->destroyed,
             CUDA_ERROR_INVALID_CONTEXT);
    if (thread->depth > 0 && thread->stack[thread->depth - 1] == context) {
        (void)emu_context_pop(thread);
    }
    emu_streams_drain(NULL); /* operations of other contexts may use its memory */
    emu_streams_delete(context);
    emu_events_delete(context);
    emu_release_context(context);
    emu_context_end(context);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxGetCurrent, CUcontext *pctx)
{
    const struct emu_thread *thread = emu_thread();

    EMU_BEGIN("cuCtxGetCurrent", EMU_CALL_BOOKKEEPING, "%s", "");
    EMU_NEED(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    /* A destroyed context stays current in other threads. */
    *pctx = thread->depth > 0 ? (CUcontext)thread->stack[thread->depth - 1] : NULL;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxSetCurrent, CUcontext ctx)
{
    struct emu_thread *thread = emu_thread();
    struct emu_context *context;

    EMU_BEGIN("cuCtxSetCurrent", EMU_CALL_BOOKKEEPING, "ctx=0x%llx", emu_handle_number(ctx));
    context = emu_context_find(ctx);
    EMU_NEED(ctx == NULL || is_usable(context), CUDA_ERROR_INVALID_CONTEXT);
    if (thread->depth > 0) {
        (void)emu_context_pop(thread);
    }
    if (context != NULL) {
        emu_context_push(thread, context);
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxPushCurrent_v2, CUcontext ctx)
{
    struct emu_thread *thread = emu_thread();
    struct emu_context *context;

    EMU_BEGIN("cuCtxPushCurrent", EMU_CALL_BOOKKEEPING, "ctx=0x%llx", emu_handle_number(ctx));
    EMU_NEED(ctx != NULL, CUDA_ERROR_INVALID_VALUE);
    context = emu_context_find(ctx);
    EMU_NEED(is_usable(context), CUDA_ERROR_INVALID_CONTEXT);
    EMU_NEED(thread->depth < EMU_CONTEXT_DEPTH, CUDA_ERROR_OUT_OF_MEMORY);
    emu_context_push(thread, context);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxPopCurrent_v2, CUcontext *pctx)
{
    struct emu_context *context;

    EMU_BEGIN("cuCtxPopCurrent", EMU_CALL_BOOKKEEPING, "%s", "");
    EMU_NEED(emu_thread()->depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    context = emu_context_pop(emu_thread());
    EMU_STORE(pctx, (CUcontext)context);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* Finds the context of a handle; for NULL, the current one. `destroyed` is the result for a
 * destroyed context. */
static CUresult
find_context(CUcontext handle, CUresult destroyed, const struct emu_context **out)
{
    *out = handle == NULL ? emu_context() : emu_context_find(handle);
    if (*out == NULL) {
        return handle == NULL ? emu_no_context() : CUDA_ERROR_INVALID_CONTEXT;
    }
    return (*out)->destroyed ? destroyed : CUDA_SUCCESS;
}

static CUresult
device_of_context(CUdevice *out, CUcontext ctx)
{
    const struct emu_context *context;

    EMU_BEGIN("cuCtxGetDevice", EMU_CALL_BOOKKEEPING, "%s", "");
    EMU_STEP(find_context(ctx, CUDA_ERROR_INVALID_CONTEXT, &context));
    EMU_NEED(out != NULL, CUDA_ERROR_INVALID_VALUE);
    *out = context->device->ordinal;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxGetDevice, CUdevice *device)
{
    return device_of_context(device, NULL);
}

EMU_ENTRY(cuCtxGetDevice_v2, CUdevice *device, CUcontext ctx)
{
    return device_of_context(device, ctx);
}

EMU_ENTRY(cuCtxGetId, CUcontext ctx, unsigned long long *ctxId)
{
    const struct emu_context *context;

    EMU_BEGIN("cuCtxGetId", EMU_CALL_BOOKKEEPING, "ctx=0x%llx", emu_handle_number(ctx));
    EMU_STEP(find_context(ctx, CUDA_ERROR_CONTEXT_IS_DESTROYED, &context));
    EMU_NEED(ctxId != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctxId = context->id;
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
synchronize_context(CUcontext ctx)
{
    const struct emu_context *context;

    EMU_BEGIN("cuCtxSynchronize", EMU_CALL_WORK, "ctx=0x%llx", emu_handle_number(ctx));
    EMU_STEP(find_context(ctx, CUDA_ERROR_INVALID_CONTEXT, &context));
    EMU_STEP(emu_capture_refuse_context(context));
    emu_streams_drain(context);
    emu_notice_frees();
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuCtxSynchronize, void)
{
    return synchronize_context(NULL);
}

EMU_ENTRY(cuCtxSynchronize_v2, CUcontext ctx)
{
    return synchronize_context(ctx);
}
