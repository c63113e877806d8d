/* context.c: primary contexts and the scopes that make one current. */
#include "context.h"

#include <assert.h>

#include "system_memory.h"

/* --- scopes of the thread, for assertions ------------------------------------------------- */

#ifndef NDEBUG
static _Thread_local unsigned scopes;

bool
mm_in_scope(void)
{
    return scopes > 0;
}

#define NOTE_SCOPE_ENTERED() ((void)scopes++)
#define NOTE_SCOPE_LEFT() ((void)scopes--)
#else
#define NOTE_SCOPE_ENTERED() ((void)0)
#define NOTE_SCOPE_LEFT() ((void)0)
#endif

/* --- entering and leaving ----------------------------------------------------------------- */

/* A primary context is retained once and kept for the life of the process, as in the CUDA runtime.
 * Two threads that race both retain it, which does no harm. */
int
mm_primary_context(mm_driver *cu, int device, CUcontext *context, mm_status *st)
{
    assert(device >= 0 && device < cu->device_count);
    *context = atomic_load_explicit(&cu->primary[device], memory_order_acquire);
    if (*context == NULL) {
        MM_TRY(cu, DevicePrimaryCtxRetain, st, context, device);
        atomic_store_explicit(&cu->primary[device], *context, memory_order_release);
    }
    return 0;
}

/* A scope that has changed nothing yet. */
static void
scope_init(mm_scope *s, mm_driver *cu)
{
    s->cu = cu;
    s->pushed = false;
    s->relaxed = false;
    s->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
}

int
mm_scope_enter(mm_scope *s, mm_driver *cu, int device, mm_status *st)
{
    CUcontext context = NULL;

    scope_init(s, cu);
    if (device == MM_ANY_DEVICE) {
        MM_TRY(cu, CtxGetCurrent, st, &context);
        device = 0;
    }
    if (context == NULL) {
        if (mm_primary_context(cu, device, &context, st) < 0) {
            return -1;
        }
        MM_TRY(cu, CtxPushCurrent, st, context);
        s->pushed = true;
    }
    NOTE_SCOPE_ENTERED();
    return 0;
}

/* Leaves the scope on failure. */
static int
relax_scope(mm_scope *s, mm_status *st)
{
    CUresult code = s->cu->ThreadExchangeStreamCaptureMode(&s->mode);

    if (code != CUDA_SUCCESS) {
        s->relaxed = s->mode != CU_STREAM_CAPTURE_MODE_RELAXED; /* true if the failed call acted */
        mm_scope_leave(s);
        return mm_fail_call(st, "cuThreadExchangeStreamCaptureMode", (int)code);
    }
    s->relaxed = true;
    return 0;
}

int
mm_scope_enter_relaxed(mm_scope *s, mm_driver *cu, int device, mm_status *st)
{
    return mm_scope_enter(s, cu, device, st) < 0 ? -1 : relax_scope(s, st);
}

/* A context that another thread has destroyed can still be current here; it is of no device. */
static int
is_current_device(mm_driver *cu, int device, bool *is_current, mm_status *st)
{
    CUcontext context = NULL;
    CUdevice current = MM_ANY_DEVICE;
    CUresult code;

    MM_TRY(cu, CtxGetCurrent, st, &context);
    code = context != NULL ? cu->CtxGetDevice(&current) : CUDA_SUCCESS;
    *is_current = code == CUDA_SUCCESS && current == device;
    return code == CUDA_SUCCESS || code == CUDA_ERROR_CONTEXT_IS_DESTROYED
               ? 0
               : mm_fail_call(st, "cuCtxGetDevice", (int)code);
}

/* Out of line, because only the first use of a device runs it. A context that the program made for
 * the device counts only if it is current. */
static MM_COLD int
open_device(mm_driver *cu, int device, mm_status *st)
{
    unsigned int flags;
    int active = 0;
    CUcontext context;
    bool is_current = false;

    MM_TRY(cu, DevicePrimaryCtxGetState, st, device, &flags, &active);
    if (active == 0 && is_current_device(cu, device, &is_current, st) < 0) {
        return -1;
    }
    return is_current ? 0 : mm_primary_context(cu, device, &context, st);
}

int
mm_open_destination(mm_driver *cu, CUmemLocation destination, mm_status *st)
{
    int device = destination.id;

    if (destination.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 || device >= cu->device_count
        || atomic_load_explicit(&cu->primary[device], memory_order_acquire) != NULL) {
        return 0;
    }
    return open_device(cu, device, st);
}

int
mm_scope_enter_default(mm_scope *s, mm_driver *cu, int device, mm_status *st)
{
    bool is_current = false;

    assert(device >= MM_ANY_DEVICE && device < cu->device_count);
    if (device != MM_ANY_DEVICE && is_current_device(cu, device, &is_current, st) < 0) {
        return -1;
    }
    if (!is_current) {
        return mm_scope_enter(s, cu, device, st);
    }
    scope_init(s, cu);
    NOTE_SCOPE_ENTERED();
    return 0;
}

