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

/* Indices are below the number of records; a queue is full when one record is free. */
struct control {
    _Atomic uint32_t get_ahead, get_behind, put_ahead, put_behind;
    uint64_t dropped[LAST_TYPE + 1];
};
_Static_assert(sizeof(struct control) == EMU_UVM_CONTROL_BYTES, "not the module's layout");

struct held {
    uint64_t due; /* the flush that delivers it */
    unsigned char bytes[RECORD];
};

struct emu_listener {
    struct emu_listener *next;
    int file;
    unsigned char *records; /* NULL before the queue is made */
    struct control *control;
    uint32_t count;
    uint64_t enabled; /* bits of types */
    struct held *held; /* oldest first */
    size_t held_count;
};

static struct emu_listener *listeners;
static uint64_t flushes, records_made;
static struct {
    bool set; /* else as configured */
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
    for (struct emu_listener *l = listeners; l != NULL; l = l->next) {
        if (l->file == file) {
            return l;
        }
    }
    return NULL;
}

bool
emu_listener_new(int file)
{
    struct emu_listener *listener = calloc(1, sizeof *listener);

    if (listener == NULL) {
        return false;
    }
    listener->file = file;
    listener->next = listeners;
    listeners = listener;
    return true;
}

void
emu_listener_delete(struct emu_listener *listener)
{
    struct emu_listener **link = &listeners;

    while (*link != listener) {
        link = &(*link)->next;
    }
    *link = listener->next;
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
put_record(struct emu_listener *listener, const unsigned char *bytes)
{
    struct control *control = listener->control;
    uint32_t mask = listener->count - 1;
    uint32_t put = atomic_load(&control->put_behind) & mask;
    uint32_t get = atomic_load(&control->get_ahead) & mask;

    if (((put + 1) & mask) == get) {
        control->dropped[bytes[0] & LAST_TYPE]++;
        return;
    }
    atomic_store(&control->put_ahead, (put + 1) & mask);
    memcpy(listener->records + (size_t)put * RECORD, bytes, RECORD);
    atomic_store(&control->put_behind, (put + 1) & mask);
}

static void
hold_record(struct emu_listener *listener, const unsigned char *bytes)
{
    size_t count = listener->held_count;
    struct held *held = realloc(listener->held, (count + 1) * sizeof *held);

    if (held == NULL) {
        listener->control->dropped[bytes[0] & LAST_TYPE]++;
        return;
    }
    held[count].due = flushes + emu_queue_fault(EMU_QUEUE_LATE);
    memcpy(held[count].bytes, bytes, RECORD);
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
            put_record(l, l->held[ready++].bytes);
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
    unsigned char bytes[RECORD];
    uint64_t state = records_made * 0x9E3779B97F4A7C15u;

    for (size_t i = 0; i < RECORD; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        bytes[i] = (unsigned char)(state >> 24);
    }
    if (records_made % 2 == 0) {
        bytes[0] = EMU_UVM_MIGRATION;
    }
    put_record(listener, bytes);
}

static bool
is_nth(enum emu_queue_fault fault)
{
    unsigned int nth = emu_queue_fault(fault);

    return nth != 0 && records_made % nth == 0;
}

static void
deliver(struct emu_listener *listener, const unsigned char *bytes)
{
    unsigned char shifted[RECORD] = {bytes[0]};

    if (is_nth(EMU_QUEUE_DROP)) {
        listener->control->dropped[bytes[0]]++;
        return;
    }
    if (is_nth(EMU_QUEUE_LOSE)) {
        return;
    }
    if (is_nth(EMU_QUEUE_GARBAGE)) {
        put_garbage(listener);
    }
    if (emu_queue_fault(EMU_QUEUE_LAYOUT) != 0) {
        memcpy(shifted + 8, bytes + 1, RECORD - 8);
        bytes = shifted;
    }
    if (emu_queue_fault(EMU_QUEUE_LATE) != 0) {
        hold_record(listener, bytes);
    } else {
        put_record(listener, bytes);
    }
}

bool
emu_uvm_wanted(enum emu_uvm_type type)
{
    for (const struct emu_listener *l = listeners; l != NULL; l = l->next) {
        if ((l->enabled >> type & 1) != 0) {
            return true;
        }
    }
    return false;
}

static void
write_record(unsigned char *bytes)
{
    assert(bytes[0] <= LAST_TYPE);
    records_made++;
    for (struct emu_listener *l = listeners; l != NULL; l = l->next) {
        if ((l->enabled >> bytes[0] & 1) != 0) {
            deliver(l, bytes);
        }
    }
}

static void
put_u32(unsigned char *bytes, size_t offset, uint32_t value)
{
    memcpy(bytes + offset, &value, sizeof value);
}

static void
put_u64(unsigned char *bytes, size_t offset, uint64_t value)
{
    memcpy(bytes + offset, &value, sizeof value);
}

/* The clock of the module's times. */
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
    uint64_t devices = places & EMU_DEVICE_BITS;
    unsigned char index = 1;

    if ((places & ~EMU_DEVICE_BITS) != 0 || devices == 0) {
        return 0;
    }
    while ((devices & 1) == 0) {
        devices >>= 1;
        index++;
    }
    return index;
}

