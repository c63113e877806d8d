/* host_views.c: the host views under way at a time. A view waits for its moves, so they lie in its
 * time and its range. */
#include "host_views.h"

static void
open_view(mm_host_views *open, const mm_event *view)
{
    size_t left = 0;

    for (size_t i = 0; i < open->count; i++) {
        if (open->views[i].end >= view->start) {
            open->views[left++] = open->views[i];
        }
    }
    open->count = left;
    if (open->count < MM_MOST_HOST_VIEWS) {
        open->views[open->count++] = *view;
    }
}

bool
mm_host_views_made(mm_host_views *open, const mm_event *event)
{
    if (mm_is_host_view(event)) {
        open_view(open, event);
    }
    if (open->count == 0 || event->kind != MM_MOVE || event->cause != MM_CAUSE_REQUESTED
        || event->destination != MM_ON_HOST) {
        return false;
    }
    for (size_t i = 0; i < open->count; i++) {
        const mm_event *view = &open->views[i];
        if (event->start <= view->end && event->address < view->address + view->amount
            && view->address < event->address + event->amount) {
            return true;
        }
    }
    return false;
}
