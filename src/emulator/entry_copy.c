/* Entry points: copies and fills.
 *
 * A copy from or to pageable host memory is done when the call returns, as on a real driver,
 * which stages the bytes. Any other copy is an operation of its stream. */
#include "entries.h"

/* Checks that one allocation contains the whole range. Memory outside of allocations is accepted
 * unless it must be known to the driver; it sets *pageable if it is not page-locked. */
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

/* Refuses the access of a device to memory that is attached elsewhere, as documented (CUDA C++
 * Programming Guide, "Memcpy()/Memset() Behavior With Stream-associated Unified Memory"); a Jetson
 * AGX Xavier does so for a fill. A copy without a direction accesses such memory from the host. */
static CUresult
check_attachment(CUdeviceptr ptr, bool by_device, const struct emu_stream *stream)
{
    return by_device && !emu_is_attached(ptr, stream) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Measured (topic "two devices: copies of pool memory"): for a copy the current device of the
 * thread needs access, for a fill the device of the stream. */
static const struct emu_device *
copying_device(const struct emu_stream *stream)
{
    const struct emu_device *current = emu_current();

    return current != NULL ? current : stream->device;
}

struct copy_request {
    CUdeviceptr to, from;
    size_t size;
    bool to_known, from_known; /* memory of the driver, which a device accesses */
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
        result = check_attachment(request->to, request->to_known, stream);
    }
    if (result == CUDA_SUCCESS) {
        result = check_attachment(request->from, request->from_known, stream);
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

/* ---- copies with attributes: as documented, not measured ---- */

struct copies {
    const CUdeviceptr *to, *from;
    const size_t *sizes;
    size_t count;
    const CUmemcpyAttributes *attributes;
    const size_t *first; /* for each attribute, the index of its first copy */
    size_t runs;
};

static bool
hint_is_valid(CUmemLocation hint)
{
    return hint.type == CU_MEM_LOCATION_TYPE_DEVICE
               ? emu_device(hint.id) != NULL
               : hint.type >= CU_MEM_LOCATION_TYPE_NONE
                     && hint.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static CUresult
check_attributes(const struct copies *c)
{
    if (c->count == 0 || c->to == NULL || c->from == NULL || c->sizes == NULL
        || c->attributes == NULL || c->first == NULL || c->runs == 0 || c->runs > c->count
        || c->first[0] != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < c->runs; i++) {
        const CUmemcpyAttributes *a = &c->attributes[i];
        if (c->first[i] >= c->count || (i > 0 && c->first[i] <= c->first[i - 1])
            || a->srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            || a->srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY || a->flags > 1
            || !hint_is_valid(a->srcLocHint) || !hint_is_valid(a->dstLocHint)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

static bool
read_at_once(const struct copies *c)
{
    bool found = false;

    for (size_t i = 0; i < c->runs; i++) {
        found =
            found || c->attributes[i].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    }
    return found;
}

/* Checks all copies before it queues any. *failed is the index of a refused copy, or SIZE_MAX. */
static CUresult
queue_copies(const struct copies *c, CUstream handle, size_t *failed)
{
    struct emu_stream *stream = NULL;
    CUresult result;

    *failed = SIZE_MAX;
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    result = emu_stream_find(handle, &stream);
    if (result == CUDA_SUCCESS) {
        result = check_attributes(c);
    }
    if (result == CUDA_SUCCESS) {
        result = emu_capture_refuse(stream);
    }
    for (size_t i = 0; i < c->count && result == CUDA_SUCCESS; i++) {
        bool pageable = false;
        result = check_copied_memory(c->to[i], c->sizes[i], false, &pageable);
        if (result == CUDA_SUCCESS) {
            result = check_copied_memory(c->from[i], c->sizes[i], false, &pageable);
        }
        if (result == CUDA_SUCCESS) {
            result = check_pool_access(c->to[i], copying_device(stream));
        }
        if (result == CUDA_SUCCESS) {
            result = check_pool_access(c->from[i], copying_device(stream));
        }
        *failed = result == CUDA_SUCCESS ? SIZE_MAX : i;
    }
    for (size_t i = 0; i < c->count && result == CUDA_SUCCESS; i++) {
        const struct copy_request request = {c->to[i], c->from[i], c->sizes[i],
                                             false,    false,      read_at_once(c)};
        result = queue_copy(&request, handle);
    }
    return result;
}

static void
log_copies(struct emu_call *call, const struct copies *c, CUstream stream)
{
    emu_call_out(call, "count=%zu, numAttrs=%zu, stream=0x%llx, copies=[", c->count, c->runs,
                 emu_handle_number(stream));
    for (size_t i = 0; c->to != NULL && c->sizes != NULL && i < c->count && i < 4; i++) {
        emu_call_out(call, "%s0x%llx+%zu", i == 0 ? "" : " ", c->to[i], c->sizes[i]);
    }
    emu_call_out(call, "], attrs=[");
    for (size_t i = 0; c->attributes != NULL && c->first != NULL && i < c->runs && i < 4; i++) {
        const CUmemcpyAttributes *a = &c->attributes[i];
        emu_call_out(call, "%s%d:%d>%d:%d@%zu", i == 0 ? "" : " ", (int)a->srcAccessOrder,
                     (int)a->srcLocHint.type, (int)a->dstLocHint.type, (int)a->flags, c->first[i]);
    }
    emu_call_out(call, "]");
}

static CUresult
copy_batch(const struct copies *c, size_t *failed, CUstream stream)
{
    size_t ignored;

    EMU_BEGIN("cuMemcpyBatchAsync", EMU_CALL_WORK, "%s", "");
    log_copies(&call, c, stream);
    return emu_call_end(&call, queue_copies(c, stream, failed != NULL ? failed : &ignored));
}

/* The vendor's prototypes have non-const pointers for inputs.
 * NOLINTBEGIN(readability-non-const-parameter) */
EMU_ENTRY(cuMemcpyBatchAsync, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
          CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
          CUstream hStream)
{
    const struct copies c = {dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs};

    return copy_batch(&c, failIdx, hStream);
}

EMU_ENTRY(cuMemcpyBatchAsync_v2, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count,
          CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream hStream)
{
    const struct copies c = {dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs};

    return copy_batch(&c, NULL, hStream);
}

EMU_ENTRY(cuMemcpyWithAttributesAsync, CUdeviceptr dst, CUdeviceptr src, size_t size,
          CUmemcpyAttributes *attr, CUstream hStream)
{
    const size_t first = 0;
    const struct copies c = {&dst, &src, &size, 1, attr, &first, attr != NULL};
    size_t ignored;

    EMU_BEGIN("cuMemcpyWithAttributesAsync", EMU_CALL_WORK, "%s", "");
    log_copies(&call, &c, hStream);
    return emu_call_end(&call, queue_copies(&c, hStream, &ignored));
}

/* NOLINTEND(readability-non-const-parameter) */

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
        result = check_attachment(op->ptr, true, stream);
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
