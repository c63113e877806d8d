/* Entry points: pointer attributes. */
#include "entries.h"

#include <string.h>

static size_t
pointer_attribute_size(CUpointer_attribute attribute)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return 8;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return 4;
    default:
        return 0;
    }
}

/* The value of an attribute in the low bytes of a number; only little-endian machines are
 * supported. */
static uint64_t
pointer_attribute(const struct emu_allocation *a, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        return (uintptr_t)(a->context != NULL ? a->context : &a->device->primary);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        return ptr;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        return a->id;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        return a->base;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        return a->size;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        return (uintptr_t)a->pool;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return a->kind == EMU_PINNED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        return a->sync_memops;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        return a->kind == EMU_MANAGED;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        return (uint64_t)a->device->ordinal;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        return 1;
    default:
        return 0;
    }
}

/* The allocation, or the memory that others have allocated and the driver has page-locked. */
static const struct emu_allocation *
find_known(CUdeviceptr ptr)
{
    const struct emu_allocation *allocation = emu_find(ptr);

    return allocation != NULL ? allocation : emu_find_registered(ptr);
}

EMU_ENTRY(cuPointerGetAttribute, void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    const struct emu_allocation *allocation;
    size_t size = pointer_attribute_size(attribute);
    uint64_t value;

    EMU_BEGIN("cuPointerGetAttribute", EMU_CALL_WORK, "attribute=%d, ptr=0x%llx", (int)attribute,
              ptr);
    allocation = find_known(ptr);
    EMU_NEED(
        data != NULL && size != 0 && allocation != NULL
            && (attribute != CU_POINTER_ATTRIBUTE_HOST_POINTER || allocation->kind != EMU_DEVICE),
        CUDA_ERROR_INVALID_VALUE);
    value = pointer_attribute(allocation, attribute, ptr);
    memcpy(data, &value, size);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* The plural form accepts unknown pointers: it writes zeros, -2 as the device, and leaves the
 * outputs of the range alone. Outputs before an unknown attribute are written. */
static CUresult
read_pointer_attributes(unsigned int number, const CUpointer_attribute *attributes, void **data,
                        CUdeviceptr ptr)
{
    const struct emu_allocation *allocation = find_known(ptr);

    if (number == 0 || attributes == NULL || data == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned int i = 0; i < number; i++) {
        uint64_t value = allocation != NULL ? pointer_attribute(allocation, attributes[i], ptr)
                         : attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
                             ? (uint64_t)(int64_t)CU_DEVICE_INVALID
                             : 0;
        bool range = attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
                     || attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE;

        if (pointer_attribute_size(attributes[i]) == 0 || data[i] == NULL) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (allocation != NULL || !range) {
            memcpy(data[i], &value, pointer_attribute_size(attributes[i]));
        }
    }
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuPointerGetAttributes, unsigned int numAttributes, CUpointer_attribute *attributes,
          void **data, CUdeviceptr ptr)
{
    EMU_BEGIN("cuPointerGetAttributes", EMU_CALL_WORK, "numAttributes=%u, ptr=0x%llx",
              numAttributes, ptr);
    return emu_call_end(&call, read_pointer_attributes(numAttributes, attributes, data, ptr));
}

EMU_ENTRY(cuPointerSetAttribute, const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    struct emu_allocation *allocation;

    EMU_BEGIN("cuPointerSetAttribute", EMU_CALL_WORK, "attribute=%d, ptr=0x%llx", (int)attribute,
              ptr);
    allocation = emu_find(ptr);
    EMU_NEED(value != NULL && allocation != NULL && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
             CUDA_ERROR_INVALID_VALUE);
    memcpy(&allocation->sync_memops, value, sizeof allocation->sync_memops);
    return emu_call_end(&call, CUDA_SUCCESS);
}
