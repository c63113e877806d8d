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
    EMU_LINK(events, event);
    live_events++;
    *out = event;
    return CUDA_SUCCESS;
}

struct emu_event *
emu_event_find(CUevent handle)
{
    struct emu_event *ended, *event;

    EMU_SEEK(ended, ended_events, (void *)ended == (void *)handle);
    if (ended != NULL) {
        emu_crash("an event whose context was destroyed");
    }
    EMU_SEEK(event, events, (void *)event == (void *)handle);
    return event;
}

void
emu_event_delete(struct emu_event *event)
{
    EMU_UNLINK(events, event);
    live_events--;
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
            EMU_UNLINK(events, event);
            EMU_LINK(ended_events, event);
            live_events--;
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
    return !event->recorded || emu_point_reached(event->point);
}

void
emu_event_reach(uint64_t id)
{
    struct timespec now;
    struct emu_event *event;

    EMU_SEEK(event, events, event->id == id);
    if (event != NULL) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        event->milliseconds = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    }
}
