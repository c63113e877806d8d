/* memory_index.h: finds the memory that lived at an address at a time. */
#ifndef MM_MEMORY_INDEX_H
#define MM_MEMORY_INDEX_H

#include "../driver/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Nanoseconds before and after an allocation in which events still belong to it: different threads
 * stamp births, deaths and events. */
enum { MM_TIME_MARGIN = 2000 };

typedef struct {
    uint64_t start, end, born, died;
    uint64_t serial; /* of two allocations, the later one has the higher serial */
    uint32_t memory;
} mm_indexed_allocation;

typedef struct {
    uint64_t time;
    uint32_t rank; /* of the allocation, in the order of starts */
} mm_time_border;

/* The allocations in the order of their starts, and a tree over them. A node has the highest end of
 * the allocations below it that exist at the present time, 0 for none. The index is moved to the
 * time of each query, forwards or backwards, which costs O(log n) for each birth and death between
 * two queries; a query costs O(log n) for each allocation that has the address then. All zero is an
 * empty index. */
typedef struct {
    mm_indexed_allocation *allocations;
    uint64_t *starts;
    uint64_t *reach; /* [i]: the highest end before allocation i, at any time; count + 1 entries */
    uint64_t *ends; /* the tree: the root is node 1, node n has the children 2n and 2n + 1 */
    mm_time_border *births, *deaths; /* by time, the margin included */
    uint32_t *first; /* of each bucket of addresses: the number of allocations in earlier ones */
    unsigned bucket_bits; /* a bucket has 2 to this power addresses, from the first start on */
    size_t count, leaves; /* there are as many buckets as leaves */
    size_t born, dead; /* the number of births and deaths that are past */
} mm_memory_index;

void mm_memory_index_free(mm_memory_index *index);

/* Fills an index, which is all zero. The allocations may overlap. */
MM_NODISCARD int mm_memory_index_build(mm_memory_index *index,
                                       const mm_indexed_allocation *allocations, size_t count,
                                       mm_status *st);

/* The memory of the allocation that has the address at the time, or MM_NO_MEMORY_INDEX. Lowers
 * *limit, which is above the address, to the next address for which the answer may be another one.
 * Of several allocations, such as a wrapped part of other memory, the latest is taken. Allocations
 * that have the address only with the margin come last; a choice among several of these sets
 * *ambiguous. */
uint32_t mm_memory_index_find(mm_memory_index *index, uint64_t address, uint64_t time,
                              uint64_t *limit, bool *ambiguous);

/* True if an allocation that has not ended starts at this address. */
bool mm_memory_index_has_living(const mm_memory_index *index, uint64_t start);

#endif
