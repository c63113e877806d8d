/* use_ends.c: events at the ends of the uses of a part. */
#include "use_ends.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Counts the releases that were added, to tell whether two were recorded one after the other. */
static atomic_uint_fast64_t release_clock;

/* Takes a release out of the pool whose event is of this context; NULL if there is none. */
static mm_release_list *
take_from_pool(mm_release_list **pool, const mm_context *context)
{
    for (mm_release_list **link = pool; *link != NULL; link = &(*link)->next) {
        if ((*link)->context.id == context->id) {
            mm_release_list *found = *link;
            *link = found->next;
            found->next = NULL;
            return found;
        }
    }
    return NULL;
}

/* Takes the releases whose context has ended out of *list, and frees them. */
static void
free_ended(mm_driver *cu, mm_release_list **list)
{
    mm_release_list **link = list;

    while (*link != NULL) {
        mm_release_list *release = *link;
        if (mm_context_has_ended(cu, &release->context)) {
            *link = release->next;
            free(release);
        } else {
            link = &release->next;
        }
    }
}

/* Frees the pool's events of contexts that have ended, which no stream can use any more. */
static void
clean_pool(mm_driver *cu, pthread_mutex_t *lock, mm_release_list **pool)
{
    mm_release_list *kept;

    (void)pthread_mutex_lock(lock);
    kept = *pool;
    *pool = NULL;
    (void)pthread_mutex_unlock(lock);
    free_ended(cu, &kept);
    (void)pthread_mutex_lock(lock);
    *pool = mm_releases_join(kept, *pool);
    (void)pthread_mutex_unlock(lock);
}

/* In a scope of the context. */
static mm_release_list *
make_release(mm_driver *cu, const mm_context *context, mm_status *st)
{
    mm_release_list *made = malloc(sizeof *made);
    CUresult code;

    if (made == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for an event");
        return NULL;
    }
    *made = (mm_release_list){.context = *context};
    code = cu->EventCreate(&made->event, CU_EVENT_DISABLE_TIMING);
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuEventCreate", (int)code);
        free(made);
        return NULL;
    }
    return made;
}

/* In a scope of the stream's context. */
static int
record_release(mm_driver *cu, mm_release_list *release, CUstream stream, mm_status *st)
{
    release->begun = atomic_load(&release_clock);
    MM_TRY(cu, StreamGetId, st, stream, &release->stream);
    MM_TRY(cu, EventRecord, st, release->event, stream);
    return 0;
}

/* In a scope of the stream's context. */
static mm_release_list *
make_recorded_release(mm_driver *cu, CUstream stream, pthread_mutex_t *lock,
                      mm_release_list **pool, mm_status *st)
{
    mm_release_list *release;
    mm_context context;

    if (mm_current_context(cu, &context, st) < 0) {
        return NULL;
    }
    (void)pthread_mutex_lock(lock);
    release = take_from_pool(pool, &context);
    (void)pthread_mutex_unlock(lock);
    if (release == NULL) {
        clean_pool(cu, lock, pool);
        release = make_release(cu, &context, st);
    }
    if (release == NULL) {
        return NULL;
    }
    if (record_release(cu, release, stream, st) < 0) {
        mm_releases_free(cu, release); /* its context may have ended */
        return NULL;
    }
    return release;
}

mm_release_list *
mm_release_record(mm_driver *cu, mm_device_stream stream, pthread_mutex_t *lock,
                  mm_release_list **pool, mm_status *st)
{
    mm_release_list *release = NULL;
    mm_scope scope;

    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return NULL;
    }
    if (mm_stream_refuse_capture(cu, stream.handle, "the end of a use", st) == 0) {
        release = make_recorded_release(cu, stream.handle, lock, pool, st);
    }
    mm_scope_leave(&scope);
    return release;
}

mm_release_list *
mm_release_add(mm_release_list *list, mm_release_list *added, mm_release_list **pool)
{
    mm_release_list **link = &list;

    assert(added->next == NULL);
    while (*link != NULL) {
        mm_release_list *earlier = *link;
        if (earlier->stream == added->stream && earlier->added <= added->begun) {
            *link = earlier->next;
            earlier->next = NULL;
            mm_release_keep(earlier, pool);
        } else {
            link = &earlier->next;
        }
    }
    added->added = atomic_fetch_add(&release_clock, 1) + 1;
    added->next = list;
    return added;
}

size_t
mm_releases_count(const mm_release_list *list)
{
    size_t count = 0;

    for (; list != NULL; list = list->next) {
        count++;
    }
    return count;
}

mm_release_list *
mm_releases_join(mm_release_list *list, mm_release_list *behind)
{
    mm_release_list **link = &list;

    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = behind;
    return list;
}

/* A query that fails says nothing about the work: in a host function CUDA refuses all queries. */
mm_release_list *
mm_releases_take_passed(mm_driver *cu, mm_release_list **list)
{
    mm_release_list *passed = NULL, **link = list;

    free_ended(cu, list);
    while (*link != NULL) {
        mm_release_list *release = *link;
        if (cu->EventQuery(release->event) == CUDA_SUCCESS) {
            *link = release->next;
            release->next = passed;
            passed = release;
        } else {
            link = &release->next;
        }
    }
    return passed;
}

void
mm_release_keep(mm_release_list *list, mm_release_list **pool)
{
    while (list != NULL) {
        mm_release_list *next = list->next;
        list->next = *pool;
        *pool = list;
        list = next;
    }
}

void
mm_releases_free(mm_driver *cu, mm_release_list *list)
{
    while (list != NULL) {
        mm_release_list *next = list->next;
        if (!mm_context_has_ended(cu, &list->context)) {
            mm_event_destroy(cu, list->event);
        }
        free(list);
        list = next;
    }
}
