/* random_numbers.h: numbers that are the same in each run, from a seed. */
#ifndef RANDOM_NUMBERS_H
#define RANDOM_NUMBERS_H

#include <stdint.h>

static uint64_t seed;

static inline uint32_t
random_below(uint32_t limit)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % limit;
}

#endif
