/* host_views.h: tells which of the requested moves were made by host views of this library. */
#ifndef MM_HOST_VIEWS_H
#define MM_HOST_VIEWS_H

#include "../memory/event.h"
#include "../memory/range.h"

enum { MM_MOST_HOST_VIEWS = 64 }; /* at a time; moves of further ones count as requested */

static inline bool
mm_is_host_view(const mm_event *event)
{
    return event->kind == MM_CALL && event->cause == MM_QUERY;
}

/* The views that may not have ended yet. All zero is empty. */
typedef struct {
    mm_event views[MM_MOST_HOST_VIEWS];
    size_t count;
} mm_host_views;

/* Takes the next event in the order of starts. True if a host view made this move. */
bool mm_host_views_made(mm_host_views *open, const mm_event *event);

#endif
