/* The function of counted_waits.h, and the one that the linker puts in the place of the C
 * library's. */
#include "counted_waits.h"

#include <pthread.h>
#include <stdatomic.h>

int __real_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);
int __wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex);

static atomic_ulong begun;

unsigned long
waits_begun(void)
{
    return atomic_load(&begun);
}

/* The caller has the mutex, so nothing that it waits for happens between the count and the
 * wait. */
int
__wrap_pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex)
{
    atomic_fetch_add(&begun, 1);
    return __real_pthread_cond_wait(condition, mutex);
}
