/* The emulated event queues of the nvidia-uvm module: records against arithmetic, refusals, full
 * queues and disturbances.  Takes the library's path; knows nothing of the extension. */
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

static void
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

static void *
pages(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED);
    return memory;
}

static uint32_t
set_types(const struct queue *queue, unsigned long request, uint64_t types)
{
    struct {
        uint64_t types;
        uint32_t status, more[5];
    } argument = {types, 99, {0}};

    CHECK_EQUAL(emu.ioctl(queue->file, request, &argument), 0);
    return argument.status;
}

static struct queue
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

static void
close_queue(const struct queue *queue)
{
    CHECK_EQUAL(emu.close(queue->file), 0);
    CHECK_EQUAL(
        munmap(queue->records, queue->count * RECORD < PAGE ? PAGE : queue->count * RECORD), 0);
    CHECK_EQUAL(munmap(queue->control, PAGE), 0);
}

static uint64_t
u64_at(const unsigned char *record, size_t offset)
{
    uint64_t value;

    memcpy(&value, record + offset, sizeof value);
    return value;
}

static void
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

static void
flush(void)
{
    uint32_t status[8] = {99};

    CHECK_EQUAL(emu.ioctl(space_file, 67, status), 0);
    CHECK_EQUAL(status[0], 0);
}

/* Flushes, and takes what the queue has. */
static struct sums
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

static CUdeviceptr
managed(size_t size)
{
    CUdeviceptr ptr = 0;

    CHECK_EQUAL(emu.alloc(&ptr, size, CU_MEM_ATTACH_GLOBAL), 0);
    return ptr;
}

static void
store(CUdeviceptr ptr, size_t size)
{
    memset((void *)(uintptr_t)ptr, 1, size);
}

/* ---- records ---- */

