/* status.c: filling status values. */
#include "status.h"

#include <assert.h>
#include <cuda.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int
mm_fail(mm_status *st, mm_kind kind, const char *format, ...)
{
    va_list args;

    assert(kind != MM_OK && kind != MM_DRIVER_CALL);
    st->kind = kind;
    st->code = kind == MM_CAPTURING ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : 0;
    st->function = NULL;
    va_start(args, format);
    (void)vsnprintf(st->detail, sizeof st->detail, format, args);
    va_end(args);
    return -1;
}

int
mm_fail_call(mm_status *st, const char *function, int code)
{
    assert(function != NULL && code != 0);
    st->kind = MM_DRIVER_CALL;
    st->code = code;
    st->function = function;
    st->detail[0] = '\0';
    return -1;
}

int
mm_fail_file(mm_status *st, const char *path, int error)
{
    assert(path != NULL && error != 0);
    st->kind = MM_SYSTEM_CALL;
    st->code = error;
    st->function = path;
    st->detail[0] = '\0';
    return -1;
}

void
mm_status_add(mm_status *st, const char *format, ...)
{
    va_list args;
    size_t used = strlen(st->detail);

    assert(st->kind != MM_OK && used < sizeof st->detail);
    if (used > 0 && used + 1 < sizeof st->detail) {
        st->detail[used++] = ' ';
    }
    va_start(args, format);
    (void)vsnprintf(st->detail + used, sizeof st->detail - used, format, args);
    va_end(args);
}
