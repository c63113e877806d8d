/* retired_pool.h: pools without an owner, until the driver can destroy them.
 *
 * Driver 580 keeps using a pool that is destroyed behind a queued free: later waits crash or hang
 * (tests/conformance/probes/pool_end.c). So a pool is destroyed after its last free has run. */
#ifndef MM_RETIRED_POOL_H
#define MM_RETIRED_POOL_H

#include "late_frees.h"
#include "queued_frees.h"

typedef struct {
    mm_late_free late;
    CUmemoryPool handle;
    mm_queued_frees frees;
} mm_retired_pool;

/* Destroys the pool now, or later if frees are queued, inside a host function, or if a driver
 * call before the destruction failed. A failed destruction is not repeated. Takes ownership of
 * the record. */
MM_NODISCARD int mm_pool_retire(mm_driver *cu, mm_retired_pool *pool, mm_status *st);

#endif
