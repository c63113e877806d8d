/* The mutex that guards the emulated machine, and the two conditions of every call: cuInit has
 * succeeded, and it did so in this process, not in a parent. Also ends the process where a real
 * driver would crash. */
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static bool initialised, forked;

void
emu_crash(const char *reason)
{
    (void)fprintf(stderr, "emulated driver: %s\n", reason);
    abort();
}

void
emu_lock(void)
{
    pthread_mutex_lock(&mutex);
}

void
emu_unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

void
emu_wait(void)
{
    pthread_cond_wait(&condition, &mutex);
}

void
emu_broadcast(void)
{
    pthread_cond_broadcast(&condition);
}

/* As with a real driver, a forked child cannot use the library. The forking thread holds the mutex
 * during the fork, so that the child does not inherit it from a thread that does not exist
 * there. */
static void
after_fork(void)
{
    forked = true;
    emu_unlock();
}

void
emu_set_initialised(void)
{
    if (!initialised) {
        initialised = true;
        (void)pthread_atfork(emu_lock, emu_unlock, after_fork);
    }
}

bool
emu_initialised(void)
{
    return initialised;
}

bool
emu_forked(void)
{
    return forked;
}
