/* test_uvm_queue.c: event queues of the module: their records against arithmetic, full and wrapped
 * around, waits and wakes, forks. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver/clock.h"
#include "driver/uvm_abi.h"
#include "driver/uvm_calls.h"
#include "driver/uvm_queue.h"
#include "failing_allocations.h"
#include "memory/allocation.h"
#include "trace/uvm_records.h"
#include "trace/watch.h"
#include "world.h"

enum { PAGE = 4096, BLOCK = 2 << 20, COUNT = 4096, MOST = 100 };

static const CUmemLocation to_host = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0};
static const CUmemLocation to_first = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
static const CUmemLocation to_second = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};

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

    CHECK(mm_allocate_pages(world.cu, size, CU_MEM_ATTACH_GLOBAL, &allocation, &st) == allocation);
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

/* --- files of other processes ------------------------------------------------------------- */

/* A child that keeps the file open until the pipe closes. */
static pid_t
start_holder(int file, int pipe_ends[2])
{
    pid_t child;
    char byte;

    CHECK_EQUAL(pipe(pipe_ends), 0);
    child = fork();
    if (child == 0) {
        (void)close(pipe_ends[1]);
        (void)!read(pipe_ends[0], &byte, 1);
        _exit(file < 0);
    }
    return child;
}

static void
check_files_fail(pid_t process, const char *path, const char *text)
{
    int files[MOST];
    mm_status st;

    CHECK_EQUAL(mm_uvm_files_of(process, path, files, MOST, &st), -1);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK(strstr(st.detail, text) != NULL);
}

