/* working_memory.c: the memory of one group of a working set, range by range. */
#include "working_memory.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "prefetch.h"
#include "home.h"
#include "recorded_calls.h"

/* --- pages -------------------------------------------------------------------------------- */

static int
compare_working_ranges(const void *a, const void *b)
{
    const mm_working_range *x = a, *y = b;

    return x->range.start != y->range.start ? (x->range.start > y->range.start ? 1 : -1)
                                            : (x->target > y->target) - (x->target < y->target);
}

/* True if one call may be made for both ranges. Advice and prefetches act on whole pages anyway,
 * but a discard must not reach bytes between the two. */
static bool
can_join_ranges(const mm_working_range *a, const mm_working_range *b, mm_group_access access)
{
    return a->guard == b->guard && a->range.allocation == b->range.allocation
           && (access == MM_GROUP_SCRATCH
                   ? b->range.start <= mm_range_end(a->range)
                   : mm_first_page_of(&b->range) <= mm_page_behind(&a->range));
}

static void
join_ranges(mm_working_memory *m)
{
    size_t last = 0;

    qsort(m->ranges, m->count, sizeof *m->ranges, compare_working_ranges);
    for (size_t i = 1; i < m->count; i++) {
        mm_working_range *range = &m->ranges[last];
        if (can_join_ranges(range, &m->ranges[i], m->access)) {
            CUdeviceptr end = mm_range_end(range->range);
            CUdeviceptr other = mm_range_end(m->ranges[i].range);
            range->range.size = (size_t)((other > end ? other : end) - range->range.start);
        } else {
            m->ranges[++last] = m->ranges[i];
        }
    }
    m->count = last + 1;
}

/* Ranges of different owners may share pages, which count once. */
static size_t
count_bytes(const mm_working_memory *m)
{
    CUdeviceptr counted = 0, pages = 0;

    for (size_t i = 0; i < m->count; i++) {
        CUdeviceptr first = mm_first_page_of(&m->ranges[i].range);
        CUdeviceptr behind = mm_page_behind(&m->ranges[i].range);
        first = first > counted ? first : counted;
        pages += behind > first ? behind - first : 0;
        counted = behind > counted ? behind : counted;
    }
    return (size_t)pages * mm_page_size();
}

int
mm_working_memory_init(mm_working_memory *m, const mm_working_range *ranges, size_t count,
                       mm_group_access access, mm_status *st)
{
    *m = (mm_working_memory){.access = access, .count = count};
    if (count == 0) {
        return 0;
    }
    m->ranges = malloc(count * sizeof *m->ranges);
    if (m->ranges == NULL) {
        m->count = 0;
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu targets", count);
    }
    memcpy(m->ranges, ranges, count * sizeof *ranges);
    join_ranges(m);
    m->bytes = count_bytes(m);
    return 0;
}

void
mm_working_memory_free(mm_working_memory *m)
{
    free(m->ranges);
    mm_page_runs_free(&m->before);
    *m = (mm_working_memory){.access = m->access};
}

int
mm_working_memory_check(const mm_working_memory *m, mm_status *st)
{
    for (size_t i = 0; i < m->count; i++) {
        if (m->ranges[i].guard != NULL && mm_guard_is_closed(m->ranges[i].guard)) {
            return mm_fail(st, MM_REFUSED, "group %llu: targets[%zu]: ManagedBuffer is closed",
                           (unsigned long long)m->number, m->ranges[i].target);
        }
    }
    return 0;
}

/* --- advice ------------------------------------------------------------------------------- */

/* Memory that moves is not mapped: making the mappings at each drop takes longer than the loads. A
 * device that reaches it at home makes them by faults. */
