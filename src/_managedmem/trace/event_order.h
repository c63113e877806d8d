/* event_order.h: the order of events by time. */
#ifndef MM_EVENT_ORDER_H
#define MM_EVENT_ORDER_H

#include "../driver/status.h"
#include "../memory/event.h"

#include <stddef.h>

/* Positions of events sorted by their starts, stably. */
typedef struct {
    uint32_t *positions; /* NULL: the events are in order */
} mm_event_order;

void mm_event_order_free(mm_event_order *order);

/* Takes linear time if few events are late. */
MM_NODISCARD int mm_event_order_make(mm_event_order *order, const mm_event *events, size_t count,
                                     mm_status *st);

static inline size_t
mm_event_position(const mm_event_order *order, size_t i)
{
    return order->positions != NULL ? order->positions[i] : i;
}

#endif
