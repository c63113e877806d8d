/* working_order.h: the order in which the groups of a working set are used: what comes next, from
 * a given order, from the past, or from the order in which the groups were added.
 *
 * Groups are numbers from 0 on; that of a removed group is given to a later one once it is vacated. So
 * time and memory depend on the groups that live, or lived at once. The uses of a group have
 * two numbers: 2 * group in general, and 2 * group + 1 for those that only read a group that others
 * write. So a loop that reads all groups and one that writes them have followers of their own.
 * Nothing here locks: the caller admits one thread at a time. */
#ifndef MM_WORKING_ORDER_H
#define MM_WORKING_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../driver/status.h"

#define MM_NO_GROUP UINT32_MAX
#define MM_REMOVED_GROUP (MM_NO_GROUP - 1) /* in place of the number of one that was removed */

/* The trust in a predictor: the number of next groups that may be loaded. MM_MOST_TRUST sets no limit. */
enum { MM_MOST_TRUST = 8 };

/* The use that came after one that followed another one. */
typedef struct {
    uint32_t first, second; /* first: MM_NO_GROUP in an empty place, where a search ends;
                             * MM_REMOVED_GROUP in a forgotten one, where it goes on */
    uint32_t times; /* how often the second one came in a row */
    uint32_t next;
} mm_followed_pair;

/* The neighbours of a group in the order of adding; or MM_NO_GROUP. */
typedef struct {
    uint32_t next, previous; /* next: of a vacant number, the next vacant one */
} mm_added_group;

/* Zeroed memory is not an empty order: mm_working_order_init sets what is MM_NO_GROUP, and the trusts. */
typedef struct {
    uint32_t count; /* of numbers that were given: the most groups that there were at once */
    uint32_t live; /* groups that were not removed: */
    uint32_t oldest, newest; /* the ends of their list in the order of adding; or MM_NO_GROUP */
    uint32_t vacant; /* the number that the next group gets; or MM_NO_GROUP */
    mm_added_group *added; /* by numbers */
    size_t added_capacity;
    uint32_t before, last; /* the last two different uses; or MM_NO_GROUP */
    uint32_t times; /* how often the last one came in a row */
    /* Learned: the latest follower of each use, and of each pair. The follower is MM_REMOVED_GROUP
     * for uses of a removed group, and for uses that a group does not have. */
    uint32_t *followers;
    size_t follower_capacity;
    uint8_t *doubts; /* for each use: the excess of wrong expectations behind it over right ones */
    size_t doubt_capacity;
    mm_followed_pair *pairs;
    uint32_t pair_mask; /* places - 1; the table is NULL without memory for it */
    /* Given: one round of uses, and the place of the next one in it. Each place has the access that it
     * had last. */
    uint32_t *given;
    uint32_t given_count, given_next;
    int given_trust, learned_trust;
} mm_working_order;

void mm_working_order_init(mm_working_order *o);
void mm_working_order_free(mm_working_order *o);

/* Adds a group, which is the newest one then; `is_written` if some of its uses may only read it. */
MM_NODISCARD int mm_working_order_add(mm_working_order *o, bool is_written, mm_status *st);

/* Forgets a group: what came before it is followed by what came after it. */
void mm_working_order_remove(mm_working_order *o, uint32_t group);

/* Gives the number of a removed group to a later one. */
void mm_working_order_vacate(mm_working_order *o, uint32_t group);

/* Sets one round, or with a count of 0 none. Groups may come several times, and not at all; those that
 * were removed are left out. */
MM_NODISCARD int mm_working_order_give(mm_working_order *o, const uint32_t *round, size_t count,
                                       mm_status *st);

/* Notes that a group is acquired; `reads` for a use of a written group that only reads it. */
void mm_working_order_note(mm_working_order *o, uint32_t group, bool reads);

/* A walk along the uses that are expected next. */
typedef struct {
    uint32_t first, second, times; /* as in the order, of the walk so far */
    uint32_t given_next;
    bool by_given;
    bool is_doubtful; /* it has passed a use behind which expectations were wrong of late */
} mm_order_walk;

mm_order_walk mm_working_order_walk(const mm_working_order *o);

/* The next group of the walk, and whether its use only reads it; or MM_NO_GROUP if nothing is known. */
uint32_t mm_order_walk_next(const mm_working_order *o, mm_order_walk *walk, bool *reads);

/* The number of next groups that may be loaded, from 0 to MM_MOST_TRUST; less after wrong
 * expectations. */
int mm_working_order_trust(const mm_working_order *o);

#endif
