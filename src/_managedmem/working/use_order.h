/* use_order.h: predicts the uses of the parts in a set of frames. The next uses are predicted from
 * a given order, from the past, or from the order in which the parts were added. Measures too
 * how often and how regularly a part is used.
 *
 * Parts are numbers from 0 on. Once the number of a removed part is vacated, a later part gets it,
 * so time and memory depend on the parts that live, or lived at once. The uses of a part have two
 * numbers: 2 * part in general, and 2 * part + 1 for uses that only read a part that other uses
 * write. So a loop that reads all parts is learned apart from a loop that writes them. Nothing
 * here locks: the caller admits one thread at a time. */
#ifndef MM_USE_ORDER_H
#define MM_USE_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../driver/status.h"

#define MM_NO_PART UINT32_MAX
#define MM_REMOVED_PART (MM_NO_PART - 1) /* in place of the number of a removed part */

/* The highest trust in a predictor: so many of the next parts may then be loaded ahead. */
enum { MM_MOST_TRUST = 8 };

/* Two uses in a row, and the use that came next. */
typedef struct {
    uint32_t first, second; /* first: MM_NO_PART in an empty place, where a search ends;
                             * MM_REMOVED_PART in a forgotten one, where it goes on */
    uint32_t times; /* how often the second one came in a row */
    uint32_t next;
} mm_followed_pair;

/* The neighbours of a part in the order of adding; or MM_NO_PART. */
typedef struct {
    uint32_t next, previous; /* next: of a vacant number, the next vacant number */
} mm_added_part;

/* Zeroed memory is not an empty order: call mm_use_order_init. */
typedef struct {
    uint32_t count; /* of numbers that were given out: the most parts that lived at once */
    uint32_t live; /* parts that were not removed: */
    uint32_t oldest, newest; /* the ends of their list in the order of adding; or MM_NO_PART */
    uint32_t vacant; /* the number that the next part gets; or MM_NO_PART */
    mm_added_part *added; /* by numbers */
    size_t added_capacity;
    uint32_t before, last; /* the last two different uses; or MM_NO_PART */
    uint32_t times; /* how often the last one came in a row */
    /* Learned: the latest follower of each use, and of each pair. The follower is MM_REMOVED_PART
     * for uses of a removed part, and for uses that a part does not have. */
    uint32_t *followers;
    size_t follower_capacity;
    uint8_t *doubts; /* for each use: how many more expectations behind it were wrong than right */
    size_t doubt_capacity;
    mm_followed_pair *pairs;
    uint32_t pair_mask; /* places - 1; the table is NULL without memory for it */
    /* Given: one round of uses, and the place of the next one in it. Each place has the access
     * that it had last. */
    uint32_t *given;
    uint32_t given_count, given_next;
    int given_trust, learned_trust;
} mm_use_order;

void mm_use_order_init(mm_use_order *o);
void mm_use_order_free(mm_use_order *o);

/* Adds the newest part. `is_written`: some uses write it, and those that only read count apart. */
MM_NODISCARD int mm_use_order_add(mm_use_order *o, bool is_written, mm_status *st);

/* Forgets a part: its predecessor is now followed by its successor. */
void mm_use_order_remove(mm_use_order *o, uint32_t part);

/* Lets a later part get the number of a removed part. */
void mm_use_order_vacate(mm_use_order *o, uint32_t part);

/* Sets the given round, or removes it with a count of 0. Parts may come several times, or not at
 * all. Removed parts are left out. */
MM_NODISCARD int mm_use_order_give(mm_use_order *o, const uint32_t *round, size_t count,
                                   mm_status *st);

/* Notes that a part is acquired; `reads` for a use of a written part that only reads it. */
void mm_use_order_note(mm_use_order *o, uint32_t part, bool reads);

/* A walk along the uses that are expected next. */
typedef struct {
    uint32_t first, second, times; /* as in the order, of the walk so far */
    uint32_t given_next;
    bool by_given;
    bool is_doubtful; /* it has passed a use behind which expectations were wrong of late */
} mm_order_walk;

mm_order_walk mm_use_order_walk(const mm_use_order *o);

/* The next part of the walk, or MM_NO_PART if none is known; in *reads whether it is only read. */
uint32_t mm_order_walk_next(const mm_use_order *o, mm_order_walk *walk, bool *reads);

/* The number of next parts that may be loaded, from 0 to MM_MOST_TRUST; less after wrong
 * expectations. */
int mm_use_order_trust(const mm_use_order *o);

/* --- rates --- */

/* A part of a loop is used at regular distances, so its next use is known. The experts of a model
 * are chosen at run time, so their recent rate predicts more than their last use. */

/* Counts the uses of a set. Zeroed memory is a clock at its start. */
typedef struct {
    uint64_t turns;
    double weight; /* of a use now; after some rounds a use has half of the weight of a new one */
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

/* True unless the uses are known to come at irregular distances. */
bool mm_use_rate_is_regular(const mm_use_rate *rate);

#endif
