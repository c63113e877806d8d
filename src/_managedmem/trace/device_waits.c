/* device_waits.c: synchronises contexts, unless a stream captures. */
#include "device_waits.h"

#include "../driver/context.h"
#include "../memory/stream.h"

static int
await_device(mm_driver *cu, int device, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, device, cu, CtxSynchronize, st);
    return 0;
}

static int
await_devices(mm_driver *cu, mm_status *st)
{
    if (await_device(cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    for (int i = 0; i < cu->device_count; i++) {
        if (atomic_load(&cu->primary[i]) != NULL && await_device(cu, i, st) < 0) {
            return -1;
        }
    }
    return 0;
}

int
mm_await_devices_unless_capturing(mm_driver *cu, bool *waited, mm_status *st)
{
    bool capturing = false;

    *waited = true;
    if (mm_streams_are_capturing(cu, &capturing, st) < 0) {
        return -1;
    }
    *waited = !capturing;
    return capturing ? 0 : await_devices(cu, st);
}

int
mm_await_devices_without_captures(mm_driver *cu, mm_status *st)
{
    bool waited;

    if (mm_await_devices_unless_capturing(cu, &waited, st) < 0) {
        return -1;
    }
    return waited ? 0
                  : mm_fail(st, MM_REFUSED,
                            "a stream is capturing a CUDA graph, and the wait of a mark would "
                            "destroy the capture: mark before or after it, or trace with "
                            "sync=False");
}
