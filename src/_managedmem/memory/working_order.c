/* working_order.c: the next groups of a working set: a given round, and what followed what.
 *
 * Two groups in a row tell a loop that goes forward and then back which direction it has; one group
 * alone is the second choice. A group that never had a follower is expected to be followed by the
 * one that was added after it. */
#include "working_order.h"

#include <assert.h>
#include <stdlib.h>

#include "growth.h"

enum { PLACES_FOR_A_GROUP = 8, LEAST_PLACES = 64, MOST_PROBES = 8 };

void
mm_working_order_init(mm_working_order *o)
{
    *o = (mm_working_order){.before = MM_NO_GROUP,
                            .last = MM_NO_GROUP,
                            .given_trust = MM_MOST_TRUST,
                            .learned_trust = MM_MOST_TRUST};
}

void
mm_working_order_free(mm_working_order *o)
{
    free(o->followers);
    free(o->pairs);
    free(o->given);
    mm_working_order_init(o);
}

static bool
is_removed(const mm_working_order *o, uint32_t group)
{
    return o->followers[group] == MM_REMOVED_GROUP;
}

/* The first group from this number on, after the last one the first one of all; or MM_NO_GROUP. */
static uint32_t
group_from(const mm_working_order *o, uint32_t number)
{
    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t group = (uint32_t)(((uint64_t)number + i) % o->count);
        if (!is_removed(o, group)) {
            return group;
        }
    }
    return MM_NO_GROUP;
}

/* --- the table of pairs ------------------------------------------------------------------- */

static size_t
count_places(const mm_working_order *o)
{
    return o->pairs == NULL ? 0 : (size_t)o->pair_mask + 1;
}

static bool
has_pair(const mm_followed_pair *place)
{
    return place->first != MM_NO_GROUP && place->first != MM_REMOVED_GROUP;
}

static uint32_t
hash_pair(uint32_t first, uint32_t second)
{
    uint64_t mixed = ((uint64_t)first << 32 | second) * UINT64_C(0x9E3779B97F4A7C15);

    return (uint32_t)(mixed >> 32);
}

/* The place of a pair, or the one that it would take: an empty place, or else the first one of its
 * probes, whose pair is then forgotten. */
static mm_followed_pair *
find_pair(const mm_working_order *o, uint32_t first, uint32_t second)
{
    uint32_t hash = hash_pair(first, second);

    for (uint32_t i = 0; i < MOST_PROBES; i++) {
        mm_followed_pair *place = &o->pairs[(hash + i) & o->pair_mask];
        if ((place->first == first && place->second == second) || place->first == MM_NO_GROUP) {
            return place;
        }
    }
    return &o->pairs[hash & o->pair_mask];
}

static void
learn_pair(mm_working_order *o, const mm_followed_pair *pair)
{
    if (o->pairs != NULL) {
        *find_pair(o, pair->first, pair->second) = *pair;
    }
}

/* Makes the table larger for more groups. Without memory it stays as it is: it only forgets. */
static void
widen_pairs(mm_working_order *o)
{
    size_t places = count_places(o), wanted = LEAST_PLACES;
    mm_followed_pair *wider, *earlier = o->pairs;

    while (wanted < (size_t)o->count * PLACES_FOR_A_GROUP) {
        wanted *= 2;
    }
    if (wanted <= places || (wider = malloc(wanted * sizeof *wider)) == NULL) {
        return;
    }
    for (size_t i = 0; i < wanted; i++) {
        wider[i].first = MM_NO_GROUP;
    }
    o->pairs = wider;
    o->pair_mask = (uint32_t)wanted - 1;
    for (size_t i = 0; i < places; i++) {
        if (has_pair(&earlier[i])) {
            learn_pair(o, &earlier[i]);
        }
    }
    free(earlier);
}

/* --- groups and the given round ----------------------------------------------------------- */

