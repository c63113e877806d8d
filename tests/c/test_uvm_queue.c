/* test_uvm_queue.c: event queues of the module: their records against arithmetic, full and wrapped
 * around, refusals, waits and wakes, forks.
 *
 * Usage: test_uvm_queue PATH_OF_THE_EMULATED_DRIVER. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver/uvm_queue.h"
#include "memory/allocation.h"
#include "memory/uvm_records.h"
#include "world.h"

enum { PAGE = 4096, BLOCK = 2 << 20, COUNT = 4096, MOST = 100 };

static const CUmemLocation to_host = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0};
static const CUmemLocation to_first = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static const CUmemLocation to_second = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};

static mm_uvm_queue
open_queue(uint32_t count)
{
    mm_uvm_queue queue;
    mm_status st;

    CHECK_OK(mm_uvm_queue_open(world.cu, &queue, count, &st), &st);
    CHECK_OK(mm_uvm_queue_enable(&queue, mm_uvm_types(true), &st), &st);
    return queue;
}

static void
flush(mm_uvm_queue *queue)
{
    mm_status st;

    CHECK_OK(mm_uvm_queue_flush(queue, &st), &st);
}

static CUdeviceptr
allocate(size_t size)
{
    CUdeviceptr allocation;
    mm_status st;

    CHECK(mm_allocate_pages(world.cu, size, &allocation, &st) == allocation);
    return allocation;
}

static void
release(CUdeviceptr start)
{
    mm_status st;

    CHECK_OK(mm_free(world.cu, start, &st), &st);
}

static void
store(CUdeviceptr start, size_t size)
{
    memset((void *)(uintptr_t)start, 1, size);
}

static void
prefetch(CUdeviceptr start, size_t size, CUmemLocation location)
{
    CHECK_EQUAL(world.cu->MemPrefetchAsync(start, size, location, 0, NULL), CUDA_SUCCESS);
}

static uint64_t
u64_at(const unsigned char *record, size_t offset)
{
    uint64_t value;

    memcpy(&value, record + offset, sizeof value);
    return value;
}

/* The records that a queue has now: their number by type, and the sum of the migrations' bytes. */
typedef struct {
    uint64_t records, count[MM_UVM_KNOWN_TYPES], moved;
} contents;

static contents
drain(mm_uvm_queue *queue)
{
    unsigned char records[MOST][MM_UVM_RECORD_BYTES];
    contents found = {0};
    size_t count;

    while ((count = mm_uvm_queue_read(queue, records, MOST)) > 0) {
        CHECK(count <= MOST);
        found.records += count;
        for (size_t i = 0; i < count; i++) {
            CHECK(records[i][0] < MM_UVM_KNOWN_TYPES);
            found.count[records[i][0]]++;
            found.moved += records[i][0] == MM_UVM_MIGRATION ? u64_at(records[i], 16) : 0;
        }
    }
    return found;
}

/* --- records ------------------------------------------------------------------------------ */

static void
moves_add_up_to_the_bytes(void)
{
    enum { SIZE = 5 * BLOCK + 3 * PAGE };
    mm_uvm_queue queue = open_queue(COUNT);
    CUdeviceptr a = allocate(SIZE);
    contents found;

    store(a, SIZE);
    prefetch(a, SIZE, to_first);
    flush(&queue);
    found = drain(&queue);
    CHECK_EQUAL(found.moved, SIZE);
    CHECK_EQUAL(found.count[MM_UVM_MIGRATION], 6);
    CHECK_EQUAL(found.count[MM_UVM_HOST_FAULT], SIZE / PAGE);
    CHECK_EQUAL(found.records, 6 + SIZE / PAGE);
    prefetch(a, BLOCK, to_second);
    prefetch(a, BLOCK, to_host);
    flush(&queue);
    found = drain(&queue);
    CHECK_EQUAL(found.moved, 2 * BLOCK);
    CHECK_EQUAL(found.records, 2);
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, UINT64_MAX), 0);
    release(a);
    mm_uvm_queue_close(&queue);
}

