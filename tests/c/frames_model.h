/* frames_model.h: a model of parts in frames, and of parts of managed memory: random uses, writes
 * at home, rounds, orders, and parts that come and go; what kernels and the host must find, and
 * the bytes that are present. */
#ifndef FRAMES_MODEL_H
#define FRAMES_MODEL_H

#include <stdatomic.h>

#include "memory/stream.h"
#include "working/part_frames.h"
#include "working/slab.h"
#include "working/use_ends.h"
#include "random_numbers.h"
#include "world.h"

enum {
    PARTS = 9,
    STREAMS = 3,
    MOST_HELD = 4,
    LARGEST = 3000,
    PAGE = 4096,
    SPACE = 4 * PAGE, /* of the home of each part */
    LARGEST_MANAGED = 3 * PAGE - 200,
    MOST_ORDER = 14
};

static mm_status st;

/* --- a driver whose device memory is watched ------------------------------------------------ */

static mm_driver watched;
static atomic_size_t most_taken;

/* In a scope. */
static inline CUresult
note_taken(CUresult code)
{
    size_t free_bytes = 0, total = 0;

    if (world.cu->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS
        && total - free_bytes > atomic_load(&most_taken)) {
        atomic_store(&most_taken, total - free_bytes);
    }
    return code;
}

static inline CUresult CUDAAPI
watched_alloc(CUdeviceptr *start, size_t size)
{
    return note_taken(world.cu->MemAlloc(start, size));
}

static inline CUresult CUDAAPI
watched_copy(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return note_taken(world.cu->MemcpyAsync(to, from, size, stream));
}

/* --- the model ------------------------------------------------------------------------------ */

typedef struct {
    size_t bytes;
    mm_part_access access;
    uint32_t number;
    unsigned char value; /* of each byte, by the work that is queued */
    bool is_live;
    bool is_stuck; /* its way home failed: its frame is its place */
    bool is_sent; /* its value goes home by copies of the set */
    bool was_present; /* since it was added */
} model_part;

typedef struct {
    uint32_t part, stream;
    CUdeviceptr address;
    bool writes;
} model_use;

static struct {
    mm_frames *frames;
    mm_slab *slab; /* the homes, or: */
    CUdeviceptr managed;
    CUstream streams[STREAMS];
    model_part parts[PARTS];
    model_use held[MOST_HELD];
    uint32_t held_count;
    uint32_t live;
    size_t room;
    unsigned rounds;
    bool faults; /* are injected */
    bool lazy;
} model;

static inline bool
is_managed(void)
{
    return model.managed != 0;
}

/* Some managed parts begin inside of a page. */
static inline unsigned char *
home_of(uint32_t part)
{
    CUdeviceptr start = is_managed() ? model.managed + part % 2 * 100 : model.slab->start;

    return (unsigned char *)(uintptr_t)start + (size_t)part * SPACE;
}

/* What a kernel does. */
typedef struct {
    unsigned char *bytes;
    size_t count;
    unsigned char expected, written;
    bool checks, writes;
} kernel;

static inline void
run_kernel(void *argument)
{
    kernel *k = argument;

    for (size_t i = 0; i < k->count && k->checks; i++) {
        CHECK_EQUAL(k->bytes[i], k->expected);
    }
    if (k->writes) {
        memset(k->bytes, k->written, k->count);
    }
    free(k);
}

static inline void
launch(kernel given, CUstream stream)
{
    kernel *k = malloc(sizeof *k);

    CHECK(k != NULL);
    *k = given;
    CHECK_EQUAL(world.launch(stream, run_kernel, k), CUDA_SUCCESS);
}

/* What is found by the first kernel of a use: nothing is known of scratch. */
static inline void
launch_use(uint32_t part, CUdeviceptr address, bool writes, uint32_t stream)
{
    model_part *p = &model.parts[part];
    kernel k = {.bytes = (unsigned char *)(uintptr_t)address,
                .count = p->bytes,
                .expected = p->value,
                .written = (unsigned char)(p->value + 1 + random_below(200)),
                .checks = p->access != MM_PART_SCRATCH,
                .writes = writes};

    p->value = writes ? k.written : p->value;
    launch(k, model.streams[stream]);
}

