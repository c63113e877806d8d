/* moment.c: reads both clocks as close together as possible. */
#include "moment.h"

#include "../driver/clock.h"

/* The closest pair of several, because the thread may be interrupted between two readings. */
mm_moment
mm_moment_now(void)
{
    enum { PAIRS = 8 };
    mm_moment best = {0};
    uint64_t narrowest = UINT64_MAX;

    for (int i = 0; i < PAIRS; i++) {
        uint64_t before = mm_monotonic_clock(), raw = mm_raw_clock(), after = mm_monotonic_clock();
        if (after - before < narrowest) {
            narrowest = after - before;
            best = (mm_moment){raw, before + narrowest / 2};
        }
    }
    return best;
}
