/* attachment.c: attaches managed memory in the order of a stream, records what the memory is
 * attached to, waits before the host uses it, and refuses fills that the attachment rules out. */
#include "attachment.h"

#include "../driver/threads.h"

/* Held over the driver call and the record together, so that the driver and the records see the
 * attachments of several threads in the same order. */
static mm_operation_lock turn = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};

/* --- attaching -------------------------------------------------------------------------- */

/* *called becomes true if the driver was called. A driver may attach the memory and then fail. So
 * after a failure the memory counts as attached to every device, because a wait for all devices is
 * enough for any attachment. */
static int
attach_in_scope(mm_driver *cu, CUdeviceptr allocation, CUmemAttach_flags to, CUstream stream,
                bool *called, mm_status *st)
{
    if (mm_stream_refuse_capture(cu, stream, "an attachment of memory", st) < 0) {
        return -1;
    }
    if (allocation == 0) {
        return 0;
    }
    *called = true;
    MM_TRY(cu, StreamAttachMemAsync, st, stream, allocation, 0, (unsigned)to);
    return 0;
}

/* *device becomes the device of the current context if that context is a primary one, else
 * MM_ANY_DEVICE. A wait for all devices reaches primary contexts from every thread. */
static int
find_device(mm_driver *cu, int *device, mm_status *st)
{
    bool primary = false;

    if (!cu->concurrent_access && mm_is_primary_current(cu, device, &primary, st) < 0) {
        return -1;
    }
    *device = primary ? *device : MM_ANY_DEVICE;
    return 0;
}

/* Returns the stream of the previous record, which the caller drops. */
static mm_stream *
record(mm_attachment *a, CUmemAttach_flags to, mm_device_stream stream, mm_stream *shared)
{
    mm_attachment made = {.serial = a->serial + 1};
    mm_stream *before = a->shared;

    if (to != CU_MEM_ATTACH_GLOBAL) {
        made.to = to;
        made.device = stream.device;
        made.legacy = mm_is_legacy_stream(stream.handle);
        made.shared = shared;
    }
    if (made.shared != NULL) {
        mm_stream_retain(made.shared);
    }
    *a = made;
    return before;
}

int
mm_attach(mm_driver *cu, mm_attachment *a, CUdeviceptr allocation, CUmemAttach_flags to,
          mm_device_stream stream, mm_stream *shared, mm_status *st)
{
    mm_stream *before = NULL;
    bool called = false;
    mm_scope scope;
    int rc;

    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return -1;
    }
    rc = find_device(cu, &stream.device, st);
    /* For other threads the call and the record are one step. */
    mm_operation_lock_take(&turn);
    rc = rc < 0 ? -1 : attach_in_scope(cu, allocation, to, stream.handle, &called, st);
    if (called || rc == 0) {
        before = record(a, rc == 0 ? to : CU_MEM_ATTACH_GLOBAL, stream,
                        called && !cu->concurrent_access ? shared : NULL);
    }
    mm_operation_lock_release(&turn);
    mm_scope_leave(&scope);
    if (before != NULL) {
        mm_stream_drop(before);
    }
    return rc;
}

CUmemAttach_flags
mm_attachment_now(const mm_attachment *a)
{
    CUmemAttach_flags to = atomic_load_explicit(&a->to, memory_order_relaxed);

    return to != 0 ? to : CU_MEM_ATTACH_GLOBAL;
}

void
mm_attachment_end(mm_attachment *a)
{
    if (a->shared != NULL) {
        mm_stream_drop(a->shared);
        a->shared = NULL;
    }
}

/* --- host accesses ---------------------------------------------------------------------- */

/* Returns a copy of the record, which owns a reference to its stream. */
static mm_attachment
read_record(const mm_attachment *a)
{
    mm_attachment now;

    mm_operation_lock_take(&turn);
    now = *a;
    if (now.shared != NULL) {
        mm_stream_retain(now.shared);
    }
    mm_operation_lock_release(&turn);
    return now;
}

/* Notes that the wait for an attachment to the host is done, unless another attachment has
 * followed. */
static void
note_wait(mm_attachment *a, uint64_t serial)
{
    mm_operation_lock_take(&turn);
    if (a->serial == serial) {
        a->in_force = true;
    }
    mm_operation_lock_release(&turn);
}

