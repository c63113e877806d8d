/* uvm_self_test.c: a prefetch of 64 KiB, whose records are compared with the known move. */
#include "uvm_self_test.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "../driver/clock.h"
#include "../memory/allocation.h"
#include "../memory/stream.h"
#include "uvm_records.h"

enum { TEST_BYTES = 64 << 10, TEST_RECORDS = 4096, READ_AT_ONCE = 64 };

typedef struct {
    mm_driver *cu;
    mm_uvm_queue queue;
    int device;
    CUdeviceptr start;
    uint64_t begin, end; /* readings of the clock before and after */
    uint64_t records, bytes;
    mm_event wrong; /* the first event that is not as it should be; start 0: none */
    mm_uvm_parser parser;
} self_test;

/* --- moving pages ------------------------------------------------------------------------- */

static int
find_test_device(mm_driver *cu, int *device, mm_status *st)
{
    int shared = 0; /* integrated devices */

    for (int i = 0; i < cu->device_count; i++) {
        int supported = 0, integrated = 0;
        MM_TRY(cu, DeviceGetAttribute, st, &supported,
               CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, i);
        MM_TRY(cu, DeviceGetAttribute, st, &integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, i);
        if (supported != 0 && integrated == 0) {
            *device = i;
            return 0;
        }
        shared += integrated != 0;
    }
    if (shared == cu->device_count) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "every device is integrated: it shares the memory of the host, so that "
                       "nothing moves");
    }
    return mm_fail(
        st, MM_TRACE_UNAVAILABLE,
        "no device has concurrent managed access (Windows, WSL), so managed memory moves "
        "without events");
}

static int
prefetch_pages(self_test *t, CUstream stream, mm_status *st)
{
    const CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->device};

    assert(mm_in_scope());
    memset((void *)(uintptr_t)t->start, 1, TEST_BYTES); /* puts the pages on the host */
    if (mm_uvm_queue_flush(&t->queue, st) < 0) {
        return -1;
    }
    t->begin = mm_raw_clock();
    MM_TRY(t->cu, MemPrefetchAsync, st, t->start, TEST_BYTES, location, 0, stream);
    MM_TRY(t->cu, StreamSynchronize, st, stream);
    if (mm_uvm_queue_flush(&t->queue, st) < 0) {
        return -1;
    }
    t->end = mm_raw_clock();
    return 0;
}

/* Keeps the first failure. */
static int
free_pages(mm_driver *cu, CUdeviceptr allocation, int rc, mm_status *st)
{
    mm_status later;

    if (mm_free(cu, allocation, rc < 0 ? &later : st) == 0) {
        return rc;
    }
    MM_IGNORE(mm_free(cu, allocation, &later)); /* after a transient fault */
    return -1;
}

static int
move_pages_in_stream(self_test *t, CUstream stream, mm_status *st)
{
    CUdeviceptr allocation = 0;
    int rc;

    t->start = mm_allocate_pages(t->cu, TEST_BYTES, CU_MEM_ATTACH_GLOBAL, &allocation, st);
    if (t->start == 0) {
        return -1;
    }
    rc = prefetch_pages(t, stream, st);
    return free_pages(t->cu, allocation, rc, st);
}

/* In a stream of its own, which waits for no other work. */
static int
move_pages(self_test *t, mm_status *st)
{
    mm_scope scope;
    CUstream stream = NULL;
    int rc;

    if (mm_scope_enter_default_relaxed(&scope, t->cu, t->device, st) < 0) {
        return -1;
    }
    rc = mm_stream_create(t->cu, &stream, st);
    if (rc == 0) {
        rc = move_pages_in_stream(t, stream, st);
        if (t->cu->StreamDestroy(stream) != CUDA_SUCCESS) {
            MM_IGNORE(t->cu->StreamDestroy(stream)); /* the second attempt */
        }
    }
    mm_scope_leave(&scope);
    return rc;
}

/* --- comparing ---------------------------------------------------------------------------- */

/* Other threads move their memory meanwhile. */
static bool
is_in_test(const self_test *t, const mm_event *event)
{
    return event->address < t->start + TEST_BYTES && event->address + event->amount > t->start;
}