/* What is found by the last one. */
static inline void
launch_check(const model_use *use)
{
    const model_part *p = &model.parts[use->part];

    launch((kernel){.bytes = (unsigned char *)(uintptr_t)use->address,
                    .count = p->bytes,
                    .expected = p->value,
                    .checks = true},
           model.streams[use->stream]);
}

/* What the caller must do itself: uses that write are ordered with all others. */
static inline void
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

/* --- failures ------------------------------------------------------------------------------- */

/* In random calls of the set, one call of the driver fails: before its effect, or after it. */
static inline void
arm(void)
{
    static const char *const names[] = {
        "cuMemcpyAsync",          "cuEventRecord",      "cuEventCreate",
        "cuStreamWaitEvent",      "cuCtxSynchronize",   "cuCtxPushCurrent",
        "cuStreamIsCapturing",    "cuEventSynchronize", "cuEventQuery",
        "cuStreamGetCaptureInfo", "cuMemPrefetchAsync", "cuMemDiscardAndPrefetchBatchAsync"};
    const uint32_t count = sizeof names / sizeof *names;

    if (model.faults && random_below(5) == 0) {
        const char *name = names[random_below(count)];
        int after = strcmp(name, "cuCtxPushCurrent") != 0 && random_below(2) == 0;
        (void)world.fail(name, 1 + random_below(3), CUDA_ERROR_UNKNOWN, after);
    }
}

/* Ends that, and hands the result of a call through. */
static inline int
disarmed(int rc)
{
    world.fail_clear();
    return rc;
}

/* --- life ----------------------------------------------------------------------------------- */

static inline mm_part_access
random_access(void)
{
    return (mm_part_access)random_below(3);
}

/* False after a failure of the driver. */
static inline bool
add_part(uint32_t part, mm_part_access access)
{
    model_part *p = &model.parts[part];
    int rc;

    arm();
    rc = disarmed(mm_frames_add(model.frames, (CUdeviceptr)(uintptr_t)home_of(part), p->bytes,
                                access, &p->number, &st));
    if (rc < 0) {
        CHECK(model.faults);
        return false;
    }
    CHECK(p->number < PARTS); /* numbers of removed parts come again */
    p->access = access;
    p->is_live = true;
    p->was_present = false;
    model.live++;
    return true;
}

static inline void
make_homes(bool managed)
{
    if (managed) {
        mm_scope scope;
        CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
        CHECK_EQUAL(
            world.cu->MemAllocManaged(&model.managed, (size_t)PARTS * SPACE, CU_MEM_ATTACH_GLOBAL),
            CUDA_SUCCESS);
        mm_scope_leave(&scope);
    } else {
        model.slab = mm_slab_on_host(0, (size_t)PARTS * SPACE, &st);
        CHECK_OK(model.slab == NULL ? -1 : 0, &st);
        CHECK_OK(mm_slab_lock(&watched, model.slab, &st), &st);
    }
}

typedef struct {
    size_t room;
    size_t bytes; /* of each part; 0: at random */
    bool host_waits, managed, faults, lazy;
    int access; /* of each part; -1: at random */
} model_options;

static inline void
begin_model(const model_options *o)
{
    memset(&model, 0, sizeof model);
    memcpy(&watched, world.cu, sizeof watched);
    watched.MemAlloc = watched_alloc;
    watched.MemcpyAsync = watched_copy;
    atomic_store(&most_taken, 0);
    world.schedule(o->lazy);
    for (int i = 0; i < STREAMS; i++) {
        CHECK_OK(mm_stream_create(world.cu, &model.streams[i], &st), &st);
    }
    make_homes(o->managed);
    model.room = o->room;
    model.lazy = o->lazy;
    model.frames = mm_frames_new(&watched, 0, o->room, o->host_waits, o->managed, false, &st);
    CHECK_OK(model.frames == NULL ? -1 : 0, &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        uint32_t largest = o->managed ? LARGEST_MANAGED : LARGEST;
        model.parts[i].bytes = o->bytes > 0 ? o->bytes : 1 + random_below(largest);
        model.parts[i].value = (unsigned char)(i + 1);
        memset(home_of(i), (int)i + 1, model.parts[i].bytes);
        CHECK(add_part(i, o->access < 0 ? random_access() : (mm_part_access)o->access));
        CHECK_EQUAL(model.parts[i].number, i);
    }
    model.faults = o->faults;
}

