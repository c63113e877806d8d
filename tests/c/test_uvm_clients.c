/* The emulated event queues of the nvidia-uvm module: several clients, refusals, and full queues. */
#include "uvm_client.h"

TEST(every_client_gets_every_record)
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

TEST(the_past_is_not_recorded)
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

TEST(wrong_requests_are_refused)
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

TEST(processors_have_their_uuids)
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
TEST(branches_differ_in_their_requests)
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

TEST(a_full_queue_counts_what_it_drops)
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

TEST(a_queue_is_polled_beside_files_of_the_kernel)
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

TEST(a_thread_drains_while_pages_move)
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
TEST(wild_indices_do_no_harm)
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

TEST_MAIN(open_queues)
