/* pool.c: driver pools: their life, their blocks, their numbers and their peers. */
#include "pool.h"

#include "allocation.h"

#include <stdlib.h>
#include <string.h>

/* --- life ------------------------------------------------------------------------------- */

static int
create(mm_driver *cu, mm_pool *pool, mm_status *st)
{
    CUmemPoolProps props;
    CUresult code;

    memset(&props, 0, sizeof props);
    props.allocType =
        pool->managed ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = pool->where;
    MM_CALL_IN(code, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolCreate, st,
               &pool->driver_pool.handle, &props);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemPoolCreate", (int)code);
    if (code == CUDA_ERROR_NOT_SUPPORTED) {
        mm_status_add(st, "Pools need Device.memory_pools_supported, those of managed memory "
                          "also Device.concurrent_managed_access.");
    }
    return -1;
}

mm_pool *
mm_pool_create(mm_driver *cu, bool managed, CUmemLocation where, mm_status *st)
{
    mm_pool *pool;

    if (managed && cu->version < MM_DRIVER_BATCH) {
        (void)mm_driver_lacks(cu, "a pool of managed memory", st);
        return NULL;
    }
    mm_late_frees_attempt(cu, &(mm_chance){.pools = true});
    pool = calloc(1, sizeof *pool);
    if (pool == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    atomic_init(&pool->references, 1);
    pool->where = where;
    pool->managed = managed;
    mm_queued_frees_init(&pool->driver_pool.frees);
    if (create(cu, pool, st) < 0) {
        free(pool);
        return NULL;
    }
    /* A driver's own threshold of 0 gives memory back at every synchronisation and takes it again
     * at the next allocation. */
    if (mm_pool_set(cu, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, UINT64_MAX, st) < 0) {
        mm_status ignored;
        MM_IGNORE(mm_pool_release(pool, &ignored)); /* the first failure is reported */
        return NULL;
    }
    return pool;
}

void
mm_pool_retain(mm_pool *pool)
{
    atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
}

int
mm_pool_release(mm_pool *pool, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();

    if (atomic_fetch_sub_explicit(&pool->references, 1, memory_order_acq_rel) != 1) {
        return 0;
    }
    if (cu == NULL) {
        mm_queued_frees_drop(&pool->driver_pool.frees);
        free(pool);
        return 0;
    }
    return mm_pool_retire(cu, &pool->driver_pool, st);
}

/* --- blocks ----------------------------------------------------------------------------- */

/* A default stream is looked up in a context of its device. */
static int
is_capturing(mm_driver *cu, CUstream stream, int device, bool *capturing, mm_status *st)
{
    mm_scope scope;
    int rc = mm_scope_enter_default(&scope, cu, device, st);

    if (rc == 0) {
        rc = mm_stream_is_capturing(cu, stream, capturing, st);
        mm_scope_leave(&scope);
    }
    return rc;
}

int
mm_pool_refuse_capture(mm_driver *cu, CUstream stream, int device, mm_status *st)
{
    bool capturing = false;

    if (is_capturing(cu, stream, device, &capturing, st) < 0) {
        return -1;
    }
    if (capturing) {
        (void)mm_fail(st, MM_CAPTURING,
                      "a pool cannot allocate or free on a stream that captures a CUDA graph, "
                      "because the memory would be the graph's: do it before the capture begins, "
                      "or on another stream");
        st->code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return -1;
    }
    return 0;
}

int
mm_pool_free_address(mm_driver *cu, mm_pool *pool, CUdeviceptr start, CUstream stream, int device,
                     mm_status *st)
{
    CUresult code;
    mm_scope scope;

    if (mm_scope_enter_default_relaxed(&scope, cu, device, st) < 0) {
        return -1;
    }
    code = cu->MemFreeAsync(start, stream);
    if (pool != NULL && code != CUDA_ERROR_NOT_PERMITTED) {
        mm_queued_frees_add(cu, &pool->driver_pool.frees, stream, code);
    }
    mm_scope_leave(&scope);
    return mm_freed(code) ? 0 : mm_fail_call(st, "cuMemFreeAsync", (int)code);
}

/* After a failed free: true if the block is still allocated, because the driver refused, or because the
 * context of its stream could not be made current for the call. */
static bool
is_still_allocated(const mm_status *st)
{
    return mm_can_free_late(st)
           || (st->kind == MM_DRIVER_CALL && strcmp(st->function, "cuMemFreeAsync") != 0);
}

static void
drop_block(mm_pool_block *block)
{
    mm_status ignored;

    if (block->shared != NULL) {
        MM_IGNORE(
            mm_stream_release(block->shared, &ignored)); /* the caller reports on the block */
    }
    free(block);
}

/* True if each device in use was idle since the free was deferred. Waits for `device`, because the
 * caller's wait may have been earlier, but not for other devices: a wait destroys their captures. */
static bool
were_idle(mm_driver *cu, mm_pool_block *block, int device)
{
    int current = 0;
    mm_status st;

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

/* Frees the block in the order of its stream, or after all devices were idle; false if it must wait. A
 * free that was called and failed counts as done, because it may have acted, except inside a host
 * function. */
static bool
free_with(mm_driver *cu, mm_pool_block *block, const mm_chance *chance)
{
    bool exists =
        block->stream == NULL || block->shared != NULL || block->stream == chance->stream;
    CUstream stream = exists ? block->stream : NULL;
    bool capturing = false;
    mm_status st;

    if (!exists && !(chance->idle && were_idle(cu, block, chance->device))) {
        return false;
    }
    return is_capturing(cu, stream, block->device, &capturing, &st) == 0 && !capturing
           && (mm_pool_free_address(cu, block->pool, block->start, stream, block->device, &st) == 0
               || !is_still_allocated(&st));
}

static bool
attempt(mm_driver *cu, mm_late_free *entry, const mm_chance *chance)
{
    mm_pool_block *block = (mm_pool_block *)entry;
    mm_pool *pool = block->pool;
    mm_status ignored;

    if (!free_with(cu, block, chance)) {
        return false;
    }
    drop_block(block);
    MM_IGNORE(mm_pool_release(pool, &ignored)); /* a late free has no caller to report to */
    return true;
}

void
mm_pool_free_late(mm_pool_block *block)
{
    mm_free_late(&block->late, attempt);
}

static int
call_allocate(mm_driver *cu, mm_pool_block *block, size_t size, CUstream stream, mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter_default_relaxed, block->device, cu, MemAllocFromPoolAsync, st,
               &block->start, size, block->pool->driver_pool.handle, stream);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemAllocFromPoolAsync", (int)code);
    mm_status_add(st, "%zu bytes were asked for", size);
    return -1;
}

int
mm_pool_device(const mm_pool *pool)
{
    return pool->managed ? MM_ANY_DEVICE : pool->where.id;
}

/* Whose default stream a block is allocated on, if it is a default one. */
static int
find_device(mm_driver *cu, const mm_pool *pool, CUstream stream, int *device, mm_status *st)
{
    *device = mm_pool_device(pool);
    return *device == MM_ANY_DEVICE && mm_is_default_stream(stream)
               ? mm_current_device(cu, device, st)
               : 0;
}

mm_pool_block *
mm_pool_allocate(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream, mm_stream *shared,
                 mm_status *st)
{
    mm_pool_block *block = calloc(1, sizeof *block);

    if (block == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    block->pool = pool;
    /* The per-thread default stream cannot be named by the thread that will free, but the legacy
     * stream is ordered after it. */
    block->stream = mm_is_default_stream(stream) ? NULL : stream;
    if (find_device(cu, pool, stream, &block->device, st) < 0
        || mm_pool_refuse_capture(cu, stream, block->device, st) < 0) {
        free(block);
        return NULL;
    }
    mm_late_frees_attempt(cu, &(mm_chance){.stream = block->stream});
    if (call_allocate(cu, block, size, stream, st) < 0) {
        free(block);
        return NULL;
    }
    atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
    if (shared != NULL) {
        mm_stream_retain(shared);
        block->shared = shared;
    }
    return block;
}

int
mm_pool_free(mm_pool_block *block, const CUstream *other, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();
    CUstream stream = other ? *other : block->stream;
    mm_pool *pool = block->pool;
    int device = other ? mm_pool_device(pool) : block->device, rc = 0;
    bool capturing = false;
    mm_status ignored;
    int released;

    /* What the query meets, the free meets as well. */
    if (cu != NULL && is_capturing(cu, stream, device, &capturing, &ignored) == 0 && capturing) {
        mm_pool_free_late(block);
        return 0;
    }
    rc = cu ? mm_pool_free_address(cu, pool, block->start, stream, device, st) : 0;
    if (rc < 0 && is_still_allocated(st)) {
        if (!mm_can_free_late(st)) {
            mm_pool_free_late(block);
        }
        return -1;
    }
    drop_block(block);
    released = mm_pool_release(pool, rc < 0 ? &ignored : st);
    return rc < 0 ? rc : released;
}

/* --- numbers ---------------------------------------------------------------------------- */

int
mm_pool_get(mm_driver *cu, mm_pool *pool, CUmemPool_attribute which, uint64_t *value,
            mm_status *st)
{
    cuuint64_t number = 0;

    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolGetAttribute, st,
              pool->driver_pool.handle, which, &number);
    *value = number;
    return 0;
}

int
mm_pool_set(mm_driver *cu, mm_pool *pool, CUmemPool_attribute which, uint64_t value, mm_status *st)
{
    cuuint64_t number = value;

    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemPoolSetAttribute, st,
              pool->driver_pool.handle, which, &number);
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

    *peers = 0;
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    for (int i = 0; i < cu->device_count && code == CUDA_SUCCESS; i++) {
        CUmemLocation where = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, i);
        CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        if (i == pool->where.id) {
            continue;
        }
        code = cu->MemPoolGetAccess(&flags, pool->driver_pool.handle, &where);
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            *peers |= mm_location_bit(where);
        }
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuMemPoolGetAccess", (int)code);
}

MM_GUARD_ARRAYS static CUresult
set_access(mm_driver *cu, mm_pool *pool, mm_location_set differs, mm_location_set to)
{
    CUmemAccessDesc map[MM_MAX_DEVICES];
    CUmemLocation where;
    size_t count = 0;

    memset(map, 0, sizeof map);
    while (mm_next_location(&differs, &where)) {
        bool on = (to & mm_location_bit(where)) != 0;
        map[count].location = where;
        map[count++].flags =
            on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    return cu->MemPoolSetAccess(pool->driver_pool.handle, map, count);
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
    code = set_access(cu, pool, from ^ to, to);
    if (code != CUDA_SUCCESS) {
        /* It may have acted and then reported an earlier error. The first failure is reported. */
        MM_IGNORE(set_access(cu, pool, from ^ to, from));
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuMemPoolSetAccess", (int)code);
}

int
mm_pool_reachable(mm_driver *cu, const mm_pool *pool, int device, bool *can, mm_status *st)
{
    int answer = 0;

    MM_TRY(cu, DeviceCanAccessPeer, st, &answer, device, pool->where.id);
    *can = answer != 0;
    return 0;
}
