/* traced_memories.c: the list of memories of a trace, their labels and their addresses. */
#include "traced_memories.h"

#include "../memory/growth.h"
#include "block_table.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* Labels lie in blocks: one of the latest mm_traced_memories_set, one for each later memory. */
struct mm_label_block {
    struct mm_label_block *next;
    size_t used;
    char text[];
};

static void
free_labels(mm_label_block *block)
{
    while (block != NULL) {
        mm_label_block *next = block->next;
        free(block);
        block = next;
    }
}

void
mm_traced_memories_free(mm_traced_memories *memories)
{
    free(memories->items);
    free(memories->of_allocation);
    free(memories->of_name);
    free_labels(memories->labels);
    mm_memory_index_free(&memories->index);
    mm_address_map_free(&memories->named);
    mm_address_map_free(&memories->foreign);
    mm_address_map_free(&memories->unknown);
    *memories = (mm_traced_memories){0};
}

int
mm_traced_memories_reserve(mm_traced_memories *memories, size_t count, mm_status *st)
{
    if (count <= memories->capacity) {
        return 0;
    }
    if (count >= MM_NO_MEMORY_INDEX) {
        return mm_fail(st, MM_NO_MEMORY, "a trace can have %u memories at most",
                       MM_NO_MEMORY_INDEX - 1);
    }
    memories->items =
        mm_grow(memories->items, &memories->capacity, count, sizeof *memories->items, st);
    return memories->capacity < count ? -1 : 0;
}

static uint64_t
end_of_memory(uint64_t start, size_t size)
{
    return size < UINT64_MAX - start ? start + size : UINT64_MAX;
}

/* --- labels -------------------------------------------------------------------------------- */

static size_t
label_bytes(const char *label)
{
    return label != NULL ? strlen(label) + 1 : 0;
}

static mm_label_block *
new_labels(size_t bytes, mm_status *st)
{
    mm_label_block *block = malloc(sizeof *block + bytes);

    if (block == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu bytes of labels", bytes);
        return NULL;
    }
    block->next = NULL;
    block->used = 0;
    return block;
}

/* Copies a label into a block that has room for it. */
static const char *
store_label(mm_label_block *block, const char *label)
{
    size_t bytes = label_bytes(label);
    char *copy = block->text + block->used;

    if (bytes == 0) {
        return NULL;
    }
    memcpy(copy, label, bytes);
    block->used += bytes;
    return copy;
}

static bool
is_same_label(const char *a, const char *b)
{
    return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

/* --- allocations and names ----------------------------------------------------------------------- */

/* The new members, which replace the old ones once nothing can fail. */
typedef struct {
    uint32_t *of_allocation, *of_name;
    mm_label_block *labels;
    size_t count; /* of memories */
} memory_update;

typedef struct {
    mm_memory_index index;
    mm_address_map named;
} memory_searches;

static void
free_update(memory_update *update, memory_searches *searches)
{
    free(update->of_allocation);
    free(update->of_name);
    free_labels(update->labels);
    mm_memory_index_free(&searches->index);
    mm_address_map_free(&searches->named);
}

static int
allocate_update(memory_update *update, size_t allocations, size_t names, mm_status *st)
{
    update->of_allocation = calloc(allocations + 1, sizeof *update->of_allocation);
    update->of_name = calloc(names + 1, sizeof *update->of_name);
    if (update->of_allocation == NULL || update->of_name == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu memories of a trace",
                      allocations + names);
        return -1;
    }
    return 0;
}

static bool
is_same_name(const mm_traced_memory *memory, const mm_named_range *named)
{
    return memory->start == named->start && memory->size == named->size
           && is_same_label(memory->label, named->label);
}

