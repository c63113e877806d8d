/* advice.c: advice on one range, and the workaround for drivers that do not record it.
 *
 * A driver advises every page of a range, but where the pages had different advice before, driver
 * 580 leaves out some of the records (conformance: records). Only records can be queried, so the
 * functions called readvise_* repeat advice until it is recorded. */
#include "advice.h"

#include <assert.h>

#include "recorded_calls.h"

bool
mm_same_policy(const mm_policy *a, const mm_policy *b)
{
    return a->read_mostly == b->read_mostly && mm_same_location(a->preferred, b->preferred)
           && a->accessed_by == b->accessed_by;
}

/* --- records of advice ------------------------------------------------------------------ */

_Static_assert(CU_MEM_ADVISE_SET_READ_MOSTLY % 2 == 1
                   && CU_MEM_ADVISE_UNSET_READ_MOSTLY == CU_MEM_ADVISE_SET_READ_MOSTLY + 1
                   && CU_MEM_ADVISE_SET_PREFERRED_LOCATION % 2 == 1
                   && CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION
                          == CU_MEM_ADVISE_SET_PREFERRED_LOCATION + 1
                   && CU_MEM_ADVISE_SET_ACCESSED_BY % 2 == 1
                   && CU_MEM_ADVISE_UNSET_ACCESSED_BY == CU_MEM_ADVISE_SET_ACCESSED_BY + 1,
               "advices that set are odd, and each is followed by the one that unsets");

static bool
is_setting(CUmem_advise advice)
{
    return advice % 2 == 1;
}

static CUmem_advise
setting_advice(CUmem_advise advice)
{
    return is_setting(advice) ? advice : (CUmem_advise)(advice - 1);
}

/* The record that the driver keeps of advice that was set. */
static mm_record
record_of(CUmem_advise advice, CUmemLocation location)
{
    assert(is_setting(advice));
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return (mm_record){CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, location};
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        return (mm_record){CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, location};
    default:
        return (mm_record){CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, location};
    }
}

/* Always true for advice that unsets: a query cannot tell whether all pages lack the advice or only
 * some. */
static bool
is_recorded(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location)
{
    mm_record r;

    if (!is_setting(advice)) {
        return true;
    }
    r = record_of(advice, location);
    return mm_is_recorded(cu, range, r);
}

/* True if a NUMA node was just advised and some pages lack its record. *location becomes that node,
 * also after advice of the current node. False on machines with one node, which record no node. */
static bool
lacks_node(mm_driver *cu, mm_range range, CUmemLocation *location)
{
    mm_status ignored;
    CUmemLocation recorded = mm_host();

    if (mm_range_preferred_location(cu, range, &recorded, &ignored) < 0
        || recorded.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
        || mm_range_preferred_location(cu, mm_first_page(range), location, &ignored) < 0) {
        return false;
    }
    return location->type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

/* Repeats advice until it is recorded for the whole range. A repetition from the start of the range
 * stops at pages that have the advice already. A repetition from the first page without the record
 * can miss that page. Alternating between the two reaches every page. Failures are ignored, because
 * the advice holds even without a record. */
static void
readvise_until_recorded(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location)
{
    enum { MOST_REPETITIONS = 128 };
    CUdeviceptr end = mm_range_end(range);
    CUresult code = CUDA_SUCCESS;

    assert(mm_in_scope());
    assert(range.size > 0);
    if (mm_is_numa_host(location) && !lacks_node(cu, range, &location)) {
        return;
    }
    for (int n = 0;
         n < MOST_REPETITIONS && code == CUDA_SUCCESS && !is_recorded(cu, range, advice, location);
         n++) {
        CUdeviceptr from = n % 2 == 0
                               ? range.start
                               : mm_first_without_record(cu, range, record_of(advice, location));
        code = cu->MemAdvise(from, (size_t)(end - from), advice, location);
    }
}

/* Queries the first page, for which the driver always records advice. */
int
mm_range_readvise_node(mm_driver *cu, mm_range range, CUmemLocation *node, mm_status *st)
{
    *node = mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
    if (mm_range_preferred_location(cu, mm_first_page(range), node, st) < 0) {
        return -1;
    }
    return node->type == CU_MEM_LOCATION_TYPE_HOST_NUMA
               ? 0
               : mm_range_advise_once(cu, range, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, mm_host(),
                                      st);
}

static void
readvise_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    mm_location_set now;
    CUmemLocation location;

    if (mm_recorded_members(cu, range, &now) != CUDA_SUCCESS) {
        return;
    }
    members &= ~now;
    while (mm_next_location(&members, &location)) {
        readvise_until_recorded(cu, range, CU_MEM_ADVISE_SET_ACCESSED_BY, location);
    }
}

