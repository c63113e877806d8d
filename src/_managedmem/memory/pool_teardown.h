/* pool_teardown.h: keeps pools without an owner until the driver can destroy them, and finds out
 * whether the frees of a pool have run, by an event for each stream that freed.
 *
 * Driver 580 keeps using a pool that is destroyed behind a queued free: later waits crash or hang
 * (tests/conformance/probes/pool_end.c). So a pool is destroyed after its last free has run. */
#ifndef MM_POOL_TEARDOWN_H
#define MM_POOL_TEARDOWN_H

#include <pthread.h>

#include "stream.h"

typedef struct mm_free_event {
    struct mm_free_event *next;
    /* Handles are reused, ids are not. */
    unsigned long long context_id; /* of a default stream, else 0 */
    unsigned long long stream_id; /* 0 for the legacy stream */
    CUevent event;
} mm_free_event;

typedef struct {
    pthread_mutex_t lock;
    mm_free_event *events;
    size_t count;
    bool unknown; /* a free was queued without an event */
} mm_pending_frees;

void mm_pending_frees_init(mm_pending_frees *frees);

/* Records an event behind a free on the stream. `result` comes from the free, which may be queued
 * even after a failure. The caller is in the relaxed scope of the free. */
void mm_pending_frees_add(mm_driver *cu, mm_pending_frees *frees, CUstream stream,
                          CUresult result);

/* Frees the entries, not their events: calls no driver. */
void mm_pending_frees_clear(mm_pending_frees *frees);

/* --- pools without an owner ------------------------------------------------------------------- */

typedef struct {
    mm_deferred_free deferred;
    CUmemoryPool handle;
    mm_pending_frees frees;
} mm_retired_pool;

/* Destroys the pool now, or later if frees are queued, inside a host function, or if a driver
 * call before the destruction failed. A failed destruction is not repeated. Takes ownership of
 * the record. */
MM_NODISCARD int mm_pool_retire(mm_driver *cu, mm_retired_pool *pool, mm_status *st);

#endif
