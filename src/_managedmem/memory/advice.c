/* advice.c: what advice.h says. Drivers act on all pages of a range at once, but record what they did
 * as docs/develop/conformance.rst says, and that is all that can be read. */
#include "advice.h"

/* --- records ---------------------------------------------------------------------------- */

/* One query of a record, in the caller's scope. */
static CUresult
ask_record(mm_driver *cu, mm_range range, CUmem_range_attribute which, int *into, size_t count)
{
    return cu->MemRangeGetAttribute(into, count * sizeof *into, which, range.start, range.size);
}

/* The members on record; false where the driver does not tell. */
static bool
ask_members(mm_driver *cu, mm_range range, mm_location_set *members)
{
    size_t places = mm_accessed_by_places(cu);
    int answer[MM_MAX_DEVICES + 1];
    CUresult code = ask_record(cu, range, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, answer, places);

    *members = code == CUDA_SUCCESS ? mm_accessed_by_set(answer, places) : 0;
    return code == CUDA_SUCCESS;
}

/* The next four: whether the record says so; yes also where the driver does not tell. */

static bool
is_read_mostly(mm_driver *cu, mm_range range)
{
    int on = 0;

    return ask_record(cu, range, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, &on, 1) != CUDA_SUCCESS
           || on != 0;
}

static bool
is_accessed_by(mm_driver *cu, mm_range range, CUmemLocation where)
{
    mm_location_set members;

    return !ask_members(cu, range, &members) || (members & mm_location_bit(where)) != 0;
}

static bool
prefers_node(mm_driver *cu, mm_range range, CUmemLocation where)
{
    CUmem_range_attribute which[] = {CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
                                     CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID};
    int type = 0, id = 0;
    void *into[] = {&type, &id};
    size_t sizes[] = {sizeof type, sizeof id};

    return cu->MemRangeGetAttributes(into, sizes, which, 2, range.start, range.size)
               != CUDA_SUCCESS
           || (type == (int)where.type && id == where.id);
}

/* The query for the location as one number has the same answer for all kinds of hosts. */
static bool
is_preferred(mm_driver *cu, mm_range range, CUmemLocation where)
{
    int answer = 0;

    if (where.type == CU_MEM_LOCATION_TYPE_DEVICE) {
        return ask_record(cu, range, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, &answer, 1)
                   != CUDA_SUCCESS
               || answer == where.id;
    }
    if (where.type == CU_MEM_LOCATION_TYPE_HOST) {
        return ask_record(cu, range, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE, &answer, 1)
                   != CUDA_SUCCESS
               || answer == CU_MEM_LOCATION_TYPE_HOST;
    }
    return prefers_node(cu, range, where);
}

/* Whether the record of a range says what an advice has set. True also where the driver does not
 * tell, and for advice of which it cannot be told: a range without an advice and one in part without
 * it answer the same. A function for each kind, so that none makes room for the answers of others. */
static bool
is_recorded(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where)
{
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return is_read_mostly(cu, range);
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        return is_preferred(cu, range, where);
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
        return is_accessed_by(cu, range, where);
    default:
        return true;
    }
}

/* The first page that an advice is not recorded for, in a range that it is not recorded for. */
static CUdeviceptr
first_not_recorded(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where)
{
    CUdeviceptr page = mm_page_size(), from = range.start, to = range.start + range.size;

    for (;;) {
        CUdeviceptr middle = (from + (to - from) / 2) / page * page;
        if (middle <= from) {
            middle = from / page * page + page;
        }
        if (middle >= to) {
            return from;
        }
        range.start = from;
        range.size = (size_t)(middle - from);
        if (is_recorded(cu, range, advice, where)) {
            from = middle;
        } else {
            to = middle;
        }
    }
}

/* Whether a NUMA node that was preferred just now is missing from the record of some pages. Never so
 * on machines with one node, whose drivers keep none. Else *where is that node, also where it was the
 * current one. */
