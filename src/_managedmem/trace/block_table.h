/* block_table.h: three bits for each 4 KiB page, kept for 2 MiB blocks that are in use. */
#ifndef MM_BLOCK_TABLE_H
#define MM_BLOCK_TABLE_H

#include "../driver/status.h"

#include <stddef.h>
#include <stdint.h>

enum { MM_BLOCK_BITS = 21, MM_BLOCK_PAGE_BITS = 12, MM_BLOCK_PAGES = 512, MM_BLOCK_WORDS = 8 };

/* The bits of 64 pages. */
typedef struct {
    uint64_t pages[2], recent;
} mm_page_word;

typedef struct {
    uint64_t epoch; /* for the user of the table; 0 at first */
    mm_page_word words[MM_BLOCK_WORDS]; /* bit n % 64 of word n / 64 belongs to page n */
} mm_page_block;

/* All zero is an empty table. Takes less than 300 bytes a block. Adding one can move others. */
typedef struct {
    mm_page_block *blocks;
    uint64_t *numbers; /* of each block: its address divided by the block size */
    size_t count, capacity;
    uint32_t *slots; /* index in `blocks` plus 1; 0 if free, as at least half of them are */
    size_t slot_count; /* a power of two, or 0 */
} mm_block_table;

void mm_block_table_free(mm_block_table *table);

/* The block, or NULL if the table does not have it. */
mm_page_block *mm_block_table_find(const mm_block_table *table, uint64_t number);

/* The slot where the search for a block begins. */
static inline size_t
mm_first_slot(const mm_block_table *table, uint64_t number)
{
    return (size_t)((number * 0x9e3779b97f4a7c15U) >> 32) & (table->slot_count - 1);
}

/* Loads the word of an address into the cache ahead of its use, if its block is in the slot where
 * the search for the block begins. */
static inline void
mm_block_table_expect(const mm_block_table *table, uint64_t address)
{
    uint64_t number = address >> MM_BLOCK_BITS;
    size_t word = (size_t)(address >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES / 64;
    uint32_t slot = table->slot_count > 0 ? table->slots[mm_first_slot(table, number)] : 0;

    if (slot > 0) {
        __builtin_prefetch(&table->blocks[slot - 1].epoch);
        __builtin_prefetch(&table->blocks[slot - 1].words[word]);
    }
}

/* The block, which is added if the table does not have it; NULL on failure. */
mm_page_block *mm_block_table_add(mm_block_table *table, uint64_t number, mm_status *st);

/* Adds the blocks of the addresses from start to before end. After a failure the table may have
 * some of them. */
MM_NODISCARD int mm_block_table_add_range(mm_block_table *table, uint64_t start, uint64_t end,
                                          mm_status *st);

#endif
