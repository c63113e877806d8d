/* working_set.h: the decisions of a working set: which groups a device holds within a budget of
 * bytes, and the commands that bring them there and away.
 *
 * Nothing here calls the driver, waits or locks: the caller holds the set's lock. A command counts
 * as done once it is queued, because commands are carried out in their order. Groups that are held
 * are never dropped, so that whatever a command waits for was queued before it: nothing can wait
 * for itself. */
#ifndef MM_WORKING_SET_H
#define MM_WORKING_SET_H

#include "working_order.h"

/* A group, also when it was removed. */
typedef struct {
    uint64_t number; /* from 0 on in the order of adding, and never given again */
    uint32_t place; /* its number in the order and the decisions, given to a later group */
} mm_group_id;

/* What is done with the memory of a group while it is in the set. */
typedef enum {
    MM_GROUP_READ, /* only read: the device gets a copy, which is dropped by advice */
    MM_GROUP_WRITE, /* copied home, but dropped like MM_GROUP_READ after uses that only read it */
    MM_GROUP_SCRATCH /* its contents are not needed after a use: they are discarded */
} mm_group_access;

/* What is done when a group is acquired. */
typedef enum {
    MM_USE_PRESENT, /* it is on the device, or a command to load it was queued before */
    MM_USE_LOADED, /* it was not: a load is queued now */
    MM_USE_MAPPED /* it stays at home: the groups that are held leave no room */
} mm_working_use;

typedef enum {
    MM_COMMAND_HOME,
    MM_COMMAND_DROP,
    MM_COMMAND_LOAD,
    MM_COMMAND_REMOVE /* the last one of its group, whose memory stays where it is */
} mm_working_command_kind;

/* What a drop has to wait for; the set keeps it for its caller and does not look inside. */
typedef struct mm_release_list mm_release_list;

typedef struct {
    mm_working_command_kind kind;
    uint32_t group;
    uint64_t ticket; /* signalled once it is done; 0: none */
    mm_release_list *releases; /* of a drop; or NULL */
    bool unused; /* of a drop: the group was never released, so that its contents are as added */
    bool copy; /* of a load: its uses only read the group, which others write */
} mm_working_command;

typedef struct {
    size_t bytes; /* on the device, in whole pages */
    bool present; /* on the device once all queued commands are done */
    bool copy; /* and was loaded for uses that only read it */
    bool signals_drop; /* uses must wait for its drop: that may destroy contents */
    bool released; /* once or more */
    unsigned held; /* acquisitions that are not released */
    uint64_t used; /* its last acquisition, to compare groups that are not expected */
    uint64_t ticket; /* of its latest command with one; 0: none */
    uint32_t distance; /* the number of uses expected before its next one, when last measured */
    uint64_t counted; /* the number of the latest count of bytes that includes it */
    mm_release_list *releases; /* since it was loaded */
} mm_group_state;

typedef struct {
    uint64_t acquired, hits, loads_on_demand, mapped;
    uint64_t ahead; /* loads before the acquisition */
    uint64_t drops;
} mm_working_counts;

typedef struct {
    size_t budget, reserved; /* bytes; reserved: of the groups that are present */
    mm_group_state *groups;
    size_t group_capacity;
    uint32_t present;
    mm_working_order order;
    uint64_t turns, tickets, byte_counts; /* given so far */
    mm_working_command *queue; /* a ring of queue_capacity places */
    size_t queue_first, queued, queue_capacity;
    mm_working_counts counts;
} mm_working_set;

void mm_working_set_init(mm_working_set *s, size_t budget);
void mm_working_set_free(mm_working_set *s);

/* Adds a group, which is order.newest then, and queues a command that brings it home unless it is
 * there. */
MM_NODISCARD int mm_working_set_add(mm_working_set *s, size_t bytes, mm_group_access access,
                                    bool at_home, mm_status *st);

/* Takes a group out, which is not held, and queues the command for it. On failure nothing changes. */
MM_NODISCARD int mm_working_set_remove(mm_working_set *s, uint32_t group, uint64_t *ticket,
                                       mm_status *st);

/* Gives the number of a removed group, whose last command is done, to a later group. */
void mm_working_set_vacate(mm_working_set *s, uint32_t group);

/* Acquires a group and queues what that needs, and then loads of the groups that are expected next.
 * `reads` is for uses of a written group that only read it; a copy that was loaded for those is dropped
 * before one that writes, unless it is held. A use must wait for *ticket, unless it is 0. Cannot fail:
 * without memory for commands the group is used where it is. */
mm_working_use mm_working_set_acquire(mm_working_set *s, uint32_t group, bool reads,
                                      uint64_t *ticket);

/* Undoes an acquisition, whose use did not come about. */
void mm_working_set_give_back(mm_working_set *s, uint32_t group);

/* Releases a group; `releases` replaces its list. */
void mm_working_set_release(mm_working_set *s, uint32_t group, mm_release_list *releases);

/* Takes the first command; false if there is none. */
bool mm_working_set_take(mm_working_set *s, mm_working_command *command);

/* The load with this ticket failed, and the group is at home. */
void mm_working_set_lost(mm_working_set *s, uint32_t group, uint64_t ticket);

#endif
