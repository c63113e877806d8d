/* copy.c: the copy and memset calls. */
#include "copy.h"

int
mm_copy(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream,
        mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->MemcpyAsync(to, from, size, stream);
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuMemcpyAsync", (int)code);
}

int
mm_fill(mm_driver *cu, mm_range range, unsigned int pattern, int width, CUstream stream,
        mm_status *st)
{
    const char *function = "cuMemsetD8Async";
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    if (width == 4) {
        function = "cuMemsetD32Async";
        code = cu->MemsetD32Async(range.start, pattern, range.size / 4, stream);
    } else if (width == 2) {
        function = "cuMemsetD16Async";
        code = cu->MemsetD16Async(range.start, (unsigned short)pattern, range.size / 2, stream);
    } else {
        code = cu->MemsetD8Async(range.start, (unsigned char)pattern, range.size, stream);
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, function, (int)code);
}
