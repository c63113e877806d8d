/* test_slab.c: plain memory of the host and of devices: page-locking that fails before or after
 * its effect, and freeing. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "failing_allocations.h"
#include "working/slab.h"
#include "world.h"

enum { SIZE = 3 * 4096 };

static mm_status st;

static bool
is_mapped(CUdeviceptr start)
{
    unsigned char resident;

    return mincore((void *)(uintptr_t)start, 4096, &resident) == 0;
}

static mm_slab *
new_host_slab(void)
{
    mm_slab *slab = mm_slab_on_host(0, SIZE - 100, &st);

    CHECK_OK(slab == NULL ? -1 : 0, &st);
    CHECK_EQUAL(slab->size, SIZE); /* in whole pages */
    return slab;
}

/* Other memory at that address can be locked: nothing of the slab is left with the driver. */
static void
check_unlocked(CUdeviceptr start)
{
    void *address = (void *)(uintptr_t)start;
    mm_scope scope;

    CHECK(!is_mapped(start));
    CHECK(mmap(address, SIZE, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0)
          == address);
    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->MemHostRegister(address, SIZE, 0), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->MemHostUnregister(address), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    CHECK_EQUAL(munmap(address, SIZE), 0);
    CHECK_EQUAL(world.live_allocations(), 0);
}

/* Each of the two calls, which lock and unlock the memory, may fail before its effect or
 * after it. */
TEST(a_lock_that_fails_leaves_nothing)
{
    for (int i = 0; i < 8; i++) {
        mm_slab *slab = new_host_slab();
        CUdeviceptr start = slab->start;
        world.fail("cuMemHostRegister", 1, CUDA_ERROR_OUT_OF_MEMORY, i % 2);
        if (i >= 4) {
            world.fail("cuMemHostUnregister", 1, CUDA_ERROR_UNKNOWN, i / 2 % 2);
        }
        CHECK_EQUAL(mm_slab_lock(world.cu, slab, &st), -1);
        CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
        CHECK_EQUAL(st.code, CUDA_ERROR_OUT_OF_MEMORY);
        CHECK(strstr(st.detail, "ulimit -l") != NULL);
        world.fail_clear();
        memset((void *)(uintptr_t)start, 1, SIZE);
        mm_slab_free(slab);
        check_unlocked(start);
    }
}

/* It is tried again. */
TEST(a_slab_can_be_locked_after_a_failure)
{
    for (int after = 0; after < 2; after++) {
        mm_slab *slab = new_host_slab();
        CUdeviceptr start = slab->start;
        world.fail("cuMemHostRegister", 1, CUDA_ERROR_UNKNOWN, after);
        CHECK_EQUAL(mm_slab_lock(world.cu, slab, &st), -1);
        world.fail("cuCtxPushCurrent", 1, CUDA_ERROR_UNKNOWN, 0);
        CHECK_EQUAL(mm_slab_lock(world.cu, slab, &st), -1);
        world.fail_clear();
        CHECK_OK(mm_slab_lock(world.cu, slab, &st), &st);
        mm_slab_free(slab);
        check_unlocked(start);
    }
}

/* What stays locked stays mapped, as a device may still reach it. */
TEST(memory_that_cannot_be_unlocked_stays_mapped)
{
    mm_slab *slab = new_host_slab();
    CUdeviceptr start = slab->start;
    mm_scope scope;

    CHECK_OK(mm_slab_lock(world.cu, slab, &st), &st);
    world.fail("cuMemHostUnregister", 1, CUDA_ERROR_UNKNOWN, 0);
    mm_slab_free(slab);
    world.fail_clear();
    CHECK(is_mapped(start));
    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.cu->MemHostUnregister((void *)(uintptr_t)start), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    CHECK_EQUAL(munmap((void *)(uintptr_t)start, SIZE), 0);
    check_unlocked(start);
}

