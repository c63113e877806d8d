/* recorded_calls.c: the list of logged calls, which the recorder takes over from time to time. */
#include "recorded_calls.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

atomic_bool mm_call_log_open;

/* Guards the variables below, for a few instructions or one allocation. A forked child has no
 * driver and makes no calls, so it does not reach it. */
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_event *logged;
static size_t logged_count, logged_capacity;
static uint64_t lost_calls;

static int16_t
processor_of(CUmemLocation where)
{
    if (where.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return (int16_t)where.id;
    }
    return (int)where.type == CU_MEM_LOCATION_TYPE_INVALID ? MM_NO_PROCESSOR : MM_ON_HOST;
}

/* False if memory is exhausted. */
static bool
make_space(void)
{
    size_t capacity = logged_capacity > 0 ? 2 * logged_capacity : 64;
    mm_event *larger;

    if (logged_count < logged_capacity) {
        return true;
    }
    larger = realloc(logged, capacity * sizeof *larger);
    if (larger == NULL) {
        return false;
    }
    logged = larger;
    logged_capacity = capacity;
    return true;
}

static void
append_call(const mm_event *call)
{
    (void)pthread_mutex_lock(&log_mutex);
    if (mm_is_recording()) { /* the recording may have ended since the call began */
        if (make_space()) {
            logged[logged_count++] = *call;
        } else {
            lost_calls++;
        }
    }
    (void)pthread_mutex_unlock(&log_mutex);
}

void
mm_record_call(mm_operation op, mm_range range, CUmemLocation where, unsigned int advice,
               uint64_t begun)
{
    assert(begun != 0);
    if (range.size > 0) {
        append_call(&(mm_event){
            .start = begun,
            .end = mm_raw_clock(),
            .address = range.start,
            .amount = range.size,
            .memory = MM_NO_MEMORY_INDEX,
            .source = MM_NO_PROCESSOR,
            .destination = op == MM_DISCARD ? MM_NO_PROCESSOR : processor_of(where),
            .kind = MM_CALL,
            .cause = (uint8_t)op,
            .extra = advice,
        });
    }
}

void
mm_record_advice(mm_range range, CUmem_advise advice, CUmemLocation where, uint64_t begun)
{
    CUmemLocation nowhere = {.type = CU_MEM_LOCATION_TYPE_INVALID};

    mm_record_call(MM_ADVISE, range, mm_advice_needs_location(advice) ? where : nowhere, advice,
                   begun);
}

void
mm_record_members(mm_range range, mm_location_set members, bool on, uint64_t begun)
{
    CUmem_advise advice = on ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    CUmemLocation where;

    while (mm_next_location(&members, &where)) {
        mm_record_advice(range, advice, where, begun);
    }
}

/* --- the recorder's side ------------------------------------------------------------------ */

static mm_event *
take_calls(size_t *count, uint64_t *lost)
{
    mm_event *taken = logged;

    *count = logged_count;
    *lost += lost_calls;
    logged = NULL;
    logged_count = logged_capacity = 0;
    lost_calls = 0;
    return taken;
}

mm_event *
mm_call_log_take(size_t *count, uint64_t *lost)
{
    mm_event *taken;

    (void)pthread_mutex_lock(&log_mutex);
    taken = take_calls(count, lost);
    (void)pthread_mutex_unlock(&log_mutex);
    return taken;
}

static void
set_open(bool open)
{
    uint64_t lost = 0;
    size_t count;
    mm_event *stale;

    (void)pthread_mutex_lock(&log_mutex);
    stale = take_calls(&count, &lost);
    atomic_store_explicit(&mm_call_log_open, open, memory_order_relaxed);
    (void)pthread_mutex_unlock(&log_mutex);
    free(stale);
}

void
mm_call_log_start(void)
{
    set_open(true);
}

void
mm_call_log_stop(void)
{
    set_open(false);
}
