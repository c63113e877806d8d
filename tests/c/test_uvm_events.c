/* The emulated event queues of the nvidia-uvm module: records against arithmetic, and disturbances. */
#include "uvm_client.h"

/* ---- records ---- */

/* The oracles of the design, with the numbers of an H100 for whole blocks. */
TEST(moves_are_recorded_to_the_byte)
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

TEST(copies_of_read_mostly_pages_are_recorded)
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

TEST(evictions_are_recorded_block_by_block)
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

TEST(records_name_addresses_times_and_threads)
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

/* ---- disturbances ---- */

TEST(late_records_wait_for_flushes)
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

TEST_MAIN(open_queues)
