/* sums.c: the table of sums, and the sums that each kind of event counts in. */
#include "sums.h"

#include "../memory/growth.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(mm_sums) == (MM_MOVE_DIRECTIONS * MM_CAUSES + 12) * sizeof(uint64_t),
               "mm_sums_merge takes all fields for words");

void
mm_sums_table_free(mm_sums_table *table)
{
    free(table->rows);
    free(table->busy);
    free(table->row_of);
    *table = (mm_sums_table){0};
}

int
mm_sums_table_reserve(mm_sums_table *table, size_t rows, size_t memories, mm_status *st)
{
    size_t needed = table->count + rows, known = table->memories;

    table->rows = mm_grow(table->rows, &table->capacity, needed, sizeof *table->rows, st);
    if (table->capacity < needed) {
        return -1;
    }
    table->busy = mm_grow(table->busy, &table->busy_capacity, needed, sizeof *table->busy, st);
    if (table->busy_capacity < needed) {
        return -1;
    }
    table->row_of = mm_grow(table->row_of, &table->memories, memories, sizeof *table->row_of, st);
    if (table->memories < memories) {
        return -1;
    }
    if (table->memories > known) {
        memset(table->row_of + known, 0, (table->memories - known) * sizeof *table->row_of);
    }
    return 0;
}

static uint32_t *
row_guess(mm_sums_table *table, uint32_t memory)
{
    assert(memory == MM_NO_MEMORY_INDEX || memory < table->memories);
    return memory == MM_NO_MEMORY_INDEX ? &table->total : &table->row_of[memory];
}

void
mm_sums_table_set_part(mm_sums_table *table, uint32_t part)
{
    if (part == table->part) {
        return;
    }
    table->part = part;
    if (part > table->highest_part) { /* as usual: it has no rows */
        table->highest_part = part;
        return;
    }
    for (size_t i = 0; i < table->count; i++) {
        if (table->rows[i].part == part) {
            *row_guess(table, table->rows[i].memory) = (uint32_t)i;
        }
    }
}

size_t
mm_sums_table_row(mm_sums_table *table, uint32_t memory)
{
    uint32_t *guess = row_guess(table, memory);

    if (*guess < table->count && table->rows[*guess].part == table->part
        && table->rows[*guess].memory == memory) {
        return *guess;
    }
    assert(table->count < table->capacity && table->count < table->busy_capacity);
    table->rows[table->count] = (mm_sums_row){.part = table->part, .memory = memory};
    table->busy[table->count] = (mm_busy_time){0};
    *guess = (uint32_t)table->count;
    return table->count++;
}

/* Adds the part of the interval that is not in the row yet, and returns its length. */
static uint64_t
add_busy_time(mm_busy_time *busy, uint64_t start, uint64_t end)
{
    uint64_t added = 0;

    if (start > busy->end) {
        *busy = (mm_busy_time){busy->end, start, end};
        return end - start;
    }
    start = start > busy->before ? start : busy->before;
    if (end <= busy->start) { /* late, and all before the last interval */
        added = end > start ? end - start : 0;
        busy->before = end > busy->before ? end : busy->before;
        return added;
    }
    if (start < busy->start) {
        added += busy->start - start;
        busy->start = start;
    }
    if (end > busy->end) {
        added += end - busy->end;
        busy->end = end;
    }
    return added;
}

static void
add_move(mm_sums *sums, mm_busy_time *busy, const mm_event *event, mm_turned turned)
{
    size_t direction = event->destination == MM_ON_HOST ? MM_TO_HOST
                       : event->source == MM_ON_HOST    ? MM_TO_DEVICE
                                                        : MM_BETWEEN_DEVICES;
    size_t cause = event->cause < MM_CAUSES ? event->cause : MM_CAUSE_UNKNOWN;

    sums->moved[direction][cause] += event->amount;
    sums->turned_back += turned.within;
    sums->turned_across += turned.across;
    if (event->end > event->start) {
        sums->move_time += add_busy_time(busy, event->start, event->end);
    }
}

static void
add_fault(uint64_t *faults, uint64_t *writes, const mm_event *event)
{
    *faults += event->amount;
    *writes += event->access >= MM_WRITE_ACCESS ? event->amount : 0; /* atomic ones too */
}

static void
add_event(mm_sums *sums, mm_busy_time *busy, const mm_event *event, mm_turned turned)
{
    switch ((mm_event_kind)event->kind) {
    case MM_MOVE:
        add_move(sums, busy, event, turned);
        break;
    case MM_HOST_FAULT:
        add_fault(&sums->host_faults, &sums->host_write_faults, event);
        break;
    case MM_DEVICE_FAULT:
        add_fault(&sums->device_faults, &sums->device_write_faults, event);
        break;
    case MM_REMOTE_MAP:
        sums->remote_mapped += event->amount;
        break;
    case MM_THRASHING:
        sums->thrashing += event->amount;
        break;
    case MM_THROTTLING:
        sums->throttled += event->end > event->start ? event->end - event->start : 0;
        break;
    case MM_DUPLICATE:
        sums->duplicated += event->amount;
        break;
    case MM_EVICTION:
        sums->evicted += event->amount;
        break;
    case MM_DUPLICATE_END:
    case MM_CALL:
    case MM_EVENT_KINDS:
        break;
    }
}

void
mm_sums_table_add(mm_sums_table *table, uint32_t memory, const mm_event *event, mm_turned turned)
{
    size_t own = mm_sums_table_row(table, memory);
    size_t total = mm_sums_table_row(table, MM_NO_MEMORY_INDEX);

    add_event(&table->rows[own].sums, &table->busy[own], event, turned);
    add_event(&table->rows[total].sums, &table->busy[total], event, turned);
}

void
mm_sums_merge(mm_sums *sums, const mm_sums *other)
{
    uint64_t *words = (uint64_t *)sums;
    const uint64_t *added = (const uint64_t *)other;

    for (size_t i = 0; i < sizeof *sums / sizeof *words; i++) {
        words[i] += added[i];
    }
}
