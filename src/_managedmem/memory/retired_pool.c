/* retired_pool.c: keeps the list of retired pools and destroys them. */
#include "retired_pool.h"

#include "allocation.h"

#include <stdatomic.h>
#include <stdlib.h>

static _Atomic(mm_retired_pool *) retired;

static void
push_retired(mm_retired_pool *pool)
{
    pool->next = atomic_load(&retired);
    while (!atomic_compare_exchange_weak(&retired, &pool->next, pool)) {
    }
}

/* *left: memory of the pool is in use, or its free has not been waited for. Used where a free has no
 * event. */
static CUresult
find_memory_left(mm_driver *cu, CUmemoryPool pool, bool *left, const char **function)
{
    cuuint64_t reserved = 0;
    CUresult code;

    *function = "cuMemPoolTrimTo";
    code = cu->MemPoolTrimTo(pool, 0);
    if (code == CUDA_SUCCESS) {
        *function = "cuMemPoolGetAttribute";
        code = cu->MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
    }
    *left = reserved > 0;
    return code;
}

/* In the caller's scope. *function is the driver function of the result. A failed destruction counts
 * as done: the driver may have acted, and the handle may then belong to another pool. */
static CUresult
destroy_if_done(mm_driver *cu, mm_retired_pool *pool, bool *destroyed, const char **function)
{
    CUresult code = CUDA_SUCCESS;
    bool left = !mm_queued_frees_done(cu, &pool->frees);

    if (left && pool->frees.events == NULL) {
        code = find_memory_left(cu, pool->handle, &left, function);
    }
    if (code == CUDA_SUCCESS && !left) {
        *function = "cuMemPoolDestroy";
        code = cu->MemPoolDestroy(pool->handle);
        *destroyed = true;
    }
    return code;
}

/* Destroys the pool and frees its record, or puts it on the list. */
static int
destroy_or_keep(mm_driver *cu, mm_retired_pool *pool, mm_status *st)
{
    const char *function = NULL;
    bool destroyed = false;
    CUresult code = CUDA_SUCCESS;
    mm_scope scope;

    if (pool->orphans == NULL) {
        if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
            code = (CUresult)st->code;
            function = st->function;
        } else {
            code = destroy_if_done(cu, pool, &destroyed, &function);
            mm_scope_leave(&scope);
        }
    }
    /* A driver that is shut down has destroyed its pools. */
    if (destroyed || (code != CUDA_SUCCESS && mm_freed(code))) {
        mm_queued_frees_drop(&pool->frees);
        free(pool);
    } else {
        push_retired(pool);
    }
    return mm_freed(code) ? 0 : mm_fail_call(st, function, (int)code);
}

int
mm_pool_retire(mm_driver *cu, mm_retired_pool *pool, mm_status *st)
{
    return destroy_or_keep(cu, pool, st);
}

/* All streams must be idle, because these frees are not ordered behind the work on the blocks. A failed
 * free counts as done, because the driver may have acted. */
static void
free_orphans(mm_driver *cu, mm_retired_pool *pool)
{
    mm_orphan *orphan = pool->orphans, *next;
    mm_status ignored;
    mm_scope scope;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, &ignored) < 0) {
        return;
    }
    pool->orphans = NULL;
    for (; orphan != NULL; orphan = next) {
        next = orphan->next;
        (void)cu->MemFreeAsync(orphan->start, NULL);
        free(orphan);
    }
    mm_queued_frees_add(cu, &pool->frees, NULL, CUDA_SUCCESS);
    mm_scope_leave(&scope);
}

void
mm_pools_reclaim(mm_driver *cu, bool idle)
{
    mm_retired_pool *pool, *next;
    mm_status ignored;

    if (atomic_load_explicit(&retired, memory_order_relaxed) == NULL || mm_driver_forked()) {
        return;
    }
    pool = atomic_exchange(&retired, NULL);
    for (; pool != NULL; pool = next) {
        int rc;
        next = pool->next;
        if (idle && pool->orphans != NULL && mm_synchronize_all(cu, &ignored) == 0) {
            free_orphans(cu, pool);
        }
        rc = destroy_or_keep(cu, pool, &ignored);
        (void)rc; /* the caller reports on another call */
    }
}
