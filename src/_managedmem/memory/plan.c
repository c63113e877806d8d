/* plan.c: preparing a plan, holding its memory during an execution, previews, budgets. */
#include "plan.h"

#include <assert.h>
#include <stdlib.h>

#include "unsupported.h"

/* A guard that an execution enters, or a range that it checks again. Each memory has one hold,
 * however many entries lie in it. */
typedef struct {
    mm_guard *guard; /* or NULL */
    bool view; /* the guard of a view: it must be open, but is not entered */
    bool recheck; /* this memory can be freed unnoticed: the driver is queried */
    mm_range range; /* of all entries in this memory, for the query */
    size_t entry; /* the first of these entries, for messages */
} hold;

struct mm_plan {
    atomic_size_t references;
    mm_operation op;
    mm_batch transfers;
    mm_batch edges;
    mm_batch_arrays prebuilt; /* the arrays of all transfers */
    hold *holds;
    size_t hold_count;
    mm_batch_arrays work; /* for one execution at a time */
    atomic_flag busy; /* work is in use */
};

/* --- preparing -------------------------------------------------------------------------- */

static int
compare_numbers(unsigned long long x, unsigned long long y)
{
    return (x > y) - (x < y);
}

static int
compare_owners(const void *a, const void *b)
{
    const hold *x = a, *y = b;
    int order = compare_numbers((uintptr_t)x->guard, (uintptr_t)y->guard);

    order = order != 0 ? order : compare_numbers(x->range.allocation, y->range.allocation);
    return order != 0 ? order : compare_numbers(x->entry, y->entry);
}

static int
compare_entries(const void *a, const void *b)
{
    return compare_numbers(((const hold *)a)->entry, ((const hold *)b)->entry);
}

/* Memory that the driver does not know has no allocation, so two ranges of such memory never count
 * as of the same owner. */
static bool
have_same_owner(const hold *a, const hold *b)
{
    return a->guard == b->guard && a->recheck == b->recheck
           && (!a->recheck || a->range.allocation != 0)
           && a->range.allocation == b->range.allocation;
}

static void
widen_range(mm_range *range, const mm_range *by)
{
    CUdeviceptr end = mm_range_end(*range), other = mm_range_end(*by);

    range->start = by->start < range->start ? by->start : range->start;
    range->size = (size_t)((other > end ? other : end) - range->start);
}

/* Each entry has at most two holds; the holds of one memory are merged. */
static int
collect_holds(mm_plan *p, const mm_plan_entry *entries, size_t count, mm_status *st)
{
    size_t last = 0, n = 0;

    p->holds = calloc(2 * count, sizeof *p->holds);
    if (p->holds == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu entries", count);
    }
    for (size_t i = 0; i < count; i++) {
        mm_range range = entries[i].transfer.range;
        bool recheck = range.size > 0 && (entries[i].memory == NULL || range.allocation == 0);
        p->holds[n++] =
            (hold){.guard = entries[i].memory, .recheck = recheck, .range = range, .entry = i};
        if (entries[i].view != NULL) {
            p->holds[n++] = (hold){.guard = entries[i].view, .view = true, .entry = i};
        }
    }
    qsort(p->holds, n, sizeof *p->holds, compare_owners);
    for (size_t i = 1; i < n; i++) {
        if (have_same_owner(&p->holds[last], &p->holds[i])) {
            widen_range(&p->holds[last].range, &p->holds[i].range);
        } else {
            p->holds[++last] = p->holds[i];
        }
    }
    p->hold_count = last + 1;
    qsort(p->holds, p->hold_count, sizeof *p->holds, compare_entries);
    return 0;
}