/* In a child, to which the kernel refuses pidfd_getfd with this error. */
static void
check_denied(pid_t process, const char *path, int error, const char *text)
{
    enum { PIDFD_GETFD = 438 };
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PIDFD_GETFD, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    pid_t child = fork();
    int status;

    if (child == 0) {
        CHECK_EQUAL(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        CHECK_EQUAL(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
        check_files_fail(process, path, text);
        exit(0); /* which records the coverage */
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
}

TEST(files_of_another_process_are_shared)
{
    char path[] = "/tmp/managedmem-XXXXXX";
    int file = mkstemp(path), pipe_ends[2], files[MOST], status;
    pid_t child = start_holder(file, pipe_ends);
    char longer[sizeof path + 1];
    mm_status st;

    CHECK(snprintf(longer, sizeof longer, "%s0", path) > 0);
    CHECK_EQUAL(write(file, "abc", 3), 3);
    (void)close(file); /* the child has it alone */
    CHECK_EQUAL(mm_uvm_files_of(child, path, files, MOST, &st), 1);
    CHECK_EQUAL(lseek(files[0], 0, SEEK_CUR), 3);
    mm_uvm_files_close(files, 1);
    CHECK_EQUAL(fcntl(files[0], F_GETFD), -1);
    check_files_fail(child, longer, "has no open file of /tmp/managedmem-");
    check_denied(child, path, EACCES, "ptrace_scope");
    check_denied(child, path, EPERM, "ptrace_scope");
    check_denied(child, path, ENOSYS, "Linux 5.6");
    check_denied(child, path, EMFILE, "Too many open files");
    (void)close(pipe_ends[1]);
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    check_files_fail(child, path, "No such process");
    (void)close(pipe_ends[0]);
    (void)unlink(path);
}

/* --- records ------------------------------------------------------------------------------ */

TEST(moves_add_up_to_the_bytes)
{
    enum { SIZE = 5 * BLOCK + 3 * PAGE };
    mm_uvm_queue queue = world_open_queue(COUNT);
    CUdeviceptr a = allocate(SIZE);
    contents found;
    mm_status st;

    store(a, SIZE);
    prefetch(a, SIZE, to_first);
    flush(&queue);
    found = drain(&queue);
    CHECK_EQUAL(found.moved, SIZE);
    CHECK_EQUAL(found.count[MM_UVM_MIGRATION], 6);
    CHECK_EQUAL(found.count[MM_UVM_HOST_FAULT], SIZE / PAGE);
    CHECK_EQUAL(found.records, 6 + SIZE / PAGE);
    CHECK_OK(mm_open_destination(world.cu, to_second, &st), &st);
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

TEST(only_enabled_types_are_recorded)
{
    const uint64_t faults = (uint64_t)1 << MM_UVM_HOST_FAULT;
    mm_uvm_queue queue = world_open_queue(COUNT);
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
TEST(records_wrap_around_the_end)
{
    mm_uvm_queue queue = world_open_queue(64);
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

TEST(a_full_queue_counts_the_rest)
{
    const uint64_t faults = (uint64_t)1 << MM_UVM_HOST_FAULT;
    mm_uvm_queue queue = world_open_queue(64);
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
TEST(wild_indices_are_masked)
{
    mm_uvm_queue queue = world_open_queue(64);
    unsigned char records[MOST][MM_UVM_RECORD_BYTES];

    atomic_store(&queue.control->put_behind, 0xfffffff0u);
    CHECK_EQUAL(mm_uvm_queue_read(&queue, records, MOST), 0x30);
    CHECK_EQUAL(mm_uvm_queue_read(&queue, records, MOST), 0);
    CHECK_EQUAL(queue.control->get_behind, 0x30);
    mm_uvm_queue_close(&queue);
}

TEST(processors_are_ordinals)
{
    mm_uvm_queue queue = world_open_queue(64);
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

TEST(a_wait_ends_when_half_is_full)
{
    mm_uvm_queue queue = world_open_queue(64);
    CUdeviceptr a = allocate(BLOCK);
    uint64_t begin = (mm_monotonic_clock() / 1000000);

    CHECK(!mm_uvm_queue_wait(&queue, 30));
    CHECK((mm_monotonic_clock() / 1000000) - begin >= 29);
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

TEST(another_thread_wakes_a_wait)
{
    mm_uvm_queue queue = world_open_queue(64);
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
TEST(a_dead_file_waits_for_the_wake)
{
    mm_uvm_queue queue = world_open_queue(64);
    uint64_t begin = (mm_monotonic_clock() / 1000000);

    CHECK_EQUAL(queue.calls.close(queue.file), 0);
    CHECK(!mm_uvm_queue_wait(&queue, 30));
    CHECK((mm_monotonic_clock() / 1000000) - begin >= 29);
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
TEST(a_thread_drains_while_pages_move)
{
    enum { ROUNDS = 50, SIZE = 64 * PAGE };
    drainer d = {.queue = world_open_queue(128)};
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

/* --- closing ------------------------------------------------------------------------------ */

static int
find_no_files(int *files, int most)
{
    (void)files, (void)most;
    return 0;
}

TEST(a_process_without_files_of_the_module_has_no_queue)
{
    mm_uvm_calls calls;
    mm_uvm_queue queue;
    mm_status st;

    CHECK_OK(mm_uvm_calls_find(world.cu, &calls, &st), &st);
    calls.files = find_no_files;
    CHECK_EQUAL(mm_uvm_queue_open_through(&calls, &queue, 64, &st), -1);
    CHECK(strstr(st.detail, "this process has no open file of " MM_UVM_DEVICE) != NULL);
}

TEST(a_closed_queue_does_nothing)
{
    mm_uvm_queue queue = world_open_queue(64), zeros = {0};
    unsigned char records[1][MM_UVM_RECORD_BYTES];
    CUdeviceptr a = allocate(BLOCK);
    int files = world_count_files();

    store(a, BLOCK);
    flush(&queue);
    mm_uvm_queue_close(&queue);
    CHECK_EQUAL(world_count_files(), files - 1); /* the eventfd */
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
TEST(a_forked_child_forgets_its_parents_queue)
{
    mm_uvm_queue queue = world_open_queue(COUNT);
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

TEST(a_watch_reads_no_more_events_than_it_has_room_for)
{
    enum { ROOM = 2 };
    mm_event events[ROOM + 1] = {0};
    mm_status st;
    mm_watch *watch = mm_watch_start(world.cu, getpid(), &st);
    CUdeviceptr a = allocate(BLOCK);
    size_t total = 0, count;

    CHECK(watch != NULL);
    store(a, BLOCK);
    prefetch(a, BLOCK, to_first);
    do {
        count = mm_watch_read(watch, events, ROOM);
        CHECK(count <= ROOM);
        CHECK_EQUAL(events[ROOM].start, 0);
        total += count;
    } while (count == ROOM);
    CHECK_EQUAL(total, BLOCK / PAGE + 1);
    CHECK_EQUAL(mm_watch_read_report(watch).lost, 0);
    CHECK_EQUAL(mm_watch_read_report(watch).rejected, 0);
    release(a);
    mm_watch_free(watch);
}

/* This process has no file of the module, because its driver is emulated. */
TEST(a_watch_that_cannot_start_leaves_nothing)
{
    long before = live_bytes();
    mm_status st;

    CHECK(mm_watch_start(NULL, getpid(), &st) == NULL);
    CHECK_EQUAL(live_bytes(), before);
}

/* Files are known by their whole path: another one of that length is none of the module's. */
TEST(files_of_the_module_are_known_by_their_path)
{
    char path[sizeof MM_UVM_DEVICE];
    mm_driver cu = {.emulated = false};
    mm_uvm_calls calls;
    mm_status st;
    int found[MOST], before, file;

    CHECK_EQUAL(snprintf(path, sizeof path, "/tmp/mm%08d", (int)getpid()), (int)sizeof path - 1);
    CHECK_OK(mm_uvm_calls_find(&cu, &calls, &st), &st);
    before = calls.files(found, MOST);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(file >= 0);
    CHECK_EQUAL(calls.files(found, MOST), before);
    CHECK_EQUAL(close(file), 0);
    CHECK_EQUAL(unlink(path), 0);
}

TEST_MAIN(world_open_on_device)
