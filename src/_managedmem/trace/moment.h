/* moment.h: one moment on two clocks. */
#ifndef MM_MOMENT_H
#define MM_MOMENT_H

#include <stdint.h>

/* In nanoseconds: the clock of the events, and CLOCK_MONOTONIC. */
typedef struct {
    uint64_t raw, monotonic;
} mm_moment;

mm_moment mm_moment_now(void);

#endif
