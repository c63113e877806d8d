/* pool_end.c: the behaviour of a driver when a pool is destroyed behind a queued free.
 *
 * Usage: pool_end MODE, linked to the driver. "queued" destroys each pool while a free from it waits
 * in the stream; on driver 580.159.04 (H100, H200) a later wait then crashes with SIGSEGV or hangs.
 * "run" destroys each pool after the free has run and always prints "through". */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void CUDA_CB
nap(void *nanoseconds)
{
    struct timespec time = {.tv_nsec = *(long *)nanoseconds};

    (void)nanosleep(&time, NULL);
}

#define CHECK(call)                                            \
    do {                                                       \
        CUresult code = (call);                                \
        if (code != CUDA_SUCCESS) {                            \
            fprintf(stderr, "%s gave %d\n", #call, (int)code); \
            exit(1);                                           \
        }                                                      \
    } while (0)

static void
use_pool(const CUmemPoolProps *props, int run)
{
    static long duration = 20000000;
    CUmemoryPool pool;
    CUdeviceptr block;
    CUevent event;

    CHECK(cuMemPoolCreate(&pool, props));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemAllocFromPoolAsync(&block, 4096, pool, NULL));
    CHECK(cuLaunchHostFunc(NULL, nap, &duration));
    CHECK(cuMemFreeAsync(block, NULL));
    CHECK(cuEventRecord(event, NULL));
    while (run && cuEventQuery(event) == CUDA_ERROR_NOT_READY) {
    }
    CHECK(cuMemPoolDestroy(pool));
    CHECK(cuCtxSynchronize());
    CHECK(cuEventDestroy(event));
}

int
main(int argc, char **argv)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    int run = argc > 1 && strcmp(argv[1], "run") == 0;
    CUcontext context;

    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    for (int round = 0; round < 3; round++) {
        use_pool(&props, run);
    }
    /* Others use the memory that the driver has freed. */
    for (size_t i = 0; i < 400000; i++) {
        void *bytes = malloc(16 + i * 7919 % 3000);
        if (bytes != NULL) {
            memset(bytes, 0xa5, 16 + i * 7919 % 3000);
        }
    }
    use_pool(&props, 1);
    puts("through");
    return 0;
}
