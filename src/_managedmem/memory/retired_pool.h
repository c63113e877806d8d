/* retired_pool.h: pools whose owner is gone, until the driver can destroy them.
 *
 * Driver 580 goes on using a pool that is destroyed behind a queued free: later waits crash or hang
 * (tests/conformance/probes/pool_end.c). So a pool is destroyed after its last free has run. */
#ifndef MM_RETIRED_POOL_H
#define MM_RETIRED_POOL_H

#include "queued_frees.h"

/* A block of a retired pool that could not be freed in the order of its stream. */
typedef struct mm_orphan {
    struct mm_orphan *next;
    CUdeviceptr start;
} mm_orphan;

typedef struct mm_retired_pool {
    struct mm_retired_pool *next;
    CUmemoryPool handle;
    mm_queued_frees frees;
    mm_orphan *orphans;
} mm_retired_pool;

/* Destroys the pool, now or in a later mm_pools_reclaim; later also if the driver failed before that. A
 * failed destruction is not repeated. Takes ownership of the record and its orphans, each of which is
 * passed to free(). */
MM_NODISCARD int mm_pool_retire(mm_driver *cu, mm_retired_pool *pool, mm_status *st);

/* Destroys the retired pools whose frees have run. `idle`: the caller has waited for a device, so
 * orphans are freed as well, after a wait for all devices. */
void mm_pools_reclaim(mm_driver *cu, bool idle);

#endif
