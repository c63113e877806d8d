/* working_model.h: a model of a device that a working set is checked against: streams that run when they
 * can, a loader that carries out the commands, and callers. */
#ifndef WORKING_MODEL_H
#define WORKING_MODEL_H

#include <string.h>

#include "check.h"
#include "memory/working_set.h"

enum { MOST_GROUPS = 400, STREAMS = 4, MOST_HELD = 6, MOST_OPS = 1 << 17 };

/* The ends of uses, by their numbers, from `first` on in a chain. */
struct mm_release_list {
    uint32_t event;
    struct mm_release_list *next;
};

typedef enum { WAIT_TICKET, USE_GROUP, END_USE } op_kind;

typedef struct {
    op_kind kind;
    uint64_t number; /* a ticket, a group, an event */
    bool writes; /* of a use: not to a copy */
} stream_op;

typedef struct {
    stream_op ops[MOST_OPS];
    size_t queued, done;
} model_stream;

static struct {
    mm_working_set set;
    model_stream streams[STREAMS];
    bool on_device[MOST_GROUPS], copied[MOST_GROUPS];
    uint64_t copies, moves; /* loads of these kinds */
    size_t physical;
    uint64_t signalled; /* the last ticket */
    bool ended[MOST_OPS]; /* events */
    uint32_t events;
    mm_working_command command; /* at the head of the loader */
    bool has_command;
    uint32_t held[MOST_HELD];
    uint32_t held_stream[MOST_HELD];
    size_t held_count;
} model;

static uint64_t seed;
static bool random_reads; /* of groups that are written */

static inline uint32_t
random_below(uint32_t limit)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(seed >> 33) % limit;
}

static inline mm_group_access
random_access(void)
{
    return random_below(4) == 0   ? MM_GROUP_SCRATCH
           : random_below(3) == 0 ? MM_GROUP_READ
                                  : MM_GROUP_WRITE;
}

static inline void
begin_model(size_t budget, uint32_t groups, bool equal)
{
    mm_status st;

    memset(&model, 0, sizeof model);
    mm_working_set_init(&model.set, budget);
    for (uint32_t i = 0; i < groups; i++) {
        size_t bytes = equal ? 100 : 1 + random_below(200);
        bool at_home = random_below(2) == 0;
        CHECK_OK(mm_working_set_add(&model.set, bytes, random_access(), at_home, &st), &st);
    }
}

static inline void
free_releases(mm_release_list *list)
{
    while (list != NULL) {
        mm_release_list *next = list->next;
        free(list);
        list = next;
    }
}

static inline void
end_model(void)
{
    mm_working_command command;

    while (mm_working_set_take(&model.set, &command)) {
        free_releases(command.releases);
    }
    for (uint32_t i = 0; i < model.set.order.count; i++) {
        free_releases(model.set.groups[i].releases);
    }
    mm_working_set_free(&model.set);
}

static inline void
check_accounts(void)
{
    size_t reserved = 0;
    uint32_t present = 0;

    for (uint32_t i = 0; i < model.set.order.count; i++) {
        reserved += model.set.groups[i].present ? model.set.groups[i].bytes : 0;
        present += model.set.groups[i].present;
    }
    CHECK_EQUAL(model.set.reserved, reserved);
    CHECK_EQUAL(model.set.present, present);
    CHECK(reserved <= model.set.budget);
    CHECK(model.physical <= model.set.budget);
}

static inline void
queue_op(uint32_t stream, op_kind kind, uint64_t number)
{
    model_stream *s = &model.streams[stream];

    CHECK(s->queued < MOST_OPS);
    s->ops[s->queued++] = (stream_op){.kind = kind, .number = number};
}

static inline void
queue_use(uint32_t stream, uint32_t group, bool writes)
{
    queue_op(stream, USE_GROUP, group);
    model.streams[stream].ops[model.streams[stream].queued - 1].writes = writes;
}

/* --- the device --------------------------------------------------------------------------- */

/* Runs the next operation of a stream; false if it has to wait. */
static inline bool
run_stream(model_stream *s)
{
    const stream_op *op = &s->ops[s->done];

    if (s->done == s->queued || (op->kind == WAIT_TICKET && op->number > model.signalled)) {
        return false;
    }
    if (op->kind == USE_GROUP) {
        CHECK(model.on_device[op->number]);
        CHECK(!op->writes || !model.copied[op->number]);
    } else if (op->kind == END_USE) {
        model.ended[op->number] = true;
    }
    s->done++;
    return true;
}

static inline bool
have_ended(const mm_release_list *list)
{
    for (; list != NULL; list = list->next) {
        if (!model.ended[list->event]) {
            return false;
        }
    }
    return true;
}

static inline void
place(uint32_t group, bool on_device)
{
    size_t bytes = model.set.groups[group].bytes;

    if (model.on_device[group] != on_device) {
        model.physical = on_device ? model.physical + bytes : model.physical - bytes;
        model.on_device[group] = on_device;
    }
    CHECK(model.physical <= model.set.budget);
}