static int
number_memories(const mm_traced_memories *memories, memory_update *update, size_t allocations,
                const mm_named_range *named, size_t names, mm_status *st)
{
    size_t next = memories->count;

    if (allocations >= MM_NO_MEMORY_INDEX - next
        || names >= MM_NO_MEMORY_INDEX - next - allocations) {
        return mm_fail(st, MM_NO_MEMORY, "a trace can have %u memories at most",
                       MM_NO_MEMORY_INDEX - 1);
    }
    for (size_t i = 0; i < allocations; i++) {
        update->of_allocation[i] =
            i < memories->allocations ? memories->of_allocation[i] : (uint32_t)next++;
    }
    for (size_t i = 0; i < names; i++) {
        bool known =
            i < memories->names && is_same_name(&memories->items[memories->of_name[i]], &named[i]);
        update->of_name[i] = known ? memories->of_name[i] : (uint32_t)next++;
    }
    update->count = next;
    return 0;
}

static int
index_allocations(mm_memory_index *index, const uint32_t *of_allocation,
                  const mm_allocation_record *allocations, size_t count, mm_status *st)
{
    mm_indexed_allocation *indexed = calloc(count + 1, sizeof *indexed);
    size_t kept = 0;
    int rc;

    if (indexed == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for an index of %zu memories", count);
    }
    for (size_t i = 0; i < count; i++) {
        if (allocations[i].size > 0) {
            indexed[kept++] = (mm_indexed_allocation){
                .start = allocations[i].start,
                .end = end_of_memory(allocations[i].start, allocations[i].size),
                .born = allocations[i].born,
                .died = allocations[i].died,
                .serial = allocations[i].serial,
                .memory = of_allocation[i],
            };
        }
    }
    rc = mm_memory_index_build(index, indexed, kept, st);
    free(indexed);
    return rc;
}

static int
map_names(mm_address_map *map, const uint32_t *of_name, const mm_named_range *named, size_t count,
          mm_status *st)
{
    for (size_t i = 0; i < count; i++) {
        if (named[i].size > 0
            && mm_address_map_paint(map, named[i].start,
                                    end_of_memory(named[i].start, named[i].size), of_name[i], st)
                   < 0) {
            return -1;
        }
    }
    return 0;
}

/* Makes room for the labels of all memories, because the earlier blocks are freed. */
static int
reserve_labels(const mm_traced_memories *memories, memory_update *update,
               const mm_allocation_record *allocations, size_t count, const mm_named_range *named,
               size_t names, mm_status *st)
{
    size_t bytes = 0;

    for (size_t i = 0; i < memories->count; i++) {
        bytes += label_bytes(memories->items[i].label);
    }
    for (size_t i = 0; i < count; i++) {
        bytes += label_bytes(allocations[i].label);
    }
    for (size_t i = 0; i < names; i++) {
        bytes += label_bytes(named[i].label);
    }
    update->labels = new_labels(bytes, st);
    return update->labels != NULL ? 0 : -1;
}

/* Writes the memories. Nothing can fail any more. */
static void
write_memories(mm_traced_memories *memories, memory_update *update,
               const mm_allocation_record *allocations, size_t count, const mm_named_range *named,
               size_t names)
{
    for (size_t i = 0; i < count; i++) {
        mm_traced_memory *memory = &memories->items[update->of_allocation[i]];
        assert(i >= memories->allocations || memory->serial == allocations[i].serial);
        *memory = (mm_traced_memory){.kind = MM_MEMORY_BUFFER,
                                     .start = allocations[i].start,
                                     .size = allocations[i].size,
                                     .born = allocations[i].born,
                                     .died = allocations[i].died,
                                     .serial = allocations[i].serial,
                                     .pooled = allocations[i].pooled,
                                     .label = allocations[i].label};
    }
    for (size_t i = 0; i < names; i++) {
        if (update->of_name[i] >= memories->count) {
            memories->items[update->of_name[i]] = (mm_traced_memory){.kind = MM_MEMORY_NAMED,
                                                                     .start = named[i].start,
                                                                     .size = named[i].size,
                                                                     .died = UINT64_MAX,
                                                                     .label = named[i].label};
        }
    }
    for (size_t i = 0; i < update->count; i++) {
        memories->items[i].label = store_label(update->labels, memories->items[i].label);
    }
}

