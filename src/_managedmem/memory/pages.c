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
        && mm_same_location(last->prefetched, more->prefetched)) {
        last->range.size += more->range.size;
        return 0;
    }
    if (runs->count == runs->room) {
        size_t room = runs->room > 0 ? 2 * runs->room : 4;
        mm_page_run *bigger = realloc(runs->run, room * sizeof *bigger);
        if (bigger == NULL) {
            return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu page runs", room);
        }
        runs->run = bigger;
        runs->room = room;
    }
    runs->run[runs->count++] = *more;
    return 0;
}

/* --- reading ---------------------------------------------------------------------------- */

/* Fills in what the driver says of the run's range, in one call. */
static CUresult
ask(mm_driver *cu, mm_page_run *run, bool prefetched)
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
    size_t places = mm_accessed_by_places(cu);
    size_t sizes[] = {sizeof(int),          sizeof(int), sizeof(int),
                      places * sizeof(int), sizeof(int), sizeof(int)};
    CUresult code = cu->MemRangeGetAttributes(into, sizes, which, prefetched ? 6 : 4,
                                              run->range.start, run->range.size);

    if (code == CUDA_SUCCESS) {
        run->policy = (mm_policy){
            .read_mostly = read_mostly != 0,
            .preferred = mm_answered_location(preferred[0], preferred[1]),
            .accessed_by = mm_accessed_by_set(ordinal, places),
        };
        run->prefetched = mm_answered_location(last[0], last[1]);
    }
    return code;
}

int
mm_page_runs_read(mm_driver *cu, mm_range range, bool prefetched, mm_page_runs *runs,
                  mm_status *st)
{
    CUdeviceptr page = mm_page_size(), at = range.start, end = range.start + range.size;
    CUresult code = CUDA_SUCCESS;
    mm_scope scope;
    int rc;

    rc = mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st);
    if (rc < 0) {
        return -1;
    }
    while (rc == 0 && at < end) {
        CUdeviceptr next = at / page * page + page;
        mm_page_run run = {.range = {.start = at, .allocation = range.allocation}};
        run.range.size = (size_t)((next < end ? next : end) - at);
        code = ask(cu, &run, prefetched);
        rc = code == CUDA_SUCCESS ? mm_page_runs_add(runs, &run, st)
                                  : mm_fail_call(st, "cuMemRangeGetAttributes", (int)code);
        at += run.range.size;
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? rc : mm_explain(cu, range, mm_host(), MM_QUERY, st);
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
    *where = mm_bit_location(about);
    return policy->accessed_by >> about & 1 ? CU_MEM_ADVISE_SET_ACCESSED_BY
                                            : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

/* Where there is one NUMA node, drivers accept a node as preferred location and keep what was
 * there before. The host is the same place then, and that they keep. */
static int
settle_numa_host(mm_driver *cu, mm_range range, mm_status *st)
{
    CUmemLocation kept;

    if (mm_range_preferred_location(cu, range, &kept, st) < 0) {
        return -1;
    }
    if (kept.type == CU_MEM_LOCATION_TYPE_HOST || mm_is_numa_host(kept)) {
        return 0;
    }
    return mm_range_advise(cu, range, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, mm_host(), st);
}

/* A change under way: how it deals with failures, and the stretch that is next to be advised. */
typedef struct {
    mm_driver *cu;
    mm_on_failure how;
    int about;
    mm_range stretch; /* size 0: nothing to advise yet */
    const mm_policy *wanted;
    CUdeviceptr reached; /* end of the pages seen that want the same */
    size_t failures;
    mm_status *st;
} change;

/* Says in the status what could not be put back. */
static void
name_stretch(change *c, CUmem_advise advice, CUmemLocation where)
{
    char text[MM_LOCATION_TEXT];

    mm_status_add(c->st, "Not restored: %s%s%s of %zu bytes at 0x%llx.", mm_advice_name(advice),
                  mm_advice_needs_location(advice) ? " " : "",
                  mm_advice_needs_location(advice) ? mm_location_text(where, text) : "",
                  c->stretch.size, (unsigned long long)c->stretch.start);
}

static void
advise_stretch(change *c)
{
    CUmemLocation where;
    CUmem_advise advice;
    mm_status st = {.kind = MM_OK};
    int rc;

    if (c->stretch.size == 0 || (c->failures > 0 && c->how == MM_STOP)) {
        return;
    }
    advice = advice_of(c->about, c->wanted, &where);
    rc = mm_range_advise(c->cu, c->stretch, advice, where, &st);
    if (rc == 0 && advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && mm_is_numa_host(where)) {
        rc = settle_numa_host(c->cu, c->stretch, &st);
    }
    if (rc < 0 && c->failures++ == 0) {
        *c->st = st;
    }
    if (rc < 0 && c->how == MM_TRY_ALL && c->failures <= MOST_NAMED) {
        name_stretch(c, advice, where);
    }
}

/* Adds pages to the stretch, or advises it and begins another one. Pages that have what they want
 * are passed over, and count in where more that lack it follow. What is not known, NULL, is none of
 * it. */
static void
see_pages(change *c, mm_range pages, const mm_policy *has, const mm_policy *wants)
{
    if (c->stretch.size > 0
        && (pages.start != c->reached || pages.allocation != c->stretch.allocation
            || !agree(c->about, c->wanted, wants))) {
        advise_stretch(c);
        c->stretch.size = 0;
    }
    c->reached = pages.start + pages.size;
    if (has != NULL && agree(c->about, has, wants)) {
        return;
    }
    if (c->stretch.size == 0) {
        c->stretch = pages;
        c->wanted = wants;
    }
    c->stretch.size = (size_t)(c->reached - c->stretch.start);
}

/* Goes through the pages that both lists have. */
static void
change_one(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    size_t i = 0, j = 0;

    c->stretch.size = 0;
    while (i < from->count && j < to->count) {
        const mm_page_run *has = &from->run[i], *wants = &to->run[j];
        CUdeviceptr start =
            has->range.start > wants->range.start ? has->range.start : wants->range.start;
        CUdeviceptr end = end_of(has) < end_of(wants) ? end_of(has) : end_of(wants);
        if (start < end) {
            mm_range pages = {start, (size_t)(end - start), has->range.allocation};
            see_pages(c, pages, &has->policy, &wants->policy);
        }
        i += end_of(has) == end;
        j += end_of(wants) == end;
    }
    advise_stretch(c);
}

int
mm_pages_change(mm_driver *cu, const mm_page_runs *from, const mm_page_runs *to, mm_on_failure how,
                mm_status *st)
{
    change c = {.cu = cu, .how = how, .st = st};

    for (c.about = PREFERRED; c.about <= MM_HOST_BIT; c.about++) {
        if (c.about < cu->device_count || c.about == MM_HOST_BIT) {
            change_one(&c, from, to);
        }
    }
    if (how == MM_TRY_ALL && c.failures > MOST_NAMED) {
        mm_status_add(st, "And %zu more.", c.failures - MOST_NAMED);
    }
    return c.failures > 0 ? -1 : 0;
}

/* --- putting one advice back ------------------------------------------------------------ */

static int
about_of(CUmem_advise advice, CUmemLocation where)
{
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        return READ_MOSTLY;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        return PREFERRED;
    default:
        return __builtin_ctzll(mm_location_bit(where));
    }
}

