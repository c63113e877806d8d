/* The emulated driver's own behaviour, where no answer of a real driver can be compared: the order
 * in which queued work runs, what moves and is counted, threads. tests/emulator/ has the rest. */
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#include "emulator_client.h"

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

TEST(pages_move_and_are_counted)
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

TEST(discarded_bytes_are_poisoned)
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

static void
write_first_page(void *argument)
{
    *(unsigned char *)argument = 9;
}

TEST(kernels_touch_for_their_device)
{
    CUdeviceptr a = managed(2 * MIB);
    unsigned char *bytes = (unsigned char *)(uintptr_t)a;

    memset(bytes + PAGE, 1, PAGE);
    CHECK_EQUAL(emu.prefetch(a + PAGE, PAGE, DEV1, 0, NULL), 0);
    emu.counters_clear();
    CHECK_EQUAL(emu.launch(NULL, write_first_page, bytes), 0);
    CHECK_EQUAL(emu.launch(NULL, write_first_page, bytes + PAGE), 0);
    CHECK_EQUAL(location(a, (size_t)2 * PAGE), 100);
    CHECK_EQUAL(counted().gpu_faults, 2);
    CHECK_EQUAL(counted().dtod, PAGE);
    CHECK_EQUAL(counted().cpu_faults, 0);
    CHECK_EQUAL(bytes[0], 9);
    CHECK_EQUAL(bytes[PAGE], 9);
    CHECK_EQUAL(bytes[PAGE + 1], 1);
    CHECK_EQUAL(emu.mem_free(a), 0);
}

TEST(host_functions_touch_for_the_host)
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
TEST(moves_lose_no_store)
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

TEST(lazy_streams_wait_to_be_asked)
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

TEST(streams_wait_for_events_and_for_the_legacy_stream)
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

TEST(streams_with_work_are_destroyed_at_once)
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

TEST(host_functions_may_not_call_the_driver)
{
    int answer = -1;

    CHECK_EQUAL(emu.host_func(NULL, call_the_driver, &answer), 0);
    CHECK_EQUAL(emu.ctx_sync(), 0);
    CHECK_EQUAL(answer, CUDA_ERROR_NOT_PERMITTED);
    CHECK_EQUAL(emu.launch(NULL, call_the_driver, &answer), 0);
    CHECK_EQUAL(emu.launch(NULL, NULL, NULL), CUDA_ERROR_INVALID_VALUE);
}

/* ---- threads ---- */

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

TEST(threads_share_a_stream)
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

TEST_MAIN(open_emulator)