/* Exchanges the members, so that free_update frees the old ones. */
static void
exchange_members(mm_traced_memories *memories, memory_update *update, memory_searches *searches,
                 size_t allocations, size_t names)
{
    memory_update old = {.of_allocation = memories->of_allocation,
                         .of_name = memories->of_name,
                         .labels = memories->labels};
    memory_searches old_searches = {memories->index, memories->named};

    memories->labels = update->labels;
    memories->of_allocation = update->of_allocation;
    memories->of_name = update->of_name;
    memories->index = searches->index;
    memories->named = searches->named;
    memories->count = update->count;
    memories->allocations = allocations;
    memories->names = names;
    *update = old;
    *searches = old_searches;
}

int
mm_traced_memories_set(mm_traced_memories *memories, const mm_allocation_record *allocations,
                       size_t count, const mm_named_range *named, size_t named_count,
                       mm_status *st)
{
    memory_update update = {0};
    memory_searches searches = {0};
    int rc = -1;

    assert(count >= memories->allocations);
    if (allocate_update(&update, count, named_count, st) == 0
        && number_memories(memories, &update, count, named, named_count, st) == 0
        && index_allocations(&searches.index, update.of_allocation, allocations, count, st) == 0
        && map_names(&searches.named, update.of_name, named, named_count, st) == 0
        && reserve_labels(memories, &update, allocations, count, named, named_count, st) == 0
        && mm_traced_memories_reserve(memories, update.count, st) == 0) {
        write_memories(memories, &update, allocations, count, named, named_count);
        exchange_members(memories, &update, &searches, count, named_count);
        rc = 0;
    }
    free_update(&update, &searches);
    return rc;
}

/* --- other memories ------------------------------------------------------------------------ */

int
mm_traced_memories_append(mm_traced_memories *memories, const mm_traced_memory *memory,
                          mm_status *st)
{
    mm_traced_memory added = *memory;

    if (mm_traced_memories_reserve(memories, memories->count + 1, st) < 0) {
        return -1;
    }
    if (memory->label != NULL) {
        mm_label_block *block = new_labels(label_bytes(memory->label), st);
        if (block == NULL) {
            return -1;
        }
        added.label = store_label(block, memory->label);
        block->next = memories->labels;
        memories->labels = block;
    }
    memories->items[memories->count++] = added;
    return 0;
}

int
mm_traced_memories_add_foreign(mm_traced_memories *memories, CUdeviceptr start, size_t size,
                               mm_status *st)
{
    const mm_traced_memory added = {
        .kind = MM_MEMORY_FOREIGN, .start = start, .size = size, .died = UINT64_MAX};

    if (mm_traced_memories_reserve(memories, memories->count + 1, st) < 0
        || mm_address_map_paint(&memories->foreign, start, end_of_memory(start, size),
                                (uint32_t)memories->count, st)
               < 0) {
        return -1;
    }
    memories->items[memories->count++] = added;
    return 0;
}

void
mm_traced_memories_remove_foreign(mm_traced_memories *memories, size_t count)
{
    assert(count <= memories->count);
    mm_address_map_remove_from(&memories->foreign, (uint32_t)count);
    memories->count = count;
}

int
mm_traced_memories_add_unknown(mm_traced_memories *memories, uint64_t start, uint64_t end,
                               mm_status *st)
{
    const uint64_t block = (uint64_t)1 << MM_BLOCK_BITS;

    assert(start < end);
    start -= start % block;
    end = end <= UINT64_MAX - block ? (end + block - 1) / block * block : UINT64_MAX;
    while (start < end) {
        uint64_t limit = end;
        if (mm_address_map_find(&memories->unknown, start, &limit) == NULL
            && mm_address_map_paint(&memories->unknown, start, limit, MM_NO_MEMORY_INDEX, st)
                   < 0) {
            return -1;
        }
        start = limit;
    }
    return 0;
}

