/* allocation_log.c: the process-wide list of memories and its lock, the counts of memories, and the
 * log, in which the entries of dead memory stay. */
#include "allocation_log.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../driver/clock.h"
#include "labels.h"

#define ALIVE UINT64_MAX /* in `died` */

enum { BATCH = 16 }; /* entries that are removed during one hold of the lock */

typedef struct {
    mm_allocation_entry *first, *last;
    size_t count;
} entry_list;

static struct {
    atomic_flag lock;
    entry_list listed; /* the dead included */
    entry_list unlogged; /* entries that missed the log that runs */
    mm_allocation_entry *dead; /* linked by next_dead */
    uint64_t serial;
    uint64_t log_started;
    uint64_t log; /* the number of the log that runs, or of the next one, from 1 */
    size_t room; /* births until the log is full */
    uint64_t missed; /* births since the log was full */
    mm_memory_tally tally;
} allocations = {.lock = ATOMIC_FLAG_INIT, .log = 1};

atomic_bool mm_allocations_logged; /* changed while the lock is held */
atomic_size_t mm_managed_bytes; /* the same */

/* Not a mutex, which would double the cost of a birth and a death: the lock is held for a few
 * instructions. */
static inline void
lock_list(void)
{
    for (int round = 0; atomic_flag_test_and_set_explicit(&allocations.lock, memory_order_acquire);
         round++) {
        mm_pause(round);
    }
}

static inline void
unlock_list(void)
{
    atomic_flag_clear_explicit(&allocations.lock, memory_order_release);
}

/* Puts the entries that missed the log behind the others, which began earlier. The caller holds the
 * lock. */
static void
end_log(void)
{
    entry_list *all = &allocations.listed, *unlogged = &allocations.unlogged;

    atomic_store(&mm_allocations_logged, false);
    if (unlogged->first != NULL) {
        unlogged->first->previous = all->last;
        *(all->last != NULL ? &all->last->next : &all->first) = unlogged->first;
        all->last = unlogged->last;
        all->count += unlogged->count;
    }
    *unlogged = (entry_list){0};
    allocations.log++;
}

/* --- the list: the caller holds the lock ------------------------------------------------ */

static bool
missed_log(const mm_allocation_entry *entry)
{
    return entry->missed_log == allocations.log;
}

static entry_list *
list_of(const mm_allocation_entry *entry)
{
    return missed_log(entry) ? &allocations.unlogged : &allocations.listed;
}

static void
append_entry(mm_allocation_entry *entry)
{
    entry_list *list = list_of(entry);

    assert(!entry->listed);
    entry->listed = true;
    entry->previous = list->last;
    entry->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = entry;
    list->last = entry;
    list->count++;
}

static void
remove_entry(mm_allocation_entry *entry)
{
    entry_list *list = list_of(entry);

    assert(entry->listed && list->count > 0);
    entry->listed = false;
    *(entry->previous != NULL ? &entry->previous->next : &list->first) = entry->next;
    *(entry->next != NULL ? &entry->next->previous : &list->last) = entry->previous;
    list->count--;
}

static bool
is_managed(const mm_allocation_entry *entry)
{
    return entry->source == MM_FROM_DRIVER || entry->source == MM_FROM_MANAGED_POOL;
}

static size_t
managed_bytes(void)
{
    return atomic_load_explicit(&mm_managed_bytes, memory_order_relaxed);
}

static void
count_begin(const mm_allocation_entry *entry, bool again)
{
    mm_tally_begin(&allocations.tally, entry->source, entry->device, entry->size, again);
    if (is_managed(entry)) {
        atomic_store_explicit(&mm_managed_bytes, managed_bytes() + entry->size,
                              memory_order_relaxed);
    }
}

static void
count_end(const mm_allocation_entry *entry)
{
    mm_tally_end(&allocations.tally, entry->source, entry->device, entry->size);
    if (is_managed(entry)) {
        atomic_store_explicit(&mm_managed_bytes, managed_bytes() - entry->size,
                              memory_order_relaxed);
    }
}

static void
add_new_entry(mm_allocation_entry *entry)
{
    assert(entry->serial == 0);
    count_begin(entry, false);
    entry->serial = ++allocations.serial;
    entry->died = ALIVE;
    entry->alive = true;
    if (mm_allocations_are_logged() && allocations.room == 0) {
        entry->missed_log = allocations.log;
        allocations.missed++;
    } else if (mm_allocations_are_logged()) {
        allocations.room--;
    }
    append_entry(entry);
}