/* In the caller's scope. */
static CUresult
advise_until_recorded(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location)
{
    CUresult code = cu->MemAdvise(range.start, range.size, advice, location);

    if (code == CUDA_SUCCESS) {
        readvise_until_recorded(cu, range, advice, location);
    }
    return code;
}

static int
fail_advice(mm_driver *cu, mm_range range, CUmemLocation location, CUresult code, mm_status *st)
{
    (void)mm_fail_call(st, "cuMemAdvise", (int)code);
    return mm_range_diagnose(cu, range, location, MM_ADVISE, st);
}

/* --- restoring -------------------------------------------------------------------------- */

int
mm_advice_query(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                mm_advice_before *before, mm_status *st)
{
    mm_location_set members = 0;
    int rc;

    *before = (mm_advice_before){.location = location};
    if (range.allocation == 0) {
        return 0;
    }
    switch (setting_advice(advice)) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return mm_range_read_mostly(cu, range, &before->whole, st);
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        rc = mm_range_preferred_location(cu, range, &before->location, st);
        before->whole = rc == 0 && (int)before->location.type != CU_MEM_LOCATION_TYPE_INVALID;
        return rc;
    default:
        rc = mm_range_accessed_by(cu, range, &members, st);
        before->whole = rc == 0 && (members & mm_location_bit(location)) != 0;
        return rc;
    }
}

/* Unsets advice on all pages, then once more on each page that still has its record. */
static void
unset_on_pages(mm_driver *cu, mm_range range, CUmem_advise set, CUmemLocation location)
{
    CUmem_advise unset = (CUmem_advise)(set + 1);
    CUmemLocation unset_location = mm_advice_needs_location(unset) ? location : mm_host();
    CUresult code = cu->MemAdvise(range.start, range.size, unset, unset_location);

    assert(mm_in_scope());
    assert(is_setting(set));
    while (code == CUDA_SUCCESS && range.size > 0 && range.allocation != 0) {
        mm_range page = mm_first_page(range);
        if (is_recorded(cu, page, set, location)) {
            code = cu->MemAdvise(page.start, page.size, unset, unset_location);
        }
        range.start += page.size;
        range.size -= page.size;
    }
}

/* In the caller's scope. The failed call may have set the advice, because a driver may act and
 * then report an earlier error. If the pages differed before, the advice is unset only if all of
 * them have it now, so that a refusal destroys nothing. */
static void
restore_in_scope(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                 const mm_advice_before *before, mm_advice_progress progress)
{
    mm_status ignored;

    assert(mm_in_scope());
    if (range.allocation == 0) {
        return;
    }
    if (before->whole) {
        MM_IGNORE(advise_until_recorded(cu, range, setting_advice(advice), before->location));
        return;
    }
    if (location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
        && mm_range_preferred_location(cu, range, &location, &ignored) < 0) {
        return;
    }
    if (is_setting(advice)
        && (progress == MM_ADVISED
            || (progress == MM_FAILED && is_recorded(cu, range, advice, location)))) {
        unset_on_pages(cu, range, advice, location);
    }
}

void
mm_advice_restore(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                  const mm_advice_before *before, mm_advice_progress progress)
{
    mm_status ignored;
    mm_scope scope;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, &ignored) == 0) {
        restore_in_scope(cu, range, advice, location, before, progress);
        mm_scope_leave(&scope);
    }
}

/* --- advising --------------------------------------------------------------------------- */

int
mm_range_advise_once(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                     mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, MemAdvise, st, range.start,
               range.size, advice, location);
    return code == CUDA_SUCCESS ? 0 : fail_advice(cu, range, location, code, st);
}

int
mm_range_advise_until_recorded(mm_driver *cu, mm_range range, CUmem_advise advice,
                               CUmemLocation location, mm_status *st)
{
    CUresult code;

    MM_RUN_IN(code, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, st,
              advise_until_recorded(cu, range, advice, location));
    return code == CUDA_SUCCESS ? 0 : fail_advice(cu, range, location, code, st);
}

/* Advises a range where not all pages have the record of the advice. So if this call sets
 * read-mostly or accessed-by, it has nothing to restore after a failure. Before other advice, the
 * earlier advice is queried. */
