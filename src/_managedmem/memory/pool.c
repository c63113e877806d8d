/* pool.c: driver pools: their life, their blocks, their attributes and their peers. */
#include "pool.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* --- the list of pools ------------------------------------------------------------------- */

/* A forked child, which has no pools, does not take the lock. */
static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static mm_pool *pools;

static void
list_pool(mm_pool *pool)
{
    (void)pthread_mutex_lock(&pools_lock);
    pool->next = pools;
    if (pools != NULL) {
        pools->previous = pool;
    }
    pools = pool;
    (void)pthread_mutex_unlock(&pools_lock);
}

static void
unlist_pool(mm_pool *pool)
{
    (void)pthread_mutex_lock(&pools_lock);
    *(pool->previous != NULL ? &pool->previous->next : &pools) = pool->next;
    if (pool->next != NULL) {
        pool->next->previous = pool->previous;
    }
    (void)pthread_mutex_unlock(&pools_lock);
}

/* False for a pool whose last reference is gone. */
static bool
retain_if_alive(mm_pool *pool)
{
    size_t references = atomic_load(&pool->references);

    while (references > 0
           && !atomic_compare_exchange_weak(&pool->references, &references, references + 1)) {
    }
    return references > 0;
}

/* Retains the pool behind `after`, or the first pool if that is NULL; NULL behind the last. Then
 * releases the reference to `after`, which has kept that pool in the list. */
static mm_pool *
next_pool(mm_pool *after)
{
    mm_pool *pool;

    (void)pthread_mutex_lock(&pools_lock);
    pool = after != NULL ? after->next : pools;
    while (pool != NULL && !retain_if_alive(pool)) {
        pool = pool->next;
    }
    (void)pthread_mutex_unlock(&pools_lock);
    if (after != NULL) {
        mm_pool_drop(after);
    }
    return pool;
}

int
mm_pools_add_reserved(mm_driver *cu, uint64_t reserved[MM_COUNTED_DEVICES], mm_status *st)
{
    for (mm_pool *pool = next_pool(NULL); pool != NULL; pool = next_pool(pool)) {
        uint64_t bytes = 0;
        if (mm_pool_get_attribute(cu, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes, st)
            < 0) {
            mm_pool_drop(pool);
            return -1;
        }
        reserved[mm_pool_location_device(pool) + 1] += bytes;
    }
    return 0;
}

/* --- life ------------------------------------------------------------------------------- */

static int
create_driver_pool(mm_driver *cu, mm_pool *pool, size_t max_size, mm_status *st)
{
    CUmemPoolProps props;
    CUresult code;

    memset(&props, 0, sizeof props);
    props.allocType =
        pool->managed ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = pool->location;
    props.maxSize = max_size;
    MM_CALL_IN(code, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolCreate, st,
               &pool->driver_pool.handle, &props);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemPoolCreate", (int)code);
    if (code == CUDA_ERROR_NOT_SUPPORTED) {
        mm_status_add(st, "Pools need Device.memory_pools_supported.");
    }
    return -1;
}

/* capabilities().managed_pools gives the same answer, from the same attribute. */
static int
check_managed(const mm_driver *cu, mm_status *st)
{
    if (cu->version < MM_DRIVER_BATCH) {
        return mm_driver_lacks(cu, "a pool of managed memory", st);
    }
    return cu->concurrent_access
               ? 0
               : mm_fail(st, MM_UNSUPPORTED,
                         "a pool of managed memory needs concurrent_managed_access of every "
                         "device: use ManagedMemoryResource() without a pool");
}