int
mm_working_memory_advise(mm_driver *cu, mm_working_memory *m, int device, bool mapped,
                         mm_status *st)
{
    CUmemLocation location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device);
    mm_policy at_home = {.accessed_by = mapped ? mm_location_bit(location) : 0};
    mm_batch work;
    int rc = mm_batch_init(&work, m->count, st);

    if (rc == 0) {
        rc = mm_home_for(cu, device, &m->home, st);
        at_home.preferred = m->home;
    }
    for (size_t i = 0; rc == 0 && i < m->count; i++) {
        work.transfers[i] = (mm_transfer){m->ranges[i].range, mm_host()};
    }
    if (rc == 0) {
        rc = mm_policy_apply(cu, &work, &at_home, &m->before, st);
    }
    m->advised = rc == 0;
    mm_batch_free(&work);
    return rc;
}

/* 1 if the memory may be used, which the caller must leave then; 0 if it was freed; -1 on failure.
 * Memory of others can be freed unnoticed, and its address may belong to something else by now. */
static int
enter_range(mm_driver *cu, const mm_working_range *r, mm_status *st)
{
    mm_range now = {.start = r->range.start, .size = r->range.size};

    if (r->guard != NULL) {
        return mm_guard_enter(r->guard);
    }
    if (mm_range_check(cu, &now, MM_QUERY, st) < 0) {
        return mm_is_bad_argument(st) ? 0 : -1;
    }
    return now.allocation == r->range.allocation;
}

static void
leave_range(const mm_working_range *r)
{
    if (r->guard != NULL) {
        mm_guard_leave(r->guard);
    }
}

/* Restores the advice of the ranges that are entered. */
static int
restore_entered_ranges(mm_driver *cu, const mm_working_memory *m, const int *entered,
                       mm_status *st)
{
    mm_batch work;
    int rc = mm_batch_init(&work, m->count, st);

    work.count = 0;
    for (size_t i = 0; rc == 0 && i < m->count; i++) {
        if (entered[i] > 0) {
            work.transfers[work.count++] = (mm_transfer){m->ranges[i].range, mm_host()};
        }
    }
    if (rc == 0 && work.count > 0) {
        rc = mm_policy_restore(cu, &work, &m->before, st);
    }
    mm_batch_free(&work);
    return rc;
}

int
mm_working_memory_restore(mm_driver *cu, mm_working_memory *m, mm_status *st)
{
    int *entered, rc = 0;

    if (!m->advised) {
        return 0;
    }
    entered = calloc(m->count + 1, sizeof *entered);
    if (entered == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu ranges", m->count);
    }
    for (size_t i = 0; rc == 0 && i < m->count; i++) {
        entered[i] = enter_range(cu, &m->ranges[i], st);
        rc = entered[i] < 0 ? -1 : 0;
    }
    if (rc == 0) {
        rc = restore_entered_ranges(cu, m, entered, st);
    }
    for (size_t i = 0; i < m->count; i++) {
        if (entered[i] > 0) {
            leave_range(&m->ranges[i]);
        }
    }
    free(entered);
    m->advised = rc < 0;
    return rc;
}

/* --- moving ------------------------------------------------------------------------------- */

static int
advise_working_range(mm_driver *cu, mm_range range, CUmem_advise advice, mm_status *st)
{
    uint64_t begun = mm_call_begin();

    if (mm_range_advise_once(cu, range, advice, mm_host(), st) < 0) {
        return -1;
    }
    if (begun != 0) {
        mm_record_advice(range, advice, mm_host(), begun);
    }
    return 0;
}

static int
issue_range(mm_driver *cu, mm_operation op, mm_range range, CUmemLocation location,
            CUstream stream, mm_status *st)
{
    uint64_t begun = mm_call_begin();

    if (range.size == 0) {
        return 0;
    }
    if (mm_range_issue(cu, op, range, location, stream, st) < 0) {
        return -1;
    }
    if (begun != 0) {
        mm_record_call(op, range, location, 0, begun);
    }
    return 0;
}

static int
load_range(mm_driver *cu, mm_range range, bool copy, CUmemLocation location, CUstream stream,
           mm_status *st)
{
    if (copy && advise_working_range(cu, range, CU_MEM_ADVISE_SET_READ_MOSTLY, st) < 0) {
        return -1;
    }
    return issue_range(cu, MM_PREFETCH, range, location, stream, st);
}

