/* Every entry point of the emulated driver: its name for cuGetProcAddress, the first driver
 * version with this form of it, and the vendor's symbol. Among the forms of one name, the
 * newest up to the requested version is returned. A new entry point needs a line here and
 * EMU_ENTRY. */
#ifndef MANAGEDMEM_EMULATOR_ENTRIES_H
#define MANAGEDMEM_EMULATOR_ENTRIES_H

#include "emulator.h"

/* Missing in the oldest supported headers. */
#if CUDA_VERSION < 13010
extern CUresult cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData,
                                    unsigned int syncMode);
#endif
#if CUDA_VERSION < 13020
extern CUresult cuMemcpyWithAttributesAsync(CUdeviceptr dst, CUdeviceptr src, size_t size,
                                            CUmemcpyAttributes *attr, CUstream hStream);
#endif
#if CUDA_VERSION < 13040
extern CUresult cuMemGetLocationInfo(CUdeviceptr ptr, size_t size, size_t summaryGranularity,
                                     size_t samplingGranularity, CUmemLocation *location_out);
#endif

#define EMU_ENTRIES(X)                                                               \
    X("cuInit", 2000, cuInit)                                                        \
    X("cuDriverGetVersion", 2020, cuDriverGetVersion)                                \
    X("cuGetProcAddress", 11030, cuGetProcAddress)                                   \
    X("cuGetProcAddress", 12000, cuGetProcAddress_v2)                                \
    X("cuGetErrorName", 6000, cuGetErrorName)                                        \
    X("cuGetErrorString", 6000, cuGetErrorString)                                    \
    X("cuDeviceGetCount", 2000, cuDeviceGetCount)                                    \
    X("cuDeviceGet", 2000, cuDeviceGet)                                              \
    X("cuDeviceGetName", 2000, cuDeviceGetName)                                      \
    X("cuDeviceGetUuid", 9020, cuDeviceGetUuid)                                      \
    X("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2)                                  \
    X("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute)                            \
    X("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2)                                 \
    X("cuDeviceCanAccessPeer", 4000, cuDeviceCanAccessPeer)                          \
    X("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain)                    \
    X("cuDevicePrimaryCtxRelease", 7000, cuDevicePrimaryCtxRelease)                  \
    X("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2)              \
    X("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState)                \
    X("cuCtxCreate", 3020, cuCtxCreate_v2)                                           \
    X("cuCtxCreate", 12050, cuCtxCreate_v4)                                          \
    X("cuDeviceGetDefaultMemPool", 11020, cuDeviceGetDefaultMemPool)                 \
    X("cuDeviceGetMemPool", 11020, cuDeviceGetMemPool)                               \
    X("cuDeviceSetMemPool", 11020, cuDeviceSetMemPool)                               \
    X("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2)                         \
    X("cuCtxDestroy", 4000, cuCtxDestroy_v2)                                         \
    X("cuCtxGetCurrent", 4000, cuCtxGetCurrent)                                      \
    X("cuCtxSetCurrent", 4000, cuCtxSetCurrent)                                      \
    X("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2)                                 \
    X("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2)                                   \
    X("cuCtxGetDevice", 2000, cuCtxGetDevice)                                        \
    X("cuCtxGetDevice", 13000, cuCtxGetDevice_v2)                                    \
    X("cuCtxGetId", 12000, cuCtxGetId)                                               \
    X("cuCtxSynchronize", 2000, cuCtxSynchronize)                                    \
    X("cuCtxSynchronize", 13000, cuCtxSynchronize_v2)                                \
    X("cuMemGetInfo", 3020, cuMemGetInfo_v2)                                         \
    X("cuMemAlloc", 3020, cuMemAlloc_v2)                                             \
    X("cuMemAllocHost", 3020, cuMemAllocHost_v2)                                     \
    X("cuMemHostAlloc", 2020, cuMemHostAlloc)                                        \
    X("cuMemFreeHost", 2000, cuMemFreeHost)                                          \
    X("cuMemHostRegister", 6050, cuMemHostRegister_v2)                               \
    X("cuMemHostUnregister", 4000, cuMemHostUnregister)                              \
    X("cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity)         \
    X("cuMemCreate", 10020, cuMemCreate)                                             \
    X("cuMemRelease", 10020, cuMemRelease)                                           \
    X("cuMemAddressReserve", 10020, cuMemAddressReserve)                             \
    X("cuMemAddressFree", 10020, cuMemAddressFree)                                   \
    X("cuMemMap", 10020, cuMemMap)                                                   \
    X("cuMemSetAccess", 10020, cuMemSetAccess)                                       \
    X("cuMemUnmap", 10020, cuMemUnmap)                                               \
    X("cuMemAllocManaged", 6000, cuMemAllocManaged)                                  \
    X("cuMemFree", 3020, cuMemFree_v2)                                               \
    X("cuMemAdvise", 8000, cuMemAdvise)                                              \
    X("cuMemAdvise", 12020, cuMemAdvise_v2)                                          \
    X("cuMemPrefetchAsync", 8000, cuMemPrefetchAsync)                                \
    X("cuMemPrefetchAsync", 12020, cuMemPrefetchAsync_v2)                            \
    X("cuMemPrefetchBatchAsync", 13000, cuMemPrefetchBatchAsync)                     \
    X("cuMemDiscardBatchAsync", 13000, cuMemDiscardBatchAsync)                       \
    X("cuMemDiscardAndPrefetchBatchAsync", 13000, cuMemDiscardAndPrefetchBatchAsync) \
    X("cuMemRangeGetAttribute", 8000, cuMemRangeGetAttribute)                        \
    X("cuMemRangeGetAttributes", 8000, cuMemRangeGetAttributes)                      \
    X("cuMemGetLocationInfo", 13040, cuMemGetLocationInfo)                           \
    X("cuPointerGetAttribute", 4000, cuPointerGetAttribute)                          \
    X("cuPointerGetAttributes", 7000, cuPointerGetAttributes)                        \
    X("cuPointerSetAttribute", 6000, cuPointerSetAttribute)                          \
    X("cuMemcpy", 4000, cuMemcpy)                                                    \
    X("cuMemcpyAsync", 4000, cuMemcpyAsync)                                          \
    X("cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync)                               \
    X("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2)                            \
    X("cuMemcpyWithAttributesAsync", 13020, cuMemcpyWithAttributesAsync)             \
    X("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2)                               \
    X("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2)                               \
    X("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2)                               \
    X("cuMemsetD8Async", 3020, cuMemsetD8Async)                                      \
    X("cuMemsetD16Async", 3020, cuMemsetD16Async)                                    \
    X("cuMemsetD32Async", 3020, cuMemsetD32Async)                                    \
    X("cuStreamCreate", 2000, cuStreamCreate)                                        \
    X("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority)                \
    X("cuStreamDestroy", 4000, cuStreamDestroy_v2)                                   \
    X("cuStreamSynchronize", 2000, cuStreamSynchronize)                              \
    X("cuStreamQuery", 2000, cuStreamQuery)                                          \
    X("cuStreamWaitEvent", 3020, cuStreamWaitEvent)                                  \
    X("cuStreamGetCtx", 9020, cuStreamGetCtx)                                        \
    X("cuStreamGetCtx", 12050, cuStreamGetCtx_v2)                                    \
    X("cuStreamGetFlags", 5050, cuStreamGetFlags)                                    \
    X("cuStreamGetPriority", 5050, cuStreamGetPriority)                              \
    X("cuStreamGetDevice", 12080, cuStreamGetDevice)                                 \
    X("cuStreamGetId", 12000, cuStreamGetId)                                         \
    X("cuStreamIsCapturing", 10000, cuStreamIsCapturing)                             \
    X("cuStreamGetCaptureInfo", 12030, cuStreamGetCaptureInfo_v3)                    \
    X("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2)                        \
    X("cuStreamEndCapture", 10000, cuStreamEndCapture)                               \
    X("cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode) \
    X("cuStreamUpdateCaptureDependencies", 11030, cuStreamUpdateCaptureDependencies) \
    X("cuGraphDestroy", 10000, cuGraphDestroy)                                       \
    X("cuGraphAddMemcpyNode", 10000, cuGraphAddMemcpyNode)                           \
    X("cuGraphInstantiate", 11040, cuGraphInstantiateWithFlags)                      \
    X("cuGraphLaunch", 10000, cuGraphLaunch)                                         \
    X("cuGraphExecDestroy", 10000, cuGraphExecDestroy)                               \
    X("cuUserObjectCreate", 11030, cuUserObjectCreate)                               \
    X("cuUserObjectRelease", 11030, cuUserObjectRelease)                             \
    X("cuGraphRetainUserObject", 11030, cuGraphRetainUserObject)                     \
    X("cuStreamAttachMemAsync", 6000, cuStreamAttachMemAsync)                        \
    X("cuLaunchHostFunc", 10000, cuLaunchHostFunc)                                   \
    X("cuLaunchHostFunc", 13010, cuLaunchHostFunc_v2)                                \
    X("cuEventCreate", 2000, cuEventCreate)                                          \
    X("cuEventRecord", 2000, cuEventRecord)                                          \
    X("cuEventQuery", 2000, cuEventQuery)                                            \
    X("cuEventSynchronize", 2000, cuEventSynchronize)                                \
    X("cuEventDestroy", 4000, cuEventDestroy_v2)                                     \
    X("cuEventElapsedTime", 2000, cuEventElapsedTime)                                \
    X("cuEventElapsedTime", 12080, cuEventElapsedTime_v2)                            \
    X("cuMemPoolCreate", 11020, cuMemPoolCreate)                                     \
    X("cuMemPoolDestroy", 11020, cuMemPoolDestroy)                                   \
    X("cuMemPoolTrimTo", 11020, cuMemPoolTrimTo)                                     \
    X("cuMemPoolGetAttribute", 11020, cuMemPoolGetAttribute)                         \
    X("cuMemPoolSetAttribute", 11020, cuMemPoolSetAttribute)                         \
    X("cuMemPoolGetAccess", 11020, cuMemPoolGetAccess)                               \
    X("cuMemPoolSetAccess", 11020, cuMemPoolSetAccess)                               \
    X("cuMemGetDefaultMemPool", 13000, cuMemGetDefaultMemPool)                       \
    X("cuMemGetMemPool", 13000, cuMemGetMemPool)                                     \
    X("cuMemSetMemPool", 13000, cuMemSetMemPool)                                     \
    X("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync)                     \
    X("cuMemAllocAsync", 11020, cuMemAllocAsync)                                     \
    X("cuMemFreeAsync", 11020, cuMemFreeAsync)

/* Each hidden name has the prototype of its vendor symbol. */
#define EMU_DECLARE(name, version, symbol) extern __typeof__(symbol) emu_##symbol;
EMU_ENTRIES(EMU_DECLARE)
#undef EMU_DECLARE

/* Defines an entry point under a hidden name and exports the vendor's name as an alias. The
 * library itself uses the hidden names only, so that it never calls a real driver that the same
 * process loaded with global scope. */
#define EMU_ENTRY(symbol, ...)                                         \
    extern __typeof__(symbol) symbol                                   \
        __attribute__((alias("emu_" #symbol), visibility("default"))); \
    CUresult emu_##symbol(__VA_ARGS__)

/* Begins every entry point: declares `call`, or returns early. */
#define EMU_BEGIN(function, kind, ...) \
    struct emu_call call;              \
    EMU_TRY(emu_call_begin(&call, function, kind, __VA_ARGS__))

/* After EMU_BEGIN: ends the call with the result of a step that fails. */
#define EMU_STEP(step)                           \
    do {                                         \
        CUresult result_ = (step);               \
        if (result_ != CUDA_SUCCESS) {           \
            return emu_call_end(&call, result_); \
        }                                        \
    } while (0)

/* After EMU_BEGIN: ends the call with `result` if the condition is not met. */
#define EMU_NEED(condition, result) EMU_STEP((condition) ? CUDA_SUCCESS : (result))

/* entry_virtual.c: the number of reserved ranges, plus that of unmapped memories of cuMemCreate. */
size_t emu_virtual_count(void);

/* A handle as the number that the call log shows. */
static inline unsigned long long
emu_handle_number(const void *handle)
{
    return (unsigned long long)(uintptr_t)handle;
}

/* Writes an output that the caller can leave out. */
#define EMU_STORE(output, value) \
    do {                         \
        if ((output) != NULL) {  \
            *(output) = (value); \
        }                        \
    } while (0)

/* Queries of a device check their output first. */
static inline CUresult
emu_check_query(const void *out, CUdevice device)
{
    return out == NULL                  ? CUDA_ERROR_INVALID_VALUE
           : emu_device(device) == NULL ? CUDA_ERROR_INVALID_DEVICE
                                        : CUDA_SUCCESS;
}

#endif
