/* Devices with their primary contexts, and what belongs to the calling thread. */
#include "emulator.h"

static struct emu_device devices[EMU_MAX_DEVICES];
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

struct emu_device *
emu_device(int ordinal)
{
    if (ordinal < 0 || ordinal >= emu_config()->devices) {
        return NULL;
    }
    devices[ordinal].ordinal = ordinal;
    return &devices[ordinal];
}

struct emu_device *
emu_current(void)
{
    const struct emu_thread *thread = emu_thread();

    return thread->depth > 0 ? thread->stack[thread->depth - 1] : NULL;
}

struct emu_device *
emu_device_of(CUcontext ctx)
{
    for (int i = 0; i < emu_config()->devices; i++) {
        if ((void *)ctx == (void *)&devices[i]) {
            return emu_device(i);
        }
    }
    return NULL;
}

CUcontext
emu_context_of(struct emu_device *device)
{
    return (CUcontext)device;
}
