/* pool.h: a driver pool: allocation and freeing in stream order, its numbers, and the devices that
 * may use its memory.
 *
 * The pool lives as long as whoever made it and every block allocated from it. */
#ifndef MM_POOL_H
#define MM_POOL_H

#include "location.h"
#include "retired_pool.h"
#include "stream.h"

typedef struct mm_pool_block mm_pool_block;

typedef struct {
    mm_retired_pool driver_pool; /* first, because the struct is freed through it */
    atomic_size_t references;
    CUmemLocation where; /* the device whose memory it is; of managed memory where it prefers */
    bool managed;
} mm_pool;

/* A block of a pool, with what freeing it takes. */
struct mm_pool_block {
    mm_late_free late;
    CUdeviceptr start;
    mm_pool *pool;
    CUstream stream; /* the one it was allocated on; NULL for a default one */
    mm_stream *shared; /* keeps that stream, where it is one of ours; or NULL */
    int device; /* whose default stream, where it is one; or MM_ANY_DEVICE */
    uint64_t waited; /* bit n: device n was idle since the free was deferred */
};

/* A pool of its own: managed memory with a preferred location or none, or memory of a device. It
 * keeps what is freed until it is trimmed. */
mm_pool *mm_pool_create(mm_driver *cu, bool managed, CUmemLocation where, mm_status *st);

/* The owner of device memory, whose default stream is meant where none is named; MM_ANY_DEVICE for
 * managed memory. */
int mm_pool_device(const mm_pool *pool);

void mm_pool_retain(mm_pool *pool);

/* Releases a reference. The last one retires the pool (retired_pool.h), which is destroyed once its
 * frees have run. */
MM_NODISCARD int mm_pool_release(mm_pool *pool, mm_status *st);

/* Allocates in the order of the stream, which must not capture. shared may be NULL. */
mm_pool_block *mm_pool_allocate(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream,
                                mm_stream *shared, mm_status *st);

/* Frees the block in the order of the stream it was allocated on, or of *other; later if that stream
 * captures. After a failure the block is gone as well, unless mm_can_free_late(st). */
MM_NODISCARD int mm_pool_free(mm_pool_block *block, const CUstream *other, mm_status *st);

/* Frees the block in a later attempt, in the order of the stream it was allocated on. A stream of
 * another library may be gone by then, so such a block waits for an allocation on that stream or for
 * idle devices. */
void mm_pool_free_late(mm_pool_block *block);

/* Frees memory of the pool (NULL: not known) by its address; `device` is the one of a default stream. */
MM_NODISCARD int mm_pool_free_address(mm_driver *cu, mm_pool *pool, CUdeviceptr start,
                                      CUstream stream, int device, mm_status *st);

/* Fails when the stream captures: what is allocated or freed there belongs to the graph. */
MM_NODISCARD int mm_pool_refuse_capture(mm_driver *cu, CUstream stream, int device, mm_status *st);

MM_NODISCARD int mm_pool_get(mm_driver *cu, mm_pool *pool, CUmemPool_attribute which,
                             uint64_t *value, mm_status *st);
MM_NODISCARD int mm_pool_set(mm_driver *cu, mm_pool *pool, CUmemPool_attribute which,
                             uint64_t value, mm_status *st);

/* Gives unused memory back to the system, down to that many bytes. */
MM_NODISCARD int mm_pool_trim(mm_driver *cu, mm_pool *pool, size_t keep, mm_status *st);

/* The devices that may use the memory of a device pool, besides its owner. */
MM_NODISCARD int mm_pool_peers(mm_driver *cu, mm_pool *pool, mm_location_set *peers,
                               mm_status *st);

/* Goes from one set of peers to a different one with one driver call. */
MM_NODISCARD int mm_pool_change_peers(mm_driver *cu, mm_pool *pool, mm_location_set from,
                                      mm_location_set to, mm_status *st);

/* Whether a device can be let in at all. */
MM_NODISCARD int mm_pool_reachable(mm_driver *cu, const mm_pool *pool, int device, bool *can,
                                   mm_status *st);

#endif