static void
only_enabled_types_are_recorded(void)
{
    const uint64_t faults = (uint64_t)1 << MM_UVM_HOST_FAULT;
    mm_uvm_queue queue = open_queue(COUNT);
    CUdeviceptr a = allocate(BLOCK);
    contents found;

    mm_uvm_queue_disable(&queue, faults);
    store(a, BLOCK);
    prefetch(a, BLOCK, to_first);
    flush(&queue);
    found = drain(&queue);
    CHECK_EQUAL(found.records, 1);
    CHECK_EQUAL(found.moved, BLOCK);
    mm_uvm_queue_disable(&queue, UINT64_MAX);
    prefetch(a, BLOCK, to_host);
    flush(&queue);
    CHECK_EQUAL(drain(&queue).records, 0);
    release(a);
    mm_uvm_queue_close(&queue);
}

/* 40 records at a time in a queue of 64 pass its end four times. */
static void
records_wrap_around_the_end(void)
{
    mm_uvm_queue queue = open_queue(64);
    CUdeviceptr a = allocate(8 * 40 * PAGE);
    unsigned char records[7][MM_UVM_RECORD_BYTES];

    for (size_t round = 0; round < 8; round++) {
        size_t read = 0, count;

        store(a + round * 40 * PAGE, (size_t)40 * PAGE);
        flush(&queue);
        while ((count = mm_uvm_queue_read(&queue, records, 7)) > 0) {
            CHECK_EQUAL(count, 40 - read < 7 ? 40 - read : 7);
            for (size_t i = 0; i < count; i++) {
                CHECK_EQUAL(records[i][0], MM_UVM_HOST_FAULT);
                CHECK_EQUAL(u64_at(records[i], 8), a + (round * 40 + read + i) * PAGE);
            }
            read += count;
        }
        CHECK_EQUAL(read, 40);
    }
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, UINT64_MAX), 0);
    release(a);
    mm_uvm_queue_close(&queue);
}

static void
a_full_queue_counts_the_rest(void)
{
    const uint64_t faults = (uint64_t)1 << MM_UVM_HOST_FAULT;
    mm_uvm_queue queue = open_queue(64);
    CUdeviceptr a = allocate(BLOCK);

    store(a, (size_t)100 * PAGE);
    prefetch(a, BLOCK, to_first);
    flush(&queue);
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, faults), 100 - 63);
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, (uint64_t)1 << MM_UVM_MIGRATION), 1);
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, ~faults), 1);
    CHECK_EQUAL(drain(&queue).records, 63);
    store(a, PAGE); /* back from the device */
    flush(&queue);
    CHECK_EQUAL(drain(&queue).moved, PAGE);
    release(a);
    mm_uvm_queue_close(&queue);
}

/* The control block is memory that anything in the process can overwrite. */
static void
wild_indices_are_masked(void)
{
    mm_uvm_queue queue = open_queue(64);
    unsigned char records[MOST][MM_UVM_RECORD_BYTES];

    atomic_store(&queue.control->put_behind, 0xfffffff0u);
    CHECK_EQUAL(mm_uvm_queue_read(&queue, records, MOST), 0x30);
    CHECK_EQUAL(mm_uvm_queue_read(&queue, records, MOST), 0);
    CHECK_EQUAL(queue.control->get_behind, 0x30);
    mm_uvm_queue_close(&queue);
}

