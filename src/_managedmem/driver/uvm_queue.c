/* uvm_queue.c: opening an event queue of the nvidia-uvm module, reading it, and closing it. */
#include "uvm_queue.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { UNTOUCHED = 0xffffffff }; /* a status that the module has not stored */

/* A forked child has its parent's structure, but neither the memory nor the right to the queue. */
static bool
is_usable(const mm_uvm_queue *q)
{
    return q->memory != NULL && q->owner == getpid();
}

/* --- failures ----------------------------------------------------------------------------- */

static const char *
remedy_for_errno(int error)
{
    switch (error) {
    case ENOENT:
    case ENODEV:
    case ENXIO:
        return ". Load the nvidia-uvm kernel module; a container needs the device too, as in "
               "--device " MM_UVM_TOOLS_DEVICE;
    case EACCES:
    case EPERM:
        return ". This user needs permission to read and write the device";
    default:
        return "";
    }
}

static int
fail_errno(mm_status *st, const char *failure, int error)
{
    (void)mm_fail(st, MM_TRACE_UNAVAILABLE, "%s: %s%s", failure, strerror(error),
                  remedy_for_errno(error));
    st->code = error;
    return -1;
}

static const char *
status_text(uint32_t status)
{
    switch (status) {
    case MM_UVM_ILLEGAL_ACTION:
        return "illegal action";
    case MM_UVM_NO_PERMISSION:
        return "insufficient permissions";
    case MM_UVM_INVALID_ADDRESS:
        return "invalid address";
    case MM_UVM_INVALID_ARGUMENT:
        return "invalid argument";
    case MM_UVM_NO_MEMORY:
        return "no memory";
    case MM_UVM_NOT_SUPPORTED:
        return "not supported";
    default:
        return "unknown";
    }
}

/* `refusal` is a clause, such as "refuses to flush". */
static int
fail_status(mm_status *st, const char *refusal, uint32_t status)
{
    (void)mm_fail(st, MM_TRACE_UNAVAILABLE, "the nvidia-uvm kernel module %s: status 0x%x, %s",
                  refusal, (unsigned)status, status_text(status));
    st->code = (int)status;
    return -1;
}

/* --- opening ------------------------------------------------------------------------------ */

/* The memory is MAP_SHARED, because a write after a fork replaces a private page by a copy, while
 * the module goes on with the original page. A forked child does not get the memory. */
static int
map_memory(mm_uvm_queue *q, mm_status *st)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t control = (sizeof(mm_uvm_control) + page - 1) / page * page;
    size_t records = ((size_t)q->count * MM_UVM_RECORD_BYTES + page - 1) / page * page;
    void *memory = mmap(NULL, control + records, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (memory == MAP_FAILED) {
        return mm_fail(st, MM_NO_MEMORY, "no memory for an event queue of %zu bytes",
                       control + records);
    }
    q->memory = memory;
    q->memory_size = control + records;
    q->control = memory;
    q->records = (unsigned char *)memory + control;
    return madvise(memory, q->memory_size, MADV_DONTFORK) == 0
               ? 0
               : fail_errno(st, "cannot keep the event queue from forked children", errno);
}

static int
open_files(mm_uvm_queue *q, mm_status *st)
{
    q->wake_file = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (q->wake_file < 0) {
        return fail_errno(st, "cannot make an eventfd", errno);
    }
    q->file = q->calls.open(MM_UVM_TOOLS_DEVICE, O_RDWR | O_CLOEXEC);
    return q->file >= 0 ? 0 : fail_errno(st, "cannot open " MM_UVM_TOOLS_DEVICE, errno);
}

/* One request for a queue of the address space that belongs to this file. The status stays
 * UNTOUCHED if the module stores it in the other word. */
