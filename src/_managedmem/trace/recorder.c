/* recorder.c: the life of a recording: its start, its parts, its thread and its end.
 *
 * Three things keep threads apart. A flag admits one recording. The turn admits one mark, stop,
 * attribution or free of a recording at a time, for as long as it takes. The lock protects the
 * members that the drain thread changes, and is never held during a driver call. The references of
 * the callers keep a recording from being freed. */
#include "recorder.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../driver/clock.h"
#include "../driver/threads.h"
#include "../memory/recorded_calls.h"
#include "device_waits.h"
#include "uvm_records.h"
#include "uvm_self_test.h"

enum {
    QUEUE_RECORDS = 1 << 16,
    READ_AT_ONCE = 256,
    DRAIN_PERIOD = 100 /* milliseconds; a queue that is half full is drained at once */
};

struct mm_recording {
    mm_driver *cu;
    mm_recording_options options;
    uint64_t types;
    atomic_bool running;
    atomic_uint_fast64_t overhead;
    /* The turn. */
    mm_operation_lock turn;
    /* The thread. */
    pthread_t thread;
    bool has_thread;
    atomic_bool thread_ends;
    /* Protected by the lock while the thread lives. */
    pthread_mutex_t lock;
    mm_uvm_queue queue;
    mm_uvm_parser parser;
    mm_recorded_events recorded;
    uint64_t drained, lost; /* records */
    uint64_t unlisted; /* memories, at the end */
    bool waited;
    mm_clock_pair started, marked;
    /* After the end. */
    mm_allocation_record *allocations;
    size_t allocation_count;
};

/* --- the clocks ----------------------------------------------------------------------------- */

/* The closest pair of several, because the thread may be interrupted between two readings. */
static mm_clock_pair
read_clocks(void)
{
    enum { PAIRS = 8 };
    mm_clock_pair best = {0};
    uint64_t narrowest = UINT64_MAX;

    for (int i = 0; i < PAIRS; i++) {
        uint64_t before = mm_monotonic_clock(), raw = mm_raw_clock(), after = mm_monotonic_clock();
        if (after - before < narrowest) {
            narrowest = after - before;
            best = (mm_clock_pair){raw, before + narrowest / 2};
        }
    }
    return best;
}

/* --- one recording of the process --------------------------------------------------------- */

static atomic_bool is_busy; /* from the start of a recording to its end */

/* Guards `current`, which is the latest recording until its owner frees it. */
static pthread_mutex_t current_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_recording *current;

static void
set_current(mm_recording *from, mm_recording *to)
{
    (void)pthread_mutex_lock(&current_mutex);
    if (from == NULL || current == from) {
        current = to;
    }
    (void)pthread_mutex_unlock(&current_mutex);
}

bool
mm_recording_is_running(const mm_recording *r)
{
    return atomic_load(&r->running) && !mm_driver_forked();
}

/* --- the lock ----------------------------------------------------------------------------- */

static void
lock_recording(mm_recording *r)
{
    (void)pthread_mutex_lock(&r->lock);
}

static void
unlock_recording(mm_recording *r)
{
    (void)pthread_mutex_unlock(&r->lock);
}

static void
add_overhead(mm_recording *r, uint64_t begun)
{
    atomic_fetch_add_explicit(&r->overhead, mm_raw_clock() - begun, memory_order_relaxed);
}

/* --- draining: the caller holds the lock -------------------------------------------------- */

static void
drain_calls(mm_recording *r)
{
    size_t count = 0;
    const mm_event *calls = mm_call_log_take(&count, &r->recorded.lost);

    for (size_t i = 0; i < count; i++) {
        mm_recorded_keep(&r->recorded, &calls[i]);
    }
}

/* The module can list a device after the recording has begun. Each index is looked up once:
 * records with an index that stays unknown are rejected, and make the recording incomplete. */
static mm_record_result
parse_record(mm_recording *r, const unsigned char *record, mm_event *event)
{
    uint64_t unlisted = r->parser.unlisted;
    mm_record_result result = mm_uvm_parse(&r->parser, record, event);
    int16_t processors[MM_UVM_PROCESSORS];
    mm_status ignored;

    if (result != MM_RECORD_REJECTED || r->parser.unlisted == unlisted
        || mm_uvm_queue_processors_again(&r->queue, processors, &ignored) < 0) {
        return result;
    }
    return mm_uvm_parse_listed(&r->parser, record, processors, event);
}

