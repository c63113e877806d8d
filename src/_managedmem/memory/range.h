/* range.h: a range of addresses: checking it, its pages, its attributes, and the diagnosis of a refused
 * operation. Nothing here knows who owns the memory; callers keep it alive. */
#ifndef MM_RANGE_H
#define MM_RANGE_H

#include "location.h"
#include "stream.h"

/* A range of size 0 is empty: operations on it do nothing, and it has no advice. Its address may be 0
 * and is never passed to the driver. */
typedef struct {
    CUdeviceptr start;
    size_t size;
    CUdeviceptr allocation; /* start of the allocation it lies in; 0 when not looked up */
} mm_range;

typedef enum {
    MM_ADVISE,
    MM_PREFETCH,
    MM_DISCARD,
    MM_DISCARD_PREFETCH,
    MM_QUERY,
    MM_COPY,
    MM_WAIT /* for work on memory of any kind */
} mm_operation;

/* True if the operation loses the contents of the memory. */
static inline bool
mm_discards(mm_operation op)
{
    return op == MM_DISCARD || op == MM_DISCARD_PREFETCH;
}

static inline CUdeviceptr
mm_range_end(mm_range range)
{
    return range.start + range.size;
}

/* Checks that the range lies in one managed allocation, or in system memory where the operation
 * and the device allow that; fills range->allocation. MM_BAD_VALUE says what is wrong. */
MM_NODISCARD int mm_range_check(mm_driver *cu, mm_range *range, mm_operation op, mm_status *st);

/* What the driver knows about an address. */
typedef struct {
    unsigned int managed;
    CUmemorytype type; /* 0 for memory that CUDA does not know */
    CUdeviceptr start; /* of the allocation around it */
    size_t size;
    int device; /* the one it was allocated on, not where it is */
} mm_pointer_attributes;

/* The host can reach all memory but plain device memory. */
static inline bool
mm_host_reaches(const mm_pointer_attributes *attributes)
{
    return attributes->managed || attributes->type != CU_MEMORYTYPE_DEVICE;
}

/* Devices can reach all memory but system memory, and that too with pageable memory access. Queries
 * device 0. */
bool mm_device_reaches(mm_driver *cu, const mm_pointer_attributes *attributes);

MM_NODISCARD int mm_pointer_query(mm_driver *cu, CUdeviceptr p, mm_pointer_attributes *attributes,
                                  mm_status *st);

/* Bytes of a page of host memory: what advice and discard are rounded to. */
size_t mm_page_size(void);

/* The part of a range on its first page, for which the driver always records an advice. */
mm_range mm_first_page(mm_range range);

/* Shrinks the range to whole pages; MM_BAD_VALUE if none is left. An empty range stays as it is. */
MM_NODISCARD int mm_range_whole_pages(mm_range *range, mm_status *st);

/* Turns a failed call's code into words, where the range and location tell more than the driver.
 * Returns -1 like mm_fail. */
int mm_range_diagnose(mm_driver *cu, mm_range range, CUmemLocation where, mm_operation op,
                      mm_status *st);

#endif
