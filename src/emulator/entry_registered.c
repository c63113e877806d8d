/* Entry points: page-locking of host memory that was allocated elsewhere. Such memory has no
 * region. A list of its own holds it as allocations, which pointer queries and copies look up. */
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
    struct registered *r;

    EMU_SEEK(r, all_registered, ptr - r->allocation.base < r->allocation.size);
    return r != NULL ? &r->allocation : NULL;
}

static bool
meets_registered(CUdeviceptr base, size_t size)
{
    const struct registered *r;

    EMU_SEEK(r, all_registered,
             base < r->allocation.base + r->allocation.size && r->allocation.base < base + size);
    return r != NULL;
}

EMU_ENTRY(cuMemHostRegister_v2, void *p, size_t bytesize, unsigned int Flags)
{
    const unsigned int known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    CUdeviceptr base = (CUdeviceptr)(uintptr_t)p;
    struct registered *added;

    EMU_BEGIN("cuMemHostRegister", EMU_CALL_WORK, "ptr=0x%llx, size=%zu, flags=%u",
              emu_handle_number(p), bytesize, Flags);
    EMU_NEED(base != 0 && bytesize != 0 && (Flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    EMU_NEED(emu_current() != NULL, emu_no_context());
    EMU_NEED(!meets_registered(base, bytesize), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    added = calloc(1, sizeof *added);
    EMU_NEED(added != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    added->allocation = (struct emu_allocation){.base = base,
                                                .size = bytesize,
                                                .kind = EMU_PINNED,
                                                .device = emu_current(),
                                                .context = emu_context()};
    EMU_LINK(all_registered, added);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuMemHostUnregister, void *p)
{
    struct registered *found;

    EMU_BEGIN("cuMemHostUnregister", EMU_CALL_WORK, "ptr=0x%llx", emu_handle_number(p));
    EMU_SEEK(found, all_registered, found->allocation.base == (CUdeviceptr)(uintptr_t)p);
    EMU_NEED(found != NULL, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    emu_streams_drain(NULL);
    EMU_UNLINK(all_registered, found);
    free(found);
    return emu_call_end(&call, CUDA_SUCCESS);
}
