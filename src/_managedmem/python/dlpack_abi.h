/* dlpack_abi.h: the structs of DLPack 1.0 that this library exchanges, declared from its
 * specification; the sizes are checked below. */
#ifndef MM_DLPACK_ABI_H
#define MM_DLPACK_ABI_H

#include <stdint.h>

enum { DLPACK_MAJOR = 1, DLPACK_MINOR = 0 };

enum {
    DL_DEVICE_CPU = 1,
    DL_DEVICE_CUDA = 2,
    DL_DEVICE_CUDA_HOST = 3,
    DL_DEVICE_CUDA_MANAGED = 13
};

enum { DL_FLAG_READ_ONLY = 1 << 0, DL_FLAG_IS_COPIED = 1 << 1, DL_FLAG_SUBBYTE_PADDED = 1 << 2 };

typedef struct {
    int32_t device_type;
    int32_t device_id;
} dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} dl_data_type;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_data_type dtype;
    int64_t *shape, *strides; /* strides count elements */
    uint64_t byte_offset;
} dl_tensor;

/* Exchanged in capsules named "dltensor". */
typedef struct dl_managed_tensor {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

/* Exchanged in capsules named "dltensor_versioned". */
typedef struct dl_managed_tensor_versioned {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*deleter)(struct dl_managed_tensor_versioned *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed_tensor_versioned;

_Static_assert(sizeof(dl_tensor) == 48, "DLTensor");
_Static_assert(sizeof(dl_managed_tensor) == 64, "DLManagedTensor");
_Static_assert(sizeof(dl_managed_tensor_versioned) == 80, "DLManagedTensorVersioned");

#endif
