/* attachment.c: attaches managed memory in a stream, records to what, and waits for its host use. */
#include "attachment.h"

#include "../driver/threads.h"

/* Taken for the driver call and the record together, so that both have the attachments of several
 * threads in one order. */
static mm_operation_lock turn = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};

/* --- attaching -------------------------------------------------------------------------- */

/* *called is true if the driver was called, which may have attached the memory and then failed: the memory
 * counts as attached to every device then, because a wait for these is enough for each attachment. */
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

/* Returns the stream of the previous record, which the caller drops. */
static mm_stream *
record(mm_attachment *a, CUmemAttach_flags to, int device, mm_stream *shared)
{
    mm_attachment made = {.serial = a->serial + 1};
    mm_stream *before = a->shared;

    if (to != CU_MEM_ATTACH_GLOBAL) {
        made.to = to;
        made.device = device;
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

    if (mm_is_legacy_stream(stream.handle) && !cu->concurrent_access
        && mm_current_device(cu, &stream.device, st) < 0) {
        return -1;
    }
    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return -1;
    }
    mm_operation_lock_take(&turn);
    rc = attach_in_scope(cu, allocation, to, stream.handle, &called, st);
    if (called && !cu->concurrent_access) {
        before = record(a, rc == 0 ? to : CU_MEM_ATTACH_GLOBAL, stream.device, shared);
    }
    mm_operation_lock_release(&turn);
    mm_scope_leave(&scope);
    if (before != NULL) {
        mm_stream_drop(before);
    }
    return rc;
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

/* A copy of the record, which has a reference to its stream. */
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

/* Notes that the host has waited for an attachment to it, unless another one has followed. */
static void
note_wait(mm_attachment *a, uint64_t serial)
{
    mm_operation_lock_take(&turn);
    if (a->serial == serial) {
        a->in_force = true;
    }
    mm_operation_lock_release(&turn);
}

/* A stream that nothing keeps may be destroyed, and drivers crash in calls with its handle. A stream
 * that ended with its context takes the attachment with it. */
static bool
can_wait_for_stream(mm_driver *cu, const mm_attachment *a)
{
    if (a->to == 0) {
        return false;
    }
    return a->shared == NULL ? a->device != MM_ANY_DEVICE
                             : a->shared->lasts || !mm_context_has_ended(cu, &a->shared->context);
}

static int
wait_unless_capture(mm_driver *cu, mm_device_stream stream, mm_status *st)
{
    return mm_stream_refuse_capture_in(cu, stream, "a wait for the stream", st) < 0
               ? -1
               : mm_stream_synchronize(cu, stream, st);
}

int
mm_attachment_wait(mm_driver *cu, mm_attachment *a, mm_status *st)
{
    mm_attachment now = read_record(a);
    mm_device_stream stream = {now.shared ? now.shared->handle : NULL, now.device};
    int rc = 0;

    assert(!cu->concurrent_access);
    if (!now.in_force) {
        rc = can_wait_for_stream(cu, &now) ? wait_unless_capture(cu, stream, st)
                                           : mm_synchronize_all(cu, st);
    }
    if (rc == 0 && now.to == CU_MEM_ATTACH_HOST && !now.in_force) {
        note_wait(a, now.serial);
    }
    if (now.shared != NULL) {
        mm_stream_drop(now.shared);
    }
    return rc;
}
