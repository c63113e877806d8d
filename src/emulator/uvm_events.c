/* The event queues of the nvidia-uvm module: their clients, and the records that moves and faults
 * write into them. A queue is memory of its client: 64-byte records (the module's layout 1), and a
 * control block with the indices of both sides. Any number of clients may listen. */
#include "emulator.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RECORD = 64, LAST_TYPE = 63 };

/* The type comes first, then further bytes that depend on the type, and then numbers of 8 bytes. */
struct record {
    unsigned char bytes[8];
    uint64_t numbers[7];
};
_Static_assert(sizeof(struct record) == RECORD, "not the module's layout");

/* Indices are below the number of records; a queue is full when one record is free. */
struct control {
    _Atomic uint32_t get_ahead, get_behind, put_ahead, put_behind;
    uint64_t dropped[LAST_TYPE + 1];
};
_Static_assert(sizeof(struct control) == EMU_UVM_CONTROL_BYTES, "not the module's layout");

struct held {
    uint64_t due; /* the flush that delivers it */
    struct record record;
};

struct emu_listener {
    struct emu_listener *next;
    int file;
    struct record *records; /* NULL before the queue is made */
    struct control *control;
    uint32_t count;
    uint64_t enabled; /* bits of types */
    struct held *held; /* oldest first */
    size_t held_count;
};

static struct emu_listener *listeners;
static uint64_t flushes, records_made;
static struct {
    bool set; /* false: as configured */
    unsigned int value;
} faults[EMU_QUEUE_FAULTS];

void
emu_queue_set_fault(enum emu_queue_fault fault, unsigned int value)
{
    faults[fault].set = true;
    faults[fault].value = value;
}

unsigned int
emu_queue_fault(enum emu_queue_fault fault)
{
    return faults[fault].set ? faults[fault].value
                             : (unsigned int)emu_config()->queue_faults[fault];
}

/* ---- clients ---- */

struct emu_listener *
emu_listener_find(int file)
{
    struct emu_listener *listener;

    EMU_SEEK(listener, listeners, listener->file == file);
    return listener;
}

bool
emu_listener_new(int file)
{
    struct emu_listener *listener = calloc(1, sizeof *listener);

    if (listener == NULL) {
        return false;
    }
    listener->file = file;
    EMU_LINK(listeners, listener);
    return true;
}

void
emu_listener_delete(struct emu_listener *listener)
{
    EMU_UNLINK(listeners, listener);
    free(listener->held);
    free(listener);
}

bool
emu_listener_start(struct emu_listener *listener, void *records, uint32_t count, void *control)
{
    if (listener->records != NULL) {
        return false;
    }
    listener->records = records;
    listener->count = count;
    listener->control = control;
    return true;
}

bool
emu_listener_enable(struct emu_listener *listener, uint64_t types, bool on)
{
    if (listener->records == NULL) {
        return false;
    }
    listener->enabled = on ? listener->enabled | types : listener->enabled & ~types;
    return true;
}

bool
emu_listener_half_full(const struct emu_listener *listener)
{
    uint32_t used;

    if (listener->records == NULL) {
        return false;
    }
    used =
        (atomic_load(&listener->control->put_behind) - atomic_load(&listener->control->get_behind))
        & (listener->count - 1);
    return used >= listener->count / 2;
}

/* ---- writing records ---- */

/* The client's index comes from memory that it can write, so it is masked. */
static void
put_record(struct emu_listener *listener, const struct record *record)
{
    struct control *control = listener->control;
    uint32_t mask = listener->count - 1;
    uint32_t put = atomic_load(&control->put_behind) & mask;
    uint32_t get = atomic_load(&control->get_ahead) & mask;

    if (((put + 1) & mask) == get) {
        control->dropped[record->bytes[0] & LAST_TYPE]++;
        return;
    }
    atomic_store(&control->put_ahead, (put + 1) & mask);
    listener->records[put] = *record;
    atomic_store(&control->put_behind, (put + 1) & mask);
}

