/* world.c: opening the emulated driver and finding its control functions. */
#include "world.h"

#include <fcntl.h>

#include "trace/uvm_records.h"

emulated_world world;

static void
find(void *library, const char *name, void *location)
{
    void *symbol = dlsym(library, name);

    if (symbol == NULL) {
        (void)fprintf(stderr, "the emulated driver has no %s\n", name);
        exit(1);
    }
    memcpy(location, &symbol, sizeof symbol);
}

void
world_open(const char *path)
{
    mm_status st;
    void *library;

    CHECK_OK(mm_driver_select(path, &st), &st);
    world.cu = mm_driver_open(&st);
    if (world.cu == NULL) {
        (void)fprintf(stderr, "%s\n", st.detail);
        exit(1);
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    find(library, "emu_fail", &world.fail);
    find(library, "emu_fail_clear", &world.fail_clear);
    find(library, "emu_fail_fired", &world.fail_fired);
    find(library, "emu_log_clear", &world.log_clear);
    find(library, "emu_log_count", &world.log_count);
    find(library, "emu_log_entry", &world.log_entry);
    find(library, "emu_live_allocations", &world.live_allocations);
    find(library, "emu_live_streams", &world.live_streams);
    find(library, "emu_live_events", &world.live_events);
    find(library, "emu_live_pools", &world.live_pools);
    find(library, "emu_schedule", &world.schedule);
    find(library, "emu_launch", &world.launch);
    find(library, "emu_context_depth", &world.context_depth);
    find(library, "cuStreamBeginCapture_v2", &world.begin_capture);
    find(library, "cuStreamEndCapture", &world.end_capture);
    find(library, "cuGraphDestroy", &world.destroy_graph);
    find(library, "cuGraphInstantiateWithFlags", &world.instantiate);
    find(library, "cuGraphLaunch", &world.launch_graph);
    find(library, "cuGraphExecDestroy", &world.destroy_executable);
    find(library, "cuCtxCreate_v2", &world.create_context);
    find(library, "cuCtxDestroy_v2", &world.destroy_context);
    find(library, "emu_touch", &world.touch);
    find(library, "emu_residency", &world.residency);
    find(library, "emu_uvm_disturb", &world.disturb_queue);
    find(library, "cuMemGetLocationInfo", &world.locate);
}

void
world_open_on_device(const char *path)
{
    mm_status st;

    world_open(path);
    CHECK_OK(mm_set_current_device(world.cu, 0, &st), &st);
}

void
world_open_devices(const char *path)
{
    world_open(path);
    CHECK(world.cu->device_count >= 2);
}

void
world_path_beside(const char *path, const char *name, char found[PATH_MAX])
{
    const char *slash = strrchr(path, '/');

    (void)snprintf(found, PATH_MAX, "%.*s%s", (int)(slash - path + 1), path, name);
}

mm_memory *
world_allocate(size_t size)
{
    mm_status st;
    mm_memory *memory = mm_memory_allocate(world.cu, size, CU_MEM_ATTACH_GLOBAL, &st);

    CHECK(memory != NULL);
    return memory;
}

CUstream
world_make_stream(int device, unsigned flags)
{
    CUstream stream = NULL;
    mm_scope scope;
    mm_status st;

    CHECK_OK(mm_scope_enter(&scope, world.cu, device, &st), &st);
    CHECK_EQUAL(world.cu->StreamCreate(&stream, flags), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    return stream;
}

size_t
world_calls(const char *function)
{
    size_t found = 0, length = strlen(function);
    char text[512];

    for (size_t i = 0; i < world.log_count(); i++) {
        (void)world.log_entry(i, text, sizeof text);
        found += strncmp(text, function, length) == 0 && text[length] == '(';
    }
    return found;
}

int
world_run(mm_driver *cu, mm_operation op, mm_batch *b, CUstream stream, mm_dispatch dispatch,
          mm_status *st)
{
    const mm_dispatch_options options = {stream, dispatch, MM_DEFER_NO};

    return mm_batch_run(cu, op, b, &options, st);
}

mm_uvm_queue
world_open_queue(uint32_t count)
{
    mm_uvm_queue queue;
    mm_status st;

    CHECK_OK(mm_uvm_queue_open(world.cu, &queue, count, &st), &st);
    CHECK_OK(mm_uvm_queue_enable(&queue, mm_uvm_types(true), &st), &st);
    return queue;
}

int
world_count_files(void)
{
    int count = 0;

    for (int file = 0; file < 256; file++) {
        count += fcntl(file, F_GETFD) >= 0;
    }
    return count;
}
