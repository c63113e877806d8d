/* attribution.c: adds events: finds their memories, makes all room, then changes the sums. */
#include "attribution.h"

#include "../memory/growth.h"
#include "event_order.h"
#include "foreign_search.h"
#include "host_views.h"
#include "page_replay.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct mm_attribution {
    mm_traced_memories memories;
    mm_sums_table sums;
    mm_page_replay replay;
    uint32_t replayed_part;
    mm_block_table asked; /* pages where mm_attribution_find_foreign found nothing */
    uint64_t ambiguous;
};

mm_attribution *
mm_attribution_new(mm_status *st)
{
    mm_attribution *a = calloc(1, sizeof *a);

    if (a == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for the sums of a trace");
    }
    return a;
}

void
mm_attribution_free(mm_attribution *a)
{
    if (a == NULL) {
        return;
    }
    mm_traced_memories_free(&a->memories);
    mm_sums_table_free(&a->sums);
    mm_page_replay_free(&a->replay);
    mm_block_table_free(&a->asked);
    free(a);
}

int
mm_attribution_set_memories(mm_attribution *a, const mm_allocation_record *allocations,
                            size_t count, const mm_named_range *named, size_t named_count,
                            mm_status *st)
{
    return mm_traced_memories_set(&a->memories, allocations, count, named, named_count, st);
}

size_t
mm_attribution_memories(const mm_attribution *a, const mm_traced_memory **out)
{
    *out = a->memories.items;
    return a->memories.count;
}

size_t
mm_attribution_rows(const mm_attribution *a, const mm_sums_row **out)
{
    *out = a->sums.rows;
    return a->sums.count;
}

uint64_t
mm_attribution_ambiguous(const mm_attribution *a)
{
    return a->ambiguous;
}

/* The end of the event's addresses; their start if the event is empty. */
static uint64_t
end_of_event(const mm_event *event)
{
    uint64_t size = mm_event_is_divisible(event) ? event->amount : 1;
    uint64_t most = UINT64_MAX - event->address;

    return event->address + (size < most ? size : most);
}

/* --- foreign memory ------------------------------------------------------------------------ */

static bool
is_unknown(const mm_attribution *a, uint32_t memory)
{
    return memory == MM_NO_MEMORY_INDEX || a->memories.items[memory].kind == MM_MEMORY_UNKNOWN;
}

/* Asks about the addresses of an event that no memory has. */
static int
search_event(mm_attribution *a, const mm_foreign_search *search, const mm_event *event,
             mm_status *st)
{
    uint64_t at = event->address, limit = end_of_event(event), end;
    bool ignored = false;

    for (; at < limit; at = end) {
        uint32_t memory =
            mm_traced_memories_find(&a->memories, at, limit, event->start, &end, &ignored);
        if (is_unknown(a, memory) && mm_search_foreign(search, at, end, st) < 0) {
            return -1;
        }
    }
    return 0;
}

int
mm_attribution_find_foreign(mm_attribution *a, const mm_event *events, size_t count,
                            mm_find_allocation *find, void *context, mm_status *st)
{
    const mm_foreign_search search = {&a->memories, &a->asked, find, context};
    size_t known = a->memories.count;

    for (size_t i = 0; i < count; i++) {
        if (search_event(a, &search, &events[i], st) < 0) {
            mm_traced_memories_remove_foreign(&a->memories, known);
            mm_block_table_free(&a->asked);
            return -1;
        }
    }
    return 0;
}

/* --- adding -------------------------------------------------------------------------------- */

/* In place of a memory's index: the event has several memories, or unknown addresses, and is
 * divided later. */
#define DIVIDED (MM_NO_MEMORY_INDEX - 1)

/* One call of mm_attribution_add. */
typedef struct {
    const mm_event *events;
    size_t count;
    mm_event_order order;
    uint32_t *memories; /* of each event, in the order of starts */
    size_t pieces; /* their number, at most */
    uint64_t ambiguous;
} event_batch;

/* The event at a place in the order of starts. Later events and the entries that they change are
 * loaded into the cache ahead of their use. */
