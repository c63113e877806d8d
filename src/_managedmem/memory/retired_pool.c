/* retired_pool.c: destroys pools whose owner is gone, once their frees have run. pool.c frees the
 * blocks. */
#include "retired_pool.h"

#include <assert.h>
#include <stdlib.h>

/* For frees without an event. *left is true if memory of the pool is in use, or its free has not
 * been waited for. */
static CUresult
find_memory_left(mm_driver *cu, CUmemoryPool pool, bool *left, const char **function)
{
    cuuint64_t reserved = 0;
    CUresult code;

    assert(mm_in_scope());
    *function = "cuMemPoolTrimTo";
    code = cu->MemPoolTrimTo(pool, 0);
    if (code == CUDA_SUCCESS) {
        *function = "cuMemPoolGetAttribute";
        code = cu->MemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
    }
    *left = reserved > 0;
    return code;
}

/* *function is the driver function that returned the result. A failed destruction counts as done:
 * the driver may have acted, and then given the handle to another pool. In the caller's scope. */
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
        *destroyed = code != CUDA_ERROR_NOT_PERMITTED;
    }
    return code;
}

/* Destroys the pool and frees its record; false if it must wait. *code and *function are those
 * of the last driver call. */
static bool
destroy_pool(mm_driver *cu, mm_retired_pool *pool, CUresult *code, const char **function)
{
    bool destroyed = false;
    mm_status st;
    mm_scope scope;

    assert(pool->handle != NULL);
    *code = CUDA_SUCCESS;
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, &st) < 0) {
        *code = (CUresult)st.code;
        *function = st.function;
    } else {
        *code = destroy_if_done(cu, pool, &destroyed, function);
        mm_scope_leave(&scope);
    }
    /* A driver that is shut down has destroyed its pools. */
    if (!destroyed && (*code == CUDA_SUCCESS || !mm_is_freed(*code))) {
        return false;
    }
    mm_queued_frees_clear(&pool->frees);
    free(pool);
    return true;
}

static bool
attempt_retired_pool(mm_driver *cu, mm_late_free *entry, const mm_free_conditions *conditions)
{
    const char *function = NULL;
    CUresult code;

    if (!conditions->pools || !destroy_pool(cu, (mm_retired_pool *)entry, &code, &function)) {
        return false;
    }
    if (code != CUDA_SUCCESS && mm_leaked_thing(function) != NULL) {
        mm_leak_note(code, function, 0);
    }
    return true;
}

int
mm_pool_retire(mm_driver *cu, mm_retired_pool *pool, mm_status *st)
{
    const char *function = NULL;
    CUresult code;

    if (!destroy_pool(cu, pool, &code, &function)) {
        mm_late_frees_append(&pool->late, attempt_retired_pool);
    }
    return mm_is_freed(code) || code == CUDA_ERROR_NOT_PERMITTED
               ? 0
               : mm_fail_call(st, function, (int)code);
}
