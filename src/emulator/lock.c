/* The mutex that guards the emulated machine, and whether this process may use it at all: it must
 * have called cuInit, and must not be a forked child of a process that did. */
#include "emulator.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static bool initialised, forked;

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

/* As with a real driver, a forked child cannot use what its parent opened.  The mutex is held
 * while the process forks, so that the child's copy is never one that a lost thread holds. */
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
