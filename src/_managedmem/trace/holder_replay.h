/* holder_replay.h: finds the processors that have pages from the events of a trace. */
#ifndef MM_HOLDER_REPLAY_H
#define MM_HOLDER_REPLAY_H

#include "../memory/event.h"
#include "../memory/page_holders.h"

/* Fills h, in which all pages are unknown, from the events. Each page gets the processors of its
 * last move or copy since its memory exists, in the order in which the module made them. Pages
 * that this library discarded stay unknown: a discard takes place later than its call, and such
 * pages come to another processor without an event. Fails with MM_NO_MEMORY. */
MM_NODISCARD int mm_replay_holders(mm_page_holders *h, const mm_event *events, size_t count,
                                   mm_status *st);

#endif
