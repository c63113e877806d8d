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
    struct emu_stream *stream;

    EMU_SEEK(stream, streams, stream->id == id);
    return stream;
}

bool
emu_point_reached(struct emu_point point)
{
    const struct emu_stream *stream = emu_stream_by_id(point.stream);

    return stream == NULL || stream->done >= point.serial;
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
    EMU_LINK(streams, stream);
    user_streams += kind == EMU_STREAM_OWN;
    *out = stream;
    return CUDA_SUCCESS;
}

static CUresult
find_per_thread_stream(struct emu_context *context, struct emu_stream **out)
{
    uint64_t thread = emu_thread()->id;
    struct emu_stream *s;

    EMU_SEEK(s, streams,
             s->kind == EMU_STREAM_PER_THREAD && s->context == context && s->thread == thread);
    if (s == NULL) {
        EMU_TRY(emu_stream_new(context, EMU_STREAM_PER_THREAD, 0, &s));
        s->thread = thread;
    }
    *out = s;
    return CUDA_SUCCESS;
}

CUresult
emu_stream_find(CUstream handle, struct emu_stream **out)
{
    struct emu_context *context = emu_context();
    struct emu_stream *s;

    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (context == NULL) {
            return emu_no_context();
        }
        if (handle == CU_STREAM_PER_THREAD) {
            return find_per_thread_stream(context, out);
        }
        if (context->legacy == NULL) {
            EMU_TRY(emu_stream_new(context, EMU_STREAM_LEGACY, 0, &context->legacy));
        }
        *out = context->legacy;
        return CUDA_SUCCESS;
    }
    EMU_SEEK(s, former_streams, (void *)s == (void *)handle && s->ended);
    if (s != NULL) {
        emu_crash("a stream whose context was destroyed");
    }
    EMU_SEEK(s, streams, (void *)s == (void *)handle && !s->destroyed);
    *out = s;
    return s != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

bool
emu_streams_idle(void)
{
    const struct emu_stream *busy;

    EMU_SEEK(busy, streams, !emu_stream_idle(busy));
    return busy == NULL;
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
    EMU_UNLINK(streams, stream);
    user_streams -= stream->kind == EMU_STREAM_OWN && !stream->destroyed;
    stream->ended = ended_with_context && stream->kind == EMU_STREAM_OWN;
    EMU_LINK(former_streams, stream);
}
