/* use_order.c: the expected uses of parts, from a given round or from learned followers, and the
 * rate and regularity of uses.
 *
 * The next use is predicted from the last two uses, which show the direction of a loop that goes
 * forward and then back, or else from the last use. A use that never had a follower is expected to
 * be followed by a use of the part that was added next. */
#include "use_order.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/growth.h"

enum {
    PLACES_FOR_A_PART = 8,
    LEAST_PLACES = 64,
    FEWER = 4, /* the table is made smaller if 1 / FEWER of it is enough */
    MOST_PROBES = 8,
    LEAST_DOUBT = 2,
    MOST_DOUBT = 3
};

void
mm_use_order_init(mm_use_order *o)
{
    *o = (mm_use_order){.oldest = MM_NO_PART,
                        .newest = MM_NO_PART,
                        .vacant = MM_NO_PART,
                        .before = MM_NO_PART,
                        .last = MM_NO_PART,
                        .given_trust = MM_MOST_TRUST,
                        .learned_trust = MM_MOST_TRUST};
}

void
mm_use_order_free(mm_use_order *o)
{
    free(o->added);
    free(o->followers);
    free(o->doubts);
    free(o->pairs);
    free(o->given);
    mm_use_order_init(o);
}

/* --- uses --------------------------------------------------------------------------------- */

static uint32_t
use_of(uint32_t part, bool reads)
{
    return 2 * part + reads;
}

static uint32_t
part_of(uint32_t use)
{
    return use / 2;
}

static bool
only_reads(uint32_t use)
{
    return use % 2 != 0;
}

/* Also true for a use that its part does not have. */
static bool
is_removed(const mm_use_order *o, uint32_t use)
{
    return o->followers[use] == MM_REMOVED_PART;
}

/* A use like this one, of the part that was added next; behind the newest part comes the oldest. */
static uint32_t
use_behind(const mm_use_order *o, uint32_t use)
{
    uint32_t next = o->added[part_of(use)].next;
    uint32_t part = next != MM_NO_PART ? next : o->oldest;

    return use_of(part, only_reads(use) && !is_removed(o, use_of(part, true)));
}

/* --- the table of pairs ------------------------------------------------------------------- */

static size_t
count_places(const mm_use_order *o)
{
    return o->pairs == NULL ? 0 : (size_t)o->pair_mask + 1;
}

static bool
has_pair(const mm_followed_pair *place)
{
    return place->first != MM_NO_PART && place->first != MM_REMOVED_PART;
}

static uint32_t
hash_pair(uint32_t first, uint32_t second)
{
    uint64_t mixed = ((uint64_t)first << 32 | second) * UINT64_C(0x9E3779B97F4A7C15);

    return (uint32_t)(mixed >> 32);
}

/* The place of a pair. A new pair takes the place of a forgotten pair, an empty place, or else its
 * first probe, whose pair is then forgotten. */
static mm_followed_pair *
find_pair(const mm_use_order *o, uint32_t first, uint32_t second)
{
    uint32_t hash = hash_pair(first, second);
    mm_followed_pair *forgotten = NULL;

    for (uint32_t i = 0; i < MOST_PROBES; i++) {
        mm_followed_pair *place = &o->pairs[(hash + i) & o->pair_mask];
        if (place->first == first && place->second == second) {
            return place;
        }
        if (!has_pair(place) && forgotten == NULL) {
            forgotten = place;
        }
        if (place->first == MM_NO_PART) {
            break;
        }
    }
    return forgotten != NULL ? forgotten : &o->pairs[hash & o->pair_mask];
}

static void
learn_pair(mm_use_order *o, const mm_followed_pair *pair)
{
    if (o->pairs != NULL) {
        *find_pair(o, pair->first, pair->second) = *pair;
    }
}

/* Makes the table larger for more parts, and smaller for far fewer. Without memory the table stays
 * as it is, which only makes it forget more pairs. */
