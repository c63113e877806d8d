/* host_views.h: the moves that this library's host views made, among those that were requested. */
#ifndef MM_HOST_VIEWS_H
#define MM_HOST_VIEWS_H

#include "../memory/event.h"
#include "../memory/range.h"

enum { MM_MOST_HOST_VIEWS = 64 }; /* of threads at a time; more are not told apart */

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
