/* test_uvm_queue_answers.c: event queues where the system or the module answers otherwise:
 * refusals with their sentences, other layouts of answers, lost wakes. */
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "driver/clock.h"
#include "world.h"

/* --- opening ------------------------------------------------------------------ */

static void
refuse_to_open(const char *disturbance, int code, const char *sentence)
{
    mm_uvm_queue queue;
    mm_status st;
    int files = world_count_files();

    CHECK_EQUAL(world.disturb_queue(disturbance, 1), 0);
    CHECK_EQUAL(mm_uvm_queue_open(world.cu, &queue, 64, &st), -1);
    CHECK_EQUAL(world.disturb_queue(disturbance, 0), 0);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK_EQUAL(st.code, code);
    CHECK(strcmp(st.detail, sentence) == 0);
    CHECK_EQUAL(world_count_files(), files);
    mm_uvm_queue_close(&queue); /* was never open */
}

TEST(refusals_say_the_reason)
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
TEST(the_wrong_file_is_passed_over)
{
    mm_uvm_queue queue = world_open_queue(64);
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
        list->status = answered_status != 0 ? answered_status : list->status_or_input;
        list->status_or_input = 3;
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
    int files = world_count_files();

    CHECK_EQUAL(mm_uvm_queue_open_through(calls, &queue, 64, &st), -1);
    check_failure(&st, code, sentence);
    CHECK(queue.memory == NULL);
    CHECK_EQUAL(world_count_files(), files);
}

TEST(openings_that_fail_say_the_reason)
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

TEST(memory_may_be_missing)
{
    mm_uvm_calls calls = emulated;
    struct rlimit all, few;
    mm_uvm_queue queue;
    mm_status st;
    int files = world_count_files(), rc;

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
    CHECK_EQUAL(world_count_files(), files);
}

/* Each of a queue's requests fails in both manners. */
static void
check_request(unsigned long request, int (*make)(mm_uvm_queue *, mm_status *),
              const char *sentence, const char *status_sentence)
{
    mm_uvm_queue queue = world_open_queue(64);
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

TEST(requests_that_fail_say_the_reason)
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

TEST(processors_may_be_listed_with_a_count)
{
    mm_uvm_queue queue = world_open_queue(64);
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

TEST(an_instance_of_a_device_is_the_only_one)
{
    mm_uvm_queue queue = world_open_queue(64);
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

/* A module of this branch makes queues and lists its processors, or says why not. */
static void
work_with_branch(unsigned branch)
{
    int16_t processors[MM_UVM_PROCESSORS];
    mm_uvm_queue queue;
    mm_status st;

    CHECK_EQUAL(world.disturb_queue("branch", branch), 0);
    queue = world_open_queue(64);
    CHECK_EQUAL(queue.version_first, branch == 560);
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    CHECK_EQUAL(processors[0], MM_ON_HOST);
    CHECK_EQUAL(processors[1], 0);
    CHECK_EQUAL(processors[2], 1);
    CHECK_EQUAL(processors[3], MM_NO_PROCESSOR);
    mm_uvm_queue_close(&queue);
    refuse_to_open(
        "refused", MM_UVM_NOT_SUPPORTED,
        "the nvidia-uvm kernel module makes no event queue: status 0x56, not supported");
    CHECK_EQUAL(world.disturb_queue("branch", 0), 0);
}

TEST(every_branch_has_its_requests)
{
    mm_uvm_calls calls = emulated;

    work_with_branch(550);
    work_with_branch(560);
    work_with_branch(565);
    work_with_branch(595);
    CHECK_EQUAL(world.disturb_queue("branch", 560), 0);
    calls.files = wrong_files;
    refuse_through(
        &calls, MM_UVM_ILLEGAL_ACTION,
        "the nvidia-uvm kernel module makes no event queue: status 0x16, illegal action");
    CHECK_EQUAL(world.disturb_queue("branch", 0), 0);
}

/* A device whose context came later is found without the driver. */
TEST(processors_are_listed_again)
{
    mm_uvm_queue queue = world_open_queue(64);
    int16_t processors[MM_UVM_PROCESSORS];
    mm_status st;

    CHECK_EQUAL(world.disturb_queue("unlisted", 2), 0);
    CHECK_OK(mm_uvm_queue_processors(world.cu, &queue, processors, &st), &st);
    CHECK_EQUAL(processors[2], MM_NO_PROCESSOR);
    CHECK_EQUAL(world.disturb_queue("unlisted", 0), 0);
    world.log_clear();
    CHECK_OK(mm_uvm_queue_processors_again(&queue, processors, &st), &st);
    CHECK_EQUAL(processors[2], 1);
    CHECK_EQUAL(world.log_count(), 0);
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

TEST(a_lost_wake_costs_one_turn)
{
    mm_uvm_queue queue = world_open_queue(64);
    uint64_t begin = (mm_monotonic_clock() / 1000000);

    queue.calls.poll = poll_like_a_lost_wake;
    CHECK(mm_uvm_queue_wait(&queue, -1));
    CHECK_EQUAL(polls, 2);
    atomic_store(&polls, 0);
    CHECK(mm_uvm_queue_wait(&queue, 1000));
    CHECK_EQUAL(polls, 2);
    CHECK((mm_monotonic_clock() / 1000000) - begin < 1000);
    mm_uvm_queue_close(&queue);
}

/* On a machine with a GPU the device exists, but this process, whose driver is emulated, has not
 * opened it. */
TEST(a_real_driver_asks_the_kernel)
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

TEST(an_emulated_driver_may_have_no_queues)
{
    mm_driver old = {.emulated = true, .path = "/lib/old.so"};
    mm_uvm_queue queue;
    mm_status st;

    old.library = dlopen(NULL, RTLD_NOW);
    CHECK(old.library != NULL);
    CHECK_EQUAL(mm_uvm_queue_open(&old, &queue, 64, &st), -1);
    check_failure(
        &st, 0,
        "the emulated driver /lib/old.so has no event queues: it comes from another version");
    mm_uvm_queue_close(&queue);
    CHECK_EQUAL(dlclose(old.library), 0);
}

static void
set_up(const char *path)
{
    mm_status st;

    world_open_on_device(path);
    CHECK_OK(mm_uvm_calls_find(world.cu, &emulated, &st), &st);
}

TEST_MAIN(set_up)
