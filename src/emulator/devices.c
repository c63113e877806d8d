/* Devices, their contexts, and what belongs to the calling thread. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

static struct emu_device devices[EMU_MAX_DEVICES];
static struct emu_context *user_contexts;
static size_t live_contexts;
static uint64_t last_context = EMU_MAX_DEVICES; /* ids up to this one are for primary contexts */
static _Thread_local struct emu_thread this_thread;
static uint64_t last_thread;

struct emu_thread *
emu_thread(void)
{
    if (this_thread.id == 0) {
        this_thread.id = __atomic_add_fetch(&last_thread, 1, __ATOMIC_RELAXED);
    }
    return &this_thread;
}

void
emu_device_uuid(int ordinal, void *out)
{
    unsigned char *bytes = out;

    memcpy(bytes, "emulated-gpu-00", 16);
    bytes[15] = (unsigned char)ordinal;
}

struct emu_device *
emu_device(int ordinal)
{
    if (ordinal < 0 || ordinal >= emu_config()->devices) {
        return NULL;
    }
    devices[ordinal].ordinal = ordinal;
    devices[ordinal].primary.device = &devices[ordinal];
    devices[ordinal].primary.primary = true;
    devices[ordinal].primary.id = (uint64_t)ordinal + 1;
    return &devices[ordinal];
}

bool
emu_device_has_context(int ordinal)
{
    const struct emu_context *context;

    EMU_SEEK(context, user_contexts, !context->destroyed && context->device->ordinal == ordinal);
    return context != NULL || devices[ordinal].retained > 0;
}

size_t
emu_device_taken(const struct emu_device *device)
{
    size_t frames = 0;

    for (int use = EMU_FRAME_UNUSED; use < EMU_FRAME_USES; use++) {
        frames += device->frames[use].count;
    }
    return device->allocated + frames * EMU_BLOCK;
}

void
emu_device_note_peak(struct emu_device *device)
{
    size_t taken = emu_device_taken(device);

    device->peak = taken > device->peak ? taken : device->peak;
}

struct emu_context *
emu_context(void)
{
    const struct emu_thread *thread = emu_thread();
    struct emu_context *top = thread->depth > 0 ? thread->stack[thread->depth - 1] : NULL;

    return top != NULL && !top->destroyed ? top : NULL;
}

struct emu_device *
emu_current(void)
{
    const struct emu_context *context = emu_context();

    return context != NULL ? context->device : NULL;
}

CUresult
emu_no_context(void)
{
    return emu_thread()->depth > 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

struct emu_context *
emu_context_find(CUcontext handle)
{
    struct emu_context *context;

    for (int i = 0; i < emu_config()->devices; i++) {
        if ((void *)handle == (void *)&devices[i].primary) {
            return &emu_device(i)->primary;
        }
    }
    EMU_SEEK(context, user_contexts, (void *)context == (void *)handle);
    return context;
}

void
emu_context_push(struct emu_thread *thread, struct emu_context *context)
{
    thread->stack[thread->depth++] = context;
    context->stacked++;
}

struct emu_context *
emu_context_pop(struct emu_thread *thread)
{
    struct emu_context *context = thread->stack[--thread->depth];

    context->stacked--;
    return context;
}

/* A record of a destroyed context that no stack holds, or a new one. NULL: out of memory. */
static struct emu_context *
context_record(void)
{
    struct emu_context *context;

    EMU_SEEK(context, user_contexts, context->destroyed && context->stacked == 0);
    if (context == NULL) {
        context = calloc(1, sizeof *context);
        if (context != NULL) {
            EMU_LINK(user_contexts, context);
        }
    }
    return context;
}

struct emu_context *
emu_context_new(struct emu_device *device)
{
    struct emu_context *context = context_record();

    if (context != NULL) {
        context->device = device;
        context->destroyed = false;
        context->id = ++last_context;
        live_contexts++;
    }
    return context;
}

void
emu_context_end(struct emu_context *context)
{
    context->legacy = NULL;
    context->destroyed = true;
    live_contexts--;
}

size_t
emu_context_count(void)
{
    return live_contexts;
}
