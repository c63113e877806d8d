/* allocation_log.c: the process-wide list of lives, its lock, and the log that dead lives stay in. */
#include "allocation_log.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../driver/clock.h"
#include "labels.h"

#define LIVES UINT64_MAX /* in `died` */

enum { BATCH = 16 }; /* lives that are removed during one hold of the lock */

typedef struct {
    mm_life *first, *last;
    size_t count;
} life_list;

static struct {
    atomic_flag lock;
    life_list listed; /* the dead included */
    life_list unlogged; /* that missed the log that runs */
    mm_life *dead; /* linked by next_dead */
    uint64_t serial;
    uint64_t log_started;
    uint64_t log; /* the number of the log that runs, or of the next one, from 1 */
    size_t room; /* births until it is full */
    uint64_t missed; /* births behind that */
} lives = {.lock = ATOMIC_FLAG_INIT, .log = 1};

atomic_bool mm_lives_logged; /* changed while the lock is held */

/* Not a mutex, which would double the cost of a birth and a death: the lock is held for a few
 * instructions. */
static inline void
lock_lives(void)
{
    for (int round = 0; atomic_flag_test_and_set_explicit(&lives.lock, memory_order_acquire);
         round++) {
        mm_pause(round);
    }
}

static inline void
unlock_lives(void)
{
    atomic_flag_clear_explicit(&lives.lock, memory_order_release);
}

/* Puts the lives that missed the log behind the others, which began earlier. The caller holds the lock. */
static void
end_log(void)
{
    life_list *all = &lives.listed, *unlogged = &lives.unlogged;

    atomic_store(&mm_lives_logged, false);
    if (unlogged->first != NULL) {
        unlogged->first->previous = all->last;
        *(all->last != NULL ? &all->last->next : &all->first) = unlogged->first;
        all->last = unlogged->last;
        all->count += unlogged->count;
    }
    *unlogged = (life_list){0};
    lives.log++;
}

/* --- the list: the caller holds the lock ------------------------------------------------ */

static bool
missed_log(const mm_life *life)
{
    return life->missed_log == lives.log;
}

static life_list *
list_of(const mm_life *life)
{
    return missed_log(life) ? &lives.unlogged : &lives.listed;
}

static void
append_life(mm_life *life)
{
    life_list *list = list_of(life);

    assert(!life->listed);
    life->listed = true;
    life->previous = list->last;
    life->next = NULL;
    *(list->last != NULL ? &list->last->next : &list->first) = life;
    list->last = life;
    list->count++;
}

static void
remove_life(mm_life *life)
{
    life_list *list = list_of(life);

    assert(life->listed && list->count > 0);
    life->listed = false;
    *(life->previous != NULL ? &life->previous->next : &list->first) = life->next;
    *(life->next != NULL ? &life->next->previous : &list->last) = life->previous;
    list->count--;
}

static void
add_new_life(mm_life *life)
{
    assert(life->serial == 0);
    life->serial = ++lives.serial;
    life->died = LIVES;
    life->alive = true;
    if (mm_lives_are_logged() && lives.room == 0) {
        life->missed_log = lives.log;
        lives.missed++;
    } else if (mm_lives_are_logged()) {
        lives.room--;
    }
    append_life(life);
}

/* --- fork --------------------------------------------------------------------------------- */

/* The recording is the parent's. */
static void
forget_log_in_child(void)
{
    end_log();
    unlock_lives();
}

/* Runs when this library is loaded, before any thread can hold the lock. */
static void register_fork_handlers(void) __attribute__((constructor));

static void
register_fork_handlers(void)
{
    (void)pthread_atfork(lock_lives, unlock_lives, forget_log_in_child);
}

/* --- births and deaths ------------------------------------------------------------------ */

void
mm_life_begin(mm_life *life, CUdeviceptr start, size_t size)
{
    assert(start != 0 && size > 0);
    life->start = start;
    life->size = size;
    life->born = mm_lives_are_logged() ? mm_raw_clock() : 0;
    lock_lives();
    add_new_life(life);
    unlock_lives();
}

void
mm_life_end_listed(mm_life *life)
{
    lock_lives();
    assert(life->alive);
    life->alive = false;
    if (!mm_lives_are_logged() || missed_log(life)) {
        life->died = 0;
        remove_life(life);
    } else {
        life->died = mm_raw_clock();
        life->kept = true;
        if (!life->dead) { /* else it ended before, and resumed */
            life->dead = true;
            life->next_dead = lives.dead;
            lives.dead = life;
        }
    }
    unlock_lives();
}

void
mm_life_resume(mm_life *life)
{
    if (life->serial == 0) {
        return;
    }
    lock_lives();
    assert(!life->alive);
    life->alive = true;
    life->died = LIVES;
    if (!life->listed) {
        append_life(life);
    }
    unlock_lives();
}

static void
free_container(mm_life *life, void *container)
{
    free(life->name);
    free(container);
}

/* The end of the log may have released the struct meanwhile. */
static void
free_kept(mm_life *life, void *container)
{
    bool in_log;

    lock_lives();
    in_log = life->dead;
    if (in_log) {
        life->container = container;
    }
    unlock_lives();
    if (!in_log) {
        free_container(life, container);
    }
}

void
mm_life_free(mm_life *life, void *container)
{
    assert(container != NULL);
    mm_life_end(life);
    if (life->kept) {
        free_kept(life, container);
    } else {
        free_container(life, container);
    }
}

/* --- descriptions and names ------------------------------------------------------------- */

