/* emulator_client.h: a client of the emulated driver: its calls and controls, device 0 current, and
 * managed memory. Knows nothing of the extension. */
#ifndef EMULATOR_CLIENT_H
#define EMULATOR_CLIENT_H

#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "check.h"
#include "symbols.h"

#define FUNCTIONS(X)                          \
    X(alloc, cuMemAllocManaged, 6000)         \
    X(mem_free, cuMemFree, 3020)              \
    X(advise, cuMemAdvise, 12020)             \
    X(prefetch, cuMemPrefetchAsync, 12020)    \
    X(discard, cuMemDiscardBatchAsync, 13000) \
    X(fill, cuMemsetD8Async, 3020)            \
    X(stream_create, cuStreamCreate, 2000)    \
    X(stream_destroy, cuStreamDestroy, 4000)  \
    X(stream_sync, cuStreamSynchronize, 2000) \
    X(stream_query, cuStreamQuery, 2000)      \
    X(stream_wait, cuStreamWaitEvent, 3020)   \
    X(event_create, cuEventCreate, 2000)      \
    X(event_record, cuEventRecord, 2000)      \
    X(event_destroy, cuEventDestroy, 4000)    \
    X(event_query, cuEventQuery, 2000)        \
    X(host_func, cuLaunchHostFunc, 10000)     \
    X(ctx_sync, cuCtxSynchronize, 2000)       \
    X(ctx_set, cuCtxSetCurrent, 4000)         \
    X(retain, cuDevicePrimaryCtxRetain, 7000) \
    X(uuid, cuDeviceGetUuid, 11040)           \
    X(init, cuInit, 2000)

/* bytes to devices, to the host, between devices; faults of the host, one for a page, and of
 * devices, one for 64 KiB; copies, in pages. */
struct counters {
    uint64_t htod, dtoh, dtod, cpu_faults, gpu_faults, duplications;
};

static struct {
#define X(member, name, version) PFN_##name##_v##version member;
    FUNCTIONS(X)
#undef X
    int (*residency)(CUdeviceptr ptr, size_t size, int *type, int *id);
    int (*touch)(CUdeviceptr ptr, size_t size, int device, int write);
    void (*counters)(struct counters *out);
    void (*counters_clear)(void);
    void (*schedule)(int lazy);
    int (*launch)(CUstream stream, void (*fn)(void *), void *argument);
    size_t (*live_allocations)(void);
    size_t (*live_streams)(void);
    /* of the event queues */
    int (*open)(const char *path, int flags);
    int (*ioctl)(int file, unsigned long request, void *argument);
    int (*poll)(struct pollfd *files, unsigned long count, int milliseconds);
    int (*close)(int file);
    int (*files)(int *files, int most);
    int (*disturb)(const char *name, unsigned int value);
} emu;

enum { PAGE = 4096, MIB = 1 << 20 };

static const CUmemLocation HOST = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0};
static const CUmemLocation DEV0 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static const CUmemLocation DEV1 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};
static CUcontext context;

static inline void
open_emulator(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    PFN_cuGetProcAddress_v12000 lookup;
    CUdriverProcAddressQueryResult status;
    void *symbol;
    int files[1];

    CHECK(library != NULL);
    load(library, "cuGetProcAddress_v2", (void *)&lookup);
#define X(member, name, version)                                 \
    CHECK_EQUAL(lookup(#name, &symbol, version, 0, &status), 0); \
    CHECK(symbol != NULL);                                       \
    memcpy(&emu.member, &symbol, sizeof symbol);
    FUNCTIONS(X)
#undef X
    load(library, "emu_residency", (void *)&emu.residency);
    load(library, "emu_touch", (void *)&emu.touch);
    load(library, "emu_counters", (void *)&emu.counters);
    load(library, "emu_counters_clear", (void *)&emu.counters_clear);
    load(library, "emu_schedule", (void *)&emu.schedule);
    load(library, "emu_launch", (void *)&emu.launch);
    load(library, "emu_live_allocations", (void *)&emu.live_allocations);
    load(library, "emu_live_streams", (void *)&emu.live_streams);
    load(library, "emu_uvm_open", (void *)&emu.open);
    load(library, "emu_uvm_ioctl", (void *)&emu.ioctl);
    load(library, "emu_uvm_poll", (void *)&emu.poll);
    load(library, "emu_uvm_close", (void *)&emu.close);
    load(library, "emu_uvm_files", (void *)&emu.files);
    load(library, "emu_uvm_disturb", (void *)&emu.disturb);
    CHECK_EQUAL(emu.files(files, 1), 0); /* none before there is a context */
    CHECK_EQUAL(emu.init(0), 0);
    CHECK_EQUAL(emu.retain(&context, 1), 0);
    CHECK_EQUAL(emu.retain(&context, 0), 0);
    CHECK_EQUAL(emu.ctx_set(context), 0);
}

static inline CUdeviceptr
managed(size_t size)
{
    CUdeviceptr ptr = 0;

    CHECK_EQUAL(emu.alloc(&ptr, size, CU_MEM_ATTACH_GLOBAL), 0);
    return ptr;
}

#endif
