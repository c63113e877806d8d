/* The emulated driver's own behaviour, where no answer of a real driver can be compared: the order
 * in which queued work runs, what moves and is counted, eviction, faults, threads.  Takes the
 * library's path; knows nothing of the extension. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
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
    X(fill, cuMemsetD8Async, 3020)            \
    X(stream_create, cuStreamCreate, 2000)    \
    X(stream_destroy, cuStreamDestroy, 4000)  \
    X(stream_sync, cuStreamSynchronize, 2000) \
    X(stream_query, cuStreamQuery, 2000)      \
    X(stream_wait, cuStreamWaitEvent, 3020)   \
    X(event_create, cuEventCreate, 2000)      \
    X(event_record, cuEventRecord, 2000)      \
    X(event_destroy, cuEventDestroy, 4000)    \
    X(event_query, cuEventQuery, 2000)        \
    X(host_func, cuLaunchHostFunc, 10000)     \
    X(ctx_sync, cuCtxSynchronize, 2000)       \
    X(ctx_set, cuCtxSetCurrent, 4000)         \
    X(retain, cuDevicePrimaryCtxRetain, 7000) \
    X(mem_info, cuMemGetInfo, 3020)           \
    X(init, cuInit, 2000)

/* bytes to devices, to the host, between devices; faults of the host, one for a page, and of
 * devices, one for 64 KiB; copies, in pages. */
struct counters {
    uint64_t htod, dtoh, dtod, cpu_faults, gpu_faults, duplications;
};

static struct {
#define X(member, name, version) PFN_##name##_v##version member;
    FUNCTIONS(X)
#undef X
    int (*residency)(CUdeviceptr ptr, size_t size, int *type, int *id);
    int (*touch)(CUdeviceptr ptr, size_t size, int device, int write);
    void (*counters)(struct counters *out);
    void (*counters_clear)(void);
    void (*schedule)(int lazy);
    int (*launch)(CUstream stream, void (*fn)(void *), void *argument);
    int (*fail)(const char *function, unsigned int nth, int code, int after);
    int (*fail_fired)(void);
    size_t (*live_allocations)(void);
    size_t (*live_streams)(void);
} emu;

enum { PAGE = 4096, MIB = 1 << 20 };

static const CUmemLocation HOST = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0};
static const CUmemLocation DEV0 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static const CUmemLocation DEV1 = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};
static CUcontext context;