static void
fit_pairs(mm_use_order *o)
{
    size_t places = count_places(o), wanted = LEAST_PLACES;
    mm_followed_pair *fitting, *earlier = o->pairs;

    while (wanted < (size_t)o->live * PLACES_FOR_A_PART) {
        wanted *= 2;
    }
    if ((wanted <= places && wanted > places / FEWER)
        || (fitting = malloc(wanted * sizeof *fitting)) == NULL) {
        return;
    }
    for (size_t i = 0; i < wanted; i++) {
        fitting[i].first = MM_NO_PART;
    }
    o->pairs = fitting;
    o->pair_mask = (uint32_t)wanted - 1;
    for (size_t i = 0; i < places; i++) {
        if (has_pair(&earlier[i])) {
            learn_pair(o, &earlier[i]);
        }
    }
    free(earlier);
}

/* --- parts and the given round ----------------------------------------------------------- */

/* Makes room for one number more. */
static int
grow_uses(mm_use_order *o, mm_status *st)
{
    size_t parts = (size_t)o->count + 1, uses = 2 * parts;

    if (uses > MM_REMOVED_PART) {
        return mm_fail(st, MM_BAD_VALUE, "a working set cannot have more than %u parts",
                       MM_REMOVED_PART / 2);
    }
    o->added = mm_grow(o->added, &o->added_capacity, parts, sizeof *o->added, st);
    o->followers = mm_grow(o->followers, &o->follower_capacity, uses, sizeof *o->followers, st);
    o->doubts = mm_grow(o->doubts, &o->doubt_capacity, uses, sizeof *o->doubts, st);
    return o->added_capacity < parts || o->follower_capacity < uses || o->doubt_capacity < uses
               ? -1
               : 0;
}

static uint32_t
take_number(mm_use_order *o)
{
    uint32_t part = o->vacant;

    if (part == MM_NO_PART) {
        return o->count++;
    }
    o->vacant = o->added[part].next;
    return part;
}

/* Sets the links that lead to a part, in its neighbours or at the ends of the list: to the part
 * itself when it is added, and past it when it is removed. */
static void
link_neighbours(mm_use_order *o, mm_added_part ends, uint32_t next, uint32_t previous)
{
    *(ends.previous != MM_NO_PART ? &o->added[ends.previous].next : &o->oldest) = next;
    *(ends.next != MM_NO_PART ? &o->added[ends.next].previous : &o->newest) = previous;
}

int
mm_use_order_add(mm_use_order *o, bool is_written, mm_status *st)
{
    uint32_t part;

    if (o->vacant == MM_NO_PART && grow_uses(o, st) < 0) {
        return -1;
    }
    part = take_number(o);
    o->doubts[use_of(part, false)] = o->doubts[use_of(part, true)] = 0;
    o->followers[use_of(part, false)] = MM_NO_PART;
    o->followers[use_of(part, true)] = is_written ? MM_NO_PART : MM_REMOVED_PART;
    o->added[part] = (mm_added_part){.next = MM_NO_PART, .previous = o->newest};
    link_neighbours(o, o->added[part], part, part);
    o->live++;
    fit_pairs(o);
    return 0;
}

void
mm_use_order_vacate(mm_use_order *o, uint32_t part)
{
    assert(part < o->count && is_removed(o, use_of(part, false)));
    o->added[part].next = o->vacant;
    o->vacant = part;
}

int
mm_use_order_give(mm_use_order *o, const uint32_t *round, size_t count, mm_status *st)
{
    uint32_t *copy = NULL;

    if (count >= MM_NO_PART || (count > 0 && (copy = malloc(count * sizeof *copy)) == NULL)) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for an order of %zu parts", count);
    }
    free(o->given);
    o->given = copy;
    o->given_count = 0;
    for (size_t i = 0; i < count; i++) {
        assert(round[i] < o->count);
        if (!is_removed(o, use_of(round[i], false))) {
            copy[o->given_count++] = use_of(round[i], false);
        }
    }
    o->given_next = 0;
    o->given_trust = MM_MOST_TRUST;
    return 0;
}

/* --- expectations ------------------------------------------------------------------------- */

/* The pair that the two make, or NULL. */
static const mm_followed_pair *
learned_pair(const mm_use_order *o, uint32_t first, uint32_t second)
{
    const mm_followed_pair *place = NULL;

    if (first != MM_NO_PART && o->pairs != NULL) {
        place = find_pair(o, first, second);
    }
    return place != NULL && place->first == first && place->second == second ? place : NULL;
}

