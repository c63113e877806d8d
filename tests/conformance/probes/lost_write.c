/* lost_write.c: writes of a device to its copy of read-mostly memory whose home is the host.
 *
 * Usage: lost_write, linked to the driver, with headers of CUDA 13. In each case managed memory prefers
 * the host and holds ones. A prefetch copies it to the device, which then writes twos. The host must read
 * twos, while the copy exists and after SET_READ_MOSTLY is unset. On driver 580.159.04 (H200) it reads
 * ones if it had not mapped the pages before the prefetch. */
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 4 << 20 };

#define CHECK(call)                                            \
    do {                                                       \
        CUresult code = (call);                                \
        if (code != CUDA_SUCCESS) {                            \
            fprintf(stderr, "%s gave %d\n", #call, (int)code); \
            exit(1);                                           \
        }                                                      \
    } while (0)

static void
set_on_device(CUdeviceptr memory, unsigned char byte)
{
    CHECK(cuMemsetD8(memory, byte, SIZE));
    CHECK(cuCtxSynchronize());
}

static size_t
count_ones(const unsigned char *bytes)
{
    size_t count = 0;

    for (size_t i = 0; i < SIZE; i++) {
        count += bytes[i] == 1;
    }
    return count;
}

enum { WRITTEN_BY_DEVICE, THEN_READ_BY_HOST, WRITTEN_BY_HOST };

static void
show(const char *label, int first, int drop)
{
    CUmemLocation host = {.type = CU_MEM_LOCATION_TYPE_HOST};
    CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
    CUdeviceptr memory;
    const unsigned char *bytes;

    CHECK(cuMemAllocManaged(&memory, SIZE, CU_MEM_ATTACH_GLOBAL));
    bytes = (const unsigned char *)(uintptr_t)memory;
    CHECK(cuMemAdvise(memory, SIZE, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, host));
    if (first == WRITTEN_BY_HOST) {
        memset((void *)(uintptr_t)memory, 1, SIZE);
    } else {
        set_on_device(memory, 1);
    }
    if (first == THEN_READ_BY_HOST && count_ones(bytes) != SIZE) {
        exit(1);
    }
    CHECK(cuMemAdvise(memory, SIZE, CU_MEM_ADVISE_SET_READ_MOSTLY, device));
    CHECK(cuMemPrefetchAsync(memory, SIZE, device, 0, NULL));
    CHECK(cuCtxSynchronize());
    set_on_device(memory, 2);
    if (drop) {
        CHECK(cuMemAdvise(memory, SIZE, CU_MEM_ADVISE_UNSET_READ_MOSTLY, device));
    }
    printf("%-48s %zu KiB lost\n", label, count_ones(bytes) / 1024);
    CHECK(cuMemFree(memory));
}

int
main(void)
{
    CUcontext context;

    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    for (int drop = 0; drop < 2; drop++) {
        printf("%s\n", drop ? "the copy dropped" : "beside the copy");
        show("  written by the host first", WRITTEN_BY_HOST, drop);
        show("  written by the device, then read by the host", THEN_READ_BY_HOST, drop);
        show("  written by the device first", WRITTEN_BY_DEVICE, drop);
    }
    return 0;
}
