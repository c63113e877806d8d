/* Graph capture: the captures that streams are in, and the calls that break them. A graph holds
 * no nodes: it can be made and destroyed, not launched. */
#include "emulator.h"

#include <stdlib.h>

struct emu_capture {
    struct emu_capture *next;
    uint64_t id;
    CUstreamCaptureMode mode;
    uint64_t thread;
    struct emu_stream *origin;
    bool broken;
};

struct graph {
    struct graph *next;
};

static struct emu_capture *captures;
static struct graph *graphs;
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

/* The capture that makes calls on the legacy stream impossible, because a blocking stream of the
 * context is in it. NULL for other streams. */
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
emu_capture_status(struct emu_stream *stream, CUstreamCaptureStatus *status, uint64_t *id)
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
    if (capture == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->id = ++last_id;
    capture->mode = mode;
    capture->thread = emu_thread()->id;
    capture->origin = stream;
    capture->next = captures;
    captures = capture;
    stream->capture = capture;
    return CUDA_SUCCESS;
}

void
emu_capture_join(struct emu_stream *stream, struct emu_capture *capture)
{
    if (stream->capture == NULL) {
        stream->capture = capture;
    }
}

static void
capture_delete(struct emu_capture *capture)
{
    struct emu_capture **link = &captures;

    for (struct emu_stream *s = emu_streams(); s != NULL; s = s->next) {
        if (s->capture == capture) {
            s->capture = NULL;
        }
    }
    emu_events_leave(capture);
    while (*link != capture) {
        link = &(*link)->next;
    }
    *link = capture->next;
    free(capture);
}

CUresult
emu_capture_end(struct emu_stream *stream, CUgraph *graph)
{
    struct emu_capture *capture = stream->capture;
    struct graph *made;
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
    capture_delete(capture);
    if (broken) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    made = calloc(1, sizeof *made);
    if (made == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->next = graphs;
    graphs = made;
    *graph = (CUgraph)made;
    return CUDA_SUCCESS;
}

void
emu_capture_abandon(struct emu_stream *stream)
{
    if (stream->capture != NULL && stream->capture->origin == stream) {
        capture_delete(stream->capture);
    }
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

CUresult
emu_graph_delete(CUgraph graph)
{
    for (struct graph **link = &graphs; *link != NULL; link = &(*link)->next) {
        if ((void *)*link == (void *)graph) {
            struct graph *gone = *link;
            *link = gone->next;
            free(gone);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}
