/* use_rates.c: the frequencies of uses, with decay, and the regularity of their distances. */
#include "use_rates.h"

enum {
    ROUNDS = 3, /* of as many uses as there are parts: after these, a use counts half */
    IRREGULAR = 2,
    MOST_SURPRISES = 3,
    TOLERANCE = 8 /* this part of a distance */
};

static bool
is_like(uint64_t gap, uint64_t earlier)
{
    uint64_t difference = gap > earlier ? gap - earlier : earlier - gap;

    return difference <= earlier / TOLERANCE;
}

/* In a loop that goes forward and then back, distances repeat with period 2. */
static void
note_gap(mm_use_rate *rate, uint64_t gap)
{
    bool known = rate->gaps[1] != 0;

    if (known && !is_like(gap, rate->gaps[0]) && !is_like(gap, rate->gaps[1])) {
        rate->surprises += rate->surprises < MOST_SURPRISES;
    } else {
        rate->surprises -= rate->surprises > 0;
    }
    rate->gaps[1] = rate->gaps[0];
    rate->gaps[0] = gap;
}

bool
mm_use_rate_note(mm_use_clock *clock, mm_use_rate *rate, double *heat, uint32_t parts)
{
    const double ln2 = 0.6931, span = (double)ROUNDS * (parts > 0 ? parts : 1);

    clock->turns++;
    clock->weight = clock->weight > 0 ? clock->weight * (1 + ln2 / span) : 1;
    if (rate->last != 0) {
        note_gap(rate, clock->turns - rate->last);
    }
    rate->last = clock->turns;
    *heat += clock->weight;
    if (clock->weight < 1 / MM_USE_COOLING) {
        return false;
    }
    clock->weight *= MM_USE_COOLING;
    return true;
}

bool
mm_use_rate_is_regular(const mm_use_rate *rate)
{
    return rate->surprises < IRREGULAR;
}
