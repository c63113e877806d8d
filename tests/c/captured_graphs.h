/* captured_graphs.h: uses of the parts of frames_model.h in streams that capture a graph, and replays
 * of it. */
#ifndef MM_TEST_CAPTURED_GRAPHS_H
#define MM_TEST_CAPTURED_GRAPHS_H

#include "frames_model.h"

enum { EQUAL = 1024, REPLAYS = 4, KERNELS = 64 };

/* A kernel that a graph launches again and again: it finds the value that the part has then. */
typedef struct {
    unsigned char *bytes;
    size_t count;
    unsigned char *expected, *written; /* NULL: it does not check, or not write */
} graph_kernel;

static struct {
    graph_kernel kernels[KERNELS];
    size_t count;
    size_t at_home; /* uses that got no frame */
    uint32_t frames[PARTS]; /* the numbers of the latest ones, in uses */
    CUgraph graph;
    CUgraphExec executable;
} captured;

static unsigned char next_value;

static inline void
run_graph_kernel(void *argument)
{
    const graph_kernel *k = argument;

    for (size_t i = 0; i < k->count && k->expected != NULL; i++) {
        CHECK_EQUAL(k->bytes[i], *k->expected);
    }
    if (k->written != NULL) {
        *k->written = ++next_value;
        memset(k->bytes, *k->written, k->count);
    }
}

static inline void
launch_captured(uint32_t part, CUdeviceptr address, bool checks, bool writes, CUstream stream)
{
    graph_kernel *k = &captured.kernels[captured.count++];

    CHECK(captured.count <= KERNELS);
    *k = (graph_kernel){(unsigned char *)(uintptr_t)address, model.parts[part].bytes,
                        checks ? &model.parts[part].value : NULL,
                        writes ? &model.parts[part].value : NULL};
    CHECK_EQUAL(world.launch(stream, run_graph_kernel, k), CUDA_SUCCESS);
}

/* Returns the address, or 0 if the part is used at home. */
static inline CUdeviceptr
acquire_captured(uint32_t part, bool writes, CUstream stream)
{
    const mm_part_use use = mm_frames_acquire(model.frames, part, writes, stream);

    captured.frames[part] = use.address != 0 ? use.frame : captured.frames[part];
    return use.address;
}

static inline mm_part_use
graph_use(uint32_t part)
{
    return (mm_part_use){.part = part, .frame = captured.frames[part]};
}

static inline CUdeviceptr
begin_use(uint32_t part, bool writes, CUstream stream)
{
    CUdeviceptr address = acquire_captured(part, writes, stream);
    CUdeviceptr place = address != 0 ? address : (CUdeviceptr)(uintptr_t)home_of(part);

    captured.at_home += address == 0;
    launch_captured(part, place, model.parts[part].access != MM_PART_SCRATCH, writes, stream);
    if (writes && address == 0) {
        CHECK_OK(mm_frames_changed(model.frames, part, stream, &st), &st);
    }
    return address;
}

static inline void
end_use(uint32_t part, CUdeviceptr address, bool writes, CUstream stream)
{
    if (address != 0) {
        CHECK_OK(mm_frames_release(model.frames, graph_use(part), writes, false, stream, &st),
                 &st);
    }
}

static inline void
use_captured(uint32_t part, bool writes, CUstream stream)
{
    end_use(part, begin_use(part, writes, stream), writes, stream);
}

static inline void
begin_captured(CUstream stream)
{
    memset(&captured, 0, sizeof captured);
    CHECK_EQUAL(world.begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
}

static inline void
end_captured(CUstream stream)
{
    CHECK_EQUAL(world.end_capture(stream, &captured.graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.instantiate(&captured.executable, captured.graph, 0), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(captured.graph), CUDA_SUCCESS);
}

static inline void
wait_for(CUstream stream)
{
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, 0}, &st), &st);
}

static inline void
replay(CUstream stream)
{
    mm_scope scope;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    CHECK_EQUAL(world.launch_graph(captured.executable, stream), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    wait_for(stream);
}

/* Homes have other contents at each replay. */
static inline void
replay_with_changed_homes(CUstream stream)
{
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    for (int i = 0; i < REPLAYS; i++) {
        for (uint32_t part = 0; part < PARTS; part++) {
            model.parts[part].value = ++next_value;
            memset(home_of(part), next_value, model.parts[part].bytes);
        }
        replay(stream);
    }
}

static inline void
destroy_captured(void)
{
    CHECK_EQUAL(world.destroy_executable(captured.executable), CUDA_SUCCESS);
}

static inline void
use_round(void)
{
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        acquire(i, false, 0);
        while (model.held_count > 0) {
            release(0);
        }
    }
    mm_frames_end_round(model.frames);
}

static inline void
begin_equal(uint32_t fit, mm_part_access access, bool lazy)
{
    seed = 1;
    next_value = 100;
    begin_model(&(model_options){
        .room = (size_t)fit * EQUAL, .bytes = EQUAL, .access = (int)access, .lazy = lazy});
}

/* The model has room for four parts. Returns the stream that captures. */
static inline CUstream
begin_graph(mm_part_access access, uint32_t stream)
{
    begin_equal(4, access, false);
    begin_captured(model.streams[stream]);
    return model.streams[stream];
}

static inline void
replay_and_end(CUstream stream)
{
    replay_with_changed_homes(stream);
    destroy_captured();
    end_model();
}

#endif
