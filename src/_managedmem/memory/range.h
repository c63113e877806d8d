/* range.h: a range of addresses: checking it, its pages, pointer queries, and the diagnosis of a
 * refused operation. Nothing here knows who owns the memory; callers keep it alive. */
#ifndef MM_RANGE_H
#define MM_RANGE_H

#include "location.h"
#include "stream.h"

/* A range of size 0 is empty: operations on it do nothing, and it has no advice. Its address may
 * be 0 and is never passed to the driver. */
typedef struct {
    CUdeviceptr start;
    size_t size;
    CUdeviceptr allocation; /* start of the allocation around it; 0 if not queried, or none */
} mm_range;

typedef enum {
    MM_ADVISE,
    MM_PREFETCH,
    MM_DISCARD,
    MM_DISCARD_PREFETCH,
    MM_QUERY,
    MM_COPY,
    MM_WAIT, /* for work on memory of any kind */
    MM_LOCATE /* asks where pages are; newer drivers answer for system memory too */
} mm_operation;

/* True if the operation loses the contents of the memory. */
static inline bool
mm_discards(mm_operation op)
{
    return op == MM_DISCARD || op == MM_DISCARD_PREFETCH;
}

/* The name of the function whose unsupported="skip" passes over targets on which the operation
 * fails; NULL if there is none. */
const char *mm_skipping_function(mm_operation op);

static inline CUdeviceptr
mm_range_end(mm_range range)
{
    return range.start + range.size;
}

/* Checks that the range lies in one managed allocation, or in system memory if the operation and
 * the device allow that. Else fails with MM_NOT_MANAGED, or with MM_BAD_VALUE for a range that
 * leaves its allocation. Fills range->allocation. */
MM_NODISCARD int mm_range_check(mm_driver *cu, mm_range *range, mm_operation op, mm_status *st);

/* The driver's answer for an address. */
typedef struct {
    unsigned int managed;
    CUmemorytype type; /* 0 for memory that CUDA does not know */
    CUdeviceptr start; /* of the allocation around it */
    size_t size;
    int device; /* of the allocation, not of the present pages */
} mm_pointer_attributes;

/* The host can reach all memory except plain device memory. */
static inline bool
mm_host_reaches(const mm_pointer_attributes *attributes)
{
    return attributes->managed || attributes->type != CU_MEMORYTYPE_DEVICE;
}

/* Devices can reach all memory except system memory. With pageable memory access they can reach
 * that too, for which device 0 is queried. */
bool mm_device_reaches(mm_driver *cu, const mm_pointer_attributes *attributes);

MM_NODISCARD int mm_pointer_query(mm_driver *cu, CUdeviceptr p, mm_pointer_attributes *attributes,
                                  mm_status *st);

/* *managed is true if managed allocations hold every byte of the range, which must not be empty. */
MM_NODISCARD int mm_range_is_managed(mm_driver *cu, mm_range range, bool *managed, mm_status *st);

/* Bytes of a page of host memory, to which advice and discards are rounded. */
size_t mm_page_size(void);

/* The size rounded up to whole pages; a size that is too large for that stays as it is. */
static inline size_t
mm_whole_pages(size_t size)
{
    size_t page = mm_page_size(), rest = size % page;

    return rest != 0 && size <= SIZE_MAX - page ? size + page - rest : size;
}

/* The part of a non-empty range on its first page, for which a driver always records advice
 * (conformance: records). */
mm_range mm_first_page(mm_range range);

/* Shrinks the range to whole pages; MM_BAD_VALUE if none is left. An empty range stays as it
 * is. */
MM_NODISCARD int mm_range_whole_pages(mm_range *range, mm_status *st);

/* Replaces or extends the status of a failed driver call with the fault found in the range or
 * location. Returns -1 like mm_fail. */
int mm_range_diagnose(mm_driver *cu, mm_range range, CUmemLocation location, mm_operation op,
                      mm_status *st);

#endif
