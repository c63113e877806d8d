/* allocation.h: allocations of the driver, without references and guard. */
#ifndef MM_ALLOCATION_H
#define MM_ALLOCATION_H

#include "../driver/context.h"

/* Managed memory on pages of its own: its first address, or 0 on failure. *allocation is what to
 * free. */
CUdeviceptr mm_allocate_pages(mm_driver *cu, size_t size, CUdeviceptr *allocation, mm_status *st);

/* True if the memory is gone after this result of a free: also when the driver is shut down or its
 * context is destroyed. */
bool mm_freed(CUresult code);

/* Frees a managed allocation, also in the middle of somebody's graph capture. */
MM_NODISCARD int mm_free(mm_driver *cu, CUdeviceptr start, mm_status *st);

#endif
