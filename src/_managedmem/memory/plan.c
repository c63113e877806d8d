/* plan.c: what plan.h says. */
#include "plan.h"

#include <stdlib.h>

/* What an execution takes hold of or looks at again: each memory once, however many entries lie in
 * it. */
typedef struct {
    mm_guard *guard; /* to be entered; or NULL */
    bool view; /* its own guard: only to be open, the memory has another hold */
    bool look; /* nobody tells when this memory is freed: the driver is asked */
    mm_range range; /* then all that the entries take of it */
    size_t entry; /* the first one, for messages */
} hold;

struct mm_plan {
    atomic_size_t references;
    mm_action what;
    mm_batch transfers;
    mm_batch edges;
    mm_batch_arrays prebuilt; /* the arrays of all moves */
    hold *holds;
    size_t hold_count;
    mm_batch_arrays work; /* of the execution that is under way */
    atomic_flag busy; /* there is one */
};

/* --- laying out ------------------------------------------------------------------------- */

static int
by_owner(const void *a, const void *b)
{
    const hold *x = a, *y = b;

    if (x->guard != y->guard) {
        return (uintptr_t)x->guard < (uintptr_t)y->guard ? -1 : 1;
    }
    if (x->range.allocation != y->range.allocation) {
        return x->range.allocation < y->range.allocation ? -1 : 1;
    }
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

static int
by_entry(const void *a, const void *b)
{
    const hold *x = a, *y = b;

    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

/* Memory that the driver does not know has no allocation, so that none of it is the same. */
static bool
same_owner(const hold *a, const hold *b)
{
    return a->guard == b->guard && a->look == b->look && (!a->look || a->range.allocation != 0)
           && a->range.allocation == b->range.allocation;
}

static void
widen(mm_range *range, const mm_range *by)
{
    CUdeviceptr end = range->start + range->size, other = by->start + by->size;

    range->start = by->start < range->start ? by->start : range->start;
    range->size = (size_t)((other > end ? other : end) - range->start);
}

/* Two holds of each entry at most; then those of the same memory become one. */
static int
collect_holds(mm_plan *p, const mm_plan_entry *entries, size_t count, mm_status *st)
{
    size_t last = 0, n = 0;

    p->holds = calloc(2 * count, sizeof *p->holds);
    if (p->holds == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu entries", count);
    }
    for (size_t i = 0; i < count; i++) {
        mm_range range = entries[i].move.range;
        bool look = range.size > 0 && (entries[i].memory == NULL || range.allocation == 0);
        p->holds[n++] =
            (hold){.guard = entries[i].memory, .look = look, .range = range, .entry = i};
        if (entries[i].view != NULL) {
            p->holds[n++] = (hold){.guard = entries[i].view, .view = true, .entry = i};
        }
    }
    qsort(p->holds, n, sizeof *p->holds, by_owner);
    for (size_t i = 1; i < n; i++) {
        if (same_owner(&p->holds[last], &p->holds[i])) {
            widen(&p->holds[last].range, &p->holds[i].range);
        } else {
            p->holds[++last] = p->holds[i];
        }
    }
    p->hold_count = last + 1;
    qsort(p->holds, p->hold_count, sizeof *p->holds, by_entry);
    return 0;
}

/* A discard must not touch what lies in gaps, and takes whole pages only. */
static int
check_discard(const mm_plan_entry *entries, size_t count, mm_status *st)
{
    for (size_t i = 0; i < count; i++) {
        mm_range range = entries[i].move.range;
        if (entries[i].read_only && range.size > 0) {
            return mm_fail(st, MM_BAD_VALUE, "entry %zu: cannot discard a read-only target", i);
        }
        if (!entries[i].dense) {
            return mm_fail(st, MM_BAD_VALUE,
                           "entry %zu: cannot discard a target that is not contiguous: what lies "
                           "in its gaps would be lost",
                           i);
        }
        if (mm_range_whole_pages(&range, st) < 0) {
            mm_status_add(st, "(entry %zu)", i);
            return -1;
        }
    }
    return 0;
}

static int
lay_out_moves(mm_plan *p, const mm_plan_entry *entries, size_t count, mm_status *st)
{
    if (p->what == MM_DO_DISCARD_PREFETCH && check_discard(entries, count, st) < 0) {
        return -1;
    }
    if (mm_batch_init(&p->transfers, count, st) < 0) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        p->transfers.transfers[i] = entries[i].move;
    }
    if (p->what == MM_DO_DISCARD_PREFETCH) {
        if (mm_batch_split_edges(&p->transfers, &p->edges, st) < 0) {
            return -1;
        }
    }
    mm_batch_prepare(&p->transfers, p->what);
    return 0;
}

static int
make_room(mm_plan *p, mm_status *st)
{
    if (mm_batch_arrays_init(&p->prebuilt, p->transfers.count, st) < 0
        || mm_batch_arrays_init(&p->work, p->transfers.count, st) < 0) {
        return -1;
    }
    mm_batch_arrays_fill(&p->prebuilt, &p->transfers, true);
    return 0;
}

mm_plan *
mm_plan_new(const mm_plan_entry *entries, size_t count, mm_action what, mm_status *st)
{
    mm_plan *p = calloc(1, sizeof *p);

    if (p == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    atomic_init(&p->references, 1);
    atomic_flag_clear(&p->busy);
    p->what = what;
    p->transfers.transfers = p->transfers.inline_;
    p->edges.transfers = p->edges.inline_;
    if (lay_out_moves(p, entries, count, st) < 0 || make_room(p, st) < 0
        || collect_holds(p, entries, count, st) < 0) {
        mm_plan_release(p);
        return NULL;
    }
    return p;
}

void
mm_plan_retain(mm_plan *p)
{
    atomic_fetch_add_explicit(&p->references, 1, memory_order_relaxed);
}

void
mm_plan_release(mm_plan *p)
{
    if (atomic_fetch_sub_explicit(&p->references, 1, memory_order_acq_rel) == 1) {
        mm_batch_free(&p->transfers);
        mm_batch_free(&p->edges);
        mm_batch_arrays_free(&p->prebuilt);
        mm_batch_arrays_free(&p->work);
        free(p->holds);
        free(p);
    }
}

/* --- executing -------------------------------------------------------------------------- */

/* Memory of somebody else may be freed, and its address be given to something new. */
static int
look_again(mm_driver *cu, const mm_plan *p, const hold *h, mm_status *st)
{
    mm_range now = {.start = h->range.start, .size = h->range.size};
    mm_operation op = p->what == MM_DO_PREFETCH ? MM_PREFETCH : MM_DISCARD;

    if (mm_range_check(cu, &now, op, st) < 0) {
        mm_status_add(st, "(entry %zu)", h->entry);
        return -1;
    }
    if (now.allocation != h->range.allocation) {
        return mm_fail(st, MM_BAD_VALUE,
                       "entry %zu: the memory at 0x%llx was freed since it was added", h->entry,
                       (unsigned long long)now.start);
    }
    return 0;
}

static int
take_hold(mm_driver *cu, const mm_plan *p, const hold *h, mm_status *st)
{
    if (h->guard != NULL && (h->view ? mm_guard_is_closed(h->guard) : !mm_guard_enter(h->guard))) {
        return mm_fail(st, MM_REFUSED, "entry %zu: ManagedBuffer is closed", h->entry);
    }
    if (h->look && look_again(cu, p, h, st) < 0) {
        if (h->guard != NULL) {
            mm_guard_leave(h->guard);
        }
        return -1;
    }
    return 0;
}

static void
let_go(const mm_plan *p, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (p->holds[i].guard != NULL && !p->holds[i].view) {
            mm_guard_leave(p->holds[i].guard);
        }
    }
}

static int
take_hold_of_all(mm_driver *cu, const mm_plan *p, mm_status *st)
{
    for (size_t i = 0; i < p->hold_count; i++) {
        if (take_hold(cu, p, &p->holds[i], st) < 0) {
            let_go(p, i);
            return -1;
        }
    }
    return 0;
}

int
mm_plan_execute(mm_driver *cu, mm_plan *p, const mm_dispatch_options *how, mm_status *st)
{
    bool mine = !atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire);
    mm_batch_arrays own;
    int rc;

    if (!mine && mm_batch_arrays_init(&own, p->transfers.count, st) < 0) {
        return -1;
    }
    rc = take_hold_of_all(cu, p, st);
    if (rc == 0) {
        rc = mm_dispatch_run(cu, p->what, &p->transfers, &p->edges, &p->prebuilt,
                             mine ? &p->work : &own, how, st);
        let_go(p, p->hold_count);
    }
    if (mine) {
        atomic_flag_clear_explicit(&p->busy, memory_order_release);
    } else {
        mm_batch_arrays_free(&own);
    }
    return rc;
}