/* True if the stream of the attachment exists for certain. A stream that nothing keeps may have
 * been destroyed, and drivers crash in calls with its handle. A kept stream may have ended with
 * its context, and the attachment with it. */
static bool
can_wait_for_stream(mm_driver *cu, const mm_attachment *a)
{
    return a->shared == NULL ? a->legacy && a->device != MM_ANY_DEVICE
                             : a->shared->lasts || !mm_context_has_ended(cu, &a->shared->context);
}

static int
wait_for_stream_in_scope(mm_driver *cu, CUstream stream, mm_status *st)
{
    if (mm_stream_refuse_capture(cu, stream, "a wait for the stream", st) < 0) {
        return -1;
    }
    MM_TRY(cu, StreamSynchronize, st, stream);
    return 0;
}

/* Waits in the primary context of the device, because every context has its own legacy stream. */
static int
wait_for_one(mm_driver *cu, const mm_attachment *a, mm_status *st)
{
    CUstream stream = a->shared != NULL ? a->shared->handle : NULL;
    int rc;

    MM_RUN_IN(rc, mm_scope_enter_relaxed, a->device, cu, st,
              wait_for_stream_in_scope(cu, stream, st));
    return rc;
}

/* Fails during a capture, because the wait would destroy it. */
static int
wait_for_all(mm_driver *cu, mm_status *st)
{
    bool capturing = false;

    if (mm_streams_are_capturing(cu, &capturing, st) < 0) {
        return -1;
    }
    return !capturing ? mm_synchronize_all(cu, st)
                      : mm_fail(st, MM_CAPTURING,
                                "a stream captures a CUDA graph, and the wait for all devices, "
                                "before the host uses the memory, would destroy the capture: "
                                "access it before the capture begins or after it");
}

/* Waits for the attachment of the record `now`, which is not in force yet. */
static int
wait_as_recorded(mm_driver *cu, mm_attachment *a, const mm_attachment *now, mm_status *st)
{
    bool by_stream = can_wait_for_stream(cu, now);
    int rc = by_stream ? wait_for_one(cu, now, st) : wait_for_all(cu, st);

    if (rc == 0 && now->to == CU_MEM_ATTACH_HOST && (by_stream || now->device != MM_ANY_DEVICE)) {
        note_wait(a, now->serial);
    }
    return rc;
}

int
mm_attachment_wait(mm_driver *cu, mm_attachment *a, mm_status *st)
{
    mm_attachment now = read_record(a);
    int rc = now.in_force ? 0 : wait_as_recorded(cu, a, &now, st);

    assert(!cu->concurrent_access);
    if (now.shared != NULL) {
        mm_stream_drop(now.shared);
    }
    return rc;
}

/* --- fills by a device ------------------------------------------------------------------ */

/* What the memory is attached to, if that rules out the stream; else 0. */
static CUmemAttach_flags
other_attachment(const mm_attachment *a, CUstream stream)
{
    CUmemAttach_flags to;

    mm_operation_lock_take(&turn);
    to = a->to == CU_MEM_ATTACH_SINGLE
                 && (a->shared == NULL || !a->shared->lasts || a->shared->handle == stream)
             ? 0
             : a->to;
    mm_operation_lock_release(&turn);
    return to;
}

int
mm_attachment_check_fill(mm_driver *cu, mm_attachment *a, CUstream stream, mm_status *st)
{
    CUmemAttach_flags to = cu->concurrent_access ? 0 : other_attachment(a, stream);
    int concurrent = 0;
    CUdevice device;

    assert(mm_in_scope());
    if (to == 0) {
        return 0;
    }
    MM_TRY(cu, CtxGetDevice, st, &device);
    MM_TRY(cu, DeviceGetAttribute, st, &concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
           device);
    return concurrent ? 0
                      : mm_fail(st, MM_REFUSED,
                                "the memory is attached to %s, and Device(%d), which has no "
                                "concurrent_managed_access, cannot fill it: before the fill, call "
                                "attach(\"global\"), or attach(\"single\") with its stream",
                                to == CU_MEM_ATTACH_HOST ? "the host" : "another stream", device);
}
