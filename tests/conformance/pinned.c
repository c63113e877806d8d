/* Conformance cases of page-locked memory. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>

static CUdeviceptr
address_of(const volatile void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

static void
show_pointer(const char *label, CUdeviceptr ptr)
{
    unsigned int type = 77, is_managed = 77;
    CUdeviceptr device_pointer = 0;

    report(label, cu.pointer_get(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr));
    (void)cu.pointer_get(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr);
    (void)cu.pointer_get(&device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ptr);
    printf("  type %u managed %u same address on the device %d\n", type, is_managed,
           device_pointer == ptr);
}

void
topic_pinned(struct fixture *f)
{
    unsigned char *p = NULL, *q = NULL;
    CUdeviceptr a = managed(MIB), d = 0;

    report("portable", cu.host_alloc((void **)&p, MIB, CU_MEMHOSTALLOC_PORTABLE));
    show_pointer("  its kind", address_of(p));
    report("flags 0", cu.host_alloc((void **)&q, 100, 0));
    report("  free", cu.free_host(q));
    report("flags 7", cu.host_alloc((void **)&q, 100, 7));
    report("  free", cu.free_host(q));
    report("flags 8", cu.host_alloc((void **)&q, 100, 8));
    report("size 0", cu.host_alloc((void **)&q, 0, 0));
    report("into NULL", cu.host_alloc(NULL, 100, 0));
    cu.ctx_set(NULL);
    report("no ctx: alloc", cu.host_alloc((void **)&q, 100, 0));
    report("no ctx: free of nothing known", cu.free_host(&d));
    cu.ctx_set(f->ctx);
    report("fill 5", cu.set8(a, 5, MIB, f->stream));
    report("copy from managed memory", cu.copy_async(address_of(p), a, MIB, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %d %d\n", p[0], p[MIB - 1]);
    report("copy past end", cu.copy_async(address_of(p + 1), a, MIB, f->stream));
    report("free from the middle", cu.free_host(p + 4096));
    report("free as device memory", cu.mem_free(address_of(p)));
    report("free of managed memory as host memory", cu.free_host((void *)(uintptr_t)a));
    report("free", cu.free_host(p));
    report("double free", cu.free_host(p));
    report("free NULL", cu.free_host(NULL));
    report("prefetch of managed memory afterwards", cu.prefetch(a, MIB, f->dev, 0, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
}

void
topic_pinned_empty(struct fixture *f)
{
    void *p = f;

    report("alloc", cu.host_alloc(&p, 0, 0));
    printf("  NULL %d\n", p == NULL);
    report("free", cu.free_host(p));
    cu.ctx_set(NULL);
    report("no ctx: alloc", cu.host_alloc(&p, 0, 0));
    report("no ctx: free NULL", cu.free_host(NULL));
    cu.ctx_set(f->ctx);
}

static void
end_capture(struct fixture *f)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)9;
    CUgraph graph = NULL;

    cu.is_capturing(f->stream, &status);
    printf("  status %d\n", (int)status);
    report("end", cu.end_capture(f->stream, &graph));
    if (graph != NULL) {
        cu.graph_destroy(graph);
    }
}

void
topic_pinned_capture(struct fixture *f)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    void *p = NULL;

    if (cu.host_alloc(&p, 4096, 0) != CUDA_SUCCESS) {
        return;
    }
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    report("free", cu.free_host(p));
    end_capture(f);
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    cu.exchange_mode(&mode);
    report("the same, relaxed", cu.free_host(p));
    cu.exchange_mode(&mode);
    end_capture(f);
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