TEST(memory_that_cannot_be_had_is_an_error)
{
    CHECK(mm_slab_on_host(0, (size_t)1 << 60, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK(mm_slab_on_device(world.cu, 1, (size_t)1 << 60, false, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_DRIVER_CALL);
    CHECK(strstr(st.detail, "Device(1)") != NULL);
    for (int on_host = 0; on_host < 2; on_host++) {
        fail_allocation(1);
        CHECK(
            (on_host ? mm_slab_on_host(0, 1, &st) : mm_slab_on_device(world.cu, 0, 1, false, &st))
            == NULL);
        CHECK(allocation_has_failed());
        CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    }
    mm_slab_free(NULL);
    CHECK_EQUAL(world.live_allocations(), 0);
}

/* The emulated device's bytes can be read by the host while they are mapped. */
static unsigned char *
bytes_of(const mm_slab *slab)
{
    return (unsigned char *)(uintptr_t)slab->start;
}

/* The frames before an offset are gone, and the rest is host memory at its address. */
TEST(the_end_of_a_slab_can_be_kept)
{
    enum { UNIT = 2 << 20 };
    mm_slab *slab = mm_slab_on_device(world.cu, 0, 3 * UNIT - 100, true, &st);

    CHECK_OK(slab == NULL ? -1 : 0, &st);
    CHECK_EQUAL(slab->mapping.bytes, 3 * UNIT);
    for (int keeps = 1; keeps >= 0; keeps--) {
        memset(bytes_of(slab), 7, slab->size);
        CHECK_OK(mm_slab_suspend(world.cu, slab, UNIT + 5, keeps != 0, &st), &st);
        CHECK(slab->mapping.is_suspended);
        CHECK_EQUAL(slab->mapping.at_home, 2 * UNIT);
        bytes_of(slab)[UNIT + 1] = 8;
        CHECK(keeps == 0 || bytes_of(slab)[3 * UNIT - 101] == 7);
        CHECK_OK(mm_slab_resume(world.cu, slab, &st), &st);
        CHECK_EQUAL(bytes_of(slab)[UNIT + 1], keeps != 0 ? 8 : 0);
        CHECK_EQUAL(bytes_of(slab)[0], 0); /* other memory */
    }
    CHECK_OK(mm_slab_suspend(world.cu, slab, 0, true, &st), &st); /* a home of another size */
    mm_slab_free(slab);
    CHECK_EQUAL(world.live_allocations(), 0);
}

TEST(a_driver_without_mapped_memory_cannot_suspend)
{
    mm_driver old = *world.cu;

    old.MemMap = NULL;
    CHECK(mm_slab_on_device(&old, 0, SIZE, true, &st) == NULL);
    CHECK_EQUAL(st.kind, MM_UNSUPPORTED);
    CHECK_EQUAL(world.live_allocations(), 0);
}

/* Neither is freed while a stream captures, nor inside a host function. */
static void CUDA_CB
free_slabs(void *slabs)
{
    mm_slab **both = slabs;

    mm_slab_free(both[0]);
    mm_slab_free(both[1]);
    CHECK(world.live_allocations() > 0 && both[0]->on_host);
}

TEST(slabs_are_freed_after_a_host_function)
{
    mm_slab *both[2] = {new_host_slab(), mm_slab_on_device(world.cu, 1, SIZE, false, &st)};
    CUdeviceptr start = both[0]->start;
    CUstream stream;

    CHECK(both[1] != NULL);
    CHECK_OK(mm_slab_lock(world.cu, both[0], &st), &st);
    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    CHECK_EQUAL(world.cu->LaunchHostFunc(stream, free_slabs, both), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
    check_unlocked(start);
}

/* It is tried again later, as often as that is refused. */
TEST(a_refused_wait_puts_freeing_off)
{
    mm_slab *slab = new_host_slab();
    CUdeviceptr start = slab->start;

    CHECK_OK(mm_slab_lock(world.cu, slab, &st), &st);
    world.fail("cuCtxSynchronize", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    mm_slab_free(slab);
    world.fail("cuCtxSynchronize", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
    world.fail_clear();
    CHECK(is_mapped(start));
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
    check_unlocked(start);
}

/* Another device is waited for too, in its own context, and may refuse it as the first one does. */
TEST(freeing_waits_for_every_reader)
{
    mm_slab *slab = new_host_slab();
    CUdeviceptr start = slab->start;
    size_t before;

    CHECK_OK(mm_slab_lock(world.cu, slab, &st), &st);
    mm_slab_add_reader(slab, 1);
    world.fail("cuCtxSynchronize", 2, CUDA_ERROR_NOT_PERMITTED, 0);
    mm_slab_free(slab);
    world.fail_clear();
    CHECK(is_mapped(start));
    before = world_calls("cuCtxSynchronize");
    mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
    CHECK_EQUAL(world_calls("cuCtxSynchronize") - before, 2);
    check_unlocked(start);
}

/* A reader whose context is not available reads nothing: only the slab's own device puts it off. */
TEST(a_reader_that_is_gone_is_not_waited_for)
{
    int freed_at_once = 0;

    for (int nth = 1; nth <= 4; nth++) {
        mm_slab *slab = new_host_slab();
        CUdeviceptr start = slab->start;
        CHECK_OK(mm_slab_lock(world.cu, slab, &st), &st);
        mm_slab_add_reader(slab, 1);
        world.fail("cuCtxPushCurrent", nth, CUDA_ERROR_UNKNOWN, 0);
        mm_slab_free(slab);
        world.fail_clear();
        freed_at_once += !is_mapped(start);
        mm_deferred_frees_attempt(world.cu, &(mm_free_conditions){0});
        check_unlocked(start);
    }
    CHECK_EQUAL(freed_at_once, 1); /* the last of the four pushes is for the reader */
}

static int
memory_file(size_t size, int seals)
{
    int file = memfd_create("test_slab", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(file >= 0);
    CHECK_EQUAL(ftruncate(file, (off_t)size), 0);
    CHECK_EQUAL(fcntl(file, F_ADD_SEALS, seals), 0);
    return file;
}

TEST(two_slabs_of_a_file_are_one_memory)
{
    int file = memory_file(SIZE - 100, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    mm_slab *one = mm_slab_of_file(0, file, &st), *other = mm_slab_of_file(1, file, &st);
    CUdeviceptr start;

    CHECK(one != NULL && other != NULL && one->start != other->start);
    CHECK(one->is_shared && one->size == SIZE);
    CHECK_EQUAL(close(file), 0);
    CHECK_OK(mm_slab_lock(world.cu, one, &st), &st);
    CHECK_OK(mm_slab_lock(world.cu, other, &st), &st);
    memset((void *)(uintptr_t)one->start, 7, SIZE);
    start = one->start;
    mm_slab_free(one);
    check_unlocked(start);
    CHECK_EQUAL(((char *)(uintptr_t)other->start)[SIZE - 1], 7);
    start = other->start;
    mm_slab_free(other);
    check_unlocked(start);
}

TEST(a_file_that_could_shrink_is_refused)
{
    int files[] = {memory_file(SIZE, 0), memory_file(SIZE, F_SEAL_GROW),
                   memory_file(0, F_SEAL_SHRINK), -1, open("/dev/zero", O_RDWR)};

    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        CHECK(mm_slab_of_file(0, files[i], &st) == NULL);
        CHECK_EQUAL(st.kind, MM_BAD_VALUE);
        CHECK(strstr(st.detail, "F_SEAL_SHRINK") != NULL);
        CHECK_EQUAL(files[i] < 0 ? 0 : close(files[i]), 0);
    }
    files[0] = memory_file(SIZE, F_SEAL_SHRINK | F_SEAL_WRITE);
    CHECK(mm_slab_of_file(0, files[0], &st) == NULL);
    CHECK_EQUAL(st.kind, MM_BAD_VALUE);
    fail_allocation(1);
    CHECK(mm_slab_of_file(0, files[0], &st) == NULL);
    CHECK(allocation_has_failed());
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    CHECK_EQUAL(close(files[0]), 0);
}

TEST_MAIN(world_open)
