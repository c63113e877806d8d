/* Graph capture: the captures that streams are in, and the calls that break them. Copies, fills,
 * host functions and kernels become nodes; a memory allocation is refused. */
#include "graphs.h"

#include <stdlib.h>

struct emu_capture {
    struct emu_capture *next;
    uint64_t id;
    CUstreamCaptureMode mode;
    uint64_t thread;
    struct emu_stream *origin;
    struct emu_graph *graph;
    bool broken;
};

static struct emu_capture *captures;
static uint64_t last_id;

/* True if the capture forbids unsafe calls to the calling thread, by the contract of
 * cuThreadExchangeStreamCaptureMode. */
static bool
capture_forbids(const struct emu_capture *capture)
{
    const struct emu_thread *thread = emu_thread();

    if (thread->mode == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return false;
    }
    if (capture->thread == thread->id) {
        return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    }
    return thread->mode == CU_STREAM_CAPTURE_MODE_GLOBAL
           && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

CUresult
emu_capture_unsafe(void)
{
    CUresult result = CUDA_SUCCESS;

    for (struct emu_capture *c = captures; c != NULL; c = c->next) {
        if (capture_forbids(c)) {
            c->broken = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

/* The capture that a blocking stream of the same context is in: it forbids calls on the legacy
 * stream. NULL if there is none, and for other streams. */
static struct emu_capture *
implicit_capture(const struct emu_stream *stream)
{
    if (stream->kind != EMU_STREAM_LEGACY) {
        return NULL;
    }
    for (const struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
        if (s->capture != NULL && s->context == stream->context && emu_stream_blocking(s)) {
            return s->capture;
        }
    }
    return NULL;
}

CUresult
emu_capture_refuse(struct emu_stream *stream)
{
    struct emu_capture *implicit = implicit_capture(stream);

    if (implicit != NULL) {
        implicit->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture == NULL) {
        return CUDA_SUCCESS;
    }
    if (stream->capture->broken) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    stream->capture->broken = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult
emu_capture_record(struct emu_stream *stream, bool *captured)
{
    struct emu_capture *implicit = implicit_capture(stream);

    *captured = stream->capture != NULL;
    if (implicit != NULL) {
        implicit->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return *captured && stream->capture->broken ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                                                : CUDA_SUCCESS;
}

CUresult
emu_capture_add(struct emu_stream *stream, const struct emu_op *op)
{
    struct emu_node *node = NULL;
    CUresult result = emu_graph_add(stream->capture->graph, op, &stream->front, &node);

    return result == CUDA_SUCCESS ? emu_nodes_set(&stream->front, &node, 1) : result;
}

CUresult
emu_capture_follow(struct emu_stream *stream, const struct emu_nodes *nodes, bool alone)
{
    if (stream->capture == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (stream->capture->broken) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (!emu_graph_has(stream->capture->graph, nodes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return alone ? emu_nodes_set(&stream->front, nodes->list, nodes->count)
                 : emu_nodes_add(&stream->front, nodes->list, nodes->count);
}

CUresult
emu_capture_status(struct emu_stream *stream, CUstreamCaptureStatus *status, uint64_t *id,
                   struct emu_graph **graph)
{
    const struct emu_capture *capture = stream->capture;

    if (implicit_capture(stream) != NULL) {
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    *status = capture == NULL   ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != NULL) {
        *id = capture == NULL ? 0 : capture->id;
    }
    *graph = capture == NULL ? NULL : capture->graph;
    return CUDA_SUCCESS;
}

CUresult
emu_capture_begin(struct emu_stream *stream, CUstreamCaptureMode mode)
{
    struct emu_capture *capture;

    if ((int)mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (stream->kind == EMU_STREAM_LEGACY) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream->capture != NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    capture = calloc(1, sizeof *capture);
    if (capture == NULL || emu_graph_new(&capture->graph) != CUDA_SUCCESS) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->id = ++last_id;
    capture->mode = mode;
    capture->thread = emu_thread()->id;
    capture->origin = stream;
    EMU_LINK(captures, capture);
    stream->capture = capture;
    return CUDA_SUCCESS;
}

CUresult
emu_capture_join(struct emu_stream *stream, const struct emu_event *event)
{
    if (stream->capture == NULL) {
        stream->capture = event->capture;
    }
    if (stream->capture != event->capture) {
        stream->capture->broken = event->capture->broken = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    return emu_nodes_add(&stream->front, event->front.list, event->front.count);
}

/* Ends a capture, but keeps its graph. */
static void
capture_delete(struct emu_capture *capture)
{
    for (struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
        if (s->capture == capture) {
            s->capture = NULL;
            emu_nodes_clear(&s->front);
        }
    }
    emu_events_leave(capture);
    EMU_UNLINK(captures, capture);
    free(capture);
}

CUresult
emu_capture_end(struct emu_stream *stream, CUgraph *graph)
{
    struct emu_capture *capture = stream->capture;
    struct emu_graph *made;
    bool broken;

    if (graph == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *graph = NULL;
    if (capture == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (capture->origin != stream) {
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != emu_thread()->id) {
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    }
    broken = capture->broken;
    made = capture->graph;
    capture_delete(capture);
    if (broken) {
        emu_graph_delete(made);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    *graph = (CUgraph)made;
    return CUDA_SUCCESS;
}

void
emu_capture_abandon(struct emu_stream *stream)
{
    if (stream->capture != NULL && stream->capture->origin == stream) {
        emu_graph_delete(stream->capture->graph);
        capture_delete(stream->capture);
    }
    emu_nodes_clear(&stream->front);
}

CUresult
emu_capture_refuse_context(const struct emu_context *context)
{
    CUresult result = CUDA_SUCCESS;

    for (struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
        if (s->context == context && s->capture != NULL) {
            s->capture->broken = true;
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}
