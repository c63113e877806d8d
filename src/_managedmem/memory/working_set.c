/* working_set.c: the decisions of a working set: room for what is acquired, and for what is
 * expected next, is made by dropping the groups whose next use is farthest away. */
#include "working_set.h"

#include <assert.h>
#include <stdlib.h>

#include "growth.h"

/* In a loop larger than the budget, each byte that is loaded ahead takes the room of one that would stay
 * for the next round. So few groups are loaded ahead at any size, and further ones only while all have
 * less than these bytes and than this part of the budget: the link then has work during a long use. */
#define MOST_BYTES_AHEAD ((size_t)32 << 20)
enum { AHEAD_AT_ANY_SIZE = 3, BUDGET_PART_AHEAD = 4 };

#define UNEXPECTED UINT32_MAX /* the distance of a group that is not expected */

void
mm_working_set_init(mm_working_set *s, size_t budget)
{
    *s = (mm_working_set){.budget = budget};
    mm_working_order_init(&s->order);
}

void
mm_working_set_free(mm_working_set *s)
{
    mm_working_order_free(&s->order);
    free(s->groups);
    free(s->queue);
    *s = (mm_working_set){.budget = s->budget};
}

/* --- the queue of commands ---------------------------------------------------------------- */

/* Makes the ring larger, and moves its commands to the beginning of the new one. */
static int
widen_queue(mm_working_set *s, size_t needed, mm_status *st)
{
    size_t capacity = 2 * s->queue_capacity > needed ? 2 * s->queue_capacity : needed;
    mm_working_command *wider;

    if (needed <= s->queue_capacity) {
        return 0;
    }
    wider = malloc(capacity * sizeof *wider);
    if (wider == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu commands", capacity);
    }
    for (size_t i = 0; i < s->queued; i++) {
        wider[i] = s->queue[(s->queue_first + i) % s->queue_capacity];
    }
    free(s->queue);
    s->queue = wider;
    s->queue_first = 0;
    s->queue_capacity = capacity;
    return 0;
}

static void
append_command(mm_working_set *s, const mm_working_command *command)
{
    assert(s->queued < s->queue_capacity);
    s->queue[(s->queue_first + s->queued++) % s->queue_capacity] = *command;
}

bool
mm_working_set_take(mm_working_set *s, mm_working_command *command)
{
    if (s->queued == 0) {
        return false;
    }
    *command = s->queue[s->queue_first];
    s->queue_first = (s->queue_first + 1) % s->queue_capacity;
    s->queued--;
    return true;
}

/* --- groups ------------------------------------------------------------------------------- */

int
mm_working_set_add(mm_working_set *s, size_t bytes, mm_group_access access, bool at_home,
                   mm_status *st)
{
    size_t needed = (size_t)s->order.count + 1, live = (size_t)s->order.live + 1;

    s->groups = mm_grow(s->groups, &s->group_capacity, needed, sizeof *s->groups, st);
    /* With space for a load and a drop of each group, so that a set that keeps up with its
     * commands allocates nothing later. */
    if (s->group_capacity < needed || widen_queue(s, s->queued + 2 * live, st) < 0
        || mm_working_order_add(&s->order, access == MM_GROUP_WRITE, st) < 0) {
        return -1;
    }
    if (!at_home) {
        append_command(s,
                       &(mm_working_command){.kind = MM_COMMAND_HOME, .group = s->order.newest});
    }
    s->groups[s->order.newest] =
        (mm_group_state){.bytes = bytes, .signals_drop = access == MM_GROUP_SCRATCH};
    return 0;
}

static void
queue_drop(mm_working_set *s, uint32_t group)
{
    mm_group_state *g = &s->groups[group];

    assert(g->present && g->held == 0);
    if (g->signals_drop) {
        g->ticket = ++s->tickets;
    }
    append_command(s, &(mm_working_command){.kind = MM_COMMAND_DROP,
                                            .group = group,
                                            .ticket = g->signals_drop ? g->ticket : 0,
                                            .releases = g->releases,
                                            .unused = !g->released});
    g->releases = NULL;
    g->present = false;
    s->present--;
    s->reserved -= g->bytes;
    s->counts.drops++;
}

static void
queue_load(mm_working_set *s, uint32_t group, bool copy)
{
    mm_group_state *g = &s->groups[group];

    assert(!g->present && g->bytes <= s->budget - s->reserved);
    g->ticket = ++s->tickets;
    append_command(
        s, &(mm_working_command){
               .kind = MM_COMMAND_LOAD, .group = group, .ticket = g->ticket, .copy = copy});
    g->present = true;
    g->copy = copy;
    s->present++;
    s->reserved += g->bytes;
}

