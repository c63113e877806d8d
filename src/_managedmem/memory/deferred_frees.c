/* deferred_frees.c: the list of resources to be freed later. */
#include "deferred_frees.h"

#include <assert.h>

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