static void
hold_record(struct emu_listener *listener, const struct record *record)
{
    size_t count = listener->held_count;
    struct held *held = realloc(listener->held, (count + 1) * sizeof *held);

    if (held == NULL) {
        listener->control->dropped[record->bytes[0] & LAST_TYPE]++;
        return;
    }
    held[count] = (struct held){flushes + emu_queue_fault(EMU_QUEUE_LATE), *record};
    listener->held = held;
    listener->held_count = count + 1;
}

void
emu_listeners_flush(void)
{
    flushes++;
    for (struct emu_listener *l = listeners; l != NULL; l = l->next) {
        size_t ready = 0;

        while (ready < l->held_count && l->held[ready].due <= flushes) {
            put_record(l, &l->held[ready++].record);
        }
        if (ready > 0) {
            l->held_count -= ready;
            memmove(l->held, l->held + ready, l->held_count * sizeof *l->held);
        }
    }
}

/* A record that no module writes: a valid or unknown type, and bytes without a meaning. */
static void
put_garbage(struct emu_listener *listener)
{
    struct record record;
    unsigned char bytes[RECORD];
    uint64_t state = records_made * 0x9E3779B97F4A7C15u;

    for (size_t i = 0; i < RECORD; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        bytes[i] = (unsigned char)(state >> 24);
    }
    memcpy(&record, bytes, sizeof record);
    if (records_made % 2 == 0) {
        record.bytes[0] = EMU_UVM_MIGRATION;
    }
    put_record(listener, &record);
}

static bool
is_nth(enum emu_queue_fault fault)
{
    unsigned int nth = emu_queue_fault(fault);

    return nth != 0 && records_made % nth == 0;
}

static void
deliver(struct emu_listener *listener, const struct record *record)
{
    struct record shifted = {{record->bytes[0]}, {0}};

    if (is_nth(EMU_QUEUE_DROP)) {
        listener->control->dropped[record->bytes[0]]++;
        return;
    }
    if (is_nth(EMU_QUEUE_LOSE)) {
        return;
    }
    if (is_nth(EMU_QUEUE_GARBAGE)) {
        put_garbage(listener);
    }
    if (emu_queue_fault(EMU_QUEUE_LAYOUT) != 0) {
        memcpy(shifted.numbers, (const unsigned char *)record + 1, sizeof shifted.numbers);
        record = &shifted;
    }
    if (emu_queue_fault(EMU_QUEUE_LATE) != 0) {
        hold_record(listener, record);
    } else {
        put_record(listener, record);
    }
}

bool
emu_uvm_wanted(enum emu_uvm_type type)
{
    const struct emu_listener *listener;

    EMU_SEEK(listener, listeners, (listener->enabled >> type & 1) != 0);
    return listener != NULL;
}

static void
write_record(const struct record *record)
{
    assert(record->bytes[0] <= LAST_TYPE);
    records_made++;
    for (struct emu_listener *l = listeners; l != NULL; l = l->next) {
        if ((l->enabled >> record->bytes[0] & 1) != 0) {
            deliver(l, record);
        }
    }
}