/* False once the queue is empty. */
static bool
drain_some(mm_recording *r)
{
    unsigned char records[READ_AT_ONCE][MM_UVM_RECORD_BYTES];
    size_t count = mm_uvm_queue_read(&r->queue, records, READ_AT_ONCE);
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    mm_event event, last;
    bool has_last = false; /* `last` is kept once no page can join it: kept events do not change */

    for (size_t i = 0; i < count; i++) {
        if (parse_record(r, records[i], &event) != MM_RECORD_EVENT
            || (has_last && mm_event_join(&last, &event, page))) {
            continue;
        }
        if (has_last) {
            mm_recorded_keep(&r->recorded, &last);
        }
        last = event;
        has_last = true;
    }
    if (has_last) {
        mm_recorded_keep(&r->recorded, &last);
    }
    r->drained += count;
    return count == READ_AT_ONCE;
}

/* --- draining ----------------------------------------------------------------------------- */

/* Takes and releases the lock. Ends even if other threads keep making records. Returns the
 * number of records so far. */
static uint64_t
drain_queue(mm_recording *r)
{
    bool more = true;
    uint64_t drained;

    for (int n = 0; more && n < 2 * QUEUE_RECORDS / READ_AT_ONCE; n++) {
        lock_recording(r);
        more = drain_some(r);
        unlock_recording(r);
    }
    lock_recording(r);
    drain_calls(r);
    drained = r->drained;
    unlock_recording(r);
    return drained;
}

static void *
run_drain_thread(void *argument)
{
    mm_recording *r = argument;

    while (!atomic_load(&r->thread_ends)) {
        uint64_t begun;
        (void)mm_uvm_queue_wait(&r->queue, DRAIN_PERIOD); /* for whatever reason it ends */
        begun = mm_raw_clock();
        (void)drain_queue(r);
        add_overhead(r, begun);
    }
    return NULL;
}

static int
start_drain_thread(mm_recording *r, mm_status *st)
{
    if (mm_thread_start(&r->thread, run_drain_thread, r, "the trace", st) < 0) {
        return -1;
    }
    r->has_thread = true;
    return 0;
}

static void
end_drain_thread(mm_recording *r)
{
    if (r->has_thread) {
        atomic_store(&r->thread_ends, true);
        mm_uvm_queue_wake(&r->queue);
        (void)pthread_join(r->thread, NULL);
        r->has_thread = false;
    }
}

/* Delivers the records of finished work and drains them. A record may come one flush late, so the
 * function ends after two flushes without a record. */
static int
drain_until_quiet(mm_recording *r, mm_status *st)
{
    enum { MOST_ROUNDS = 16, QUIET_ROUNDS = 2 };

    for (int round = 0, quiet = 0; round < MOST_ROUNDS && quiet < QUIET_ROUNDS; round++) {
        uint64_t before;
        lock_recording(r);
        before = r->drained;
        unlock_recording(r);
        if (mm_uvm_queue_flush(&r->queue, st) < 0) {
            return -1;
        }
        quiet = drain_queue(r) > before ? 0 : quiet + 1;
    }
    return 0;
}

/* Sets *waited to false if a stream captures a graph. */
static int
wait_unless_capturing(const mm_recording *r, bool *waited, mm_status *st)
{
    *waited = true;
    return r->options.synchronize ? mm_await_devices_unless_capturing(r->cu, waited, st) : 0;
}

/* --- start -------------------------------------------------------------------------------- */

static int
reserve_parts(mm_recording *r, mm_status *st)
{
    int rc;

    lock_recording(r);
    rc = mm_recorded_reserve(&r->recorded, st);
    unlock_recording(r);
    return rc;
}

