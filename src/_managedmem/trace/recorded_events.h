/* recorded_events.h: the events of a recording, in parts: those up to a limit, and the sums of the
 * others.
 *
 * The caller serialises all functions by its lock, except where a function says otherwise. Events
 * of finished parts do not change any more. */
#ifndef MM_RECORDED_EVENTS_H
#define MM_RECORDED_EVENTS_H

#include "attribution.h"

typedef struct {
    uint64_t start, end; /* nanoseconds, as in events */
    size_t first, count; /* its events */
    size_t pieces; /* in a result: the number of its pieces */
} mm_recorded_part;

/* Members without a comment are private to the functions below. */
typedef struct {
    size_t limit;
    mm_event *events; /* address space for `limit` events; pages get memory as they fill */
    size_t kept;
    mm_event *spilled; /* events beyond the limit, until they are added to the sums */
    size_t spilled_count;
    mm_attribution *spilled_sums; /* NULL before there are any */
    mm_recorded_part *parts;
    size_t part_count, part_capacity; /* part_count: finished parts; the next one is under way */
    uint64_t lost; /* events for which there was no memory */
    bool truncated; /* there were events beyond the limit */
} mm_recorded_events;

/* Can be freed even after a failure. */
MM_NODISCARD int mm_recorded_init(mm_recorded_events *e, size_t limit, mm_status *st);
void mm_recorded_free(mm_recorded_events *e);

/* Joins a move of one page to `event`, the move of the pages before it, if both are of one push of
 * the module. The joined event lasts until the later of the two ends. False if they are not. */
bool mm_event_join(mm_event *event, const mm_event *page, uint64_t page_size);

void mm_recorded_keep(mm_recorded_events *e, const mm_event *event);

/* Begins the first part. */
void mm_recorded_begin(mm_recorded_events *e, uint64_t start);

/* Makes space for the next two parts, so that the present one can end and the next one begin. */
MM_NODISCARD int mm_recorded_reserve(mm_recorded_events *e, mm_status *st);

/* Ends the present part, and begins the next one if there is space. */
void mm_recorded_end_part(mm_recorded_events *e, uint64_t end);

/* Copies the finished parts: *count of them, to be freed by the caller. */
MM_NODISCARD int mm_recorded_copy_parts(const mm_recorded_events *e, mm_recorded_part **parts,
                                        size_t *count, mm_status *st);

/* --- results ------------------------------------------------------------------------------ */

typedef struct {
    mm_attribution *sums;
    mm_event_list pieces; /* the events of all parts, split at the borders of memories */
    mm_recorded_part *parts; /* the finished ones */
    size_t part_count;
} mm_recorded_result;

/* A result with a copy of the finished parts, and no memories. Can be freed even after a failure. */
MM_NODISCARD int mm_recorded_result_init(const mm_recorded_events *e, mm_recorded_result *result,
                                         mm_status *st);

/* The number of events in the parts of the result. */
size_t mm_recorded_result_events(const mm_recorded_result *result);

/* Assigns the events of the result's parts to its memories. Needs no lock. */
MM_NODISCARD int mm_recorded_attribute(const mm_recorded_events *e, mm_recorded_result *result,
                                       mm_status *st);

/* Adds the sums of the events that were not kept. */
MM_NODISCARD int mm_recorded_merge(const mm_recorded_events *e, mm_recorded_result *result,
                                   mm_status *st);

void mm_recorded_result_free(mm_recorded_result *result);

#endif
