/* allocation.c: allocating managed memory on pages of its own, and freeing it. */
#include "allocation.h"

#include <assert.h>

#include "range.h"

static int
allocate_managed(mm_driver *cu, size_t size, CUmemAttach_flags to, CUdeviceptr *start,
                 mm_status *st)
{
    CUresult code = cu->MemAllocManaged(start, size, (unsigned)to);

    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemAllocManaged", (int)code);
    mm_status_add(st, "%zu bytes were requested", size);
    return -1;
}

/* Memory that starts and ends at page borders shares no page. If the driver's memory is not
 * aligned, it is allocated again with one more page, so that it can start at the next border. */
static int
allocate_pages(mm_driver *cu, size_t size, CUmemAttach_flags to, CUdeviceptr *allocation,
               mm_status *st)
{
    CUdeviceptr page = mm_page_size();

    assert(mm_in_scope());
    size = mm_whole_pages(size);
    if (allocate_managed(cu, size, to, allocation, st) < 0) {
        return -1;
    }
    if (*allocation % page != 0) {
        CUdeviceptr unaligned = *allocation;
        int rc = allocate_managed(cu, size + page, to, allocation, st);
        mm_leak_note(cu->MemFree(unaligned), "cuMemFree", size);
        if (rc < 0) {
            return -1;
        }
    }
    return 0;
}

CUdeviceptr
mm_allocate_pages(mm_driver *cu, size_t size, CUmemAttach_flags to, CUdeviceptr *allocation,
                  mm_status *st)
{
    CUdeviceptr page = mm_page_size();
    mm_scope scope;
    int rc;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return 0;
    }
    rc = allocate_pages(cu, size, to, allocation, st);
    mm_scope_leave(&scope);
    return rc < 0 ? 0 : (*allocation + page - 1) / page * page;
}

/* Freeing needs no context. The capture mode is relaxed, because the garbage collector may free
 * during a graph capture of the thread. */
int
mm_free(mm_driver *cu, CUdeviceptr start, mm_status *st)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool relaxed = cu->ThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    CUresult code = cu->MemFree(start);

    assert(start != 0);
    if (relaxed || mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        mm_restore_capture_mode(cu, mode);
    }
    return mm_is_freed(code) ? 0 : mm_fail_call(st, "cuMemFree", (int)code);
}
