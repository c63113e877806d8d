/* The mutex, the call log and fault injection.  The emu_* functions that tests call to look inside
 * are in inspect.c. */
#include "emulator.h"

#include "control.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_LIMIT = 65536, FAULT_LIMIT = 64 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static bool initialised, forked, verbose;
static int (*probe)(void);

/* The log is a ring: a long run forgets its oldest calls. */
static char *entries[LOG_LIMIT];
static size_t log_first, log_count;

static struct {
    char function[48];
    unsigned int countdown;
    CUresult code;
    bool after, lasting;
} faults[FAULT_LIMIT];
static size_t fault_count;
static int fault_fired;
static CUresult lasting_fault; /* the result of all calls that need a working context, if not 0 */

struct emu_counters emu_counted;

void
emu_lock(void)
{
    pthread_mutex_lock(&mutex);
}

void
emu_unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

void
emu_wait(void)
{
    pthread_cond_wait(&condition, &mutex);
}

void
emu_broadcast(void)
{
    pthread_cond_broadcast(&condition);
}

/* As with a real driver, a forked child cannot use what its parent opened.  The mutex is held
 * while the process forks, so that the child's copy is never one that a lost thread holds. */
static void
after_fork(void)
{
    forked = true;
    emu_unlock();
}

void
emu_set_initialised(void)
{
    if (!initialised) {
        initialised = true;
        (void)pthread_atfork(emu_lock, emu_unlock, after_fork);
    }
}

static void
log_add(const char *text)
{
    char *copy = strdup(text);

    if (copy == NULL) {
        return;
    }
    if (log_count == LOG_LIMIT) {
        free(entries[log_first]);
        entries[log_first] = copy;
        log_first = (log_first + 1) % LOG_LIMIT;
        return;
    }
    entries[(log_first + log_count++) % LOG_LIMIT] = copy;
}

/* The fault that this call runs into, removed from the list; -1: none. */
static int
take_fault(const char *function, CUresult *code, bool *after)
{
    int hit = -1;

    for (size_t i = 0; i < fault_count; i++) {
        if (strcmp(faults[i].function, "*") != 0 && strcmp(faults[i].function, function) != 0) {
            continue;
        }
        if (faults[i].countdown > 1) {
            faults[i].countdown--;
        } else if (hit < 0) {
            hit = (int)i;
            *code = faults[i].code;
            *after = faults[i].after;
        }
    }
    if (hit >= 0) {
        if (faults[hit].lasting) {
            lasting_fault = faults[hit].code;
        }
        fault_count--;
        memmove(&faults[hit], &faults[hit + 1], (fault_count - (size_t)hit) * sizeof *faults);
        fault_fired++;
    }
    return hit;
}

static void
append(struct emu_call *call, const char *format, va_list arguments)
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
    append(call, format, arguments);
    va_end(arguments);
}

/* True inside a host function, except for the functions that driver 580 allows there (measured). */
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

/* A broken context can still be made current, and its device asked about. */
static bool
needs_working_context(const struct emu_call *call)
{
    return (call->kind & (EMU_CALL_BOOKKEEPING | EMU_CALL_BEFORE_INIT)) == 0
           && strncmp(call->function, "cuDevice", strlen("cuDevice")) != 0;
}

/* The failure that the call has before it acts, or CUDA_SUCCESS. */
static CUresult
fault_before(struct emu_call *call)
{
    CUresult code = CUDA_SUCCESS;
    bool after = false, lasts = lasting_fault != CUDA_SUCCESS;

    if (take_fault(call->function, &code, &after) >= 0) {
        if (!after) {
            return code;
        }
        call->fail_after = code;
    }
    return lasts && needs_working_context(call) ? lasting_fault : CUDA_SUCCESS;
}

CUresult
emu_call_begin(struct emu_call *call, const char *function, unsigned int kind, const char *format,
               ...)
{
    va_list arguments;
    CUresult code;

    if (forked) {
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
    append(call, format, arguments);
    va_end(arguments);
    code = fault_before(call);
    if (code != CUDA_SUCCESS) {
        return emu_call_end(call, code);
    }
    if (!initialised && (kind & EMU_CALL_BEFORE_INIT) == 0) {
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
    char line[EMU_CALL_TEXT + 128];

    if (result == CUDA_SUCCESS && call->fail_after != CUDA_SUCCESS) {
        result = call->fail_after;
    }
    if ((call->kind & EMU_CALL_BOOKKEEPING) == 0 || verbose) {
        snprintf(line, sizeof line, "%s(%s) -> %d%s", call->function, call->text, (int)result,
                 probe != NULL && probe() ? " probed" : "");
        log_add(line);
    }
    emu_unlock();
    return result;
}

void
emu_log_clear(void)
{
    emu_lock();
    while (log_count > 0) {
        free(entries[log_first]);
        entries[log_first] = NULL;
        log_first = (log_first + 1) % LOG_LIMIT;
        log_count--;
    }
    emu_unlock();
}

size_t
emu_log_count(void)
{
    size_t count;

    emu_lock();
    count = log_count;
    emu_unlock();
    return count;
}

int
emu_log_entry(size_t i, char *text, size_t size)
{
    int length = -1;

    emu_lock();
    if (i < log_count) {
        length = snprintf(text, size, "%s", entries[(log_first + i) % LOG_LIMIT]);
    }
    emu_unlock();
    return length;
}

void
emu_log_verbose(int on)
{
    emu_lock();
    verbose = on != 0;
    emu_unlock();
}

void
emu_log_probe(int (*callback)(void))
{
    emu_lock();
    probe = callback;
    emu_unlock();
}

static bool
can_fail(const char *function)
{
    const char *name;

    if (strcmp(function, "*") == 0) {
        return true;
    }
    for (size_t i = 0; (name = emu_fail_name(i)) != NULL; i++) {
        if (strcmp(name, function) == 0) {
            return true;
        }
    }
    return false;
}

int
emu_fail(const char *function, unsigned int nth, int code, int flags)
{
    int status = -1;

    if (!can_fail(function)) {
        return -2;
    }
    emu_lock();
    if (nth > 0 && fault_count < FAULT_LIMIT) {
        snprintf(faults[fault_count].function, sizeof faults[0].function, "%s", function);
        faults[fault_count].countdown = nth;
        faults[fault_count].code = (CUresult)code;
        faults[fault_count].after = (flags & EMU_FAIL_AFTER) != 0;
        faults[fault_count].lasting = (flags & EMU_FAIL_LASTING) != 0;
        fault_count++;
        status = 0;
    }
    emu_unlock();
    return status;
}

void
emu_fail_clear(void)
{
    emu_lock();
    fault_count = 0;
    fault_fired = 0;
    lasting_fault = CUDA_SUCCESS;
    emu_unlock();
}

int
emu_fail_fired(void)
{
    int fired;

    emu_lock();
    fired = fault_fired;
    emu_unlock();
    return fired;
}
