/* What every conformance case stands on: the driver table (asked for by cuGetProcAddress, nothing
 * is linked), the fixture of one topic, and the printing of one line per case.  Owns no case. */
#ifndef MANAGEDMEM_CONFORMANCE_HARNESS_H
#define MANAGEDMEM_CONFORMANCE_HARNESS_H

#include <cuda.h>
#include <cudaTypedefs.h>
#include <stdbool.h>
#include <stddef.h>

#if CUDA_VERSION < 13040
/* Missing in the oldest supported headers. */
typedef CUresult(CUDAAPI *PFN_cuMemGetLocationInfo_v13040)(CUdeviceptr ptr, size_t size,
                                                           size_t summary, size_t sampling,
                                                           CUmemLocation *locations);
#endif

/* X(member, vendor name, version of the vendor's typedef) */
#define DRIVER_FUNCTIONS(X)                                       \
    X(init, cuInit, 2000)                                         \
    X(driver_version, cuDriverGetVersion, 2020)                   \
    X(error_name, cuGetErrorName, 6000)                           \
    X(error_string, cuGetErrorString, 6000)                       \
    X(device_count, cuDeviceGetCount, 2000)                       \
    X(device_get, cuDeviceGet, 2000)                              \
    X(device_name, cuDeviceGetName, 2000)                         \
    X(device_uuid, cuDeviceGetUuid, 9020)                         \
    X(device_uuid2, cuDeviceGetUuid, 11040)                       \
    X(device_attribute, cuDeviceGetAttribute, 2000)               \
    X(device_total, cuDeviceTotalMem, 3020)                       \
    X(can_access_peer, cuDeviceCanAccessPeer, 4000)               \
    X(primary_retain, cuDevicePrimaryCtxRetain, 7000)             \
    X(primary_release, cuDevicePrimaryCtxRelease, 11000)          \
    X(primary_state, cuDevicePrimaryCtxGetState, 7000)            \
    X(ctx_get, cuCtxGetCurrent, 4000)                             \
    X(ctx_set, cuCtxSetCurrent, 4000)                             \
    X(ctx_push, cuCtxPushCurrent, 4000)                           \
    X(ctx_pop, cuCtxPopCurrent, 4000)                             \
    X(ctx_device, cuCtxGetDevice, 2000)                           \
    X(ctx_device13, cuCtxGetDevice, 13000)                        \
    X(ctx_sync, cuCtxSynchronize, 2000)                           \
    X(ctx_sync13, cuCtxSynchronize, 13000)                        \
    X(mem_info, cuMemGetInfo, 3020)                               \
    X(mem_alloc, cuMemAlloc, 3020)                                \
    X(alloc_host, cuMemAllocHost, 3020)                           \
    X(host_alloc, cuMemHostAlloc, 2020)                           \
    X(free_host, cuMemFreeHost, 2000)                             \
    X(alloc, cuMemAllocManaged, 6000)                             \
    X(mem_free, cuMemFree, 3020)                                  \
    X(advise8, cuMemAdvise, 8000)                                 \
    X(advise, cuMemAdvise, 12020)                                 \
    X(prefetch8, cuMemPrefetchAsync, 8000)                        \
    X(prefetch, cuMemPrefetchAsync, 12020)                        \
    X(prefetch_batch, cuMemPrefetchBatchAsync, 13000)             \
    X(discard_batch, cuMemDiscardBatchAsync, 13000)               \
    X(discard_prefetch, cuMemDiscardAndPrefetchBatchAsync, 13000) \
    X(range_get, cuMemRangeGetAttribute, 8000)                    \
    X(range_get_all, cuMemRangeGetAttributes, 8000)               \
    X(locate, cuMemGetLocationInfo, 13040)                        \
    X(pointer_get, cuPointerGetAttribute, 4000)                   \
    X(pointer_get_all, cuPointerGetAttributes, 7000)              \
    X(pointer_set, cuPointerSetAttribute, 6000)                   \
    X(copy, cuMemcpy, 4000)                                       \
    X(copy_async, cuMemcpyAsync, 4000)                            \
    X(copy_to_device, cuMemcpyHtoDAsync, 3020)                    \
    X(copy_to_host, cuMemcpyDtoHAsync, 3020)                      \
    X(copy_on_device, cuMemcpyDtoDAsync, 3020)                    \
    X(set8, cuMemsetD8Async, 3020)                                \
    X(set16, cuMemsetD16Async, 3020)                              \
    X(set32, cuMemsetD32Async, 3020)                              \
    X(stream_create, cuStreamCreate, 2000)                        \
    X(stream_destroy, cuStreamDestroy, 4000)                      \
    X(stream_sync, cuStreamSynchronize, 2000)                     \
    X(stream_query, cuStreamQuery, 2000)                          \
    X(stream_wait, cuStreamWaitEvent, 3020)                       \
    X(stream_ctx, cuStreamGetCtx, 9020)                           \
    X(is_capturing, cuStreamIsCapturing, 10000)                   \
    X(begin_capture, cuStreamBeginCapture, 10010)                 \
    X(end_capture, cuStreamEndCapture, 10000)                     \
    X(exchange_mode, cuThreadExchangeStreamCaptureMode, 10010)    \
    X(graph_destroy, cuGraphDestroy, 10000)                       \
    X(attach, cuStreamAttachMemAsync, 6000)                       \
    X(host_func, cuLaunchHostFunc, 10000)                         \
    X(event_create, cuEventCreate, 2000)                          \
    X(event_record, cuEventRecord, 2000)                          \
    X(event_query, cuEventQuery, 2000)                            \
    X(event_sync, cuEventSynchronize, 2000)                       \
    X(event_elapsed, cuEventElapsedTime, 2000)                    \
    X(event_destroy, cuEventDestroy, 4000)                        \
    X(pool_create, cuMemPoolCreate, 11020)                        \
    X(pool_destroy, cuMemPoolDestroy, 11020)                      \
    X(pool_get, cuMemPoolGetAttribute, 11020)                     \
    X(pool_set, cuMemPoolSetAttribute, 11020)                     \
    X(pool_trim, cuMemPoolTrimTo, 11020)                          \
    X(pool_get_access, cuMemPoolGetAccess, 11020)                 \
    X(pool_set_access, cuMemPoolSetAccess, 11020)                 \
    X(pool_default, cuMemGetDefaultMemPool, 13000)                \
    X(pool_current, cuMemGetMemPool, 13000)                       \
    X(pool_set_current, cuMemSetMemPool, 13000)                   \
    X(pool_alloc, cuMemAllocFromPoolAsync, 11020)                 \
    X(alloc_async, cuMemAllocAsync, 11020)                        \
    X(free_async, cuMemFreeAsync, 11020)