static bool
lacks_node(mm_driver *cu, mm_range range, CUmemLocation *where)
{
    mm_status ignored;
    CUmemLocation kept;

    if (mm_range_preferred_location(cu, range, &kept, &ignored) < 0
        || kept.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
        || mm_range_preferred_location(cu, mm_first_page(range), where, &ignored) < 0) {
        return false;
    }
    return where->type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

/* Repeats an advice until the driver's record of the range says so. Where parts had been advised
 * differently, drivers (580) advise every page but leave out some of the parts in what they record.
 * A repetition from the start gets no further than pages that have the same advice already, one
 * from the first part that is missing can miss just that part; in turn they get through. The advice
 * holds anyway, so nothing here is an error. */
static void
settle_record(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where)
{
    enum { MOST_REPETITIONS = 128 };
    CUdeviceptr end = range.start + range.size;
    CUresult code = CUDA_SUCCESS;

    if (mm_is_numa_host(where) && !lacks_node(cu, range, &where)) {
        return;
    }
    for (int n = 0;
         n < MOST_REPETITIONS && code == CUDA_SUCCESS && !is_recorded(cu, range, advice, where);
         n++) {
        CUdeviceptr from = n % 2 == 0 ? range.start : first_not_recorded(cu, range, advice, where);
        code = cu->MemAdvise(from, (size_t)(end - from), advice, where);
    }
}

static int
refuse_advice(mm_driver *cu, mm_range range, CUmemLocation where, CUresult code, mm_status *st)
{
    (void)mm_fail_call(st, "cuMemAdvise", (int)code);
    return mm_explain(cu, range, where, MM_ADVISE, st);
}

/* --- putting back ----------------------------------------------------------------------- */

static CUmem_advise
setting(CUmem_advise advice)
{
    switch (advice) {
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        return CU_MEM_ADVISE_SET_READ_MOSTLY;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        return CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
        return CU_MEM_ADVISE_SET_ACCESSED_BY;
    default:
        return advice;
    }
}

static CUmem_advise
unsetting(CUmem_advise advice)
{
    switch (advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return CU_MEM_ADVISE_UNSET_READ_MOSTLY;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        return CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
        return CU_MEM_ADVISE_UNSET_ACCESSED_BY;
    default:
        return advice;
    }
}

int
mm_advice_remember(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                   mm_advice_before *before, mm_status *st)
{
    mm_location_set members = 0;
    int rc;

    *before = (mm_advice_before){.where = where};
    if (range.allocation == 0) {
        return 0;
    }
    switch (setting(advice)) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        return mm_range_read_mostly(cu, range, &before->whole, st);
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        rc = mm_range_preferred_location(cu, range, &before->where, st);
        before->whole = rc == 0 && (int)before->where.type != CU_MEM_LOCATION_TYPE_INVALID;
        return rc;
    default:
        rc = mm_range_accessed_by(cu, range, &members, st);
        before->whole = rc == 0 && (members & mm_location_bit(where)) != 0;
        return rc;
    }
}

/* Takes an advice from all pages, and from the record of each. */
static void
take_from_pages(mm_driver *cu, mm_range range, CUmem_advise set, CUmemLocation where)
{
    CUmem_advise unset = unsetting(set);
    CUmemLocation given = mm_advice_needs_location(unset) ? where : mm_host();
    CUresult code = cu->MemAdvise(range.start, range.size, unset, given);

    while (code == CUDA_SUCCESS && range.size > 0) {
        mm_range page = mm_first_page(range);
        if (is_recorded(cu, page, set, where)) {
            code = cu->MemAdvise(page.start, page.size, unset, given);
        }
        range.start += page.size;
        range.size -= page.size;
    }
}

/* In the caller's scope. The advice that failed may have been taken: a driver may report an earlier
 * error after it acted. Where pages had not the same, that is believed only if it shows on all of
 * them, so that a mere refusal destroys nothing. */
static void
put_back(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
         const mm_advice_before *before, mm_advice_fate fate)
{
    CUmem_advise set = setting(advice);
    mm_status ignored;

    if (range.allocation == 0) {
        return;
    }
    if (before->whole) {
        if (cu->MemAdvise(range.start, range.size, set, before->where) == CUDA_SUCCESS) {
            settle_record(cu, range, set, before->where);
        }
        return;
    }
    if (where.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
        && mm_range_preferred_location(cu, range, &where, &ignored) < 0) {
        return;
    }
    if (set == advice
        && (fate == MM_GIVEN || (fate == MM_FAILED && is_recorded(cu, range, set, where)))) {
        take_from_pages(cu, range, set, where);
    }
}

void
mm_advice_put_back(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                   const mm_advice_before *before, mm_advice_fate fate)
{
    mm_status ignored;
    mm_scope scope;

    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, &ignored) == 0) {
        put_back(cu, range, advice, where, before, fate);
        mm_scope_leave(&scope);
    }
}

/* --- advising --------------------------------------------------------------------------- */

int
mm_range_advise_once(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                     mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->MemAdvise(range.start, range.size, advice, where);
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : refuse_advice(cu, range, where, code, st);
}

