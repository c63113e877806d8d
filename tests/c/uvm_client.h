/* uvm_client.h: a client of the emulated event queues: its calls of the module and of the driver,
 * its queue, and the sums of the records that it drains. Knows nothing of the extension. */
#ifndef UVM_CLIENT_H
#define UVM_CLIENT_H

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "check.h"
#include "symbols.h"

#define FUNCTIONS(X)                          \
    X(alloc, cuMemAllocManaged, 6000)         \
    X(mem_free, cuMemFree, 3020)              \
    X(advise, cuMemAdvise, 12020)             \
    X(prefetch, cuMemPrefetchAsync, 12020)    \
    X(discard, cuMemDiscardBatchAsync, 13000) \
    X(stream_create, cuStreamCreate, 2000)    \
    X(ctx_set, cuCtxSetCurrent, 4000)         \
    X(retain, cuDevicePrimaryCtxRetain, 7000) \
    X(uuid, cuDeviceGetUuid, 11040)           \
    X(init, cuInit, 2000)

static struct {
#define X(member, name, version) PFN_##name##_v##version member;
    FUNCTIONS(X)
#undef X
    int (*touch)(CUdeviceptr ptr, size_t size, int device, int write);
    int (*open)(const char *path, int flags);
    int (*ioctl)(int file, unsigned long request, void *argument);
    int (*poll)(struct pollfd *files, unsigned long count, int milliseconds);
    int (*close)(int file);
    int (*files)(int *files, int most);
    int (*disturb)(const char *name, unsigned int value);
} emu;

enum { PAGE = 4096, MIB = 1 << 20, BLOCK = 2 << 20, RECORD = 64, COUNT = 4096 };
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
static const CUmemLocation HOST = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0};
static const CUmemLocation DEV0 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static const CUmemLocation DEV1 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};
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
open_emulator(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    PFN_cuGetProcAddress_v12000 lookup;
    CUdriverProcAddressQueryResult status;
    CUcontext context;
    void *symbol;
    int files[4];

    CHECK(library != NULL);
    load(library, "cuGetProcAddress_v2", (void *)&lookup);
#define X(member, name, version)                                 \
    CHECK_EQUAL(lookup(#name, &symbol, version, 0, &status), 0); \
    memcpy(&emu.member, &symbol, sizeof symbol);
    FUNCTIONS(X)
#undef X
    load(library, "emu_touch", (void *)&emu.touch);
    load(library, "emu_uvm_open", (void *)&emu.open);
    load(library, "emu_uvm_ioctl", (void *)&emu.ioctl);
    load(library, "emu_uvm_poll", (void *)&emu.poll);
    load(library, "emu_uvm_close", (void *)&emu.close);
    load(library, "emu_uvm_files", (void *)&emu.files);
    load(library, "emu_uvm_disturb", (void *)&emu.disturb);
    CHECK_EQUAL(emu.files(files, 4), 0);
    CHECK_EQUAL(emu.init(0), 0);
    CHECK_EQUAL(emu.retain(&context, 1), 0);
    CHECK_EQUAL(emu.retain(&context, 0), 0);
    CHECK_EQUAL(emu.ctx_set(context), 0);
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

static inline CUdeviceptr
managed(size_t size)
{
    CUdeviceptr ptr = 0;

    CHECK_EQUAL(emu.alloc(&ptr, size, CU_MEM_ATTACH_GLOBAL), 0);
    return ptr;
}

static inline void
store(CUdeviceptr ptr, size_t size)
{
    memset((void *)(uintptr_t)ptr, 1, size);
}

#endif
