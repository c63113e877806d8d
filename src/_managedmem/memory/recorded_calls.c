/* recorded_calls.c: the list of logged calls, which the recorder takes over from time to time. */
#include "recorded_calls.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

#include "growth.h"

atomic_bool mm_call_log_open;

enum { FIRST_CALLS = 64 }; /* a log has space for these before a call must allocate */

typedef struct {
    mm_event *items;
    size_t count, capacity;
} call_list;

/* Guards the variables below, for a few instructions or one allocation. A forked child has no
 * driver and makes no calls, so it never takes the mutex. */
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static call_list logged;
static call_list taken; /* the recorder reads it while calls are logged; swapped with `logged` */
static uint64_t lost_calls;

static int16_t
destination_of(mm_operation op, CUmemLocation location)
{
    if (op == MM_DISCARD || (int)location.type == CU_MEM_LOCATION_TYPE_INVALID) {
        return MM_NO_PROCESSOR;
    }
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return (int16_t)location.id;
    }
    return MM_ON_HOST;
}

static bool
make_space(call_list *list, size_t needed, mm_status *st)
{
    list->items = mm_grow(list->items, &list->capacity, needed, sizeof *list->items, st);
    return list->capacity >= needed;
}

static void
append_call(const mm_event *call)
{
    mm_status ignored;

    (void)pthread_mutex_lock(&log_mutex);
    if (mm_is_recording()) { /* the recording may have ended since the call began */
        if (make_space(&logged, logged.count + 1, &ignored)) {
            logged.items[logged.count++] = *call;
        } else {
            lost_calls++;
        }
    }
    (void)pthread_mutex_unlock(&log_mutex);
}

void
mm_record_call(mm_operation op, mm_range range, CUmemLocation location, unsigned int advice,
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
            .destination = destination_of(op, location),
            .kind = MM_CALL,
            .cause = (uint8_t)op,
            .extra = advice,
        });
    }
}

void
mm_record_advice(mm_range range, CUmem_advise advice, CUmemLocation location, uint64_t begun)
{
    CUmemLocation nowhere = {.type = CU_MEM_LOCATION_TYPE_INVALID};

    mm_record_call(MM_ADVISE, range, mm_advice_needs_location(advice) ? location : nowhere, advice,
                   begun);
}

void
mm_record_members(mm_range range, mm_location_set members, bool on, uint64_t begun)
{
    CUmem_advise advice = on ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    CUmemLocation location;

    while (mm_next_location(&members, &location)) {
        mm_record_advice(range, advice, location, begun);
    }
}

/* --- the recorder's side ------------------------------------------------------------------ */

const mm_event *
mm_call_log_take(size_t *count, uint64_t *lost)
{
    call_list emptied = taken;

    emptied.count = 0;
    (void)pthread_mutex_lock(&log_mutex);
    taken = logged;
    logged = emptied;
    *lost += lost_calls;
    lost_calls = 0;
    (void)pthread_mutex_unlock(&log_mutex);
    *count = taken.count;
    return taken.items;
}

static void
free_list(call_list *list)
{
    free(list->items);
    *list = (call_list){0};
}

int
mm_call_log_start(mm_status *st)
{
    bool enough;

    (void)pthread_mutex_lock(&log_mutex);
    enough = make_space(&logged, FIRST_CALLS, st) && make_space(&taken, FIRST_CALLS, st);
    logged.count = taken.count = 0;
    lost_calls = 0;
    atomic_store_explicit(&mm_call_log_open, enough, memory_order_relaxed);
    (void)pthread_mutex_unlock(&log_mutex);
    return enough ? 0 : -1;
}

void
mm_call_log_stop(void)
{
    (void)pthread_mutex_lock(&log_mutex);
    atomic_store_explicit(&mm_call_log_open, false, memory_order_relaxed);
    free_list(&logged);
    free_list(&taken);
    (void)pthread_mutex_unlock(&log_mutex);
}
