/* pool_teardown.c: destroys pools whose owner is gone, once their frees have run. It records an
 * event behind the last free of each stream, and queries the events. pool.c frees the blocks, even
 * those of a closed pool. */
#include "pool_teardown.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

void
mm_pending_frees_init(mm_pending_frees *frees)
{
    (void)pthread_mutex_init(&frees->lock, NULL);
    frees->events = NULL;
    frees->count = 0;
    frees->unknown = false;
}

/* Stores the key of a stream, which is unique in the process. A handle is not: the per-thread
 * default streams of all threads have the same handle. */
static CUresult
identify_stream(mm_driver *cu, CUstream stream, mm_free_event *key)
{
    CUresult code = CUDA_SUCCESS;
    CUcontext context;

    assert(mm_in_scope());
    *key = (mm_free_event){0};
    if (mm_is_default_stream(stream) && (code = cu->CtxGetCurrent(&context)) == CUDA_SUCCESS) {
        code = cu->CtxGetId(context, &key->context_id);
    }
    return code == CUDA_SUCCESS && !mm_is_legacy_stream(stream)
               ? cu->StreamGetId(stream, &key->stream_id)
               : code;
}

/* Creates an event in the current context, if it is a primary one: others may end at any time,
 * and their events with them. */
static CUresult
create_lasting_event(mm_driver *cu, CUevent *event)
{
    bool primary = false;
    mm_status st;
    int device;

    if (mm_is_primary_current(cu, &device, &primary, &st) < 0) {
        return (CUresult)st.code;
    }
    return primary ? cu->EventCreate(event, CU_EVENT_DISABLE_TIMING) : CUDA_ERROR_NOT_SUPPORTED;
}

/* Creates the event in the context of the stream, as cuEventRecord requires. */
static CUresult
create_event(mm_driver *cu, CUstream stream, CUevent *event)
{
    CUcontext context = NULL;
    CUresult code = CUDA_SUCCESS;

    if (!mm_is_default_stream(stream)) {
        code = cu->StreamGetCtx(stream, &context);
    }
    if (code == CUDA_SUCCESS && context != NULL) {
        code = cu->CtxPushCurrent(context);
    }
    if (code == CUDA_SUCCESS) {
        code = create_lasting_event(cu, event);
        if (context != NULL) {
            mm_pop_context(cu);
        }
    }
    return code;
}

/* The entry of the stream, created if missing; NULL on failure. The caller holds the lock. */
static mm_free_event *
find_free_event(mm_driver *cu, mm_pending_frees *frees, CUstream stream, const mm_free_event *key)
{
    mm_free_event *entry = frees->events;

    assert(pthread_mutex_trylock(&frees->lock) == EBUSY);
    while (entry != NULL
           && (entry->context_id != key->context_id || entry->stream_id != key->stream_id)) {
        entry = entry->next;
    }
    if (entry != NULL) {
        return entry;
    }
    entry = malloc(sizeof *entry);
    if (entry == NULL) {
        return NULL;
    }
    *entry = *key;
    if (create_event(cu, stream, &entry->event) != CUDA_SUCCESS) {
        free(entry);
        return NULL;
    }
    entry->next = frees->events;
    frees->events = entry;
    frees->count++;
    return entry;
}

/* Destroys the events that were reached. The caller holds the lock. */
static void
destroy_reached(mm_driver *cu, mm_pending_frees *frees)
{
    mm_free_event **link = &frees->events, *entry;

    assert(pthread_mutex_trylock(&frees->lock) == EBUSY);
    while ((entry = *link) != NULL) {
        CUresult code = cu->EventQuery(entry->event);
        if (code == CUDA_ERROR_NOT_READY) {
            link = &entry->next;
        } else {
            /* After an error it is unknown whether the free has run. */
            frees->unknown = frees->unknown || code != CUDA_SUCCESS;
            *link = entry->next;
            frees->count--;
            mm_event_destroy(cu, entry->event);
            free(entry);
        }
    }
}

void
mm_pending_frees_add(mm_driver *cu, mm_pending_frees *frees, CUstream stream, CUresult result)
{
    enum { MANY = 16 };
    mm_free_event key, *entry = NULL;

    assert(mm_in_scope());
    (void)pthread_mutex_lock(&frees->lock);
    if (frees->count >= MANY) {
        destroy_reached(cu, frees);
    }
    if (result == CUDA_SUCCESS && identify_stream(cu, stream, &key) == CUDA_SUCCESS) {
        entry = find_free_event(cu, frees, stream, &key);
    }
    if (entry == NULL || cu->EventRecord(entry->event, stream) != CUDA_SUCCESS) {
        frees->unknown = true;
    }
    (void)pthread_mutex_unlock(&frees->lock);
}

/* Destroys the events that were reached. True if every free has run, or the driver is shut down. In
 * a relaxed scope. */
static bool
have_run(mm_driver *cu, mm_pending_frees *frees)
{
    bool done;

    assert(mm_in_scope());
    (void)pthread_mutex_lock(&frees->lock);
    destroy_reached(cu, frees);
    done = frees->events == NULL && !frees->unknown;
    (void)pthread_mutex_unlock(&frees->lock);
    return done;
}

void
mm_pending_frees_clear(mm_pending_frees *frees)
{
    mm_free_event *entry = frees->events, *next;

    for (; entry != NULL; entry = next) {
        next = entry->next;
        free(entry);
    }
    frees->events = NULL;
    frees->count = 0;
}

/* --- pools without an owner ------------------------------------------------------------------- */

/* For frees without an event. *left becomes true if memory of the pool is in use, or if nothing has
 * waited for its free. */
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
    bool left = !have_run(cu, &pool->frees);

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

/* Destroys the pool and frees its record; false if it must wait. *code and *function belong to the
 * last driver call. */
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
    mm_pending_frees_clear(&pool->frees);
    free(pool);
    return true;
}

static bool
attempt_retired_pool(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
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
        mm_deferred_frees_append(&pool->deferred, attempt_retired_pool);
    }
    return mm_is_freed(code) || code == CUDA_ERROR_NOT_PERMITTED
               ? 0
               : mm_fail_call(st, function, (int)code);
}
