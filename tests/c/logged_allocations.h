/* logged_allocations.h: memories that live and die, their names, and reading their log. */
#ifndef LOGGED_ALLOCATIONS_H
#define LOGGED_ALLOCATIONS_H

#include <time.h>

#include "world.h"

enum { SIZE = 5000 };

#define ALIVE UINT64_MAX

typedef struct {
    mm_allocation_record *records;
    size_t count;
} log_copy;

static inline uint64_t
clock_now(void)
{
    struct timespec now;

    CHECK_EQUAL(clock_gettime(CLOCK_MONOTONIC_RAW, &now), 0);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static inline void
start_log(void)
{
    mm_status st;

    CHECK_OK(mm_allocation_log_start(SIZE_MAX, &st), &st);
}

static inline log_copy
copy_log(void)
{
    log_copy copy;
    mm_status st;

    CHECK_OK(mm_allocation_log_copy(&copy.records, &copy.count, &st), &st);
    return copy;
}

static inline void
drop(log_copy copy)
{
    mm_allocation_records_free(copy.records, copy.count);
}

/* One record, whose label is in `label`. */
static inline mm_allocation_record
record_at(size_t index, char label[MM_NAME_BYTES + 1])
{
    log_copy copy = copy_log();
    mm_allocation_record record;

    CHECK(index < copy.count);
    record = copy.records[index];
    (void)snprintf(label, MM_NAME_BYTES + 1, "%s", record.label);
    drop(copy);
    return record;
}

static inline uint64_t
death_of(size_t index)
{
    char label[MM_NAME_BYTES + 1];

    return record_at(index, label).died;
}

static inline void
check_label(size_t index, const char *expected)
{
    char label[MM_NAME_BYTES + 1];

    (void)record_at(index, label);
    if (strcmp(label, expected) != 0) {
        (void)fprintf(stderr, "label %zu is \"%s\", not \"%s\"\n", index, label, expected);
        exit(1);
    }
}

static inline mm_memory *
wrap(CUdeviceptr start, size_t size)
{
    mm_status st;
    mm_memory *m = mm_memory_wrap(start, size, &st);

    CHECK(m != NULL);
    return m;
}

static inline void
name(mm_memory *m, const char *text)
{
    mm_status st;
    bool done = false;

    CHECK_OK(mm_memory_set_name(m, text, &done, &st), &st);
    CHECK(done);
}

static inline int
close_memory(mm_memory *m)
{
    mm_status st;
    bool first;

    return mm_memory_close(m, NULL, &first, &st);
}

#endif