static int
request_queue(mm_uvm_queue *q, int space_file, uint32_t *status)
{
    mm_uvm_queue_request request = {
        .records = (uint64_t)(uintptr_t)q->records,
        .count = q->count,
        .control = (uint64_t)(uintptr_t)q->control,
        .all_processors = 1,
        .space_file = (uint32_t)space_file,
        .status_or_version = q->version_first ? MM_UVM_LAYOUT : UNTOUCHED,
        .version_or_status = q->version_first ? UNTOUCHED : MM_UVM_LAYOUT,
    };
    int rc = q->calls.ioctl(q->file, MM_UVM_MAKE_QUEUE, &request);

    *status = q->version_first ? request.version_or_status : request.status_or_version;
    return rc;
}

static int
make_queue(mm_uvm_queue *q, int space_file, mm_status *st)
{
    uint32_t status;
    int rc = request_queue(q, space_file, &status);

    if (rc == 0 && status == UNTOUCHED && !q->version_first) {
        q->version_first = true;
        rc = request_queue(q, space_file, &status);
    }
    if (rc != 0) {
        return fail_errno(st, MM_UVM_TOOLS_DEVICE " makes no event queue", errno);
    }
    if (status != MM_UVM_OK) {
        return fail_status(st, "makes no event queue", status);
    }
    q->space_file = space_file;
    return 0;
}

/* The CUDA driver opens the module more than once, and only one file descriptor has the address
 * space. The module refuses the other descriptors as an illegal action, so a failure of another
 * kind is the one to report. */
static int
attach_to_one(mm_uvm_queue *q, const int *files, int count, mm_status *st)
{
    mm_status reason = {.kind = MM_OK}, latest;

    for (int i = 0; i < count; i++) {
        if (make_queue(q, files[i], &latest) == 0) {
            return 0;
        }
        if (reason.kind == MM_OK || latest.code != MM_UVM_ILLEGAL_ACTION) {
            reason = latest;
        }
    }
    *st = reason;
    return -1;
}

static int
attach_to_this_process(mm_uvm_queue *q, mm_status *st)
{
    int files[MM_UVM_MOST_FILES];
    int count = q->calls.files(files, MM_UVM_MOST_FILES);

    if (count == 0) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "this process has no open file of " MM_UVM_DEVICE
                       ": the CUDA driver does not use the nvidia-uvm kernel module here");
    }
    return attach_to_one(q, files, count, st);
}

static void
release_queue(mm_uvm_queue *q)
{
    if (q->file >= 0) {
        (void)q->calls.close(q->file);
    }
    if (q->wake_file >= 0) {
        (void)close(q->wake_file);
    }
    if (q->memory != NULL) {
        (void)munmap(q->memory, q->memory_size);
    }
    memset(q, 0, sizeof *q);
}

/* Attaches to one of `files`, or to this process if `files` is NULL. */
static int
open_queue(const mm_uvm_calls *calls, const int *files, int file_count, mm_uvm_queue *q,
           uint32_t count, mm_status *st)
{
    assert(count >= 2 && (count & (count - 1)) == 0);
    memset(q, 0, sizeof *q);
    q->calls = *calls;
    q->file = q->wake_file = -1;
    q->count = count;
    q->owner = getpid();
    if (open_files(q, st) < 0 || map_memory(q, st) < 0
        || (files != NULL ? attach_to_one(q, files, file_count, st)
                          : attach_to_this_process(q, st))
               < 0) {
        release_queue(q);
        return -1;
    }
    return 0;
}

int
mm_uvm_queue_open_through(const mm_uvm_calls *calls, mm_uvm_queue *q, uint32_t count,
                          mm_status *st)
{
    return open_queue(calls, NULL, 0, q, count, st);
}

int
mm_uvm_queue_open_for(const mm_uvm_calls *calls, const int *files, int file_count, mm_uvm_queue *q,
                      uint32_t count, mm_status *st)
{
    return open_queue(calls, files, file_count, q, count, st);
}

int
mm_uvm_queue_open(mm_driver *cu, mm_uvm_queue *q, uint32_t count, mm_status *st)
{
    mm_uvm_calls calls;

    memset(q, 0, sizeof *q);
    return mm_uvm_calls_find(cu, &calls, st) < 0 ? -1
                                                 : mm_uvm_queue_open_through(&calls, q, count, st);
}

/* A child that was forked meanwhile keeps the module's file open, so closing the file does not end
 * the recording. */