static void
open_emulator(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    PFN_cuGetProcAddress_v12000 lookup;
    CUdriverProcAddressQueryResult status;
    void *symbol;

    CHECK(library != NULL);
    load(library, "cuGetProcAddress_v2", (void *)&lookup);
#define X(member, name, version)                                 \
    CHECK_EQUAL(lookup(#name, &symbol, version, 0, &status), 0); \
    CHECK(symbol != NULL);                                       \
    memcpy(&emu.member, &symbol, sizeof symbol);
    FUNCTIONS(X)
#undef X
    load(library, "emu_residency", (void *)&emu.residency);
    load(library, "emu_touch", (void *)&emu.touch);
    load(library, "emu_counters", (void *)&emu.counters);
    load(library, "emu_counters_clear", (void *)&emu.counters_clear);
    load(library, "emu_schedule", (void *)&emu.schedule);
    load(library, "emu_launch", (void *)&emu.launch);
    load(library, "emu_fail", (void *)&emu.fail);
    load(library, "emu_fail_fired", (void *)&emu.fail_fired);
    load(library, "emu_live_allocations", (void *)&emu.live_allocations);
    load(library, "emu_live_streams", (void *)&emu.live_streams);
    CHECK_EQUAL(emu.init(0), 0);
    CHECK_EQUAL(emu.retain(&context, 1), 0);
    CHECK_EQUAL(emu.retain(&context, 0), 0);
    CHECK_EQUAL(emu.ctx_set(context), 0);
}

static CUdeviceptr
managed(size_t size)
{
    CUdeviceptr ptr = 0;

    CHECK_EQUAL(emu.alloc(&ptr, size, CU_MEM_ATTACH_GLOBAL), 0);
    return ptr;
}

static CUstream
new_stream(unsigned int flags)
{
    CUstream stream = NULL;

    CHECK_EQUAL(emu.stream_create(&stream, flags), 0);
    return stream;
}

/* -1: never touched, 0: in several places, 100 + n: device n, 200 + n: node n of the host. */
static int
location(CUdeviceptr ptr, size_t size)
{
    int type = 9, id = 9;

    CHECK_EQUAL(emu.residency(ptr, size, &type, &id), 0);
    return type <= 0 ? type : type * 100 + id;
}

static struct counters
counted(void)
{
    struct counters now;

    emu.counters(&now);
    return now;
}

/* ---- where pages are ---- */

static void
pages_move_and_are_counted(void)
{
    CUdeviceptr a = managed(4 * MIB);

    emu.counters_clear();
    CHECK_EQUAL(location(a, 4 * MIB), -1);
    CHECK_EQUAL(emu.prefetch(a, 4 * MIB, DEV0, 0, NULL), 0);
    CHECK_EQUAL(location(a, 4 * MIB), 100);
    CHECK_EQUAL(counted().htod, 0);
    CHECK_EQUAL(emu.prefetch(a, MIB, DEV1, 0, NULL), 0);
    CHECK_EQUAL(location(a, 4 * MIB), 0);
    CHECK_EQUAL(location(a, MIB), 101);
    CHECK_EQUAL(counted().dtod, MIB);
    CHECK_EQUAL(emu.prefetch(a, 4 * MIB, HOST, 0, NULL), 0);
    CHECK_EQUAL(counted().dtoh, 4 * MIB);
    CHECK_EQUAL(emu.prefetch(a, 4 * MIB, HOST, 0, NULL), 0);
    CHECK_EQUAL(counted().dtoh, 4 * MIB);
    CHECK_EQUAL(location(a, 4 * MIB), 200);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
host_writes_populate(void)
{
    CUdeviceptr a = managed(2 * MIB);

    ((volatile char *)(uintptr_t)a)[PAGE] = 1;
    CHECK_EQUAL(location(a + PAGE, PAGE), 200);
    CHECK_EQUAL(location(a + 2 * PAGE, PAGE), -1);
    emu.counters_clear();
    CHECK_EQUAL(emu.prefetch(a, 2 * MIB, DEV0, 0, NULL), 0);
    CHECK_EQUAL(counted().htod, PAGE);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
touches_follow_the_advice(void)
{
    CUdeviceptr a = managed(2 * MIB);

    CHECK_EQUAL(emu.prefetch(a, 2 * MIB, HOST, 0, NULL), 0);
    CHECK_EQUAL(emu.advise(a, 2 * MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, DEV0), 0);
    emu.counters_clear();
    CHECK_EQUAL(emu.touch(a, 2 * MIB, 0, 0), 0);
    CHECK_EQUAL(counted().duplications, 2 * MIB / PAGE);
    CHECK_EQUAL(location(a, 2 * MIB), 0);
    CHECK_EQUAL(emu.touch(a, 2 * MIB, 0, 1), 0);
    CHECK_EQUAL(location(a, 2 * MIB), 100);
    CHECK_EQUAL(emu.advise(a, 2 * MIB, CU_MEM_ADVISE_UNSET_READ_MOSTLY, DEV0), 0);
    CHECK_EQUAL(emu.touch(a, PAGE, -1, 0), 0);
    CHECK_EQUAL(counted().cpu_faults, 1);
    CHECK_EQUAL(location(a, PAGE), 200);
    CHECK_EQUAL(emu.advise(a, 2 * MIB, CU_MEM_ADVISE_SET_ACCESSED_BY, DEV0), 0);
    CHECK_EQUAL(emu.touch(a, PAGE, 0, 1), 0);
    CHECK_EQUAL(location(a, PAGE), 200);
    CHECK_EQUAL(counted().gpu_faults, 2 * MIB / (64 << 10));
    CHECK_EQUAL(emu.touch(a, PAGE, 7, 0), -1);
    CHECK_EQUAL(emu.mem_free(a), 0);
    CHECK_EQUAL(emu.touch(a, PAGE, 0, 0), -1);
}

static void
a_full_device_evicts_the_oldest_blocks(void)
{
    size_t size = (size_t)600 * MIB, gone = (size_t)176 * MIB, free_before, free_after, total;
    CUdeviceptr a = managed(size), b = managed(size);

    CHECK_EQUAL(emu.mem_info(&free_before, &total), 0);
    CHECK_EQUAL(emu.prefetch(a, size, DEV0, 0, NULL), 0);
    CHECK_EQUAL(emu.prefetch(b, size, DEV0, 0, NULL), 0);
    CHECK_EQUAL(location(a, gone), 200);
    CHECK_EQUAL(location(a + gone, size - gone), 100);
    CHECK_EQUAL(location(b, size), 100);
    CHECK_EQUAL(emu.mem_free(a), 0);
    CHECK_EQUAL(emu.mem_free(b), 0);
    CHECK_EQUAL(emu.mem_info(&free_after, &total), 0);
    CHECK_EQUAL(free_after, free_before);
}

static void
discarded_bytes_are_poisoned(void)
{
    CUdeviceptr a = managed(2 * MIB), inside;
    size_t size = PAGE;
    unsigned char *bytes = (unsigned char *)(uintptr_t)a;
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);

    memset(bytes, 1, 2 * MIB);
    CHECK_EQUAL(emu.discard(&a, &size, 1, 0, stream), 0);
    CHECK_EQUAL(bytes[0], 0xDB);
    CHECK_EQUAL(bytes[PAGE], 1);
    /* Of pages that the range holds in part, nothing. */
    inside = a + 4 * PAGE - 1;
    size = PAGE + 2;
    CHECK_EQUAL(emu.discard(&inside, &size, 1, 0, stream), 0);
    CHECK_EQUAL(bytes[4 * PAGE - 1], 1);
    CHECK_EQUAL(bytes[4 * PAGE], 0xDB);
    CHECK_EQUAL(bytes[5 * PAGE], 1);
    size = PAGE;
    CHECK_EQUAL(emu.discard(&inside, &size, 1, 0, stream), 0);
    CHECK_EQUAL(bytes[3 * PAGE], 1);
    CHECK_EQUAL(emu.stream_destroy(stream), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

/* ---- accesses of the host and of kernels ---- */

/* The number of pages of a range that the kernel has mapped for the host. */
static size_t
mapped(CUdeviceptr ptr, size_t size)
{
    uint64_t entries[512];
    size_t count = size / PAGE, found = 0;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

    CHECK(file >= 0 && count <= sizeof entries / sizeof *entries);
    CHECK_EQUAL(
        pread(file, entries, count * sizeof *entries, (off_t)(ptr / PAGE * sizeof *entries)),
        (ssize_t)(count * sizeof *entries));
    for (size_t i = 0; i < count; i++) {
        found += (size_t)(entries[i] >> 63);
    }
    CHECK_EQUAL(close(file), 0);
    return found;
}

static void
the_host_moves_pages_by_touching_them(void)
{
    CUdeviceptr a = managed(2 * MIB);
    unsigned char *bytes = (unsigned char *)(uintptr_t)a;

    memset(bytes, 1, 2 * MIB);
    CHECK_EQUAL(emu.prefetch(a, 2 * MIB, DEV0, 0, NULL), 0);
    CHECK_EQUAL(mapped(a, 2 * MIB), 0);
    emu.counters_clear();
    bytes[3 * PAGE] = 2;
    CHECK_EQUAL(mapped(a, 2 * MIB), 1);
    CHECK_EQUAL(location(a + (CUdeviceptr)3 * PAGE, PAGE), 200);
    CHECK_EQUAL(location(a, (size_t)3 * PAGE), 100);
    CHECK_EQUAL(counted().dtoh, PAGE);
    CHECK_EQUAL(counted().cpu_faults, 1);
    CHECK_EQUAL(emu.prefetch(a, 2 * MIB, DEV1, 0, NULL), 0);
    CHECK_EQUAL(counted().htod, PAGE);
    CHECK_EQUAL(counted().dtod, 2 * MIB - PAGE);
    CHECK_EQUAL(bytes[3 * PAGE], 2);
    CHECK_EQUAL(bytes[3 * PAGE + 1], 1);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
write_first_page(void *argument)
{
    *(unsigned char *)argument = 9;
}

static void
kernels_touch_for_their_device(void)
{
    CUdeviceptr a = managed(2 * MIB);
    unsigned char *bytes = (unsigned char *)(uintptr_t)a;

    memset(bytes + PAGE, 1, PAGE);
    CHECK_EQUAL(emu.prefetch(a + PAGE, PAGE, DEV1, 0, NULL), 0);
    emu.counters_clear();
    CHECK_EQUAL(emu.launch(NULL, write_first_page, bytes), 0);
    CHECK_EQUAL(emu.launch(NULL, write_first_page, bytes + PAGE), 0);
    CHECK_EQUAL(location(a, (size_t)2 * PAGE), 100);
    CHECK_EQUAL(mapped(a, 2 * MIB), 0);
    CHECK_EQUAL(counted().gpu_faults, 2);
    CHECK_EQUAL(counted().dtod, PAGE);
    CHECK_EQUAL(counted().cpu_faults, 0);
    CHECK_EQUAL(bytes[0], 9);
    CHECK_EQUAL(bytes[PAGE], 9);
    CHECK_EQUAL(bytes[PAGE + 1], 1);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
host_functions_touch_for_the_host(void)
{
    CUdeviceptr a = managed(2 * MIB);

    CHECK_EQUAL(emu.prefetch(a, 2 * MIB, DEV0, 0, NULL), 0);
    CHECK_EQUAL(emu.host_func(NULL, write_first_page, (void *)(uintptr_t)a), 0);
    CHECK_EQUAL(emu.ctx_sync(), 0);
    CHECK_EQUAL(location(a, PAGE), 200);
    CHECK_EQUAL(location(a + PAGE, 2 * MIB - PAGE), 100);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void *
store_for_a_while(void *argument)
{
    unsigned char *bytes = argument;

    for (unsigned int round = 1; round <= 200; round++) {
        for (size_t page = 0; page < 64; page++) {
            bytes[page * PAGE] = (unsigned char)round;
        }
        for (size_t page = 0; page < 64; page++) {
            CHECK_EQUAL(bytes[page * PAGE], round);
        }
    }
    return NULL;
}

/* One thread stores while this one moves the pages. */
static void
moves_lose_no_store(void)
{
    CUdeviceptr a = managed(2 * MIB);
    pthread_t thread;

    CHECK_EQUAL(pthread_create(&thread, NULL, store_for_a_while, (void *)(uintptr_t)a), 0);
    for (int i = 0; i < 200; i++) {
        CHECK_EQUAL(emu.prefetch(a, 2 * MIB, i % 2 == 0 ? DEV0 : HOST, 0, NULL), 0);
        CHECK_EQUAL(emu.fill(a + MIB, (unsigned char)i, MIB, NULL), 0);
    }
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(((unsigned char *)(uintptr_t)a)[63 * PAGE], 200);
    CHECK_EQUAL(((unsigned char *)(uintptr_t)a)[2 * MIB - 1], 199);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

/* ---- order ---- */

static void
lazy_streams_wait_to_be_asked(void)
{
    CUdeviceptr a = managed(2 * MIB);
    CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);

    emu.schedule(1);
    CHECK_EQUAL(emu.fill(a, 5, 2 * MIB, stream), 0);
    CHECK_EQUAL(*(unsigned char *)(uintptr_t)a, 0);
    CHECK_EQUAL(emu.stream_query(stream), CUDA_ERROR_NOT_READY);
    CHECK_EQUAL(emu.stream_query(stream), 0);
    CHECK_EQUAL(*(unsigned char *)(uintptr_t)a, 5);
    CHECK_EQUAL(emu.fill(a, 6, 2 * MIB, stream), 0);
    CHECK_EQUAL(emu.stream_sync(NULL), 0);
    CHECK_EQUAL(*(unsigned char *)(uintptr_t)a, 5);
    emu.schedule(0);
    CHECK_EQUAL(*(unsigned char *)(uintptr_t)a, 6);
    CHECK_EQUAL(emu.stream_destroy(stream), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
streams_wait_for_events_and_for_the_legacy_stream(void)
{
    CUdeviceptr a = managed(2 * MIB);
    unsigned char *byte = (unsigned char *)(uintptr_t)a;
    CUstream own = new_stream(CU_STREAM_NON_BLOCKING), blocking = new_stream(CU_STREAM_DEFAULT);
    CUevent event;

    CHECK_EQUAL(emu.event_create(&event, CU_EVENT_DISABLE_TIMING), 0);
    emu.schedule(1);
    CHECK_EQUAL(emu.fill(a, 1, 1, own), 0);
    CHECK_EQUAL(emu.event_record(event, own), 0);
    CHECK_EQUAL(emu.event_query(event), CUDA_ERROR_NOT_READY);
    CHECK_EQUAL(*byte, 1);
    CHECK_EQUAL(emu.fill(a, 2, 1, own), 0);
    CHECK_EQUAL(emu.event_record(event, own), 0);
    CHECK_EQUAL(emu.fill(a, 3, 1, own), 0);
    CHECK_EQUAL(emu.stream_wait(blocking, event, 0), 0);
    CHECK_EQUAL(emu.stream_sync(blocking), 0);
    CHECK_EQUAL(*byte, 2);
    CHECK_EQUAL(emu.fill(a, 4, 1, blocking), 0);
    CHECK_EQUAL(emu.fill(a, 5, 1, NULL), 0);
    CHECK_EQUAL(emu.fill(a + 1, 9, 1, blocking), 0);
    CHECK_EQUAL(emu.stream_sync(blocking), 0);
    CHECK_EQUAL(*byte, 5);
    emu.schedule(0);
    CHECK_EQUAL(*byte, 3);
    CHECK_EQUAL(emu.event_destroy(event), 0);
    CHECK_EQUAL(emu.stream_destroy(own), 0);
    CHECK_EQUAL(emu.stream_destroy(blocking), 0);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

struct held_stream {
    CUstream stream;
    bool lazy, runs, go_on;
};

static void
hold(void *argument)
{
    struct held_stream *held = argument;

    __atomic_store_n(&held->runs, true, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&held->go_on, __ATOMIC_ACQUIRE)) {
        usleep(100);
    }
}

static void *
run_held_stream(void *argument)
{
    struct held_stream *held = argument;

    CHECK_EQUAL(emu.ctx_set(context), 0);
    CHECK_EQUAL(emu.host_func(held->stream, hold, held), 0);
    if (held->lazy) {
        CHECK_EQUAL(emu.stream_sync(held->stream), 0);
    }
    return NULL;
}

/* Another thread runs a function of the stream meanwhile. The work behind it is done all the same. */
static void
check_destroying_a_held_stream(CUdeviceptr a, bool lazy)
{
    struct held_stream held = {.stream = new_stream(CU_STREAM_NON_BLOCKING), .lazy = lazy};
    size_t streams = emu.live_streams();
    volatile unsigned char *byte = (volatile unsigned char *)(uintptr_t)a;
    pthread_t thread;

    *byte = 0;
    CHECK_EQUAL(pthread_create(&thread, NULL, run_held_stream, &held), 0);
    while (!__atomic_load_n(&held.runs, __ATOMIC_ACQUIRE)) {
        usleep(100);
    }
    CHECK_EQUAL(emu.fill(a, 5, PAGE, held.stream), 0);
    CHECK_EQUAL(emu.stream_query(held.stream), CUDA_ERROR_NOT_READY);
    CHECK_EQUAL(emu.stream_destroy(held.stream), 0);
    CHECK_EQUAL(emu.live_streams(), streams - 1);
    CHECK_EQUAL(emu.stream_query(held.stream), CUDA_ERROR_INVALID_HANDLE);
    CHECK_EQUAL(*byte, 0);
    __atomic_store_n(&held.go_on, true, __ATOMIC_RELEASE);
    CHECK_EQUAL(emu.ctx_sync(), 0);
    CHECK_EQUAL(*byte, 5);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_EQUAL(emu.live_streams(), streams - 1);
}

static void
streams_with_work_are_destroyed_at_once(void)
{
    CUdeviceptr a = managed(PAGE);

    for (int lazy = 0; lazy < 2; lazy++) {
        emu.schedule(lazy);
        check_destroying_a_held_stream(a, lazy != 0);
    }
    emu.schedule(0);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

static void
call_the_driver(void *argument)
{
    *(int *)argument = (int)emu.stream_sync(NULL);
}

static void
host_functions_may_not_call_the_driver(void)
{
    int answer = -1;

    CHECK_EQUAL(emu.host_func(NULL, call_the_driver, &answer), 0);
    CHECK_EQUAL(emu.ctx_sync(), 0);
    CHECK_EQUAL(answer, CUDA_ERROR_NOT_PERMITTED);
    CHECK_EQUAL(emu.launch(NULL, call_the_driver, &answer), 0);
    CHECK_EQUAL(emu.launch(NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* ---- faults and threads ---- */

static void
armed_failures_happen_once(void)
{
    size_t before = emu.live_allocations();
    CUdeviceptr a = 0;
    int fired = emu.fail_fired();

    CHECK_EQUAL(emu.fail("cuMemAllocManaged", 2, CUDA_ERROR_OUT_OF_MEMORY, 0), 0);
    CHECK_EQUAL(emu.fail("*", 0, 1, 0), -1);
    a = managed(PAGE);
    CHECK_EQUAL(emu.alloc(&a, PAGE, CU_MEM_ATTACH_GLOBAL), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(emu.live_allocations(), before + 1);
    CHECK_EQUAL(emu.fail("*", 1, CUDA_ERROR_UNKNOWN, 1), 0);
    CHECK_EQUAL(emu.mem_free(a), CUDA_ERROR_UNKNOWN);
    CHECK_EQUAL(emu.live_allocations(), before);
    CHECK_EQUAL(emu.fail_fired(), fired + 2);
}

static void
rest(void *argument)
{
    usleep((useconds_t)(uintptr_t)argument);
}

static void *
work_a_while(void *argument)
{
    CUstream shared = argument;

    CHECK_EQUAL(emu.ctx_set(context), 0);
    for (int i = 0; i < 40; i++) {
        CUdeviceptr a = managed((size_t)(i + 1) * 3000);
        CUstream stream = new_stream(i % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT);

        CHECK_EQUAL(emu.host_func(shared, rest, (void *)(uintptr_t)50), 0);
        CHECK_EQUAL(emu.prefetch(a, 3000, DEV0, 0, stream), 0);
        CHECK_EQUAL(emu.fill(a, (unsigned char)i, 3000, shared), 0);
        CHECK_EQUAL(emu.prefetch(a, 3000, HOST, 0, NULL), 0);
        CHECK_EQUAL(emu.stream_sync(shared), 0);
        CHECK_EQUAL(((unsigned char *)(uintptr_t)a)[2999], i);
        CHECK_EQUAL(emu.stream_destroy(stream), 0);
        CHECK_EQUAL(emu.mem_free(a), 0);
    }
    return NULL;
}

static void
threads_share_a_stream(void)
{
    CUstream shared = new_stream(CU_STREAM_NON_BLOCKING);
    size_t allocations = emu.live_allocations(), streams = emu.live_streams();

    for (int lazy = 0; lazy < 2; lazy++) {
        emu.schedule(lazy);
        check_threads(4, work_a_while, shared);
    }
    emu.schedule(0);
    CHECK_EQUAL(emu.live_allocations(), allocations);
    CHECK_EQUAL(emu.live_streams(), streams);
    CHECK_EQUAL(emu.stream_destroy(shared), 0);
}

static const check_test tests[] = {
    CHECK_TEST(pages_move_and_are_counted),
    CHECK_TEST(host_writes_populate),
    CHECK_TEST(touches_follow_the_advice),
    CHECK_TEST(a_full_device_evicts_the_oldest_blocks),
    CHECK_TEST(discarded_bytes_are_poisoned),
    CHECK_TEST(the_host_moves_pages_by_touching_them),
    CHECK_TEST(kernels_touch_for_their_device),
    CHECK_TEST(host_functions_touch_for_the_host),
    CHECK_TEST(moves_lose_no_store),
    CHECK_TEST(lazy_streams_wait_to_be_asked),
    CHECK_TEST(streams_wait_for_events_and_for_the_legacy_stream),
    CHECK_TEST(streams_with_work_are_destroyed_at_once),
    CHECK_TEST(host_functions_may_not_call_the_driver),
    CHECK_TEST(armed_failures_happen_once),
    CHECK_TEST(threads_share_a_stream),
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