int
mm_working_order_add(mm_working_order *o, mm_status *st)
{
    size_t needed = (size_t)o->count + 1;

    if (needed > MM_REMOVED_GROUP) {
        return mm_fail(st, MM_BAD_VALUE, "a working set cannot have more than %u groups",
                       MM_REMOVED_GROUP);
    }
    o->followers = mm_grow(o->followers, &o->follower_capacity, needed, sizeof *o->followers, st);
    if (o->follower_capacity < needed) {
        return -1;
    }
    o->followers[o->count++] = MM_NO_GROUP;
    widen_pairs(o);
    return 0;
}

int
mm_working_order_give(mm_working_order *o, const uint32_t *round, size_t count, mm_status *st)
{
    uint32_t *copy = NULL;

    if (count >= MM_NO_GROUP || (count > 0 && (copy = malloc(count * sizeof *copy)) == NULL)) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for an order of %zu groups", count);
    }
    free(o->given);
    o->given = copy;
    o->given_count = 0;
    for (size_t i = 0; i < count; i++) {
        assert(round[i] < o->count);
        if (!is_removed(o, round[i])) {
            copy[o->given_count++] = round[i];
        }
    }
    o->given_next = 0;
    o->given_trust = MM_MOST_TRUST;
    return 0;
}

/* --- expectations ------------------------------------------------------------------------- */

/* The pair that the two make, or NULL. */
static const mm_followed_pair *
learned_pair(const mm_working_order *o, uint32_t first, uint32_t second)
{
    const mm_followed_pair *place = NULL;

    if (first != MM_NO_GROUP && o->pairs != NULL) {
        place = find_pair(o, first, second);
    }
    return place != NULL && place->first == first && place->second == second ? place : NULL;
}

static uint32_t
learned_follower(const mm_working_order *o, uint32_t first, uint32_t second, uint32_t times)
{
    const mm_followed_pair *pair;

    if (second == MM_NO_GROUP) {
        return group_from(o, 0);
    }
    pair = learned_pair(o, first, second);
    if (pair != NULL) {
        return times < pair->times ? second : pair->next;
    }
    if (o->followers[second] != MM_NO_GROUP) {
        return o->followers[second];
    }
    return group_from(o, second + 1);
}

static bool
uses_given(const mm_working_order *o)
{
    return o->given_count > 0 && o->given_trust >= o->learned_trust;
}

mm_order_walk
mm_working_order_walk(const mm_working_order *o)
{
    return (mm_order_walk){o->before, o->last, o->times, o->given_next, uses_given(o)};
}

uint32_t
mm_order_walk_next(const mm_working_order *o, mm_order_walk *walk)
{
    uint32_t next;

    if (walk->by_given) {
        next = o->given[walk->given_next];
        walk->given_next = (walk->given_next + 1) % o->given_count;
        return next;
    }
    next = learned_follower(o, walk->first, walk->second, walk->times);
    if (next == walk->second) {
        walk->times++;
    } else {
        walk->first = walk->second;
        walk->second = next;
        walk->times = 1;
    }
    return next;
}

int
mm_working_order_trust(const mm_working_order *o)
{
    return uses_given(o) ? o->given_trust : o->learned_trust;
}

/* --- removing ----------------------------------------------------------------------------- */

/* Learns (before, behind) in place of (before, group), which `behind` followed, and (group, behind). */
static void
join_pairs(mm_working_order *o, uint32_t group)
{
    for (size_t i = 0; i < count_places(o); i++) {
        const mm_followed_pair pair = o->pairs[i], *behind;
        if (!has_pair(&pair) || pair.second != group || pair.first == pair.next
            || learned_pair(o, pair.first, pair.next) != NULL) {
            continue;
        }
        behind = learned_pair(o, group, pair.next);
        if (behind != NULL) {
            learn_pair(o, &(mm_followed_pair){pair.first, pair.next, behind->times, behind->next});
        }
    }
}

/* What follows a pair once the group, which followed it, is gone. If that is the second one of the pair
 * itself, as at the end of a loop that turns, the two acquisitions of it are in a row then. */