static int
advise_anew(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
            mm_status *st)
{
    bool known = is_setting(advice) && advice != CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
    mm_advice_before before = {.whole = false};
    CUresult code;

    if (!known && mm_advice_query(cu, range, advice, location, &before, st) < 0) {
        return -1;
    }
    code = advise_until_recorded(cu, range, advice, location);
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    restore_in_scope(cu, range, advice, location, &before, MM_FAILED);
    return fail_advice(cu, range, location, code, st);
}

/* Setting the same advice again is the most frequent case. It needs one query, and after a failure
 * there is nothing to restore. */
static int
advise_range(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
             mm_status *st)
{
    mm_scope scope;
    int rc = 0;

    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    if (is_setting(advice) && is_recorded(cu, range, advice, location)) {
        CUresult code = cu->MemAdvise(range.start, range.size, advice, location);
        rc = code == CUDA_SUCCESS ? 0 : fail_advice(cu, range, location, code, st);
    } else {
        rc = advise_anew(cu, range, advice, location, st);
    }
    mm_scope_leave(&scope);
    return rc;
}

static MM_COLD int
advise_and_record(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                  mm_status *st)
{
    uint64_t begun = mm_raw_clock();
    int rc = advise_range(cu, range, advice, location, st);

    if (rc == 0) {
        mm_record_advice(range, advice, location, begun);
    }
    return rc;
}

int
mm_range_advise(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation location,
                mm_status *st)
{
    return mm_is_recording() ? advise_and_record(cu, range, advice, location, st)
                             : advise_range(cu, range, advice, location, st);
}

/* --- accessed-by members ---------------------------------------------------------------- */

/* Sets or unsets members one by one, in the caller's scope. *done becomes the members that the
 * driver accepted. */
static int
switch_members(mm_driver *cu, mm_range range, mm_location_set members, bool on,
               mm_location_set *done, mm_status *st)
{
    CUmem_advise advice = on ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    CUmemLocation location;

    assert(mm_in_scope());
    *done = 0;
    while (mm_next_location(&members, &location)) {
        CUresult code = cu->MemAdvise(range.start, range.size, advice, location);
        if (code != CUDA_SUCCESS) {
            return fail_advice(cu, range, location, code, st);
        }
        *done |= mm_location_bit(location);
    }
    return 0;
}

int
mm_range_switch_accessed_by(mm_driver *cu, mm_range range, mm_location_set members, bool on,
                            mm_status *st)
{
    uint64_t begun = mm_call_begin();
    mm_location_set done;
    int rc;

    if (range.size == 0) {
        return 0;
    }
    MM_RUN_IN(rc, mm_scope_enter_relaxed, MM_ANY_DEVICE, cu, st,
              switch_members(cu, range, members, on, &done, st));
    if (begun != 0 && rc == 0) {
        mm_record_members(range, members, on, begun);
    }
    return rc;
}

/* The next two functions try each member and ignore failures, because an earlier failure is being
 * reported. */

static void
unset_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    CUmemLocation location;

    while (mm_next_location(&members, &location)) {
        unset_on_pages(cu, range, CU_MEM_ADVISE_SET_ACCESSED_BY, location);
    }
}

static void
set_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    mm_location_set left = members;
    CUmemLocation location;

    while (mm_next_location(&left, &location)) {
        MM_IGNORE(cu->MemAdvise(range.start, range.size, CU_MEM_ADVISE_SET_ACCESSED_BY, location));
    }
    readvise_members(cu, range, members);
}

int
mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                            mm_location_set to, mm_status *st)
{
    mm_location_set added = to & ~from, removed = from & ~to, done = 0, now = 0;
    uint64_t begun = mm_call_begin();
    mm_scope scope;
    int rc;

    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    rc = switch_members(cu, range, removed, false, &done, st);
    if (rc == 0) {
        rc = switch_members(cu, range, added, true, &done, st);
    }
    if (rc == 0 && added != 0) {
        readvise_members(cu, range, added);
    }
    if (rc < 0) {
        /* The failed call may have acted, because a driver may act and then report an earlier
         * error. So added members are queried, and all removed members are set again. In system
         * memory it is not known which of the removed members were set, so none is set again. */
        (void)mm_recorded_members(cu, range, &now); /* empty if a query fails */
        unset_members(cu, range, added & (done | now));
        set_members(cu, range, range.allocation != 0 ? removed : 0);
    }
    mm_scope_leave(&scope);
    if (begun != 0 && rc == 0) {
        mm_record_members(range, removed, false, begun);
        mm_record_members(range, added, true, begun);
    }
    return rc;
}