static void
processors_are_ordinals(void)
{
    mm_uvm_queue queue = open_queue(64);
    int16_t processors[MM_UVM_PROCESSORS];
    mm_status st;

    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    CHECK_EQUAL(processors[0], MM_ON_HOST);
    CHECK_EQUAL(processors[1], 0);
    CHECK_EQUAL(processors[2], 1);
    for (int i = 3; i < MM_UVM_PROCESSORS; i++) {
        CHECK_EQUAL(processors[i], MM_NO_PROCESSOR);
    }
    world.cu->device_count = 1; /* as if the second one were another process's */
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    world.cu->device_count = 2;
    CHECK_EQUAL(processors[1], 0);
    CHECK_EQUAL(processors[2], MM_OTHER_PROCESSOR);
    world.fail("cuDeviceGetUuid", 2, 999, 0);
    CHECK_EQUAL(mm_uvm_queue_processors(world.cu, &queue, processors, &st), -1);
    CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
    world.fail_clear();
    mm_uvm_queue_close(&queue);
}

/* --- waiting ------------------------------------------------------------------------------ */

static uint64_t
milliseconds_now(void)
{
    struct timespec time;

    CHECK_EQUAL(clock_gettime(CLOCK_MONOTONIC, &time), 0);
    return (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
}

static void
a_wait_ends_when_half_is_full(void)
{
    mm_uvm_queue queue = open_queue(64);
    CUdeviceptr a = allocate(BLOCK);
    uint64_t begin = milliseconds_now();

    CHECK(!mm_uvm_queue_wait(&queue, 30));
    CHECK(milliseconds_now() - begin >= 29);
    store(a, (size_t)31 * PAGE);
    flush(&queue);
    CHECK(!mm_uvm_queue_wait(&queue, 0));
    store(a + (CUdeviceptr)31 * PAGE, PAGE);
    flush(&queue);
    CHECK(mm_uvm_queue_wait(&queue, -1));
    CHECK_EQUAL(drain(&queue).records, 32);
    CHECK(!mm_uvm_queue_wait(&queue, 0));
    release(a);
    mm_uvm_queue_close(&queue);
}

static void *
wake_soon(void *argument)
{
    const struct timespec pause = {.tv_nsec = 20000000};

    (void)nanosleep(&pause, NULL);
    mm_uvm_queue_wake(argument);
    return NULL;
}

static void
another_thread_wakes_a_wait(void)
{
    mm_uvm_queue queue = open_queue(64);
    pthread_t thread;

    CHECK_EQUAL(pthread_create(&thread, NULL, wake_soon, &queue), 0);
    CHECK(!mm_uvm_queue_wait(&queue, -1));
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    mm_uvm_queue_wake(&queue);
    mm_uvm_queue_wake(&queue);
    CHECK(!mm_uvm_queue_wait(&queue, -1)); /* came before */
    CHECK(!mm_uvm_queue_wait(&queue, 5)); /* both are used up */
    mm_uvm_queue_close(&queue);
}

/* A file in error, which polls as ready for ever, must not make the waiting thread spin. */
static void
a_dead_file_waits_for_the_wake(void)
{
    mm_uvm_queue queue = open_queue(64);
    uint64_t begin = milliseconds_now();

    CHECK_EQUAL(queue.calls.close(queue.file), 0);
    CHECK(!mm_uvm_queue_wait(&queue, 30));
    CHECK(milliseconds_now() - begin >= 29);
    mm_uvm_queue_wake(&queue);
    CHECK(!mm_uvm_queue_wait(&queue, -1));
    mm_uvm_queue_close(&queue);
}

typedef struct {
    mm_uvm_queue queue;
    atomic_bool stop;
    contents found;
} drainer;

static void *
drain_until_told(void *argument)
{
    drainer *d = argument;

    while (!atomic_load(&d->stop)) {
        contents found;
        (void)mm_uvm_queue_wait(&d->queue, -1);
        found = drain(&d->queue);
        d->found.records += found.records;
        d->found.moved += found.moved;
    }
    return NULL;
}

/* A queue of 128 records, of which each round makes 65, so that no round can fill it. */
static void
a_thread_drains_while_pages_move(void)
{
    enum { ROUNDS = 50, SIZE = 64 * PAGE };
    drainer d = {.queue = open_queue(128)};
    CUdeviceptr a = allocate(SIZE);
    pthread_t thread;

    CHECK_EQUAL(pthread_create(&thread, NULL, drain_until_told, &d), 0);
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t put = 0, get = 1;
        store(a, SIZE);
        prefetch(a, SIZE, to_first);
        flush(&d.queue);
        while (put != get) {
            mm_uvm_queue_wake(&d.queue);
            put = atomic_load(&d.queue.control->put_behind);
            get = atomic_load(&d.queue.control->get_behind);
        }
    }
    atomic_store(&d.stop, true);
    mm_uvm_queue_wake(&d.queue);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    /* The first round faults in empty pages, later ones bring them back from the device. */
    CHECK_EQUAL(d.found.moved, (uint64_t)(2 * ROUNDS - 1) * SIZE);
    CHECK_EQUAL(mm_uvm_queue_dropped(&d.queue, UINT64_MAX), 0);
    release(a);
    mm_uvm_queue_close(&d.queue);
}