/* A discard must not destroy gaps or read-only contents, and needs whole pages. */
static int
check_discarded_entries(const mm_plan_entry *entries, size_t count, mm_status *st)
{
    for (size_t i = 0; i < count; i++) {
        mm_range range = entries[i].transfer.range;
        if (entries[i].read_only && range.size > 0) {
            return mm_fail(st, MM_BAD_VALUE, "entry %zu: cannot discard a read-only target", i);
        }
        if (!entries[i].dense) {
            return mm_fail(st, MM_BAD_VALUE,
                           "entry %zu: cannot discard a target that is not contiguous: the bytes "
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
prepare_transfers(mm_plan *p, const mm_plan_entry *entries, size_t count, mm_status *st)
{
    if ((mm_discards(p->op) && check_discarded_entries(entries, count, st) < 0)
        || mm_batch_init(&p->transfers, count, st) < 0) {
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        p->transfers.transfers[i] = entries[i].transfer;
    }
    return mm_batch_prepare(&p->transfers, p->op, &p->edges, st);
}

static int
allocate_arrays(mm_plan *p, mm_status *st)
{
    if (mm_batch_arrays_init(&p->prebuilt, p->transfers.count, st) < 0
        || mm_batch_arrays_init(&p->work, p->transfers.count, st) < 0) {
        return -1;
    }
    mm_batch_arrays_fill(&p->prebuilt, &p->transfers, true);
    return 0;
}

mm_plan *
mm_plan_new(const mm_plan_entry *entries, size_t count, mm_operation op, mm_status *st)
{
    mm_plan *p = calloc(1, sizeof *p);

    assert(count > 0);
    assert(op == MM_PREFETCH || op == MM_DISCARD_PREFETCH);
    if (p == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    atomic_init(&p->references, 1);
    atomic_flag_clear(&p->busy);
    p->op = op;
    mm_batch_init_empty(&p->transfers);
    mm_batch_init_empty(&p->edges);
    if (prepare_transfers(p, entries, count, st) < 0 || allocate_arrays(p, st) < 0
        || collect_holds(p, entries, count, st) < 0) {
        mm_plan_release(p);
        return NULL;
    }
    return p;
}

void
mm_plan_retain(mm_plan *p)
{
    size_t references = atomic_fetch_add_explicit(&p->references, 1, memory_order_relaxed);

    assert(references > 0);
    (void)references;
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

/* Another owner may have freed the memory, and its address may have been reused. */
static int
check_range_again(mm_driver *cu, const mm_plan *p, const hold *h, mm_status *st)
{
    mm_range now = {.start = h->range.start, .size = h->range.size};

    if (mm_range_check(cu, &now, p->op, st) < 0) {
        mm_status_add(st, "(entry %zu)", h->entry);
        return -1;
    }
    if (now.allocation != h->range.allocation) {
        return mm_fail(st, MM_BAD_VALUE,
                       "entry %zu: the memory at 0x%llx was freed after it was added", h->entry,
                       (unsigned long long)now.start);
    }
    return 0;
}

static int
acquire_hold(mm_driver *cu, const mm_plan *p, const hold *h, mm_status *st)
{
    if (h->guard != NULL && (h->view ? mm_guard_is_closed(h->guard) : !mm_guard_enter(h->guard))) {
        return mm_fail(st, MM_REFUSED, "entry %zu: ManagedBuffer is closed", h->entry);
    }
    assert(!(h->recheck && h->view));
    if (h->recheck && check_range_again(cu, p, h, st) < 0) {
        if (h->guard != NULL) {
            mm_guard_leave(h->guard);
        }
        return -1;
    }
    return 0;
}

static void
release_holds(const mm_plan *p, size_t count)
{
    assert(count <= p->hold_count);
    for (size_t i = 0; i < count; i++) {
        if (p->holds[i].guard != NULL && !p->holds[i].view) {
            mm_guard_leave(p->holds[i].guard);
        }
    }
}

static int
acquire_holds(mm_driver *cu, const mm_plan *p, mm_status *st)
{
    for (size_t i = 0; i < p->hold_count; i++) {
        if (acquire_hold(cu, p, &p->holds[i], st) < 0) {
            release_holds(p, i);
            return -1;
        }
    }
    return 0;
}

int
mm_plan_execute(mm_driver *cu, mm_plan *p, const mm_dispatch_options *options, mm_status *st)
{
    bool first = !atomic_flag_test_and_set_explicit(&p->busy, memory_order_acquire);
    mm_batch_arrays own;
    mm_dispatch_call call = {.cu = cu,
                             .op = p->op,
                             .batch = &p->transfers,
                             .edges = &p->edges,
                             .prebuilt = &p->prebuilt,
                             .work = first ? &p->work : &own};
    int rc;

    if (!first && mm_batch_arrays_init(&own, p->transfers.count, st) < 0) {
        return -1;
    }
    rc = acquire_holds(cu, p, st);
    if (rc == 0) {
        rc = mm_dispatch_enter(&call, options, st);
        if (rc > 0) {
            rc = mm_dispatch_issue(&call, st);
            mm_dispatch_leave(&call);
        }
        release_holds(p, p->hold_count);
    }
    if (first) {
        atomic_flag_clear_explicit(&p->busy, memory_order_release);
    } else {
        mm_batch_arrays_free(&own);
    }
    return rc;
}

/* The transfers of a plan are merged. Here each entry becomes a transfer of its own again, so that
 * the entries that are passed over can be counted. */
int
mm_plan_execute_or_skip(mm_driver *cu, mm_plan *p, const mm_plan_entry *entries, size_t count,
                        const mm_dispatch_options *options, size_t *skipped, mm_status *st)
{
    mm_batch each;
    int rc = mm_batch_init(&each, count, st);

    assert(p->op == MM_PREFETCH);
    if (rc == 0) {
        for (size_t i = 0; i < count; i++) {
            each.transfers[i] = entries[i].transfer;
        }
        *skipped += mm_skip_unsupported(cu, MM_PREFETCH, &each, options->dispatch);
        rc = acquire_holds(cu, p, st);
    }
    if (rc == 0) {
        rc = mm_batch_run_or_skip(cu, MM_PREFETCH, &each, options, skipped, st);
        release_holds(p, p->hold_count);
    }
    mm_batch_free(&each);
    return rc;
}

/* --- previews --------------------------------------------------------------------------- */

static int
fill_preview(mm_driver *cu, const mm_dispatch_options *options, mm_plan_preview *preview,
             mm_status *st)
{
    if (mm_dispatch_check(cu, preview->op, options, st) < 0) {
        return -1;
    }
    MM_RUN_IN(preview->batched, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, st,
              mm_dispatch_decide(cu, preview->op, preview->transfers, options->dispatch,
                                 preview->work.routes));
    preview->deferred = mm_dispatch_defers(preview->transfers, options->defer,
                                           &preview->deferred_bytes, &preview->deferred_to)
                        && preview->transfers->count > 0;
    return 0;
}

int
mm_plan_make_preview(mm_driver *cu, mm_plan *p, const mm_dispatch_options *options,
                     mm_plan_preview *preview, mm_status *st)
{
    int rc;

    preview->op = p->op;
    preview->transfers = &p->transfers;
    preview->edges = &p->edges;
    if (mm_batch_arrays_init(&preview->work, p->transfers.count, st) < 0) {
        return -1;
    }
    rc = acquire_holds(cu, p, st);
    if (rc == 0) {
        rc = fill_preview(cu, options, preview, st);
        release_holds(p, p->hold_count);
    }
    if (rc < 0) {
        mm_batch_arrays_free(&preview->work);
    }
    return rc;
}

void
mm_plan_preview_free(mm_plan_preview *preview)
{
    mm_batch_arrays_free(&preview->work);
}

/* --- budgets ---------------------------------------------------------------------------- */

static size_t
bytes_of_pages(const mm_range *range)
{
    CUdeviceptr page = mm_page_size();

    return range->size == 0 ? 0
                            : (size_t)((mm_range_end(*range) + page - 1) / page * page
                                       - range->start / page * page);
}

typedef struct {
    const mm_range *range;
    size_t entry;
} entry_range;

static int
compare_entry_ranges(const void *a, const void *b)
{
    const entry_range *x = a, *y = b;
    int order = compare_numbers(x->range->start, y->range->start);

    order = order != 0 ? order : compare_numbers(x->range->size, y->range->size);
    return order != 0 ? order : compare_numbers(x->entry, y->entry);
}

/* first[i] becomes the first entry with the range of entry i. `sorted` has space for each
 * entry. */
static void
find_equal_ranges(const mm_plan_entry *entries, size_t count, entry_range *sorted, size_t *first)
{
    for (size_t i = 0; i < count; i++) {
        sorted[i] = (entry_range){&entries[i].transfer.range, i};
    }
    qsort(sorted, count, sizeof *sorted, compare_entry_ranges);
    for (size_t i = 0; i < count; i++) {
        const entry_range *before = i > 0 ? &sorted[i - 1] : NULL;
        bool equal = before != NULL && before->range->start == sorted[i].range->start
                     && before->range->size == sorted[i].range->size;
        first[sorted[i].entry] = equal ? first[before->entry] : sorted[i].entry;
    }
}

int
mm_plan_fit(mm_plan_entry *entries, size_t count, CUmemLocation device, size_t budget,
            mm_status *st)
{
    entry_range *sorted = calloc(count, sizeof *sorted + sizeof(size_t));
    size_t *first;

    assert(device.type == CU_MEM_LOCATION_TYPE_DEVICE);
    if (sorted == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
    }
    first = (size_t *)(sorted + count);
    find_equal_ranges(entries, count, sorted, first);
    for (size_t i = 0; i < count; i++) {
        size_t bytes = bytes_of_pages(&entries[i].transfer.range);
        if (first[i] != i) {
            assert(first[i] < i);
            entries[i].transfer.location = entries[first[i]].transfer.location;
        } else if (bytes <= budget) {
            entries[i].transfer.location = device;
            budget -= bytes;
        } else {
            entries[i].transfer.location = mm_host();
        }
    }
    free(sorted);
    return 0;
}
