/* Entry points: copies and fills.
 *
 * A copy from or to pageable host memory is done when the call returns, as on a real driver,
 * which stages the bytes. Any other copy is an operation of its stream. */
#include "entries.h"

/* Checks that an allocation contains the whole range. Other memory is accepted unless it must
 * be known to the driver, and sets *pageable. */
static CUresult
check_copied_memory(CUdeviceptr ptr, size_t size, bool must_be_known, bool *pageable)
{
    bool ours = emu_find(ptr) != NULL;

    if (ptr == 0 || (ours && emu_find_range(ptr, size) == NULL) || (!ours && must_be_known)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *pageable = *pageable || (!ours && emu_find_registered(ptr) == NULL);
    return CUDA_SUCCESS;
}

/* Only the owner of a device pool, and devices that the pool admits, access its memory.
 * cuMemAlloc has no such rule. */
static CUresult
check_pool_access(CUdeviceptr ptr, const struct emu_device *device)
{
    const struct emu_allocation *allocation = emu_find(ptr);

    if (allocation == NULL || allocation->kind != EMU_DEVICE || allocation->pool == NULL
        || emu_pool_admits(allocation->pool, device->ordinal)) {
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* Measured (topic "two devices: copies of pool memory"): the current device of the thread needs
 * access for a copy, the device of the stream for a fill. */
static const struct emu_device *
copying_device(const struct emu_stream *stream)
{
    const struct emu_device *current = emu_current();

    return current != NULL ? current : stream->device;
}

struct copy_request {
    CUdeviceptr to, from;
    size_t size;
    bool to_known, from_known;     /* must be the driver's */
    bool wait;
};

static CUresult
queue_copy(const struct copy_request *request, CUstream handle)
{
    struct emu_op op = {
        .kind = EMU_OP_COPY, .ptr = request->to, .source = request->from, .size = request->size};
    struct emu_stream *stream = NULL;
    bool captured = false, wait = request->wait;
    CUresult result = emu_stream_find(handle, &stream);

    if (result != CUDA_SUCCESS || request->size == 0) {
        return result;
    }
    result = check_copied_memory(request->to, request->size, request->to_known, &wait);
    if (result == CUDA_SUCCESS) {
        result = check_copied_memory(request->from, request->size, request->from_known, &wait);
    }
    if (result == CUDA_SUCCESS) {
        result = check_pool_access(request->to, copying_device(stream));
    }
    if (result == CUDA_SUCCESS) {
        result = check_pool_access(request->from, copying_device(stream));
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_record(stream, &captured);
    }
    if (result == CUDA_SUCCESS && captured) {
        return emu_capture_add(stream, &op);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_stream_submit(stream, &op);
        if (result == CUDA_SUCCESS && wait) {
            emu_stream_drain(stream);
        }
    }
    return result;
}

static CUresult
copy_memory(const char *name, const struct copy_request *request, CUstream stream)
{
    EMU_BEGIN(name, EMU_CALL_WORK, "dst=0x%llx, src=0x%llx, count=%zu, stream=0x%llx", request->to,
              request->from, request->size, emu_handle_number(stream));
    return emu_call_end(&call, queue_copy(request, stream));
}

EMU_ENTRY(cuMemcpy, CUdeviceptr dst, CUdeviceptr src, size_t ByteCount)
{
    const struct copy_request request = {dst, src, ByteCount, false, false, true};

    return copy_memory("cuMemcpy", &request, NULL);
}

EMU_ENTRY(cuMemcpyAsync, CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream)
{
    const struct copy_request request = {dst, src, ByteCount, false, false, false};

    return copy_memory("cuMemcpyAsync", &request, hStream);
}

EMU_ENTRY(cuMemcpyHtoDAsync_v2, CUdeviceptr dstDevice, const void *srcHost, size_t ByteCount,
          CUstream hStream)
{
    const struct copy_request request = {
        dstDevice, (CUdeviceptr)(uintptr_t)srcHost, ByteCount, true, false, false};

    return copy_memory("cuMemcpyHtoDAsync", &request, hStream);
}

EMU_ENTRY(cuMemcpyDtoHAsync_v2, void *dstHost, CUdeviceptr srcDevice, size_t ByteCount,
          CUstream hStream)
{
    const struct copy_request request = {
        (CUdeviceptr)(uintptr_t)dstHost, srcDevice, ByteCount, false, true, false};

    return copy_memory("cuMemcpyDtoHAsync", &request, hStream);
}

EMU_ENTRY(cuMemcpyDtoDAsync_v2, CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
          CUstream hStream)
{
    const struct copy_request request = {dstDevice, srcDevice, ByteCount, true, true, false};

    return copy_memory("cuMemcpyDtoDAsync", &request, hStream);
}

static CUresult
queue_fill(const struct emu_op *op, CUstream handle)
{
    struct emu_stream *stream = NULL;
    bool captured = false, pageable = false;
    CUresult result = emu_stream_find(handle, &stream);

    if (result != CUDA_SUCCESS || op->size == 0) {
        return result;
    }
    if (op->ptr % op->width != 0 || op->size > SIZE_MAX / op->width) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    result = check_copied_memory(op->ptr, op->size * op->width, true, &pageable);
    if (result == CUDA_SUCCESS) {
        result = check_pool_access(op->ptr, stream->device);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_record(stream, &captured);
    }
    if (result == CUDA_SUCCESS) {
        result = captured ? emu_capture_add(stream, op) : emu_stream_submit(stream, op);
    }
    return result;
}

static CUresult
fill_memory(const char *name, CUdeviceptr ptr, unsigned int pattern, unsigned int width,
            size_t count, CUstream stream)
{
    const struct emu_op op = {
        .kind = EMU_OP_FILL, .ptr = ptr, .size = count, .pattern = pattern, .width = width};

    EMU_BEGIN(name, EMU_CALL_WORK, "ptr=0x%llx, value=%u, count=%zu, stream=0x%llx", ptr, pattern,
              count, emu_handle_number(stream));
    return emu_call_end(&call, queue_fill(&op, stream));
}

EMU_ENTRY(cuMemsetD8Async, CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream)
{
    return fill_memory("cuMemsetD8Async", dstDevice, uc, 1, N, hStream);
}

EMU_ENTRY(cuMemsetD16Async, CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream)
{
    return fill_memory("cuMemsetD16Async", dstDevice, us, 2, N, hStream);
}

EMU_ENTRY(cuMemsetD32Async, CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream)
{
    return fill_memory("cuMemsetD32Async", dstDevice, ui, 4, N, hStream);
}