/* Discards whole pages only. The pages at the edges, which may have other contents too, go home. */
static int
discard_range(mm_driver *cu, mm_range range, CUmemLocation home, CUstream stream, mm_status *st)
{
    mm_range inside = range, before = range, behind = range;
    mm_status ignored;

    if (cu->MemDiscardAndPrefetchBatchAsync == NULL
        || mm_range_whole_pages(&inside, &ignored) < 0) {
        return issue_range(cu, MM_PREFETCH, range, home, stream, st);
    }
    before.size = (size_t)(inside.start - range.start);
    behind.start = mm_range_end(inside);
    behind.size = (size_t)(mm_range_end(range) - behind.start);
    if (issue_range(cu, MM_DISCARD_PREFETCH, inside, home, stream, st) < 0
        || issue_range(cu, MM_PREFETCH, before, home, stream, st) < 0) {
        return -1;
    }
    return issue_range(cu, MM_PREFETCH, behind, home, stream, st);
}

static int
drop_range(mm_driver *cu, const mm_working_memory *m, mm_range range, CUstream stream,
           mm_status *st)
{
    switch (m->access) {
    case MM_GROUP_READ:
        return advise_working_range(cu, range, CU_MEM_ADVISE_UNSET_READ_MOSTLY, st);
    case MM_GROUP_SCRATCH:
        return discard_range(cu, range, m->home, stream, st);
    default:
        return issue_range(cu, MM_PREFETCH, range, m->home, stream, st);
    }
}

/* Where no page of the copy was written, the prefetch has nothing to do. */
static int
collect_range(mm_driver *cu, mm_range range, CUmemLocation home, CUstream stream, mm_status *st)
{
    if (advise_working_range(cu, range, CU_MEM_ADVISE_UNSET_READ_MOSTLY, st) < 0) {
        return -1;
    }
    return issue_range(cu, MM_PREFETCH, range, home, stream, st);
}

typedef enum { LOAD_RANGES, COPY_RANGES, DROP_RANGES, HOME_RANGES, COLLECT_RANGES } range_move;

static int
move_range(mm_driver *cu, const mm_working_memory *m, mm_range range, range_move move,
           CUmemLocation location, CUstream stream, mm_status *st)
{
    switch (move) {
    case LOAD_RANGES:
    case COPY_RANGES:
        return load_range(cu, range, move == COPY_RANGES, location, stream, st);
    case COLLECT_RANGES:
        return collect_range(cu, range, m->home, stream, st);
    case DROP_RANGES:
        return drop_range(cu, m, range, stream, st);
    default:
        return issue_range(cu, MM_PREFETCH, range, m->home, stream, st);
    }
}

static int
move_ranges(mm_driver *cu, const mm_working_memory *m, range_move move, CUmemLocation location,
            CUstream stream, mm_status *st)
{
    mm_status later;
    int rc = 0;

    for (size_t i = 0; i < m->count; i++) {
        const mm_working_range *r = &m->ranges[i];
        int entered = enter_range(cu, r, rc == 0 ? st : &later);
        if (entered < 0) {
            rc = -1;
        } else if (entered > 0) {
            if (move_range(cu, m, r->range, move, location, stream, rc == 0 ? st : &later) < 0) {
                rc = -1;
            }
            leave_range(r);
        }
    }
    return rc;
}

int
mm_working_memory_load(mm_driver *cu, const mm_working_memory *m, int device, bool copy,
                       CUstream stream, mm_status *st)
{
    return move_ranges(cu, m, copy || m->access == MM_GROUP_READ ? COPY_RANGES : LOAD_RANGES,
                       mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device), stream, st);
}

int
mm_working_memory_drop(mm_driver *cu, const mm_working_memory *m, CUstream stream, mm_status *st)
{
    return move_ranges(cu, m, DROP_RANGES, mm_host(), stream, st);
}

int
mm_working_memory_home(mm_driver *cu, const mm_working_memory *m, bool copy, CUstream stream,
                       mm_status *st)
{
    return move_ranges(cu, m, copy ? COLLECT_RANGES : HOME_RANGES, mm_host(), stream, st);
}
