/* threads.h: threads of the library, and turns: locks that one thread has at a time, even for as
 * long as driver calls take; nothing else. */
#ifndef MM_THREADS_H
#define MM_THREADS_H

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>

#include "status.h"

/* A turn: a lock that a thread may keep during driver calls and waits. The mutex is held for a few
 * instructions only. */
typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t released;
    bool taken;
} mm_operation_lock;

static inline void
mm_operation_lock_init(mm_operation_lock *turn)
{
    (void)pthread_mutex_init(&turn->mutex, NULL);
    (void)pthread_cond_init(&turn->released, NULL);
    turn->taken = false;
}

static inline void
mm_operation_lock_destroy(mm_operation_lock *turn)
{
    (void)pthread_cond_destroy(&turn->released);
    (void)pthread_mutex_destroy(&turn->mutex);
}

static inline void
mm_operation_lock_take(mm_operation_lock *turn)
{
    (void)pthread_mutex_lock(&turn->mutex);
    while (turn->taken) {
        (void)pthread_cond_wait(&turn->released, &turn->mutex);
    }
    turn->taken = true;
    (void)pthread_mutex_unlock(&turn->mutex);
}

static inline void
mm_operation_lock_release(mm_operation_lock *turn)
{
    (void)pthread_mutex_lock(&turn->mutex);
    assert(turn->taken);
    turn->taken = false;
    (void)pthread_cond_signal(&turn->released);
    (void)pthread_mutex_unlock(&turn->mutex);
}

/* Starts a thread that handles no signal of the process. `purpose` completes the error message. */
MM_NODISCARD static inline int
mm_thread_start(pthread_t *thread, void *(*run)(void *), void *argument, const char *purpose,
                mm_status *st)
{
    sigset_t all, before;
    int error;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(thread, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? 0
                      : mm_fail(st, MM_NO_MEMORY, "cannot start a thread for %s: %s", purpose,
                                strerror(error));
}

#endif