struct driver {
    PFN_cuGetProcAddress_v12000 lookup;
#define X(member, name, version) PFN_##name##_v##version member;
    DRIVER_FUNCTIONS(X)
#undef X
};

/* What a topic starts with: device 0's primary context current, one non-blocking stream.
 * Topics that test the state before that (`bare`) get nothing. */
struct fixture {
    int devices;
    CUdevice device;
    CUcontext ctx;
    CUstream stream;
    CUmemLocation dev, dev9, dev99, host, numa, numa999, numa_current, none, unknown;
};

extern struct driver cu;

enum { KIB = 1024, MIB = 1024 * 1024 };

/* Prints "label   code NAME". */
void report(const char *label, CUresult result);
/* Prints "label   value". */
void value(const char *label, long long number);
/* Prints all range attributes of a range on one line, accessed-by with six places. */
void query(const char *label, CUdeviceptr ptr, size_t size);
/* Prints whether the kernel has the pages of a range mapped for the CPU, which shows where they
 * are. How many a single read brings in differs from run to run. */
void show_page_map(const char *label, CUdeviceptr ptr, size_t size);
/* Managed memory of `size` bytes (global attachment); ends the topic when there is none. */
CUdeviceptr managed(size_t size);
/* A non-blocking or blocking stream; ends the topic when there is none. */
CUstream new_stream(unsigned int flags);
/* Host functions for cuLaunchHostFunc: sleep `argument` microseconds; see struct late_write. */
void CUDA_CB nap(void *argument);
/* Sleeps 20 ms, then sets `size` bytes at `bytes` to `with`: shows who waited for whom. */
struct late_write {
    unsigned char *bytes;
    size_t size;
    int with;
};
void CUDA_CB write_late(void *argument);

typedef void (*topic_function)(struct fixture *f);
struct topic {
    const char *name;
    topic_function run;
    bool bare;            /* wants no context (not even cuInit) */
    int devices;          /* how many it needs */
    int version;          /* driver version it needs */
};

/* Runs each topic in a child process of its own, so that a crash or a hang is one line.
 * `only`: the one topic to run, or NULL for all. */
int run_topics(const char *library, const struct topic *topics, size_t count, const char *only);

#endif
