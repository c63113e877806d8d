/* memory.c: memory with references and a guard: allocating, wrapping, sharing, closing. */
#include "memory.h"

#include <assert.h>
#include <stdlib.h>

#include "../driver/clock.h"

/* --- making ----------------------------------------------------------------------------- */

/* With malloc, because glibc's calloc is slow for a struct of this size. */
static mm_memory *
new_memory(CUdeviceptr start, size_t size, mm_status *st)
{
    mm_memory *m = malloc(sizeof *m);

    if (m == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    *m = (mm_memory){
        .start = start,
        .size = size,
        .device = MM_ANY_DEVICE,
        .order_lock = ATOMIC_FLAG_INIT,
        .entry = {.start = start, .size = size, .device = MM_NO_DEVICE},
    };
    atomic_init(&m->references, 1);
    atomic_init(&m->holds, 1);
    return m;
}

mm_memory *
mm_memory_wrap(CUdeviceptr start, size_t size, mm_status *st)
{
    mm_memory *m = new_memory(start, size, st);

    if (m != NULL && mm_allocations_are_logged()) {
        m->entry.born = mm_raw_clock(); /* for the log, if the memory gets a name */
    }
    return m;
}

void
mm_memory_add_entry(mm_memory *m)
{
    assert(!m->owned);
    if (m->size > 0) {
        m->entry.source = MM_FROM_OTHERS;
        mm_allocation_entry_add(&m->entry, m->start, m->size);
    }
}

mm_memory *
mm_memory_allocate(mm_driver *cu, size_t size, CUmemAttach_flags to, mm_status *st)
{
    mm_memory *m = new_memory(0, size, st);
    CUdeviceptr allocation = 0;

    if (m == NULL) {
        return NULL;
    }
    m->owned = true;
    if (to == CU_MEM_ATTACH_HOST) {
        m->attachment = (mm_attachment){.to = to, .in_force = true};
    }
    if (size == 0) {
        return m;
    }
    mm_deferred_frees_attempt(cu, &(mm_free_conditions){0});
    m->start = mm_allocate_pages(cu, size, to, &allocation, st);
    if (m->start == 0) {
        free(m);
        return NULL;
    }
    atomic_store(&m->allocation, allocation);
    m->entry.source = MM_FROM_DRIVER;
    mm_allocation_entry_add(&m->entry, m->start, mm_whole_pages(size));
    return m;
}

mm_memory *
mm_memory_allocate_from(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream,
                        mm_stream *shared, mm_status *st)
{
    mm_memory *m = new_memory(0, size, st);

    if (m == NULL) {
        return NULL;
    }
    m->owned = true;
    m->device = mm_pool_device(pool);
    if (size == 0) {
        return m;
    }
    size = pool->managed ? mm_whole_pages(size) : size;
    m->block = mm_pool_allocate(cu, pool, size, stream, shared, st);
    if (m->block == NULL) {
        free(m);
        return NULL;
    }
    m->pooled = true;
    m->entry.source = pool->managed ? MM_FROM_MANAGED_POOL : MM_FROM_DEVICE_POOL;
    m->entry.device = mm_pool_location_device(pool);
    m->start = m->block->start;
    atomic_store(&m->allocation, pool->managed ? m->start : 0);
    mm_allocation_entry_add(&m->entry, m->start, size);
    return m;
}

int
mm_memory_check(mm_driver *cu, mm_memory *m, mm_operation op, mm_status *st)
{
    mm_range whole = {.start = m->start, .size = m->size};

    assert(atomic_load(&m->references) > 0);
    if (atomic_load_explicit(&m->allocation, memory_order_relaxed) != 0 || op == MM_WAIT
        || (op == MM_COPY && m->device != MM_ANY_DEVICE)) {
        return 0;
    }
    if (mm_range_check(cu, &whole, op, st) < 0) {
        return -1;
    }
    atomic_store_explicit(&m->allocation, whole.allocation, memory_order_relaxed);
    return 0;
}

/* --- references and holds --------------------------------------------------------------- */

void
mm_memory_retain(mm_memory *m)
{
    assert(atomic_load(&m->references) > 0 && atomic_load(&m->holds) > 0);
    atomic_fetch_add_explicit(&m->references, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&m->holds, 1, memory_order_relaxed);
}

bool
mm_memory_release_hold(mm_memory *m)
{
    assert(atomic_load(&m->holds) > 0);
    return atomic_fetch_sub_explicit(&m->holds, 1, memory_order_acq_rel) == 1;
}

void
mm_memory_release_reference(mm_memory *m)
{
    assert(atomic_load(&m->references) > 0);
    if (atomic_fetch_sub_explicit(&m->references, 1, memory_order_acq_rel) == 1) {
        assert(atomic_load(&m->holds) == 0);
        mm_allocation_entry_free(&m->entry, m);
    }
}

/* --- closing ---------------------------------------------------------------------------- */

static int
free_allocation(mm_memory *m, const CUstream *stream, mm_status *st)
{
    mm_driver *cu = mm_driver_usable();

    if (m->block != NULL) {
        int rc = mm_pool_free(m->block, stream, st);
        if (rc == 0 || !mm_can_defer_free(st)) {
            m->block = NULL;
        }
        return rc;
    }
    /* A forked child does not own its parent's memory; 0 bytes were not allocated. */
    if (!m->owned || m->size == 0 || cu == NULL) {
        return 0;
    }
    return mm_free(cu, atomic_load(&m->allocation), st);
}

/* The entry ends after the free, which waits for work that still moves the memory. By then another
 * thread may have got the address, in an entry with a higher serial. If the free was refused inside
 * a host function, the entry stays, because the memory is used further or freed later. */
static int
free_owned(mm_memory *m, const CUstream *stream, mm_status *st)
{
    int rc;

    assert(mm_guard_is_closed(&m->guard));
    rc = free_allocation(m, stream, st);
    if (rc == 0 || !mm_can_defer_free(st)) {
        mm_attachment_end(&m->attachment);
        mm_allocation_entry_end(&m->entry);
    }
    return rc;
}

/* Calls can be under way only through another reference. */
bool
mm_memory_closing_blocks(const mm_memory *m)
{
    return (m->owned || atomic_load_explicit(&m->references, memory_order_acquire) > 1)
           && !mm_guard_is_closed(&m->guard);
}

/* Closes the guard and frees; *first is true if this call closed it. */
static int
close_and_free(mm_memory *m, const CUstream *stream, bool *first, mm_status *st)
{
    mm_guard_answer answer = mm_guard_close(&m->guard, mm_driver_forked());

    *first = answer == MM_CLOSED_NOW;
    if (answer == MM_STILL_EXPORTED) {
        return mm_fail(st, MM_EXPORTED,
                       "ManagedBuffer cannot be closed: %u view(s) of its memory still live "
                       "(memoryview, NumPy array or DLPack tensor); release them first",
                       mm_guard_exports(&m->guard));
    }
    if (answer == MM_STILL_USED) {
        return mm_fail_still_used(st);
    }
    return *first ? free_owned(m, stream, st) : 0;
}

/* A successful free shows that the driver permits frees now. */
static void
attempt_deferred_frees(const mm_memory *m)
{
    mm_driver *cu = mm_driver_peek();

    if (m->owned && cu != NULL) {
        mm_deferred_frees_attempt(cu, &(mm_free_conditions){0});
    }
}

static void
defer_pool_block(mm_memory *m)
{
    mm_pool_block *block = m->block;

    assert(mm_guard_is_closed(&m->guard));
    mm_allocation_entry_end(&m->entry);
    m->block = NULL;
    mm_pool_defer_free(block);
}

/* Notes the leak unless the memory is gone: the driver does not know its address any more, because
 * its context was destroyed. */
static void
note_leak(const mm_memory *m, const mm_status *st)
{
    mm_driver *cu = mm_driver_usable();
    mm_pointer_attributes attributes;
    mm_status ignored;
    bool gone = cu != NULL && st->code == CUDA_ERROR_INVALID_VALUE
                && mm_pointer_query(cu, m->start, &attributes, &ignored) == 0
                && !attributes.managed && attributes.type == 0;

    if (!gone) {
        mm_leak_note_status(st, m->size);
    }
}

static bool
attempt_memory(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
{
    mm_memory *m = (mm_memory *)entry;
    mm_status st;

    (void)cu;
    (void)conditions;
    assert(atomic_load(&m->references) > 0);
    if (!mm_guard_is_closed(&m->guard)
        && mm_guard_close(&m->guard, false) != MM_CLOSED_NOW) { /* raced */
        return false; /* raced */
    }
    if (m->block != NULL) {
        defer_pool_block(m);
    } else if (free_owned(m, NULL, &st) < 0) {
        if (mm_can_defer_free(&st)) {
            return false;
        }
        note_leak(m, &st);
    }
    mm_memory_release_reference(m);
    return true;
}

/* The block of closed pool memory is deferred by its own entry. Other memory is deferred with a
 * reference to it, and attempt_memory closes the guard if calls of other threads were under way. */
static void
defer_memory(mm_memory *m)
{
    if (m->block != NULL && mm_guard_is_closed(&m->guard)) {
        defer_pool_block(m);
    } else {
        atomic_fetch_add_explicit(&m->references, 1, memory_order_relaxed);
        mm_deferred_frees_append(&m->deferred, attempt_memory);
    }
}

void
mm_memory_retire(mm_memory *m)
{
    mm_status st;
    bool first;

    assert(atomic_load(&m->holds) == 0);
    if (!mm_memory_closing_blocks(m)) {
        if (!mm_guard_is_closed(&m->guard)) {
            mm_allocation_entry_end(&m->entry); /* of wrapped memory; the struct can stay longer */
        }
        return;
    }
    if (close_and_free(m, NULL, &first, &st) == 0) {
        attempt_deferred_frees(m);
    } else if (mm_can_defer_free(&st)) {
        defer_memory(m);
    } else {
        note_leak(m, &st);
    }
}

void
mm_memory_release(mm_memory *m)
{
    if (mm_memory_release_hold(m)) {
        mm_memory_retire(m);
    }
    mm_memory_release_reference(m);
}

int
mm_memory_close(mm_memory *m, const CUstream *stream, bool *first, mm_status *st)
{
    int rc = close_and_free(m, stream, first, st);

    if (rc == 0) {
        attempt_deferred_frees(m);
    } else if (*first && mm_can_defer_free(st)) {
        mm_guard_reopen(&m->guard);
        *first = false;
    }
    return rc;
}

/* The entry resumes first: from the reopening on, another thread can end it. */
void
mm_memory_reopen(mm_memory *m)
{
    assert(!m->owned);
    mm_allocation_entry_resume(&m->entry);
    mm_guard_reopen(&m->guard);
}

/* --- the name --------------------------------------------------------------------------- */

int
mm_memory_set_name(mm_memory *m, const char *name, bool *done, mm_status *st)
{
    int rc;

    *done = mm_guard_enter(&m->guard);
    if (!*done) {
        return 0;
    }
    rc = mm_allocation_entry_set_name(&m->entry, name, st);
    mm_guard_leave(&m->guard);
    return rc;
}

/* --- the stream of pool memory ---------------------------------------------------------- */

/* The guard must be entered, so that no other thread frees the block. */
static void
lock_order(mm_memory *m)
{
    int round = 0;

    assert(mm_guard_is_entered(&m->guard) && m->block != NULL);
    while (atomic_flag_test_and_set_explicit(&m->order_lock, memory_order_acquire)) { /* raced */
        mm_pause(round++);
    }
}

static void
unlock_order(mm_memory *m)
{
    atomic_flag_clear_explicit(&m->order_lock, memory_order_release);
}

static void
release_order(const mm_block_order *order)
{
    if (order->shared != NULL) {
        mm_stream_drop(order->shared);
    }
}

static int
refuse_capture_of_order(mm_driver *cu, mm_memory *m, mm_status *st)
{
    mm_block_order order;
    int rc;

    lock_order(m);
    order = m->block->order;
    if (order.shared != NULL) {
        mm_stream_retain(order.shared);
    }
    unlock_order(m);
    rc = mm_pool_refuse_capture(cu, mm_block_stream(cu, &order), st);
    release_order(&order);
    return rc;
}

int
mm_memory_refuse_capture(mm_driver *cu, mm_memory *m, const CUstream *stream, mm_status *st)
{
    int rc;

    assert(m->pooled);
    if (!mm_guard_enter(&m->guard)) {
        return 0;
    }
    rc = stream ? mm_pool_refuse_capture(cu, (mm_device_stream){*stream, m->device}, st)
                : refuse_capture_of_order(cu, m, st);
    mm_guard_leave(&m->guard);
    return rc;
}

int
mm_memory_set_stream(mm_driver *cu, mm_memory *m, CUstream stream, mm_stream *shared, bool *done,
                     mm_status *st)
{
    mm_block_order order = {{mm_is_default_stream(stream) ? NULL : stream, m->device}, shared, 0};
    mm_block_order before;

    assert(m->pooled && (shared == NULL || shared->handle == stream));
    if (m->device == MM_ANY_DEVICE && order.stream.handle == NULL
        && mm_current_device(cu, &order.stream.device, st) < 0) {
        return -1;
    }
    mm_block_order_identify(cu, &order);
    *done = mm_guard_enter(&m->guard);
    if (!*done) {
        return 0;
    }
    if (shared != NULL) {
        mm_stream_retain(shared);
    }
    lock_order(m);
    before = m->block->order;
    m->block->order = order;
    unlock_order(m);
    mm_guard_leave(&m->guard);
    release_order(&before);
    return 0;
}