/* --- fork --------------------------------------------------------------------------------- */

/* The recording is the parent's. */
static void
forget_log_in_child(void)
{
    end_log();
    unlock_list();
}

/* Runs when this library is loaded, before any thread can hold the lock. */
static void register_fork_handlers(void) __attribute__((constructor));

static void
register_fork_handlers(void)
{
    (void)pthread_atfork(lock_list, unlock_list, forget_log_in_child);
}

/* --- births and deaths ------------------------------------------------------------------ */

void
mm_allocation_entry_add(mm_allocation_entry *entry, CUdeviceptr start, size_t size)
{
    assert(start != 0 && size > 0);
    entry->start = start;
    entry->size = size;
    entry->born = mm_raw_clock();
    lock_list();
    add_new_entry(entry);
    unlock_list();
}

void
mm_allocation_entry_end_listed(mm_allocation_entry *entry)
{
    lock_list();
    assert(entry->alive);
    entry->alive = false;
    count_end(entry);
    if (!mm_allocations_are_logged() || missed_log(entry)) {
        entry->died = 0;
        remove_entry(entry);
    } else {
        entry->died = mm_raw_clock();
        entry->kept = true;
        if (!entry->dead) { /* else it ended before, and resumed */
            entry->dead = true;
            entry->next_dead = allocations.dead;
            allocations.dead = entry;
        }
    }
    unlock_list();
}

void
mm_allocation_entry_resume(mm_allocation_entry *entry)
{
    if (entry->serial == 0) {
        return;
    }
    lock_list();
    assert(!entry->alive);
    entry->alive = true;
    entry->died = ALIVE;
    count_begin(entry, true);
    if (!entry->listed) {
        append_entry(entry);
    }
    unlock_list();
}

static void
free_container(mm_allocation_entry *entry, void *container)
{
    free(entry->name);
    free(container);
}

/* Leaves the container to the log, unless the log has ended since the entry did. */
static void
free_kept(mm_allocation_entry *entry, void *container)
{
    bool in_log;

    lock_list();
    in_log = entry->dead;
    if (in_log) {
        entry->container = container;
    }
    unlock_list();
    if (!in_log) {
        free_container(entry, container);
    }
}

void
mm_allocation_entry_free(mm_allocation_entry *entry, void *container)
{
    assert(container != NULL);
    mm_allocation_entry_end(entry);
    if (entry->kept) {
        free_kept(entry, container);
    } else {
        free_container(entry, container);
    }
}

/* --- descriptions and names ------------------------------------------------------------- */

void
mm_allocation_entry_describe(mm_allocation_entry *entry, const char *dtype, int dimensions,
                             const int64_t *shape)
{
    assert(!atomic_load(&entry->described) && dtype != NULL && dimensions >= 0);
    entry->dtype = dtype;
    entry->dimensions = dimensions;
    for (int i = 0; i < dimensions && i < MM_LABEL_DIMENSIONS; i++) {
        entry->shape[i] = shape[i];
    }
    atomic_store_explicit(&entry->described, true, memory_order_release);
}

int
mm_allocation_entry_set_name(mm_allocation_entry *entry, const char *name, mm_status *st)
{
    char *copy = NULL, *before;

    assert(name == NULL || strlen(name) <= MM_NAME_BYTES);
    if (name != NULL && (copy = mm_copy_text(name)) == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory");
    }
    lock_list();
    before = entry->name;
    entry->name = copy;
    if (entry->serial == 0 && entry->size > 0 && copy != NULL) {
        add_new_entry(entry);
    }
    unlock_list();
    free(before);
    return 0;
}

/* The caller holds the lock, which protects the name. */
static bool
copy_name(const mm_allocation_entry *entry, char name[MM_NAME_BYTES + 1])
{
    name[0] = '\0';
    if (entry->name == NULL) {
        return false;
    }
    memcpy(name, entry->name, strlen(entry->name) + 1);
    return true;
}

