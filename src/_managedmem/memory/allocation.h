/* allocation.h: allocations of the driver, without references and guard. */
#ifndef MM_ALLOCATION_H
#define MM_ALLOCATION_H

#include "../driver/context.h"
#include "leaks.h"

/* Allocates managed memory on pages of its own, attached to every device or to the host. Returns
 * its first address, or 0 on failure. *allocation becomes the address to pass to mm_free. */
CUdeviceptr mm_allocate_pages(mm_driver *cu, size_t size, CUmemAttach_flags to,
                              CUdeviceptr *allocation, mm_status *st);

/* Frees a managed allocation, even during a graph capture. */
MM_NODISCARD int mm_free(mm_driver *cu, CUdeviceptr start, mm_status *st);

#endif
