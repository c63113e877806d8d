/* test_uvm_self_test.c: the proof of the event queue passes, fails with a sentence where records
 * are not what they should be, and leaves nothing behind, whatever driver call fails.
 *
 * Each test opens the driver in a process of its own, because a proof that has passed is not
 * repeated. */
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/allocation.h"
#include "trace/uvm_self_test.h"
#include "world.h"

enum { UNKNOWN = 999, NOT_FIRED = 3 };

static unsigned nth_call; /* of a sweep: the one that fails */
static int fault_fired;

/* Runs the self-test, in which the nth call fails (0: none), and checks that it leaves nothing. */
static int
run_failing(const char *function, unsigned nth, int after, mm_status *st)
{
    size_t depth = world.context_depth();
    int files = world_count_files(), rc;
    CUcontext outer = NULL, left = NULL;

    CHECK_EQUAL(world.cu->CtxGetCurrent(&outer), 0);
    memset(st, 0, sizeof *st);
    if (nth > 0) {
        world.fail(function, nth, UNKNOWN, after);
    }
    rc = mm_uvm_self_test(world.cu, st);
    fault_fired = world.fail_fired();
    world.fail_clear();
    CHECK_EQUAL(world.live_allocations(), 0);
    CHECK_EQUAL(world.live_streams(), 0);
    CHECK_EQUAL(world.context_depth(), depth);
    CHECK_EQUAL(world.cu->CtxGetCurrent(&left), 0);
    CHECK(outer == left);
    CHECK_EQUAL(world_count_files(), files);
    CHECK(rc == 0 || st->kind == MM_DRIVER_CALL || st->detail[0] != '\0');
    return rc;
}

static int
run_self_test(mm_status *st)
{
    return run_failing("", 0, 0, st);
}

static void
passes(void)
{
    mm_status st;

    CHECK_OK(run_self_test(&st), &st);
}

/* The emulated driver keeps a file from its first allocation on. */
static void
open_driver(const char *path)
{
    CUdeviceptr allocation;
    mm_status st;

    world_open(path);
    CHECK(mm_allocate_pages(world.cu, 1, CU_MEM_ATTACH_GLOBAL, &allocation, &st) != 0);
    CHECK_OK(mm_free(world.cu, allocation, &st), &st);
}

/* --- passing ------------------------------------------------------------------------------ */

static void
it_passes_and_is_not_repeated(void)
{
    size_t calls;

    passes();
    CHECK_EQUAL(world_calls("cuMemPrefetchAsync"), 1);
    CHECK_EQUAL(world_calls("cuMemAdvise"), 0);
    calls = world.log_count();
    CHECK_EQUAL(world.disturb_queue("absent", 1), 0);
    passes();
    CHECK_EQUAL(world.log_count(), calls);
}

static void
it_passes_in_any_context(void)
{
    CUcontext second;
    mm_status st;

    CHECK_OK(mm_primary_context(world.cu, 1, &second, &st), &st);
    CHECK_EQUAL(world.cu->CtxSetCurrent(second), 0);
    passes();
}

static void
it_passes_during_a_capture(void)
{
    mm_driver *cu = world.cu;
    CUstream stream;
    CUgraph graph = NULL;
    mm_status st;

    CHECK_OK(mm_set_current_device(cu, 0, &st), &st);
    CHECK_EQUAL(cu->StreamCreate(&stream, CU_STREAM_NON_BLOCKING), 0);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), 0);
    CHECK_OK(mm_uvm_self_test(cu, &st), &st);
    CHECK_EQUAL(world.end_capture(stream, &graph), 0);
    CHECK_EQUAL(world.destroy_graph(graph), 0);
    CHECK_EQUAL(cu->StreamDestroy(stream), 0);
    CHECK_EQUAL(world.live_allocations(), 0);
}

static void *
move_memory(void *argument)
{
    const CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    atomic_bool *stop = argument;
    CUdeviceptr pages = 0;
    mm_status st;

    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->MemAllocManaged(&pages, 1 << 20, CU_MEM_ATTACH_GLOBAL), 0);
    while (!atomic_load(stop)) {
        *(volatile char *)(uintptr_t)pages = 1;
        CHECK_EQUAL(world.cu->MemPrefetchAsync(pages, 1 << 20, device, 0, NULL), 0);
    }
    CHECK_EQUAL(world.cu->MemFree(pages), 0);
    return NULL;
}

/* Their records are in the queue too. */
static void
other_threads_may_move_their_memory(void)
{
    atomic_bool stop = false;
    pthread_t thread;
    mm_status st;
    int rc;

    CHECK_EQUAL(pthread_create(&thread, NULL, move_memory, &stop), 0);
    while (world_calls("cuMemPrefetchAsync") < 5) {
        (void)usleep(100);
    }
    rc = mm_uvm_self_test(world.cu, &st);
    atomic_store(&stop, true);
    CHECK_EQUAL(pthread_join(thread, NULL), 0);
    CHECK_OK(rc, &st);
}