static inline const mm_event *
event_at(const mm_attribution *a, const event_batch *batch, size_t i)
{
    enum { AHEAD = 8 };

    if (i + 2 * AHEAD < batch->count) {
        const mm_event *next = &batch->events[mm_event_position(&batch->order, i + AHEAD)];
        __builtin_prefetch(&batch->events[mm_event_position(&batch->order, i + 2 * AHEAD)]);
        if (next->kind == MM_MOVE) {
            mm_block_table_expect(&a->replay.blocks, next->address);
        }
        mm_sums_table_expect(&a->sums, batch->memories[i + AHEAD]);
    }
    return &batch->events[mm_event_position(&batch->order, i)];
}

static void
free_batch(event_batch *batch)
{
    mm_event_order_free(&batch->order);
    free(batch->memories);
}

/* Finds the memories of an event, notes the addresses without a memory, and makes room for its
 * pages. */
static int
locate_event(mm_attribution *a, event_batch *batch, const mm_event *event, uint32_t *memory,
             mm_status *st)
{
    uint64_t at = event->address, limit = end_of_event(event), end = limit;
    bool ambiguous = false;
    /* An event that would go beyond the last address is cut. */
    bool is_whole = !mm_event_is_divisible(event) || limit - at == event->amount;

    *memory = MM_NO_MEMORY_INDEX;
    batch->pieces += at == limit;
    if (event->kind == MM_MOVE && mm_page_replay_reserve(&a->replay, at, limit, st) < 0) {
        return -1;
    }
    while (at < limit) {
        uint32_t found =
            mm_traced_memories_find(&a->memories, at, limit, event->start, &end, &ambiguous);
        if (found == MM_NO_MEMORY_INDEX) {
            is_whole = false;
            if (mm_traced_memories_add_unknown(&a->memories, at, end, st) < 0) {
                return -1;
            }
        }
        *memory = is_whole && end == limit ? found : DIVIDED;
        is_whole = false;
        batch->pieces++;
        at = end;
    }
    batch->ambiguous += ambiguous;
    return 0;
}

