/* clock.h: readings of the system's clocks, and the pauses of a waiting thread; nothing else. */
#ifndef MM_CLOCK_H
#define MM_CLOCK_H

#include <sched.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t
mm_read_clock(clockid_t clock)
{
    struct timespec now = {0};

    (void)clock_gettime(clock, &now); /* cannot fail: Linux has both clocks */
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* Nanoseconds of CLOCK_MONOTONIC_RAW, the clock of events, as the kernel module stamps them. */
static inline uint64_t
mm_raw_clock(void)
{
    return mm_read_clock(CLOCK_MONOTONIC_RAW);
}

/* Nanoseconds of CLOCK_MONOTONIC, the clock of time.perf_counter(). */
static inline uint64_t
mm_monotonic_clock(void)
{
    return mm_read_clock(CLOCK_MONOTONIC);
}

static inline void
mm_nap(void)
{
    const struct timespec nap = {.tv_nsec = 50000};

    (void)nanosleep(&nap, NULL);
}

/* Waits one round, counted from 0, for a few instructions of another thread. Sleeps after the
 * first rounds, so that even a thread with a real-time priority lets the other thread run. */
static inline void
mm_pause(int round)
{
    if (round < 100) {
        (void)sched_yield();
    } else {
        mm_nap();
    }
}

#endif
