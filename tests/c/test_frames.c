/* test_frames.c: parts in frames and at home: their contents under random uses, writes, rounds and
 * failures, and the memory that the device gives for them.
 *
 * Usage: test_frames PATH_OF_THE_EMULATED_DRIVER, which must have at least two devices. */
#include "working/part_frames.h"

#include <stdatomic.h>

#include "failing_allocations.h"
#include "memory/stream.h"
#include "working/slab.h"
#include "world.h"

enum {
    PARTS = 9,
    STREAMS = 3,
    MOST_HELD = 4,
    LARGEST = 3000,
    EQUAL = 1024,
    SPACE = 4096,
    PAGE = 4096,
    STEPS = 250,
    THREAD_USES = 180
};

static mm_status st;
static uint64_t seed;

static uint32_t
random_below(uint32_t limit)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % limit;
}

/* --- a driver whose device memory is watched ------------------------------------------------ */

static mm_driver watched;
static atomic_size_t most_taken;

/* In a scope. */
static CUresult
note_taken(CUresult code)
{
    size_t free_bytes = 0, total = 0;

    if (world.cu->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS
        && total - free_bytes > atomic_load(&most_taken)) {
        atomic_store(&most_taken, total - free_bytes);
    }
    return code;
}

static CUresult CUDAAPI
watched_alloc(CUdeviceptr *start, size_t size)
{
    return note_taken(world.cu->MemAlloc(start, size));
}

static CUresult CUDAAPI
watched_copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return note_taken(world.cu->MemcpyAsync(to, from, size, stream));
}

/* --- the model ------------------------------------------------------------------------------ */

typedef struct {
    size_t bytes;
    unsigned char value; /* of each byte, by the work that is queued */
    bool is_stuck; /* its way home failed: its frame is its place */
} model_part;

typedef struct {
    uint32_t part, stream;
    CUdeviceptr address;
    bool writes;
} model_use;

static struct {
    mm_frames *frames;
    mm_slab *home;
    CUstream streams[STREAMS];
    model_part parts[PARTS];
    model_use held[MOST_HELD];
    uint32_t held_count;
    unsigned rounds;
    bool faults; /* are injected */
} model;

static unsigned char *
home_of(uint32_t part)
{
    return (unsigned char *)(uintptr_t)model.home->start + (size_t)part * SPACE;
}

/* What a kernel does. */
typedef struct {
    unsigned char *bytes;
    size_t count;
    unsigned char expected, written;
    bool writes;
} kernel;

static void
run_kernel(void *argument)
{
    kernel *k = argument;

    for (size_t i = 0; i < k->count; i++) {
        CHECK_EQUAL(k->bytes[i], k->expected);
    }
    if (k->writes) {
        memset(k->bytes, k->written, k->count);
    }
    free(k);
}

static void
launch(uint32_t part, CUdeviceptr address, bool writes, uint32_t stream)
{
    model_part *p = &model.parts[part];
    kernel *k = malloc(sizeof *k);

    CHECK(k != NULL);
    *k = (kernel){.bytes = (unsigned char *)(uintptr_t)address,
                  .count = p->bytes,
                  .expected = p->value,
                  .written = (unsigned char)(p->value + 1 + random_below(200)),
                  .writes = writes};
    p->value = writes ? k->written : p->value;
    CHECK_EQUAL(world.launch(model.streams[stream], run_kernel, k), CUDA_SUCCESS);
}

/* What the caller must do itself: uses that write are ordered with all others. */
static void
join_streams(uint32_t from_first, uint32_t to_first)
{
    mm_scope scope;

    CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
    for (uint32_t i = 0; i < STREAMS; i++) {
        CUevent event = NULL;
        uint32_t from = from_first < STREAMS ? from_first : i;
        uint32_t to = to_first < STREAMS ? to_first : i;
        CHECK_EQUAL(world.cu->EventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
        CHECK_EQUAL(world.cu->EventRecord(event, model.streams[from]), CUDA_SUCCESS);
        CHECK_EQUAL(world.cu->StreamWaitEvent(model.streams[to], event, 0), CUDA_SUCCESS);
        CHECK_EQUAL(world.cu->EventDestroy(event), CUDA_SUCCESS);
    }
    mm_scope_leave(&scope);
}

static void
make_streams(void)
{
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(mm_stream_create(world.cu, &model.streams[i], &st), &st);
    }
}

