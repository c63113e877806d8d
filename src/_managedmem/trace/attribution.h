/* attribution.h: divides the events of a trace among memories, and adds them up. */
#ifndef MM_ATTRIBUTION_H
#define MM_ATTRIBUTION_H

#include "../memory/event.h"
#include "foreign_search.h"
#include "sums.h"
#include "traced_memories.h"

#include <stdbool.h>

/* One thread at a time. A call fails only without host memory, and then changes nothing. */
typedef struct mm_attribution mm_attribution;

/* All zero is an empty list; free(items) ends it. */
typedef struct {
    mm_event *items;
    size_t count, capacity;
} mm_event_list;

mm_attribution *mm_attribution_new(mm_status *st);
void mm_attribution_free(mm_attribution *a);

/* Sets the memories known so far. They begin with the memories of the last call, so that all keep
 * their indices; allocations may have ended or changed their labels since. The arrays are copied.
 *
 * An event belongs to the named range with its address, the last one given if several have it;
 * else to the allocation that had it at the start of the event (mm_memory_index_find); else to the
 * foreign allocation that has it; else to the unknown memory of its 2 MiB block. */
MM_NODISCARD int mm_attribution_set_memories(mm_attribution *a,
                                             const mm_allocation_record *allocations, size_t count,
                                             const mm_named_range *named, size_t named_count,
                                             mm_status *st);

/* Asks `find` about the addresses of events that no memory has, and adds the allocations as
 * foreign memories. An allocation that is a living memory of this library is ignored: its address
 * had another owner at the time of the event. Long ranges are sampled, and pages without an answer
 * are not queried again. */
MM_NODISCARD int mm_attribution_find_foreign(mm_attribution *a, const mm_event *events,
                                             size_t count, mm_find_allocation *find, void *context,
                                             mm_status *st);

/* Adds the events of a part to the sums. If `pieces` is not NULL, appends the events to it in the
 * order of their starts, divided at the borders of memories, each piece with its memory. An empty
 * event has MM_NO_MEMORY_INDEX. Adding the pieces in place of the events gives the same sums.
 * Events of one call need not be sorted. Calls for a part must be consecutive and in time order,
 * because their order decides which pages turn back (page_replay.h) and which busy times overlap.
 * Pages turn back across parts too.
 *
 * In each part the sums of all memories add up to the total, except move_time: moves of several
 * memories share their time. */
MM_NODISCARD int mm_attribution_add(mm_attribution *a, uint32_t part, const mm_event *events,
                                    size_t count, mm_event_list *pieces, mm_status *st);

/* Adds the sums of another attribution, and the memories that `a` lacks. In a part that both have,
 * a move of one attribution turns back no page that the other attribution moved. */
MM_NODISCARD int mm_attribution_merge(mm_attribution *a, const mm_attribution *other,
                                      mm_status *st);

/* Both lists are valid until the next call that changes them. */
size_t mm_attribution_memories(const mm_attribution *a, const mm_traced_memory **out);
size_t mm_attribution_rows(const mm_attribution *a, const mm_sums_row **out);

/* The number of events that belong to several allocations, and to each only by MM_TIME_MARGIN, as
 * between the end of an allocation and the beginning of the next at its address. */
uint64_t mm_attribution_ambiguous(const mm_attribution *a);

#endif