static uint64_t
processors_of(uint64_t places)
{
    return (places & EMU_DEVICE_BITS) << 1 | ((places & ~EMU_DEVICE_BITS) != 0);
}

/* ---- records of each type ---- */

/* The module works in blocks of 2 MiB, and takes about a nanosecond for 50 bytes. */
void
emu_uvm_migrated(CUdeviceptr start, size_t size, uint64_t from, uint64_t to,
                 enum emu_uvm_cause cause)
{
    CUdeviceptr stop = start + size, end;

    if (!emu_uvm_wanted(EMU_UVM_MIGRATION)) {
        return;
    }
    for (CUdeviceptr at = start; at < stop; at = end) {
        unsigned char bytes[RECORD] = {EMU_UVM_MIGRATION, (unsigned char)cause, processor_of(from),
                                       processor_of(to)};
        uint64_t begun = now();

        end = at / EMU_BLOCK * EMU_BLOCK + EMU_BLOCK;
        end = end < stop ? end : stop;
        put_u64(bytes, 8, at);
        put_u64(bytes, 16, end - at);
        put_u64(bytes, 24, begun);
        put_u64(bytes, 32, begun + (end - at) / 50);
        put_u64(bytes, 48, begun);
        put_u64(bytes, 56, begun + (end - at) / 50);
        write_record(bytes);
    }
}

/* The host faults page by page. The record names the thread whose call noticed it. */
void
emu_uvm_host_faulted(CUdeviceptr start, size_t size, bool write)
{
    if (!emu_uvm_wanted(EMU_UVM_CPU_FAULT)) {
        return;
    }
    for (size_t offset = 0; offset < size; offset += emu_config()->page) {
        unsigned char bytes[RECORD] = {EMU_UVM_CPU_FAULT, write ? 2 : 1};

        put_u64(bytes, 8, start + offset);
        put_u64(bytes, 16, now());
        put_u32(bytes, 24, (uint32_t)getpid());
        put_u32(bytes, 28, (uint32_t)syscall(SYS_gettid));
        write_record(bytes);
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
    if (!emu_uvm_wanted(EMU_UVM_GPU_FAULT)) {
        return;
    }
    for (CUdeviceptr at = start; at < start + size; at = at / FAULT * FAULT + FAULT) {
        unsigned char bytes[RECORD] = {EMU_UVM_GPU_FAULT, 0, write ? 2 : 1, processor_of(device)};
        uint64_t time = now();

        put_u64(bytes, 8, at);
        put_u64(bytes, 16, time);
        put_u64(bytes, 24, time);
        write_record(bytes);
    }
}

void
emu_uvm_duplicated(CUdeviceptr start, size_t size, uint64_t places)
{
    size_t page = emu_config()->page;

    for (size_t offset = 0; emu_uvm_wanted(EMU_UVM_DUPLICATE) && offset < size; offset += page) {
        unsigned char bytes[RECORD] = {EMU_UVM_DUPLICATE};

        put_u64(bytes, 8, processors_of(places));
        put_u64(bytes, 16, start + offset);
        put_u64(bytes, 24, page);
        put_u64(bytes, 32, now());
        write_record(bytes);
    }
}

void
emu_uvm_unduplicated(CUdeviceptr start, size_t size, uint64_t place)
{
    size_t page = emu_config()->page;

    for (size_t offset = 0; emu_uvm_wanted(EMU_UVM_DUPLICATE_END) && offset < size;
         offset += page) {
        unsigned char bytes[RECORD] = {EMU_UVM_DUPLICATE_END, processor_of(place)};

        put_u64(bytes, 8, start + offset);
        put_u64(bytes, 16, page);
        put_u64(bytes, 24, now());
        write_record(bytes);
    }
}

/* In blocks of 2 MiB. The cause is the policy of the pages. */
void
emu_uvm_mapped_remotely(CUdeviceptr start, size_t size, uint64_t from, uint64_t to)
{
    enum { BY_POLICY = 3 };
    CUdeviceptr stop = start + size, end;

    for (CUdeviceptr at = start; emu_uvm_wanted(EMU_UVM_MAP_REMOTE) && at < stop; at = end) {
        unsigned char bytes[RECORD] = {EMU_UVM_MAP_REMOTE, processor_of(from), processor_of(to),
                                       BY_POLICY};
        uint64_t time = now();

        end = at / EMU_BLOCK * EMU_BLOCK + EMU_BLOCK;
        end = end < stop ? end : stop;
        put_u64(bytes, 8, at);
        put_u64(bytes, 16, end - at);
        put_u64(bytes, 24, time);
        put_u64(bytes, 32, time);
        write_record(bytes);
    }
}

void
emu_uvm_evicted(CUdeviceptr start, size_t size, uint64_t from, uint64_t to, CUdeviceptr incoming)
{
    unsigned char bytes[RECORD] = {EMU_UVM_EVICTION, processor_of(from), processor_of(to)};

    put_u64(bytes, 8, start);
    put_u64(bytes, 16, incoming);
    put_u64(bytes, 24, size);
    put_u64(bytes, 32, now());
    write_record(bytes);
}