/* --- what the set says of itself ------------------------------------------------------------ */

static inline mm_frames_report
report(void)
{
    mm_frames_report r;

    mm_frames_read_report(model.frames, &r);
    return r;
}

/* 1: all of a managed part is on the device; 2: at home; 0: in several places; -1: nowhere yet. */
static inline int
place_of(uint32_t part)
{
    int type = 0, id = 0;

    CHECK_EQUAL(world.residency((CUdeviceptr)(uintptr_t)home_of(part), model.parts[part].bytes,
                                &type, &id),
                0);
    return type;
}

static inline void
check_report(void)
{
    mm_frames_report r = report();
    size_t present = 0, kept = 0;

    for (uint32_t i = 0; i < PARTS; i++) {
        model_part *p = &model.parts[i];
        bool is_present = p->is_live && mm_frames_have(model.frames, p->number);
        present += is_present ? p->bytes : 0;
        p->was_present = p->is_live && (p->was_present || is_present);
        kept += p->was_present ? p->bytes : 0;
        if (is_managed() && is_present && !model.lazy && !model.faults) {
            CHECK_EQUAL(place_of(i), 1); /* as operations run at once */
        }
    }
    CHECK_EQUAL(r.room, model.room);
    CHECK_EQUAL(r.present, present);
    CHECK(r.present <= r.room);
    CHECK_EQUAL(r.kept, is_managed() ? kept : r.room);
    CHECK_EQUAL(r.parts, model.live);
    CHECK(is_managed() || atomic_load(&most_taken) < model.room + PAGE);
    CHECK(r.hits + r.mapped <= r.acquired && r.ahead <= r.loads);
    CHECK(model.faults || r.failures == 0);
}

/* --- uses ----------------------------------------------------------------------------------- */

static inline bool
is_held(uint32_t part)
{
    for (uint32_t i = 0; i < model.held_count; i++) {
        if (model.held[i].part == part) {
            return true;
        }
    }
    return false;
}

static inline bool
is_written(uint32_t part)
{
    for (uint32_t i = 0; i < model.held_count; i++) {
        if (model.held[i].part == part && model.held[i].writes) {
            return true;
        }
    }
    return false;
}

/* What is not in a frame is used at home, behind the copies home, and a write there is reported. */
/* A use that no graph has. */
static inline mm_part_use
plain_use(uint32_t part)
{
    return (mm_part_use){.part = part};
}

static inline void
use_at_home(uint32_t part, bool writes, uint32_t stream)
{
    model_part *p = &model.parts[part];

    if (p->is_stuck) {
        return; /* its contents are in the frame, which is its place for good */
    }
    arm();
    if (disarmed(mm_frames_settle(model.frames, model.streams[stream], &st)) < 0) {
        CHECK(model.faults);
        CHECK_OK(mm_frames_settle(model.frames, model.streams[stream], &st), &st);
    }
    launch_use(part, (CUdeviceptr)(uintptr_t)home_of(part), writes, stream);
    if (writes) {
        int rc;
        p->is_sent = false;
        arm();
        rc = disarmed(mm_frames_changed(model.frames, p->number, model.streams[stream], &st));
        CHECK(rc == 0 || model.faults);
        join_streams(stream, STREAMS);
    }
}

