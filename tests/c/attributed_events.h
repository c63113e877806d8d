/* attributed_events.h: events, records and foreign allocations as the tests of attribution write
 * them, and the sums and pieces that they read. */
#ifndef ATTRIBUTED_EVENTS_H
#define ATTRIBUTED_EVENTS_H

#include <string.h>

#include "check.h"
#include "trace/attribution.h"

enum { KIB = 1 << 10, MIB = 1 << 20, PAGE = 4096, BLOCK = 2 * MIB, MARGIN = MM_TIME_MARGIN };
#define BASE ((uint64_t)0x7f0000000000)
#define ALWAYS UINT64_MAX
#define TOTAL MM_NO_MEMORY_INDEX

/* --- short ways to write events ------------------------------------------------------------- */

static inline mm_event
event_of(mm_event_kind kind, uint64_t start, uint64_t address, uint64_t amount)
{
    return (mm_event){.start = start,
                      .end = start,
                      .address = address,
                      .amount = amount,
                      .memory = MM_NO_MEMORY_INDEX,
                      .source = MM_NO_PROCESSOR,
                      .destination = MM_NO_PROCESSOR,
                      .kind = (uint8_t)kind};
}

static inline mm_event
move_of(uint64_t start, uint64_t end, uint64_t address, uint64_t amount, int source,
        int destination)
{
    mm_event e = event_of(MM_MOVE, start, address, amount);

    e.end = end;
    e.source = (int16_t)source;
    e.destination = (int16_t)destination;
    e.cause = MM_CAUSE_FAULT;
    return e;
}

static inline mm_event
up(uint64_t start, uint64_t address, uint64_t amount)
{
    return move_of(start, start + 10, address, amount, MM_ON_HOST, 0);
}

static inline mm_event
down(uint64_t start, uint64_t address, uint64_t amount)
{
    return move_of(start, start + 10, address, amount, 0, MM_ON_HOST);
}

static inline mm_allocation_record
record_of(uint64_t start, size_t size, uint64_t born, uint64_t died, uint64_t serial)
{
    static char label[] = "uint8[1] #1";

    return (mm_allocation_record){start, size, born, died, serial, false, label};
}

static inline mm_attribution *
attribution_of(const mm_allocation_record *records, size_t count)
{
    mm_status st;
    mm_attribution *a = mm_attribution_new(&st);

    CHECK(a != NULL);
    CHECK_OK(mm_attribution_set_memories(a, records, count, NULL, 0, &st), &st);
    return a;
}

static inline void
add(mm_attribution *a, uint32_t part, const mm_event *events, size_t count, mm_event_list *pieces)
{
    mm_status st;

    CHECK_OK(mm_attribution_add(a, part, events, count, pieces, &st), &st);
}

static inline const mm_traced_memory *
memory_at(const mm_attribution *a, size_t index)
{
    const mm_traced_memory *memories;
    size_t count = mm_attribution_memories(a, &memories);

    CHECK(index < count);
    return &memories[index];
}

static inline size_t
memory_count(const mm_attribution *a)
{
    const mm_traced_memory *memories;

    return mm_attribution_memories(a, &memories);
}

/* Zeros if there is no row. Each row exists once. */
static inline mm_sums
sums_of(const mm_attribution *a, uint32_t part, uint32_t memory)
{
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(a, &rows), found = 0;
    mm_sums sums = {0};

    for (size_t i = 0; i < count; i++) {
        if (rows[i].part == part && rows[i].memory == memory) {
            sums = rows[i].sums;
            found++;
        }
    }
    CHECK(found <= 1);
    return sums;
}

static inline uint64_t
moved_by(const mm_sums *sums)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < MM_MOVE_DIRECTIONS * MM_CAUSES; i++) {
        bytes += sums->moved[i / MM_CAUSES][i % MM_CAUSES];
    }
    return bytes;
}

static inline uint64_t
turned_back(const mm_attribution *a, uint32_t part, uint32_t memory)
{
    return sums_of(a, part, memory).turned_back;
}

static inline uint64_t
turned_across(const mm_attribution *a, uint32_t part, uint32_t memory)
{
    return sums_of(a, part, memory).turned_across;
}

static inline void
check_piece(const mm_event_list *pieces, size_t i, uint32_t memory, uint64_t address,
            uint64_t amount)
{
    CHECK(i < pieces->count);
    CHECK_EQUAL(pieces->items[i].memory, memory);
    CHECK_EQUAL(pieces->items[i].address, address);
    CHECK_EQUAL(pieces->items[i].amount, amount);
}

/* In each part the fields of the memories add up to the total, but for those of time. */
static inline void
check_invariant(const mm_attribution *a)
{
    enum { FIELDS = sizeof(mm_sums) / sizeof(uint64_t) };
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(a, &rows), totals = 0;

    for (size_t i = 0; i < count; i++) {
        uint64_t left[FIELDS], word;
        if (rows[i].memory != TOTAL) {
            continue;
        }
        totals++;
        memcpy(left, &rows[i].sums, sizeof left);
        for (size_t k = 0; k < count; k++) {
            for (size_t f = 0; f < FIELDS; f++) {
                memcpy(&word, (const char *)&rows[k].sums + f * sizeof word, sizeof word);
                left[f] -= rows[k].part == rows[i].part && k != i ? word : 0;
            }
        }
        for (size_t f = 0; f < FIELDS; f++) {
            CHECK(left[f] == 0 || f == offsetof(mm_sums, move_time) / sizeof word);
        }
    }
    CHECK(totals > 0 || count == 0);
}

/* --- foreign memory ------------------------------------------------------------------------- */

typedef struct {
    struct {
        uint64_t start;
        size_t size;
    } items[700];
    size_t count, asked;
} allocations;

static inline bool
find_allocation(void *context, CUdeviceptr address, CUdeviceptr *start, size_t *size)
{
    allocations *known = context;

    known->asked++;
    for (size_t i = 0; i < known->count; i++) {
        if (address >= known->items[i].start
            && address - known->items[i].start < known->items[i].size) {
            *start = known->items[i].start;
            *size = known->items[i].size;
            return true;
        }
    }
    return false;
}

static inline void
find_foreign(mm_attribution *a, const mm_event *events, size_t count, allocations *known)
{
    mm_status st;

    CHECK_OK(mm_attribution_find_foreign(a, events, count, find_allocation, known, &st), &st);
}

#endif