int
mm_working_set_remove(mm_working_set *s, uint32_t group, uint64_t *ticket, mm_status *st)
{
    mm_group_state *g = &s->groups[group];

    assert(group < s->order.count && g->held == 0);
    if (widen_queue(s, s->queued + 1, st) < 0) {
        return -1;
    }
    if (g->present) {
        g->present = false;
        s->present--;
        s->reserved -= g->bytes;
    }
    *ticket = g->ticket = ++s->tickets;
    append_command(s, &(mm_working_command){.kind = MM_COMMAND_REMOVE,
                                            .group = group,
                                            .ticket = g->ticket,
                                            .releases = g->releases});
    g->releases = NULL;
    mm_working_order_remove(&s->order, group);
    return 0;
}

void
mm_working_set_vacate(mm_working_set *s, uint32_t group)
{
    assert(!s->groups[group].present && s->groups[group].releases == NULL);
    s->groups[group] = (mm_group_state){0};
    mm_working_order_vacate(&s->order, group);
}

/* --- room --------------------------------------------------------------------------------- */

/* Stores in each group the number of uses expected before its next use. The steps reach every group of a
 * loop that goes forward and then back, and every group that is loaded ahead. */
static void
measure_distances(mm_working_set *s)
{
    mm_order_walk walk = mm_working_order_walk(&s->order);
    uint64_t steps = 2 * (uint64_t)s->order.live + MM_MOST_TRUST;
    uint32_t missing = s->order.live;
    bool ignored;

    for (uint32_t i = s->order.oldest; i != MM_NO_GROUP; i = s->order.added[i].next) {
        s->groups[i].distance = UNEXPECTED;
    }
    for (uint32_t step = 0; step < steps && missing > 0; step++) {
        uint32_t group = mm_order_walk_next(&s->order, &walk, &ignored);
        if (group == MM_NO_GROUP) {
            return;
        }
        if (s->groups[group].distance == UNEXPECTED) {
            s->groups[group].distance = step;
            missing--;
        }
    }
}

static bool
is_farther(const mm_group_state *a, const mm_group_state *b)
{
    return a->distance != b->distance ? a->distance > b->distance : a->used < b->used;
}

/* A group may be dropped if it is not held and its next use is not nearer than `least`. */
static bool
may_drop(const mm_group_state *g, uint32_t least)
{
    return g->present && g->held == 0 && g->distance >= least;
}

/* The group to be dropped first; or MM_NO_GROUP. */
static uint32_t
farthest_victim(const mm_working_set *s, uint32_t least)
{
    uint32_t found = MM_NO_GROUP;

    for (uint32_t i = s->order.oldest; i != MM_NO_GROUP; i = s->order.added[i].next) {
        const mm_group_state *g = &s->groups[i];
        if (may_drop(g, least) && (found == MM_NO_GROUP || is_farther(g, &s->groups[found]))) {
            found = i;
        }
    }
    return found;
}

/* The bytes that are free, or can be. */
static size_t
possible_room(const mm_working_set *s, uint32_t least)
{
    size_t room = s->budget - s->reserved;

    for (uint32_t i = s->order.oldest; i != MM_NO_GROUP; i = s->order.added[i].next) {
        const mm_group_state *g = &s->groups[i];
        room += may_drop(g, least) ? g->bytes : 0;
    }
    return room;
}

/* True if the group is written before others, which are used after `walk`, take its room. It is then not
 * loaded as a copy, because it would have to be loaded again for that. */
static bool
stays_until_write(mm_working_set *s, uint32_t group, mm_order_walk walk)
{
    uint64_t steps = 2 * (uint64_t)s->order.live + MM_MOST_TRUST, count = ++s->byte_counts;
    size_t bytes = 0;

    for (uint32_t i = s->order.oldest; i != MM_NO_GROUP; i = s->order.added[i].next) {
        if (i == group || (s->groups[i].present && s->groups[i].held > 0)) {
            s->groups[i].counted = count;
            bytes += s->groups[i].bytes;
        }
    }
    for (uint64_t step = 0; step < steps && bytes <= s->budget; step++) {
        bool reads;
        uint32_t next = mm_order_walk_next(&s->order, &walk, &reads);
        if (next == MM_NO_GROUP) {
            return false;
        }
        if (next == group && !reads) {
            return true;
        }
        if (s->groups[next].counted != count) {
            s->groups[next].counted = count;
            bytes += s->groups[next].bytes;
        }
    }
    return false;
}

/* Queues the drops that a load needs, and the load. False if nothing is queued: the groups that may
 * be dropped leave no room, or there is no memory for the commands. */
static bool
make_room_and_load(mm_working_set *s, uint32_t group, bool copy, uint32_t least)
{
    size_t bytes = s->groups[group].bytes;
    mm_status ignored;

    assert(!s->groups[group].present);
    if (bytes > possible_room(s, least)
        || widen_queue(s, s->queued + s->present + 1, &ignored) < 0) {
        return false;
    }
    while (s->budget - s->reserved < bytes) {
        queue_drop(s, farthest_victim(s, least));
    }
    queue_load(s, group, copy);
    return true;
}