/* --- looking ahead ---------------------------------------------------------------------- */

static int
look_in_scope(mm_driver *cu, const mm_dispatch_options *how, mm_plan_preview *o, mm_status *st)
{
    mm_scope scope;

    if (mm_dispatch_check(cu, o->what, how, st) < 0
        || mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    o->together = mm_dispatch_decide(cu, o->what, o->transfers, how->dispatch, o->work.routes);
    mm_scope_leave(&scope);
    o->deferred = mm_dispatch_defers(o->transfers, how->defer, &o->deferred_bytes, &o->deferred_to)
                  && o->transfers->count > 0;
    return 0;
}

int
mm_plan_make_preview(mm_driver *cu, mm_plan *p, const mm_dispatch_options *how, mm_plan_preview *o,
                     mm_status *st)
{
    int rc;

    o->what = p->what;
    o->transfers = &p->transfers;
    o->edges = &p->edges;
    if (mm_batch_arrays_init(&o->work, p->transfers.count, st) < 0) {
        return -1;
    }
    rc = take_hold_of_all(cu, p, st);
    if (rc == 0) {
        rc = look_in_scope(cu, how, o, st);
        let_go(p, p->hold_count);
    }
    if (rc < 0) {
        mm_batch_arrays_free(&o->work);
    }
    return rc;
}

void
mm_plan_preview_free(mm_plan_preview *o)
{
    mm_batch_arrays_free(&o->work);
}

/* --- a budget --------------------------------------------------------------------------- */

static size_t
bytes_of_pages(const mm_range *range)
{
    CUdeviceptr page = mm_page_size();

    return range->size == 0 ? 0
                            : (size_t)((range->start + range->size + page - 1) / page * page
                                       - range->start / page * page);
}

typedef struct {
    const mm_range *range;
    size_t entry;
} place;

static int
by_range(const void *a, const void *b)
{
    const place *x = a, *y = b;

    if (x->range->start != y->range->start) {
        return x->range->start < y->range->start ? -1 : 1;
    }
    if (x->range->size != y->range->size) {
        return x->range->size < y->range->size ? -1 : 1;
    }
    return x->entry < y->entry ? -1 : x->entry > y->entry;
}

/* For each entry, the first one that has the same range. */
static void
find_equals(const mm_plan_entry *entries, size_t count, place *sorted, size_t *first)
{
    for (size_t i = 0; i < count; i++) {
        sorted[i] = (place){&entries[i].move.range, i};
    }
    qsort(sorted, count, sizeof *sorted, by_range);
    for (size_t i = 0; i < count; i++) {
        const place *before = i > 0 ? &sorted[i - 1] : NULL;
        bool equal = before != NULL && before->range->start == sorted[i].range->start
                     && before->range->size == sorted[i].range->size;
        first[sorted[i].entry] = equal ? first[before->entry] : sorted[i].entry;
    }
}

int
mm_plan_fit(mm_plan_entry *entries, size_t count, CUmemLocation device, size_t budget,
            mm_status *st)
{
    place *sorted = calloc(count, sizeof *sorted + sizeof(size_t));
    size_t *first;

    if (sorted == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
    }
    first = (size_t *)(sorted + count);
    find_equals(entries, count, sorted, first);
    for (size_t i = 0; i < count; i++) {
        size_t bytes = bytes_of_pages(&entries[i].move.range);
        if (first[i] != i) {
            entries[i].move.where = entries[first[i]].move.where;
        } else if (bytes <= budget) {
            entries[i].move.where = device;
            budget -= bytes;
        } else {
            entries[i].move.where = mm_host();
        }
    }
    free(sorted);
    return 0;
}
