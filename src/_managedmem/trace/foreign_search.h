/* foreign_search.h: asks for the allocations around addresses that no known memory has. */
#ifndef MM_FOREIGN_SEARCH_H
#define MM_FOREIGN_SEARCH_H

#include "block_table.h"
#include "traced_memories.h"

typedef bool mm_find_allocation(void *context, CUdeviceptr address, CUdeviceptr *start,
                                size_t *size);

typedef struct {
    mm_traced_memories *memories;
    mm_block_table *asked; /* pages[0]: the pages where a query found no allocation */
    mm_find_allocation *find;
    void *context;
} mm_foreign_search;

/* Asks about addresses from start to before end, and adds the allocations as foreign memories. */
MM_NODISCARD int mm_search_foreign(const mm_foreign_search *search, uint64_t start, uint64_t end,
                                   mm_status *st);

#endif
