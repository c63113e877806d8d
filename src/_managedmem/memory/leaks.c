/* leaks.c: the list of frees that the driver refused where no caller can raise. */
#include "leaks.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NOTES = 256 };

static _Atomic(mm_leak *) leaks;
static atomic_int note_count;

/* Functions that free, and the objects that leak when they fail. */
static const struct {
    const char *function, *thing;
} things[] = {
    {"cuMemFree", "managed memory"},         {"cuMemFreeAsync", "memory of a pool"},
    {"cuMemFreeHost", "page-locked memory"}, {"cuStreamDestroy", "a stream"},
    {"cuMemPoolDestroy", "a memory pool"},
};

const char *
mm_leaked_thing(const char *function)
{
    for (size_t i = 0; i < sizeof things / sizeof *things; i++) {
        if (strcmp(things[i].function, function) == 0) {
            return things[i].thing;
        }
    }
    return NULL;
}

bool
mm_is_freed(CUresult code)
{
    return code == CUDA_SUCCESS || code == CUDA_ERROR_DEINITIALIZED
           || code == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

void
mm_leak_note(CUresult code, const char *function, size_t size)
{
    mm_leak *leak;

    assert(mm_leaked_thing(function) != NULL);
    if (mm_is_freed(code) || code == CUDA_ERROR_NOT_PERMITTED
        || atomic_load(&note_count) >= MOST_NOTES || (leak = malloc(sizeof *leak)) == NULL) {
        return;
    }
    *leak = (mm_leak){.code = (int)code, .function = function, .size = size};
    leak->next = atomic_load_explicit(&leaks, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&leaks, &leak->next, leak)) {
    }
    atomic_fetch_add(&note_count, 1);
}

void
mm_leak_note_status(const mm_status *st, size_t size)
{
    if (st->kind == MM_DRIVER_CALL && mm_leaked_thing(st->function) != NULL) {
        mm_leak_note((CUresult)st->code, st->function, size);
    }
}

bool
mm_leaks_are_known(void)
{
    return atomic_load_explicit(&leaks, memory_order_relaxed) != NULL;
}

mm_leak *
mm_leaks_take(void)
{
    mm_leak *leak = atomic_exchange(&leaks, NULL), *next, *oldest = NULL;

    for (; leak != NULL; leak = next) {
        next = leak->next;
        leak->next = oldest;
        oldest = leak;
        atomic_fetch_sub(&note_count, 1);
    }
    return oldest;
}
