/* context.h: scopes: a current context for the length of a call, without disturbing the caller.
 *
 * Advice, attribute queries and allocation need a current context, and a thread that has not used
 * CUDA has none. A thread that captures a graph in global or thread-local mode must not make
 * "unsafe" calls such as advise, allocate and free: they fail and destroy the capture, unless the
 * thread's capture mode is relaxed. */
#ifndef MM_CONTEXT_H
#define MM_CONTEXT_H

#include "driver.h"

typedef struct {
    mm_driver *cu;
    bool pushed;
    bool relaxed;
    CUstreamCaptureMode mode; /* the caller's, restored by mm_scope_leave */
} mm_scope;

enum { MM_ANY_DEVICE = -1 };

/* Makes the primary context of the device current. For MM_ANY_DEVICE the caller's context
 * stays, and the primary one of device 0 is made current only if there is none. */
MM_NODISCARD int mm_scope_enter(mm_scope *s, mm_driver *cu, int device, mm_status *st);

/* mm_scope_enter with the thread's capture mode relaxed, for calls that a capture forbids. */
MM_NODISCARD int mm_scope_enter_relaxed(mm_scope *s, mm_driver *cu, int device, mm_status *st);

/* For work on a default stream of the device. The caller's context stays current if it belongs to
 * that device, because the caller's other work uses the default streams of that context. */
MM_NODISCARD int mm_scope_enter_default(mm_scope *s, mm_driver *cu, int device, mm_status *st);
MM_NODISCARD int mm_scope_enter_default_relaxed(mm_scope *s, mm_driver *cu, int device,
                                                mm_status *st);

/* Makes this context current, with the thread's capture mode relaxed. */
MM_NODISCARD int mm_scope_enter_context(mm_scope *s, mm_driver *cu, CUcontext context,
                                        mm_status *st);

/* Restores the thread's state. Cannot fail. */
void mm_scope_leave(mm_scope *s);

/* True if the calling thread is in a scope, for assertions. */
#ifndef NDEBUG
bool mm_in_scope(void);
#endif

/* Enters a scope by `enter`, stores the value of a call in `value`, and leaves. Makes the enclosing
 * function return -1 if the scope cannot be entered. */
#define MM_RUN_IN(value, enter, device, cu, st, call)        \
    do {                                                     \
        mm_scope mm_scope_;                                  \
        if ((enter)(&mm_scope_, (cu), (device), (st)) < 0) { \
            return -1;                                       \
        }                                                    \
        (value) = (call);                                    \
        mm_scope_leave(&mm_scope_);                          \
    } while (0)

/* MM_RUN_IN for one driver call. */
#define MM_CALL_IN(code, enter, device, cu, name, st, ...) \
    MM_RUN_IN(code, enter, device, cu, st, (cu)->name(__VA_ARGS__))

/* MM_TRY in a scope. */
#define MM_TRY_IN(enter, device, cu, name, st, ...)                       \
    do {                                                                  \
        CUresult mm_result_ = CUDA_SUCCESS;                               \
        MM_CALL_IN(mm_result_, enter, device, cu, name, st, __VA_ARGS__); \
        if (mm_result_ != CUDA_SUCCESS) {                                 \
            return mm_fail_call((st), "cu" #name, (int)mm_result_);       \
        }                                                                 \
    } while (0)

/* Restore the thread's own state, for callers that changed it without a scope. */
void mm_pop_context(mm_driver *cu);
void mm_restore_capture_mode(mm_driver *cu, CUstreamCaptureMode mode);

/* The device's primary context, which the first call retains. */
MM_NODISCARD int mm_primary_context(mm_driver *cu, int device, CUcontext *context, mm_status *st);

/* Lets the destination of a prefetch take pages. Driver 580 accepts a prefetch to a device without
 * a context, but moves nothing. Such a device gets its primary context, which stays retained. */
MM_NODISCARD int mm_open_destination(mm_driver *cu, CUmemLocation destination, mm_status *st);

/* Tells a context apart from every other context of the process, past and future: a new context
 * can have the handle of a destroyed context, but not its id. */
typedef struct {
    CUcontext handle;
    unsigned long long id;
} mm_context;

/* The current context. */
MM_NODISCARD int mm_current_context(mm_driver *cu, mm_context *context, mm_status *st);

/* True if the context was destroyed, and its streams and events with it. Drivers crash in calls
 * with a stream of such a context, but answer calls with the context itself. */
bool mm_context_has_ended(mm_driver *cu, const mm_context *context);

/* Stores the current device, and in *primary whether the current context is its primary one. A
 * context must be current. */
MM_NODISCARD int mm_is_primary_current(mm_driver *cu, int *device, bool *primary, mm_status *st);

/* The ordinal of the calling thread's current device; 0 when it has none. */
MM_NODISCARD int mm_current_device(mm_driver *cu, int *device, mm_status *st);

/* Makes the device's primary context current for the calling thread and leaves it so. */
MM_NODISCARD int mm_set_current_device(mm_driver *cu, int device, mm_status *st);

/* True if the calling thread runs a host function of a stream: CUDA refuses even
 * cuCtxGetCurrent there. False without a driver. */
bool mm_in_host_function(void);

/* Free and total bytes of the device's memory. An integrated device has the memory of the system.
 * There, memory that Linux can reclaim counts as free too, unlike in the driver's count. */
MM_NODISCARD int mm_device_memory(mm_driver *cu, int device, size_t *free_bytes, size_t *total,
                                  mm_status *st);

/* Waits for everything on the device. */
MM_NODISCARD int mm_device_synchronize(mm_driver *cu, int device, mm_status *st);

/* Waits for the current device and for every device that this library has worked on. */
MM_NODISCARD int mm_synchronize_all(mm_driver *cu, mm_status *st);

#endif
