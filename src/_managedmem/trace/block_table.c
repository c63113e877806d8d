/* block_table.c: the hash table of 2 MiB blocks. */
#include "block_table.h"

#include <assert.h>
#include <stdlib.h>

enum { FIRST_SLOTS = 64 };

void
mm_block_table_free(mm_block_table *table)
{
    free(table->blocks);
    free(table->numbers);
    free(table->slots);
    *table = (mm_block_table){0};
}

/* The slot of the block, or the free one where it belongs. */
static size_t
slot_of(const mm_block_table *table, uint64_t number)
{
    size_t mask = table->slot_count - 1;
    size_t slot = mm_first_slot(table, number);

    assert(table->slot_count > table->count);
    while (table->slots[slot] != 0 && table->numbers[table->slots[slot] - 1] != number) {
        slot = (slot + 1) & mask;
    }
    return slot;
}

mm_page_block *
mm_block_table_find(const mm_block_table *table, uint64_t number)
{
    uint32_t found = table->slot_count > 0 ? table->slots[slot_of(table, number)] : 0;

    return found > 0 ? &table->blocks[found - 1] : NULL;
}

static int
double_slots(mm_block_table *table, mm_status *st)
{
    size_t count = table->slot_count > 0 ? 2 * table->slot_count : FIRST_SLOTS;
    uint32_t *slots = calloc(count, sizeof *slots);

    if (slots == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for a table of %zu blocks", count);
    }
    free(table->slots);
    table->slots = slots;
    table->slot_count = count;
    for (size_t i = 0; i < table->count; i++) {
        slots[slot_of(table, table->numbers[i])] = (uint32_t)i + 1;
    }
    return 0;
}

/* Makes room for one more block. */
static int
reserve_block(mm_block_table *table, mm_status *st)
{
    /* Grows by an eighth, because blocks are large; realloc() of a large array copies no bytes. */
    size_t capacity = table->count + table->count / 8 + 16;
    mm_page_block *moved;
    uint64_t *numbers = NULL;

    if (table->count >= UINT32_MAX - 1) {
        (void)mm_fail(st, MM_NO_MEMORY, "a trace can follow the pages of %zu blocks only",
                      table->count);
        return -1;
    }
    if (2 * (table->count + 1) > table->slot_count && double_slots(table, st) < 0) {
        return -1;
    }
    if (table->count < table->capacity) {
        assert(table->blocks != NULL);
        return 0;
    }
    moved = realloc(table->blocks, capacity * sizeof *moved);
    if (moved != NULL) {
        table->blocks = moved;
        numbers = realloc(table->numbers, capacity * sizeof *numbers);
    }
    if (numbers == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu blocks", capacity);
        return -1;
    }
    table->numbers = numbers;
    table->capacity = capacity;
    return 0;
}

mm_page_block *
mm_block_table_add(mm_block_table *table, uint64_t number, mm_status *st)
{
    mm_page_block *block = mm_block_table_find(table, number);

    if (block != NULL) {
        return block;
    }
    if (reserve_block(table, st) < 0) {
        return NULL;
    }
    block = &table->blocks[table->count];
    *block = (mm_page_block){0};
    table->numbers[table->count++] = number;
    table->slots[slot_of(table, number)] = (uint32_t)table->count;
    return block;
}

int
mm_block_table_add_range(mm_block_table *table, uint64_t start, uint64_t end, mm_status *st)
{
    if (start >= end) {
        return 0;
    }
    for (uint64_t number = start >> MM_BLOCK_BITS; number <= (end - 1) >> MM_BLOCK_BITS;
         number++) {
        if (mm_block_table_add(table, number, st) == NULL) {
            return -1;
        }
    }
    return 0;
}
