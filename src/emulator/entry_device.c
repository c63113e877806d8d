/* Entry points: initialisation, errors, devices. */
#include "entries.h"

#include <stdio.h>
#include <string.h>

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define X(code, text) {code, #code, text}
    X(CUDA_SUCCESS, "no error"),
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    X(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    X(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    X(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    X(CUDA_ERROR_NOT_READY, "device not ready"),
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
      "operation failed due to a previous error during capture"),
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE,
      "operation would result in a merge of separate capture sequences"),
    X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
      "dependency created on uncaptured work in another stream"),
    X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
      "operation would make the legacy stream depend on a capturing blocking stream"),
    X(CUDA_ERROR_CAPTURED_EVENT,
      "operation not permitted on an event last recorded in a capturing stream"),
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
      "attempt to terminate a thread-local capture sequence from another thread"),
    X(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef X
};

static CUresult
error_text(CUresult code, const char **out, bool name)
{
    if (out == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == code) {
            *out = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EMU_ENTRY(cuGetErrorName, CUresult error, const char **pStr)
{
    return error_text(error, pStr, true);
}

EMU_ENTRY(cuGetErrorString, CUresult error, const char **pStr)
{
    return error_text(error, pStr, false);
}

EMU_ENTRY(cuDriverGetVersion, int *driverVersion)
{
    if (driverVersion == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *driverVersion = emu_config()->driver;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuInit, unsigned int Flags)
{
    EMU_BEGIN("cuInit", EMU_CALL_BEFORE_INIT, "flags=%u", Flags);
    EMU_NEED(emu_config_error()[0] == '\0' && Flags == 0, CUDA_ERROR_INVALID_VALUE);
    EMU_NEED(!emu_config()->noinit, CUDA_ERROR_NO_DEVICE);
    emu_set_initialised();
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDeviceGetCount, int *count)
{
    EMU_BEGIN("cuDeviceGetCount", EMU_CALL_WORK, "%s", "");
    EMU_NEED(count != NULL, CUDA_ERROR_INVALID_VALUE);
    *count = emu_config()->devices;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDeviceGet, CUdevice *device, int ordinal)
{
    EMU_BEGIN("cuDeviceGet", EMU_CALL_WORK, "ordinal=%d", ordinal);
    EMU_STEP(emu_check_query(device, ordinal));
    *device = ordinal;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDeviceGetName, char *name, int len, CUdevice dev)
{
    EMU_BEGIN("cuDeviceGetName", EMU_CALL_WORK, "device=%d", dev);
    EMU_NEED(len > 0, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_check_query(name, dev));
    snprintf(name, (size_t)len, "%s", emu_config()->name);
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
device_uuid(CUuuid *uuid, CUdevice dev)
{
    EMU_BEGIN("cuDeviceGetUuid", EMU_CALL_WORK, "device=%d", dev);
    EMU_STEP(emu_check_query(uuid, dev));
    emu_device_uuid(dev, uuid->bytes);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDeviceGetUuid, CUuuid *uuid, CUdevice dev)
{
    return device_uuid(uuid, dev);
}

EMU_ENTRY(cuDeviceGetUuid_v2, CUuuid *uuid, CUdevice dev)
{
    return device_uuid(uuid, dev);
}

static CUresult
read_device_attribute(CUdevice_attribute attribute, int device, int *value)
{
    const struct emu_config *config = emu_config();
    const struct {
        CUdevice_attribute attribute;
        int value;
    } known[] = {
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device % config->numa_nodes},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, config->concurrent},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, config->pageable},
        {CU_DEVICE_ATTRIBUTE_INTEGRATED, config->integrated},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, 0},
        {CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, 0},
        {CU_DEVICE_ATTRIBUTE_NUMA_CONFIG, 0},
        {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) {
            *value = known[i].value;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EMU_ENTRY(cuDeviceGetAttribute, int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    EMU_BEGIN("cuDeviceGetAttribute", EMU_CALL_WORK, "attribute=%d, device=%d", (int)attrib, dev);
    EMU_STEP(emu_check_query(pi, dev));
    return emu_call_end(&call, read_device_attribute(attrib, dev, pi));
}

EMU_ENTRY(cuDeviceTotalMem_v2, size_t *bytes, CUdevice dev)
{
    EMU_BEGIN("cuDeviceTotalMem", EMU_CALL_WORK, "device=%d", dev);
    EMU_STEP(emu_check_query(bytes, dev));
    *bytes = emu_config()->capacity;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuDeviceCanAccessPeer, int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
    EMU_BEGIN("cuDeviceCanAccessPeer", EMU_CALL_WORK, "device=%d, peer=%d", dev, peerDev);
    EMU_STEP(emu_check_query(canAccessPeer, dev));
    EMU_STEP(emu_check_query(canAccessPeer, peerDev));
    *canAccessPeer = dev != peerDev && !emu_config()->nopeers;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemGetInfo_v2, size_t *free_bytes, size_t *total)
{
    size_t taken, capacity = emu_config()->capacity;

    EMU_BEGIN("cuMemGetInfo", EMU_CALL_WORK, "%s", "");
    EMU_NEED(emu_current() != NULL, emu_no_context());
    EMU_NEED(free_bytes != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    taken = emu_device_taken(emu_current());
    *total = capacity;
    *free_bytes = taken < capacity ? capacity - taken : 0;
    if (emu_config()->integrated) {
        *free_bytes /= 2; /* the system could reclaim the other half */
    }
    return emu_call_end(&call, CUDA_SUCCESS);
}