static bool
is_one_page(mm_range range)
{
    CUdeviceptr page = mm_page_size();

    return range.start / page == (range.start + range.size - 1) / page;
}

/* Whether an answer for a range holds for each of its pages: "not set" may also mean that they
 * differ. */
static bool
is_certain(int about, const mm_policy *answer)
{
    static const mm_policy nothing;

    return !agree(about, answer, &nothing);
}

/* Asks of a whole range what one advice is about. */
static int
ask_about(mm_driver *cu, int about, mm_page_run *run, mm_status *st)
{
    switch (about) {
    case READ_MOSTLY:
        return mm_range_read_mostly(cu, run->range, &run->policy.read_mostly, st);
    case PREFERRED:
        return mm_range_preferred_location(cu, run->range, &run->policy.preferred, st);
    default:
        return mm_range_accessed_by(cu, run->range, &run->policy.accessed_by, st);
    }
}

int
mm_advice_remember(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                   mm_advice_before *before, mm_status *st)
{
    mm_page_run whole = {.range = range};

    *before = (mm_advice_before){.about = about_of(advice, where)};
    if (ask_about(cu, before->about, &whole, st) < 0) {
        return -1;
    }
    if (is_certain(before->about, &whole.policy) || is_one_page(range)) {
        return mm_page_runs_add(&before->runs, &whole, st);
    }
    return mm_page_runs_read(cu, range, false, &before->runs, st);
}

void
mm_advice_put_back(mm_driver *cu, const mm_advice_before *before)
{
    mm_status ignored;
    change c = {.cu = cu, .how = MM_TRY_ALL, .about = before->about, .st = &ignored};

    for (size_t i = 0; i < before->runs.count; i++) {
        see_pages(&c, before->runs.run[i].range, NULL, &before->runs.run[i].policy);
    }
    advise_stretch(&c);
}

/* Whether every page has the member, or none has; also true where the driver does not say. */
static bool
is_switched(mm_driver *cu, mm_range range, int bit, bool on)
{
    mm_page_runs runs = {0};
    mm_status ignored;
    bool all = true;

    if (mm_page_runs_read(cu, range, false, &runs, &ignored) == 0) {
        for (size_t i = 0; i < runs.count; i++) {
            all = all && (runs.run[i].policy.accessed_by >> bit & 1) == on;
        }
    }
    mm_page_runs_free(&runs);
    return all;
}

/* Takes back each member that was switched, the one that failed as well if that took effect: a
 * driver may report an earlier error after it acted. */
static void
switch_back(mm_driver *cu, mm_range range, mm_location_set differs, mm_location_set to,
            const mm_page_runs *before, bool exact)
{
    for (; differs != 0; differs &= differs - 1) {
        mm_advice_before one = {.about = __builtin_ctzll(differs), .runs = *before};
        if (exact || is_switched(cu, range, one.about, to >> one.about & 1)) {
            mm_advice_put_back(cu, &one);
        }
    }
}

int
mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                            mm_location_set to, mm_status *st)
{
    mm_location_set added = to & ~from, removed = from & ~to;
    mm_page_run whole = {.range = range, .policy = {.accessed_by = from}};
    mm_page_runs taken = {.run = &whole, .count = 1, .room = 1}, asked = {0};
    bool ask_pages = (added & (added - 1)) != 0 && !is_one_page(range);
    int rc = 0;

    if (ask_pages) {
        rc = mm_page_runs_read(cu, range, false, &asked, st);
    }
    if (rc == 0
        && (mm_range_switch_accessed_by(cu, range, removed, false, st) < 0
            || mm_range_switch_accessed_by(cu, range, added, true, st) < 0)) {
        rc = -1;
        switch_back(cu, range, added | removed, to, ask_pages ? &asked : &taken, ask_pages);
    }
    mm_page_runs_free(&asked);
    return rc;
}