/* Freed memory can leave its pages on a device, from where the host's first access fetches them. */
static bool
is_of_before(const self_test *t, const mm_event *event)
{
    return event->destination == MM_ON_HOST && event->start < t->begin;
}

static bool
is_as_moved(const self_test *t, const mm_event *event)
{
    return event->kind == MM_MOVE && event->cause == MM_CAUSE_REQUESTED
           && event->source == MM_ON_HOST && event->destination == t->device
           && event->address >= t->start && event->address + event->amount <= t->start + TEST_BYTES
           && event->start >= t->begin && event->end <= t->end;
}

static void
read_records(self_test *t)
{
    unsigned char records[READ_AT_ONCE][MM_UVM_RECORD_BYTES];
    mm_event event;
    size_t count;

    while ((count = mm_uvm_queue_read(&t->queue, records, READ_AT_ONCE)) > 0) {
        t->records += count;
        for (size_t i = 0; i < count; i++) {
            if (mm_uvm_parse(&t->parser, records[i], &event) != MM_RECORD_EVENT
                || !is_in_test(t, &event) || is_of_before(t, &event)) {
                continue;
            }
            t->bytes += event.amount;
            if (!is_as_moved(t, &event) && t->wrong.start == 0) {
                t->wrong = event;
            }
        }
    }
}

static int
fail_wrong_event(const self_test *t, mm_status *st)
{
    const mm_event *e = &t->wrong;

    return mm_fail(
        st, MM_TRACE_UNAVAILABLE,
        "the nvidia-uvm kernel module records a prefetch from the host to device %d, %d "
        "bytes at 0x%" PRIx64 ", as cause %u, from %d to %d, %" PRIu64 " bytes at 0x%" PRIx64
        ", %" PRId64 " ns after the beginning",
        t->device, TEST_BYTES, (uint64_t)t->start, (unsigned)e->cause, (int)e->source,
        (int)e->destination, e->amount, e->address, (int64_t)(e->start - t->begin));
}

static int
compare_records(const self_test *t, mm_status *st)
{
    uint64_t dropped = mm_uvm_queue_dropped(&t->queue, UINT64_MAX);

    if (t->parser.rejected > 0) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "the nvidia-uvm kernel module writes records of an unknown layout: %" PRIu64
                       " of %" PRIu64 " cannot be read",
                       t->parser.rejected, t->records);
    }
    if (dropped > 0) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "the nvidia-uvm kernel module dropped records during a test of %d bytes: "
                       "%" PRIu64,
                       TEST_BYTES, dropped);
    }
    if (t->wrong.start != 0) {
        return fail_wrong_event(t, st);
    }
    if (t->bytes != TEST_BYTES) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "the nvidia-uvm kernel module recorded %" PRIu64
                       " bytes of a prefetch of %d bytes",
                       t->bytes, TEST_BYTES);
    }
    return 0;
}

static int
test_queue(self_test *t, mm_status *st)
{
    int16_t processors[MM_UVM_PROCESSORS];

    /* The module may list the device only once the device has a context. */
    if (mm_uvm_queue_enable(&t->queue, (uint64_t)1 << MM_UVM_MIGRATION, st) < 0
        || move_pages(t, st) < 0
        || mm_uvm_queue_processors(t->cu, &t->queue, processors, st) < 0) {
        return -1;
    }
    mm_uvm_parser_init(&t->parser, processors, MM_UVM_PROCESSORS);
    read_records(t);
    return compare_records(t, st);
}

static int
test_once(mm_driver *cu, mm_status *st)
{
    self_test t = {.cu = cu};
    int rc;

    if (find_test_device(cu, &t.device, st) < 0
        || mm_uvm_queue_open(cu, &t.queue, TEST_RECORDS, st) < 0) {
        return -1;
    }
    rc = test_queue(&t, st);
    mm_uvm_queue_close(&t.queue);
    return rc;
}

int
mm_uvm_self_test(mm_driver *cu, mm_status *st)
{
    static atomic_bool passed;

    if (atomic_load(&passed)) {
        return 0;
    }
    if (test_once(cu, st) < 0) {
        return -1;
    }
    atomic_store(&passed, true);
    return 0;
}
