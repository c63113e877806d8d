/* Entry points: pointer attributes. */
#include "entries.h"

#include <string.h>

/* Reads an attribute of an allocation, or of unknown memory (NULL), into the low bytes of *value,
 * as on little-endian machines, the only ones that are supported. Returns the size of the
 * attribute, 0 for an unknown one. */
static size_t
read_attribute(const struct emu_allocation *allocation, CUpointer_attribute attribute,
               CUdeviceptr ptr, uint64_t *value)
{
    static struct emu_device nowhere = {.ordinal = CU_DEVICE_INVALID};
    static const struct emu_allocation unknown = {.device = &nowhere};
    const struct emu_allocation *a = allocation != NULL ? allocation : &unknown;
    const struct emu_context *context = a->context != NULL ? a->context : &a->device->primary;
    bool pinned = a->kind == EMU_PINNED;
    const struct {
        CUpointer_attribute attribute;
        size_t size;
        uint64_t value;
    } rows[] = {
        {CU_POINTER_ATTRIBUTE_CONTEXT, 8, (uintptr_t)context},
        {CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 8, ptr},
        {CU_POINTER_ATTRIBUTE_HOST_POINTER, 8, ptr},
        {CU_POINTER_ATTRIBUTE_BUFFER_ID, 8, a->id},
        {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 8, a->base},
        {CU_POINTER_ATTRIBUTE_RANGE_SIZE, 8, a->size},
        {CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, 8, 0},
        {CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, 8, (uintptr_t)a->pool},
        {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4, pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE},
        {CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 4, a->sync_memops},
        {CU_POINTER_ATTRIBUTE_IS_MANAGED, 4, a->kind == EMU_MANAGED},
        {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4, (uint64_t)a->device->ordinal},
        {CU_POINTER_ATTRIBUTE_MAPPED, 4, 1},
    };

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].attribute == attribute) {
            bool ordinal = attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
            *value = allocation != NULL || ordinal ? rows[i].value : 0;
            return rows[i].size;
        }
    }
    return 0;
}

/* The allocation at an address, or else the memory there that cuMemHostRegister has page-locked. */
static const struct emu_allocation *
find_known(CUdeviceptr ptr)
{
    const struct emu_allocation *allocation = emu_find(ptr);

    return allocation != NULL ? allocation : emu_find_registered(ptr);
}

EMU_ENTRY(cuPointerGetAttribute, void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    const struct emu_allocation *allocation;
    uint64_t value = 0;
    size_t size;

    EMU_BEGIN("cuPointerGetAttribute", EMU_CALL_WORK, "attribute=%d, ptr=0x%llx", (int)attribute,
              ptr);
    allocation = find_known(ptr);
    EMU_NEED(
        data != NULL && allocation != NULL
            && (attribute != CU_POINTER_ATTRIBUTE_HOST_POINTER || allocation->kind != EMU_DEVICE),
        CUDA_ERROR_INVALID_VALUE);
    size = read_attribute(allocation, attribute, ptr, &value);
    EMU_NEED(size != 0, CUDA_ERROR_INVALID_VALUE);
    memcpy(data, &value, size);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* cuPointerGetAttributes accepts unknown pointers: it writes zeros, -2 as the device, and leaves
 * the outputs of the range alone. Outputs before an unknown attribute are written. */
static CUresult
read_pointer_attributes(unsigned int number, const CUpointer_attribute *attributes, void **data,
                        CUdeviceptr ptr)
{
    const struct emu_allocation *allocation = find_known(ptr);

    if (number == 0 || attributes == NULL || data == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned int i = 0; i < number; i++) {
        bool range = attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
                     || attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        uint64_t value = 0;
        size_t size = read_attribute(allocation, attributes[i], ptr, &value);

        if (size == 0 || data[i] == NULL) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (allocation != NULL || !range) {
            memcpy(data[i], &value, size);
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
