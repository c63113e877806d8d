/* attribution.c: times dividing the events of a trace among memories, and the memory that it
 * takes. attribution.py builds it with the sources of the extension, with malloc and its like
 * replaced.
 *
 * Usage: attribution EVENTS MEMORIES ROUNDS. Prints a line of numbers for each round:
 * milliseconds to index the memories, milliseconds for the sums alone and with the pieces, the
 * most bytes that were allocated for both (without the pieces), and the bytes that moved
 * according to the sums and to the program. */
#include "trace/attribution.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MIB = 1 << 20, BLOCK = 2 * MIB };

/* --- counting what the extension allocates -------------------------------------------------- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *old);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void __wrap_free(void *old);

static size_t allocated, most_allocated;

static void *
count_allocated(void *made)
{
    allocated += malloc_usable_size(made);
    most_allocated = allocated > most_allocated ? allocated : most_allocated;
    return made;
}

void *
__wrap_malloc(size_t size)
{
    return count_allocated(__real_malloc(size));
}

void *
__wrap_calloc(size_t count, size_t size)
{
    return count_allocated(__real_calloc(count, size));
}

void *
__wrap_realloc(void *old, size_t size)
{
    allocated -= malloc_usable_size(old);
    return count_allocated(__real_realloc(old, size));
}

void
__wrap_free(void *old)
{
    allocated -= malloc_usable_size(old);
    __real_free(old);
}

/* --- a trace -------------------------------------------------------------------------------- */

static uint64_t state;

/* xorshift64*, below the limit. */
static uint64_t
next_random(uint64_t limit)
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return ((state * 0x2545f4914f6cdd1dU) >> 11) % limit;
}

/* Every second memory is followed by another one at its address. */
static void
make_allocations(mm_allocation_record *allocations, size_t count, uint64_t end)
{
    CUdeviceptr at = (CUdeviceptr)0x7f0000000000;

    for (size_t i = 0; i < count; i++) {
        bool follows = i % 4 == 3;
        allocations[i] = (mm_allocation_record){
            .start = follows ? allocations[i - 1].start : at,
            .size = follows ? allocations[i - 1].size : (1 + next_random(64)) * 65536,
            .born = follows ? end / 2 + 1 : 0,
            .died = i % 4 == 2 ? end / 2 : UINT64_MAX,
            .serial = i + 1,
            .label = "float32[1024,1024] #7",
        };
        at += follows ? 0 : (allocations[i].size + BLOCK - 1) / BLOCK * BLOCK;
    }
}

/* Half moves, half faults; each belongs to a memory chosen anew. One in eight is late. */
static void
make_events(mm_event *events, size_t count, const mm_allocation_record *allocations,
            size_t memories)
{
    for (size_t i = 0; i < count; i++) {
        const mm_allocation_record *allocation = &allocations[next_random(memories)];
        bool move = next_random(2) == 0, up = next_random(2) == 0;
        uint64_t offset = next_random(allocation->size / 65536) * 65536,
                 left = allocation->size - offset;
        events[i] = (mm_event){
            .start = i * 1000 - (i > 64 && next_random(8) == 0 ? next_random(64) * 1000 : 0),
            .address = allocation->start + offset,
            .amount = !move          ? 1
                      : left < BLOCK ? left
                                     : BLOCK,
            .memory = MM_NO_MEMORY_INDEX,
            .source = up ? MM_ON_HOST : 0,
            .destination = !move ? MM_NO_PROCESSOR
                           : up  ? 0
                                 : MM_ON_HOST,
            .kind = move ? MM_MOVE
                    : up ? MM_HOST_FAULT
                         : MM_DEVICE_FAULT,
            .cause = MM_CAUSE_FAULT,
            .access = MM_WRITE_ACCESS,
        };
        events[i].end = events[i].start + (move ? 5000 : 0);
    }
}

/* --- measuring ------------------------------------------------------------------------------ */

static double
milliseconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void
need(bool success, const mm_status *st)
{
    if (!success) {
        (void)fprintf(stderr, "attribution: %s\n", st->detail);
        exit(1);
    }
}

static uint64_t
bytes_moved(const mm_attribution *a)
{
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(a, &rows);
    uint64_t bytes = 0;

    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; rows[i].memory != MM_NO_MEMORY_INDEX && k < MM_CAUSES; k++) {
            bytes += rows[i].sums.moved[MM_TO_DEVICE][k] + rows[i].sums.moved[MM_TO_HOST][k];
        }
    }
    return bytes;
}

/* Milliseconds to add the events, and in *index to index the memories. */
static double
add_events(const mm_event *events, size_t count, const mm_allocation_record *allocations,
           size_t memories, mm_event_list *pieces, double *index, uint64_t *bytes)
{
    mm_status st;
    double start = milliseconds(), indexed, end;
    mm_attribution *a = mm_attribution_new(&st);

    need(a != NULL, &st);
    need(mm_attribution_set_memories(a, allocations, memories, NULL, 0, &st) == 0, &st);
    indexed = milliseconds();
    need(mm_attribution_add(a, 0, events, count, pieces, &st) == 0, &st);
    end = milliseconds();
    *index = indexed - start;
    *bytes = bytes_moved(a);
    mm_attribution_free(a);
    return end - indexed;
}

static void
measure(const mm_event *events, size_t count, const mm_allocation_record *allocations,
        size_t memories)
{
    mm_event_list pieces = {.items = __real_malloc(2 * count * sizeof *pieces.items),
                            .capacity = 2 * count};
    size_t before = allocated;
    uint64_t bytes, expected = 0;
    double index, alone, divided;

    /* Touched, as a recorder's would be the second time. */
    memset(pieces.items, 0, 2 * count * sizeof *pieces.items);
    for (size_t i = 0; i < count; i++) {
        expected += events[i].kind == MM_MOVE ? events[i].amount : 0;
    }
    most_allocated = allocated;
    alone = add_events(events, count, allocations, memories, NULL, &index, &bytes);
    divided = add_events(events, count, allocations, memories, &pieces, &index, &bytes);
    (void)printf("%.3f %.3f %.3f %zu %llu %llu\n", index, alone, divided, most_allocated - before,
                 (unsigned long long)bytes, (unsigned long long)expected);
    __real_free(pieces.items);
}

int
main(int argc, char **argv)
{
    size_t count, memories;
    mm_allocation_record *allocations;
    mm_event *events;

    if (argc != 4) {
        (void)fprintf(stderr, "usage: %s EVENTS MEMORIES ROUNDS\n", argv[0]);
        return 2;
    }
    count = strtoul(argv[1], NULL, 10);
    memories = strtoul(argv[2], NULL, 10);
    allocations = __real_calloc(memories, sizeof *allocations);
    events = __real_calloc(count, sizeof *events);
    state = 88172645463325252U;
    make_allocations(allocations, memories, count * 1000);
    make_events(events, count, allocations, memories);
    for (long round = strtol(argv[3], NULL, 10); round > 0; round--) {
        measure(events, count, allocations, memories);
    }
    __real_free(allocations);
    __real_free(events);
    return 0;
}
