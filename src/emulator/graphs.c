/* Graphs: nodes, executable copies, and user objects. */
#include "graphs.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct emu_object {
    struct emu_object *next;
    void *pointer;
    CUhostFn destroy;
    size_t count;
};

static struct emu_graph *graphs;
static struct emu_object *objects, *dead_objects;

/* ---- sets of nodes ---- */

CUresult
emu_nodes_add(struct emu_nodes *set, struct emu_node *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool known = false;
        struct emu_node **grown;
        for (size_t k = 0; k < set->count; k++) {
            known = known || set->list[k] == list[i];
        }
        if (known) {
            continue;
        }
        grown = realloc(set->list, (set->count + 1) * sizeof *grown);
        if (grown == NULL) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        set->list = grown;
        set->list[set->count++] = list[i];
    }
    return CUDA_SUCCESS;
}

CUresult
emu_nodes_set(struct emu_nodes *set, struct emu_node *const *list, size_t count)
{
    struct emu_nodes made = {0};
    CUresult result = emu_nodes_add(&made, list, count);

    emu_nodes_clear(result == CUDA_SUCCESS ? set : &made);
    if (result == CUDA_SUCCESS) {
        *set = made;
    }
    return result;
}

void
emu_nodes_clear(struct emu_nodes *set)
{
    free(set->list);
    *set = (struct emu_nodes){0};
}

/* ---- user objects ---- */

CUresult
emu_object_new(void *pointer, CUhostFn destroy, unsigned int count, struct emu_object **out)
{
    struct emu_object *made = calloc(1, sizeof *made);

    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (struct emu_object){.pointer = pointer, .destroy = destroy, .count = count};
    EMU_LINK(objects, made);
    *out = made;
    return CUDA_SUCCESS;
}

struct emu_object *
emu_object_find(CUuserObject handle)
{
    struct emu_object *object;

    EMU_SEEK(object, objects, (void *)object == (void *)handle);
    return object;
}

CUresult
emu_object_release(struct emu_object *object, unsigned int count)
{
    if (count == 0 || count > object->count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    object->count -= count;
    if (object->count == 0) {
        EMU_UNLINK(objects, object);
        EMU_LINK(dead_objects, object);
    }
    return CUDA_SUCCESS;
}

struct emu_object *
emu_objects_take_dead(void)
{
    struct emu_object *taken = dead_objects;

    dead_objects = NULL;
    return taken;
}

static void *
run_destructors(void *argument)
{
    struct emu_object *object = argument, *next;

    emu_thread()->in_stream_function = true;
    for (; object != NULL; object = next) {
        next = object->next;
        object->destroy(object->pointer);
        free(object);
    }
    return NULL;
}

void
emu_objects_destroy(struct emu_object *dead)
{
    pthread_t thread;

    if (dead != NULL && pthread_create(&thread, NULL, run_destructors, dead) == 0) {
        (void)pthread_join(thread, NULL);
    }
}

/* ---- graphs ---- */

CUresult
emu_graph_new(struct emu_graph **out)
{
    struct emu_graph *made = calloc(1, sizeof *made);

    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    EMU_LINK(graphs, made);
    *out = made;
    return CUDA_SUCCESS;
}

struct emu_graph *
emu_graph_find(const void *handle, bool executable)
{
    struct emu_graph *graph;

    EMU_SEEK(graph, graphs, (const void *)graph == handle && graph->executable == executable);
    return graph;
}

void
emu_graph_delete(struct emu_graph *graph)
{
    EMU_UNLINK(graphs, graph);
    for (size_t i = 0; i < graph->nodes.count; i++) {
        emu_nodes_clear(&graph->nodes.list[i]->waits);
        free(graph->nodes.list[i]);
    }
    emu_nodes_clear(&graph->nodes);
    for (size_t i = 0; i < graph->object_count; i++) {
        (void)emu_object_release(graph->objects[i], 1);
    }
    free(graph->objects);
    free(graph);
}

bool
emu_graph_has(const struct emu_graph *graph, const struct emu_nodes *nodes)
{
    for (size_t i = 0; i < nodes->count; i++) {
        bool found = false;
        for (size_t k = 0; k < graph->nodes.count && !found; k++) {
            found = graph->nodes.list[k] == nodes->list[i];
        }
        if (!found) {
            return false;
        }
    }
    return true;
}

CUresult
emu_graph_add(struct emu_graph *graph, const struct emu_op *op, const struct emu_nodes *waits,
              struct emu_node **out)
{
    struct emu_node *made = calloc(1, sizeof *made);

    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->op = *op;
    made->index = graph->nodes.count;
    if (emu_nodes_set(&made->waits, waits->list, waits->count) != CUDA_SUCCESS
        || emu_nodes_add(&graph->nodes, &made, 1) != CUDA_SUCCESS) {
        emu_nodes_clear(&made->waits);
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = made;
    return CUDA_SUCCESS;
}

static CUresult
copy_node(struct emu_graph *graph, const struct emu_node *node)
{
    struct emu_nodes waits = {0};
    struct emu_node *made;
    CUresult result = emu_nodes_set(&waits, node->waits.list, node->waits.count);

    assert(waits.count == 0 || graph->nodes.list != NULL); /* copies of all earlier nodes */
    for (size_t i = 0; i < waits.count; i++) {
        waits.list[i] = graph->nodes.list[waits.list[i]->index];
    }
    if (result == CUDA_SUCCESS) {
        result = emu_graph_add(graph, &node->op, &waits, &made);
    }
    emu_nodes_clear(&waits);
    return result;
}

CUresult
emu_graph_copy(const struct emu_graph *graph, struct emu_graph **out)
{
    struct emu_graph *made = NULL;
    CUresult result = emu_graph_new(&made);

    for (size_t i = 0; i < graph->nodes.count && result == CUDA_SUCCESS; i++) {
        result = copy_node(made, graph->nodes.list[i]);
    }
    for (size_t i = 0; i < graph->object_count && result == CUDA_SUCCESS; i++) {
        result = emu_graph_retain(made, graph->objects[i], 1, false);
    }
    if (result != CUDA_SUCCESS) {
        if (made != NULL) {
            emu_graph_delete(made);
        }
        return result;
    }
    made->executable = true;
    *out = made;
    return CUDA_SUCCESS;
}

static bool
is_ready(const struct emu_node *node, const bool *done)
{
    for (size_t i = 0; i < node->waits.count; i++) {
        if (!done[node->waits.list[i]->index]) {
            return false;
        }
    }
    return !done[node->index];
}

const struct emu_node *
emu_graph_next(const struct emu_graph *graph, const bool *done)
{
    const struct emu_node *found = NULL;
    const bool newest = graph->launches % 2 == 1;

    for (size_t i = 0; i < graph->nodes.count; i++) {
        const struct emu_node *node = graph->nodes.list[i];
        if ((found == NULL || newest) && is_ready(node, done)) {
            found = node;
        }
    }
    return found;
}

CUresult
emu_graph_retain(struct emu_graph *graph, struct emu_object *object, unsigned int count,
                 bool moved)
{
    struct emu_object **grown =
        realloc(graph->objects, (graph->object_count + count) * sizeof *grown);

    if (grown == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    graph->objects = grown;
    for (unsigned int i = 0; i < count; i++) {
        graph->objects[graph->object_count++] = object;
    }
    object->count += moved ? 0 : count;
    return CUDA_SUCCESS;
}