static inline void
acquire(uint32_t part, bool writes, uint32_t stream)
{
    model_part *p = &model.parts[part];
    CUdeviceptr address;

    if (writes) {
        join_streams(STREAMS, stream);
    }
    arm();
    address = mm_frames_acquire(model.frames, p->number, writes, model.streams[stream]).address;
    (void)disarmed(0);
    check_report();
    if (address == 0) {
        use_at_home(part, writes, stream);
        return;
    }
    CHECK(mm_frames_have(model.frames, p->number));
    CHECK(is_managed() ? address == (CUdeviceptr)(uintptr_t)home_of(part) : address % 512 == 0);
    launch_use(part, address, writes, stream);
    if (writes) {
        p->is_sent = false;
        join_streams(stream, STREAMS);
    }
    model.held[model.held_count++] = (model_use){part, stream, address, writes};
}

/* Half of the failures are met by another attempt, as callers may do. */
static inline bool
send_use(const model_use *use, bool goes_on)
{
    model_part *p = &model.parts[use->part];
    CUstream stream = model.streams[use->stream];

    launch_check(use);
    arm();
    if (disarmed(mm_frames_release(model.frames, plain_use(p->number), use->writes, goes_on,
                                   stream, &st))
        < 0) {
        CHECK(model.faults);
        if (random_below(2) == 0) {
            return false;
        }
        CHECK_OK(mm_frames_release(model.frames, plain_use(p->number), use->writes, goes_on,
                                   stream, &st),
                 &st);
    }
    p->is_sent = p->is_sent || use->writes;
    return true;
}

static inline void
release(uint32_t i)
{
    model_use use = model.held[i];

    model.held[i] = model.held[--model.held_count];
    if (!send_use(&use, false)) {
        model.parts[use.part].is_stuck = true;
    }
    if (use.writes) {
        join_streams(use.stream, STREAMS);
    }
}

/* What was written goes home, and the part is only read from then on. */
static inline void
go_on(uint32_t i)
{
    if (send_use(&model.held[i], true)) {
        model.held[i].writes = false;
    }
}

static inline void
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

/* The host finds at home what released uses have written. */
static inline void
wait_for_copies(void)
{
    arm();
    if (disarmed(mm_frames_wait(model.frames, &st)) < 0) {
        CHECK(model.faults);
        return;
    }
    for (uint32_t i = 0; i < PARTS && !is_managed(); i++) {
        const model_part *p = &model.parts[i];
        if (p->is_sent && p->access == MM_PART_WRITE && !p->is_stuck && !is_written(i)) {
            CHECK_EQUAL(home_of(i)[0], p->value);
            CHECK_EQUAL(home_of(i)[p->bytes - 1], p->value);
        }
    }
}

/* Only live parts that nobody holds leave. Of scratch, nothing is known then. */
static inline void
remove_part(uint32_t part)
{
    model_part *p = &model.parts[part];
    int place = is_managed() ? place_of(part) : 0;
    int rc;

    arm();
    rc = disarmed(mm_frames_remove(model.frames, p->number, &st));
    if (is_held(part) || p->is_stuck) {
        CHECK(rc < 0 && (model.faults || st.kind == MM_REFUSED));
        return;
    }
    if (rc < 0) {
        CHECK(model.faults && st.kind != MM_REFUSED);
        return;
    }
    CHECK(!mm_frames_have(model.frames, p->number));
    p->is_live = false;
    CHECK(!is_managed() || place_of(part) == place);
    model.live--;
    if (p->access == MM_PART_SCRATCH) {
        CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
        memset(home_of(part), p->value, p->bytes);
    }
}

/* Numbers of removed parts are left out. */
static inline void
give_order(void)
{
    uint32_t order[MOST_ORDER], count = random_below(MOST_ORDER);

    for (uint32_t i = 0; i < count; i++) {
        order[i] = random_below(mm_frames_count(model.frames));
    }
    CHECK_OK(mm_frames_give_order(model.frames, order, count, &st), &st);
}

/* One writes alone: a part that others use is only read. */
static inline void
use_randomly(uint32_t part, uint32_t stream)
{
    const model_part *p = &model.parts[part];
    bool writes = p->access == MM_PART_SCRATCH
                  || (p->access == MM_PART_WRITE && !is_held(part) && random_below(2) == 0);

    if (!is_written(part) && !(is_held(part) && p->access == MM_PART_SCRATCH)) {
        acquire(part, writes, stream);
    }
}