/* Frames with room for some of the parts, of random sizes if `bytes` is 0. */
static void
begin_model(size_t room, size_t bytes, bool host_waits)
{
    memset(&model, 0, sizeof model);
    memcpy(&watched, world.cu, sizeof watched);
    watched.MemAlloc = watched_alloc;
    watched.MemcpyAsync = watched_copy;
    atomic_store(&most_taken, 0);
    make_streams();
    model.home = mm_slab_on_host(0, (size_t)PARTS * SPACE, &st);
    CHECK_OK(model.home == NULL ? -1 : 0, &st);
    CHECK_OK(mm_slab_lock(&watched, model.home, &st), &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        model.parts[i].bytes = bytes > 0 ? bytes : 1 + random_below(LARGEST);
        model.parts[i].value = (unsigned char)(i + 1);
        memset(home_of(i), (int)i + 1, model.parts[i].bytes);
    }
    model.frames = mm_frames_new(&watched, 0, room, host_waits, &st);
    CHECK_OK(model.frames == NULL ? -1 : 0, &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        uint32_t part = PARTS;
        CHECK_OK(mm_frames_add(model.frames, model.home->start + (CUdeviceptr)i * SPACE,
                               model.parts[i].bytes, i % 2 == 0, &part, &st),
                 &st);
        CHECK_EQUAL(part, i);
    }
}

/* In random calls of the set, one call of the driver fails: before its effect, or after it. */
static void
arm(void)
{
    static const char *const names[] = {
        "cuMemcpyAsync",    "cuEventRecord",         "cuEventCreate",       "cuStreamWaitEvent",
        "cuCtxSynchronize", "cuCtxPushCurrent",      "cuStreamIsCapturing", "cuEventSynchronize",
        "cuEventQuery",     "cuStreamGetCaptureInfo"};
    const uint32_t count = sizeof names / sizeof *names;

    if (model.faults && random_below(5) == 0) {
        const char *name = names[random_below(count)];
        int after = strcmp(name, "cuCtxPushCurrent") != 0 && random_below(2) == 0;
        (void)world.fail(name, 1 + random_below(3), CUDA_ERROR_UNKNOWN, after);
    }
}

/* Ends that, and hands the result of a call through. */
static int
disarmed(int rc)
{
    world.fail_clear();
    return rc;
}

static bool
is_held(uint32_t part)
{
    for (uint32_t i = 0; i < model.held_count; i++) {
        if (model.held[i].part == part) {
            return true;
        }
    }
    return false;
}

static mm_frames_report
report(void)
{
    mm_frames_report r;

    mm_frames_read_report(model.frames, &r);
    return r;
}

static void
check_report(size_t room)
{
    mm_frames_report r = report();

    CHECK(r.present <= r.room && r.room <= room);
    CHECK(atomic_load(&most_taken) < room + PAGE);
    CHECK(r.hits + r.mapped <= r.acquired);
    CHECK(model.faults || r.failures == 0);
}

/* --- uses ----------------------------------------------------------------------------------- */

/* In place: what is not in a frame is used at home, behind the copies home. A write there is told. */
static void
use_at_home(uint32_t part, bool writes, uint32_t stream)
{
    if (model.parts[part].is_stuck) {
        return; /* its contents are in the frame, which is its place for good */
    }
    arm();
    if (disarmed(mm_frames_settle(model.frames, model.streams[stream], &st)) < 0) {
        CHECK(model.faults);
        CHECK_OK(mm_frames_settle(model.frames, model.streams[stream], &st), &st);
    }
    launch(part, model.home->start + (CUdeviceptr)part * SPACE, writes, stream);
    if (writes) {
        int rc;
        arm();
        rc = disarmed(mm_frames_changed(model.frames, part, model.streams[stream], &st));
        CHECK(rc == 0 || model.faults);
        join_streams(stream, STREAMS);
    }
}

static void
acquire(uint32_t part, bool writes, uint32_t stream)
{
    CUdeviceptr address;

    if (writes) {
        join_streams(STREAMS, stream);
    }
    arm();
    address = mm_frames_acquire(model.frames, part, writes, model.streams[stream]);
    (void)disarmed(0);
    if (address == 0) {
        if (!writes || !is_held(part)) {
            use_at_home(part, writes, stream);
        }
        return;
    }
    CHECK_EQUAL(address % 256, 0);
    launch(part, address, writes, stream);
    if (writes) {
        join_streams(stream, STREAMS);
    }
    model.held[model.held_count++] = (model_use){part, stream, address, writes};
}

