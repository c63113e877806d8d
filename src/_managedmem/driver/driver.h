/* driver.h: finding and opening the CUDA driver, and the table of its entry points.
 *
 * The driver is opened at the first use, never at import, and never closed again. The table is
 * published once and then read without a lock from every thread and interpreter. */
#ifndef MM_DRIVER_H
#define MM_DRIVER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "functions.h"
#include "status.h"

/* Missing in the oldest supported headers. */
#if CUDA_VERSION < 13020
typedef CUresult(CUDAAPI *PFN_cuMemcpyWithAttributesAsync_v13020)(CUdeviceptr dst, CUdeviceptr src,
                                                                  size_t size,
                                                                  CUmemcpyAttributes *attr,
                                                                  CUstream stream);
#endif
#if CUDA_VERSION < 13040
typedef CUresult(CUDAAPI *PFN_cuMemGetLocationInfo_v13040)(CUdeviceptr ptr, size_t size,
                                                           size_t summary, size_t sampling,
                                                           CUmemLocation *locations);
#endif

enum {
    MM_DRIVER_FLOOR = 12020,  /* the first version that takes locations as structs */
    MM_DRIVER_BATCH = 13000,  /* the first version with batch and discard calls */
    MM_MAX_DEVICES = 63       /* a set of locations is a 64-bit mask: devices and the host */
};

typedef struct {
#define MM_MEMBER(name, version) PFN_cu##name##_v##version name;
    MM_REQUIRED_FUNCTIONS(MM_MEMBER)
    MM_OPTIONAL_FUNCTIONS(MM_MEMBER)
#undef MM_MEMBER
    int version;      /* 13000 is CUDA 13.0 */
    int device_count; /* 1 to MM_MAX_DEVICES */
    bool emulated;
    bool concurrent_access; /* every device has concurrentManagedAccess */
    bool direct_host_access; /* the host accesses pages on some device in place: Grace */
    size_t memory[MM_MAX_DEVICES]; /* bytes of each device */
    size_t all_memory; /* bytes of all devices together */
    const char *path;       /* the file that was opened */
    void *library;          /* its handle for dlsym; never closed */
    _Atomic(CUcontext) primary[MM_MAX_DEVICES]; /* retained when first needed, then kept */
} mm_driver;

/* Bytes of the device with the least memory; SIZE_MAX before a driver is open. */
extern atomic_size_t mm_least_device_memory;

/* The driver, which the first call opens. NULL with st filled if there is no driver, if it is too
 * old, or if mm_driver_forked(). A failed opening may be tried again. */
mm_driver *mm_driver_open(mm_status *st);

/* Selects the library that mm_driver_open opens: "cuda", "emulator", or a path. Without it the
 * environment variable MANAGEDMEM_DRIVER decides. Fails once a driver is open. */
MM_NODISCARD int mm_driver_select(const char *name, mm_status *st);

/* The open driver, or NULL; never opens one. */
mm_driver *mm_driver_peek(void);

/* mm_driver_peek, but NULL in a forked child, which must not call the parent's driver. */
mm_driver *mm_driver_usable(void);

/* Copies a line for each library that was tried, with the result: at most size bytes, including
 * the terminating null. */
void mm_driver_tried(char *text, unsigned long size);

/* True in a process that was forked after its parent opened the driver, or during the opening. */
bool mm_driver_forked(void);

/* Fails with MM_UNSUPPORTED: `feature` needs an entry point of CUDA 13.0. Returns -1. */
int mm_driver_lacks(const mm_driver *cu, const char *feature, mm_status *st);

/* Calls an entry point. On failure fills st and makes the enclosing function return -1. */
#define MM_TRY(cu, name, st, ...)                                 \
    do {                                                          \
        CUresult mm_code_ = (cu)->name(__VA_ARGS__);              \
        if (mm_code_ != CUDA_SUCCESS) {                           \
            return mm_fail_call((st), "cu" #name, (int)mm_code_); \
        }                                                         \
    } while (0)

#endif
