/* pages.c: runs of pages with the same advice, and the advice that leads from one to another. */
#include "pages.h"

#include <stdlib.h>

bool
mm_same_policy(const mm_policy *a, const mm_policy *b)
{
    return a->read_mostly == b->read_mostly && mm_same_location(a->preferred, b->preferred)
           && a->accessed_by == b->accessed_by;
}

/* --- lists of runs ---------------------------------------------------------------------- */

void
mm_page_runs_free(mm_page_runs *runs)
{
    free(runs->run);
    *runs = (mm_page_runs){0};
}

static CUdeviceptr
end_of(const mm_page_run *run)
{
    return run->range.start + run->range.size;
}

int
mm_page_runs_add(mm_page_runs *runs, const mm_page_run *more, mm_status *st)
{
    mm_page_run *last = runs->count > 0 ? &runs->run[runs->count - 1] : NULL;

    if (last != NULL && end_of(last) == more->range.start
        && last->range.allocation == more->range.allocation
        && mm_same_policy(&last->policy, &more->policy)
        && last->prefetched.type == more->prefetched.type
        && last->prefetched.id == more->prefetched.id) {
        last->range.size += more->range.size;
        return 0;
    }
    if (runs->count == runs->capacity) {
        size_t capacity = runs->capacity > 0 ? 2 * runs->capacity : 4;
        mm_page_run *bigger = realloc(runs->run, capacity * sizeof *bigger);
        if (bigger == NULL) {
            return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu page runs", capacity);
        }
        runs->run = bigger;
        runs->capacity = capacity;
    }
    runs->run[runs->count++] = *more;
    return 0;
}

/* --- reading ---------------------------------------------------------------------------- */

/* Fills in what the driver says of the run's range, in one call. */
MM_GUARD_ARRAYS static CUresult
ask(mm_driver *cu, mm_page_run *run, mm_run_comparison comparison)
{
    CUmem_range_attribute which[] = {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID,
    };
    int read_mostly = 0, preferred[2] = {0}, last[2] = {0}, ordinal[MM_MAX_DEVICES + 1];
    void *into[] = {&read_mostly, &preferred[0], &preferred[1], ordinal, &last[0], &last[1]};
    size_t places = mm_accessed_by_capacity(cu);
    size_t sizes[] = {sizeof(int),          sizeof(int), sizeof(int),
                      places * sizeof(int), sizeof(int), sizeof(int)};
    CUresult code = cu->MemRangeGetAttributes(into, sizes, which, sizeof which / sizeof *which,
                                              run->range.start, run->range.size);

    if (code == CUDA_SUCCESS) {
        run->policy = (mm_policy){
            .read_mostly = read_mostly != 0,
            .preferred = mm_location_from_attributes(preferred[0], preferred[1]),
            .accessed_by = mm_accessed_by_set(ordinal, places),
        };
        run->prefetched = comparison == MM_BY_RECORD
                              ? mm_location((CUmemLocationType)last[0], last[1])
                              : mm_location_from_attributes(last[0], last[1]);
    }
    return code;
}

int
mm_page_runs_read(mm_driver *cu, mm_range range, mm_run_comparison comparison, mm_page_runs *runs,
                  mm_status *st)
{
    CUdeviceptr page = mm_page_size(), at = range.start, end = range.start + range.size;
    CUresult code = CUDA_SUCCESS;
    mm_scope scope;
    int rc;

    if (range.size == 0) {
        return 0;
    }
    rc = mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st);
    if (rc < 0) {
        return -1;
    }
    while (rc == 0 && at < end) {
        CUdeviceptr next = at / page * page + page;
        mm_page_run run = {.range = {.start = at, .allocation = range.allocation}};
        run.range.size = (size_t)((next < end ? next : end) - at);
        code = ask(cu, &run, comparison);
        rc = code == CUDA_SUCCESS ? mm_page_runs_add(runs, &run, st)
                                  : mm_fail_call(st, "cuMemRangeGetAttributes", (int)code);
        at += run.range.size;
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? rc : mm_range_diagnose(cu, range, mm_host(), MM_QUERY, st);
}

/* --- changing --------------------------------------------------------------------------- */

/* What one advice is about: one of these two, or else a member of accessed-by, by its bit. The
 * preferred location comes first: copies of read-mostly pages collapse to it. */
enum { PREFERRED = -2, READ_MOSTLY = -1, MOST_NAMED = 3 };

