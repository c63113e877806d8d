/* Entry points: page-locking host memory that others have allocated. Such memory has no pages of this
 * driver: it lies in a list of its own, as the allocations that pointer queries and copies ask for. */
#include "entries.h"

#include <stdlib.h>

struct registered {
    struct emu_allocation allocation;
    struct registered *next;
};

static struct registered *all_registered;

struct emu_allocation *
emu_find_registered(CUdeviceptr ptr)
{
    for (struct registered *r = all_registered; r != NULL; r = r->next) {
        if (ptr - r->allocation.base < r->allocation.size) {
            return &r->allocation;
        }
    }
    return NULL;
}

static bool
meets_registered(CUdeviceptr base, size_t size)
{
    for (const struct registered *r = all_registered; r != NULL; r = r->next) {
        if (base < r->allocation.base + r->allocation.size && r->allocation.base < base + size) {
            return true;
        }
    }
    return false;
}

static CUresult
register_memory(CUdeviceptr base, size_t size, unsigned int flags)
{
    const unsigned int known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    struct registered *added;

    if (base == 0 || size == 0 || (flags & ~known) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (emu_current() == NULL) {
        return emu_no_context();
    }
    if (meets_registered(base, size)) {
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    added = calloc(1, sizeof *added);
    if (added == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    added->allocation = (struct emu_allocation){.base = base,
                                                .size = size,
                                                .kind = EMU_PINNED,
                                                .device = emu_current(),
                                                .context = emu_context()};
    added->next = all_registered;
    all_registered = added;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemHostRegister_v2, void *p, size_t bytesize, unsigned int Flags)
{
    EMU_BEGIN("cuMemHostRegister", EMU_CALL_WORK, "ptr=0x%llx, size=%zu, flags=%u",
              emu_handle_number(p), bytesize, Flags);
    return emu_call_end(&call, register_memory((CUdeviceptr)(uintptr_t)p, bytesize, Flags));
}

static CUresult
unregister_memory(CUdeviceptr base)
{
    struct registered **link = &all_registered, *found;

    while (*link != NULL && (*link)->allocation.base != base) {
        link = &(*link)->next;
    }
    if (*link == NULL) {
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    emu_streams_drain(NULL);
    found = *link;
    *link = found->next;
    free(found);
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuMemHostUnregister, void *p)
{
    EMU_BEGIN("cuMemHostUnregister", EMU_CALL_WORK, "ptr=0x%llx", emu_handle_number(p));
    return emu_call_end(&call, unregister_memory((CUdeviceptr)(uintptr_t)p));
}
