/* sums.h: the sums of events, for each memory and part of a trace. */
#ifndef MM_SUMS_H
#define MM_SUMS_H

#include "../driver/status.h"
#include "../memory/event.h"
#include "page_replay.h"

#include <stdbool.h>
#include <stddef.h>

/* Indices of mm_sums.moved. */
enum { MM_TO_DEVICE, MM_TO_HOST, MM_BETWEEN_DEVICES, MM_MOVE_DIRECTIONS };

/* All members are uint64_t, in the order of FIELDS in _trace_results.py. Remote maps, thrashing,
 * duplicates and evictions are counted in bytes. */
typedef struct {
    uint64_t moved[MM_MOVE_DIRECTIONS][MM_CAUSES]; /* bytes */
    uint64_t host_faults, host_write_faults, device_faults, device_write_faults;
    uint64_t remote_mapped, thrashing;
    uint64_t throttled; /* ns */
    uint64_t duplicated, evicted;
    uint64_t move_time; /* ns in which something moved */
    uint64_t turned_back; /* bytes that moved against the last move of their page in this part */
    uint64_t turned_across; /* or in an earlier part, if they did not move in this one */
} mm_sums;

typedef struct {
    uint32_t part, memory; /* memory MM_NO_MEMORY_INDEX: the total of the part */
    mm_sums sums;
} mm_sums_row;

/* The time of the last moves of a row: one interval, and the end of the intervals before it. */
typedef struct {
    uint64_t before, start, end;
} mm_busy_time;

/* The rows of all parts. All zero is an empty table. */
typedef struct {
    mm_sums_row *rows;
    mm_busy_time *busy; /* of each row */
    size_t count, capacity, busy_capacity;
    uint32_t *row_of; /* of a memory in the present part; a guess, to be checked */
    size_t memories; /* entries of row_of */
    uint32_t total; /* the row of the present part's total, a guess */
    uint32_t part, highest_part;
} mm_sums_table;

void mm_sums_table_free(mm_sums_table *table);

/* Makes room for `rows` more rows, and for memories with indices below `memories`. */
MM_NODISCARD int mm_sums_table_reserve(mm_sums_table *table, size_t rows, size_t memories,
                                       mm_status *st);

/* Selects the present part, whose rows mm_sums_table_row returns. */
void mm_sums_table_set_part(mm_sums_table *table, uint32_t part);

/* The index of the memory's row in the present part; the total is the row of MM_NO_MEMORY_INDEX.
 * Adds a missing row, for which there must be room. */
size_t mm_sums_table_row(mm_sums_table *table, uint32_t memory);

/* Loads the memory's row into the cache ahead of its use, if it is known. */
static inline void
mm_sums_table_expect(const mm_sums_table *table, uint32_t memory)
{
    if (memory < table->memories && table->count > 0) {
        __builtin_prefetch(&table->rows[table->row_of[memory]]);
        __builtin_prefetch(&table->rows[table->row_of[memory]].sums.move_time);
        __builtin_prefetch(&table->busy[table->row_of[memory]]);
    }
}

/* True if the event has bytes that can be divided among memories. */
static inline bool
mm_event_is_divisible(const mm_event *event)
{
    const unsigned kinds = 1u << MM_MOVE | 1u << MM_REMOTE_MAP | 1u << MM_THRASHING
                           | 1u << MM_DUPLICATE | 1u << MM_DUPLICATE_END | 1u << MM_EVICTION
                           | 1u << MM_CALL;

    return event->kind < MM_EVENT_KINDS && (kinds >> event->kind & 1) != 0;
}

/* True if the event counts in a sum. */
static inline bool
mm_event_is_counted(const mm_event *event)
{
    return event->kind < MM_EVENT_KINDS && event->kind != MM_CALL
           && event->kind != MM_DUPLICATE_END;
}

/* Adds an event to its memory and to the total of the present part; there must be room for both
 * rows. Add moves in the order of their starts: of a late move, the time before
 * mm_busy_time.before does not count. */
void mm_sums_table_add(mm_sums_table *table, uint32_t memory, const mm_event *event,
                       mm_turned turned);

/* Adds the sums of other events. */
void mm_sums_merge(mm_sums *sums, const mm_sums *other);

#endif
