/* The operations of streams: queueing and running them. No thread works in the background: the call
 * that queues (eager) or waits (lazy) runs the operations, in an order that depends only on the
 * calls made.
 *
 * An operation waits for points in other streams. Points have the id of their stream, not a
 * pointer, because it can be deleted: a deleted stream counts as having reached all of its
 * points. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

static int schedule = -1; /* -1: as configured */

static bool run_until(uint64_t id, uint64_t serial, bool block);

bool
emu_streams_lazy(void)
{
    return schedule < 0 ? emu_config()->lazy : schedule != 0;
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
    memmove(emu_bytes(op->ptr), emu_bytes(op->source), op->size);
}

static void
run_fill(const struct emu_op *op, int device)
{
    const struct emu_allocation *to = emu_find(op->ptr);
    unsigned char *bytes = emu_bytes(op->ptr);

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

/* Runs the function in another thread, as a real driver does, and waits for that thread. */
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
run_page_move(const struct emu_op *op)
{
    const struct emu_allocation *a = emu_find(op->ptr);

    if (a != NULL && op->kind == EMU_OP_PREFETCH) {
        emu_pages_prefetch(a->region, op->ptr, op->size, op->location);
    } else if (a != NULL) {
        emu_pages_discard(a->region, op->ptr, op->size);
    }
}

static void
run_op(const struct emu_op *op, int device)
{
    switch (op->kind) {
    case EMU_OP_PREFETCH:
    case EMU_OP_DISCARD:
        run_page_move(op);
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
    case EMU_OP_KERNEL:
        emu_regions_observe(-1);
        run_function(op);
        emu_regions_observe(device);
        break;
    case EMU_OP_EVENT:
        emu_event_reach(op->event);
        break;
    case EMU_OP_RELEASE:
        emu_pool_release(op->allocation);
        break;
    default:
        break;
    }
}

/* Runs the first operation of a stream. False: the operation has to wait for another thread, and
 * `block` is false. The stream is marked as running meanwhile, so that the stream and the operation
 * outlive the moments without the mutex. */
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
    if (stream->destroyed && emu_stream_idle(stream)) {
        emu_stream_remove(stream, false);
    }
    return ready;
}

/* Runs a stream until it has reached a point. This ends, because an operation waits only for
 * operations queued before it. */
static bool
run_until(uint64_t id, uint64_t serial, bool block)
{
    struct emu_stream *stream;

    while ((stream = emu_stream_by_id(id)) != NULL && stream->done < serial) {
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

/* Runs operations that another thread queued behind a host function while that function ran. */
static void
run_unblocked(void)
{
    bool progress = true;

    while (progress) {
        progress = false;
        for (struct emu_stream *s = emu_streams(); s != NULL && !progress; s = s->next) {
            uint64_t before = s->done, id = s->id;
            if (!emu_stream_idle(s) && !s->running) {
                (void)run_until(id, s->queued, false);
                /* The list can have changed: begin again. */
                progress = emu_stream_by_id(id) == NULL || emu_stream_by_id(id)->done != before;
                if (progress) {
                    break;
                }
            }
        }
    }
}

bool
emu_point_poll(struct emu_point point)
{
    if (!run_until(point.stream, point.serial, false)) {
        run_unblocked();
    }
    return emu_point_reached(point);
}

void
emu_stream_drain(struct emu_stream *stream)
{
    (void)run_until(stream->id, stream->queued, true);
}

void
emu_streams_drain(const struct emu_context *context)
{
    struct emu_stream *stream = emu_streams();

    while (stream != NULL) {
        if ((context == NULL || stream->context == context) && !emu_stream_idle(stream)) {
            emu_stream_drain(stream);
            stream = emu_streams();
        } else {
            stream = stream->next;
        }
    }
}

void
emu_streams_schedule(bool lazy)
{
    schedule = lazy;
    if (!lazy) {
        run_unblocked();
    }
}

void
emu_stream_delete(struct emu_stream *stream)
{
    struct emu_point end = {.stream = stream->id, .serial = stream->queued};

    emu_capture_abandon(stream);
    emu_stream_destroyed(stream);
    if (stream->head == NULL) {
        emu_stream_remove(stream, false);
    } else {
        (void)emu_point_poll(end);
    }
}

static void
end_stream_with_context(struct emu_stream *stream)
{
    uint64_t id = stream->id;
    bool destroyed = stream->destroyed;

    emu_capture_abandon(stream);
    emu_stream_drain(stream);
    if (emu_stream_by_id(id) != NULL) {
        emu_stream_remove(stream, !destroyed);
    }
}

void
emu_streams_delete(const struct emu_context *context)
{
    struct emu_stream *stream = emu_streams();

    while (stream != NULL) {
        if (stream->context == context) {
            end_stream_with_context(stream);
            stream = emu_streams(); /* the list may have changed meanwhile */
        } else {
            stream = stream->next;
        }
    }
}

/* ---- queueing ---- */

static void
add_wait(struct emu_op *op, uint64_t stream, uint64_t serial)
{
    op->wait[op->waits].stream = stream;
    op->wait[op->waits].serial = serial;
    op->waits++;
}

/* Makes operations of the legacy stream wait for all blocking streams of its context, and
 * operations of these wait for the legacy stream. */
static void
add_legacy_waits(const struct emu_stream *stream, struct emu_op *op)
{
    for (const struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
        bool between = s->context == stream->context && s != stream
                       && (stream->kind == EMU_STREAM_LEGACY
                               ? emu_stream_blocking(s)
                               : emu_stream_blocking(stream) && s->kind == EMU_STREAM_LEGACY);
        if (between && !emu_stream_idle(s)) {
            add_wait(op, s->id, s->queued);
        }
    }
}

static CUresult
queue_op(struct emu_stream *stream, const struct emu_op *op, const struct emu_point *after)
{
    struct emu_op *copy = malloc(sizeof *copy);
    size_t room = 1;

    for (const struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
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
        if (!emu_streams_idle()) {
            run_unblocked();
        }
    }
    return CUDA_SUCCESS;
}

CUresult
emu_stream_submit(struct emu_stream *stream, const struct emu_op *op)
{
    return queue_op(stream, op, NULL);
}

CUresult
emu_stream_submit_after(struct emu_stream *stream, struct emu_point point)
{
    struct emu_op op = {.kind = EMU_OP_WAIT};

    return queue_op(stream, &op, &point);
}

CUresult
emu_event_record(struct emu_event *event, struct emu_stream *stream)
{
    struct emu_op op = {.kind = EMU_OP_EVENT, .event = event->id};

    event->recorded = true;
    event->capture = NULL;
    emu_nodes_clear(&event->front);
    event->point.stream = stream->id;
    event->point.serial = stream->queued + 1;
    return emu_stream_submit(stream, &op);
}

bool
emu_event_poll(const struct emu_event *event)
{
    return !event->recorded || emu_point_poll(event->point);
}

void
emu_event_drain(const struct emu_event *event)
{
    if (event->recorded) {
        (void)run_until(event->point.stream, event->point.serial, true);
    }
}