/* The oracles of the design, with the numbers of an H100 for whole blocks. */
static void
moves_are_recorded_to_the_byte(void)
{
    enum { SIZE = 8 * MIB };
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(SIZE);
    struct sums s;

    CHECK_EQUAL(emu.prefetch(a, SIZE, DEV0, 0, NULL), 0);
    CHECK_EQUAL(drained(&queue).records, 0); /* untouched */
    CHECK_EQUAL(emu.mem_free(a), 0);
    a = managed(SIZE);
    store(a, SIZE);
    s = drained(&queue);
    CHECK_EQUAL(s.count[CPU_FAULT], SIZE / PAGE);
    CHECK_EQUAL(s.records, SIZE / PAGE);
    CHECK_EQUAL(emu.prefetch(a, SIZE, DEV0, 0, NULL), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.moved[0][1], SIZE);
    CHECK_EQUAL(s.by_cause[REQUESTED], SIZE);
    CHECK_EQUAL(s.count[MIGRATION], SIZE / BLOCK);
    CHECK_EQUAL(s.records, SIZE / BLOCK);
    CHECK_EQUAL(emu.prefetch(a, SIZE, DEV0, 0, NULL), 0);
    CHECK_EQUAL(drained(&queue).records, 0); /* repeated */
    CHECK_EQUAL(emu.prefetch(a, SIZE, DEV1, 0, NULL), 0);
    CHECK_EQUAL(drained(&queue).moved[1][2], SIZE);
    CHECK_EQUAL(emu.prefetch(a, SIZE, HOST, 0, NULL), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.moved[2][0], SIZE);
    CHECK_EQUAL(s.by_cause[REQUESTED], SIZE);
    CHECK_EQUAL(emu.touch(a, SIZE, 0, 0), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.moved[0][1], SIZE);
    CHECK_EQUAL(s.by_cause[COHERENCE], SIZE);
    CHECK_EQUAL(s.count[GPU_FAULT], SIZE / (64 << 10));
    store(a, 3 * PAGE);
    s = drained(&queue);
    CHECK_EQUAL(s.moved[1][0], 3 * PAGE);
    CHECK_EQUAL(s.by_cause[COHERENCE], 3 * PAGE);
    CHECK_EQUAL(s.count[CPU_FAULT], 3);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
discards_move_nothing(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);
    size_t size = BLOCK;
    CUstream stream;

    CHECK_EQUAL(emu.stream_create(&stream, CU_STREAM_NON_BLOCKING), 0);
    store(a, BLOCK);
    (void)drained(&queue);
    CHECK_EQUAL(emu.discard(&a, &size, 1, 0, stream), 0);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, stream), 0);
    CHECK_EQUAL(drained(&queue).records, 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
copies_of_read_mostly_pages_are_recorded(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);
    struct sums s;

    store(a, BLOCK);
    CHECK_EQUAL(emu.advise(a, BLOCK, CU_MEM_ADVISE_SET_READ_MOSTLY, DEV0), 0);
    (void)drained(&queue);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.moved[0][1], BLOCK);
    CHECK_EQUAL(s.count[DUPLICATE], BLOCK / PAGE);
    CHECK_EQUAL(s.bytes[DUPLICATE], BLOCK);
    CHECK_EQUAL(*(volatile char *)(uintptr_t)a, 1);
    CHECK_EQUAL(drained(&queue).records, 0); /* the host reads its copy */
    CHECK_EQUAL(emu.touch(a, MIB, 0, 1), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.count[DUPLICATE_END], MIB / PAGE);
    CHECK_EQUAL(s.bytes[DUPLICATE_END], MIB);
    CHECK_EQUAL(s.count[MIGRATION], 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
remote_access_is_recorded_once(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(2 * BLOCK);
    struct sums s;

    store(a, 2 * BLOCK);
    CHECK_EQUAL(emu.advise(a, 2 * BLOCK, CU_MEM_ADVISE_SET_ACCESSED_BY, DEV0), 0);
    (void)drained(&queue);
    CHECK_EQUAL(emu.touch(a, 2 * BLOCK, 0, 0), 0);
    CHECK_EQUAL(emu.touch(a, 2 * BLOCK, 0, 1), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.count[MAP_REMOTE], 2);
    CHECK_EQUAL(s.bytes[MAP_REMOTE], 2 * BLOCK);
    CHECK_EQUAL(s.records, 2);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
evictions_are_recorded_block_by_block(void)
{
    size_t size = (size_t)600 * MIB, gone = (size_t)176 * MIB;
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(size), b = managed(size);
    struct sums s;

    store(a, BLOCK);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    CHECK_EQUAL(emu.prefetch(a + BLOCK, size - BLOCK, DEV0, 0, NULL), 0);
    (void)drained(&queue);
    CHECK_EQUAL(emu.prefetch(b, size, DEV0, 0, NULL), 0);
    s = drained(&queue);
    CHECK_EQUAL(s.count[EVICTION], gone / BLOCK);
    CHECK_EQUAL(s.bytes[EVICTION], gone);
    CHECK_EQUAL(s.by_cause[EVICTED], gone);
    CHECK_EQUAL(s.moved[1][0], gone);
    CHECK_EQUAL(emu.mem_free(a), 0);
    CHECK_EQUAL(emu.mem_free(b), 0);
    close_queue(&queue);
}

static uint64_t
clock_now(void)
{
    struct timespec time;

    CHECK_EQUAL(clock_gettime(CLOCK_MONOTONIC_RAW, &time), 0);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void
records_name_addresses_times_and_threads(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);
    uint64_t before = clock_now();
    const unsigned char *record = queue.records;

    store(a + 5 * PAGE, PAGE);
    flush();
    CHECK_EQUAL(record[0], CPU_FAULT);
    CHECK_EQUAL(u64_at(record, 8), a + 5 * PAGE);
    CHECK(u64_at(record, 16) >= before && u64_at(record, 16) <= clock_now());
    CHECK_EQUAL((pid_t)(u64_at(record, 24) & 0xffffffff), getpid());
    CHECK_EQUAL((pid_t)(u64_at(record, 24) >> 32), syscall(SYS_gettid));
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV1, 0, NULL), 0);
    record += RECORD;
    CHECK_EQUAL(record[0], MIGRATION);
    CHECK_EQUAL(u64_at(record, 8), a + 5 * PAGE);
    CHECK_EQUAL(record[3], 2);
    CHECK(u64_at(record, 24) >= before);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

/* ---- clients ---- */

static void
every_client_gets_every_record(void)
{
    struct queue first = open_queue(COUNT), second = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);

    CHECK_EQUAL(set_types(&second, 59, ALL & ~((uint64_t)1 << MIGRATION)), 0);
    store(a, BLOCK);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    CHECK_EQUAL(drained(&first).records, BLOCK / PAGE + 1);
    CHECK_EQUAL(drained(&second).records, 1);
    close_queue(&first);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, HOST, 0, NULL), 0);
    CHECK_EQUAL(drained(&second).moved[1][0], BLOCK);
    CHECK_EQUAL(set_types(&second, 59, ALL), 0);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    CHECK_EQUAL(drained(&second).records, 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&second);
}

