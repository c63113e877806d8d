/* The functions of failing_allocations.h, and the allocation functions that the linker puts in
 * the place of the C library's. */
#include "failing_allocations.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *old);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void __wrap_free(void *old);

static atomic_long remaining, live, most;
static atomic_bool failed;

void
fail_allocation(long nth)
{
    atomic_store(&failed, false);
    atomic_store(&remaining, nth);
}

bool
allocation_has_failed(void)
{
    atomic_store(&remaining, 0);
    return atomic_load(&failed);
}

long
live_bytes(void)
{
    return atomic_load(&live);
}

long
most_live_bytes(void)
{
    return atomic_exchange(&most, atomic_load(&live));
}

static bool
fails_now(void)
{
    if (atomic_load(&remaining) > 0 && atomic_fetch_sub(&remaining, 1) == 1) {
        atomic_store(&failed, true);
        return true;
    }
    return false;
}

static void *
count_made(void *made)
{
    long now =
        atomic_fetch_add(&live, (long)malloc_usable_size(made)) + (long)malloc_usable_size(made);
    long before = atomic_load(&most);

    while (now > before && !atomic_compare_exchange_weak(&most, &before, now)) {
    }
    return made;
}

void *
__wrap_malloc(size_t size)
{
    return fails_now() ? NULL : count_made(__real_malloc(size));
}

void *
__wrap_calloc(size_t count, size_t size)
{
    return fails_now() ? NULL : count_made(__real_calloc(count, size));
}

void *
__wrap_realloc(void *old, size_t size)
{
    size_t before = malloc_usable_size(old);
    void *made;

    if (fails_now()) {
        return NULL;
    }
    made = __real_realloc(old, size);
    if (made != NULL) {
        atomic_fetch_sub(&live, (long)before);
    }
    return count_made(made);
}

void
__wrap_free(void *old)
{
    atomic_fetch_sub(&live, (long)malloc_usable_size(old));
    __real_free(old);
}
