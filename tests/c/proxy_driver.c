/* proxy_driver.c: a driver that passes each call on to the emulated one, with the one change that
 * the environment variable PROXY names. PROXIED is the path of the emulated driver.
 *
 *   PROXY=-cuCtxGetDevice          the driver has no such entry point
 *   PROXY=cuDeviceGetCount=3       the entry point returns this code and does nothing
 *   PROXY=devices=64               the driver has this many devices
 *   PROXY=unaligned=512            managed memory begins this far behind a page border
 *   PROXY=version=3                the driver cannot tell its version
 *   PROXY=direct_access=1          the host maps managed memory of this device
 *   PROXY=torn=2                   so many records of a location change while they are read */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult; /* what is needed of cuda.h, so that any C compiler is enough */
typedef uint64_t CUdeviceptr, cuuint64_t;
typedef int CUdriverProcAddressQueryResult;
enum { CUDA_SUCCESS };

typedef CUresult (*find_function)(const char *, void **, int, cuuint64_t,
                                  CUdriverProcAddressQueryResult *);

static int number;
static CUresult (*allocate)(CUdeviceptr *, size_t, unsigned);
static CUresult (*release)(CUdeviceptr);
static CUresult (*get_attribute)(int *, int, int);
static CUresult (*get_range_attributes)(void **, size_t *, int *, size_t, CUdeviceptr, size_t);

/* True if PROXY changes this name; sets the number behind it. */
static int
concerns(const char *name)
{
    const char *text = getenv("PROXY");
    size_t length = strlen(name);

    if (text == NULL || strncmp(text, name, length) != 0 || text[length] != '=') {
        return 0;
    }
    number = atoi(text + length + 1);
    return 1;
}

/* Also stands for entry points with arguments: callers clean up their arguments themselves. */
static CUresult
return_number(void)
{
    return (CUresult)number;
}

static CUresult
count_devices(int *count)
{
    *count = number;
    return CUDA_SUCCESS;
}

static CUresult
allocate_unaligned(CUdeviceptr *start, size_t size, unsigned flags)
{
    CUresult code = allocate(start, size + (size_t)number, flags);

    *start += (CUdeviceptr)number;
    return code;
}

static CUresult
release_unaligned(CUdeviceptr start)
{
    return release(start - (CUdeviceptr)number);
}

static CUresult
get_direct_access(int *value, int attribute, int device)
{
    enum { DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101 };
    CUresult code = get_attribute(value, attribute, device);

    if (attribute == DIRECT_MANAGED_MEM_ACCESS_FROM_HOST) {
        *value = device == number;
    }
    return code;
}

/* The type of a device, and then the id that a prefetch to the host leaves. */
static CUresult
get_torn_attributes(void **data, size_t *sizes, int *attributes, size_t count, CUdeviceptr start,
                    size_t size)
{
    enum { PREFERRED_LOCATION_ID = 6, LAST_PREFETCH_LOCATION_ID = 8 };
    CUresult code = get_range_attributes(data, sizes, attributes, count, start, size);
    int tears = number > 0;

    for (size_t i = 1; i < count; i++) {
        if (tears
            && (attributes[i] == PREFERRED_LOCATION_ID
                || attributes[i] == LAST_PREFETCH_LOCATION_ID)) {
            enum { DEVICE = 1, OF_THE_HOST = -1 };
            memcpy(data[i - 1], &(int){DEVICE}, sizeof(int));
            memcpy(data[i], &(int){OF_THE_HOST}, sizeof(int));
        }
    }
    number -= tears;
    return code;
}

static void *
emulated(const char *name)
{
    static void *library;
    void *found;

    if (library == NULL) {
        library = dlopen(getenv("PROXIED"), RTLD_NOW | RTLD_LOCAL);
    }
    found = library ? dlsym(library, name) : NULL;
    if (found == NULL) {
        (void)fprintf(stderr, "proxy_driver: no %s in PROXIED\n", name);
        abort();
    }
    return found;
}

static void
replace(void **function, void *kept, void *other)
{
    memcpy(kept, function, sizeof *function);
    *function = other;
}

CUresult
cuDriverGetVersion(int *version)
{
    CUresult (*get)(int *);
    void *found = emulated("cuDriverGetVersion");

    memcpy(&get, &found, sizeof get);
    return concerns("version") ? (CUresult)number : get(version);
}

#ifndef WITHOUT_SEARCH
CUresult
cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                    CUdriverProcAddressQueryResult *status)
{
    const char *text = getenv("PROXY");
    void *found = emulated("cuGetProcAddress_v2");
    find_function find;
    CUresult code;

    memcpy(&find, &found, sizeof find);
    if (text != NULL && text[0] == '-' && strcmp(text + 1, name) == 0) {
        name = "cuNothing";
    }
    code = find(name, function, version, flags, status);
    if (concerns(name)) {
        *function = (void *)return_number;
    } else if (strcmp(name, "cuDeviceGetCount") == 0 && concerns("devices")) {
        *function = (void *)count_devices;
    } else if (strcmp(name, "cuMemAllocManaged") == 0 && concerns("unaligned")) {
        replace(function, &allocate, (void *)allocate_unaligned);
    } else if (strcmp(name, "cuMemFree") == 0 && concerns("unaligned")) {
        replace(function, &release, (void *)release_unaligned);
    } else if (strcmp(name, "cuDeviceGetAttribute") == 0 && concerns("direct_access")) {
        replace(function, &get_attribute, (void *)get_direct_access);
    } else if (strcmp(name, "cuMemRangeGetAttributes") == 0 && concerns("torn")) {
        replace(function, &get_range_attributes, (void *)get_torn_attributes);
    }
    return code;
}
#endif
