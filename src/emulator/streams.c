/* Streams that exist, and the handles that stand for them. */
#include "emulator.h"

#include <stdlib.h>

static struct emu_stream *streams;
/* The records of former streams, the last one first. Their handles are reused in this order. Until
 * its reuse, the handle of a stream that ended with a user's context crashes a call, as with driver
 * 580. */
static struct emu_stream *former_streams;
static uint64_t last_stream;
static size_t user_streams;

struct emu_stream *
emu_streams(void)
{
    return streams;
}

size_t
emu_stream_count(void)
{
    return user_streams;
}

bool
emu_stream_blocking(const struct emu_stream *stream)
{
    return stream->kind != EMU_STREAM_LEGACY && (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

bool
emu_stream_idle(const struct emu_stream *stream)
{
    return stream->done == stream->queued;
}

struct emu_stream *
emu_stream_by_id(uint64_t id)
{
    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if (s->id == id) {
            return s;
        }
    }
    return NULL;
}

CUresult
emu_stream_new(struct emu_context *context, enum emu_stream_kind kind, unsigned int flags,
               struct emu_stream **out)
{
    struct emu_stream *stream = former_streams;

    if (stream != NULL) {
        former_streams = stream->next;
        *stream = (struct emu_stream){0};
    } else if ((stream = calloc(1, sizeof *stream)) == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stream->id = ++last_stream;
    stream->kind = kind;
    stream->context = context;
    stream->device = context->device;
    stream->flags = flags;
    stream->next = streams;
    streams = stream;
    user_streams += kind == EMU_STREAM_OWN;
    *out = stream;
    return CUDA_SUCCESS;
}

static CUresult
find_per_thread_stream(struct emu_context *context, struct emu_stream **out)
{
    uint64_t thread = emu_thread()->id;
    CUresult result;

    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if (s->kind == EMU_STREAM_PER_THREAD && s->context == context && s->thread == thread) {
            *out = s;
            return CUDA_SUCCESS;
        }
    }
    result = emu_stream_new(context, EMU_STREAM_PER_THREAD, 0, out);
    if (result == CUDA_SUCCESS) {
        (*out)->thread = thread;
    }
    return result;
}

CUresult
emu_stream_find(CUstream handle, struct emu_stream **out)
{
    struct emu_context *context = emu_context();
    CUresult result = CUDA_SUCCESS;

    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (context == NULL) {
            return emu_no_context();
        }
        if (handle == CU_STREAM_PER_THREAD) {
            return find_per_thread_stream(context, out);
        }
        if (context->legacy == NULL) {
            result = emu_stream_new(context, EMU_STREAM_LEGACY, 0, &context->legacy);
        }
        *out = context->legacy;
        return result;
    }
    for (struct emu_stream *s = streams; s != NULL; s = s->next) {
        if ((void *)s == (void *)handle && !s->destroyed) {
            *out = s;
            return CUDA_SUCCESS;
        }
    }
    for (const struct emu_stream *s = former_streams; s != NULL; s = s->next) {
        if ((const void *)s == (const void *)handle && s->ended) {
            emu_crash("a stream whose context was destroyed");
        }
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

bool
emu_streams_idle(void)
{
    for (const struct emu_stream *s = streams; s != NULL; s = s->next) {
        if (!emu_stream_idle(s)) {
            return false;
        }
    }
    return true;
}

void
emu_stream_destroyed(struct emu_stream *stream)
{
    stream->destroyed = true;
    user_streams -= stream->kind == EMU_STREAM_OWN;
}

void
emu_stream_remove(struct emu_stream *stream, bool ended_with_context)
{
    struct emu_stream **link = &streams;

    while (*link != stream) {
        link = &(*link)->next;
    }
    *link = stream->next;
    user_streams -= stream->kind == EMU_STREAM_OWN && !stream->destroyed;
    stream->ended = ended_with_context && stream->kind == EMU_STREAM_OWN;
    stream->next = former_streams;
    former_streams = stream;
}