static mm_recording *
new_recording(mm_driver *cu, const mm_recording_options *options, mm_status *st)
{
    mm_recording *r = calloc(1, sizeof *r);

    if (r == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for a trace");
        return NULL;
    }
    if (mm_recorded_init(&r->recorded, options->limit, st) < 0) {
        mm_recorded_free(&r->recorded);
        free(r);
        return NULL;
    }
    r->cu = cu;
    r->options = *options;
    r->types = mm_uvm_types(options->faults);
    r->waited = true;
    (void)pthread_mutex_init(&r->lock, NULL);
    mm_operation_lock_init(&r->turn);
    return r;
}

static void
free_recording(mm_recording *r)
{
    assert(!r->has_thread);
    mm_recorded_free(&r->recorded);
    mm_allocation_records_free(r->allocations, r->allocation_count);
    mm_operation_lock_destroy(&r->turn);
    (void)pthread_mutex_destroy(&r->lock);
    free(r);
}

/* Undoes record_events, even where that failed halfway. */
static void
end_source(mm_recording *r)
{
    end_drain_thread(r);
    mm_call_log_stop();
    lock_recording(r);
    r->lost += mm_uvm_queue_dropped(&r->queue, r->types);
    mm_uvm_queue_close(&r->queue);
    unlock_recording(r);
    mm_allocation_log_stop();
}

static int
open_source(mm_recording *r, mm_status *st)
{
    int16_t processors[MM_UVM_PROCESSORS];

    if (mm_uvm_queue_open(r->cu, &r->queue, QUEUE_RECORDS, st) < 0
        || mm_uvm_queue_processors(r->cu, &r->queue, processors, st) < 0) {
        return -1;
    }
    mm_uvm_parser_init(&r->parser, processors, MM_UVM_PROCESSORS);
    return 0;
}

static int
record_events(mm_recording *r, bool wait, mm_status *st)
{
    bool waited;

    if (open_source(r, st) < 0 || (wait && wait_unless_capturing(r, &waited, st) < 0)
        || mm_allocation_log_start(r->options.limit, st) < 0 || mm_call_log_start(st) < 0) {
        return -1;
    }
    if (mm_uvm_queue_enable(&r->queue, r->types, st) < 0) {
        return -1;
    }
    r->started = r->marked = read_clocks();
    mm_recorded_begin(&r->recorded, r->started.raw);
    return start_drain_thread(r, st);
}

static mm_recording *
try_start(mm_driver *cu, const mm_recording_options *options, bool wait, mm_status *st)
{
    mm_recording *r = mm_uvm_self_test(cu, st) == 0 ? new_recording(cu, options, st) : NULL;

    if (r != NULL && record_events(r, wait, st) < 0) {
        end_source(r);
        free_recording(r);
        return NULL;
    }
    return r;
}

mm_recording *
mm_recording_start(mm_driver *cu, const mm_recording_options *options, bool wait, mm_status *st)
{
    uint64_t begun = mm_raw_clock();
    mm_recording *r;

    if (atomic_exchange(&is_busy, true)) {
        (void)mm_fail(
            st, MM_TRACE_BUSY,
            "a trace is already running in this process, and only one can run at a time, including "
            "that of `python -m managedmem trace`: end it, or call its mark()");
        return NULL;
    }
    r = try_start(cu, options, wait, st);
    if (r == NULL) {
        atomic_store(&is_busy, false);
        return NULL;
    }
    add_overhead(r, begun);
    atomic_store(&r->running, true);
    set_current(NULL, r);
    return r;
}

/* --- marks and the end -------------------------------------------------------------------- */

static int
fail_forked_recording(mm_status *st)
{
    return mm_fail(st, MM_FORKED,
                   "this process was forked while or after a trace ran: the trace belongs to its "
                   "parent");
}

static int
fail_ended(mm_status *st)
{
    return mm_fail(st, MM_REFUSED, "the trace has ended");
}

/* Ends the part that runs and begins the next one. */
static void
end_part(mm_recording *r)
{
    mm_clock_pair now = read_clocks();

    lock_recording(r);
    mm_recorded_end_part(&r->recorded, now.raw);
    r->marked = now;
    unlock_recording(r);
}

