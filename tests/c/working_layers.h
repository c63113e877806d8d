/* working_layers.h: a working set over layers of memory, its uses and its counters, for the tests of
 * working sets at work; and a gate that a thread opens later, for calls of the driver that are slow. */
#ifndef WORKING_LAYERS_H
#define WORKING_LAYERS_H

#include "failing_allocations.h"
#include "memory/working_loader.h"
#include "world.h"

enum { PAGE = 4096, SIZE = 4 * PAGE, LAYERS = 6 };

static mm_memory *layers[LAYERS];
static mm_status st;

static inline void
make_layers(void)
{
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = mm_memory_allocate(world.cu, SIZE, &st);
        CHECK(layers[i] != NULL);
        memset((void *)(uintptr_t)layers[i]->start, i + 1, SIZE);
    }
}

static inline void
free_layers(void)
{
    for (int i = 0; i < LAYERS; i++) {
        const unsigned char *bytes = (unsigned char *)(uintptr_t)layers[i]->start;
        if (bytes != NULL && !mm_guard_is_closed(&layers[i]->guard)) {
            CHECK_EQUAL(bytes[0], i + 1);
            CHECK_EQUAL(bytes[SIZE - 1], i + 1);
        }
        mm_memory_release(layers[i]);
    }
}

static inline mm_working_range
range_of_layer(int i)
{
    return (mm_working_range){.range = {layers[i]->start, SIZE, layers[i]->start},
                              .guard = &layers[i]->guard};
}

static inline mm_loader *
new_set(size_t budget)
{
    mm_loader *l = mm_loader_new(world.cu, 0, budget, &world, &st);

    CHECK_OK(l == NULL ? -1 : 0, &st);
    return l;
}

/* The nth group, counted from 0, of a set that has not added one after a removal. */
static inline mm_group_id
nth_group(uint32_t n)
{
    return (mm_group_id){n, n};
}

/* Returns the number of the group, which nth_group takes until one is added after a removal. */
static inline uint32_t
add_ranges(mm_loader *l, const mm_working_range *ranges, size_t count, mm_group_access access,
           bool at_home)
{
    mm_group_id group = {.place = MM_NO_GROUP};

    CHECK_OK(mm_loader_add(l, ranges, count, access, at_home, &group, &st), &st);
    return (uint32_t)group.number;
}

static inline uint32_t
add_layer(mm_loader *l, int i, mm_group_access access)
{
    mm_working_range range = range_of_layer(i);

    return add_ranges(l, &range, 1, access, false);
}

static inline mm_loader *
set_of_layers(size_t budget)
{
    mm_loader *l = new_set(budget);

    for (int i = 0; i < LAYERS; i++) {
        CHECK_EQUAL(add_layer(l, i, i % 2 == 0 ? MM_GROUP_READ : MM_GROUP_WRITE), i);
    }
    return l;
}

static inline CUstream
new_stream(void)
{
    CUstream stream = NULL;

    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    return stream;
}

static inline void
end_stream(CUstream stream)
{
    CHECK_OK(mm_stream_synchronize(world.cu, (mm_device_stream){stream, MM_ANY_DEVICE}, &st), &st);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
}

static inline void
use_group(mm_loader *l, uint32_t group, CUstream stream)
{
    mm_working_use use;

    CHECK_OK(mm_loader_acquire(l, nth_group(group), false, stream, &use, &st), &st);
    CHECK_OK(mm_loader_release(l, nth_group(group), stream, &st), &st);
}

static inline mm_loader_report
report_of(mm_loader *l)
{
    mm_loader_report report;

    mm_loader_read_report(l, &report);
    return report;
}

static inline void
wait_for_loads(mm_loader *l, uint64_t loads)
{
    const struct timespec nap = {.tv_nsec = 100000};

    while (report_of(l).loads < loads) {
        (void)nanosleep(&nap, NULL);
    }
}

static inline void
close_set(mm_loader *l)
{
    CHECK_OK(mm_loader_close(l, &st), &st);
    mm_loader_free(l);
}

static atomic_bool gate_is_open;

static inline void *
open_gate_later(void *nothing)
{
    const struct timespec nap = {.tv_nsec = 20000000};

    (void)nanosleep(&nap, NULL);
    atomic_store(&gate_is_open, true);
    return nothing;
}

#endif
