/* late_frees.c: the list of resources to be freed later. */
#include "late_frees.h"

static _Atomic(mm_late_free *) list;

static void
push(mm_late_free *entry)
{
    entry->next = atomic_load_explicit(&list, memory_order_relaxed);
    while (!atomic_compare_exchange_weak(&list, &entry->next, entry)) {
    }
}

void
mm_free_late(mm_late_free *entry, mm_attempt attempt)
{
    entry->attempt = attempt;
    push(entry);
}

/* Takes the whole list at once, so that no other thread attempts the same entry. */
void
mm_late_frees_attempt(mm_driver *cu, const mm_chance *chance)
{
    mm_late_free *entry, *next;

    if (atomic_load_explicit(&list, memory_order_relaxed) == NULL || mm_driver_forked()) {
        return;
    }
    for (entry = atomic_exchange(&list, NULL); entry != NULL; entry = next) {
        next = entry->next;
        if (!entry->attempt(cu, entry, chance)) {
            push(entry);
        }
    }
}
