/* Entry points: graphs and the nodes that are added to them, launches, user objects. */
#include "entries.h"
#include "graphs.h"

#include <stdlib.h>

/* ---- nodes ---- */

static CUresult
read_side(CUmemorytype type, const void *host, CUdeviceptr device, CUdeviceptr *out)
{
    *out = type == CU_MEMORYTYPE_HOST ? (CUdeviceptr)(uintptr_t)host : device;
    return type == CU_MEMORYTYPE_ARRAY || *out == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* False for a range that begins in an allocation and ends outside of it. */
static bool
is_whole(CUdeviceptr ptr, size_t size)
{
    return emu_find(ptr) == NULL || emu_find_range(ptr, size) != NULL;
}

/* Accepts copies of one row only. */
static CUresult
add_copy(CUgraphNode *out, CUgraph handle, const struct emu_nodes *waits, const CUDA_MEMCPY3D *p)
{
    struct emu_graph *graph = emu_graph_find(handle, false);
    struct emu_op op = {.kind = EMU_OP_COPY};
    struct emu_node *node = NULL;

    if (out == NULL || graph == NULL || p == NULL || p->Height != 1 || p->Depth != 1
        || p->WidthInBytes == 0 || !emu_graph_has(graph, waits)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    op.size = p->WidthInBytes;
    EMU_TRY(read_side(p->srcMemoryType, p->srcHost, p->srcDevice, &op.source));
    EMU_TRY(read_side(p->dstMemoryType, p->dstHost, p->dstDevice, &op.ptr));
    if (!is_whole(op.ptr, op.size) || !is_whole(op.source, op.size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    EMU_TRY(emu_graph_add(graph, &op, waits, &node));
    *out = (CUgraphNode)node;
    return CUDA_SUCCESS;
}

EMU_ENTRY(cuGraphAddMemcpyNode, CUgraphNode *phGraphNode, CUgraph hGraph,
          const CUgraphNode *dependencies, size_t numDependencies, const CUDA_MEMCPY3D *copyParams,
          CUcontext ctx)
{
    /* The list is only read. */
    const struct emu_nodes waits = {(struct emu_node **)(uintptr_t)dependencies, numDependencies};

    EMU_BEGIN("cuGraphAddMemcpyNode", EMU_CALL_WORK, "graph=0x%llx, dependencies=%zu, count=%zu",
              emu_handle_number(hGraph), numDependencies,
              copyParams != NULL ? copyParams->WidthInBytes : 0);
    EMU_NEED(ctx != NULL, CUDA_ERROR_INVALID_CONTEXT);
    return emu_call_end(&call, add_copy(phGraphNode, hGraph, &waits, copyParams));
}

EMU_ENTRY(cuStreamUpdateCaptureDependencies, CUstream hStream, CUgraphNode *dependencies,
          size_t numDependencies, unsigned int flags)
{
    const struct emu_nodes nodes = {(struct emu_node **)dependencies, numDependencies};
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuStreamUpdateCaptureDependencies", EMU_CALL_WORK, "stream=0x%llx, flags=%u",
              emu_handle_number(hStream), flags);
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_NEED(flags <= CU_STREAM_SET_CAPTURE_DEPENDENCIES, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(
        &call, emu_capture_follow(stream, &nodes, flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES));
}

/* ---- graphs ---- */

EMU_ENTRY(cuGraphDestroy, CUgraph hGraph)
{
    struct emu_graph *graph;

    EMU_BEGIN("cuGraphDestroy", EMU_CALL_WORK, "graph=0x%llx", emu_handle_number(hGraph));
    graph = emu_graph_find(hGraph, false);
    EMU_NEED(graph != NULL, CUDA_ERROR_INVALID_VALUE);
    emu_graph_delete(graph);
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuGraphInstantiateWithFlags, CUgraphExec *phGraphExec, CUgraph hGraph,
          unsigned long long flags)
{
    struct emu_graph *graph, *made = NULL;

    EMU_BEGIN("cuGraphInstantiate", EMU_CALL_WORK, "graph=0x%llx, flags=%llu",
              emu_handle_number(hGraph), flags);
    graph = emu_graph_find(hGraph, false);
    EMU_NEED(phGraphExec != NULL && graph != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_graph_copy(graph, &made));
    *phGraphExec = (CUgraphExec)made;
    return emu_call_end(&call, CUDA_SUCCESS);
}

static CUresult
launch_graph(struct emu_graph *graph, struct emu_stream *stream)
{
    bool *done = calloc(graph->nodes.count + 1, sizeof *done);
    const struct emu_node *node;
    CUresult result = CUDA_SUCCESS;

    if (done == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    while (result == CUDA_SUCCESS && (node = emu_graph_next(graph, done)) != NULL) {
        done[node->index] = true;
        result = emu_stream_submit(stream, &node->op);
    }
    graph->launches++;
    graph->end = (struct emu_point){.stream = stream->id, .serial = stream->queued};
    free(done);
    return result;
}

EMU_ENTRY(cuGraphLaunch, CUgraphExec hGraphExec, CUstream hStream)
{
    struct emu_graph *graph;
    struct emu_stream *stream = NULL;

    EMU_BEGIN("cuGraphLaunch", EMU_CALL_WORK, "graph=0x%llx, stream=0x%llx",
              emu_handle_number(hGraphExec), emu_handle_number(hStream));
    graph = emu_graph_find(hGraphExec, true);
    EMU_STEP(emu_stream_find(hStream, &stream));
    EMU_NEED(graph != NULL, CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_capture_refuse(stream)); /* graphs have no child graphs here */
    return emu_call_end(&call, launch_graph(graph, stream));
}

/* Waits for launched work first, because user objects must live until it is done. */
EMU_ENTRY(cuGraphExecDestroy, CUgraphExec hGraphExec)
{
    struct emu_graph *graph;

    EMU_BEGIN("cuGraphExecDestroy", EMU_CALL_WORK, "graph=0x%llx", emu_handle_number(hGraphExec));
    graph = emu_graph_find(hGraphExec, true);
    EMU_NEED(graph != NULL, CUDA_ERROR_INVALID_VALUE);
    if (!emu_point_reached(graph->end)) {
        emu_stream_drain(emu_stream_by_id(graph->end.stream));
    }
    emu_graph_delete(graph);
    return emu_call_end(&call, CUDA_SUCCESS);
}

/* ---- user objects ---- */

EMU_ENTRY(cuUserObjectCreate, CUuserObject *object_out, void *ptr, CUhostFn destroy,
          unsigned int initialRefcount, unsigned int flags)
{
    struct emu_object *object = NULL;

    EMU_BEGIN("cuUserObjectCreate", EMU_CALL_WORK, "count=%u, flags=%u", initialRefcount, flags);
    EMU_NEED(object_out != NULL && destroy != NULL && initialRefcount != 0
                 && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
             CUDA_ERROR_INVALID_VALUE);
    EMU_STEP(emu_object_new(ptr, destroy, initialRefcount, &object));
    *object_out = (CUuserObject)object;
    return emu_call_end(&call, CUDA_SUCCESS);
}

EMU_ENTRY(cuUserObjectRelease, CUuserObject object, unsigned int count)
{
    struct emu_object *found;

    EMU_BEGIN("cuUserObjectRelease", EMU_CALL_WORK, "count=%u", count);
    found = emu_object_find(object);
    EMU_NEED(found != NULL, CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(&call, emu_object_release(found, count));
}

EMU_ENTRY(cuGraphRetainUserObject, CUgraph graph, CUuserObject object, unsigned int count,
          unsigned int flags)
{
    struct emu_graph *holder;
    struct emu_object *found;

    EMU_BEGIN("cuGraphRetainUserObject", EMU_CALL_WORK, "graph=0x%llx, count=%u, flags=%u",
              emu_handle_number(graph), count, flags);
    holder = emu_graph_find(graph, false);
    found = emu_object_find(object);
    EMU_NEED(holder != NULL && found != NULL && count != 0 && flags <= CU_GRAPH_USER_OBJECT_MOVE,
             CUDA_ERROR_INVALID_VALUE);
    return emu_call_end(
        &call, emu_graph_retain(holder, found, count, flags == CU_GRAPH_USER_OBJECT_MOVE));
}
