/* pool.h: a driver pool: allocation and freeing in stream order, its attributes, and the devices
 * that may use its memory.
 *
 * The pool lives as long as its resource and every block allocated from it. */
#ifndef MM_POOL_H
#define MM_POOL_H

#include "location.h"
#include "memory_counts.h"
#include "pool_teardown.h"
#include "stream.h"

typedef struct mm_pool_block mm_pool_block;

typedef struct mm_pool {
    mm_retired_pool driver_pool; /* first, because the struct is freed through it */
    struct mm_pool *next, *previous; /* in the list of pools; protected by its lock */
    atomic_size_t references;
    CUmemLocation
        location; /* the device of device memory; the preferred location of managed memory */
    bool managed;
} mm_pool;

/* The stream in whose order a block is freed. */
typedef struct {
    mm_device_stream stream; /* the handle is NULL for a default stream */
    mm_stream *shared; /* keeps the stream, if a Stream made it; or NULL */
    unsigned long long
        id; /* of a stream that nothing keeps: handles are reused, ids are not; or 0 */
} mm_block_order;

struct mm_pool_block {
    mm_deferred_free deferred;
    CUdeviceptr start;
    size_t size;
    mm_pool *pool;
    mm_block_order order;
    uint64_t waited; /* bit n: device n has been idle since the free was deferred */
};

/* Creates a pool of managed memory, with a preferred location or none, or a pool of device memory,
 * with at most max_size bytes (0: no limit). The pool keeps freed memory until it is trimmed. */
mm_pool *mm_pool_create(mm_driver *cu, bool managed, CUmemLocation location, size_t max_size,
                        mm_status *st);

/* The device that owns the memory of a device pool, and whose default stream is meant where such
 * memory is allocated or freed on a default stream; MM_ANY_DEVICE for a managed pool. */
int mm_pool_device(const mm_pool *pool);

/* The device that owns device memory, or that managed memory prefers; else MM_NO_DEVICE. */
int mm_pool_location_device(const mm_pool *pool);

void mm_pool_retain(mm_pool *pool);

/* Releases a reference. The last one retires the pool (pool_teardown.h), which is destroyed once
 * its frees have run. */
MM_NODISCARD int mm_pool_release(mm_pool *pool, mm_status *st);

/* mm_pool_release where no caller can raise: a failure is noted (leaks.h). */
void mm_pool_drop(mm_pool *pool);

/* Stores the id of the order's stream, if nothing keeps the stream. */
void mm_block_order_identify(mm_driver *cu, mm_block_order *order);

/* The stream of the order. A default stream if that stream ended with its context, after all its
 * work, or if another stream now has its handle. */
mm_device_stream mm_block_stream(mm_driver *cu, const mm_block_order *order);

/* Allocates in the order of the stream, which must not capture. shared may be NULL. */
mm_pool_block *mm_pool_allocate(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream,
                                mm_stream *shared, mm_status *st);

/* Frees the block in its own order, or in the order of *other; later if that stream captures. After
 * a failure the caller must not use the block either, unless mm_can_defer_free(st). */
MM_NODISCARD int mm_pool_free(mm_pool_block *block, const CUstream *other, mm_status *st);

/* Frees the block in its order, in a later attempt. A stream of another library may not exist
 * any more, so a block in its order waits for an allocation on that stream or for idle devices. */
void mm_pool_defer_free(mm_pool_block *block);

/* Frees memory of the pool by its address. pool may be NULL. */
MM_NODISCARD int mm_pool_free_address(mm_driver *cu, mm_pool *pool, CUdeviceptr start,
                                      mm_device_stream stream, mm_status *st);

/* Fails if the stream captures: memory allocated or freed there would belong to the graph. */
MM_NODISCARD int mm_pool_refuse_capture(mm_driver *cu, mm_device_stream stream, mm_status *st);

MM_NODISCARD int mm_pool_get_attribute(mm_driver *cu, mm_pool *pool, CUmemPool_attribute attribute,
                                       uint64_t *value, mm_status *st);
MM_NODISCARD int mm_pool_set_attribute(mm_driver *cu, mm_pool *pool, CUmemPool_attribute attribute,
                                       uint64_t value, mm_status *st);

/* Adds the bytes that the driver reserves for each pool of the process to reserved[device + 1],
 * where device is mm_pool_location_device of the pool. */
MM_NODISCARD int mm_pools_add_reserved(mm_driver *cu, uint64_t reserved[MM_COUNTED_DEVICES],
                                       mm_status *st);

/* Releases unused memory to the system, but keeps at least `keep` bytes. */
MM_NODISCARD int mm_pool_trim(mm_driver *cu, mm_pool *pool, size_t keep, mm_status *st);

/* The devices, besides its owner, that may use the memory of a device pool. */
MM_NODISCARD int mm_pool_peers(mm_driver *cu, mm_pool *pool, mm_location_set *peers,
                               mm_status *st);

/* Changes the peers from one set to a different set, by one driver call. */
MM_NODISCARD int mm_pool_change_peers(mm_driver *cu, mm_pool *pool, mm_location_set from,
                                      mm_location_set to, mm_status *st);

/* True if the device can access the memory of the pool's device. */
MM_NODISCARD int mm_pool_is_reachable(mm_driver *cu, const mm_pool *pool, int device,
                                      bool *reachable, mm_status *st);

#endif
