/* stream.c: stream calls, and the check for graph capture. */
#include "stream.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

/* --- life ------------------------------------------------------------------------------- */

int
mm_stream_create(mm_driver *cu, CUstream *stream, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, StreamCreate, st, stream,
              CU_STREAM_NON_BLOCKING);
    return 0;
}

/* Every mm_stream of the process. A forked child does not use the list, because a thread of its
 * parent may hold the mutex. */
static pthread_mutex_t streams_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_stream *all_streams;

static void
add_to_list(mm_stream *stream)
{
    (void)pthread_mutex_lock(&streams_mutex);
    stream->next = all_streams;
    if (all_streams != NULL) {
        all_streams->previous = stream;
    }
    all_streams = stream;
    (void)pthread_mutex_unlock(&streams_mutex);
}

static void
remove_from_list(mm_stream *stream)
{
    (void)pthread_mutex_lock(&streams_mutex);
    if (stream->previous != NULL) {
        stream->previous->next = stream->next;
    } else {
        all_streams = stream->next;
    }
    if (stream->next != NULL) {
        stream->next->previous = stream->previous;
    }
    (void)pthread_mutex_unlock(&streams_mutex);
}

/* Stores the context of the stream. */
static int
find_stream_context(mm_driver *cu, mm_stream *stream, mm_status *st)
{
    mm_device_stream self = {stream->handle, MM_ANY_DEVICE};
    mm_scope scope;
    int device, rc;

    if (mm_scope_enter_stream(&scope, cu, self, st) < 0) {
        return -1;
    }
    rc = mm_is_primary_current(cu, &device, &stream->lasts, st);
    if (rc == 0) {
        rc = mm_current_context(cu, &stream->context, st);
    }
    mm_scope_leave(&scope);
    return rc;
}

mm_stream *
mm_stream_share(mm_driver *cu, CUstream handle, mm_status *st)
{
    mm_stream *stream = calloc(1, sizeof *stream);

    assert(!mm_is_default_stream(handle));
    if (stream == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    atomic_init(&stream->references, 1);
    stream->handle = handle;
    if (find_stream_context(cu, stream, st) < 0) {
        free(stream);
        return NULL;
    }
    if (!mm_driver_forked()) {
        add_to_list(stream);
    }
    return stream;
}

void
mm_stream_retain(mm_stream *stream)
{
    assert(atomic_load(&stream->references) > 0);
    atomic_fetch_add_explicit(&stream->references, 1, memory_order_relaxed);
}

static CUresult
destroy_unless_ended(mm_driver *cu, const mm_stream *stream)
{
    return mm_context_has_ended(cu, &stream->context) ? CUDA_SUCCESS
                                                      : cu->StreamDestroy(stream->handle);
}

static bool
attempt_stream(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
{
    mm_stream *stream = (mm_stream *)entry;
    CUresult code;

    (void)conditions;
    assert(atomic_load(&stream->references) == 0);
    code = destroy_unless_ended(cu, stream);
    if (code == CUDA_ERROR_NOT_PERMITTED) {
        return false;
    }
    mm_leak_note(code, "cuStreamDestroy", 0);
    free(stream);
    return true;
}

int
mm_stream_release(mm_stream *stream, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();
    CUresult code;

    assert(atomic_load(&stream->references) > 0);
    if (atomic_fetch_sub_explicit(&stream->references, 1, memory_order_acq_rel) != 1) {
        return 0;
    }
    if (!mm_driver_forked()) {
        remove_from_list(stream);
    }
    code = cu ? destroy_unless_ended(cu, stream) : CUDA_SUCCESS;
    if (code == CUDA_ERROR_NOT_PERMITTED) {
        mm_deferred_frees_append(&stream->deferred, attempt_stream);
        return 0;
    }
    free(stream);
    return code == CUDA_SUCCESS ? 0 : mm_fail_call(st, "cuStreamDestroy", (int)code);
}

void
mm_stream_drop(mm_stream *stream)
{
    mm_status st;

    if (mm_stream_release(stream, &st) < 0) {
        mm_leak_note_status(&st, 0);
    }
}

/* --- waiting and capture ---------------------------------------------------------------- */

int
mm_stream_synchronize(mm_driver *cu, mm_device_stream stream, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_default_relaxed, stream.device, cu, StreamSynchronize, st,
              stream.handle);
    return 0;
}

int
mm_stream_query(mm_driver *cu, CUstream stream, bool *done, mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, StreamQuery, st, stream);
    *done = code == CUDA_SUCCESS;
    return *done || code == CUDA_ERROR_NOT_READY ? 0
                                                 : mm_fail_call(st, "cuStreamQuery", (int)code);
}

