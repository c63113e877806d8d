/* functions.h: the driver entry points this library uses, one line each; nothing else.
 *
 * X(name, version): `version` is the suffix of CUDA's PFN typedef and the version passed to
 * cuGetProcAddress. It selects the parameter list: for another version, a driver may return a
 * function with another signature. Names stand without their "cu", because cuda.h defines macros
 * for several of the full ones. */
#ifndef MM_FUNCTIONS_H
#define MM_FUNCTIONS_H

/* In every driver from CUDA 12.2; a driver that lacks one of these is refused. */
#define MM_REQUIRED_FUNCTIONS(X)              \
    X(GetErrorName, 6000)                     \
    X(GetErrorString, 6000)                   \
    X(Init, 2000)                             \
    X(DeviceGetCount, 2000)                   \
    X(DeviceGetName, 2000)                    \
    X(DeviceGetUuid, 11040)                   \
    X(DeviceGetAttribute, 2000)               \
    X(DeviceTotalMem, 3020)                   \
    X(DeviceCanAccessPeer, 4000)              \
    X(DevicePrimaryCtxRetain, 7000)           \
    X(DevicePrimaryCtxGetState, 7000)         \
    X(CtxGetCurrent, 4000)                    \
    X(CtxSetCurrent, 4000)                    \
    X(CtxPushCurrent, 4000)                   \
    X(CtxPopCurrent, 4000)                    \
    X(CtxGetDevice, 2000)                     \
    X(CtxGetId, 12000)                        \
    X(CtxSynchronize, 2000)                   \
    X(MemGetInfo, 3020)                       \
    X(MemAllocManaged, 6000)                  \
    X(MemFree, 3020)                          \
    X(MemHostAlloc, 2020)                     \
    X(MemFreeHost, 2000)                      \
    X(MemHostRegister, 6050)                  \
    X(MemHostUnregister, 4000)                \
    X(MemAlloc, 3020)                         \
    X(MemAdvise, 12020)                       \
    X(MemPrefetchAsync, 12020)                \
    X(MemRangeGetAttribute, 8000)             \
    X(MemRangeGetAttributes, 8000)            \
    X(PointerGetAttributes, 7000)             \
    X(MemcpyAsync, 4000)                      \
    X(MemsetD8Async, 3020)                    \
    X(MemsetD16Async, 3020)                   \
    X(MemsetD32Async, 3020)                   \
    X(MemPoolCreate, 11020)                   \
    X(MemPoolDestroy, 11020)                  \
    X(MemPoolTrimTo, 11020)                   \
    X(MemPoolGetAttribute, 11020)             \
    X(MemPoolSetAttribute, 11020)             \
    X(MemPoolGetAccess, 11020)                \
    X(MemPoolSetAccess, 11020)                \
    X(MemAllocFromPoolAsync, 11020)           \
    X(MemFreeAsync, 11020)                    \
    X(StreamCreate, 2000)                     \
    X(StreamDestroy, 4000)                    \
    X(StreamSynchronize, 2000)                \
    X(StreamQuery, 2000)                      \
    X(StreamIsCapturing, 10000)               \
    X(StreamGetCtx, 9020)                     \
    X(StreamGetId, 12000)                     \
    X(StreamWaitEvent, 3020)                  \
    X(StreamAttachMemAsync, 6000)             \
    X(EventCreate, 2000)                      \
    X(EventRecord, 2000)                      \
    X(EventQuery, 2000)                       \
    X(EventSynchronize, 2000)                 \
    X(EventDestroy, 4000)                     \
    X(ThreadExchangeStreamCaptureMode, 10010) \
    X(LaunchHostFunc, 10000)

/* NULL in drivers that lack them. They came with CUDA 12.8, 13.0, 13.2 or 13.4, add nodes to
 * graphs under capture, or map memory at reserved addresses, which not every device can. Newer
 * drivers keep these versions of MemcpyBatchAsync and the capture functions for older programs. */
#define MM_OPTIONAL_FUNCTIONS(X)              \
    X(MemcpyBatchAsync, 12080)                \
    X(MemcpyWithAttributesAsync, 13020)       \
    X(MemPrefetchBatchAsync, 13000)           \
    X(MemDiscardBatchAsync, 13000)            \
    X(MemDiscardAndPrefetchBatchAsync, 13000) \
    X(MemGetLocationInfo, 13040)              \
    X(StreamGetCaptureInfo, 12030)            \
    X(StreamUpdateCaptureDependencies, 11030) \
    X(GraphAddMemcpyNode, 10000)              \
    X(GraphRetainUserObject, 11030)           \
    X(MemGetAllocationGranularity, 10020)     \
    X(MemCreate, 10020)                       \
    X(MemRelease, 10020)                      \
    X(MemAddressReserve, 10020)               \
    X(MemAddressFree, 10020)                  \
    X(MemMap, 10020)                          \
    X(MemSetAccess, 10020)                    \
    X(MemUnmap, 10020)                        \
    X(UserObjectCreate, 11030)                \
    X(UserObjectRelease, 11030)

#endif
