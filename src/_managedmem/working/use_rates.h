/* use_rates.h: the rate of uses of a part, and whether uses are regular.
 *
 * A part of a loop is used at regular distances, so its next use is known. Experts are chosen at
 * run time: their recent rate predicts more than their last use. */
#ifndef MM_USE_RATES_H
#define MM_USE_RATES_H

#include <stdbool.h>
#include <stdint.h>

/* Counts the uses of a set. Zeroed memory is a clock at its start. */
typedef struct {
    uint64_t turns;
    double weight; /* of a use now; earlier ones have less, by half in some rounds */
} mm_use_clock;

/* Zeroed memory is a part that was not used. */
typedef struct {
    uint64_t last; /* the turn of the last use */
    uint64_t gaps[2]; /* the turns between the last uses */
    unsigned surprises; /* the excess of irregular gaps over regular ones */
} mm_use_rate;

/* Notes a use of a part in a set of `parts`, and adds its weight to *heat. True if the heat of all
 * parts has to be multiplied by MM_USE_COOLING, because the weights are large. */
bool mm_use_rate_note(mm_use_clock *clock, mm_use_rate *rate, double *heat, uint32_t parts);

#define MM_USE_COOLING 1e-100

/* False if the uses come at no regular distance. */
bool mm_use_rate_is_regular(const mm_use_rate *rate);

#endif