void
mm_uvm_queue_close(mm_uvm_queue *q)
{
    if (is_usable(q)) {
        mm_uvm_queue_disable(q, UINT64_MAX);
        release_queue(q);
    }
    memset(q, 0, sizeof *q);
}

/* --- recording ---------------------------------------------------------------------------- */

int
mm_uvm_queue_enable(mm_uvm_queue *q, uint64_t types, mm_status *st)
{
    mm_uvm_types_request request = {.types = types};

    assert(is_usable(q));
    if (q->calls.ioctl(q->file, MM_UVM_ENABLE, &request) != 0) {
        return fail_errno(st, MM_UVM_TOOLS_DEVICE " records no events", errno);
    }
    return request.status == MM_UVM_OK ? 0 : fail_status(st, "records no events", request.status);
}

void
mm_uvm_queue_disable(mm_uvm_queue *q, uint64_t types)
{
    mm_uvm_types_request request = {.types = types};

    if (is_usable(q)) {
        /* Records that come nevertheless are dropped with the queue. */
        MM_IGNORE(q->calls.ioctl(q->file, MM_UVM_DISABLE, &request));
    }
}

int
mm_uvm_queue_flush(mm_uvm_queue *q, mm_status *st)
{
    mm_uvm_flush_request request = {0};

    assert(is_usable(q));
    if (q->calls.ioctl(q->space_file, MM_UVM_FLUSH, &request) != 0) {
        return fail_errno(st, MM_UVM_DEVICE " delivers no events", errno);
    }
    return request.status == MM_UVM_OK ? 0 : fail_status(st, "delivers no events", request.status);
}

/* --- reading ------------------------------------------------------------------------------ */

static void
clear_wake(const mm_uvm_queue *q)
{
    uint64_t wakes;

    (void)!read(q->wake_file, &wakes, sizeof wakes); /* fails if another wait has read it */
}

/* Waits for one turn. poll() returns at once for a file in error, so the turn goes on without the
 * queue's file then. */
static int
wait_once(const mm_uvm_queue *q, struct pollfd files[2], int milliseconds)
{
    int ready = q->calls.poll(files, 2, milliseconds);

    if (ready > 0 && files[0].revents != 0 && (files[0].revents & POLLIN) == 0) {
        files[0].revents = 0;
        ready = poll(files + 1, 1, milliseconds);
    }
    return ready;
}

/* Waits in short turns: the module checks the queue before it lists the waiter, so a wake between
 * these two steps is lost, and no other wake follows. */
bool
mm_uvm_queue_wait(mm_uvm_queue *q, int milliseconds)
{
    enum { TURN = 20 };
    struct pollfd files[] = {{q->file, POLLIN, 0}, {q->wake_file, POLLIN, 0}};
    int rest = milliseconds, turn, ready;

    if (!is_usable(q)) {
        return false;
    }
    do {
        turn = rest < 0 || rest > TURN ? TURN : rest;
        ready = wait_once(q, files, turn);
        rest -= rest > 0 ? turn : 0;
    } while (ready == 0 && rest != 0);
    if (ready > 0 && (files[1].revents & POLLIN) != 0) {
        clear_wake(q);
    }
    return ready > 0 && (files[0].revents & POLLIN) != 0;
}

void
mm_uvm_queue_wake(mm_uvm_queue *q)
{
    const uint64_t one = 1;

    if (is_usable(q)) {
        (void)!write(q->wake_file, &one, sizeof one); /* fails only behind 2^64 - 2 wakes */
    }
}

/* Any code of the process can overwrite the control block, so the index is masked, as in the
 * module. */
size_t
mm_uvm_queue_read(mm_uvm_queue *q, unsigned char (*records)[MM_UVM_RECORD_BYTES], size_t most)
{
    uint32_t mask = q->count - 1, next = q->next, put;
    size_t copied = 0;

    if (!is_usable(q)) {
        return 0;
    }
    put = atomic_load_explicit(&q->control->put_behind, memory_order_acquire) & mask;
    for (; next != put && copied < most; next = (next + 1) & mask) {
        memcpy(records[copied++], q->records + (size_t)next * MM_UVM_RECORD_BYTES,
               MM_UVM_RECORD_BYTES);
    }
    q->next = next;
    atomic_store_explicit(&q->control->get_ahead, next, memory_order_release);
    atomic_store_explicit(&q->control->get_behind, next, memory_order_release);
    return copied;
}

