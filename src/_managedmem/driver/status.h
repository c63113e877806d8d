/* status.h: how everything below Python reports failure.
 *
 * Every function that can fail returns 0 or -1 and fills a caller-owned mm_status. The first
 * failure wins; python/errors.c is the only place that turns a status into an exception. */
#ifndef MM_STATUS_H
#define MM_STATUS_H

#if defined(__GNUC__)
#define MM_NODISCARD __attribute__((warn_unused_result))
#define MM_PRINTF(f, a) __attribute__((format(printf, f, a)))
/* Keeps a function out of line: inlined, the text in its mm_status would give a stack protector to
 * its callers. */
#define MM_COLD __attribute__((cold, noinline))
#else
#define MM_NODISCARD
#define MM_PRINTF(f, a)
#define MM_COLD
#endif

/* Gives a stack protector to a function that fills an array by counts from outside. By itself the
 * compiler protects only functions with arrays of characters: a protector in every function would
 * cost the shortest calls 8 %. */
#define MM_GUARD_ARRAYS
#if defined(__has_attribute)
#if __has_attribute(stack_protect)
#undef MM_GUARD_ARRAYS
#define MM_GUARD_ARRAYS __attribute__((stack_protect))
#endif
#endif

/* Calls a function for its effect and ignores a failure; a comment at the call says why. */
#define MM_IGNORE(call) ((void)((call) == 0))

typedef enum {
    MM_OK = 0,
    MM_DRIVER_CALL, /* a driver call failed: `function` with `code` */
    MM_NO_DRIVER, /* no usable driver library, or one without a device */
    MM_DRIVER_TOO_OLD, /* the library exists, but is older than MM_DRIVER_FLOOR */
    MM_UNSUPPORTED, /* this driver lacks the entry point */
    MM_CAPTURING, /* the stream captures a graph */
    MM_BAD_VALUE, /* a wrong argument, refused before the driver was called */
    MM_NOT_MANAGED, /* like MM_BAD_VALUE: memory of a kind that the operation does not take here */
    MM_EXPORTED, /* the memory cannot be closed: a host view or DLPack export exists */
    MM_FORKED, /* the driver was opened before this process was forked */
    MM_NO_MEMORY, /* malloc failed */
    MM_REFUSED, /* not possible in the present state */
    MM_TRACE_UNAVAILABLE, /* no source of events works here */
    MM_TRACE_BUSY, /* a recording runs already */
    MM_SYSTEM_CALL /* the system refused a file: `function` is its path, `code` the errno */
} mm_kind;

typedef struct {
    mm_kind kind;
    /* CUresult for MM_DRIVER_CALL and MM_CAPTURING, errno for MM_SYSTEM_CALL, errno or the status
     * of the nvidia-uvm module for MM_TRACE_UNAVAILABLE where there is one; else 0. */
    int code;
    const char *function; /* static text such as "cuMemAdvise" or a path, or NULL */
    char detail[512]; /* the sentence for the user; can be empty for MM_DRIVER_CALL */
} mm_status;

/* True if the status stands for a ValueError. */
static inline int
mm_is_bad_argument(const mm_status *st)
{
    return st->kind == MM_BAD_VALUE || st->kind == MM_NOT_MANAGED;
}

/* Fills st and returns -1, so that callers can `return mm_fail(...)`. */
int mm_fail(mm_status *st, mm_kind kind, const char *format, ...) MM_PRINTF(3, 4);

/* mm_fail for a driver call that returned code (never 0). */
int mm_fail_call(mm_status *st, const char *function, int code);

/* mm_fail for a file that the system did not open or read; error is not 0. */
int mm_fail_file(mm_status *st, const char *path, int error);

/* Adds a sentence to a status that is already filled. */
void mm_status_add(mm_status *st, const char *format, ...) MM_PRINTF(2, 3);

#endif
