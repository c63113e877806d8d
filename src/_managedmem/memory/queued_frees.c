/* queued_frees.c: records an event behind the last free of each stream, and queries the events. */
#include "queued_frees.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

void
mm_queued_frees_init(mm_queued_frees *frees)
{
    (void)pthread_mutex_init(&frees->lock, NULL);
    frees->events = NULL;
    frees->unknown = false;
}

/* The key of a stream: unique in the process. Each thread has a per-thread default stream of
 * its own, with the same handle. */
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
find_free_event(mm_driver *cu, mm_queued_frees *frees, CUstream stream, const mm_free_event *key)
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
    return entry;
}

/* Destroys the events that were reached. The caller holds the lock. */
static void
destroy_reached(mm_driver *cu, mm_queued_frees *frees)
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
            mm_event_destroy(cu, entry->event);
            free(entry);
        }
    }
}

enum { MANY = 16 };

static bool
has_many(const mm_queued_frees *frees)
{
    int count = 0;

    for (const mm_free_event *e = frees->events; e != NULL && count < MANY; e = e->next) {
        count++;
    }
    return count == MANY;
}

void
mm_queued_frees_add(mm_driver *cu, mm_queued_frees *frees, CUstream stream, CUresult result)
{
    mm_free_event key, *entry = NULL;

    assert(mm_in_scope());
    (void)pthread_mutex_lock(&frees->lock);
    if (has_many(frees)) {
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

bool
mm_queued_frees_done(mm_driver *cu, mm_queued_frees *frees)
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
mm_queued_frees_clear(mm_queued_frees *frees)
{
    mm_free_event *entry = frees->events, *next;

    for (; entry != NULL; entry = next) {
        next = entry->next;
        free(entry);
    }
    frees->events = NULL;
}