static void
release(uint32_t i)
{
    model_use use = model.held[i];

    model.held[i] = model.held[--model.held_count];
    arm();
    if (disarmed(
            mm_frames_release(model.frames, use.part, use.writes, model.streams[use.stream], &st))
        < 0) {
        CHECK(model.faults);
        model.parts[use.part].is_stuck = true;
    }
    if (use.writes) {
        join_streams(use.stream, STREAMS);
    }
}

static void
begin_or_end_round(void)
{
    if (model.rounds > 0 && random_below(2) == 0) {
        mm_frames_end_round(model.frames);
        model.rounds--;
    } else if (model.rounds < 2) {
        int rc;
        join_streams(STREAMS, 0);
        arm();
        rc = disarmed(mm_frames_begin_round(model.frames, model.streams[0], &st));
        CHECK(rc == 0 || model.faults);
        model.rounds++;
    }
}

/* One writes alone: a part that others use is only read. */
static void
random_step(uint32_t step, bool in_order)
{
    uint32_t part = in_order ? step / 2 % PARTS : random_below(PARTS);
    uint32_t stream = random_below(STREAMS);

    if (model.held_count == MOST_HELD || (model.held_count > 0 && random_below(2) == 0)) {
        release(random_below(model.held_count));
    } else if (random_below(12) == 0) {
        begin_or_end_round();
    } else if (random_below(9) == 0 && !is_held(part)) {
        join_streams(STREAMS, stream);
        use_at_home(part, true, stream);
    } else {
        bool writes = part % 2 == 0 && !is_held(part) && random_below(2) == 0;
        for (uint32_t i = 0; i < model.held_count; i++) {
            if (model.held[i].part == part && model.held[i].writes) {
                return;
            }
        }
        acquire(part, writes, stream);
    }
}

/* What is at home at the end is what was written last. */
static void
end_model(void)
{
    while (model.held_count > 0) {
        release(0);
    }
    world.fail_clear();
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        for (size_t j = 0; j < model.parts[i].bytes && !model.parts[i].is_stuck; j++) {
            CHECK_EQUAL(home_of(i)[j], model.parts[i].value);
        }
    }
    mm_frames_close(model.frames);
    CHECK_EQUAL(report().room, 0);
    CHECK_EQUAL(report().present, 0);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 0, false, model.streams[0]), 0);
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (model.rounds++; model.rounds > 0; model.rounds--) { /* one began too late */
        mm_frames_end_round(model.frames);
    }
    mm_frames_free(model.frames);
    mm_slab_free(model.home);
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(world.cu->StreamDestroy(model.streams[i]), CUDA_SUCCESS);
    }
    CHECK_EQUAL(world.live_streams(), 0);
    CHECK_EQUAL(world.live_allocations(), 0);
}

static void
run_model(uint64_t run, bool lazy, bool faults)
{
    size_t room;

    world.schedule(lazy);
    seed = run + 1;
    room = 512 + random_below(5 * LARGEST);
    begin_model(room, 0, run % 5 == 0);
    model.faults = faults;
    for (uint32_t step = 0; step < STEPS; step++) {
        random_step(step, run % 3 == 0);
        check_report(room);
    }
    end_model();
    world.schedule(0);
}

static void
contents_are_right_under_random_uses(void)
{
    for (uint64_t run = 0; run < 60; run++) {
        run_model(run, run % 2 == 0, false);
    }
}

static void
contents_are_right_when_calls_fail(void)
{
    for (uint64_t run = 100; run < 200; run++) {
        run_model(run, run % 2 == 0, true);
    }
}

/* --- single cases --------------------------------------------------------------------------- */

/* Each makes a use of the same order, so that all is known by the third round. */
static void
use_round(uint32_t parts)
{
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (uint32_t i = 0; i < parts; i++) {
        acquire(i, false, 0);
        while (model.held_count > 0) {
            release(0);
        }
    }
    mm_frames_end_round(model.frames);
}

/* Parts of a size, of which so many fit. */
static void
begin_equal(uint32_t fit)
{
    seed = 1;
    begin_model((size_t)fit * EQUAL, EQUAL, false);
}

/* A loop is loaded ahead, each part at most once a round. */
static void
a_loop_is_loaded_ahead(void)
{
    mm_frames_report before;

    begin_equal(3);
    for (int i = 0; i < 3; i++) {
        use_round(PARTS);
    }
    before = report();
    for (int i = 0; i < 5; i++) {
        use_round(PARTS);
    }
    CHECK(report().loads - before.loads <= (uint64_t)5 * PARTS);
    CHECK(report().ahead - before.ahead >= (uint64_t)5 * (PARTS - 1));
    CHECK_EQUAL(report().mapped, 0);
    end_model();
}