mm_pool *
mm_pool_create(mm_driver *cu, bool managed, CUmemLocation location, size_t max_size, mm_status *st)
{
    mm_pool *pool;

    assert(managed ? max_size == 0 : location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    if (managed && check_managed(cu, st) < 0) {
        return NULL;
    }
    mm_deferred_frees_attempt(cu, &(mm_free_conditions){.pools = true});
    pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    atomic_init(&pool->references, 1);
    pool->location = location;
    pool->managed = managed;
    mm_pending_frees_init(&pool->driver_pool.frees);
    if (create_driver_pool(cu, pool, max_size, st) < 0) {
        free(pool);
        return NULL;
    }
    list_pool(pool);
    /* With the driver's threshold of 0, a pool releases its memory at every synchronization and
     * reserves it again at the next allocation. */
    if (mm_pool_set_attribute(cu, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, UINT64_MAX, st) < 0) {
        mm_pool_drop(pool);
        return NULL;
    }
    return pool;
}

void
mm_pool_retain(mm_pool *pool)
{
    assert(atomic_load(&pool->references) > 0);
    atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
}

int
mm_pool_release(mm_pool *pool, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();

    assert(atomic_load(&pool->references) > 0);
    if (atomic_fetch_sub_explicit(&pool->references, 1, memory_order_acq_rel) != 1) {
        return 0;
    }
    if (cu == NULL) {
        mm_pending_frees_clear(&pool->driver_pool.frees);
        free(pool);
        return 0;
    }
    unlist_pool(pool);
    return mm_pool_retire(cu, &pool->driver_pool, st);
}

void
mm_pool_drop(mm_pool *pool)
{
    mm_status st;

    if (mm_pool_release(pool, &st) < 0) {
        mm_leak_note_status(&st, 0);
    }
}

/* --- blocks ----------------------------------------------------------------------------- */

void
mm_block_order_identify(mm_driver *cu, mm_block_order *order)
{
    order->id = 0;
    if (order->stream.handle != NULL && order->shared == NULL
        && cu->StreamGetId(order->stream.handle, &order->id) != CUDA_SUCCESS) {
        order->id = 0;
    }
}

/* True if the stream of the order was destroyed and another one has its handle. Drivers crash in
 * calls with a stale handle. */
static bool
has_another_stream(mm_driver *cu, const mm_block_order *order)
{
    unsigned long long id = 0;

    return order->id != 0 && cu->StreamGetId(order->stream.handle, &id) == CUDA_SUCCESS
           && id != order->id;
}

mm_device_stream
mm_block_stream(mm_driver *cu, const mm_block_order *order)
{
    bool ended = order->shared == NULL
                     ? has_another_stream(cu, order)
                     : !order->shared->lasts && mm_context_has_ended(cu, &order->shared->context);

    return (mm_device_stream){ended ? NULL : order->stream.handle, order->stream.device};
}

/* Queries a default stream in a context of its device. */
static int
is_order_capturing(mm_driver *cu, mm_device_stream stream, bool *capturing, mm_status *st)
{
    int rc;

    MM_RUN_IN(rc, mm_scope_enter_default, stream.device, cu, st,
              mm_stream_is_capturing(cu, stream.handle, capturing, st));
    return rc;
}

int
mm_pool_refuse_capture(mm_driver *cu, mm_device_stream stream, mm_status *st)
{
    bool capturing = false;

    if (is_order_capturing(cu, stream, &capturing, st) < 0) {
        return -1;
    }
    if (capturing) {
        return mm_fail(
            st, MM_CAPTURING,
            "a pool cannot allocate or free on a stream that captures a CUDA graph, "
            "because the memory would belong to the graph: do it before the capture begins, "
            "or on another stream");
    }
    return 0;
}

int
mm_pool_free_address(mm_driver *cu, mm_pool *pool, CUdeviceptr start, mm_device_stream stream,
                     mm_status *st)
{
    CUresult code;
    mm_scope scope;

    assert(start != 0);
    if (mm_scope_enter_default_relaxed(&scope, cu, stream.device, st) < 0) {
        return -1;
    }
    code = cu->MemFreeAsync(start, stream.handle);
    if (pool != NULL && code != CUDA_ERROR_NOT_PERMITTED) {
        mm_pending_frees_add(cu, &pool->driver_pool.frees, stream.handle, code);
    }
    mm_scope_leave(&scope);
    return mm_is_freed(code) ? 0 : mm_fail_call(st, "cuMemFreeAsync", (int)code);
}

/* True if a block whose free failed is still allocated: the driver refused, or the context of
 * its stream could not be made current. */
static bool
is_still_allocated(const mm_status *st)
{
    return mm_can_defer_free(st)
           || (st->kind == MM_DRIVER_CALL && strcmp(st->function, "cuMemFreeAsync") != 0);
}

/* Frees the struct, not its memory. */
static void
free_block_struct(mm_pool_block *block)
{
    if (block->order.shared != NULL) {
        mm_stream_drop(block->order.shared);
    }
    free(block);
}

/* True if each device in use has been idle since the free was deferred. Waits for `device`, because
 * the caller's wait may have come before the free was deferred. Does not wait for other devices,
 * because a wait destroys their captures. */
static bool
were_devices_idle(mm_driver *cu, mm_pool_block *block, int device)
{
    int current = 0;
    mm_status st;

    assert(device >= 0 && device < cu->device_count);
    if (mm_current_device(cu, &current, &st) < 0 || mm_device_synchronize(cu, device, &st) < 0
        || (current == device && mm_device_synchronize(cu, MM_ANY_DEVICE, &st) < 0)) {
        return false;
    }
    block->waited |= (uint64_t)1 << device;
    for (int i = 0; i < cu->device_count; i++) {
        if (atomic_load(&cu->primary[i]) != NULL && !(block->waited >> i & 1)) {
            return false;
        }
    }
    return true;
}

/* Frees the block in its order, or after all devices were idle; false if it must wait. Outside of
 * a host function, a failed free counts as done, because the driver may have acted. */
static bool
free_block_if_possible(mm_driver *cu, mm_pool_block *block, const mm_free_conditions *conditions)
{
    const mm_block_order *order = &block->order;
    mm_device_stream stream = order->stream;
    bool capturing = false;
    mm_status st;

    if (stream.handle == NULL || order->shared != NULL) {
        stream = mm_block_stream(cu, order);
    } else if (stream.handle != conditions->stream || has_another_stream(cu, order)) {
        if (!conditions->idle || !were_devices_idle(cu, block, conditions->device)) {
            return false;
        }
        stream.handle = NULL;
    }
    if (is_order_capturing(cu, stream, &capturing, &st) < 0 || capturing) {
        return false;
    }
    if (mm_pool_free_address(cu, block->pool, block->start, stream, &st) == 0) {
        return true;
    }
    if (is_still_allocated(&st)) {
        return false;
    }
    mm_leak_note_status(&st, block->size);
    return true;
}

static bool
attempt_block(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
{
    mm_pool_block *block = (mm_pool_block *)entry;
    mm_pool *pool = block->pool;

    if (!free_block_if_possible(cu, block, conditions)) {
        return false;
    }
    free_block_struct(block);
    mm_pool_drop(pool);
    return true;
}

void
mm_pool_defer_free(mm_pool_block *block)
{
    assert(block->start != 0 && block->pool != NULL);
    mm_deferred_frees_append(&block->deferred, attempt_block);
}

static int
allocate_block_memory(mm_driver *cu, mm_pool_block *block, size_t size, CUstream stream,
                      mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter_default_relaxed, block->order.stream.device, cu,
               MemAllocFromPoolAsync, st, &block->start, size, block->pool->driver_pool.handle,
               stream);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemAllocFromPoolAsync", (int)code);
    mm_status_add(st, "%zu bytes were requested", size);
    return -1;
}

int
mm_pool_device(const mm_pool *pool)
{
    return pool->managed ? MM_ANY_DEVICE : pool->location.id;
}

/* Sets order->stream for a block that is allocated on the stream. For both default streams that is
 * the legacy stream: the thread that frees cannot name this thread's per-thread default stream, but
 * the legacy stream is ordered after it. */
static int
set_order(mm_driver *cu, const mm_pool *pool, CUstream stream, mm_block_order *order,
          mm_status *st)
{
    bool by_default = mm_is_default_stream(stream);

    order->stream.handle = by_default ? NULL : stream;
    order->stream.device = mm_pool_device(pool);
    return by_default && order->stream.device == MM_ANY_DEVICE
               ? mm_current_device(cu, &order->stream.device, st)
               : 0;
}

int
mm_pool_location_device(const mm_pool *pool)
{
    return pool->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? pool->location.id : MM_NO_DEVICE;
}

mm_pool_block *
mm_pool_allocate(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream, mm_stream *shared,
                 mm_status *st)
{
    mm_pool_block *block = calloc(1, sizeof *block);

    assert(shared == NULL || shared->handle == stream);
    if (block == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    block->pool = pool;
    block->size = size;
    if (set_order(cu, pool, stream, &block->order, st) < 0
        || mm_pool_refuse_capture(cu, (mm_device_stream){stream, block->order.stream.device}, st)
               < 0) {
        free(block);
        return NULL;
    }
    mm_deferred_frees_attempt(cu, &(mm_free_conditions){.stream = block->order.stream.handle});
    if (allocate_block_memory(cu, block, size, stream, st) < 0) {
        free(block);
        return NULL;
    }
    mm_pool_retain(pool);
    if (shared != NULL) {
        mm_stream_retain(shared);
        block->order.shared = shared;
    }
    mm_block_order_identify(cu, &block->order);
    return block;
}

int
mm_pool_free(mm_pool_block *block, const CUstream *other, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();
    mm_pool *pool = block->pool;
    mm_device_stream stream = block->order.stream;
    bool capturing = false;
    int rc = 0;
    mm_status ignored;

    if (other != NULL) {
        stream = (mm_device_stream){*other, mm_pool_device(pool)};
    } else if (cu != NULL) {
        stream = mm_block_stream(cu, &block->order);
    }
    /* The work of a destroyed stream may go on: only a wait for the devices covers it. */
    if (cu != NULL && other == NULL && has_another_stream(cu, &block->order)) {
        mm_pool_defer_free(block);
        return 0;
    }
    /* If the query fails, the free fails too and reports it. */
    if (cu != NULL && is_order_capturing(cu, stream, &capturing, &ignored) == 0 && capturing) {
        mm_pool_defer_free(block);
        return 0;
    }
    rc = cu ? mm_pool_free_address(cu, pool, block->start, stream, st) : 0;
    if (rc < 0 && is_still_allocated(st)) {
        if (!mm_can_defer_free(st)) {
            mm_pool_defer_free(block);
        }
        return -1;
    }
    free_block_struct(block);
    if (rc < 0) {
        mm_pool_drop(pool);
        return -1;
    }
    return mm_pool_release(pool, st);
}

/* --- attributes ------------------------------------------------------------------------- */

int
mm_pool_get_attribute(mm_driver *cu, mm_pool *pool, CUmemPool_attribute attribute, uint64_t *value,
                      mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolGetAttribute, st,
              pool->driver_pool.handle, attribute, value);
    return 0;
}

int
mm_pool_set_attribute(mm_driver *cu, mm_pool *pool, CUmemPool_attribute attribute, uint64_t value,
                      mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolSetAttribute, st,
              pool->driver_pool.handle, attribute, &value);
    return 0;
}

