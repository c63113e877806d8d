/* clock.h: the clock of events, which is the kernel module's; nothing else. */
#ifndef MM_CLOCK_H
#define MM_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds of CLOCK_MONOTONIC_RAW. */
static inline uint64_t
mm_raw_clock(void)
{
    struct timespec now = {0};

    (void)clock_gettime(CLOCK_MONOTONIC_RAW, &now); /* Linux has it */
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

#endif