int
mm_stream_is_capturing(mm_driver *cu, CUstream stream, bool *capturing, mm_status *st)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult code = cu->StreamIsCapturing(stream, &status);

    /* INVALID_CONTEXT: a thread without a context uses the default stream of device 0. */
    if (code == CUDA_ERROR_INVALID_CONTEXT) {
        MM_CALL_IN(code, mm_scope_enter, MM_ANY_DEVICE, cu, StreamIsCapturing, st, stream,
                   &status);
    }
    /* IMPLICIT: the legacy stream cannot be used while a blocking stream captures. */
    *capturing = code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                 || (code == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE);
    return *capturing || code == CUDA_SUCCESS ? 0
                                              : mm_fail_call(st, "cuStreamIsCapturing", (int)code);
}

/* Retains the stream after `previous`, or the first one, and releases `previous`. NULL at the end
 * of the list. Streams without a reference are about to leave the list. */
static mm_stream *
next_in_list(mm_stream *previous)
{
    mm_stream *stream;

    (void)pthread_mutex_lock(&streams_mutex);
    stream = previous != NULL ? previous->next : all_streams;
    while (stream != NULL) {
        size_t references = atomic_load(&stream->references);
        if (references > 0
            && atomic_compare_exchange_strong(&stream->references, &references, references + 1)) {
            break;
        }
        stream = references > 0 ? stream : stream->next; /* else try again */
    }
    (void)pthread_mutex_unlock(&streams_mutex);
    if (previous != NULL) {
        mm_stream_drop(previous);
    }
    return stream;
}

int
mm_streams_are_capturing(mm_driver *cu, bool *capturing, mm_status *st)
{
    static const CUstream defaults[] = {CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    mm_stream *stream = NULL;
    int rc = 0;

    *capturing = false;
    for (size_t i = 0; rc == 0 && !*capturing && i < sizeof defaults / sizeof *defaults; i++) {
        rc = mm_stream_is_capturing(cu, defaults[i], capturing, st);
    }
    while ((stream = next_in_list(stream)) != NULL) {
        if (rc == 0 && !*capturing && !mm_context_has_ended(cu, &stream->context)) {
            rc = mm_stream_is_capturing(cu, stream->handle, capturing, st);
        }
    }
    return rc;
}

int
mm_stream_refuse_capture(mm_driver *cu, CUstream stream, const char *op, mm_status *st)
{
    bool capturing = false;

    if (mm_stream_is_capturing(cu, stream, &capturing, st) < 0) {
        return -1;
    }
    if (capturing) {
        return mm_fail(st, MM_CAPTURING,
                       "%s cannot be recorded in a CUDA graph, and the call would have destroyed "
                       "the capture on this stream: issue it before the capture begins, or on "
                       "another stream",
                       op);
    }
    return 0;
}

/* --- order between streams -------------------------------------------------------------- */

int
mm_scope_enter_stream(mm_scope *s, mm_driver *cu, mm_device_stream stream, mm_status *st)
{
    CUcontext context = NULL;

    if (mm_is_default_stream(stream.handle)) {
        return mm_scope_enter_default_relaxed(s, cu, stream.device, st);
    }
    MM_TRY(cu, StreamGetCtx, st, stream.handle, &context);
    return mm_scope_enter_context(s, cu, context, st);
}

/* Tries twice, so that a transient fault does not leak the event. */
void
mm_event_destroy(mm_driver *cu, CUevent event)
{
    assert(event != NULL);
    if (cu->EventDestroy(event) != CUDA_SUCCESS) {
        MM_IGNORE(cu->EventDestroy(event)); /* the second attempt */
    }
}

int
mm_stream_refuse_capture_in(mm_driver *cu, mm_device_stream stream, const char *op, mm_status *st)
{
    int rc;

    MM_RUN_IN(rc, mm_scope_enter_stream, stream, cu, st,
              mm_stream_refuse_capture(cu, stream.handle, op, st));
    return rc;
}

/* Creates an event and records it on the stream; NULL on failure. */
static CUevent
record_event(mm_driver *cu, mm_device_stream stream, mm_status *st)
{
    CUevent event = NULL;
    mm_scope scope;
    CUresult code;

    if (mm_scope_enter_stream(&scope, cu, stream, st) < 0) {
        return NULL;
    }
    code = cu->EventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuEventCreate", (int)code);
        event = NULL;
    } else if ((code = cu->EventRecord(event, stream.handle)) != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuEventRecord", (int)code);
        mm_event_destroy(cu, event);
        event = NULL;
    }
    mm_scope_leave(&scope);
    return event;
}