static void
the_past_is_not_recorded(void)
{
    CUdeviceptr a = managed(BLOCK);
    struct queue queue;

    store(a, BLOCK);
    queue = open_queue(COUNT);
    CHECK_EQUAL(drained(&queue).records, 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static uint32_t
refused(int file, uint64_t records, uint64_t count, uint64_t control, int space)
{
    struct init init = {.records = records,
                        .count = count,
                        .control = control,
                        .space = (uint32_t)space,
                        .status = 99};

    CHECK_EQUAL(emu.ioctl(file, 56, &init), 0);
    return init.status;
}

static void
wrong_requests_are_refused(void)
{
    unsigned char *memory = pages(2 * PAGE);
    uint64_t records = (uint64_t)(uintptr_t)memory, control = records + PAGE;
    int file = emu.open("/dev/nvidia-uvm-tools", O_RDWR);
    const struct queue queue = {.file = file};

    CHECK_EQUAL(emu.open("/dev/nvidia-uvm", O_RDWR), -1);
    CHECK_EQUAL(errno, ENOENT);
    CHECK_EQUAL(set_types(&queue, 58, ALL), 0x1f);
    CHECK_EQUAL(refused(file, records, 64, control, wrong_file), 0x16);
    CHECK_EQUAL(refused(file, records, 63, control, space_file), 0x1f);
    CHECK_EQUAL(refused(file, records, 0, control, space_file), 0x1f);
    CHECK_EQUAL(refused(file, records, 1, control, space_file), 0x1f);
    CHECK_EQUAL(refused(file, records + 64, 64, control, space_file), 0x1e);
    CHECK_EQUAL(refused(file, records, 64, 0, space_file), 0x1e);
    CHECK_EQUAL(refused(file, records, 64, control, space_file), 0);
    CHECK_EQUAL(refused(file, records, 64, control, space_file), 0x1f); /* it has one */
    CHECK_EQUAL(emu.ioctl(file, 76, memory), -1);
    CHECK_EQUAL(errno, EINVAL);
    CHECK_EQUAL(emu.ioctl(file, 58, NULL), -1);
    CHECK_EQUAL(errno, EFAULT);
    CHECK_EQUAL(emu.ioctl(file + 1, 58, memory), -1);
    CHECK_EQUAL(errno, EBADF);
    CHECK_EQUAL(emu.ioctl(wrong_file, 67, memory), -1);
    CHECK_EQUAL(emu.close(file), 0);
    CHECK_EQUAL(emu.close(file), -1);
    CHECK_EQUAL(errno, EBADF);
    CHECK_EQUAL(munmap(memory, 2 * PAGE), 0);
}

static void
processors_have_their_uuids(void)
{
    unsigned char table[33 * 16];
    CUuuid uuid;
    struct {
        uint64_t table;
        uint32_t status, more[5];
    } argument = {(uint64_t)(uintptr_t)table, 99, {0}};

    memset(table, 0, sizeof table);
    CHECK_EQUAL(emu.ioctl(space_file, 64, &argument), 0);
    CHECK_EQUAL(argument.status, 0);
    for (int i = 0; i < 2; i++) {
        CHECK_EQUAL(emu.uuid(&uuid, i), 0);
        CHECK_EQUAL(memcmp(table + (size_t)(i + 1) * 16, uuid.bytes, 16), 0);
    }
    CHECK(table[0] != 0 && table[3 * 16] == 0);
}

/* The words behind the addresses: status and version, or the other way round. */
static void
queue_words(uint32_t first, uint32_t second, uint32_t first_then, uint32_t second_then)
{
    unsigned char *memory = pages(2 * PAGE);
    int file = emu.open("/dev/nvidia-uvm-tools", O_RDWR);
    struct init init = {.records = (uint64_t)(uintptr_t)memory,
                        .count = 64,
                        .control = (uint64_t)(uintptr_t)memory + PAGE,
                        .space = (uint32_t)space_file,
                        .status = first,
                        .requested = second};

    CHECK_EQUAL(emu.ioctl(file, 56, &init), 0);
    CHECK_EQUAL(init.status, first_then);
    CHECK_EQUAL(init.requested, second_then);
    CHECK_EQUAL(emu.close(file), 0);
    CHECK_EQUAL(munmap(memory, 2 * PAGE), 0);
}

static void
list_words(uint32_t first, uint32_t second, uint32_t first_then, uint32_t second_then)
{
    unsigned char table[33 * 16];
    struct {
        uint64_t table;
        uint32_t first, second, more[4];
    } argument = {(uint64_t)(uintptr_t)table, first, second, {0}};

    CHECK_EQUAL(emu.ioctl(space_file, 64, &argument), 0);
    CHECK_EQUAL(argument.first, first_then);
    CHECK_EQUAL(argument.second, second_then);
}

/* As in the open kernel modules 550.163, 560.35 and 565.77. */
static void
branches_differ_in_their_requests(void)
{
    CHECK_EQUAL(emu.disturb("branch", 550), 0);
    queue_words(99, 1, 0, 1);
    queue_words(99, 0, 0x1f, 0);
    list_words(0, 99, 3, 0);
    CHECK_EQUAL(emu.disturb("branch", 560), 0);
    queue_words(99, 1, 99, 0x1f);
    queue_words(1, 99, 1, 0);
    list_words(0, 99, 0, 0x1f);
    list_words(1, 99, 1, 0);
    CHECK_EQUAL(emu.disturb("branch", 565), 0);
    queue_words(99, 98, 0, 98);
    list_words(98, 99, 0, 99);
    CHECK_EQUAL(emu.disturb("branch", 0), 0);
}

static void
a_full_queue_counts_what_it_drops(void)
{
    struct queue queue = open_queue(64);
    struct pollfd polled = {.fd = queue.file, .events = POLLIN};
    CUdeviceptr a = managed(BLOCK);

    store(a, 30 * PAGE);
    flush();
    CHECK_EQUAL(emu.poll(&polled, 1, 0), 0);
    CHECK_EQUAL(emu.poll(&polled, 1, 3), 0);
    store(a + 30 * PAGE, 70 * PAGE);
    flush();
    CHECK_EQUAL(emu.poll(&polled, 1, -1), 1);
    CHECK_EQUAL(polled.revents, POLLIN);
    CHECK_EQUAL(queue.control->dropped[CPU_FAULT], 100 - 63);
    CHECK_EQUAL(drained(&queue).records, 63);
    store(a + 100 * PAGE, 40 * PAGE);
    CHECK_EQUAL(drained(&queue).records, 40); /* around the end */
    CHECK_EQUAL(queue.control->dropped[CPU_FAULT], 100 - 63);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
    CHECK_EQUAL(emu.poll(&polled, 1, 0), 1);
    CHECK_EQUAL(polled.revents, POLLNVAL);
}

static void
a_queue_is_polled_beside_files_of_the_kernel(void)
{
    struct queue queue = open_queue(64);
    CUdeviceptr a = managed(BLOCK);
    int ends[2];
    struct pollfd polled[2] = {{queue.file, POLLIN, 0}, {0, POLLIN, 0}};

    CHECK_EQUAL(pipe(ends), 0);
    polled[1].fd = ends[0];
    CHECK_EQUAL(emu.poll(polled, 2, 2), 0);
    CHECK_EQUAL(write(ends[1], "x", 1), 1);
    CHECK_EQUAL(emu.poll(polled, 2, -1), 1);
    CHECK_EQUAL(polled[0].revents, 0);
    CHECK_EQUAL(polled[1].revents, POLLIN);
    store(a, 40 * PAGE);
    flush();
    CHECK_EQUAL(emu.poll(polled, 2, -1), 2);
    CHECK_EQUAL(polled[0].revents, POLLIN);
    CHECK_EQUAL(close(ends[1]), 0);
    CHECK_EQUAL(close(ends[0]), 0);
    CHECK_EQUAL(emu.poll(polled, 9, 0), -1);
    CHECK_EQUAL(errno, EINVAL);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

struct drainer {
    struct queue queue;
    _Atomic bool stop;
    uint64_t records;
};

static void *
drain_until_stopped(void *argument)
{
    struct drainer *drainer = argument;
    struct pollfd polled = {.fd = drainer->queue.file, .events = POLLIN};

    while (!drainer->stop) {
        CHECK(emu.poll(&polled, 1, 1) >= 0);
        drainer->records += drained(&drainer->queue).records;
    }
    return NULL;
}

static void
a_thread_drains_while_pages_move(void)
{
    enum { ROUNDS = 3000 };
    struct drainer drainer = {.queue = open_queue(64)};
    CUdeviceptr a = managed(4 * MIB);
    pthread_t thread;

    CHECK_EQUAL(set_types(&drainer.queue, 59, ALL & ~((uint64_t)1 << MIGRATION)), 0);
    store(a, 4 * MIB);
    CHECK_EQUAL(pthread_create(&thread, NULL, drain_until_stopped, &drainer), 0);
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_EQUAL(emu.prefetch(a, 4 * MIB, i % 2 == 0 ? DEV0 : DEV1, 0, NULL), 0);
    }
    drainer.stop = true;
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    drainer.records += drained(&drainer.queue).records;
    CHECK(drainer.records > 0);
    CHECK_EQUAL(drainer.records + drainer.queue.control->dropped[MIGRATION], 2 * ROUNDS);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&drainer.queue);
}

/* A client's indices are in its own memory, so they can have any value. */
static void
wild_indices_do_no_harm(void)
{
    struct queue queue = open_queue(64);
    CUdeviceptr a = managed(BLOCK);

    for (uint32_t i = 0; i < 200; i++) {
        queue.control->get_ahead = i * 0x9e3779b9u;
        queue.control->put_behind = i * 0x85ebca6bu;
        store(a + (CUdeviceptr)i * PAGE, PAGE);
        flush();
    }
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

/* ---- disturbances ---- */

static struct sums
disturbed(const char *name, unsigned int value, uint64_t *dropped)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);
    struct sums s;

    CHECK_EQUAL(emu.disturb(name, value), 0);
    store(a, 100 * PAGE);
    s = drained(&queue);
    *dropped = queue.control->dropped[CPU_FAULT];
    CHECK_EQUAL(emu.disturb(name, 0), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
    return s;
}

static void
records_are_dropped_and_lost(void)
{
    uint64_t dropped = 0;

    CHECK_EQUAL(disturbed("drop", 10, &dropped).records, 90);
    CHECK_EQUAL(dropped, 10);
    CHECK_EQUAL(disturbed("lose", 4, &dropped).records, 75);
    CHECK_EQUAL(dropped, 0);
    CHECK_EQUAL(emu.disturb("nonsense", 1), -1);
}

static void
garbage_comes_between_records(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);
    size_t garbage = 0;

    CHECK_EQUAL(emu.disturb("garbage", 5), 0);
    store(a, 100 * PAGE);
    flush();
    CHECK_EQUAL(queue.control->put_behind, 120);
    for (size_t i = 0; i < 120; i++) {
        const unsigned char *record = queue.records + i * RECORD;
        bool ours =
            record[0] == CPU_FAULT && u64_at(record, 8) >= a && u64_at(record, 8) < a + 100 * PAGE;
        garbage += !ours;
    }
    CHECK_EQUAL(garbage, 20);
    CHECK_EQUAL(emu.disturb("garbage", 0), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
late_records_wait_for_flushes(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);

    CHECK_EQUAL(emu.disturb("late", 3), 0);
    store(a, 10 * PAGE);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    CHECK_EQUAL(drained(&queue).records, 0);
    CHECK_EQUAL(drained(&queue).records, 0);
    CHECK_EQUAL(drained(&queue).records, 11);
    store(a, PAGE);
    flush();
    CHECK_EQUAL(emu.disturb("late", 0), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue); /* with records that were never delivered */
}

static void
an_unknown_layout_says_other_sizes(void)
{
    struct queue queue = open_queue(COUNT);
    CUdeviceptr a = managed(BLOCK);

    CHECK_EQUAL(emu.disturb("layout", 1), 0);
    store(a, BLOCK);
    CHECK_EQUAL(emu.prefetch(a, BLOCK, DEV0, 0, NULL), 0);
    CHECK_EQUAL(queue.records[(size_t)BLOCK / PAGE * RECORD], MIGRATION);
    CHECK(u64_at(queue.records + (size_t)BLOCK / PAGE * RECORD, 16) != BLOCK);
    CHECK_EQUAL(emu.disturb("layout", 0), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
    close_queue(&queue);
}

static void
the_device_can_be_away(void)
{
    unsigned char *memory = pages(2 * PAGE);
    uint64_t records = (uint64_t)(uintptr_t)memory;
    int file;

    CHECK_EQUAL(emu.disturb("absent", 1), 0);
    CHECK_EQUAL(emu.open("/dev/nvidia-uvm-tools", O_RDWR), -1);
    CHECK_EQUAL(errno, ENOENT);
    CHECK_EQUAL(emu.disturb("absent", 0), 0);
    CHECK_EQUAL(emu.disturb("denied", 1), 0);
    CHECK_EQUAL(emu.open("/dev/nvidia-uvm-tools", O_RDWR), -1);
    CHECK_EQUAL(errno, EACCES);
    CHECK_EQUAL(emu.disturb("denied", 0), 0);
    CHECK_EQUAL(emu.disturb("refused", 1), 0);
    file = emu.open("/dev/nvidia-uvm-tools", O_RDWR);
    CHECK_EQUAL(refused(file, records, 64, records + PAGE, space_file), 0x56);
    CHECK_EQUAL(emu.disturb("refused", 0), 0);
    CHECK_EQUAL(refused(file, records, 64, records + PAGE, space_file), 0);
    CHECK_EQUAL(emu.close(file), 0);
    CHECK_EQUAL(munmap(memory, 2 * PAGE), 0);
}

static const check_test tests[] = {
    CHECK_TEST(moves_are_recorded_to_the_byte),
    CHECK_TEST(discards_move_nothing),
    CHECK_TEST(copies_of_read_mostly_pages_are_recorded),
    CHECK_TEST(remote_access_is_recorded_once),
    CHECK_TEST(evictions_are_recorded_block_by_block),
    CHECK_TEST(records_name_addresses_times_and_threads),
    CHECK_TEST(every_client_gets_every_record),
    CHECK_TEST(the_past_is_not_recorded),
    CHECK_TEST(wrong_requests_are_refused),
    CHECK_TEST(processors_have_their_uuids),
    CHECK_TEST(branches_differ_in_their_requests),
    CHECK_TEST(a_full_queue_counts_what_it_drops),
    CHECK_TEST(a_queue_is_polled_beside_files_of_the_kernel),
    CHECK_TEST(a_thread_drains_while_pages_move),
    CHECK_TEST(wild_indices_do_no_harm),
    CHECK_TEST(records_are_dropped_and_lost),
    CHECK_TEST(garbage_comes_between_records),
    CHECK_TEST(late_records_wait_for_flushes),
    CHECK_TEST(an_unknown_layout_says_other_sizes),
    CHECK_TEST(the_device_can_be_away),
};

int
main(int argc, char **argv)
{
    if (argc != 2) {
        (void)fprintf(stderr, "usage: %s EMULATED_DRIVER\n", argv[0]);
        return 2;
    }
    open_emulator(argv[1]);
    return check_run(tests, sizeof tests / sizeof *tests);
}
