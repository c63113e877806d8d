/* traced_memories.h: the memories of a trace, found by address and time. */
#ifndef MM_TRACED_MEMORIES_H
#define MM_TRACED_MEMORIES_H

#include "../memory/event.h"
#include "../memory/allocation_log.h"
#include "address_map.h"
#include "memory_index.h"

/* A range that the user has named. It has its addresses at all times. */
typedef struct {
    CUdeviceptr start;
    size_t size;
    const char *label;
} mm_named_range;

typedef enum {
    MM_MEMORY_BUFFER, /* an allocation */
    MM_MEMORY_NAMED,
    MM_MEMORY_FOREIGN, /* an allocation of other code that still exists */
    MM_MEMORY_UNKNOWN /* a run of 2 MiB blocks with addresses that no other memory has */
} mm_memory_kind;

typedef struct {
    mm_memory_kind kind;
    CUdeviceptr start;
    size_t size;
    uint64_t born, died, serial; /* of an allocation; else 0, UINT64_MAX and 0 */
    bool pooled; /* an allocation from a pool */
    const char *label; /* NULL for foreign and unknown memory */
} mm_traced_memory;

typedef struct mm_label_block mm_label_block;

/* A memory keeps its index. All zero is an empty list. */
typedef struct {
    mm_traced_memory *items;
    size_t count, capacity;
    mm_label_block *labels;
    uint32_t *of_allocation, *of_name; /* of each, the index of its memory */
    size_t allocations, names;
    mm_memory_index index; /* of the allocations */
    mm_address_map named, foreign;
    mm_address_map unknown; /* MM_NO_MEMORY_INDEX: blocks that have no memory yet */
} mm_traced_memories;

void mm_traced_memories_free(mm_traced_memories *memories);

/* Sets the allocations and named ranges known so far, which begin with those of the last call.
 * Allocations may have ended or changed their labels since. A name that is not at its former
 * position in the array is a new memory. */
MM_NODISCARD int mm_traced_memories_set(mm_traced_memories *memories,
                                        const mm_allocation_record *allocations, size_t count,
                                        const mm_named_range *named, size_t named_count,
                                        mm_status *st);

/* Makes room for `count` memories in all: until there are more, they do not move. */
MM_NODISCARD int mm_traced_memories_reserve(mm_traced_memories *memories, size_t count,
                                            mm_status *st);

/* Adds a memory, and copies its label. Assigns no address to it. */
MM_NODISCARD int mm_traced_memories_append(mm_traced_memories *memories,
                                           const mm_traced_memory *memory, mm_status *st);

/* Adds foreign memory. */
MM_NODISCARD int mm_traced_memories_add_foreign(mm_traced_memories *memories, CUdeviceptr start,
                                                size_t size, mm_status *st);

/* Removes the last memories, which are foreign, so that `count` remain. */
void mm_traced_memories_remove_foreign(mm_traced_memories *memories, size_t count);

/* Notes addresses without a memory. */
MM_NODISCARD int mm_traced_memories_add_unknown(mm_traced_memories *memories, uint64_t start,
                                                uint64_t end, mm_status *st);

/* Stores the number of runs of unknown blocks without a memory, and makes room for memories. */
MM_NODISCARD int mm_traced_memories_reserve_unknown(mm_traced_memories *memories, size_t *runs,
                                                    mm_status *st);

/* Gives each run of unknown blocks a memory, shared with an adjacent run if there is one. There
 * must be room for the memories. */
void mm_traced_memories_number_unknown(mm_traced_memories *memories);

/* The memory that has the address `start` at a time, or MM_NO_MEMORY_INDEX. Stores in *end the
 * first later address with another answer, at most `limit`. Sets *ambiguous as
 * mm_memory_index_find does. Names come before allocations, allocations before foreign memory. */
uint32_t mm_traced_memories_find(mm_traced_memories *memories, uint64_t start, uint64_t limit,
                                 uint64_t time, uint64_t *end, bool *ambiguous);

#endif