static int
mark_in_turn(mm_recording *r, mm_status *st)
{
    if (!mm_recording_is_running(r)) {
        return fail_ended(st);
    }
    if (reserve_parts(r, st) < 0 || drain_until_quiet(r, st) < 0) {
        return -1;
    }
    end_part(r);
    return 0;
}

int
mm_recording_mark(mm_recording *r, mm_status *st)
{
    uint64_t begun = mm_raw_clock();
    int rc;

    if (mm_driver_forked()) {
        return fail_forked_recording(st);
    }
    if (!mm_recording_is_running(r)) {
        return fail_ended(st);
    }
    if (r->options.synchronize && mm_await_devices_without_captures(r->cu, st) < 0) {
        return -1;
    }
    mm_operation_lock_take(&r->turn);
    rc = mark_in_turn(r, st);
    add_overhead(r, begun);
    mm_operation_lock_release(&r->turn);
    return rc;
}

/* Ends the recording. The caller has the turn. */
static void
end_recording(mm_recording *r)
{
    atomic_store(&r->running, false);
    end_source(r);
    atomic_store(&is_busy, false);
}

/* The first failure is in st already if rc is -1. */
static int
stop_in_turn(mm_recording *r, int rc, mm_status *st)
{
    mm_status later;

    if (drain_until_quiet(r, rc == 0 ? st : &later) < 0) {
        rc = -1;
    }
    mm_uvm_queue_disable(&r->queue, r->types);
    (void)drain_queue(r);
    end_part(r);
    lock_recording(r);
    if (mm_allocation_log_copy(&r->allocations, &r->allocation_count, rc == 0 ? st : &later) < 0) {
        rc = -1;
    }
    r->unlisted = mm_allocation_log_missed();
    unlock_recording(r);
    end_recording(r);
    return rc;
}

int
mm_recording_stop(mm_recording *r, bool wait, mm_status *st)
{
    uint64_t begun = mm_raw_clock();
    bool waited = false;
    int rc = 0;

    if (!mm_recording_is_running(r)) {
        return 0;
    }
    if (wait) {
        rc = wait_unless_capturing(r, &waited, st);
    }
    mm_operation_lock_take(&r->turn);
    if (mm_recording_is_running(r)) {
        lock_recording(r);
        r->waited = waited || !r->options.synchronize;
        unlock_recording(r);
        rc = stop_in_turn(r, rc, st);
        add_overhead(r, begun);
    } else {
        rc = 0; /* another thread was faster */
    }
    mm_operation_lock_release(&r->turn);
    return rc;
}

void
mm_recording_free(mm_recording *r)
{
    if (r == NULL) {
        return;
    }
    if (mm_driver_forked()) {
        if (r->has_thread) {
            return; /* the parent's thread may have been changing its members */
        }
        mm_uvm_queue_close(&r->queue);
        free_recording(r);
        return;
    }
    set_current(r, NULL);
    mm_operation_lock_take(&r->turn);
    if (mm_recording_is_running(r)) {
        end_recording(r);
    }
    mm_operation_lock_release(&r->turn);
    free_recording(r);
}

void
mm_recordings_end(const void *owner)
{
    if (mm_driver_forked()) {
        return;
    }
    (void)pthread_mutex_lock(&current_mutex); /* so that no thread frees it */
    if (current != NULL && current->options.owner == owner) {
        mm_operation_lock_take(&current->turn);
        if (mm_recording_is_running(current)) {
            end_recording(current);
        }
        mm_operation_lock_release(&current->turn);
    }
    (void)pthread_mutex_unlock(&current_mutex);
}

/* --- results ------------------------------------------------------------------------------ */

typedef struct {
    mm_driver *cu;
    mm_status *st;
    bool failed;
} allocation_search;

/* Memory that was freed, and memory that the driver does not know, is not found. */
static bool
find_allocation(void *context, CUdeviceptr address, CUdeviceptr *start, size_t *size)
{
    allocation_search *search = context;
    mm_pointer_attributes attributes;

    if (search->failed || mm_pointer_query(search->cu, address, &attributes, search->st) < 0) {
        search->failed = true;
        return false;
    }
    *start = attributes.start;
    *size = attributes.size;
    return attributes.size > 0 && address - attributes.start < attributes.size;
}