/* --- opening ------------------------------------------------------------------ */

static int
count_files(void)
{
    int count = 0;

    for (int file = 0; file < 256; file++) {
        count += fcntl(file, F_GETFD) >= 0;
    }
    return count;
}

static void
refuse_to_open(const char *disturbance, int code, const char *sentence)
{
    mm_uvm_queue queue;
    mm_status st;
    int files = count_files();

    CHECK_EQUAL(world.disturb_queue(disturbance, 1), 0);
    CHECK_EQUAL(mm_uvm_queue_open(world.cu, &queue, 64, &st), -1);
    CHECK_EQUAL(world.disturb_queue(disturbance, 0), 0);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK_EQUAL(st.code, code);
    CHECK(strcmp(st.detail, sentence) == 0);
    CHECK_EQUAL(count_files(), files);
    mm_uvm_queue_close(&queue); /* was never open */
}

static void
refusals_say_the_reason(void)
{
    refuse_to_open("absent", ENOENT,
                   "cannot open /dev/nvidia-uvm-tools: No such file or directory. Load the "
                   "nvidia-uvm kernel module; a container needs the device too, as in --device "
                   "/dev/nvidia-uvm-tools");
    refuse_to_open("denied", EACCES,
                   "cannot open /dev/nvidia-uvm-tools: Permission denied. This user needs "
                   "permission to read and write the device");
    refuse_to_open(
        "refused", MM_UVM_NOT_SUPPORTED,
        "the nvidia-uvm kernel module makes no event queue: status 0x56, not supported");
}

/* Of the process's two files the emulated driver lists the wrong one first. */
static void
the_wrong_file_is_passed_over(void)
{
    mm_uvm_queue queue = open_queue(64);
    int files[4];

    CHECK_EQUAL(queue.calls.files(files, 4), 2);
    CHECK_EQUAL(queue.space_file, files[1]);
    mm_uvm_queue_close(&queue);
}

/* --- other answers of the system ---------------------------------------------------------- */

static mm_uvm_calls emulated;
static int answered_errno; /* not 0: every ioctl fails with it */
static uint32_t answered_status;
static unsigned long answered_request; /* the one that is answered so */

static int
no_files(int *files, int most)
{
    (void)files;
    (void)most;
    return 0;
}

static int
wrong_files(int *files, int most)
{
    CHECK(most >= 2);
    CHECK_EQUAL(emulated.files(files, 1), 1);
    files[1] = files[0];
    return 2;
}

/* All arguments are at least as long as that of a flush, and have the status at one of three
 * places. */
static int
answer(int file, unsigned long request, void *argument)
{
    size_t place = request == MM_UVM_MAKE_QUEUE ? 48 : request == MM_UVM_FLUSH ? 0 : 8;

    if (request != answered_request) {
        return emulated.ioctl(file, request, argument);
    }
    if (answered_errno != 0) {
        errno = answered_errno;
        return -1;
    }
    memcpy((char *)argument + place, &answered_status, sizeof answered_status);
    return 0;
}