static bool
agree(int about, const mm_policy *a, const mm_policy *b)
{
    switch (about) {
    case READ_MOSTLY:
        return a->read_mostly == b->read_mostly;
    case PREFERRED:
        return mm_same_location(a->preferred, b->preferred);
    default:
        return ((a->accessed_by ^ b->accessed_by) >> about & 1) == 0;
    }
}

/* The advice that gives pages what a policy says in one respect. */
static CUmem_advise
advice_of(int about, const mm_policy *policy, CUmemLocation *where)
{
    *where = mm_host(); /* for advice whose location the driver ignores */
    if (about == READ_MOSTLY) {
        return policy->read_mostly ? CU_MEM_ADVISE_SET_READ_MOSTLY
                                   : CU_MEM_ADVISE_UNSET_READ_MOSTLY;
    }
    if (about == PREFERRED) {
        if ((int)policy->preferred.type == CU_MEM_LOCATION_TYPE_INVALID) {
            return CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        }
        *where = policy->preferred;
        return CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
    }
    *where = mm_location_from_bit(about);
    return policy->accessed_by >> about & 1 ? CU_MEM_ADVISE_SET_ACCESSED_BY
                                            : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

/* The effect of a NUMA node as preferred location: machines with one node accept it and ignore it. */
typedef enum { UNKNOWN, KEPT, IGNORED } node_support;

/* The pages of one call, which are to have the same: all adjacent ones; adjacent ones with equal
 * records, which the driver records together; or a single page, which the driver always records. */
typedef enum { SIDE_BY_SIDE, EACH_RECORD, EACH_PAGE } page_grouping;

/* A change under way: how it deals with failures, and the stretch that is next to be advised. */
typedef struct {
    mm_driver *cu;
    mm_on_failure how;
    int about;
    mm_range span; /* pages that want the same, and lie side by side */
    size_t runs; /* how many it is made of */
    bool lacking; /* some have not what they want */
    const mm_policy *wanted;
    page_grouping grouping;
    bool unsure; /* an advice may not be recorded */
    node_support node_support;
    CUmemLocation current_node; /* of HOST_NUMA_CURRENT; type INVALID until it is known */
    size_t failures;
    mm_status *st;
} change;

/* The preferred location that reads back from pages with this policy. */
static CUmemLocation
preferred_of(const change *c, const mm_policy *policy)
{
    if (c->node_support == IGNORED && mm_is_numa_host(policy->preferred)) {
        return mm_host();
    }
    return policy->preferred.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
                   && (int)c->current_node.type != CU_MEM_LOCATION_TYPE_INVALID
               ? c->current_node
               : policy->preferred;
}

/* After a node was advised, reads it back from the first page of the stretch, which a call always
 * records. If the machine ignores nodes, advises the host, which is the same memory there. */
static int
settle_node(change *c, CUmemLocation where, mm_status *st)
{
    CUmemLocation kept;

    if (mm_range_preferred_location(c->cu, mm_first_page(c->span), &kept, st) < 0) {
        return -1;
    }
    if (kept.type == CU_MEM_LOCATION_TYPE_HOST_NUMA) {
        c->node_support = KEPT;
        if (where.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
            c->current_node = kept;
        }
        return 0;
    }
    c->node_support = IGNORED;
    return mm_range_advise_once(c->cu, c->span, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, mm_host(),
                                st);
}

/* Says in the status what could not be put back. */
static void
name_stretch(change *c, CUmem_advise advice, CUmemLocation where)
{
    char text[MM_LOCATION_TEXT];

    mm_status_add(c->st, "Not restored: %s%s%s of %zu bytes at 0x%llx.", mm_advice_name(advice),
                  mm_advice_needs_location(advice) ? " " : "",
                  mm_advice_needs_location(advice) ? mm_location_text(where, text) : "",
                  c->span.size, (unsigned long long)c->span.start);
}

static void
advise_stretch(change *c)
{
    CUmemLocation where;
    CUmem_advise advice;
    mm_status st = {.kind = MM_OK};
    int rc;

    c->unsure = c->unsure || (c->lacking && (c->runs > 1 || c->grouping != SIDE_BY_SIDE));
    c->runs = 0;
    if (!c->lacking || (c->failures > 0 && c->how == MM_STOP)) {
        return;
    }
    advice = advice_of(c->about, c->wanted, &where);
    if (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION) {
        where = preferred_of(c, c->wanted);
    }
    rc = mm_range_advise_once(c->cu, c->span, advice, where, &st);
    if (rc == 0 && advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && mm_is_numa_host(where)) {
        rc = settle_node(c, where, &st);
    }
    if (rc < 0 && c->failures++ == 0) {
        *c->st = st;
    }
    if (rc < 0 && c->how != MM_STOP && c->failures <= MOST_NAMED) {
        name_stretch(c, advice, where);
    }
}

/* True if the record of pages agrees with the policy that they are to have. */
static bool
is_reached(const change *c, const mm_policy *has, const mm_policy *wants)
{
    return c->about == PREFERRED ? mm_same_location(has->preferred, preferred_of(c, wants))
                                 : agree(c->about, has, wants);
}

/* Adds pages to the stretch, or advises it and begins another one. A stretch is of all pages that
 * want the same, and is advised wholly where some lack it: where the driver's records lag behind,
 * pages that seem to have it may not. */
static void
extend_stretch(change *c, mm_range pages, const mm_policy *has, const mm_policy *wants)
{
    if (c->runs > 0
        && (c->grouping != SIDE_BY_SIDE || pages.start != c->span.start + c->span.size
            || pages.allocation != c->span.allocation || !agree(c->about, c->wanted, wants))) {
        advise_stretch(c);
    }
    if (c->runs++ == 0) {
        c->span = (mm_range){pages.start, 0, pages.allocation};
        c->wanted = wants;
        c->lacking = false;
    }
    c->span.size += pages.size;
    c->lacking = c->lacking || !is_reached(c, has, wants);
}

/* The same for a run of pages with one record and one wanted policy. */
static void
extend_by_run(change *c, mm_range pages, const mm_policy *has, const mm_policy *wants)
{
    CUdeviceptr page = mm_page_size(), end = pages.start + pages.size;

    while (c->grouping == EACH_PAGE && pages.start / page < (end - 1) / page) {
        mm_range one = {pages.start, (size_t)(page - pages.start % page), pages.allocation};
        extend_stretch(c, one, has, wants);
        pages.start += one.size;
        pages.size -= one.size;
    }
    extend_stretch(c, pages, has, wants);
}

/* Goes through the pages that both lists have. */
static void
change_one(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    size_t i = 0, j = 0;

    c->runs = 0;
    c->lacking = false;
    while (i < from->count && j < to->count) {
        const mm_page_run *has = &from->run[i], *wants = &to->run[j];
        CUdeviceptr start =
            has->range.start > wants->range.start ? has->range.start : wants->range.start;
        CUdeviceptr end = end_of(has) < end_of(wants) ? end_of(has) : end_of(wants);
        if (start < end) {
            mm_range pages = {start, (size_t)(end - start), has->range.allocation};
            extend_by_run(c, pages, &has->policy, &wants->policy);
        }
        i += end_of(has) == end;
        j += end_of(wants) == end;
    }
    advise_stretch(c);
}

static void
change_all(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    c->unsure = c->how == MM_UNDO && c->grouping == SIDE_BY_SIDE;
    for (c->about = PREFERRED; c->about <= MM_HOST_BIT; c->about++) {
        if (c->about < c->cu->device_count || c->about == MM_HOST_BIT) {
            change_one(c, from, to);
        }
    }
}

/* Reads the pages of a list again. */
static int
read_again(mm_driver *cu, const mm_page_runs *list, mm_page_runs *now, mm_status *st)
{
    for (size_t i = 0; i < list->count; i++) {
        if (mm_page_runs_read(cu, list->run[i].range, MM_BY_RECORD, now, st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Driver 580 advises all of a range, but leaves out records where they differed. Repeats the advice for
 * those pages: first by runs of one record, which are recorded completely, then page by page. */
static void
settle_records(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    for (c->grouping = EACH_RECORD; c->grouping <= EACH_PAGE && c->unsure && c->failures == 0;
         c->grouping++) {
        mm_page_runs now = {0};
        if (read_again(c->cu, from, &now, c->st) == 0) {
            change_all(c, &now, to);
        } else {
            c->failures++;
        }
        mm_page_runs_free(&now);
    }
}

int
mm_pages_change(mm_driver *cu, const mm_page_runs *from, const mm_page_runs *to, mm_on_failure how,
                mm_status *st)
{
    change c = {.cu = cu, .how = how, .st = st};

    change_all(&c, from, to);
    settle_records(&c, from, to);
    if (how != MM_STOP && c.failures > MOST_NAMED) {
        mm_status_add(st, "And %zu more.", c.failures - MOST_NAMED);
    }
    return c.failures > 0 ? -1 : 0;
}