static int
wait_for_event(mm_driver *cu, mm_device_stream stream, CUevent event, mm_status *st)
{
    MM_TRY_IN(mm_scope_enter_stream, stream, cu, StreamWaitEvent, st, stream.handle, event,
              CU_EVENT_WAIT_DEFAULT);
    return 0;
}

/* True if both are one stream. Each device has default streams of its own. */
static bool
is_same_stream(mm_device_stream a, mm_device_stream b)
{
    bool same =
        a.handle == b.handle || (mm_is_legacy_stream(a.handle) && mm_is_legacy_stream(b.handle));

    return same
           && (!mm_is_default_stream(a.handle) || a.device == b.device || a.device == MM_ANY_DEVICE
               || b.device == MM_ANY_DEVICE);
}

int
mm_stream_follow(mm_driver *cu, mm_device_stream stream, mm_device_stream producer, mm_status *st)
{
    static const char op[] = "a wait for the stream of an array's producer";
    CUevent event;
    int rc;

    if (is_same_stream(stream, producer)) {
        return 0;
    }
    if (mm_stream_refuse_capture_in(cu, producer, op, st) < 0
        || mm_stream_refuse_capture_in(cu, stream, op, st) < 0) {
        return -1;
    }
    event = record_event(cu, producer, st);
    if (event == NULL) {
        return -1;
    }
    rc = wait_for_event(cu, stream, event, st);
    mm_event_destroy(cu, event); /* the driver keeps it until it is reached */
    return rc;
}

/* --- blocking streams in place of the legacy stream ------------------------------------------ */

/* One for each device, kept for the life of the process. */
static _Atomic(CUstream) batch_streams[MM_MAX_DEVICES];

static int
create_blocking_stream(mm_driver *cu, CUstream *stream, mm_status *st)
{
    MM_TRY(cu, StreamCreate, st, stream, CU_STREAM_DEFAULT);
    return 0;
}

int
mm_batch_stream_acquire(mm_driver *cu, CUstream requested, mm_batch_stream *out, mm_status *st)
{
    CUstream none = NULL;
    bool primary = false;
    int device = 0;

    assert(mm_in_scope());
    out->stream = requested;
    out->temporary = false;
    if (!mm_is_legacy_stream(requested)) {
        return 0;
    }
    if (mm_is_primary_current(cu, &device, &primary, st) < 0) {
        return -1;
    }
    if (!primary) {
        /* The owner of another context may destroy it at any time, so its streams are not kept. */
        out->temporary = true;
        return create_blocking_stream(cu, &out->stream, st);
    }
    out->stream = atomic_load_explicit(&batch_streams[device], memory_order_acquire);
    if (out->stream != NULL) {
        return 0;
    }
    if (create_blocking_stream(cu, &out->stream, st) < 0) {
        return -1;
    }
    if (!atomic_compare_exchange_strong(&batch_streams[device], &none, out->stream)) { /* raced */
        /* Another thread has stored a stream, which serves this call too. */
        mm_leak_note(cu->StreamDestroy(out->stream), "cuStreamDestroy", 0);
        out->stream = none;
    }
    return 0;
}

void
mm_batch_stream_release(mm_driver *cu, mm_batch_stream *s)
{
    assert(!s->temporary || s->stream != NULL);
    if (s->temporary) {
        mm_leak_note(cu->StreamDestroy(s->stream), "cuStreamDestroy", 0);
    }
}