/* Some modules store the number of processors where others store the status. */
static int
list_with_a_count(int file, unsigned long request, void *argument)
{
    mm_uvm_list_request *list = argument;
    int rc = emulated.ioctl(file, request, argument);

    if (request == MM_UVM_LIST_PROCESSORS) {
        list->status = answered_status != 0 ? answered_status : list->status_or_count;
        list->status_or_count = 3;
    }
    return rc;
}

static void
check_failure(const mm_status *st, int code, const char *sentence)
{
    CHECK_EQUAL(st->kind, MM_TRACE_UNAVAILABLE);
    CHECK_EQUAL(st->code, code);
    if (strcmp(st->detail, sentence) != 0) {
        (void)fprintf(stderr, "%s\n", st->detail);
        exit(1);
    }
}

static void
refuse_through(const mm_uvm_calls *calls, int code, const char *sentence)
{
    mm_uvm_queue queue;
    mm_status st;
    int files = count_files();

    CHECK_EQUAL(mm_uvm_queue_open_through(calls, &queue, 64, &st), -1);
    check_failure(&st, code, sentence);
    CHECK(queue.memory == NULL);
    CHECK_EQUAL(count_files(), files);
}

static void
openings_that_fail_say_the_reason(void)
{
    mm_uvm_calls calls = emulated;
    struct rlimit all, few;

    calls.files = no_files;
    refuse_through(
        &calls, 0,
        "this process has no open file of /dev/nvidia-uvm: the CUDA driver does not use "
        "the nvidia-uvm kernel module here");
    calls.files = wrong_files;
    refuse_through(
        &calls, MM_UVM_ILLEGAL_ACTION,
        "the nvidia-uvm kernel module makes no event queue: status 0x16, illegal action");
    calls.files = emulated.files;
    calls.ioctl = answer;
    answered_request = MM_UVM_MAKE_QUEUE;
    answered_errno = ENOTTY;
    refuse_through(&calls, ENOTTY,
                   "/dev/nvidia-uvm-tools makes no event queue: Inappropriate ioctl for device");
    answered_errno = 0;
    answered_status = 0x77;
    refuse_through(&calls, 0x77,
                   "the nvidia-uvm kernel module makes no event queue: status 0x77, unknown");
    answered_status = MM_UVM_NO_PERMISSION;
    refuse_through(&calls, MM_UVM_NO_PERMISSION,
                   "the nvidia-uvm kernel module makes no event queue: status 0x1b, insufficient "
                   "permissions");
    answered_status = MM_UVM_INVALID_ARGUMENT;
    refuse_through(
        &calls, MM_UVM_INVALID_ARGUMENT,
        "the nvidia-uvm kernel module makes no event queue: status 0x1f, invalid argument");
    answered_status = 0;
    CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &all), 0);
    few = all;
    few.rlim_cur = 0;
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &few), 0);
    refuse_through(&emulated, EMFILE, "cannot make an eventfd: Too many open files");
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &all), 0);
}

/* A file that is made without an allocation. */
static int
open_null(const char *path, int flags)
{
    (void)path;
    return open("/dev/null", flags);
}

static void
memory_may_be_missing(void)
{
    mm_uvm_calls calls = emulated;
    struct rlimit all, few;
    mm_uvm_queue queue;
    mm_status st;
    int files = count_files(), rc;

    calls.open = open_null;
    calls.close = close;
    CHECK_EQUAL(getrlimit(RLIMIT_AS, &all), 0);
    few = all;
    few.rlim_cur = 1 << 20;
    CHECK_EQUAL(setrlimit(RLIMIT_AS, &few), 0);
    rc = mm_uvm_queue_open_through(&calls, &queue, 1 << 16, &st);
    CHECK_EQUAL(setrlimit(RLIMIT_AS, &all), 0);
    CHECK_EQUAL(rc, -1);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK(strncmp(st.detail, "no memory for an event queue of 4", 33) == 0);
    CHECK_EQUAL(count_files(), files);
}