static void
held_parts_leave_no_room(void)
{
    begin_equal(2);
    acquire(0, false, 0);
    acquire(1, false, 1);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 2, false, model.streams[0]), 0);
    CHECK_EQUAL(mm_frames_acquire(model.frames, 0, false, model.streams[1]),
                model.held[0].address);
    CHECK_OK(mm_frames_release(model.frames, 0, false, model.streams[1], &st), &st);
    CHECK_EQUAL(report().mapped, 1);
    release(1);
    CHECK(mm_frames_acquire(model.frames, 2, false, model.streams[0]) != 0);
    CHECK_OK(mm_frames_release(model.frames, 2, false, model.streams[0], &st), &st);
    end_model();
}

static void
a_part_larger_than_the_room_is_used_at_home(void)
{
    uint32_t part;

    begin_equal(2);
    CHECK_OK(mm_frames_add(model.frames, model.home->start, 2 * EQUAL + 1, false, &part, &st),
             &st);
    for (int i = 0; i < 5; i++) {
        CHECK_EQUAL(mm_frames_acquire(model.frames, part, false, model.streams[0]), 0);
    }
    CHECK_EQUAL(report().mapped, 5);
    CHECK_EQUAL(report().loads, report().ahead);
    end_model();
}

/* A graph would be replayed without the copies. */
static void
a_stream_that_captures_uses_parts_at_home(void)
{
    CUgraph graph;

    begin_equal(4);
    use_round(PARTS);
    CHECK_EQUAL(world.begin_capture(model.streams[1], CU_STREAM_CAPTURE_MODE_GLOBAL),
                CUDA_SUCCESS);
    for (uint32_t i = 0; i < PARTS; i++) {
        CHECK_EQUAL(mm_frames_acquire(model.frames, i, false, model.streams[1]), 0);
    }
    CHECK_EQUAL(world.end_capture(model.streams[1], &graph), CUDA_SUCCESS);
    CHECK_EQUAL(world.destroy_graph(graph), CUDA_SUCCESS);
    use_round(PARTS);
    end_model();
}

static void
every_allocation_may_fail(void)
{
    for (long n = 1; n < 40; n++) {
        mm_frames *frames;
        mm_slab *home;
        uint32_t part;
        CUstream stream;
        CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
        fail_allocation(n);
        home = mm_slab_on_host(0, (size_t)2 * SPACE, &st);
        CHECK(home != NULL || st.kind == MM_NO_MEMORY);
        frames = mm_frames_new(world.cu, 0, SPACE, false, &st);
        CHECK(frames != NULL || st.kind == MM_NO_MEMORY);
        if (home != NULL && frames != NULL) {
            bool locked = mm_slab_lock(world.cu, home, &st) == 0;
            for (int i = 0; i < 2 && locked; i++) {
                bool added = mm_frames_add(frames, home->start + (CUdeviceptr)i * SPACE, SPACE,
                                           true, &part, &st)
                             == 0;
                CHECK(added || st.kind == MM_NO_MEMORY);
            }
            for (uint32_t i = 0; i < 2 * mm_frames_count(frames); i++) {
                if (mm_frames_acquire(frames, i / 2, true, stream) != 0) {
                    CHECK_OK(mm_frames_release(frames, i / 2, true, stream, &st), &st);
                }
            }
        }
        fail_allocation(0);
        CHECK_EQUAL(world.cu->StreamSynchronize(stream), CUDA_SUCCESS);
        mm_frames_free(frames);
        mm_slab_free(home);
        CHECK_EQUAL(world.cu->StreamDestroy(stream), CUDA_SUCCESS);
        CHECK_EQUAL(world.live_allocations(), 0);
    }
}

/* --- threads -------------------------------------------------------------------------------- */

static atomic_uint next_thread;

