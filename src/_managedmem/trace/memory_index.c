/* memory_index.c: the search tree over allocations, and its present time. */
#include "memory_index.h"

#include "../memory/event.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void
mm_memory_index_free(mm_memory_index *index)
{
    free(index->allocations);
    free(index->starts);
    free(index->reach);
    free(index->ends);
    free(index->births);
    free(index->deaths);
    free(index->first);
    *index = (mm_memory_index){0};
}

/* --- building ------------------------------------------------------------------------------ */

static int
compare_allocation_starts(const void *a, const void *b)
{
    const mm_indexed_allocation *left = a, *right = b;

    return (left->start > right->start) - (left->start < right->start);
}

static int
compare_borders(const void *a, const void *b)
{
    const mm_time_border *left = a, *right = b;

    return (left->time > right->time) - (left->time < right->time);
}

static int
allocate_index(mm_memory_index *index, size_t count, mm_status *st)
{
    index->leaves = 1;
    while (index->leaves <= count) {
        index->leaves *= 2; /* more leaves than allocations: the last one is never used */
    }
    if (count < UINT32_MAX) {
        index->allocations = calloc(count, sizeof *index->allocations);
        index->starts = calloc(count, sizeof *index->starts);
        index->ends = calloc(2 * index->leaves, sizeof *index->ends);
        index->births = calloc(count, sizeof *index->births);
        index->deaths = calloc(count, sizeof *index->deaths);
        index->reach = calloc(count + 1, sizeof *index->reach);
        index->first = calloc(index->leaves + 1, sizeof *index->first);
    }
    if (index->allocations == NULL || index->starts == NULL || index->ends == NULL
        || index->births == NULL || index->deaths == NULL || index->reach == NULL
        || index->first == NULL) {
        mm_memory_index_free(index);
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for an index of %zu memories", count);
        return -1;
    }
    index->count = count;
    return 0;
}

/* The bucket of an address that is not below the first start. */
static size_t
bucket_of(const mm_memory_index *index, uint64_t address)
{
    return (size_t)((address - index->starts[0]) >> index->bucket_bits);
}

static void
fill_buckets(mm_memory_index *index)
{
    size_t rank = 0;

    while (bucket_of(index, index->starts[index->count - 1]) >= index->leaves) {
        index->bucket_bits++;
    }
    for (size_t bucket = 0; bucket < index->leaves; bucket++) {
        index->first[bucket] = (uint32_t)rank;
        while (rank < index->count && bucket_of(index, index->starts[rank]) == bucket) {
            rank++;
        }
    }
    index->first[index->leaves] = (uint32_t)index->count;
}

int
mm_memory_index_build(mm_memory_index *index, const mm_indexed_allocation *allocations,
                      size_t count, mm_status *st)
{
    assert(index->count == 0 && index->allocations == NULL);
    if (count == 0) {
        return 0;
    }
    if (allocate_index(index, count, st) < 0) {
        return -1;
    }
    memcpy(index->allocations, allocations, count * sizeof *allocations);
    qsort(index->allocations, count, sizeof *index->allocations, compare_allocation_starts);
    for (size_t i = 0; i < count; i++) {
        mm_indexed_allocation *allocation = &index->allocations[i];
        uint64_t born = allocation->born, died = allocation->died > born ? allocation->died : born;
        index->starts[i] = allocation->start;
        index->births[i].time = born > MM_TIME_MARGIN ? born - MM_TIME_MARGIN : 0;
        index->deaths[i].time =
            died < UINT64_MAX - MM_TIME_MARGIN ? died + MM_TIME_MARGIN : UINT64_MAX;
        index->births[i].rank = index->deaths[i].rank = (uint32_t)i;
        index->reach[i + 1] =
            allocation->end > index->reach[i] ? allocation->end : index->reach[i];
    }
    fill_buckets(index);
    qsort(index->births, count, sizeof *index->births, compare_borders);
    qsort(index->deaths, count, sizeof *index->deaths, compare_borders);
    return 0;
}

/* --- the present time ---------------------------------------------------------------------- */

static void
set_end(mm_memory_index *index, size_t rank, uint64_t end)
{
    size_t node = index->leaves + rank;

    index->ends[node] = end;
    while (node > 1) {
        uint64_t other = index->ends[node ^ 1];
        uint64_t higher = end > other ? end : other;
        node /= 2;
        if (index->ends[node] == higher) {
            return;
        }
        index->ends[node] = end = higher;
    }
}

/* Forwards, births are applied before deaths; backwards, deaths are undone before births. So an
 * allocation whose whole life lies between the two times is absent at the end. */