/* Each of a queue's requests fails in both manners. */
static void
check_request(unsigned long request, int (*make)(mm_uvm_queue *, mm_status *),
              const char *sentence, const char *status_sentence)
{
    mm_uvm_queue queue = open_queue(64);
    mm_status st;

    queue.calls.ioctl = answer;
    answered_request = request;
    answered_errno = EPERM;
    CHECK_EQUAL(make(&queue, &st), -1);
    check_failure(&st, EPERM, sentence);
    answered_errno = 0;
    answered_status = MM_UVM_NO_MEMORY;
    CHECK_EQUAL(make(&queue, &st), -1);
    check_failure(&st, MM_UVM_NO_MEMORY, status_sentence);
    answered_status = 0;
    mm_uvm_queue_close(&queue);
}

static int
enable_all(mm_uvm_queue *queue, mm_status *st)
{
    return mm_uvm_queue_enable(queue, UINT64_MAX, st);
}

static int
list(mm_uvm_queue *queue, mm_status *st)
{
    int16_t processors[MM_UVM_PROCESSORS];

    return mm_uvm_queue_processors(world.cu, queue, processors, st);
}

static void
requests_that_fail_say_the_reason(void)
{
    check_request(MM_UVM_ENABLE, enable_all,
                  "/dev/nvidia-uvm-tools records no events: Operation not permitted. This user "
                  "needs permission to read and write the device",
                  "the nvidia-uvm kernel module records no events: status 0x51, no memory");
    check_request(MM_UVM_FLUSH, mm_uvm_queue_flush,
                  "/dev/nvidia-uvm delivers no events: Operation not permitted. This user needs "
                  "permission to read and write the device",
                  "the nvidia-uvm kernel module delivers no events: status 0x51, no memory");
    check_request(MM_UVM_LIST_PROCESSORS, list,
                  "/dev/nvidia-uvm does not list its processors: Operation not permitted. This "
                  "user needs permission to read and write the device",
                  "the nvidia-uvm kernel module does not list its processors: status 0x51, no "
                  "memory");
}

static void
processors_may_be_listed_with_a_count(void)
{
    mm_uvm_queue queue = open_queue(64);
    int16_t processors[MM_UVM_PROCESSORS];
    mm_status st;

    queue.calls.ioctl = list_with_a_count;
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    CHECK_EQUAL(processors[1], 0);
    CHECK_EQUAL(processors[2], 1);
    answered_status = MM_UVM_INVALID_ADDRESS;
    CHECK_EQUAL(list(&queue, &st), -1);
    check_failure(
        &st, MM_UVM_INVALID_ADDRESS,
        "the nvidia-uvm kernel module does not list its processors: status 0x1e, invalid "
        "address");
    answered_status = 0;
    mm_uvm_queue_close(&queue);
}

/* Device 0 has another identifier than CUDA says; of device 1 there is nothing. */
static int
list_a_divided_device(int file, unsigned long request, void *argument)
{
    const mm_uvm_list_request *request_for_list = argument;
    unsigned char *table = (unsigned char *)(uintptr_t)request_for_list->table;
    int rc = emulated.ioctl(file, request, argument);

    if (request == MM_UVM_LIST_PROCESSORS) {
        table[MM_UVM_ID_BYTES] ^= 1;
        memset(table + (size_t)2 * MM_UVM_ID_BYTES, 0, MM_UVM_ID_BYTES);
    }
    return rc;
}

