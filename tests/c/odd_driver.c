/* odd_driver.c: a driver with other devices than the emulated one, to which it is linked and
 * passes all other calls. ODD_DEVICES is the number of devices. Bit n of ODD_CONCURRENT says
 * whether device n has concurrent managed access; with bit n of ODD_SILENT that query fails. Bit n
 * of ODD_DIRECT says whether the host maps managed memory on device n. Opening it is slow, and it
 * counts how often it was opened. */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int odd_openings(void);

static atomic_int openings;

__attribute__((visibility("default"))) int
odd_openings(void)
{
    return atomic_load(&openings);
}

static unsigned long
number(const char *name)
{
    const char *text = getenv(name);

    return text ? strtoul(text, NULL, 0) : 0;
}

static CUresult CUDAAPI
count_devices(int *count)
{
    *count = (int)number("ODD_DEVICES");
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (attribute == CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST) {
        *value = (int)(number("ODD_DIRECT") >> device & 1);
        return CUDA_SUCCESS;
    }
    if (attribute != CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        || (number("ODD_SILENT") >> device & 1)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = (int)(number("ODD_CONCURRENT") >> device & 1);
    return CUDA_SUCCESS;
}

/* Device n has n + 1 GiB. */
static CUresult CUDAAPI
total_memory(size_t *bytes, CUdevice device)
{
    *bytes = (size_t)(device + 1) << 30;
    return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) CUresult CUDAAPI
cuGetProcAddress_v2(const char *symbol, void **pointer, int version, cuuint64_t flags,
                    CUdriverProcAddressQueryResult *found)
{
    const PFN_cuDeviceGetCount_v2000 count = count_devices;
    const PFN_cuDeviceGetAttribute_v2000 attribute = get_attribute;
    const PFN_cuDeviceTotalMem_v3020 memory = total_memory;
    void *next = dlsym(RTLD_NEXT, "cuGetProcAddress_v2");
    PFN_cuGetProcAddress_v12000 get;
    CUresult code;

    /* Object and function pointers need not be convertible in ISO C, so the bytes are copied. */
    memcpy(&get, &next, sizeof get);
    code = get(symbol, pointer, version, flags, found);
    if (strcmp(symbol, "cuInit") == 0) {
        const struct timespec nap = {.tv_nsec = 50000000};
        atomic_fetch_add(&openings, 1);
        (void)nanosleep(&nap, NULL);
    } else if (strcmp(symbol, "cuDeviceGetCount") == 0) {
        memcpy(pointer, &count, sizeof count);
    } else if (strcmp(symbol, "cuDeviceGetAttribute") == 0) {
        memcpy(pointer, &attribute, sizeof attribute);
    } else if (strcmp(symbol, "cuDeviceTotalMem") == 0) {
        memcpy(pointer, &memory, sizeof memory);
    }
    return code;
}
