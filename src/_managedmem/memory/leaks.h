/* leaks.h: frees that the driver refused where no caller can raise. They are kept here until Python
 * reports them. */
#ifndef MM_LEAKS_H
#define MM_LEAKS_H

#include <stdbool.h>
#include <stddef.h>

#include "../driver/driver.h"

typedef struct mm_leak mm_leak;
struct mm_leak {
    mm_leak *next;
    int code;
    const char *function; /* the driver function that freed nothing */
    size_t size; /* bytes of memory; 0 for other resources, and where it is not known */
};

/* True if the resource is gone: freed, or with its context or its driver. */
bool mm_is_freed(CUresult code);

/* Notes a failed free, unless the resource is gone or is freed late. Safe from every thread, without
 * a lock. Beyond some notes that nobody took, further ones are dropped. */
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