static int
locate_events(mm_attribution *a, event_batch *batch, mm_status *st)
{
    if (mm_event_order_make(&batch->order, batch->events, batch->count, st) < 0) {
        return -1;
    }
    batch->memories = calloc(batch->count, sizeof *batch->memories);
    if (batch->memories == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu events", batch->count);
    }
    for (size_t i = 0; i < batch->count; i++) {
        const mm_event *event = event_at(a, batch, i);
        if (locate_event(a, batch, event, &batch->memories[i], st) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
reserve_pieces(mm_event_list *pieces, size_t more, mm_status *st)
{
    size_t needed = pieces->count + more;

    pieces->items = mm_grow(pieces->items, &pieces->capacity, needed, sizeof *pieces->items, st);
    return pieces->capacity < needed ? -1 : 0;
}

/* Makes room for the sums and pieces. */
static int
reserve_sums(mm_attribution *a, const event_batch *batch, mm_event_list *pieces, mm_status *st)
{
    size_t unknown, memories, rows;

    if (mm_traced_memories_reserve_unknown(&a->memories, &unknown, st) < 0) {
        return -1;
    }
    memories = a->memories.count + unknown;
    rows = (batch->pieces < memories ? batch->pieces : memories) + 1; /* and the total */
    if (mm_sums_table_reserve(&a->sums, rows, memories, st) < 0) {
        return -1;
    }
    return pieces != NULL ? reserve_pieces(pieces, batch->pieces, st) : 0;
}

/* Adds an event, or a piece of one, that lies inside this memory. */
static void
add_piece(mm_attribution *a, const mm_event *piece, uint32_t memory, mm_event_list *pieces)
{
    mm_turned turned = {0};

    if (pieces != NULL) {
        assert(pieces->count < pieces->capacity);
        pieces->items[pieces->count] = *piece;
        pieces->items[pieces->count++].memory = memory;
    }
    if (memory == MM_NO_MEMORY_INDEX || !mm_event_is_counted(piece)) {
        return;
    }
    if (piece->kind == MM_MOVE) {
        turned = mm_page_replay_move(&a->replay, piece);
    }
    mm_sums_table_add(&a->sums, memory, piece, turned);
}

/* Divides an event at the borders of memories. */
static void
add_divided(mm_attribution *a, const mm_event *event, mm_event_list *pieces)
{
    uint64_t at = event->address, limit = end_of_event(event), end;
    mm_event piece = *event;
    bool ignored = false;

    for (; at < limit; at = end) {
        uint32_t memory =
            mm_traced_memories_find(&a->memories, at, limit, event->start, &end, &ignored);
        assert(memory != MM_NO_MEMORY_INDEX);
        piece.address = at;
        piece.amount = mm_event_is_divisible(event) ? end - at : event->amount;
        add_piece(a, &piece, memory, pieces);
    }
}

static void
add_located(mm_attribution *a, uint32_t part, const event_batch *batch, mm_event_list *pieces)
{
    mm_host_views open = {.count = 0};

    mm_traced_memories_number_unknown(&a->memories);
    mm_sums_table_set_part(&a->sums, part);
    if (part != a->replayed_part) {
        mm_page_replay_begin_part(&a->replay);
        a->replayed_part = part;
    }
    for (size_t i = 0; i < batch->count; i++) {
        mm_event event = *event_at(a, batch, i);
        if (mm_host_views_made(&open, &event)) {
            event.cause = MM_CAUSE_HOST_VIEW;
        }
        if (batch->memories[i] == DIVIDED) {
            add_divided(a, &event, pieces);
        } else {
            add_piece(a, &event, batch->memories[i], pieces);
        }
    }
    a->ambiguous += batch->ambiguous;
}

int
mm_attribution_add(mm_attribution *a, uint32_t part, const mm_event *events, size_t count,
                   mm_event_list *pieces, mm_status *st)
{
    event_batch batch = {.events = events, .count = count};
    int rc = -1;

    if (count == 0) {
        return 0;
    }
    if (locate_events(a, &batch, st) == 0 && reserve_sums(a, &batch, pieces, st) == 0) {
        add_located(a, part, &batch, pieces);
        rc = 0;
    }
    free_batch(&batch);
    return rc;
}

/* --- merging ------------------------------------------------------------------------------- */

static int
compare_memories(const mm_traced_memory *a, const mm_traced_memory *b)
{
    const uint64_t left[] = {a->kind, a->start, a->size, a->serial, a->label != NULL};
    const uint64_t right[] = {b->kind, b->start, b->size, b->serial, b->label != NULL};

    for (size_t i = 0; i < sizeof left / sizeof *left; i++) {
        /* The label of an allocation may have changed. */
        bool counts = i < 4 || a->kind == MM_MEMORY_NAMED;
        if (counts && left[i] != right[i]) {
            return left[i] < right[i] ? -1 : 1;
        }
    }
    return a->kind == MM_MEMORY_NAMED && a->label != NULL ? strcmp(a->label, b->label) : 0;
}

static int
compare_memory_pointers(const void *a, const void *b)
{
    return compare_memories(*(const mm_traced_memory *const *)a,
                            *(const mm_traced_memory *const *)b);
}

/* Pointers to the memories, in an order in which they can be searched; NULL on failure. */
static const mm_traced_memory **
sorted_memories(const mm_traced_memories *memories, mm_status *st)
{
    const mm_traced_memory **sorted = calloc(memories->count + 1, sizeof *sorted);

    if (sorted == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu memories of a trace",
                      memories->count);
        return NULL;
    }
    for (size_t i = 0; i < memories->count; i++) {
        sorted[i] = &memories->items[i];
    }
    qsort((void *)sorted, memories->count, sizeof *sorted, compare_memory_pointers);
    return sorted;
}

/* The foreign memory that contains this unknown one, or MM_NO_MEMORY_INDEX. */
static uint32_t
foreign_around(const mm_traced_memories *memories, const mm_traced_memory *unknown)
{
    uint64_t end = unknown->start + unknown->size, limit = end;
    const mm_address_range *range =
        mm_address_map_find(&memories->foreign, unknown->start, &limit);

    return range != NULL && limit == end ? range->index : MM_NO_MEMORY_INDEX;
}

/* Adds a memory that is missing, and stores its index: DIVIDED for unknown memory, which gets its
 * index later. */
static int
add_missing(mm_traced_memories *memories, const mm_traced_memory *missing, uint32_t *index,
            mm_status *st)
{
    uint64_t end = missing->start + missing->size, limit = end;

    *index = (uint32_t)memories->count;
    if (missing->kind == MM_MEMORY_UNKNOWN) {
        *index = foreign_around(memories, missing);
        if (*index != MM_NO_MEMORY_INDEX) {
            return 0;
        }
        *index = DIVIDED;
        return mm_traced_memories_add_unknown(memories, missing->start, end, st);
    }
    if (missing->kind == MM_MEMORY_FOREIGN
        && mm_address_map_find(&memories->foreign, missing->start, &limit) == NULL
        && limit == end) {
        return mm_traced_memories_add_foreign(memories, missing->start, missing->size, st);
    }
    return mm_traced_memories_append(memories, missing, st);
}

/* Stores for each memory of `other` its index in `a`, which has room for missing memories. */
static int
map_memories(mm_attribution *a, const mm_attribution *other, const mm_traced_memory **sorted,
             uint32_t *indices, mm_status *st)
{
    size_t known = a->memories.count;

    for (size_t i = 0; i < other->memories.count; i++) {
        const mm_traced_memory *memory = &other->memories.items[i], **found;
        found = bsearch(&memory, sorted, known, sizeof *sorted, compare_memory_pointers);
        if (found != NULL && memory->kind != MM_MEMORY_UNKNOWN) {
            indices[i] = (uint32_t)(*found - a->memories.items);
        } else if (add_missing(&a->memories, memory, &indices[i], st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* map_memories into a new array; NULL on failure. */
static uint32_t *
map_of_memories(mm_attribution *a, const mm_attribution *other, mm_status *st)
{
    size_t count = other->memories.count;
    const mm_traced_memory **sorted;
    uint32_t *indices;
    int rc = -1;

    if (mm_traced_memories_reserve(&a->memories, a->memories.count + count, st) < 0) {
        return NULL;
    }
    sorted = sorted_memories(&a->memories, st);
    if (sorted == NULL) {
        return NULL;
    }
    indices = calloc(count + 1, sizeof *indices);
    if (indices != NULL) {
        rc = map_memories(a, other, sorted, indices, st);
    } else {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu memories of a trace", count);
    }
    free((void *)sorted);
    if (rc < 0) {
        free(indices);
        return NULL;
    }
    return indices;
}

static void
merge_rows(mm_attribution *a, const mm_attribution *other, const uint32_t *indices)
{
    mm_traced_memories_number_unknown(&a->memories);
    for (size_t i = 0; i < other->sums.count; i++) {
        const mm_sums_row *row = &other->sums.rows[i];
        uint32_t memory = MM_NO_MEMORY_INDEX;
        if (row->memory != MM_NO_MEMORY_INDEX) {
            memory = indices[row->memory];
        }
        if (memory == DIVIDED) {
            uint64_t limit = UINT64_MAX;
            memory = mm_address_map_find(&a->memories.unknown,
                                         other->memories.items[row->memory].start, &limit)
                         ->index;
        }
        mm_sums_table_set_part(&a->sums, row->part);
        mm_sums_merge(&a->sums.rows[mm_sums_table_row(&a->sums, memory)].sums, &row->sums);
    }
    a->ambiguous += other->ambiguous;
}

int
mm_attribution_merge(mm_attribution *a, const mm_attribution *other, mm_status *st)
{
    size_t known = a->memories.count, unknown;
    uint32_t *indices = map_of_memories(a, other, st);

    if (indices != NULL && mm_traced_memories_reserve_unknown(&a->memories, &unknown, st) == 0
        && mm_sums_table_reserve(&a->sums, other->sums.count, a->memories.count + unknown, st)
               == 0) {
        merge_rows(a, other, indices);
        free(indices);
        return 0;
    }
    free(indices);
    mm_traced_memories_remove_foreign(&a->memories, known);
    return -1;
}