bool
mm_allocation_entry_read_name(mm_allocation_entry *entry, char name[MM_NAME_BYTES + 1])
{
    bool named;

    lock_list();
    named = copy_name(entry, name);
    unlock_list();
    return named;
}

/* --- the memories that live ------------------------------------------------------------- */

void
mm_allocation_counts_read(mm_memory_tally *tally, bool reset_peaks)
{
    lock_list();
    *tally = allocations.tally;
    if (reset_peaks) {
        mm_tally_reset_peaks(&allocations.tally);
    }
    unlock_list();
}

/* A copy of an entry, made while the lock was held. */
typedef struct {
    mm_allocation_entry entry; /* only what makes its label */
    mm_living_memory memory; /* without its label */
    char name[MM_NAME_BYTES + 1];
} living_draft;

static void
draft_living(const mm_allocation_entry *entry, living_draft *d)
{
    bool described = atomic_load_explicit(&entry->described, memory_order_acquire);

    d->memory = (mm_living_memory){.start = entry->start,
                                   .size = entry->size,
                                   .serial = entry->serial,
                                   .born = entry->born,
                                   .source = entry->source,
                                   .device = entry->device};
    d->entry.size = entry->size;
    d->entry.serial = entry->serial;
    if (described) {
        d->entry.dtype = entry->dtype;
        d->entry.dimensions = entry->dimensions;
        memcpy(d->entry.shape, entry->shape, sizeof d->entry.shape);
    }
    atomic_init(&d->entry.described, described);
    (void)copy_name(entry, d->name);
}

/* Drafts the entries of a list that live and are counted, as many as there is room for. Returns the
 * number of all of these entries. The caller holds the lock. */
static size_t
draft_list(const entry_list *list, living_draft *drafts, size_t room)
{
    size_t count = 0;

    for (const mm_allocation_entry *entry = list->first; entry != NULL; entry = entry->next) {
        if (!entry->alive || entry->source == MM_FROM_NOWHERE) {
            continue;
        }
        if (count < room) {
            draft_living(entry, &drafts[count]);
        }
        count++;
    }
    return count;
}

/* Returns drafts of all memories that live, for the caller to free; NULL on failure. *count becomes
 * their number. */
static living_draft *
draft_all(size_t *count, mm_status *st)
{
    living_draft *drafts = NULL;
    size_t room = 0;

    *count = 1;
    while (*count > room) {
        free(drafts);
        room = *count + *count / 8; /* some more, for memories that begin meanwhile */
        drafts = calloc(room, sizeof *drafts);
        if (drafts == NULL) {
            (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
            return NULL;
        }
        lock_list();
        *count = draft_list(&allocations.listed, drafts, room);
        *count += draft_list(&allocations.unlogged, drafts + (*count < room ? *count : room),
                             *count < room ? room - *count : 0);
        unlock_list();
    }
    return drafts;
}

int
mm_living_memories_copy(mm_living_memory **out, size_t *count, mm_status *st)
{
    living_draft *drafts = draft_all(count, st);
    size_t filled = 0;

    *out = drafts != NULL ? calloc(*count + 1, sizeof **out) : NULL;
    for (; *out != NULL && filled < *count; filled++) {
        (*out)[filled] = drafts[filled].memory;
        (*out)[filled].label =
            mm_allocation_entry_label(&drafts[filled].entry, drafts[filled].name);
        if ((*out)[filled].label == NULL) {
            mm_living_memories_free(*out, filled);
            *out = NULL;
        }
    }
    free(drafts);
    return *out != NULL ? 0 : mm_fail(st, MM_NO_MEMORY, "out of host memory");
}

void
mm_living_memories_free(mm_living_memory *memories, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(memories[i].label);
    }
    free(memories);
}

/* --- the log --------------------------------------------------------------------------- */

/* An entry as it was while the lock was held. */
typedef struct {
    mm_allocation_record record; /* without its label */
    const mm_allocation_entry *entry;
    char name[MM_NAME_BYTES + 1]; /* empty if the entry has none */
} draft;

/* Takes some entries out of the list of the dead, and out of the list of memories unless they have
 * resumed. Called while no log runs. Returns the entries whose container is to be freed, linked by
 * next_dead; the other entries still belong to their memory. *done is true if no dead entry is
 * left. */