static void
an_instance_of_a_device_is_the_only_one(void)
{
    mm_uvm_queue queue = open_queue(64);
    int16_t processors[MM_UVM_PROCESSORS];
    mm_status st;

    queue.calls.ioctl = list_a_divided_device;
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    CHECK_EQUAL(processors[1], MM_OTHER_PROCESSOR); /* it could be either of two */
    world.cu->device_count = 1;
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    world.cu->device_count = 2;
    CHECK_EQUAL(processors[0], MM_ON_HOST);
    CHECK_EQUAL(processors[1], 0);
    CHECK_EQUAL(processors[2], MM_NO_PROCESSOR);
    mm_uvm_queue_close(&queue);
}

static atomic_int polls;

/* As the module does where it loses a wake: nothing is ready until poll is called again. */
static int
poll_like_a_lost_wake(struct pollfd *files, unsigned long count, int milliseconds)
{
    const struct timespec turn = {.tv_nsec = 1000000L * milliseconds};

    CHECK(milliseconds >= 0);
    (void)nanosleep(&turn, NULL);
    files[0].revents = atomic_fetch_add(&polls, 1) == 0 ? 0 : POLLIN;
    files[1].revents = 0;
    return count == 2 && files[0].revents != 0;
}

static void
a_lost_wake_costs_one_turn(void)
{
    mm_uvm_queue queue = open_queue(64);
    uint64_t begin = milliseconds_now();

    queue.calls.poll = poll_like_a_lost_wake;
    CHECK(mm_uvm_queue_wait(&queue, -1));
    CHECK_EQUAL(polls, 2);
    atomic_store(&polls, 0);
    CHECK(mm_uvm_queue_wait(&queue, 1000));
    CHECK_EQUAL(polls, 2);
    CHECK(milliseconds_now() - begin < 1000);
    mm_uvm_queue_close(&queue);
}

/* On a machine with a GPU the device exists, but this process, whose driver is emulated, has not
 * opened it. */
static void
a_real_driver_asks_the_kernel(void)
{
    mm_driver real = {.emulated = false, .device_count = 1};
    struct rlimit all, few;
    mm_uvm_calls calls;
    mm_uvm_queue queue;
    mm_status st;
    int file, found[4];

    CHECK_OK(mm_uvm_calls_find(&real, &calls, &st), &st);
    CHECK_EQUAL(calls.files(found, 4), 0);
    CHECK_EQUAL(getrlimit(RLIMIT_NOFILE, &all), 0);
    few = all;
    few.rlim_cur = 0;
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &few), 0);
    CHECK_EQUAL(calls.files(found, 4), 0); /* not even the list can be opened */
    CHECK_EQUAL(setrlimit(RLIMIT_NOFILE, &all), 0);
    CHECK_EQUAL(mm_uvm_queue_open(&real, &queue, 64, &st), -1);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK(strstr(st.detail, MM_UVM_DEVICE) != NULL);
    file = calls.open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(file >= 0);
    CHECK_EQUAL(fcntl(file, F_GETFD), FD_CLOEXEC);
    CHECK_EQUAL(calls.ioctl(file, MM_UVM_FLUSH, found), -1);
    CHECK_EQUAL(errno, ENOTTY);
    CHECK_EQUAL(calls.poll(&(struct pollfd){.fd = file, .events = POLLIN}, 1, -1), 1);
    CHECK_EQUAL(calls.close(file), 0);
    CHECK_EQUAL(calls.close(file), -1);
}

static void
an_emulated_driver_may_have_no_queues(void)
{
    mm_driver old = {.emulated = true, .path = "/lib/old.so"};
    mm_uvm_queue queue;
    mm_status st;

    old.library = dlopen(NULL, RTLD_NOW);
    CHECK(old.library != NULL);
    CHECK_EQUAL(mm_uvm_queue_open(&old, &queue, 64, &st), -1);
    check_failure(&st, 0,
                  "the emulated driver /lib/old.so has no event queues: it is of another version");
    mm_uvm_queue_close(&queue);
    CHECK_EQUAL(dlclose(old.library), 0);
}

/* --- closing ------------------------------------------------------------------------------ */