/* The time in nanoseconds, by the clock that the module uses. */
static uint64_t
now(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC_RAW, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* The module's index of a processor: 0 is the host, 1 the first device. */
static unsigned char
processor_of(uint64_t places)
{
    bool host = (places & ~EMU_DEVICE_BITS) != 0 || places == 0;

    return (unsigned char)(host ? 0 : __builtin_ctzll(places) + 1);
}

static uint64_t
processors_of(uint64_t places)
{
    return (places & EMU_DEVICE_BITS) << 1 | ((places & ~EMU_DEVICE_BITS) != 0);
}

/* ---- records of each type ---- */

/* The bytes from `at` to the end of its unit (a power of two), but at most to `stop`. */
static size_t
part_at(CUdeviceptr at, CUdeviceptr stop, size_t unit)
{
    size_t rest = unit - (size_t)(at & (unit - 1));

    return rest < stop - at ? rest : (size_t)(stop - at);
}

/* The module works in blocks of 2 MiB, and takes about a nanosecond for 50 bytes. */
void
emu_uvm_migrated(CUdeviceptr start, size_t size, uint64_t from, uint64_t to,
                 enum emu_uvm_cause cause)
{
    if (!emu_uvm_wanted(EMU_UVM_MIGRATION)) {
        return;
    }
    for (CUdeviceptr at = start, stop = start + size; at < stop;) {
        size_t part = part_at(at, stop, EMU_BLOCK);
        uint64_t begun = now(), ended = begun + part / 50;

        write_record(&(struct record){
            {EMU_UVM_MIGRATION, (unsigned char)cause, processor_of(from), processor_of(to)},
            {at, part, begun, ended, 0, begun, ended}});
        at += part;
    }
}

/* The host faults page by page. The record names the thread whose call noticed the fault. */
void
emu_uvm_host_faulted(CUdeviceptr start, size_t size, bool write)
{
    uint64_t thread = (uint64_t)syscall(SYS_gettid) << 32 | (uint32_t)getpid();

    for (size_t offset = 0; emu_uvm_wanted(EMU_UVM_CPU_FAULT) && offset < size;
         offset += emu_config()->page) {
        write_record(
            &(struct record){{EMU_UVM_CPU_FAULT, write ? 2 : 1}, {start + offset, now(), thread}});
    }
}

/* Devices fault in units of 64 KiB. */
enum { FAULT = 64 << 10 };

size_t
emu_device_faults(CUdeviceptr start, size_t size)
{
    return (size_t)((start + size + FAULT - 1) / FAULT - start / FAULT);
}

void
emu_uvm_device_faulted(CUdeviceptr start, size_t size, uint64_t device, bool write)
{
    CUdeviceptr stop = start + size;

    for (CUdeviceptr at = start; emu_uvm_wanted(EMU_UVM_GPU_FAULT) && at < stop;
         at += part_at(at, stop, FAULT)) {
        uint64_t time = now();

        write_record(&(struct record){{EMU_UVM_GPU_FAULT, 0, write ? 2 : 1, processor_of(device)},
                                      {at, time, time}});
    }
}

void
emu_uvm_duplicated(CUdeviceptr start, size_t size, uint64_t places)
{
    size_t page = emu_config()->page;

    for (size_t offset = 0; emu_uvm_wanted(EMU_UVM_DUPLICATE) && offset < size; offset += page) {
        write_record(&(struct record){{EMU_UVM_DUPLICATE},
                                      {processors_of(places), start + offset, page, now()}});
    }
}

void
emu_uvm_unduplicated(CUdeviceptr start, size_t size, uint64_t place)
{
    size_t page = emu_config()->page;

    for (size_t offset = 0; emu_uvm_wanted(EMU_UVM_DUPLICATE_END) && offset < size;
         offset += page) {
        write_record(&(struct record){{EMU_UVM_DUPLICATE_END, processor_of(place)},
                                      {start + offset, page, now()}});
    }
}

/* Writes a record for each block of 2 MiB. The cause is the policy of the pages. */
void
emu_uvm_mapped_remotely(CUdeviceptr start, size_t size, uint64_t from, uint64_t to)
{
    enum { BY_POLICY = 3 };

    for (CUdeviceptr at = start, stop = start + size;
         emu_uvm_wanted(EMU_UVM_MAP_REMOTE) && at < stop;) {
        size_t part = part_at(at, stop, EMU_BLOCK);
        uint64_t time = now();

        write_record(
            &(struct record){{EMU_UVM_MAP_REMOTE, processor_of(from), processor_of(to), BY_POLICY},
                             {at, part, time, time}});
        at += part;
    }
}

void
emu_uvm_evicted(CUdeviceptr start, size_t size, uint64_t from, uint64_t to, CUdeviceptr incoming)
{
    write_record(&(struct record){{EMU_UVM_EVICTION, processor_of(from), processor_of(to)},
                                  {start, incoming, size, now()}});
}