static CUresult CUDAAPI
only_the_second_is_concurrent(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED) {
        *value = 0;
        return CUDA_SUCCESS;
    }
    CHECK_EQUAL(attribute, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    *value = device == 1;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
the_second_is_integrated(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = attribute == CU_DEVICE_ATTRIBUTE_INTEGRATED ? device == 1 : 1;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
all_are_integrated(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)attribute;
    (void)device;
    *value = 1;
    return CUDA_SUCCESS;
}

static void
integrated_devices_have_nothing_to_record(void)
{
    mm_driver cu = *world.cu;
    mm_status st;

    cu.DeviceGetAttribute = all_are_integrated;
    CHECK_EQUAL(mm_uvm_self_test(&cu, &st), -1);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK(strstr(st.detail, "every device is integrated") != NULL);
    cu.DeviceGetAttribute = the_second_is_integrated;
    CHECK_OK(mm_uvm_self_test(&cu, &st), &st);
}

static void
it_passes_on_the_device_that_records(void)
{
    mm_driver cu = *world.cu;
    char text[512] = "";
    mm_status st;

    cu.DeviceGetAttribute = only_the_second_is_concurrent;
    world.log_clear();
    CHECK_OK(mm_uvm_self_test(&cu, &st), &st);
    for (size_t i = 0; strncmp(text, "cuMemPrefetchAsync", 18) != 0; i++) {
        CHECK(world.log_entry(i, text, sizeof text) >= 0);
    }
    CHECK(strstr(text, "type=1, id=1,") != NULL);
}

/* --- failing ------------------------------------------------------------------------------ */

static void
says(const char *disturbance, unsigned value, const char *sentence)
{
    mm_status st;

    CHECK_EQUAL(world.disturb_queue(disturbance, value), 0);
    CHECK_EQUAL(run_self_test(&st), -1);
    CHECK_EQUAL(world.disturb_queue(disturbance, 0), 0);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    if (strcmp(st.detail, sentence) != 0) {
        (void)fprintf(stderr, "%s: %s\n", disturbance, st.detail);
        exit(1);
    }
}

static void
every_disturbance_has_its_sentence(void)
{
    says(
        "absent", 1,
        "cannot open /dev/nvidia-uvm-tools: No such file or directory. Load the nvidia-uvm kernel "
        "module; a container needs the device too, as in --device /dev/nvidia-uvm-tools");
    says(
        "denied", 1,
        "cannot open /dev/nvidia-uvm-tools: Permission denied. This user needs permission to read "
        "and write the device");
    says("refused", 1,
         "the nvidia-uvm kernel module makes no event queue: status 0x56, not supported");
    says(
        "layout", 1,
        "the nvidia-uvm kernel module writes records of an unknown layout: 1 of 1 cannot be read");
    says("drop", 1,
         "the nvidia-uvm kernel module dropped records during a test of 65536 bytes: 1");
    says("lose", 1, "the nvidia-uvm kernel module recorded 0 bytes of a prefetch of 65536 bytes");
    says(
        "garbage", 1,
        "the nvidia-uvm kernel module writes records of an unknown layout: 1 of 2 cannot be read");
    says("late", 2, "the nvidia-uvm kernel module recorded 0 bytes of a prefetch of 65536 bytes");
    passes(); /* none of the failures was remembered */
}

static CUresult CUDAAPI
swap_uuids(CUuuid *uuid, CUdevice device)
{
    return world.cu->DeviceGetUuid(uuid, 1 - device);
}

static CUresult CUDAAPI
prefetch_half(CUdeviceptr start, size_t size, CUmemLocation location, unsigned int flags,
              CUstream stream)
{
    return world.cu->MemPrefetchAsync(start, size / 2, location, flags, stream);
}

/* The pages move, but not by the prefetch. */
static CUresult CUDAAPI
touch_only(CUdeviceptr start, size_t size, CUmemLocation location, unsigned int flags,
           CUstream stream)
{
    (void)flags;
    (void)stream;
    return (CUresult)world.touch(start, size, location.id, 1);
}

static void
says_with(mm_driver *cu, const char *begin, const char *part)
{
    mm_status st;

    CHECK_EQUAL(mm_uvm_self_test(cu, &st), -1);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    if (strncmp(st.detail, begin, strlen(begin)) != 0 || strstr(st.detail, part) == NULL) {
        (void)fprintf(stderr, "%s\n", st.detail);
        exit(1);
    }
    CHECK_EQUAL(world.live_allocations(), 0);
    CHECK_EQUAL(world.live_streams(), 0);
}

static void
records_of_something_else_are_refused(void)
{
    const char *begin =
        "the nvidia-uvm kernel module records a prefetch from the host to device 0, "
        "65536 bytes at 0x";
    mm_driver cu = *world.cu;

    cu.DeviceGetUuid = swap_uuids;
    says_with(&cu, begin, "as cause 1, from -1 to 1, 65536 bytes at 0x");
    cu = *world.cu;
    cu.MemPrefetchAsync = touch_only;
    says_with(&cu, begin, "as cause 2, from -1 to 0, 65536 bytes at 0x");
    cu.MemPrefetchAsync = prefetch_half;
    says_with(
        &cu, "the nvidia-uvm kernel module recorded 32768 bytes of a prefetch of 65536 bytes", "");
    passes();
}

static void
a_flush_may_be_what_delivers(void)
{
    CHECK_EQUAL(world.disturb_queue("late", 1), 0);
    passes();
}

/* The calls that restore the thread's state, destroy the stream or relax the capture mode of a
 * free are repeated or done without; all others make it fail. */
static void
a_failed_call_leaves_nothing(void)
{
    mm_status st;

    if (run_failing("*", nth_call, 0, &st) < 0) {
        CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
        CHECK_EQUAL(st.code, UNKNOWN);
    } else if (!fault_fired) {
        exit(NOT_FIRED);
    }
}

/* Without those that make something, which the caller cannot know and undo. */
static void
a_call_that_acts_and_fails_leaves_nothing(void)
{
    static const char *const functions[] = {
        "cuMemPrefetchAsync", "cuStreamSynchronize", "cuStreamDestroy",
        "cuMemFree",          "cuCtxPopCurrent",     "cuThreadExchangeStreamCaptureMode",
    };
    mm_status st;

    if (nth_call > sizeof functions / sizeof *functions) {
        exit(NOT_FIRED);
    }
    MM_IGNORE(run_failing(functions[nth_call - 1], 1, 1, &st)); /* some faults do no harm */
    CHECK(fault_fired);
}

/* --- processes ---------------------------------------------------------------------------- */

typedef struct {
    const char *name, *options;
    void (*run)(void);
    unsigned least_calls; /* of a sweep */
} process_test;

static void
devices_without_concurrent_access_are_refused(void)
{
    mm_status st;

    CHECK_EQUAL(run_self_test(&st), -1);
    CHECK_EQUAL(st.kind, MM_TRACE_UNAVAILABLE);
    CHECK(strstr(st.detail, "concurrent managed access") != NULL);
}

static int
run_in_child(const char *path, const process_test *test)
{
    pid_t child = fork();
    int status;

    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQUAL(setenv("MANAGEDMEM_EMULATOR", test->options, 1), 0);
        open_driver(path);
        test->run();
        exit(0);
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Once for each call that can fail. */
static void
sweep(const char *path, const process_test *test)
{
    int status = 0;

    for (nth_call = 1; status == 0; nth_call++) {
        status = run_in_child(path, test);
    }
    CHECK_EQUAL(status, NOT_FIRED);
    CHECK(nth_call > test->least_calls);
}

int
main(int argc, char **argv)
{
    static const process_test tests[] = {
        {"it_passes_and_is_not_repeated", "devices=2", it_passes_and_is_not_repeated, 0},
        {"it_passes_on_old_drivers", "profile=old12", passes, 0},
        {"it_passes_in_any_context", "devices=2", it_passes_in_any_context, 0},
        {"integrated_devices_have_nothing_to_record", "devices=2",
         integrated_devices_have_nothing_to_record, 0},
        {"it_passes_on_the_device_that_records", "devices=2", it_passes_on_the_device_that_records,
         0},
        {"it_passes_during_a_capture", "devices=2", it_passes_during_a_capture, 0},
        {"other_threads_may_move_their_memory", "devices=2", other_threads_may_move_their_memory,
         0},
        {"every_disturbance_has_its_sentence", "devices=2", every_disturbance_has_its_sentence, 0},
        {"records_of_something_else_are_refused", "devices=2",
         records_of_something_else_are_refused, 0},
        {"a_flush_may_be_what_delivers", "devices=2", a_flush_may_be_what_delivers, 0},
        {"devices_without_concurrent_access_are_refused", "profile=wsl",
         devices_without_concurrent_access_are_refused, 0},
        {"a_failed_call_leaves_nothing", "devices=2", a_failed_call_leaves_nothing, 20},
        {"a_call_that_acts_and_fails_leaves_nothing", "devices=2",
         a_call_that_acts_and_fails_leaves_nothing, 6},
    };

    CHECK_EQUAL(argc, 2);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (tests[i].least_calls > 0) {
            sweep(argv[1], &tests[i]);
        } else {
            CHECK_EQUAL(run_in_child(argv[1], &tests[i]), 0);
        }
        (void)printf("ok %s\n", tests[i].name);
        (void)fflush(stdout);
    }
    return 0;
}