static void
a_closed_queue_does_nothing(void)
{
    mm_uvm_queue queue = open_queue(64), zeros = {0};
    unsigned char records[1][MM_UVM_RECORD_BYTES];
    CUdeviceptr a = allocate(BLOCK);
    int files = count_files();

    store(a, BLOCK);
    flush(&queue);
    mm_uvm_queue_close(&queue);
    CHECK_EQUAL(count_files(), files - 1); /* the eventfd */
    mm_uvm_queue_close(&queue);
    mm_uvm_queue_close(&zeros);
    CHECK_EQUAL(mm_uvm_queue_read(&queue, records, 1), 0);
    CHECK_EQUAL(mm_uvm_queue_dropped(&queue, UINT64_MAX), 0);
    CHECK(!mm_uvm_queue_wait(&queue, -1));
    mm_uvm_queue_wake(&queue);
    mm_uvm_queue_disable(&queue, UINT64_MAX);
    release(a);
}

/* The child has neither the memory nor the module's trust; the parent's queue goes on. */
static void
a_forked_child_forgets_its_parents_queue(void)
{
    mm_uvm_queue queue = open_queue(COUNT);
    CUdeviceptr a = allocate(BLOCK);
    int status;
    pid_t child;

    store(a, BLOCK);
    flush(&queue);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        unsigned char records[1][MM_UVM_RECORD_BYTES];
        bool silent = mm_uvm_queue_read(&queue, records, 1) == 0
                      && mm_uvm_queue_dropped(&queue, UINT64_MAX) == 0
                      && !mm_uvm_queue_wait(&queue, -1);
        int wake_file = queue.wake_file;

        mm_uvm_queue_wake(&queue);
        mm_uvm_queue_close(&queue);
        /* Forgotten, not closed: the number may be another file's by now. */
        _exit(silent && queue.memory == NULL && fcntl(wake_file, F_GETFD) >= 0 ? 0 : 1);
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    CHECK(!mm_uvm_queue_wait(&queue, 0)); /* the child did not wake it */
    CHECK_EQUAL(drain(&queue).count[MM_UVM_HOST_FAULT], BLOCK / PAGE);
    release(a);
    mm_uvm_queue_close(&queue);
}

static const check_test tests[] = {
    CHECK_TEST(moves_add_up_to_the_bytes),
    CHECK_TEST(only_enabled_types_are_recorded),
    CHECK_TEST(records_wrap_around_the_end),
    CHECK_TEST(a_full_queue_counts_the_rest),
    CHECK_TEST(wild_indices_are_masked),
    CHECK_TEST(processors_are_ordinals),
    CHECK_TEST(a_wait_ends_when_half_is_full),
    CHECK_TEST(another_thread_wakes_a_wait),
    CHECK_TEST(a_dead_file_waits_for_the_wake),
    CHECK_TEST(a_thread_drains_while_pages_move),
    CHECK_TEST(refusals_say_the_reason),
    CHECK_TEST(the_wrong_file_is_passed_over),
    CHECK_TEST(openings_that_fail_say_the_reason),
    CHECK_TEST(memory_may_be_missing),
    CHECK_TEST(requests_that_fail_say_the_reason),
    CHECK_TEST(processors_may_be_listed_with_a_count),
    CHECK_TEST(an_instance_of_a_device_is_the_only_one),
    CHECK_TEST(a_lost_wake_costs_one_turn),
    CHECK_TEST(a_real_driver_asks_the_kernel),
    CHECK_TEST(an_emulated_driver_may_have_no_queues),
    CHECK_TEST(a_closed_queue_does_nothing),
    CHECK_TEST(a_forked_child_forgets_its_parents_queue),
};

int
main(int argc, char **argv)
{
    mm_status st;

    CHECK_EQUAL(argc, 2);
    world_open(argv[1]);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    CHECK_OK(mm_uvm_calls_find(world.cu, &emulated, &st), &st);
    return check_run(tests, sizeof tests / sizeof *tests);
}