int
mm_range_advise_settled(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
                        mm_status *st)
{
    mm_scope scope;
    CUresult code;

    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    code = cu->MemAdvise(range.start, range.size, advice, where);
    if (code == CUDA_SUCCESS) {
        settle_record(cu, range, advice, where);
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? 0 : refuse_advice(cu, range, where, code, st);
}

/* A range that not all of has yet what it is to be given. Only of a preferred location there is more
 * to ask then. */
static int
advise_anew(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where, mm_status *st)
{
    bool known = setting(advice) == advice && advice != CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
    mm_advice_before before = {.whole = false};
    CUresult code;

    if (!known && mm_advice_remember(cu, range, advice, where, &before, st) < 0) {
        return -1;
    }
    code = cu->MemAdvise(range.start, range.size, advice, where);
    if (code == CUDA_SUCCESS) {
        settle_record(cu, range, advice, where);
        return 0;
    }
    put_back(cu, range, advice, where, &before, MM_FAILED);
    return refuse_advice(cu, range, where, code, st);
}

/* What is set again, the most frequent case, has been recorded before, and needs no putting back. */
int
mm_range_advise(mm_driver *cu, mm_range range, CUmem_advise advice, CUmemLocation where,
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
    if (setting(advice) == advice && is_recorded(cu, range, advice, where)) {
        CUresult code = cu->MemAdvise(range.start, range.size, advice, where);
        rc = code == CUDA_SUCCESS ? 0 : refuse_advice(cu, range, where, code, st);
    } else {
        rc = advise_anew(cu, range, advice, where, st);
    }
    mm_scope_leave(&scope);
    return rc;
}

/* --- accessed-by members ---------------------------------------------------------------- */

/* Advises members on or off, one by one, in the caller's scope. *done has those that the driver
 * took. */
static int
switch_members(mm_driver *cu, mm_range range, mm_location_set members, bool on,
               mm_location_set *done, mm_status *st)
{
    CUmem_advise advice = on ? CU_MEM_ADVISE_SET_ACCESSED_BY : CU_MEM_ADVISE_UNSET_ACCESSED_BY;

    *done = 0;
    for (; members != 0; members &= members - 1) {
        CUmemLocation where = mm_bit_location(__builtin_ctzll(members));
        CUresult code = cu->MemAdvise(range.start, range.size, advice, where);
        if (code != CUDA_SUCCESS) {
            return refuse_advice(cu, range, where, code, st);
        }
        *done |= mm_location_bit(where);
    }
    return 0;
}

int
mm_range_switch_accessed_by(mm_driver *cu, mm_range range, mm_location_set members, bool on,
                            mm_status *st)
{
    mm_location_set done;
    mm_scope scope;
    int rc;

    if (range.size == 0) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, MM_ANY_DEVICE, st) < 0) {
        return -1;
    }
    rc = switch_members(cu, range, members, on, &done, st);
    mm_scope_leave(&scope);
    return rc;
}

/* Of members that were set, sees to it that they read back. Recording one can drop another from a
 * part, so all are looked at again until they stay. */
static void
settle_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    enum { MOST_ROUNDS = 8 };
    mm_location_set now;

    for (int n = 0; n < MOST_ROUNDS && ask_members(cu, range, &now); n++) {
        mm_location_set missing = members & ~now;
        if (missing == 0) {
            return;
        }
        for (; missing != 0; missing &= missing - 1) {
            settle_record(cu, range, CU_MEM_ADVISE_SET_ACCESSED_BY,
                          mm_bit_location(__builtin_ctzll(missing)));
        }
    }
}

/* Both try each of the members; a failure is dropped, because an earlier one is being reported. */

static void
take_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    for (; members != 0; members &= members - 1) {
        take_from_pages(cu, range, CU_MEM_ADVISE_SET_ACCESSED_BY,
                        mm_bit_location(__builtin_ctzll(members)));
    }
}

static void
give_members(mm_driver *cu, mm_range range, mm_location_set members)
{
    for (mm_location_set left = members; left != 0; left &= left - 1) {
        (void)cu->MemAdvise(range.start, range.size, CU_MEM_ADVISE_SET_ACCESSED_BY,
                            mm_bit_location(__builtin_ctzll(left)));
    }
    settle_members(cu, range, members);
}

int
mm_range_change_accessed_by(mm_driver *cu, mm_range range, mm_location_set from,
                            mm_location_set to, mm_status *st)
{
    mm_location_set added = to & ~from, removed = from & ~to, done = 0, now = 0;
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
        settle_members(cu, range, added);
    }
    if (rc < 0) {
        /* The advice that failed may have been taken: a driver may report an earlier error after
         * it acted. So what was added shows now, and what was removed may be set once too often. */
        (void)ask_members(cu, range, &now);
        take_members(cu, range, added & (done | now));
        give_members(cu, range, removed);
    }
    mm_scope_leave(&scope);
    return rc;
}
