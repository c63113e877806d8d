/* working_loader.c: the life of a working set at work: its start, its end, the list of all sets. */
#include "working_thread.h"

#include <stdlib.h>

#include "working_claims.h"

/* Guards the list of sets; held while their threads end. */
static pthread_mutex_t loaders_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_loader *all_loaders;

/* In a scope. */
static int
make_streams(mm_loader *l, mm_status *st)
{
    for (size_t i = 0; i < MM_LOAD_STREAMS; i++) {
        MM_TRY(l->cu, StreamCreate, st, &l->streams[i], CU_STREAM_NON_BLOCKING);
    }
    MM_TRY(l->cu, StreamCreate, st, &l->away, CU_STREAM_NON_BLOCKING);
    MM_TRY(l->cu, EventCreate, st, &l->left, CU_EVENT_DISABLE_TIMING);
    return 0;
}

static int
open_streams(mm_loader *l, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (mm_scope_enter_relaxed(&scope, l->cu, l->device, st) < 0) {
        return -1;
    }
    rc = make_streams(l, st);
    mm_scope_leave(&scope);
    return rc;
}

static void
destroy_stream(mm_loader *l, CUstream *stream)
{
    for (int attempt = 0; attempt < 2 && *stream != NULL; attempt++) {
        if (l->cu->StreamDestroy(*stream) == CUDA_SUCCESS) {
            *stream = NULL;
        }
    }
}

static void
destroy_event(mm_loader *l, CUevent *event)
{
    if (*event != NULL) {
        mm_event_destroy(l->cu, *event);
        *event = NULL;
    }
}

/* Frees the driver's objects, in a scope. What fails twice stays with the driver. */
static void
destroy_objects(mm_loader *l)
{
    for (uint32_t i = 0; i < l->set.order.count; i++) {
        if (l->groups[i] != NULL) {
            destroy_event(l, &l->groups[i]->done);
            mm_releases_free(l->cu, l->set.groups[i].releases);
            l->set.groups[i].releases = NULL;
        }
    }
    mm_releases_free(l->cu, l->pool);
    l->pool = NULL;
    for (size_t i = 0; i < l->spare_count; i++) {
        destroy_event(l, &l->spare_events[i]);
    }
    l->spare_count = 0;
    destroy_event(l, &l->left);
    for (size_t i = 0; i < MM_LOAD_STREAMS; i++) {
        destroy_stream(l, &l->streams[i]);
    }
    destroy_stream(l, &l->away);
}

static void
free_driver_objects(mm_loader *l)
{
    mm_status ignored;
    mm_scope scope;
    int rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored);

    if (rc < 0) {
        rc = mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored); /* the second attempt */
    }
    if (rc == 0) {
        destroy_objects(l);
        mm_scope_leave(&scope);
    }
}

static void
free_loader(mm_loader *l)
{
    free_driver_objects(l);
    for (uint32_t i = 0; i < l->set.order.count; i++) {
        if (l->groups[i] != NULL) {
            mm_give_back_claim(&l->groups[i]->memory);
            mm_working_memory_free(&l->groups[i]->memory);
            free(l->groups[i]);
        }
    }
    free(l->groups);
    free(l->spare_events);
    mm_working_set_free(&l->set);
    (void)pthread_cond_destroy(&l->issued_more);
    (void)pthread_cond_destroy(&l->wanted);
    (void)pthread_mutex_destroy(&l->lock);
    mm_turn_destroy(&l->turn);
    free(l);
}

static void
list_loader(mm_loader *l)
{
    (void)pthread_mutex_lock(&loaders_mutex);
    l->next = all_loaders;
    all_loaders = l;
    (void)pthread_mutex_unlock(&loaders_mutex);
}

static void
unlist_loader(const mm_loader *l)
{
    (void)pthread_mutex_lock(&loaders_mutex);
    for (mm_loader **link = &all_loaders; *link != NULL; link = &(*link)->next) {
        if (*link == l) {
            *link = l->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&loaders_mutex);
}

mm_loader *
mm_loader_new(mm_driver *cu, int device, size_t budget, const void *owner, mm_status *st)
{
    mm_loader *l = calloc(1, sizeof *l);

    if (l == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for a working set");
        return NULL;
    }
    l->cu = cu;
    l->device = device;
    l->owner = owner;
    l->use_began = MM_NO_USE;
    mm_working_set_init(&l->set, budget);
    mm_turn_init(&l->turn);
    (void)pthread_mutex_init(&l->lock, NULL);
    (void)pthread_cond_init(&l->wanted, NULL);
    (void)pthread_cond_init(&l->issued_more, NULL);
    if (open_streams(l, st) < 0 || mm_loader_start_thread(l, st) < 0) {
        free_loader(l);
        return NULL;
    }
    list_loader(l);
    return l;
}

/* Restores the advice of as many groups as it can; the first failure is reported. */
static int
restore_groups(mm_loader *l, mm_status *st)
{
    mm_status later;
    int rc = 0;

    for (uint32_t i = 0; i < l->set.order.count; i++) {
        mm_working_memory *m = l->groups[i] != NULL ? &l->groups[i]->memory : NULL;
        if (m != NULL && mm_working_memory_restore(l->cu, m, rc == 0 ? st : &later) < 0) {
            rc = -1;
        } else if (m != NULL) {
            mm_give_back_claim(m);
        }
    }
    return rc;
}

int
mm_loader_close(mm_loader *l, mm_status *st)
{
    int rc;

    mm_turn_take(&l->turn);
    rc = mm_loader_end_thread(l, st);
    if (rc == 0) {
        rc = restore_groups(l, st);
        free_driver_objects(l);
    }
    atomic_store(&l->has_ended, rc == 0);
    mm_turn_release(&l->turn);
    return rc;
}

bool
mm_loader_has_ended(const mm_loader *l)
{
    return atomic_load(&l->has_ended);
}

bool
mm_loader_is_closed(const mm_loader *l)
{
    return mm_guard_is_closed(&l->guard);
}

/* In a forked child the thread of the parent may have been changing all of it. */
void
mm_loader_end(mm_loader *l)
{
    mm_status ignored;

    if (mm_driver_forked()) {
        return;
    }
    if (mm_loader_close(l, &ignored) < 0) {
        MM_IGNORE(mm_loader_close(l, &ignored)); /* the second attempt; no caller is left */
    }
    for (uint32_t i = 0; i < l->set.order.count; i++) {
        if (l->groups[i] != NULL) {
            l->groups[i]->memory.advised = false; /* the memory may end now */
            mm_give_back_claim(&l->groups[i]->memory);
        }
    }
}

void
mm_loader_free(mm_loader *l)
{
    if (l == NULL || mm_driver_forked()) {
        return;
    }
    unlist_loader(l);
    mm_loader_end(l);
    if (!l->has_thread) {
        free_loader(l);
    }
}

void
mm_loaders_end(const void *owner)
{
    mm_status ignored;

    if (mm_driver_forked()) {
        return;
    }
    (void)pthread_mutex_lock(&loaders_mutex); /* so that no thread frees one */
    for (mm_loader *l = all_loaders; l != NULL; l = l->next) {
        if (l->owner == owner) {
            mm_turn_take(&l->turn);
            MM_IGNORE(mm_loader_end_thread(l, &ignored)); /* the process ends anyway */
            mm_turn_release(&l->turn);
        }
    }
    (void)pthread_mutex_unlock(&loaders_mutex);
}
