/* recordings.h: recordings, memories to record, and reading the results, for the tests of the
 * recorder. */
#ifndef RECORDINGS_H
#define RECORDINGS_H

#include "memory/recorded_calls.h"
#include "trace/recorder.h"
#include "world.h"

enum { PAGE = 4096, BLOCK = 2 << 20 };
enum { TO_DEVICE, TO_HOST, BETWEEN };

static const mm_recording_options usual = {
    .limit = 100000, .faults = true, .synchronize = true, .owner = &usual};
static mm_status st;

static inline CUmemLocation
device(int ordinal)
{
    return mm_location(CU_MEM_LOCATION_TYPE_DEVICE, ordinal);
}

static inline mm_recording *
start_with(mm_recording_options options)
{
    mm_recording *r = mm_recording_start(world.cu, &options, true, &st);

    CHECK_OK(r == NULL ? -1 : 0, &st);
    CHECK(mm_recording_is_running(r) && mm_is_recording());
    return r;
}

static inline mm_recording *
start(void)
{
    return start_with(usual);
}

static inline void
mark(mm_recording *r)
{
    CHECK_OK(mm_recording_mark(r, &st), &st);
}

static inline void
stop(mm_recording *r)
{
    CHECK_OK(mm_recording_stop(r, true, &st), &st);
    CHECK(!mm_recording_is_running(r) && !mm_is_recording());
}

static inline mm_recorded_result
attribute(mm_recording *r)
{
    mm_recorded_result result;

    CHECK_OK(mm_recording_attribute(r, NULL, 0, &result, &st), &st);
    return result;
}

/* The total of a part; zeros without a row. */
static inline mm_sums
total_of(const mm_recorded_result *result, uint32_t part)
{
    const mm_sums_row *rows;
    size_t count = mm_attribution_rows(result->sums, &rows);

    for (size_t i = 0; i < count; i++) {
        if (rows[i].part == part && rows[i].memory == MM_NO_MEMORY_INDEX) {
            return rows[i].sums;
        }
    }
    return (mm_sums){0};
}

static inline mm_recording_report
report_of(mm_recording *r)
{
    mm_recording_report report;

    mm_recording_read_report(r, &report);
    return report;
}

static inline mm_memory *
allocate(size_t size)
{
    mm_memory *m = world_allocate(size);

    memset((void *)(uintptr_t)m->start, 1, size);
    return m;
}

static inline mm_range
range_of(const mm_memory *m)
{
    return (mm_range){m->start, m->size, m->allocation};
}

static inline void
prefetch(mm_range range, CUmemLocation location)
{
    mm_status own;

    CHECK_OK(mm_range_prefetch(world.cu, range, location, NULL, MM_DEFER_NO, &own), &own);
}

#endif
