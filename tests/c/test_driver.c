/* test_driver.c: selecting and opening the driver while other threads, or the driver itself, fork,
 * and drivers with unusual devices.
 *
 * Needs libforking.so and libodd.so beside the emulated driver, which it opens in children only, so
 * that each test begins with none. */
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver/driver.h"
#include "world.h"

/* Options of ThreadSanitizer: children do not join the threads of their parents. */
const char *__tsan_default_options(void);

const char *
__tsan_default_options(void)
{
    return "report_thread_leaks=0";
}

enum { SELECTIONS = 300, OPENINGS = 60, PATIENCE = 20, HANGS = 256 };

static const char *driver_path;
static atomic_bool stop;

/* Runs work in a child. Returns its result, 0 to 127, or HANGS plus the signal that ended it. */
static int
in_child(int (*work)(void))
{
    int status = 0;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        (void)alarm(PATIENCE);
        _exit(work());
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : HANGS + WTERMSIG(status);
}

/* --- choosing --------------------------------------------------------------------------- */

static void *
select_again_and_again(void *argument)
{
    mm_status st;

    (void)argument;
    while (!atomic_load(&stop)) {
        CHECK_OK(mm_driver_select(driver_path, &st), &st);
    }
    return NULL;
}

/* The child sees a complete name: the new one or the previous one. */
static int
select_and_open(void)
{
    mm_status st;

    if (mm_driver_open(&st) == NULL) {
        (void)fprintf(stderr, "%s\n", st.detail);
        return 1;
    }
    return mm_driver_select(driver_path, &st) == 0 ? 2 : 0;
}

TEST(fork_while_another_thread_selects)
{
    pthread_t thread;
    mm_status st;

    CHECK_OK(mm_driver_select(driver_path, &st), &st);
    atomic_store(&stop, false);
    CHECK_EQUAL(pthread_create(&thread, NULL, select_again_and_again, NULL), 0);
    for (int i = 0; i < SELECTIONS; i++) {
        CHECK_EQUAL(in_child(select_and_open), 0);
    }
    atomic_store(&stop, true);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
}

/* --- opening ---------------------------------------------------------------------------- */

static void *
open_driver(void *opened)
{
    mm_status st;
    mm_driver *cu = mm_driver_open(&st);

    CHECK(cu != NULL);
    atomic_store((_Atomic(mm_driver *) *)opened, cu);
    return NULL;
}

/* In a child that was forked during an opening: it opens its own driver, or is refused. */
static int
open_or_be_refused(void)
{
    mm_status st;

    if (mm_driver_open(&st) != NULL) {
        return mm_driver_forked() ? 1 : 0;
    }
    return st.kind == MM_FORKED && mm_driver_forked() ? 0 : 2;
}

static long spin;

static int
fork_during_the_first_opening(void)
{
    _Atomic(mm_driver *) opened = NULL;
    pthread_t thread;
    int answer = 0;

    CHECK_EQUAL(pthread_create(&thread, NULL, open_driver, &opened), 0);
    for (volatile long i = 0; i < spin; i++) {
    }
    for (int i = 0; i < 4 && answer == 0; i++) {
        answer = in_child(open_or_be_refused);
    }
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    if (answer != 0) {
        return answer > 100 ? 100 : answer;
    }
    return atomic_load(&opened) != NULL && !mm_driver_forked() ? 0 : 3;
}

TEST(fork_while_another_thread_opens)
{
    mm_status st;

    CHECK_OK(mm_driver_select(driver_path, &st), &st);
    for (int i = 0; i < OPENINGS; i++) {
        spin = (long)i * 20000;
        CHECK_EQUAL(in_child(fork_during_the_first_opening), 0);
    }
}

static void
select_beside(const char *name)
{
    char path[PATH_MAX];
    mm_status st;

    world_path_beside(driver_path, name, path);
    CHECK_OK(mm_driver_select(path, &st), &st);
}

static int
open_a_driver_that_forks(void)
{
    mm_status st;

    select_beside("libforking.so");
    if (mm_driver_open(&st) == NULL) {
        (void)fprintf(stderr, "%s\n", st.detail);
        return 1;
    }
    return mm_driver_forked() ? 2 : 0;
}

TEST(driver_may_fork_while_it_is_opened)
{
    CHECK_EQUAL(in_child(open_a_driver_that_forks), 0);
}

/* --- devices ---------------------------------------------------------------------------- */

static const char *odd_devices, *odd_concurrent;

static mm_driver *
open_odd(mm_status *st)
{
    CHECK_EQUAL(setenv("ODD_DEVICES", odd_devices, 1), 0);
    CHECK_EQUAL(setenv("ODD_CONCURRENT", odd_concurrent, 1), 0);
    select_beside("libodd.so");
    return mm_driver_open(st);
}

