/* memory_index.c: the search tree over lives, and its present time. */
#include "memory_index.h"

#include "../memory/event.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void
mm_memory_index_free(mm_memory_index *index)
{
    free(index->lives);
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
compare_life_starts(const void *a, const void *b)
{
    const mm_indexed_life *left = a, *right = b;

    return (left->start > right->start) - (left->start < right->start);
}

static int
compare_borders(const void *a, const void *b)
{
    const mm_life_border *left = a, *right = b;

    return (left->time > right->time) - (left->time < right->time);
}

static int
allocate_index(mm_memory_index *index, size_t count, mm_status *st)
{
    index->leaves = 1;
    while (index->leaves <= count) {
        index->leaves *= 2; /* more leaves than lives: the last one is never used */
    }
    if (count < UINT32_MAX) {
        index->lives = calloc(count, sizeof *index->lives);
        index->starts = calloc(count, sizeof *index->starts);
        index->ends = calloc(2 * index->leaves, sizeof *index->ends);
        index->births = calloc(count, sizeof *index->births);
        index->deaths = calloc(count, sizeof *index->deaths);
        index->reach = calloc(count + 1, sizeof *index->reach);
        index->first = calloc(index->leaves + 1, sizeof *index->first);
    }
    if (index->lives == NULL || index->starts == NULL || index->ends == NULL
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
mm_memory_index_build(mm_memory_index *index, const mm_indexed_life *lives, size_t count,
                      mm_status *st)
{
    assert(index->count == 0 && index->lives == NULL);
    if (count == 0) {
        return 0;
    }
    if (allocate_index(index, count, st) < 0) {
        return -1;
    }
    memcpy(index->lives, lives, count * sizeof *lives);
    qsort(index->lives, count, sizeof *index->lives, compare_life_starts);
    for (size_t i = 0; i < count; i++) {
        mm_indexed_life *life = &index->lives[i];
        uint64_t born = life->born, died = life->died > born ? life->died : born;
        index->starts[i] = life->start;
        index->births[i].time = born > MM_LIFE_MARGIN ? born - MM_LIFE_MARGIN : 0;
        index->deaths[i].time =
            died < UINT64_MAX - MM_LIFE_MARGIN ? died + MM_LIFE_MARGIN : UINT64_MAX;
        index->births[i].rank = index->deaths[i].rank = (uint32_t)i;
        index->reach[i + 1] = life->end > index->reach[i] ? life->end : index->reach[i];
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

/* On the way forwards births come before deaths, on the way back deaths before births, so that a
 * life of no length is there at no other time. */
static void
move_time(mm_memory_index *index, uint64_t time)
{
    const mm_life_border *births = index->births, *deaths = index->deaths;

    while (index->born < index->count && births[index->born].time <= time) {
        uint32_t rank = births[index->born++].rank;
        set_end(index, rank, index->lives[rank].end);
    }
    while (index->dead < index->count && deaths[index->dead].time < time) {
        set_end(index, deaths[index->dead++].rank, 0);
    }
    while (index->dead > 0 && deaths[index->dead - 1].time >= time) {
        uint32_t rank = deaths[--index->dead].rank;
        set_end(index, rank, index->lives[rank].end);
    }
    while (index->born > 0 && births[index->born - 1].time > time) {
        set_end(index, births[--index->born].rank, 0);
    }
}

/* --- queries ------------------------------------------------------------------------------- */

/* The lives found so far that have an address at a time. */
typedef struct {
    uint64_t address, time;
    const mm_indexed_life *latest; /* of those that have it without the margin, if any do */
    size_t count, exact;
    uint64_t end; /* the lowest */
} life_choice;

static void
consider_life(life_choice *choice, const mm_indexed_life *life)
{
    bool exact = life->born <= choice->time && choice->time <= life->died;

    choice->end = life->end < choice->end ? life->end : choice->end;
    if (exact && choice->exact == 0) {
        choice->latest = NULL; /* better than all before */
    }
    choice->count++;
    choice->exact += exact;
    if (exact == (choice->exact > 0)
        && (choice->latest == NULL || life->serial > choice->latest->serial)) {
        choice->latest = life;
    }
}

static void
consider_below(const mm_memory_index *index, size_t node, life_choice *choice)
{
    if (index->ends[node] <= choice->address) {
        return;
    }
    if (node >= index->leaves) {
        consider_life(choice, &index->lives[node - index->leaves]);
        return;
    }
    consider_below(index, 2 * node, choice);
    consider_below(index, 2 * node + 1, choice);
}

/* The number of lives that start at the address or below it. */
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

/* The start of the first life that exists, from this rank on; UINT64_MAX if there is none. */
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

/* Considers the lives before this rank that exist. */
static void
consider_before(const mm_memory_index *index, size_t rank, life_choice *choice)
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
            consider_life(choice, &index->lives[rank]);
        }
    }
}

uint32_t
mm_memory_index_find(mm_memory_index *index, uint64_t address, uint64_t time, uint64_t *limit,
                     bool *ambiguous)
{
    life_choice choice = {.address = address, .time = time, .end = *limit};
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
        if (index->lives[--rank].died == UINT64_MAX) {
            return true;
        }
    }
    return false;
}