/* Queues the drop of a copy before a use that writes the group: what a device writes to a copy, it
 * writes page by page. Without memory for the command the copy stays. */
static void
drop_copy_before_write(mm_working_set *s, uint32_t group, bool reads)
{
    const mm_group_state *g = &s->groups[group];
    mm_status ignored;

    if (g->present && g->copy && !reads && g->held == 0
        && widen_queue(s, s->queued + 1, &ignored) == 0) {
        queue_drop(s, group);
    }
}

/* True if the group behind `step` expected ones, which have these bytes, is worth a load. The first
 * `at_any_size` are, whatever they have. */
static bool
is_worth_a_load(const mm_working_set *s, uint32_t step, uint32_t at_any_size, size_t bytes)
{
    uint32_t trust = (uint32_t)mm_working_order_trust(&s->order);
    size_t part = s->budget / BUDGET_PART_AHEAD;
    size_t most = part < MOST_BYTES_AHEAD ? part : MOST_BYTES_AHEAD;

    if (step >= trust && trust < MM_MOST_TRUST) {
        return false;
    }
    return step < at_any_size || (step < s->order.live && bytes < most);
}

/* True if the expected use of a group takes a load, or the drop of a copy. */
static bool
has_to_move(const mm_group_state *g, bool reads)
{
    return g->held == 0 && (!g->present || (g->copy && !reads));
}

/* Queues loads of the groups that are expected next, as long as only groups with a later use are
 * dropped for them. */
static void
look_ahead(mm_working_set *s, uint32_t at_any_size)
{
    mm_order_walk walk = mm_working_order_walk(&s->order);
    bool measured = false; /* which takes long for many groups */
    size_t bytes = 0;

    if (s->present == s->order.live) {
        return;
    }
    for (uint32_t step = 0; is_worth_a_load(s, step, at_any_size, bytes); step++) {
        bool reads;
        uint32_t group = mm_order_walk_next(&s->order, &walk, &reads);
        if (group == MM_NO_GROUP || walk.is_doubtful) {
            return;
        }
        bytes += s->groups[group].bytes;
        if (!has_to_move(&s->groups[group], reads)) {
            continue;
        }
        if (!measured) {
            measure_distances(s);
            measured = true;
        }
        if (s->groups[group].distance == step) {
            drop_copy_before_write(s, group, reads);
        }
        if (!s->groups[group].present) {
            bool copy = reads && !stays_until_write(s, group, walk);
            if (!make_room_and_load(s, group, copy, s->groups[group].distance + 1)) {
                return;
            }
            s->counts.ahead++;
        }
    }
}

/* --- uses --------------------------------------------------------------------------------- */

static mm_working_use
place_acquired(mm_working_set *s, uint32_t group, bool reads)
{
    if (s->groups[group].present) {
        s->counts.hits++;
        return MM_USE_PRESENT;
    }
    if (s->groups[group].held == 1) {
        bool copy = reads && !stays_until_write(s, group, mm_working_order_walk(&s->order));
        measure_distances(s);
        if (make_room_and_load(s, group, copy, 0)) {
            s->counts.loads_on_demand++;
            return MM_USE_LOADED;
        }
    }
    s->counts.mapped++;
    return MM_USE_MAPPED;
}

mm_working_use
mm_working_set_acquire(mm_working_set *s, uint32_t group, bool reads, uint64_t *ticket)
{
    mm_group_state *g = &s->groups[group];
    mm_working_use use;

    assert(group < s->order.count);
    drop_copy_before_write(s, group, reads);
    if (g->held++ == 0) {
        mm_working_order_note(&s->order, group, reads); /* not the uses inside of another one */
    }
    g->used = ++s->turns;
    s->counts.acquired++;
    use = place_acquired(s, group, reads);
    *ticket = g->present || g->signals_drop ? g->ticket : 0;
    look_ahead(s, AHEAD_AT_ANY_SIZE);
    return use;
}

void
mm_working_set_give_back(mm_working_set *s, uint32_t group)
{
    assert(s->groups[group].held > 0);
    s->groups[group].held--;
}

void
mm_working_set_release(mm_working_set *s, uint32_t group, mm_release_list *releases)
{
    mm_group_state *g = &s->groups[group];

    assert(g->held > 0);
    g->releases = releases;
    g->released = true;
    g->held--;
    look_ahead(s, AHEAD_AT_ANY_SIZE + 1); /* in place of the one that was in use */
}

void
mm_working_set_lost(mm_working_set *s, uint32_t group, uint64_t ticket)
{
    mm_group_state *g = &s->groups[group];

    if (g->present && g->ticket == ticket) {
        g->present = false;
        s->present--;
        s->reserved -= g->bytes;
    }
}
