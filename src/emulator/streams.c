/* Streams as queues of operations, and events.  There is no worker thread: whoever queues (eager)
 * or waits (lazy) runs what is due, in an order that depends on nothing but the calls made.
 *
 * An operation waits for points in other streams.  Points are named by numbers, not pointers: a
 * stream that is gone has done everything. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct emu_stream *streams;
static struct emu_event *events;
static uint64_t last_stream, last_event;
static size_t own_streams, live_events;
static int schedule = -1;        /* -1: as configured */

static bool run_until(uint64_t id, uint64_t serial, bool block);

struct emu_stream *
emu_streams(void)
{
    return streams;
}

size_t
emu_stream_count(void)
{
    return own_streams;
}

size_t
emu_event_count(void)
{
    return live_events;
}

bool
emu_streams_lazy(void)
{
    return schedule < 0 ? emu_config()->lazy : schedule != 0;
}

bool
emu_stream_blocking(const struct emu_stream *stream)
{
    return stream->kind != EMU_STREAM_LEGACY && (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

bool
emu_stream_idle(const struct emu_stream *stream)
{
    return stream->done == stream->queued;
}

static struct emu_stream *
by_id(uint64_t id)
{
    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if (s->id == id) {
            return s;
        }
    }
    return NULL;
}

CUresult
emu_stream_new(struct emu_device *device, enum emu_stream_kind kind, unsigned int flags,
               struct emu_stream **out)
{
    struct emu_stream *stream = calloc(1, sizeof *stream);

    if (stream == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stream->id = ++last_stream;
    stream->kind = kind;
    stream->device = device;
    stream->flags = flags;
    stream->next = streams;
    streams = stream;
    own_streams += kind == EMU_STREAM_OWN;
    *out = stream;
    return CUDA_SUCCESS;
}

static CUresult
find_per_thread(struct emu_device *device, struct emu_stream **out)
{
    uint64_t thread = emu_thread()->id;
    CUresult result;

    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if (s->kind == EMU_STREAM_PER_THREAD && s->device == device && s->thread == thread) {
            *out = s;
            return CUDA_SUCCESS;
        }
    }
    result = emu_stream_new(device, EMU_STREAM_PER_THREAD, 0, out);
    if (result == CUDA_SUCCESS) {
        (*out)->thread = thread;
    }
    return result;
}

CUresult
emu_stream_find(CUstream handle, struct emu_stream **out)
{
    struct emu_device *device = emu_current();
    CUresult result = CUDA_SUCCESS;

    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (device == NULL) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        if (handle == CU_STREAM_PER_THREAD) {
            return find_per_thread(device, out);
        }
        if (device->legacy == NULL) {
            result = emu_stream_new(device, EMU_STREAM_LEGACY, 0, &device->legacy);
        }
        *out = device->legacy;
        return result;
    }
    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if ((void *)s == (void *)handle) {
            *out = s;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

/* ---- running ---- */

static void
run_copy(const struct emu_op *op, int device)
{
    const struct emu_allocation *to = emu_find(op->ptr), *from = emu_find(op->source);

    if (from != NULL) {
        emu_pages_touch(from->region, op->source, op->size, device, false);
    }
    if (to != NULL) {
        emu_pages_touch(to->region, op->ptr, op->size, device, true);
    }
    memmove((void *)(uintptr_t)op->ptr, (const void *)(uintptr_t)op->source, op->size);
}

static void
run_fill(const struct emu_op *op, int device)
{
    const struct emu_allocation *to = emu_find(op->ptr);
    unsigned char *bytes = (unsigned char *)(uintptr_t)op->ptr;

    if (to != NULL) {
        emu_pages_touch(to->region, op->ptr, op->size * op->width, device, true);
    }
    if (op->width == 1) {
        memset(bytes, (int)op->pattern, op->size);
        return;
    }
    for (size_t i = 0; i < op->size; i++) {
        memcpy(bytes + i * op->width, &op->pattern, op->width);
    }
}

static void
run_event(const struct emu_op *op)
{
    struct timespec now;

    for (struct emu_event *e = events; e != NULL; e = e->next) {
        if (e->id == op->event) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            e->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
        }
    }
}

struct host_call {
    void (*function)(void *);
    void *argument;
};

static void *
run_host_call(void *argument)
{
    const struct host_call *v = argument;

    emu_thread()->in_stream_function = true;
    v->function(v->argument);
    emu_thread()->in_stream_function = false;
    return NULL;
}

/* As in a real driver, the function runs in a thread of the driver.  The caller waits for it. */
static void
run_function(const struct emu_op *op)
{
    struct host_call v = {op->function, op->argument};
    pthread_t thread;

    emu_unlock();
    if (pthread_create(&thread, NULL, run_host_call, &v) == 0) {
        (void)pthread_join(thread, NULL);
    } else {
        (void)run_host_call(&v);
    }
    emu_lock();
}

static void
run_op(const struct emu_op *op, int device)
{
    const struct emu_allocation *a;

    switch (op->kind) {
    case EMU_OP_PREFETCH:
    case EMU_OP_DISCARD:
        a = emu_find(op->ptr);
        if (a != NULL && op->kind == EMU_OP_PREFETCH) {
            emu_pages_prefetch(a->region, op->ptr, op->size, op->location);
        } else if (a != NULL) {
            emu_pages_discard(a->region, op->ptr, op->size);
        }
        break;
    case EMU_OP_DISCARD_SYSTEM:
        emu_system_discard(op->ptr, op->size);
        break;
    case EMU_OP_COPY:
        run_copy(op, device);
        break;
    case EMU_OP_FILL:
        run_fill(op, device);
        break;
    case EMU_OP_FUNCTION:
        run_function(op);
        break;
    case EMU_OP_EVENT:
        run_event(op);
        break;
    case EMU_OP_RELEASE:
        emu_pool_release(op->allocation);
        break;
    default:
        break;
    }
}

/* Runs the head of a stream.  False: it must wait for a thread and `block` is false.  The stream
 * stays marked as running throughout, so that it and its head outlive the unlocked moments. */
static bool
run_head(struct emu_stream *stream, bool block)
{
    struct emu_op *op = stream->head;
    bool ready = true;

    stream->running = true;
    for (size_t i = 0; i < op->waits && ready; i++) {
        ready = run_until(op->wait[i].stream, op->wait[i].serial, block);
    }
    if (ready) {
        run_op(op, stream->device->ordinal);
        stream->head = op->next;
        if (stream->head == NULL) {
            stream->tail = NULL;
        }
        stream->done = op->serial;
        free(op->wait);
        free(op);
    }
    stream->running = false;
    emu_broadcast();
    return ready;
}

/* Runs a stream until it has reached a point.  Terminates because an operation waits only for
 * operations queued before it. */
static bool
run_until(uint64_t id, uint64_t serial, bool block)
{
    struct emu_stream *stream;

    while ((stream = by_id(id)) != NULL && stream->done < serial) {
        if (stream->running) {
            if (!block) {
                return false;
            }
            emu_wait();
        } else if (!run_head(stream, block)) {
            return false;
        }
    }
    return true;
}

/* Runs what became possible when a function of a stream returned: another thread may have queued
 * operations that had to wait for it. */
static void
run_the_rest(void)
{
    bool progress = true;

    while (progress) {
        progress = false;
        for (struct emu_stream *s = streams; s != NULL && !progress; s = s->next) {
            uint64_t before = s->done, id = s->id;
            if (!emu_stream_idle(s) && !s->running) {
                (void)run_until(id, s->queued, false);
                /* The list may have changed meanwhile: begin again. */
                progress = by_id(id) == NULL || by_id(id)->done != before;
                if (progress) {
                    break;
                }
            }
        }
    }
}

static uint64_t waits;

void
emu_waited(void)
{
    waits++;
}

uint64_t
emu_waits(void)
{
    return waits;
}

void
emu_stream_drain(struct emu_stream *stream)
{
    (void)run_until(stream->id, stream->queued, true);
}

void
emu_streams_drain(const struct emu_device *device)
{
    struct emu_stream *stream = streams;

    while (stream != NULL) {
        if ((device == NULL || stream->device == device) && !emu_stream_idle(stream)) {
            emu_stream_drain(stream);
            stream = streams;
        } else {
            stream = stream->next;
        }
    }
}

bool
emu_streams_idle(const struct emu_device *device)
{
    for (const struct emu_stream *s = streams; s != NULL; s = s->next) {
        if ((device == NULL || s->device == device) && !emu_stream_idle(s)) {
            return false;
        }
    }
    return true;
}

void
emu_streams_schedule(bool lazy)
{
    schedule = lazy;
    if (!lazy) {
        emu_streams_drain(NULL);
    }
}

void
emu_stream_delete(struct emu_stream *stream)
{
    struct emu_stream **link = &streams;

    emu_capture_abandon(stream);
    emu_stream_drain(stream);
    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    own_streams -= stream->kind == EMU_STREAM_OWN;
    free(stream);
}

/* ---- queueing ---- */

static void
add_wait(struct emu_op *op, uint64_t stream, uint64_t serial)
{
    op->wait[op->waits].stream = stream;
    op->wait[op->waits].serial = serial;
    op->waits++;
}

/* The legacy stream waits for all blocking streams of its context, and they for it. */
static void
add_legacy_waits(const struct emu_stream *stream, struct emu_op *op)
{
    for (const struct emu_stream *s = streams; s != NULL; s = s->next) {
        bool between = s->device == stream->device && s != stream
                       && (stream->kind == EMU_STREAM_LEGACY
                               ? emu_stream_blocking(s)
                               : emu_stream_blocking(stream) && s->kind == EMU_STREAM_LEGACY);
        if (between && !emu_stream_idle(s)) {
            add_wait(op, s->id, s->queued);
        }
    }
}

static CUresult
submit(struct emu_stream *stream, const struct emu_op *op, const struct emu_point *after)
{
    struct emu_op *copy = malloc(sizeof *copy);
    size_t room = 1;

    for (const struct emu_stream *s = streams; s != NULL; s = s->next) {
        room++;
    }
    if (copy == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *copy = *op;
    copy->wait = malloc(room * sizeof *copy->wait);
    if (copy->wait == NULL) {
        free(copy);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    copy->waits = 0;
    copy->next = NULL;
    copy->serial = ++stream->queued;
    add_legacy_waits(stream, copy);
    if (after != NULL) {
        add_wait(copy, after->stream, after->serial);
    }
    if (stream->tail != NULL) {
        stream->tail->next = copy;
    } else {
        stream->head = copy;
    }
    stream->tail = copy;
    if (!emu_streams_lazy()) {
        (void)run_until(stream->id, stream->queued, false);
        if (!emu_streams_idle(NULL)) {
            run_the_rest();
        }
    }
    return CUDA_SUCCESS;
}

CUresult
emu_stream_submit(struct emu_stream *stream, const struct emu_op *op)
{
    return submit(stream, op, NULL);
}

CUresult
emu_stream_submit_after(struct emu_stream *stream, struct emu_point point)
{
    struct emu_op op = {.kind = EMU_OP_WAIT};

    return submit(stream, &op, &point);
}

/* ---- events ---- */

CUresult
emu_event_new(struct emu_device *device, unsigned int flags, struct emu_event **out)
{
    struct emu_event *event = calloc(1, sizeof *event);

    if (event == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    event->id = ++last_event;
    event->flags = flags;
    event->device = device;
    event->next = events;
    events = event;
    live_events++;
    *out = event;
    return CUDA_SUCCESS;
}

struct emu_event *
emu_event_find(CUevent handle)
{
    for (struct emu_event *e = events; e != NULL; e = e->next) {
        if ((void *)e == (void *)handle) {
            return e;
        }
    }
    return NULL;
}

void
emu_event_delete(struct emu_event *event)
{
    struct emu_event **link = &events;

    while (*link != event) {
        link = &(*link)->next;
    }
    *link = event->next;
    live_events--;
    free(event);
}

CUresult
emu_event_record(struct emu_event *event, struct emu_stream *stream)
{
    struct emu_op op = {.kind = EMU_OP_EVENT, .event = event->id};

    event->recorded = true;
    event->capture = NULL;
    event->point.stream = stream->id;
    event->point.serial = stream->queued + 1;
    return emu_stream_submit(stream, &op);
}

void
emu_events_leave(const struct emu_capture *capture)
{
    for (struct emu_event *e = events; e != NULL; e = e->next) {
        if (e->capture == capture) {
            e->capture = NULL;
        }
    }
}

bool
emu_event_reached(const struct emu_event *event)
{
    const struct emu_stream *stream;

    if (!event->recorded) {
        return true;
    }
    stream = by_id(event->point.stream);
    return stream == NULL || stream->done >= event->point.serial;
}

void
emu_event_drain(const struct emu_event *event)
{
    if (event->recorded) {
        (void)run_until(event->point.stream, event->point.serial, true);
    }
}