static uint32_t
learned_follower(const mm_use_order *o, uint32_t first, uint32_t second, uint32_t times)
{
    const mm_followed_pair *pair;

    if (second == MM_NO_PART) {
        return o->oldest != MM_NO_PART ? use_of(o->oldest, false) : MM_NO_PART;
    }
    pair = learned_pair(o, first, second);
    if (pair != NULL) {
        return times < pair->times ? second : pair->next;
    }
    if (o->followers[second] != MM_NO_PART) {
        return o->followers[second];
    }
    return use_behind(o, second);
}

static bool
uses_given(const mm_use_order *o)
{
    return o->given_count > 0 && o->given_trust >= o->learned_trust;
}

mm_order_walk
mm_use_order_walk(const mm_use_order *o)
{
    return (mm_order_walk){.first = o->before,
                           .second = o->last,
                           .times = o->times,
                           .given_next = o->given_next,
                           .by_given = uses_given(o)};
}

static uint32_t
next_use(const mm_use_order *o, mm_order_walk *walk)
{
    uint32_t next;

    if (walk->by_given) {
        next = o->given[walk->given_next];
        walk->given_next = (walk->given_next + 1) % o->given_count;
        return next;
    }
    next = learned_follower(o, walk->first, walk->second, walk->times);
    walk->is_doubtful |= walk->second != MM_NO_PART && o->doubts[walk->second] >= LEAST_DOUBT;
    if (next == walk->second) {
        walk->times++;
    } else {
        walk->first = walk->second;
        walk->second = next;
        walk->times = 1;
    }
    return next;
}

uint32_t
mm_order_walk_next(const mm_use_order *o, mm_order_walk *walk, bool *reads)
{
    uint32_t use = next_use(o, walk);

    *reads = use != MM_NO_PART && only_reads(use);
    return use != MM_NO_PART ? part_of(use) : MM_NO_PART;
}

int
mm_use_order_trust(const mm_use_order *o)
{
    return uses_given(o) ? o->given_trust : o->learned_trust;
}

/* --- removing ----------------------------------------------------------------------------- */

/* Once `use` is removed, a run of (first, use, next) becomes the pair (first, next). Learns that
 * pair, with the follower of (use, next). */
static void
join_pairs(mm_use_order *o, uint32_t use)
{
    for (size_t i = 0; i < count_places(o); i++) {
        const mm_followed_pair pair = o->pairs[i], *behind;
        if (!has_pair(&pair) || pair.second != use || pair.first == pair.next
            || learned_pair(o, pair.first, pair.next) != NULL) {
            continue;
        }
        behind = learned_pair(o, use, pair.next);
        if (behind != NULL) {
            learn_pair(o, &(mm_followed_pair){pair.first, pair.next, behind->times, behind->next});
        }
    }
}

/* A pair with a new follower, because its follower `use` is removed. If the new one is the second
 * use of the pair itself, as where a loop turns back, that use then comes more often in a row. */
static mm_followed_pair
pair_without(const mm_use_order *o, const mm_followed_pair *pair, uint32_t use)
{
    const mm_followed_pair *through = learned_pair(o, pair->second, use), *back;
    mm_followed_pair joined = *pair;

    joined.next = through != NULL ? through->next : o->followers[use];
    if (joined.next == pair->second) {
        back = learned_pair(o, use, pair->second);
        joined.times += back != NULL ? back->times : 0;
        joined.next = back != NULL ? back->next : MM_NO_PART;
    }
    return joined;
}

static void
forget_pairs(mm_use_order *o, uint32_t use)
{
    for (size_t i = 0; i < count_places(o); i++) {
        mm_followed_pair *pair = &o->pairs[i];
        if (has_pair(pair) && pair->next == use && pair->first != use) {
            *pair = pair_without(o, pair, use);
        }
    }
    for (size_t i = 0; i < count_places(o); i++) {
        mm_followed_pair *pair = &o->pairs[i];
        if (has_pair(pair)
            && (pair->first == use || pair->second == use || pair->next == use
                || pair->next == pair->second || pair->next == MM_NO_PART)) {
            pair->first = MM_REMOVED_PART;
        }
    }
}

