/* Entry points: streams that wait for words of memory, and that write them.
 *
 * The memory is the driver's own, except managed memory, which its documentation excludes. */
#include "entries.h"

static bool
is_word(CUdeviceptr ptr)
{
    const struct emu_allocation *allocation = emu_find_range(ptr, sizeof(uint32_t));

    return allocation != NULL && allocation->kind != EMU_MANAGED && ptr % sizeof(uint32_t) == 0;
}

/* Flushing remote writes is an ability that the emulated devices do not have. */
static CUresult
check_flags(enum emu_op_kind kind, unsigned int flags)
{
    if (kind == EMU_OP_WRITE_WORD) { /* measured: without a barrier is refused as well */
        return flags == CU_STREAM_WRITE_VALUE_DEFAULT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    if ((flags & ~(unsigned int)CU_STREAM_WAIT_VALUE_FLUSH) > CU_STREAM_WAIT_VALUE_NOR) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return (flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

static CUresult
queue_word(const struct emu_op *op, CUstream handle)
{
    struct emu_stream *stream = NULL;
    bool captured = false;
    CUresult result = emu_stream_find(handle, &stream);

    if (result == CUDA_SUCCESS && !is_word(op->ptr)) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    if (result == CUDA_SUCCESS) {
        result = check_flags(op->kind, op->width);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_record(stream, &captured);
    }
    return result == CUDA_SUCCESS && !captured ? emu_stream_submit(stream, op) : result;
}

EMU_ENTRY(cuStreamWaitValue32_v2, CUstream stream, CUdeviceptr addr, cuuint32_t value,
          unsigned int flags)
{
    const struct emu_op op = {
        .kind = EMU_OP_AWAIT_WORD, .ptr = addr, .pattern = value, .width = flags};

    EMU_BEGIN("cuStreamWaitValue32", EMU_CALL_WORK,
              "ptr=0x%llx, value=%u, flags=%u, stream=0x%llx", addr, value, flags,
              emu_handle_number(stream));
    return emu_call_end(&call, queue_word(&op, stream));
}

EMU_ENTRY(cuStreamWriteValue32_v2, CUstream stream, CUdeviceptr addr, cuuint32_t value,
          unsigned int flags)
{
    const struct emu_op op = {
        .kind = EMU_OP_WRITE_WORD, .ptr = addr, .pattern = value, .width = flags};

    EMU_BEGIN("cuStreamWriteValue32", EMU_CALL_WORK,
              "ptr=0x%llx, value=%u, flags=%u, stream=0x%llx", addr, value, flags,
              emu_handle_number(stream));
    return emu_call_end(&call, queue_word(&op, stream));
}
