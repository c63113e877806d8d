/* uvm_client.h: a client of the emulated event queues: its queue, and the sums of the records that it
 * drains. */
#ifndef UVM_CLIENT_H
#define UVM_CLIENT_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "emulator_client.h"

enum { BLOCK = 2 << 20, RECORD = 64, COUNT = 4096 };
enum {
    CPU_FAULT = 1,
    MIGRATION,
    GPU_FAULT,
    DUPLICATE = 7,
    DUPLICATE_END,
    MAP_REMOTE = 13,
    EVICTION
};
enum { REQUESTED = 1, COHERENCE = 2, EVICTED = 4 };
static const uint64_t ALL = 0x7ffe;
static int wrong_file, space_file;

struct init {
    uint64_t records, count, control;
    uint8_t processor[16];
    uint32_t all, space, status, requested, granted, more[9];
};
struct control {
    uint32_t get_ahead, get_behind, put_ahead, put_behind;
    uint64_t dropped[64];
};
struct queue {
    int file;
    size_t count;
    unsigned char *records;
    struct control *control;
};

/* What a drain finds. Migrations by the processors' indices: 0 is the host. */
struct sums {
    uint64_t records, moved[3][3], by_cause[6], count[16], bytes[16];
};

static inline void
open_queues(const char *path)
{
    int files[4];

    open_emulator(path);
    CHECK_EQUAL(emu.files(files, 4), 2);
    wrong_file = files[0];
    space_file = files[1];
}

static inline void *
pages(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED);
    return memory;
}

static inline uint32_t
set_types(const struct queue *queue, unsigned long request, uint64_t types)
{
    struct {
        uint64_t types;
        uint32_t status, more[5];
    } argument = {types, 99, {0}};

    CHECK_EQUAL(emu.ioctl(queue->file, request, &argument), 0);
    return argument.status;
}

static inline struct queue
open_queue(size_t count)
{
    struct queue queue = {.count = count,
                          .records = pages(count * RECORD < PAGE ? PAGE : count * RECORD),
                          .control = pages(PAGE),
                          .file = emu.open("/dev/nvidia-uvm-tools", O_RDWR | O_CLOEXEC)};
    struct init init = {.records = (uint64_t)(uintptr_t)queue.records,
                        .count = count,
                        .control = (uint64_t)(uintptr_t)queue.control,
                        .all = 1,
                        .space = (uint32_t)space_file,
                        .requested = 1};

    CHECK(queue.file >= 0);
    CHECK_EQUAL(emu.ioctl(queue.file, 56, &init), 0);
    CHECK_EQUAL(init.status, 0);
    CHECK_EQUAL(set_types(&queue, 58, ALL), 0);
    return queue;
}

static inline void
close_queue(const struct queue *queue)
{
    CHECK_EQUAL(emu.close(queue->file), 0);
    CHECK_EQUAL(
        munmap(queue->records, queue->count * RECORD < PAGE ? PAGE : queue->count * RECORD), 0);
    CHECK_EQUAL(munmap(queue->control, PAGE), 0);
}

static inline uint64_t
u64_at(const unsigned char *record, size_t offset)
{
    uint64_t value;

    memcpy(&value, record + offset, sizeof value);
    return value;
}

static inline void
add_record(struct sums *sums, const unsigned char *record)
{
    int type = record[0];

    sums->records++;
    CHECK(type < 16);
    sums->count[type]++;
    if (type == MIGRATION) {
        uint64_t begin = u64_at(record, 24), end = u64_at(record, 32);
        CHECK(record[1] < 6 && record[2] < 3 && record[3] < 3);
        CHECK(begin != 0 && begin <= end);
        CHECK(u64_at(record, 8) / BLOCK == (u64_at(record, 8) + u64_at(record, 16) - 1) / BLOCK);
        sums->moved[record[2]][record[3]] += u64_at(record, 16);
        sums->by_cause[record[1]] += u64_at(record, 16);
    }
    sums->bytes[type] += type == DUPLICATE || type == EVICTION         ? u64_at(record, 24)
                         : type == DUPLICATE_END || type == MAP_REMOTE ? u64_at(record, 16)
                                                                       : 0;
}

static inline void
flush(void)
{
    uint32_t status[8] = {99};

    CHECK_EQUAL(emu.ioctl(space_file, 67, status), 0);
    CHECK_EQUAL(status[0], 0);
}

/* Flushes, and takes what the queue has. */
static inline struct sums
drained(const struct queue *queue)
{
    struct sums sums = {0};
    uint32_t get = queue->control->get_behind, put;

    flush();
    put = __atomic_load_n(&queue->control->put_behind, __ATOMIC_ACQUIRE);
    for (; get != put; get = (get + 1) & (uint32_t)(queue->count - 1)) {
        add_record(&sums, queue->records + (size_t)get * RECORD);
    }
    __atomic_store_n(&queue->control->get_ahead, get, __ATOMIC_RELEASE);
    __atomic_store_n(&queue->control->get_behind, get, __ATOMIC_RELEASE);
    return sums;
}

static inline void
store(CUdeviceptr ptr, size_t size)
{
    memset((void *)(uintptr_t)ptr, 1, size);
}

#endif
