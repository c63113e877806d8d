/* The beginning and the end of every driver call: the mutex, the call log, injected faults, and the
 * refusals that come before any check of arguments. */
#include "graphs.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void
append_call_text(struct emu_call *call, const char *format, va_list arguments)
{
    size_t room = sizeof call->text - call->used;
    int wrote = vsnprintf(call->text + call->used, room, format, arguments);

    if (wrote > 0) {
        call->used += (size_t)wrote < room ? (size_t)wrote : room - 1;
    }
}

void
emu_call_out(struct emu_call *call, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    append_call_text(call, format, arguments);
    va_end(arguments);
}

/* True inside a host function, except for functions that driver 580 allows there. */
static bool
is_refused_here(const char *function)
{
    static const char *const allowed[] = {
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamIsCapturing",
        "cuStreamQuery",
        "cuEventQuery",
        "cuMemPrefetchAsync",
    };

    if (!emu_thread()->in_stream_function) {
        return false;
    }
    for (size_t i = 0; i < sizeof allowed / sizeof *allowed; i++) {
        if (strcmp(function, allowed[i]) == 0) {
            return false;
        }
    }
    return true;
}

/* False for calls that still work with a broken context: making it current, and calls about
 * devices. */
static bool
needs_working_context(const struct emu_call *call)
{
    return (call->kind & (EMU_CALL_BOOKKEEPING | EMU_CALL_BEFORE_INIT)) == 0
           && strncmp(call->function, "cuDevice", strlen("cuDevice")) != 0;
}

CUresult
emu_call_begin(struct emu_call *call, const char *function, unsigned int kind, const char *format,
               ...)
{
    va_list arguments;
    CUresult code;

    if (emu_forked()) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    (void)emu_config();
    emu_lock();
    call->function = function;
    call->kind = kind;
    call->fail_after = CUDA_SUCCESS;
    call->used = 0;
    call->text[0] = '\0';
    va_start(arguments, format);
    append_call_text(call, format, arguments);
    va_end(arguments);
    code = emu_fault_take(function, needs_working_context(call), &call->fail_after);
    if (code != CUDA_SUCCESS) {
        return emu_call_end(call, code);
    }
    if (!emu_initialised() && (kind & EMU_CALL_BEFORE_INIT) == 0) {
        return emu_call_end(call, CUDA_ERROR_NOT_INITIALIZED);
    }
    if (is_refused_here(function)) {
        return emu_call_end(call, CUDA_ERROR_NOT_PERMITTED);
    }
    return CUDA_SUCCESS;
}

CUresult
emu_call_end(struct emu_call *call, CUresult result)
{
    struct emu_object *dead;

    if (result == CUDA_SUCCESS && call->fail_after != CUDA_SUCCESS) {
        result = call->fail_after;
    }
    emu_log_call(call, result);
    dead = emu_objects_take_dead();
    emu_unlock();
    emu_objects_destroy(dead);
    return result;
}
