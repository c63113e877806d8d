/* recorder.h: the recording of a process: the events of its managed memory from the nvidia-uvm
 * module, and this library's own calls, from a start to a stop, in parts.
 *
 * A process has one recording at a time. Its records are drained by a thread of its own, which
 * calls neither Python nor the driver. All functions may be called in any thread. They block, so
 * the GIL must be released. A forked child does not have the recording of its parent. There, mark
 * and attribute fail with MM_FORKED, and stop does nothing. Free frees only memory, and nothing at
 * all if the recording ran, because its thread may have been changing it during the fork. */
#ifndef MM_RECORDER_H
#define MM_RECORDER_H

#include "recorded_events.h"

enum { MM_LEAST_LIMIT = 1000, MM_MOST_LIMIT = 1000000000 };

typedef struct {
    /* The most events that are kept: later ones only count in the sums. And the most new memories
     * that are listed: the events of later ones count for unknown memory. */
    size_t limit;
    bool faults; /* record faults too */
    bool synchronize; /* wait for devices at the start, at marks and at the end */
    const void *owner; /* for mm_recordings_end */
} mm_recording_options;

/* One moment on two clocks, in nanoseconds: the clock of the events, and CLOCK_MONOTONIC. */
typedef struct {
    uint64_t raw, monotonic;
} mm_clock_pair;

typedef struct mm_recording mm_recording;

/* Fails with MM_TRACE_BUSY if a recording runs, with MM_TRACE_UNAVAILABLE where nothing can be
 * recorded. The first start of a process tests that the records are right. With `wait`
 * it waits for the work of devices, unless a stream captures a graph. NULL on failure. */
mm_recording *mm_recording_start(mm_driver *cu, const mm_recording_options *options, bool wait,
                                 mm_status *st);

/* Waits for the work of devices, and ends a part. Fails with MM_REFUSED, before it does anything,
 * if the recording does not run, or if a stream captures a graph: the wait would destroy the
 * capture. After a failure the part goes on. */
MM_NODISCARD int mm_recording_mark(mm_recording *r, mm_status *st);

/* Ends the last part and the recording, even on failure. Does nothing if it has ended. With `wait`
 * it waits for the work of devices, unless a stream captures a graph. */
MM_NODISCARD int mm_recording_stop(mm_recording *r, bool wait, mm_status *st);

/* Ends the recording without a last part, if it runs, and frees it; NULL is allowed. */
void mm_recording_free(mm_recording *r);

/* Ends the recording that this owner started, if it runs, without a last part. */
void mm_recordings_end(const void *owner);

bool mm_recording_is_running(const mm_recording *r);

/* --- results ------------------------------------------------------------------------------ */

/* Assigns the events of the finished parts to memories. Asks the driver for the allocations of
 * other libraries. Later named ranges win. *result is freed with mm_recorded_result_free. */
MM_NODISCARD int mm_recording_attribute(mm_recording *r, const mm_named_range *named,
                                        size_t named_count, mm_recorded_result *result,
                                        mm_status *st);

/* Copies the finished parts: *count of them, to be freed by the caller. */
MM_NODISCARD int mm_recording_copy_parts(mm_recording *r, mm_recorded_part **parts, size_t *count,
                                         mm_status *st);

typedef struct {
    uint64_t lost; /* records that were dropped, and events for which there was no memory */
    uint64_t rejected, fault_overflows, fatal_faults;
    uint64_t overhead; /* nanoseconds in start, mark, stop and draining */
    uint64_t unlisted; /* new memories beyond the limit, which are not listed */
    bool truncated; /* events after the limit are in the sums only */
    bool waited; /* false if the end did not wait, because a stream captured a graph */
} mm_recording_report;

void mm_recording_read_report(mm_recording *r, mm_recording_report *report);

/* Stores the clocks at the start and at the end of the last part; before the first mark, both are
 * those of the start. */
void mm_recording_read_clock(mm_recording *r, mm_clock_pair moments[2]);

#endif
