/* Conformance cases of cuMemGetLocationInfo, which drivers have from CUDA 13.4 on. No golden has
 * them yet. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t M = MIB;

/* Prints the code and, for each of the parts, the type and the id; -77 where nothing was written. */
static void
show(const char *label, CUdeviceptr ptr, size_t size, size_t summary, size_t sampling)
{
    CUmemLocation found[6];

    for (int i = 0; i < 6; i++) {
        found[i] = (CUmemLocation){.type = (CUmemLocationType)-77};
        found[i].id = -77;
    }
    report(label, cu.locate(ptr, size, summary, sampling, found));
    printf(" ");
    for (int i = 0; i < 6; i++) {
        printf(" %d:%d", (int)found[i].type, found[i].id);
    }
    printf("\n");
}

static void
write_host(CUdeviceptr ptr, size_t size)
{
    memset((void *)(uintptr_t)ptr, 1, size);
}

void
topic_locations(struct fixture *f)
{
    const size_t page = 4096;
    CUdeviceptr a = managed(4 * M), third = a + 2 * M, plain = 0;
    CUmemLocation found;
    size_t size = M;

    show("fresh", a, 4 * M, M, page);
    write_host(a, M);
    cu.prefetch(a + 2 * M, M, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    show("host, fresh, device, fresh", a, 4 * M, M, page);
    show("  default sampling", a, 4 * M, M, 0);
    show("  a part that ends early", a, 3 * M + page, M, page);
    show("  most are on the host", a, 3 * M, 3 * M, page);
    show("  within a page", a + 2 * M + 5, 7, 7, 7);
    cu.advise(a, M, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev);
    cu.prefetch(a, M, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    show("duplicated", a, M, M, page);
    cu.discard_batch(&third, &size, 1, 0, f->stream);
    cu.stream_sync(f->stream);
    show("discarded on the device", a + 2 * M, M, M, page);
    show("size 0", a, 0, page, page);
    show("summary 0", a, M, 0, 0);
    show("summary above the size", a, M, 2 * M, page);
    show("sampling above the summary", a, M, page, 2 * page);
    report("into NULL", cu.locate(a, M, M, page, NULL));
    show("past the end", a, 4 * M + page, M, page);
    show("address 0", 0, page, page, page);
    if (cu.mem_alloc(&plain, M) == CUDA_SUCCESS) {
        show("device memory", plain, M, M, page);
    }
    cu.ctx_set(NULL);
    report("no ctx", cu.locate(a, page, page, page, &found));
    cu.ctx_set(f->ctx);
}

void
topic_locations_elsewhere(struct fixture *f)
{
    const size_t page = 4096;
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)9;
    CUmemLocation found;
    CUdeviceptr a = managed(M);
    CUgraph graph = NULL;
    int pageable = 0;
    void *system = aligned_alloc(page, M);

    cu.device_attribute(&pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, f->device);
    value("pageable memory access", pageable);
    if (system != NULL) {
        write_host((CUdeviceptr)(uintptr_t)system, M);
        show("system memory", (CUdeviceptr)(uintptr_t)system, M, M, page);
    }
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    report("in a capture", cu.locate(a, page, page, page, &found));
    cu.is_capturing(f->stream, &status);
    printf("  status %d\n", (int)status);
    report("end", cu.end_capture(f->stream, &graph));
    if (graph != NULL) {
        cu.graph_destroy(graph);
    }
    free(system);
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