static int
be_told_the_count(void)
{
    char expected[64];
    mm_status st;

    CHECK(open_odd(&st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_DRIVER);
    (void)snprintf(expected, sizeof expected, "has %s devices; 1 to 63 can be used", odd_devices);
    CHECK(strstr(st.detail, expected) != NULL);
    return 0;
}

static int
count_63(void)
{
    mm_status st;
    mm_driver *cu = open_odd(&st);

    CHECK(cu != NULL);
    CHECK_EQUAL(cu->device_count, 63);
    CHECK_EQUAL(cu->memory[62], (size_t)63 << 30);
    CHECK_EQUAL(cu->all_memory, (size_t)(63 * 64 / 2) << 30);
    CHECK_EQUAL(atomic_load(&mm_least_device_memory), (size_t)1 << 30);
    CHECK(cu->concurrent_access);
    return 0;
}

TEST(no_device_and_too_many_are_refused)
{
    odd_concurrent = "0xffffffffffffffff";
    odd_devices = "0";
    CHECK_EQUAL(in_child(be_told_the_count), 0);
    odd_devices = "64";
    CHECK_EQUAL(in_child(be_told_the_count), 0);
    odd_devices = "63";
    CHECK_EQUAL(in_child(count_63), 0);
}

/* 1 with concurrent access, and 2 with access of the host to memory of devices. */
static int
say_access(void)
{
    mm_status st;
    mm_driver *cu = open_odd(&st);

    CHECK(cu != NULL);
    return (cu->concurrent_access ? 1 : 0) + (cu->direct_host_access ? 2 : 0);
}

/* Memory is shared by all, so one device without it decides. */
TEST(every_device_must_have_concurrent_access)
{
    static const char *const masks[] = {"0", "1", "2", "3", "5", "6", "7"};

    odd_devices = "3";
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        odd_concurrent = masks[i];
        CHECK_EQUAL(in_child(say_access), strcmp(masks[i], "7") == 0);
    }
}

/* The host may map memory of one device of several, so one device with it decides. */
TEST(one_device_with_direct_access_is_enough)
{
    static const char *const masks[] = {"0", "1", "2", "4", "6"};

    odd_devices = "3";
    odd_concurrent = "7";
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        CHECK_EQUAL(setenv("ODD_DIRECT", masks[i], 1), 0);
        CHECK_EQUAL(in_child(say_access), strcmp(masks[i], "0") != 0 ? 3 : 1);
    }
    CHECK_EQUAL(unsetenv("ODD_DIRECT"), 0);
}

static int
be_told_of_the_silence(void)
{
    mm_status st;

    CHECK_EQUAL(setenv("ODD_SILENT", "2", 1), 0);
    CHECK(open_odd(&st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_DRIVER);
    CHECK(strstr(st.detail, "cuDeviceGetAttribute failed with CUDA_ERROR_INVALID_VALUE (1)")
          != NULL);
    return 0;
}

TEST(every_device_must_say_what_it_has)
{
    odd_devices = "2";
    odd_concurrent = "3";
    CHECK_EQUAL(in_child(be_told_of_the_silence), 0);
}

static void *
open_what_is_selected(void *unused)
{
    mm_status st;

    (void)unused;
    CHECK(mm_driver_open(&st) != NULL);
    return NULL;
}

/* The threads ask for the driver while the first one opens it. */
static int
open_in_many_threads(void)
{
    char path[PATH_MAX];
    int (*count)(void);
    void *library, *symbol;

    CHECK_EQUAL(setenv("ODD_DEVICES", "2", 1), 0);
    CHECK_EQUAL(setenv("ODD_CONCURRENT", "3", 1), 0);
    world_path_beside(driver_path, "libodd.so", path);
    select_beside("libodd.so");
    check_threads(CHECK_MAX_THREADS, open_what_is_selected, NULL);
    library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    CHECK(library != NULL);
    symbol = dlsym(library, "odd_openings");
    CHECK(symbol != NULL);
    memcpy(&count, &symbol, sizeof count);
    return count();
}

TEST(many_threads_open_it_once)
{
    CHECK_EQUAL(in_child(open_in_many_threads), 1);
}

/* --- afterwards ------------------------------------------------------------------------- */

static int
be_refused(void)
{
    mm_status st;

    return mm_driver_open(&st) == NULL && st.kind == MM_FORKED && mm_driver_forked()
                   && mm_driver_select(driver_path, &st) < 0
               ? 0
               : 1;
}

static int
open_and_fork(void)
{
    mm_status st;

    CHECK(mm_driver_open(&st) != NULL);
    return in_child(be_refused);
}

TEST(children_of_an_open_driver_are_refused)
{
    mm_status st;

    CHECK_OK(mm_driver_select(driver_path, &st), &st);
    CHECK_EQUAL(in_child(open_and_fork), 0);
}

static int
fail_and_fork(void)
{
    mm_status st;

    CHECK_OK(mm_driver_select("/nowhere/libcuda.so", &st), &st);
    CHECK(mm_driver_open(&st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_DRIVER);
    CHECK_OK(mm_driver_select(driver_path, &st), &st);
    return in_child(open_or_be_refused) == 0 && mm_driver_open(&st) != NULL ? 0 : 1;
}

TEST(failed_opening_can_be_tried_again)
{
    CHECK_EQUAL(in_child(fail_and_fork), 0);
}

static void
set_up(const char *path)
{
    driver_path = path;
}

TEST_MAIN(set_up)