int
mm_pool_trim(mm_driver *cu, mm_pool *pool, size_t keep, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolTrimTo, st,
              pool->driver_pool.handle, keep);
    return 0;
}

/* --- peers ------------------------------------------------------------------------------ */

int
mm_pool_peers(mm_driver *cu, mm_pool *pool, mm_location_set *peers, mm_status *st)
{
    CUresult code = CUDA_SUCCESS;
    mm_scope scope;

    assert(!pool->managed);
    *peers = 0;
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    for (int i = 0; i < cu->device_count && code == CUDA_SUCCESS; i++) {
        CUmemLocation location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, i);
        CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        if (i == pool->location.id) {
            continue;
        }
        code = cu->MemPoolGetAccess(&flags, pool->driver_pool.handle, &location);
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            *peers |= mm_location_bit(location);
        }
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuMemPoolGetAccess", (int)code);
}

MM_GUARD_ARRAYS static CUresult
set_pool_access(mm_driver *cu, mm_pool *pool, mm_location_set changed, mm_location_set to)
{
    CUmemAccessDesc access[MM_MAX_DEVICES];
    CUmemLocation location;
    size_t count = 0;

    assert(changed != 0 && !(changed & mm_location_bit(mm_host())));
    memset(access, 0, sizeof access);
    while (mm_next_location(&changed, &location)) {
        bool on = (to & mm_location_bit(location)) != 0;
        access[count].location = location;
        access[count++].flags =
            on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    return cu->MemPoolSetAccess(pool->driver_pool.handle, access, count);
}

int
mm_pool_change_peers(mm_driver *cu, mm_pool *pool, mm_location_set from, mm_location_set to,
                     mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = set_pool_access(cu, pool, from ^ to, to);
    if (code != CUDA_SUCCESS) {
        /* The call may have acted and then reported an earlier error. The first failure is
         * reported. */
        MM_IGNORE(set_pool_access(cu, pool, from ^ to, from));
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuMemPoolSetAccess", (int)code);
}

int
mm_pool_is_reachable(mm_driver *cu, const mm_pool *pool, int device, bool *reachable,
                     mm_status *st)
{
    int answer = 0;

    MM_TRY(cu, DeviceCanAccessPeer, st, &answer, device, pool->location.id);
    *reachable = answer != 0;
    return 0;
}
