/* test_attachment.c: attachments and host accesses in many threads, on devices without concurrent
 * access. */
#include <semaphore.h>

#include "world.h"

enum { ROUNDS = 200, WORKERS = 4, SIZE = 1 << 16 };

static mm_stream *
share_new_stream(void)
{
    CUstream handle = world_make_stream(0, CU_STREAM_NON_BLOCKING);
    mm_status st;
    mm_stream *stream = mm_stream_share(world.cu, handle, &st);

    CHECK(stream != NULL);
    return stream;
}

static void
attach(mm_memory *m, CUmemAttach_flags to, mm_stream *stream)
{
    mm_status st;

    CHECK_OK(mm_attach(world.cu, &m->attachment, m->start, to,
                       (mm_device_stream){stream->handle, MM_ANY_DEVICE}, stream, &st),
             &st);
}

static void
wait_for(mm_memory *m)
{
    mm_status st;

    CHECK_OK(mm_attachment_wait(world.cu, &m->attachment, &st), &st);
}

static void *
attach_and_wait(void *memory)
{
    static const CUmemAttach_flags all[] = {CU_MEM_ATTACH_HOST, CU_MEM_ATTACH_SINGLE,
                                            CU_MEM_ATTACH_GLOBAL};

    for (size_t i = 0; i < ROUNDS; i++) {
        mm_stream *stream = share_new_stream();
        attach(memory, all[i % 3], stream);
        mm_stream_drop(stream);
        wait_for(memory);
    }
    return NULL;
}

TEST(streams_end_while_other_threads_wait_for_them)
{
    size_t before = world.live_streams();
    mm_memory *m = world_allocate(SIZE);

    check_threads(WORKERS, attach_and_wait, m);
    CHECK(world.live_streams() <= before + 1);
    mm_memory_release(m);
    CHECK_EQUAL(world.live_streams(), before);
}

static sem_t reached, opened;

static void
stop(void *unused)
{
    (void)unused;
    CHECK_EQUAL(sem_post(&reached), 0);
    CHECK_EQUAL(sem_wait(&opened), 0);
}

static void *
wait_in_thread(void *memory)
{
    wait_for(memory);
    return NULL;
}

/* The lazy schedule runs the function in the wait, which has read the first attachment by then. */
TEST(a_wait_for_one_attachment_is_none_for_the_next)
{
    mm_memory *m = world_allocate(SIZE);
    mm_stream *first = share_new_stream(), *second = share_new_stream();
    pthread_t waiting;

    CHECK_EQUAL(sem_init(&reached, 0, 0) | sem_init(&opened, 0, 0), 0);
    world.schedule(1);
    CHECK_EQUAL(world.cu->LaunchHostFunc(first->handle, stop, NULL), 0);
    attach(m, CU_MEM_ATTACH_HOST, first);
    CHECK_EQUAL(pthread_create(&waiting, NULL, wait_in_thread, m), 0);
    CHECK_EQUAL(sem_wait(&reached), 0);
    attach(m, CU_MEM_ATTACH_HOST, second);
    CHECK_EQUAL(sem_post(&opened), 0);
    CHECK_EQUAL(pthread_join(waiting, NULL), 0);
    CHECK(!m->attachment.in_force);
    wait_for(m);
    CHECK(m->attachment.in_force);
    world.schedule(0);
    mm_stream_drop(first);
    mm_stream_drop(second);
    mm_memory_release(m);
}

/* --- fills ------------------------------------------------------------------------------ */

/* Device 0 has concurrent access, device 1 has not. */
static CUresult CUDAAPI
answer_concurrent(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CHECK_EQUAL(attribute, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    *value = device == 0;
    return CUDA_SUCCESS;
}

static int
check_fill(mm_driver *cu, mm_memory *m, int device)
{
    mm_device_stream stream = {NULL, device};
    mm_scope scope;
    mm_status st;
    int rc;

    CHECK_OK(mm_scope_enter_stream(&scope, cu, stream, &st), &st);
    rc = mm_attachment_check_fill(cu, &m->attachment, stream.handle, &st);
    mm_scope_leave(&scope);
    CHECK(rc == 0 || st.kind == MM_REFUSED);
    return rc;
}

TEST(only_devices_without_concurrent_access_are_ruled_out)
{
    mm_driver cu = *world.cu;
    mm_memory *m = world_allocate(SIZE);
    mm_stream *stream = share_new_stream();

    cu.DeviceGetAttribute = answer_concurrent;
    for (int device = 0; device < 2; device++) {
        attach(m, CU_MEM_ATTACH_HOST, stream);
        CHECK_EQUAL(check_fill(&cu, m, device), -device);
        attach(m, CU_MEM_ATTACH_SINGLE, stream);
        CHECK_EQUAL(check_fill(&cu, m, device), -device);
        attach(m, CU_MEM_ATTACH_GLOBAL, stream);
        CHECK_EQUAL(check_fill(&cu, m, device), 0);
    }
    mm_stream_drop(stream);
    mm_memory_release(m);
}

static void
set_up(const char *path)
{
    CHECK_EQUAL(setenv("MANAGEDMEM_EMULATOR", "profile=wsl", 1), 0);
    world_open_on_device(path);
    CHECK(!world.cu->concurrent_access);
}

TEST_MAIN(set_up)