static mm_allocation_entry *
take_dead(bool *done)
{
    mm_allocation_entry *to_free = NULL;

    lock_list();
    assert(!mm_allocations_are_logged());
    for (int i = 0; i < BATCH && allocations.dead != NULL; i++) {
        mm_allocation_entry *entry = allocations.dead;
        allocations.dead = entry->next_dead;
        entry->dead = false;
        if (entry->died != ALIVE && entry->listed) {
            remove_entry(entry);
        }
        if (entry->container != NULL) {
            entry->next_dead = to_free;
            to_free = entry;
        }
    }
    *done = allocations.dead == NULL;
    unlock_list();
    return to_free;
}

static void
free_dead(void)
{
    bool done;

    do {
        mm_allocation_entry *entry = take_dead(&done), *next;
        for (; entry != NULL; entry = next) {
            next = entry->next_dead;
            free_container(entry, entry->container);
        }
    } while (!done);
}

int
mm_allocation_log_start(size_t births, mm_status *st)
{
    if (mm_allocations_are_logged()) {
        return mm_fail(st, MM_REFUSED, "a recording of memories is already running");
    }
    free_dead(); /* in a forked child: the dead of the parent's log */
    lock_list();
    allocations.log_started = mm_raw_clock();
    allocations.room = births;
    allocations.missed = 0;
    atomic_store(&mm_allocations_logged, true);
    unlock_list();
    return 0;
}

size_t
mm_allocation_log_count(void)
{
    size_t count;

    lock_list();
    count = allocations.listed.count;
    unlock_list();
    return count;
}

uint64_t
mm_allocation_log_missed(void)
{
    uint64_t missed;

    lock_list();
    missed = allocations.missed;
    unlock_list();
    return missed;
}

static bool
is_pooled(const mm_allocation_entry *entry)
{
    return entry->source == MM_FROM_MANAGED_POOL || entry->source == MM_FROM_DEVICE_POOL;
}

/* Copies the entry behind `after`, or the first entry if that is NULL. False if there is none. An
 * entry stays in the list while the lock is released, because the log runs. */
static bool
draft_next(const mm_allocation_entry *after, draft *d)
{
    const mm_allocation_entry *entry;

    lock_list();
    assert(mm_allocations_are_logged());
    entry = after ? after->next : allocations.listed.first;
    d->entry = entry;
    if (entry != NULL) {
        bool before = entry->born < allocations.log_started;
        d->record = (mm_allocation_record){.start = entry->start,
                                           .size = entry->size,
                                           .born = before ? 0 : entry->born,
                                           .died = entry->died,
                                           .serial = entry->serial,
                                           .pooled = is_pooled(entry)};
        (void)copy_name(entry, d->name);
    }
    unlock_list();
    return entry != NULL;
}

/* Fills at most `capacity` records, and adds their number to *filled. */
static int
fill_records(mm_allocation_record *records, size_t capacity, size_t *filled, mm_status *st)
{
    draft d = {0};

    while (*filled < capacity && draft_next(d.entry, &d)) {
        d.record.label = mm_allocation_entry_label(d.entry, d.name);
        if (d.record.label == NULL) {
            return mm_fail(st, MM_NO_MEMORY, "out of host memory");
        }
        records[(*filled)++] = d.record;
    }
    return 0;
}

int
mm_allocation_log_copy(mm_allocation_record **out, size_t *count, mm_status *st)
{
    size_t capacity = mm_allocation_log_count(), filled = 0;
    mm_allocation_record *records;

    *out = NULL;
    *count = 0;
    if (!mm_allocations_are_logged()) {
        return mm_fail(st, MM_REFUSED, "no recording of memories is running");
    }
    records = calloc(capacity > 0 ? capacity : 1, sizeof *records);
    if (records == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory");
    }
    if (fill_records(records, capacity, &filled, st) < 0) {
        mm_allocation_records_free(records, filled);
        return -1;
    }
    *out = records;
    *count = filled;
    return 0;
}

void
mm_allocation_records_free(mm_allocation_record *records, size_t count)
{
    for (size_t i = 0; records != NULL && i < count; i++) {
        free(records[i].label);
    }
    free(records);
}

void
mm_allocation_log_stop(void)
{
    if (!mm_allocations_are_logged()) {
        return;
    }
    lock_list();
    end_log();
    unlock_list();
    free_dead();
}