static int
find_foreign_memory(mm_recording *r, mm_attribution *sums, size_t count, mm_status *st)
{
    allocation_search search = {.cu = r->cu};
    mm_status failure = {.kind = MM_OK};
    int rc;

    search.st = &failure;
    if (count == 0) {
        return 0;
    }
    MM_RUN_IN(rc, mm_scope_enter_relaxed, MM_ANY_DEVICE, r->cu, st,
              mm_attribution_find_foreign(sums, r->recorded.events, count, find_allocation,
                                          &search, st));
    if (rc == 0 && search.failed) {
        *st = failure;
        rc = -1;
    }
    return rc;
}

static int
set_memories(mm_recording *r, mm_attribution *sums, const mm_named_range *named,
             size_t named_count, mm_status *st)
{
    mm_allocation_record *allocations = NULL;
    size_t count = 0;
    int rc;

    if (!mm_recording_is_running(r)) {
        return mm_attribution_set_memories(sums, r->allocations, r->allocation_count, named,
                                           named_count, st);
    }
    lock_recording(r);
    rc = mm_allocation_log_copy(&allocations, &count, st);
    unlock_recording(r);
    if (rc == 0) {
        rc = mm_attribution_set_memories(sums, allocations, count, named, named_count, st);
        mm_allocation_records_free(allocations, count);
    }
    return rc;
}

static int
attribute_in_turn(mm_recording *r, const mm_named_range *named, size_t named_count,
                  mm_recorded_result *result, mm_status *st)
{
    int rc;

    if (mm_recorded_result_init(&r->recorded, result, st) < 0
        || set_memories(r, result->sums, named, named_count, st) < 0
        || find_foreign_memory(r, result->sums, mm_recorded_result_events(result), st) < 0
        || mm_recorded_attribute(&r->recorded, result, st) < 0) {
        return -1;
    }
    lock_recording(r);
    rc = mm_recorded_merge(&r->recorded, result, st);
    unlock_recording(r);
    return rc;
}

int
mm_recording_attribute(mm_recording *r, const mm_named_range *named, size_t named_count,
                       mm_recorded_result *result, mm_status *st)
{
    int rc;

    *result = (mm_recorded_result){0};
    if (mm_driver_forked()) {
        return fail_forked_recording(st);
    }
    mm_operation_lock_take(&r->turn);
    rc = attribute_in_turn(r, named, named_count, result, st);
    mm_operation_lock_release(&r->turn);
    if (rc < 0) {
        mm_recorded_result_free(result);
    }
    return rc;
}

/* A forked child cannot take the lock, which a thread of its parent may hold. It needs no lock, as
 * it has no other thread. */
static bool
lock_if_own(mm_recording *r)
{
    bool own = !mm_driver_forked();

    if (own) {
        lock_recording(r);
    }
    return own;
}

static void
unlock_if_own(mm_recording *r, bool own)
{
    if (own) {
        unlock_recording(r);
    }
}

int
mm_recording_copy_parts(mm_recording *r, mm_recorded_part **parts, size_t *count, mm_status *st)
{
    bool own = lock_if_own(r);
    int rc = mm_recorded_copy_parts(&r->recorded, parts, count, st);

    unlock_if_own(r, own);
    return rc;
}

void
mm_recording_read_report(mm_recording *r, mm_recording_report *report)
{
    bool own = lock_if_own(r);

    *report = (mm_recording_report){
        .lost = r->lost + r->recorded.lost + mm_uvm_queue_dropped(&r->queue, r->types),
        .rejected = r->parser.rejected,
        .fault_overflows = r->parser.fault_overflows,
        .fatal_faults = r->parser.fatal_faults,
        .overhead = atomic_load(&r->overhead),
        .truncated = r->recorded.truncated,
        .unlisted = own && mm_recording_is_running(r) ? mm_allocation_log_missed() : r->unlisted,
        .waited = r->waited,
    };
    unlock_if_own(r, own);
}

void
mm_recording_read_clock(mm_recording *r, mm_clock_pair moments[2])
{
    bool own = lock_if_own(r);

    moments[0] = r->started;
    moments[1] = r->marked;
    unlock_if_own(r, own);
}