int
mm_scope_enter_default_relaxed(mm_scope *s, mm_driver *cu, int device, mm_status *st)
{
    return mm_scope_enter_default(s, cu, device, st) < 0 ? -1 : relax_scope(s, st);
}

int
mm_scope_enter_context(mm_scope *s, mm_driver *cu, CUcontext context, mm_status *st)
{
    assert(context != NULL);
    scope_init(s, cu);
    MM_TRY(cu, CtxPushCurrent, st, context);
    s->pushed = true;
    NOTE_SCOPE_ENTERED();
    return relax_scope(s, st);
}

/* The next two functions repeat a failed call, because a transient fault must not leave the
 * library's state in the thread. A call that acted and then failed is not repeated: its output
 * shows that it acted. */

void
mm_pop_context(mm_driver *cu)
{
    CUcontext popped = NULL;

    if (cu->CtxPopCurrent(&popped) != CUDA_SUCCESS && popped == NULL) {
        MM_IGNORE(cu->CtxPopCurrent(&popped)); /* the second attempt */
    }
}

void
mm_restore_capture_mode(mm_driver *cu, CUstreamCaptureMode mode)
{
    CUstreamCaptureMode exchanged = mode;

    if (cu->ThreadExchangeStreamCaptureMode(&exchanged) != CUDA_SUCCESS && exchanged == mode) {
        MM_IGNORE(cu->ThreadExchangeStreamCaptureMode(&exchanged)); /* the second attempt */
    }
}

void
mm_scope_leave(mm_scope *s)
{
    assert(mm_in_scope());
    if (s->relaxed) {
        mm_restore_capture_mode(s->cu, s->mode);
    }
    if (s->pushed) {
        mm_pop_context(s->cu);
    }
    NOTE_SCOPE_LEFT();
}

/* --- contexts that end --------------------------------------------------------------------- */

int
mm_current_context(mm_driver *cu, mm_context *context, mm_status *st)
{
    MM_TRY(cu, CtxGetCurrent, st, &context->handle);
    MM_TRY(cu, CtxGetId, st, context->handle, &context->id);
    return 0;
}

/* Other failures say nothing about the context: CUDA refuses the call in a host function. */
bool
mm_context_has_ended(mm_driver *cu, const mm_context *context)
{
    unsigned long long id = 0;
    CUresult code = cu->CtxGetId(context->handle, &id);

    return code == CUDA_SUCCESS
               ? id != context->id
               : code == CUDA_ERROR_CONTEXT_IS_DESTROYED || code == CUDA_ERROR_INVALID_CONTEXT;
}

/* --- devices ------------------------------------------------------------------------------ */

int
mm_is_primary_current(mm_driver *cu, int *device, bool *primary, mm_status *st)
{
    CUcontext context = NULL, primary_context = NULL;
    CUdevice ordinal = 0;

    MM_TRY(cu, CtxGetCurrent, st, &context);
    MM_TRY(cu, CtxGetDevice, st, &ordinal);
    if (mm_primary_context(cu, ordinal, &primary_context, st) < 0) {
        return -1;
    }
    *device = ordinal;
    *primary = context == primary_context;
    return 0;
}

int
mm_current_device(mm_driver *cu, int *device, mm_status *st)
{
    CUcontext context;

    *device = 0;
    MM_TRY(cu, CtxGetCurrent, st, &context);
    if (context != NULL) {
        CUdevice ordinal;
        MM_TRY(cu, CtxGetDevice, st, &ordinal);
        *device = ordinal;
    }
    return 0;
}

int
mm_set_current_device(mm_driver *cu, int device, mm_status *st)
{
    CUcontext context;

    if (mm_primary_context(cu, device, &context, st) < 0) {
        return -1;
    }
    MM_TRY(cu, CtxSetCurrent, st, context);
    return 0;
}

bool
mm_in_host_function(void)
{
    mm_driver *cu = mm_driver_usable();
    CUcontext context;

    return cu != NULL && cu->CtxGetCurrent(&context) == CUDA_ERROR_NOT_PERMITTED;
}

int
mm_device_memory(mm_driver *cu, int device, size_t *free_bytes, size_t *total, mm_status *st)
{
    int integrated = 0;
    size_t available;

    MM_TRY(cu, DeviceGetAttribute, st, &integrated, CU_DEVICE_ATTRIBUTE_INTEGRATED, device);
    MM_TRY_IN(mm_scope_enter, device, cu, MemGetInfo, st, free_bytes, total);
    available = integrated != 0 ? mm_available_system_memory() : 0;
    available = available < *total ? available : *total;
    *free_bytes = *free_bytes > available ? *free_bytes : available;
    return 0;
}

int
mm_device_synchronize(mm_driver *cu, int device, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter, device, cu, CtxSynchronize, st);
    return 0;
}

int
mm_synchronize_all(mm_driver *cu, mm_status *st)
{
    if (mm_device_synchronize(cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    for (int i = 0; i < cu->device_count; i++) {
        if (atomic_load(&cu->primary[i]) != NULL && mm_device_synchronize(cu, i, st) < 0) {
            return -1;
        }
    }
    return 0;
}
