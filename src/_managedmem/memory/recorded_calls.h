/* recorded_calls.h: the log of this library's own prefetches, discards and advice during a
 * recording: one event for each range of a call that succeeded. */
#ifndef MM_RECORDED_CALLS_H
#define MM_RECORDED_CALLS_H

#include "../driver/clock.h"
#include "event.h"
#include "range.h"

/* Internal: true while a log is kept. */
extern atomic_bool mm_call_log_open;

static inline bool
mm_is_recording(void)
{
    return atomic_load_explicit(&mm_call_log_open, memory_order_relaxed);
}

/* The time at which a call begins, for mm_record_call; 0 while nothing records. */
static inline uint64_t
mm_call_begin(void)
{
    return mm_is_recording() ? mm_raw_clock() : 0;
}

/* Logs a call that began at `begun`, which is not 0, and ended now. `advice` is for MM_ADVISE. Any
 * thread may log. This can allocate, but never fails: calls that cannot be kept count as lost. */
void mm_record_call(mm_operation op, mm_range range, CUmemLocation location, unsigned int advice,
                    uint64_t begun);

/* mm_record_call for advice, whose location may have no meaning. */
void mm_record_advice(mm_range range, CUmem_advise advice, CUmemLocation location, uint64_t begun);

/* One event for each member that was set or unset. */
void mm_record_members(mm_range range, mm_location_set members, bool on, uint64_t begun);

/* The recorder's side: one recording at a time, and one thread at a time. Starting empties the
 * log. */
MM_NODISCARD int mm_call_log_start(mm_status *st);
void mm_call_log_stop(void);

/* Returns the events since the previous take, valid until the next take or the stop. *count becomes
 * their number. Adds the number of lost events to *lost. */
const mm_event *mm_call_log_take(size_t *count, uint64_t *lost);

#endif
