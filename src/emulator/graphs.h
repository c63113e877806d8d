/* The graphs of the emulated driver: their nodes, executable copies, and the user objects that
 * graphs keep alive. */
#ifndef MANAGEDMEM_EMULATOR_GRAPHS_H
#define MANAGEDMEM_EMULATOR_GRAPHS_H

#include "emulator.h"

/* An operation of a graph, and the nodes that it waits for. */
struct emu_node {
    struct emu_op op;
    size_t index; /* in the order of adding */
    struct emu_nodes waits;
};

/* A graph, or an executable graph, which is a copy. */
struct emu_graph {
    struct emu_graph *next;
    bool executable;
    struct emu_nodes nodes;
    struct emu_object **objects; /* user objects, one entry for each reference */
    size_t object_count;
    uint64_t launches;
    struct emu_point end; /* of its latest launch */
};

CUresult emu_graph_new(struct emu_graph **out);
/* NULL for other handles. */
struct emu_graph *emu_graph_find(const void *handle, bool executable);
/* An executable copy, which holds the objects of the graph. */
CUresult emu_graph_copy(const struct emu_graph *graph, struct emu_graph **out);
void emu_graph_delete(struct emu_graph *graph);
/* Adds a node that depends on the nodes `waits`, which the graph must have. */
CUresult emu_graph_add(struct emu_graph *graph, const struct emu_op *op,
                       const struct emu_nodes *waits, struct emu_node **out);
bool emu_graph_has(const struct emu_graph *graph, const struct emu_nodes *nodes);
/* The next node of a launch after the nodes done[], or NULL at the end. Of the nodes that are
 * ready, launches take in turn the oldest and the newest, so that a missing dependency is
 * noticed. */
const struct emu_node *emu_graph_next(const struct emu_graph *graph, const bool *done);

CUresult emu_object_new(void *pointer, CUhostFn destroy, unsigned int count,
                        struct emu_object **out);
struct emu_object *emu_object_find(CUuserObject handle);
/* Takes the user objects without a reference. emu_objects_destroy, called without the mutex, runs
 * their destructors in a thread of the driver. */
struct emu_object *emu_objects_take_dead(void);
void emu_objects_destroy(struct emu_object *dead);
/* Drops references. Once none is left, the destructor runs at the end of the present call. */
CUresult emu_object_release(struct emu_object *object, unsigned int count);
/* Gives a graph references to an object: new ones or, if `moved`, those of the caller. */
CUresult emu_graph_retain(struct emu_graph *graph, struct emu_object *object, unsigned int count,
                          bool moved);

#endif