void
mm_life_describe(mm_life *life, const char *dtype, int dimensions, const int64_t *shape)
{
    assert(!atomic_load(&life->described) && dtype != NULL && dimensions >= 0);
    life->dtype = dtype;
    life->dimensions = dimensions;
    for (int i = 0; i < dimensions && i < MM_LABEL_DIMENSIONS; i++) {
        life->shape[i] = shape[i];
    }
    atomic_store_explicit(&life->described, true, memory_order_release);
}

int
mm_life_set_name(mm_life *life, const char *name, mm_status *st)
{
    char *copy = NULL, *before;

    assert(name == NULL || strlen(name) <= MM_NAME_BYTES);
    if (name != NULL && (copy = mm_copy_text(name)) == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory");
    }
    lock_lives();
    before = life->name;
    life->name = copy;
    if (life->serial == 0 && life->size > 0 && copy != NULL) {
        add_new_life(life);
    }
    unlock_lives();
    free(before);
    return 0;
}

/* The caller holds the lock, which protects the name. */
static bool
copy_name(const mm_life *life, char name[MM_NAME_BYTES + 1])
{
    name[0] = '\0';
    if (life->name == NULL) {
        return false;
    }
    memcpy(name, life->name, strlen(life->name) + 1);
    return true;
}

bool
mm_life_read_name(mm_life *life, char name[MM_NAME_BYTES + 1])
{
    bool named;

    lock_lives();
    named = copy_name(life, name);
    unlock_lives();
    return named;
}

/* --- the log --------------------------------------------------------------------------- */

/* A life as it was while the lock was held. */
typedef struct {
    mm_life_record record; /* without its label */
    const mm_life *life;
    char name[MM_NAME_BYTES + 1]; /* empty without one */
} draft;

/* Takes some dead lives out of both lists, once no log runs. Returns those to be freed, linked by
 * next_dead; *done is true if none is left. The others resumed, or their memory owns them. */
static mm_life *
take_dead(bool *done)
{
    mm_life *to_free = NULL;

    lock_lives();
    assert(!mm_lives_are_logged());
    for (int i = 0; i < BATCH && lives.dead != NULL; i++) {
        mm_life *life = lives.dead;
        lives.dead = life->next_dead;
        life->dead = false;
        if (life->died != LIVES && life->listed) {
            remove_life(life);
        }
        if (life->container != NULL) {
            life->next_dead = to_free;
            to_free = life;
        }
    }
    *done = lives.dead == NULL;
    unlock_lives();
    return to_free;
}

static void
free_dead(void)
{
    bool done;

    do {
        mm_life *life = take_dead(&done), *next;
        for (; life != NULL; life = next) {
            next = life->next_dead;
            free_container(life, life->container);
        }
    } while (!done);
}

int
mm_lives_log_start(size_t births, mm_status *st)
{
    if (mm_lives_are_logged()) {
        return mm_fail(st, MM_REFUSED, "a recording of memories is already running");
    }
    free_dead(); /* of a parent's log */
    lock_lives();
    lives.log_started = mm_raw_clock();
    lives.room = births;
    lives.missed = 0;
    atomic_store(&mm_lives_logged, true);
    unlock_lives();
    return 0;
}

size_t
mm_lives_log_count(void)
{
    size_t count;

    lock_lives();
    count = lives.listed.count;
    unlock_lives();
    return count;
}

uint64_t
mm_lives_log_missed(void)
{
    uint64_t missed;

    lock_lives();
    missed = lives.missed;
    unlock_lives();
    return missed;
}

/* Copies the life behind `after`, or the first one; false behind the last. A life stays in the
 * list while the lock is released, because the log runs. */
static bool
draft_next(const mm_life *after, draft *d)
{
    const mm_life *life;

    lock_lives();
    assert(mm_lives_are_logged());
    life = after ? after->next : lives.listed.first;
    d->life = life;
    if (life != NULL) {
        bool before = life->born < lives.log_started;
        d->record = (mm_life_record){.start = life->start,
                                     .size = life->size,
                                     .born = before ? 0 : life->born,
                                     .died = life->died,
                                     .serial = life->serial,
                                     .pooled = life->pooled};
        (void)copy_name(life, d->name);
    }
    unlock_lives();
    return life != NULL;
}

/* Fills at most `capacity` records, and adds their number to *filled. */
static int
fill_records(mm_life_record *records, size_t capacity, size_t *filled, mm_status *st)
{
    draft d = {0};

    while (*filled < capacity && draft_next(d.life, &d)) {
        d.record.label = mm_life_label(d.life, d.name);
        if (d.record.label == NULL) {
            return mm_fail(st, MM_NO_MEMORY, "out of host memory");
        }
        records[(*filled)++] = d.record;
    }
    return 0;
}

int
mm_lives_log_copy(mm_life_record **out, size_t *count, mm_status *st)
{
    size_t capacity = mm_lives_log_count(), filled = 0;
    mm_life_record *records;

    *out = NULL;
    *count = 0;
    if (!mm_lives_are_logged()) {
        return mm_fail(st, MM_REFUSED, "no recording of memories is running");
    }
    records = calloc(capacity > 0 ? capacity : 1, sizeof *records);
    if (records == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory");
    }
    if (fill_records(records, capacity, &filled, st) < 0) {
        mm_life_records_free(records, filled);
        return -1;
    }
    *out = records;
    *count = filled;
    return 0;
}

void
mm_life_records_free(mm_life_record *records, size_t count)
{
    for (size_t i = 0; records != NULL && i < count; i++) {
        free(records[i].label);
    }
    free(records);
}

void
mm_lives_log_stop(void)
{
    if (!mm_lives_are_logged()) {
        return;
    }
    lock_lives();
    end_log();
    unlock_lives();
    free_dead();
}