static void
forget_follower(mm_use_order *o, uint32_t use)
{
    uint32_t behind = o->followers[use];

    for (uint32_t part = o->oldest; part != MM_NO_PART; part = o->added[part].next) {
        for (uint32_t i = use_of(part, false); i <= use_of(part, true); i++) {
            if (o->followers[i] == use) {
                o->followers[i] = behind == i ? MM_NO_PART : behind;
            }
        }
    }
    o->followers[use] = MM_REMOVED_PART;
}

static void
leave_out_given(mm_use_order *o, uint32_t part)
{
    uint32_t kept = 0, next = o->given_next;

    for (uint32_t i = 0; i < o->given_count; i++) {
        if (part_of(o->given[i]) != part) {
            o->given[kept++] = o->given[i];
        } else if (i < o->given_next) {
            next--;
        }
    }
    o->given_count = kept;
    o->given_next = next < kept ? next : 0;
}

static void
forget_use(mm_use_order *o, uint32_t use)
{
    join_pairs(o, use);
    forget_pairs(o, use);
    forget_follower(o, use);
    if (o->last == use) {
        o->last = o->before;
        o->before = MM_NO_PART;
        o->times = 1;
    }
    if (o->before == use) {
        o->before = MM_NO_PART;
    }
}

void
mm_use_order_remove(mm_use_order *o, uint32_t part)
{
    assert(part < o->count && !is_removed(o, use_of(part, false)));
    forget_use(o, use_of(part, false));
    if (!is_removed(o, use_of(part, true))) {
        forget_use(o, use_of(part, true));
    }
    leave_out_given(o, part);
    link_neighbours(o, o->added[part], o->added[part].next, o->added[part].previous);
    o->live--;
    fit_pairs(o);
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

/* In an expert chosen at run time, the next use is foreseeable; behind its end it is not. */
static void
note_doubt(uint8_t *doubt, bool right)
{
    if (right) {
        *doubt -= *doubt > 0;
    } else {
        *doubt += *doubt < MOST_DOUBT;
    }
}

/* The next place with this part, or the number of places if the round lacks it. */
static uint32_t
place_of(const mm_use_order *o, uint32_t part)
{
    for (uint32_t i = 0; i < o->given_count; i++) {
        uint32_t place = (o->given_next + i) % o->given_count;
        if (part_of(o->given[place]) == part) {
            return place;
        }
    }
    return o->given_count;
}

/* An expectation with the wrong access counts as right: the part is needed. */
static void
note_given(mm_use_order *o, uint32_t use)
{
    uint32_t place = place_of(o, part_of(use));

    o->given_trust = changed_trust(o->given_trust, place == o->given_next);
    if (place < o->given_count) {
        o->given[place] = use;
        o->given_next = (place + 1) % o->given_count;
    }
}

static void
note_learned(mm_use_order *o, uint32_t use)
{
    uint32_t expected = learned_follower(o, o->before, o->last, o->times);
    bool right = o->last == MM_NO_PART || part_of(expected) == part_of(use);

    o->learned_trust = changed_trust(o->learned_trust, right);
    if (o->last != MM_NO_PART) {
        note_doubt(&o->doubts[o->last], right);
    }
    if (use == o->last) {
        o->times++;
        return;
    }
    if (o->last != MM_NO_PART) {
        o->followers[o->last] = use;
    }
    if (o->before != MM_NO_PART) {
        learn_pair(o, &(mm_followed_pair){o->before, o->last, o->times, use});
    }
    o->before = o->last;
    o->last = use;
    o->times = 1;
}

void
mm_use_order_note(mm_use_order *o, uint32_t part, bool reads)
{
    uint32_t use = use_of(part, reads);

    assert(part < o->count && !is_removed(o, use));
    if (o->given_count > 0) {
        note_given(o, use);
    }
    note_learned(o, use);
}

/* --- rates -------------------------------------------------------------------------------- */

enum {
    ROUNDS = 3, /* of as many uses as there are parts; after this many, a use counts half */
    IRREGULAR = 2,
    MOST_SURPRISES = 3,
    TOLERANCE = 8 /* distances are alike if they differ by 1 / TOLERANCE at most */
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