/* Carries out one command; false if there is none, or it has to wait. */
static inline bool
run_command(void)
{
    mm_working_command *c = &model.command;

    if (!model.has_command) {
        model.has_command = mm_working_set_take(&model.set, c);
        return model.has_command;
    }
    if (!have_ended(c->releases)) {
        return false;
    }
    free_releases(c->releases);
    CHECK(c->kind != MM_COMMAND_DROP || model.on_device[c->group]);
    place(c->group, c->kind == MM_COMMAND_LOAD);
    model.copied[c->group] = c->kind == MM_COMMAND_LOAD && c->copy;
    model.copies += c->kind == MM_COMMAND_LOAD && c->copy;
    model.moves += c->kind == MM_COMMAND_LOAD && !c->copy;
    if (c->ticket != 0) {
        CHECK_EQUAL(c->ticket, model.signalled + 1);
        model.signalled = c->ticket;
    }
    if (c->kind == MM_COMMAND_REMOVE) {
        mm_working_set_vacate(&model.set, c->group);
    }
    model.has_command = false;
    return true;
}

static inline void
run_some(uint32_t steps)
{
    for (uint32_t i = 0; i < steps; i++) {
        uint32_t one = random_below(STREAMS + 1);
        (void)(one == STREAMS ? run_command() : run_stream(&model.streams[one]));
    }
}

/* Everything ends: nothing waits for itself. */
static inline void
run_all(void)
{
    bool progress = true;

    while (progress) {
        progress = run_command();
        for (int i = 0; i < STREAMS; i++) {
            progress = run_stream(&model.streams[i]) || progress;
        }
    }
    CHECK(!model.has_command);
    CHECK_EQUAL(model.set.queued, 0);
    for (int i = 0; i < STREAMS; i++) {
        CHECK_EQUAL(model.streams[i].done, model.streams[i].queued);
    }
}

/* --- the callers -------------------------------------------------------------------------- */

static inline mm_working_use
acquire_to(uint32_t group, bool reads, uint32_t stream)
{
    uint64_t ticket;
    mm_working_use use = mm_working_set_acquire(&model.set, group, reads, &ticket);

    CHECK_EQUAL(use == MM_USE_MAPPED, !model.set.groups[group].present);
    if (ticket != 0) {
        queue_op(stream, WAIT_TICKET, ticket);
    }
    if (use != MM_USE_MAPPED) {
        queue_use(stream, group, !reads && model.set.groups[group].held == 1);
    }
    model.held[model.held_count] = group;
    model.held_stream[model.held_count++] = stream;
    check_accounts();
    return use;
}

static inline bool
is_written(uint32_t group)
{
    return model.set.order.followers[(size_t)2 * group + 1] != MM_REMOVED_GROUP;
}

static inline mm_working_use
acquire(uint32_t group, uint32_t stream)
{
    return acquire_to(group, random_reads && is_written(group) && random_below(2) == 0, stream);
}

static inline void
release(size_t i)
{
    uint32_t group = model.held[i], event = model.events++;
    mm_release_list *end = malloc(sizeof *end);

    CHECK(end != NULL && event < MOST_OPS);
    if (model.set.groups[group].present) {
        queue_use(model.held_stream[i], group, false);
    }
    queue_op(model.held_stream[i], END_USE, event);
    *end = (mm_release_list){event, model.set.groups[group].releases};
    mm_working_set_release(&model.set, group, end);
    model.held_count--;
    model.held[i] = model.held[model.held_count];
    model.held_stream[i] = model.held_stream[model.held_count];
    check_accounts();
}

static inline void
use_to(uint32_t group, bool reads)
{
    (void)acquire_to(group, reads, 0);
    run_some(random_below(8));
    release(0);
}

static inline void
use(uint32_t group)
{
    use_to(group, false);
}

static inline bool
is_live(uint32_t group)
{
    return model.set.order.followers[(size_t)2 * group] != MM_REMOVED_GROUP;
}

/* What is queued for the group comes first, and nothing after it. */
static inline void
remove_group(uint32_t group)
{
    mm_status st;
    uint64_t ticket;

    CHECK_OK(mm_working_set_remove(&model.set, group, &ticket, &st), &st);
    CHECK_EQUAL(ticket, model.set.tickets);
    CHECK(!is_live(group));
    check_accounts();
}

/* Every prediction is a group that is there. */
static inline void
check_predictions(void)
{
    mm_order_walk walk = mm_working_order_walk(&model.set.order);
    bool reads;

    for (uint32_t i = 0; i < 3 * model.set.order.count; i++) {
        uint32_t group = mm_order_walk_next(&model.set.order, &walk, &reads);
        if (model.set.order.live == 0) {
            CHECK_EQUAL(group, MM_NO_GROUP);
            return;
        }
        CHECK(group < model.set.order.count && is_live(group));
        CHECK(!reads || is_written(group));
    }
}

#endif