static mm_followed_pair
pair_without(const mm_working_order *o, const mm_followed_pair *pair, uint32_t group)
{
    const mm_followed_pair *through = learned_pair(o, pair->second, group), *back;
    mm_followed_pair joined = *pair;

    joined.next = through != NULL ? through->next : o->followers[group];
    if (joined.next == pair->second) {
        back = learned_pair(o, group, pair->second);
        joined.times += back != NULL ? back->times : 0;
        joined.next = back != NULL ? back->next : MM_NO_GROUP;
    }
    return joined;
}

static void
forget_pairs(mm_working_order *o, uint32_t group)
{
    for (size_t i = 0; i < count_places(o); i++) {
        mm_followed_pair *pair = &o->pairs[i];
        if (has_pair(pair) && pair->next == group && pair->first != group) {
            *pair = pair_without(o, pair, group);
        }
    }
    for (size_t i = 0; i < count_places(o); i++) {
        mm_followed_pair *pair = &o->pairs[i];
        if (has_pair(pair)
            && (pair->first == group || pair->second == group || pair->next == group
                || pair->next == pair->second || pair->next == MM_NO_GROUP)) {
            pair->first = MM_REMOVED_GROUP;
        }
    }
}

static void
forget_follower(mm_working_order *o, uint32_t group)
{
    uint32_t behind = o->followers[group];

    for (uint32_t i = 0; i < o->count; i++) {
        if (o->followers[i] == group) {
            o->followers[i] = behind == i ? MM_NO_GROUP : behind;
        }
    }
    o->followers[group] = MM_REMOVED_GROUP;
}

static void
leave_out_given(mm_working_order *o, uint32_t group)
{
    uint32_t kept = 0, next = o->given_next;

    for (uint32_t i = 0; i < o->given_count; i++) {
        if (o->given[i] != group) {
            o->given[kept++] = o->given[i];
        } else if (i < o->given_next) {
            next--;
        }
    }
    o->given_count = kept;
    o->given_next = next < kept ? next : 0;
}

void
mm_working_order_remove(mm_working_order *o, uint32_t group)
{
    assert(group < o->count && !is_removed(o, group));
    join_pairs(o, group);
    forget_pairs(o, group);
    forget_follower(o, group);
    leave_out_given(o, group);
    if (o->last == group) {
        o->last = o->before;
        o->before = MM_NO_GROUP;
        o->times = 1;
    }
    if (o->before == group) {
        o->before = MM_NO_GROUP;
    }
}

/* --- noting ------------------------------------------------------------------------------- */

static int
changed_trust(int trust, bool right)
{
    if (right) {
        return trust < MM_MOST_TRUST ? trust + 1 : trust;
    }
    return trust / 2;
}

/* The place after the next one with this group, or the present place if the round lacks it. */
static uint32_t
place_behind(const mm_working_order *o, uint32_t group)
{
    for (uint32_t i = 0; i < o->given_count; i++) {
        uint32_t place = (o->given_next + i) % o->given_count;
        if (o->given[place] == group) {
            return (place + 1) % o->given_count;
        }
    }
    return o->given_next;
}

static void
note_given(mm_working_order *o, uint32_t group)
{
    o->given_trust = changed_trust(o->given_trust, o->given[o->given_next] == group);
    o->given_next = place_behind(o, group);
}

static void
note_learned(mm_working_order *o, uint32_t group)
{
    bool right = learned_follower(o, o->before, o->last, o->times) == group;

    o->learned_trust = changed_trust(o->learned_trust, right || o->last == MM_NO_GROUP);
    if (group == o->last) {
        o->times++;
        return;
    }
    if (o->last != MM_NO_GROUP) {
        o->followers[o->last] = group;
    }
    if (o->before != MM_NO_GROUP) {
        learn_pair(o, &(mm_followed_pair){o->before, o->last, o->times, group});
    }
    o->before = o->last;
    o->last = group;
    o->times = 1;
}

void
mm_working_order_note(mm_working_order *o, uint32_t group)
{
    assert(group < o->count && !is_removed(o, group));
    if (o->given_count > 0) {
        note_given(o, group);
    }
    note_learned(o, group);
}
