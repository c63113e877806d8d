/* leaks.h: resources that could not be freed at their end. Some are freed later. The others leak,
 * because the driver refused the free where no caller can raise: notes of these leaks are kept here
 * until Python reports them.
 *
 * CUDA refuses to free inside a host function, where Python's garbage collector may run. A block of
 * a pool waits for the end of a capture, and a pool waits for its queued frees. A resource that is
 * freed later contains its list entry, so that deferring the free needs no allocation. */
#ifndef MM_LEAKS_H
#define MM_LEAKS_H

#include "../driver/driver.h"

/* --- freed later --- */

/* What the caller knows, which decides what can be freed. All zero: nothing is known. */
typedef struct {
    bool pools; /* retired pools are attempted too */
    bool idle; /* the caller has just waited for `device` */
    int device;
    CUstream stream; /* a stream of another library that exists now; or NULL */
} mm_free_conditions;

typedef struct mm_deferred_free mm_deferred_free;

/* True if the resource was freed, and the entry with it; false if it must wait. */
typedef bool (*mm_deferred_free_attempt)(mm_driver *cu, mm_deferred_free *entry,
                                         const mm_free_conditions *conditions);

/* The first member of a resource that can be freed late. */
struct mm_deferred_free {
    mm_deferred_free *next;
    mm_deferred_free_attempt attempt;
};

/* Appends an entry to the list. Safe from every thread, without a lock. */
void mm_deferred_frees_append(mm_deferred_free *entry, mm_deferred_free_attempt attempt);

/* Attempts every entry, and keeps those that must wait. Can block, so call it without the GIL.
 * Does nothing in a forked child, because the resources are the parent's. */
void mm_deferred_frees_attempt(mm_driver *cu, const mm_free_conditions *conditions);

/* True if the driver refused the free inside a host function, so that it can be done later. */
static inline bool
mm_can_defer_free(const mm_status *st)
{
    return st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_PERMITTED;
}

/* --- leaks --- */

typedef struct mm_leak mm_leak;
struct mm_leak {
    mm_leak *next;
    int code;
    const char *function; /* the driver function that freed nothing */
    size_t size; /* bytes of memory; 0 for other resources, and where it is not known */
};

/* True if the resource is gone: it was freed, or its context or its driver has ended. */
bool mm_is_freed(CUresult code);

/* Notes a failed free, unless the resource is gone or is freed later. Safe from every thread,
 * without a lock. The number of notes is limited: further notes are dropped until mm_leaks_take is
 * called. */
void mm_leak_note(CUresult code, const char *function, size_t size);

/* mm_leak_note for a status: only failures of functions that free are leaks. */
void mm_leak_note_status(const mm_status *st, size_t size);

/* True if there are notes. */
bool mm_leaks_are_known(void);

/* Takes all notes, oldest first, as a list that the caller frees one by one. */
mm_leak *mm_leaks_take(void);

/* The object that leaks if the function fails, such as "a stream". */
const char *mm_leaked_thing(const char *function);

#endif
