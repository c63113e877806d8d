/* prefetch.h: stream operations on one range: the driver call for it, and prefetches that are
 * deferred behind a host function. */
#ifndef MM_PREFETCH_H
#define MM_PREFETCH_H

#include "range.h"

/* A prefetch is issued at once, or deferred: queued behind a host function, so that the call
 * returns while the stream does the work. */
typedef enum { MM_DEFER_AUTO, MM_DEFER_NO, MM_DEFER_YES } mm_defer;

/* Prefetches one range; MM_CAPTURING if the stream captures a graph. */
MM_NODISCARD int mm_range_prefetch(mm_driver *cu, mm_range range, CUmemLocation location,
                                   CUstream stream, mm_defer defer, mm_status *st);

/* Prefetches new memory. Not recorded: it has no pages yet that could move. */
MM_NODISCARD int mm_range_populate(mm_driver *cu, mm_range range, CUmemLocation location,
                                   CUstream stream, mm_status *st);

/* Prefetches a range to the host behind the work on the stream, and waits for both. Recorded as a
 * host view: whoever reads the memory did not ask for the prefetch. MM_CAPTURING as above. */
MM_NODISCARD int mm_range_view_on_host(mm_driver *cu, mm_range range, CUstream stream,
                                       mm_status *st);

/* The one driver call of a prefetch, discard or discard_prefetch of a range that is not empty. In
 * the caller's scope; allocates nothing. */
MM_NODISCARD int mm_range_issue(mm_driver *cu, mm_operation op, mm_range range,
                                CUmemLocation location, CUstream stream, mm_status *st);

/* True if a prefetch of this size is deferred. */
bool mm_is_deferred(size_t size, CUmemLocation location, mm_defer defer);

/* Queues the empty host function behind which prefetches are deferred. */
MM_NODISCARD int mm_queue_host_function(mm_driver *cu, CUstream stream, mm_status *st);

#endif