int
mm_traced_memories_reserve_unknown(mm_traced_memories *memories, size_t *runs, mm_status *st)
{
    *runs = 0;
    for (size_t i = 0; i < memories->unknown.count; i++) {
        *runs += memories->unknown.ranges[i].index == MM_NO_MEMORY_INDEX;
    }
    return mm_traced_memories_reserve(memories, memories->count + *runs, st);
}

/* Gives the blocks to this memory, which is unknown memory beside them. */
static void
extend_unknown(mm_traced_memory *memory, const mm_address_range *blocks)
{
    uint64_t end = end_of_memory(memory->start, memory->size);

    assert(memory->kind == MM_MEMORY_UNKNOWN);
    memory->start = blocks->start < memory->start ? blocks->start : memory->start;
    end = blocks->end > end ? blocks->end : end;
    memory->size = (size_t)(end - memory->start);
}

void
mm_traced_memories_number_unknown(mm_traced_memories *memories)
{
    mm_address_map *map = &memories->unknown;
    size_t kept = 0;

    for (size_t i = 0; i < map->count; i++) {
        mm_address_range blocks = map->ranges[i];
        mm_address_range *left = kept > 0 ? &map->ranges[kept - 1] : NULL;
        bool continues = left != NULL && left->end == blocks.start;
        bool continued = i + 1 < map->count && map->ranges[i + 1].start == blocks.end;
        if (blocks.index == MM_NO_MEMORY_INDEX && (continues || continued)) {
            blocks.index = continues ? left->index : map->ranges[i + 1].index;
            extend_unknown(&memories->items[blocks.index], &blocks);
        } else if (blocks.index == MM_NO_MEMORY_INDEX) {
            assert(memories->count < memories->capacity);
            blocks.index = (uint32_t)memories->count;
            memories->items[memories->count++] =
                (mm_traced_memory){.kind = MM_MEMORY_UNKNOWN,
                                   .start = blocks.start,
                                   .size = (size_t)(blocks.end - blocks.start),
                                   .died = UINT64_MAX};
        }
        if (continues && left->index == blocks.index) {
            left->end = blocks.end;
        } else {
            map->ranges[kept++] = blocks;
        }
    }
    map->count = kept;
}

/* --- finding ------------------------------------------------------------------------------- */

static uint32_t
index_of_range(const mm_address_range *range)
{
    return range != NULL ? range->index : MM_NO_MEMORY_INDEX;
}

/* The memory of one address; *limit is lowered to the next address that may have another memory. */
static uint32_t
find_at(mm_traced_memories *memories, uint64_t address, uint64_t time, uint64_t *limit,
        bool *ambiguous)
{
    uint32_t found = index_of_range(mm_address_map_find(&memories->named, address, limit));

    if (found == MM_NO_MEMORY_INDEX) {
        found = mm_memory_index_find(&memories->index, address, time, limit, ambiguous);
    }
    if (found == MM_NO_MEMORY_INDEX) {
        found = index_of_range(mm_address_map_find(&memories->foreign, address, limit));
    }
    if (found == MM_NO_MEMORY_INDEX) {
        found = index_of_range(mm_address_map_find(&memories->unknown, address, limit));
    }
    return found;
}

uint32_t
mm_traced_memories_find(mm_traced_memories *memories, uint64_t start, uint64_t limit,
                        uint64_t time, uint64_t *end, bool *ambiguous)
{
    uint64_t at = limit;
    uint32_t found = find_at(memories, start, time, &at, ambiguous);

    while (at < limit) {
        uint64_t next = limit;
        bool next_is_ambiguous = false;
        if (find_at(memories, at, time, &next, &next_is_ambiguous) != found) {
            break;
        }
        *ambiguous = *ambiguous || next_is_ambiguous;
        at = next;
    }
    *end = at;
    return found;
}