/* The use of a part by a thread, which writes its own parts and reads those that nobody writes. */
static void
use_in_thread(uint32_t part, bool writes, unsigned char value, CUstream stream)
{
    CUdeviceptr address = mm_frames_acquire(model.frames, part, writes, stream);
    kernel *k = malloc(sizeof *k);
    mm_status mine;

    CHECK(k != NULL);
    *k = (kernel){.bytes = address != 0 ? (unsigned char *)(uintptr_t)address : home_of(part),
                  .count = model.parts[part].bytes,
                  .expected = value,
                  .written = (unsigned char)(value + 1),
                  .writes = writes};
    if (address == 0) {
        CHECK_OK(mm_frames_settle(model.frames, stream, &mine), &mine);
    }
    CHECK_EQUAL(world.launch(stream, run_kernel, k), CUDA_SUCCESS);
    if (address != 0) {
        CHECK_OK(mm_frames_release(model.frames, part, writes, stream, &mine), &mine);
    } else if (writes) {
        CHECK_OK(mm_frames_changed(model.frames, part, stream, &mine), &mine);
    }
}

static void *
use_from_a_thread(void *nothing)
{
    uint32_t mine = atomic_fetch_add(&next_thread, 1), random = mine;
    CUstream stream = model.streams[mine];
    mm_status ended;

    for (uint32_t i = 0; i < THREAD_USES; i++) {
        if (i % 20 == 0) {
            CHECK_OK(mm_frames_begin_round(model.frames, stream, &ended), &ended);
        }
        if (i % 3 == 0) {
            use_in_thread(2 * mine, true, (unsigned char)(i / 3), stream);
        } else {
            uint32_t part = (random = random * 1103515245 + 12345) / 65536 % 4 * 2 + 1;
            use_in_thread(part, false, (unsigned char)(part + 1), stream);
        }
        if (i % 20 == 19) {
            mm_frames_end_round(model.frames);
        }
    }
    return nothing;
}

static void
threads_use_parts_at_once(void)
{
    for (int run = 0; run < 12; run++) {
        world.schedule(run % 2);
        seed = (uint64_t)run + 1;
        begin_model((size_t)(1 + run) * 1500, 0, false);
        for (uint32_t i = 0; i < STREAMS; i++) {
            model.parts[2 * i].value = 0;
            memset(home_of(2 * i), 0, model.parts[2 * i].bytes);
        }
        atomic_store(&next_thread, 0);
        check_threads(STREAMS, use_from_a_thread, NULL);
        for (uint32_t i = 0; i < STREAMS; i++) {
            model.parts[2 * i].value = THREAD_USES / 3;
        }
        check_report((size_t)(1 + run) * 1500);
        end_model();
        world.schedule(0);
    }
}

static atomic_bool is_closing;

static void *
use_until_it_is_closed(void *nothing)
{
    uint32_t mine = atomic_fetch_add(&next_thread, 1) % STREAMS;
    mm_status ignored;

    for (uint32_t i = 0; i < 400; i++) {
        uint32_t part = (i * 5 + mine) % PARTS;
        if (i == 200 && mine == 0) {
            mm_frames_close(model.frames);
            atomic_store(&is_closing, true);
        }
        if (mm_frames_acquire(model.frames, part, false, model.streams[mine]) != 0) {
            CHECK_OK(mm_frames_release(model.frames, part, false, model.streams[mine], &ignored),
                     &ignored);
        } else if (atomic_load(&is_closing)) {
            CHECK_OK(mm_frames_changed(model.frames, part, model.streams[mine], &ignored),
                     &ignored);
        }
    }
    return nothing;
}

static void
a_set_is_closed_while_threads_use_it(void)
{
    for (int run = 0; run < 6; run++) {
        seed = (uint64_t)run;
        begin_model(4 * LARGEST, 0, run % 2 == 0);
        atomic_store(&next_thread, 0);
        atomic_store(&is_closing, false);
        check_threads(STREAMS, use_until_it_is_closed, NULL);
        end_model();
    }
}

int
main(int argc, char **argv)
{
    static const check_test tests[] = {
        CHECK_TEST(contents_are_right_under_random_uses),
        CHECK_TEST(a_loop_is_loaded_ahead),
        CHECK_TEST(held_parts_leave_no_room),
        CHECK_TEST(a_part_larger_than_the_room_is_used_at_home),
        CHECK_TEST(a_stream_that_captures_uses_parts_at_home),
        CHECK_TEST(threads_use_parts_at_once),
        CHECK_TEST(a_set_is_closed_while_threads_use_it),
        CHECK_TEST(every_allocation_may_fail),
        CHECK_TEST(contents_are_right_when_calls_fail),
    };

    if (argc != 2) {
        (void)fprintf(stderr, "usage: test_frames PATH_OF_THE_EMULATED_DRIVER\n");
        return 2;
    }
    world_open(argv[1]);
    return check_run(tests, sizeof tests / sizeof *tests);
}
