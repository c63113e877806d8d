/* copy.c: one copy, and the memset calls. */
#include "copy.h"

#include <assert.h>
#include <string.h>

void
mm_copy_explain(mm_driver *cu, CUdeviceptr p, mm_status *st)
{
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemoryPool pool = NULL;
    int owner = -1;
    void *out[] = {&pool, &owner};
    CUmemLocation location;
    CUdevice device;

    assert(mm_in_scope());
    if (st->code != CUDA_ERROR_INVALID_VALUE
        || cu->PointerGetAttributes(2, attributes, out, p) != CUDA_SUCCESS || pool == NULL
        || cu->CtxGetDevice(&device) != CUDA_SUCCESS) {
        return;
    }
    location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device);
    if (cu->MemPoolGetAccess(&flags, pool, &location) == CUDA_SUCCESS
        && flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
        mm_status_add(
            st,
            "The stream's device, Device(%d), has no access to this pool memory of Device(%d): "
            "add it to the resource's peer_accessible_by, or use a stream of the owner.",
            device, owner);
    }
}

int
mm_copy_queue(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream,
              mm_status *st)
{
    CUresult code = cu->MemcpyAsync(to, from, size, stream);

    assert(mm_in_scope());
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemcpyAsync", (int)code);
    mm_copy_explain(cu, to, st);
    mm_copy_explain(cu, from, st);
    return -1;
}

static int
copy_and_wait(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream,
              mm_status *st)
{
    if (mm_stream_refuse_capture(cu, stream, "a copy of system memory", st) < 0
        || mm_copy_queue(cu, to, from, size, stream, st) < 0) {
        return -1;
    }
    MM_TRY(cu, StreamSynchronize, st, stream);
    return 0;
}

int
mm_copy(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size, mm_device_stream stream,
        bool transient, mm_status *st)
{
    mm_scope scope;
    int rc;

    assert(size > 0);
    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return -1;
    }
    rc = transient ? copy_and_wait(cu, to, from, size, stream.handle, st)
                   : mm_copy_queue(cu, to, from, size, stream.handle, st);
    mm_scope_leave(&scope);
    return rc;
}

/* One memset call; start and size are multiples of the width. */
static int
fill_aligned(mm_driver *cu, CUdeviceptr start, size_t size, const unsigned char *pattern,
             unsigned width, CUstream stream, mm_status *st)
{
    unsigned short half;
    unsigned int word;

    assert(start % width == 0 && size % width == 0);
    if (width == 4) {
        memcpy(&word, pattern, sizeof word);
        MM_TRY(cu, MemsetD32Async, st, start, word, size / 4, stream);
    } else if (width == 2) {
        memcpy(&half, pattern, sizeof half);
        MM_TRY(cu, MemsetD16Async, st, start, half, size / 2, stream);
    } else {
        MM_TRY(cu, MemsetD8Async, st, start, *pattern, size, stream);
    }
    return 0;
}

/* The driver requires aligned addresses. At other addresses, single bytes are set before and after
 * the aligned part, whose pattern is rotated. */
static int
fill_unaligned(mm_driver *cu, CUdeviceptr start, size_t size, const unsigned char *pattern,
               unsigned width, CUstream stream, mm_status *st)
{
    unsigned after = (unsigned)(start % width), before = after ? width - after : 0;
    size_t middle = size - before - after;
    unsigned char rotated[4] = {0};

    assert(size >= width);
    for (unsigned i = 0; i < width; i++) {
        rotated[i] = pattern[(before + i) % width];
    }
    for (unsigned i = 0; i < before; i++) {
        MM_TRY(cu, MemsetD8Async, st, start + i, pattern[i], 1, stream);
    }
    if (middle > 0 && fill_aligned(cu, start + before, middle, rotated, width, stream, st) < 0) {
        return -1;
    }
    for (unsigned i = 0; i < after; i++) {
        MM_TRY(cu, MemsetD8Async, st, start + before + middle + i, rotated[i], 1, stream);
    }
    return 0;
}

/* Explains a refused fill. If other code attached the managed memory, only the driver knows to
 * what. */
static void
explain_fill(mm_driver *cu, CUdeviceptr p, mm_status *st)
{
    mm_pointer_attributes attributes;
    mm_status ignored;

    mm_copy_explain(cu, p, st);
    if (!cu->concurrent_access && st->code == CUDA_ERROR_INVALID_VALUE
        && mm_pointer_query(cu, p, &attributes, &ignored) == 0 && attributes.managed) {
        mm_status_add(st,
                      "A device without concurrent_managed_access cannot fill managed memory that "
                      "is attached to the host or to another stream: call attach() of the "
                      "buffer that allocated it.");
    }
}

int
mm_fill(mm_driver *cu, mm_range range, mm_attachment *attachment, const unsigned char pattern[4],
        unsigned width, mm_device_stream stream, mm_status *st)
{
    mm_scope scope;
    int rc;

    assert((width == 1 || width == 2 || width == 4) && range.size % width == 0);
    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return -1;
    }
    rc = mm_attachment_check_fill(cu, attachment, stream.handle, st);
    if (rc == 0
        && (rc = fill_unaligned(cu, range.start, range.size, pattern, width, stream.handle, st))
               < 0) {
        explain_fill(cu, range.start, st);
    }
    mm_scope_leave(&scope);
    return rc;
}