uint64_t
mm_uvm_queue_dropped(const mm_uvm_queue *q, uint64_t types)
{
    uint64_t dropped = 0;

    for (int type = 0; is_usable(q) && type < MM_UVM_TYPES; type++) {
        if ((types >> type & 1) != 0) {
            dropped += atomic_load_explicit(&q->control->dropped[type], memory_order_relaxed);
        }
    }
    return dropped;
}

/* --- processors --------------------------------------------------------------------------- */

typedef unsigned char processor_id[MM_UVM_ID_BYTES];

static int
list_processors(mm_uvm_queue *q, processor_id table[MM_UVM_TABLE_ROWS], mm_status *st)
{
    mm_uvm_list_request request = {.table = (uint64_t)(uintptr_t)table,
                                   .status_or_input = q->version_first ? MM_UVM_LAYOUT : 0,
                                   .status = UNTOUCHED};
    uint32_t status;

    if (q->calls.ioctl(q->space_file, MM_UVM_LIST_PROCESSORS, &request) != 0) {
        return fail_errno(st, MM_UVM_DEVICE " does not list its processors", errno);
    }
    status = request.status != UNTOUCHED ? request.status : request.status_or_input;
    return status == MM_UVM_OK ? 0 : fail_status(st, "does not list its processors", status);
}

/* The index of the row with this identifier, or 0, which is the host. */
static int
find_row(processor_id *table, const CUuuid *id)
{
    for (int i = 1; i < MM_UVM_PROCESSORS; i++) {
        if (memcmp(table[i], id->bytes, MM_UVM_ID_BYTES) == 0) {
            return i;
        }
    }
    return 0;
}

/* CUDA identifies each MIG instance, but the module only the physical device. The module's table
 * has only devices of this process: if the table and CUDA have one device each, it is the same. */
static void
match_only_device(int device_count, int16_t processors[MM_UVM_PROCESSORS])
{
    int others = 0, only = 0;

    for (int i = 1; i < MM_UVM_PROCESSORS; i++) {
        if (processors[i] == MM_OTHER_PROCESSOR) {
            others++;
            only = i;
        } else if (processors[i] != MM_NO_PROCESSOR) {
            return;
        }
    }
    if (others == 1 && device_count == 1) {
        processors[only] = 0;
    }
}

int
mm_uvm_queue_processors_again(mm_uvm_queue *q, int16_t processors[MM_UVM_PROCESSORS],
                              mm_status *st)
{
    static const processor_id unused;
    processor_id table[MM_UVM_TABLE_ROWS] = {{0}};

    assert(is_usable(q));
    if (list_processors(q, table, st) < 0) {
        return -1;
    }
    for (int i = 0; i < MM_UVM_PROCESSORS; i++) {
        bool used = memcmp(table[i], unused, MM_UVM_ID_BYTES) != 0;
        processors[i] = used ? MM_OTHER_PROCESSOR : MM_NO_PROCESSOR;
    }
    for (int device = 0; device < q->device_count; device++) {
        processors[find_row(table, &q->device_id[device])] = (int16_t)device;
    }
    match_only_device(q->device_count, processors);
    processors[0] = MM_ON_HOST; /* even if a device that the module does not list took the row */
    return 0;
}

int
mm_uvm_queue_processors(mm_driver *cu, mm_uvm_queue *q, int16_t processors[MM_UVM_PROCESSORS],
                        mm_status *st)
{
    for (int device = 0; device < cu->device_count; device++) {
        MM_TRY(cu, DeviceGetUuid, st, &q->device_id[device], device);
    }
    q->device_count = cu->device_count;
    return mm_uvm_queue_processors_again(q, processors, st);
}