static inline void
random_step(uint32_t step, bool in_order)
{
    uint32_t part = in_order ? step / 2 % PARTS : random_below(PARTS);
    uint32_t stream = random_below(STREAMS);

    if (model.held_count == MOST_HELD || (model.held_count > 0 && random_below(2) == 0)) {
        release(random_below(model.held_count));
    } else if (random_below(12) == 0) {
        begin_or_end_round();
    } else if (random_below(30) == 0) {
        wait_for_copies();
    } else if (random_below(40) == 0) {
        give_order();
    } else if (model.held_count > 0 && random_below(10) == 0) {
        go_on(random_below(model.held_count));
    } else if (!model.parts[part].is_live) {
        (void)add_part(part, random_access());
    } else if (random_below(25) == 0) {
        remove_part(part);
    } else if (random_below(9) == 0 && !is_held(part)) {
        join_streams(STREAMS, stream);
        use_at_home(part, true, stream);
    } else {
        use_randomly(part, stream);
    }
}

/* --- the end -------------------------------------------------------------------------------- */

static inline void
free_homes(void)
{
    if (is_managed()) {
        mm_scope scope;
        CHECK_OK(mm_scope_enter(&scope, world.cu, 0, &st), &st);
        CHECK_EQUAL(world.cu->MemFree(model.managed), CUDA_SUCCESS);
        mm_scope_leave(&scope);
    } else {
        mm_slab_free(model.slab);
    }
}

static inline void
check_end(void)
{
    mm_frames_close(model.frames);
    CHECK_EQUAL(report().room, 0);
    CHECK_EQUAL(report().present, 0);
    CHECK(!mm_frames_have(model.frames, 0));
    CHECK_EQUAL(mm_frames_acquire(model.frames, 0, false, model.streams[0]).address, 0);
    CHECK_OK(mm_frames_begin_round(model.frames, model.streams[0], &st), &st);
    for (model.rounds++; model.rounds > 0; model.rounds--) { /* one began too late */
        mm_frames_end_round(model.frames);
    }
    CHECK_OK(mm_frames_wait(model.frames, &st), &st);
    CHECK_OK(mm_frames_settle(model.frames, model.streams[0], &st), &st);
    CHECK_OK(mm_frames_remove(model.frames, 0, &st), &st);
}

/* What is at home at the end is what was written last. */
static inline void
end_model(void)
{
    while (model.held_count > 0) {
        release(0);
    }
    world.fail_clear();
    CHECK_OK(mm_device_synchronize(world.cu, 0, &st), &st);
    for (uint32_t i = 0; i < PARTS; i++) {
        const model_part *p = &model.parts[i];
        bool is_known = !p->is_stuck && !(p->is_live && p->access == MM_PART_SCRATCH);
        for (size_t j = 0; j < p->bytes && is_known; j++) {
            CHECK_EQUAL(home_of(i)[j], p->value);
        }
    }
    check_end();
    mm_frames_free(model.frames);
    free_homes();
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(world.cu->StreamDestroy(model.streams[i]), CUDA_SUCCESS);
    }
    CHECK_EQUAL(world.live_streams(), 0);
    CHECK(model.faults || world.live_events() == 0);
    CHECK_EQUAL(world.live_allocations(), 0);
    world.schedule(0);
}

static inline void
run_model(const model_options *options, uint64_t run, uint32_t steps)
{
    model_options o = *options;

    seed = run + 1;
    o.room =
        o.managed ? PAGE + random_below(5 * LARGEST_MANAGED) : 512 + random_below(5 * LARGEST);
    o.access = -1;
    o.lazy = run % 2 == 0;
    o.host_waits = run % 5 == 0;
    begin_model(&o);
    for (uint32_t step = 0; step < steps; step++) {
        random_step(step, run % 3 == 0);
        check_report();
    }
    end_model();
}

#endif
