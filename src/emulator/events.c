/* Events that exist, with the points of streams at which they were recorded. */
#include "emulator.h"

#include <stdlib.h>
#include <time.h>

static struct emu_event *events;
/* Events that ended with a user's context. They are never freed, so that their handles stay known:
 * driver 580 can crash in every call with one. */
static struct emu_event *ended_events;
static uint64_t last_event;
static size_t live_events;

size_t
emu_event_count(void)
{
    return live_events;
}

CUresult
emu_event_new(const struct emu_context *context, unsigned int flags, struct emu_event **out)
{
    struct emu_event *event = calloc(1, sizeof *event);

    if (event == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    event->id = ++last_event;
    event->flags = flags;
    event->context = context;
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
    for (const struct emu_event *e = ended_events; e != NULL; e = e->next) {
        if ((const void *)e == (const void *)handle) {
            emu_crash("an event whose context was destroyed");
        }
    }
    return NULL;
}

static void
remove_event(const struct emu_event *event)
{
    struct emu_event **link = &events;

    while (*link != event) {
        link = &(*link)->next;
    }
    *link = event->next;
    live_events--;
}

void
emu_event_delete(struct emu_event *event)
{
    remove_event(event);
    emu_nodes_clear(&event->front);
    free(event);
}

void
emu_events_delete(const struct emu_context *context)
{
    struct emu_event *event = events, *next;

    for (; event != NULL; event = next) {
        next = event->next;
        if (event->context == context) {
            remove_event(event);
            event->next = ended_events;
            ended_events = event;
        }
    }
}

void
emu_events_leave(const struct emu_capture *capture)
{
    for (struct emu_event *e = events; e != NULL; e = e->next) {
        if (e->capture == capture) {
            e->capture = NULL;
            emu_nodes_clear(&e->front);
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
    stream = emu_stream_by_id(event->point.stream);
    return stream == NULL || stream->done >= event->point.serial;
}

void
emu_event_reach(uint64_t id)
{
    struct timespec now;

    for (struct emu_event *e = events; e != NULL; e = e->next) {
        if (e->id == id) {
            clock_gettime(CLOCK_MONOTONIC, &now);
            e->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
        }
    }
}