static void
move_time(mm_memory_index *index, uint64_t time)
{
    const mm_time_border *births = index->births, *deaths = index->deaths;

    while (index->born < index->count && births[index->born].time <= time) {
        uint32_t rank = births[index->born++].rank;
        set_end(index, rank, index->allocations[rank].end);
    }
    while (index->dead < index->count && deaths[index->dead].time < time) {
        set_end(index, deaths[index->dead++].rank, 0);
    }
    while (index->dead > 0 && deaths[index->dead - 1].time >= time) {
        uint32_t rank = deaths[--index->dead].rank;
        set_end(index, rank, index->allocations[rank].end);
    }
    while (index->born > 0 && births[index->born - 1].time > time) {
        set_end(index, births[--index->born].rank, 0);
    }
}

/* --- queries ------------------------------------------------------------------------------- */

/* The allocations found so far that have an address at a time. */
typedef struct {
    uint64_t address, time;
    const mm_indexed_allocation *latest; /* of those that have it without the margin, if any do */
    size_t count, exact;
    uint64_t end; /* the lowest */
} allocation_choice;

static void
consider_allocation(allocation_choice *choice, const mm_indexed_allocation *allocation)
{
    bool exact = allocation->born <= choice->time && choice->time <= allocation->died;

    choice->end = allocation->end < choice->end ? allocation->end : choice->end;
    if (exact && choice->exact == 0) {
        choice->latest = NULL; /* better than all before */
    }
    choice->count++;
    choice->exact += exact;
    if (exact == (choice->exact > 0)
        && (choice->latest == NULL || allocation->serial > choice->latest->serial)) {
        choice->latest = allocation;
    }
}

static void
consider_below(const mm_memory_index *index, size_t node, allocation_choice *choice)
{
    if (index->ends[node] <= choice->address) {
        return;
    }
    if (node >= index->leaves) {
        consider_allocation(choice, &index->allocations[node - index->leaves]);
        return;
    }
    consider_below(index, 2 * node, choice);
    consider_below(index, 2 * node + 1, choice);
}

/* The number of allocations that start at the address or below it. */
static size_t
starts_up_to(const mm_memory_index *index, uint64_t address)
{
    size_t bucket, low, high;

    if (address < index->starts[0]) {
        return 0;
    }
    bucket = bucket_of(index, address);
    if (bucket >= index->leaves) {
        return index->count;
    }
    low = index->first[bucket];
    high = index->first[bucket + 1];
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (index->starts[middle] <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The start of the first allocation that exists, from this rank on; UINT64_MAX if there is none. */
static uint64_t
next_start(const mm_memory_index *index, size_t rank)
{
    size_t node = index->leaves + rank;

    if (index->ends[node] == 0) {
        while (node > 1 && (node % 2 == 1 || index->ends[node + 1] == 0)) {
            node /= 2;
        }
        if (node == 1) {
            return UINT64_MAX;
        }
        node++;
        while (node < index->leaves) {
            node = index->ends[2 * node] != 0 ? 2 * node : 2 * node + 1;
        }
    }
    return index->starts[node - index->leaves];
}

/* Considers the allocations before this rank that exist. */
static void
consider_before(const mm_memory_index *index, size_t rank, allocation_choice *choice)
{
    enum { NEAR = 8 };

    for (size_t steps = 0; index->reach[rank] > choice->address; steps++) {
        if (steps == NEAR) {
            /* The subtrees that make up the leaves before the rank. */
            for (size_t node = index->leaves + rank; node > 1; node /= 2) {
                if (node % 2 == 1) {
                    consider_below(index, node - 1, choice);
                }
            }
            return;
        }
        rank--;
        if (index->ends[index->leaves + rank] > choice->address) {
            consider_allocation(choice, &index->allocations[rank]);
        }
    }
}

uint32_t
mm_memory_index_find(mm_memory_index *index, uint64_t address, uint64_t time, uint64_t *limit,
                     bool *ambiguous)
{
    allocation_choice choice = {.address = address, .time = time, .end = *limit};
    size_t rank;

    assert(*limit > address);
    if (index->count == 0) {
        return MM_NO_MEMORY_INDEX;
    }
    move_time(index, time);
    rank = starts_up_to(index, address);
    consider_before(index, rank, &choice);
    *limit = choice.end;
    if (rank < index->count && index->starts[rank] < *limit) {
        uint64_t start = next_start(index, rank);
        *limit = start < *limit ? start : *limit;
    }
    if (choice.count > 1 && choice.exact == 0) {
        *ambiguous = true;
    }
    return choice.latest != NULL ? choice.latest->memory : MM_NO_MEMORY_INDEX;
}

bool
mm_memory_index_has_living(const mm_memory_index *index, uint64_t start)
{
    size_t rank = index->count > 0 ? starts_up_to(index, start) : 0;

    while (rank > 0 && index->starts[rank - 1] == start) {
        if (index->allocations[--rank].died == UINT64_MAX) {
            return true;
        }
    }
    return false;
}
