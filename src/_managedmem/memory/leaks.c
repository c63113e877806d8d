/* leaks.c: resources that could not be freed at their end: the list of those to be freed later, and
 * the notes of those that leak. */
#include "leaks.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* --- freed later ------------------------------------------------------------------------- */

static _Atomic(mm_deferred_free *) deferred_frees;

static void
push_deferred_free(mm_deferred_free *entry)
{
    entry->next = atomic_load_explicit(&deferred_frees, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&deferred_frees, &entry->next, entry)) {
    }
}

void
mm_deferred_frees_append(mm_deferred_free *entry, mm_deferred_free_attempt attempt)
{
    assert(attempt != NULL);
    entry->attempt = attempt;
    push_deferred_free(entry);
}

/* Takes the whole list at once, so that no other thread attempts the same entry. */
void
mm_deferred_frees_attempt(mm_driver *cu, const mm_free_conditions *conditions)
{
    mm_deferred_free *entry, *next;

    assert(conditions != NULL && conditions->device >= 0);
    if (atomic_load_explicit(&deferred_frees, memory_order_relaxed) == NULL
        || mm_driver_forked()) {
        return;
    }
    for (entry = atomic_exchange(&deferred_frees, NULL); entry != NULL; entry = next) {
        next = entry->next;
        if (!entry->attempt(cu, entry, conditions)) {
            push_deferred_free(entry);
        }
    }
}

/* --- leaks ------------------------------------------------------------------------------- */

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
