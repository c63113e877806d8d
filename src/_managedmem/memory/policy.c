/* policy.c: changing the advice of pages from one state to another, with as few calls as their
 * records allow; policies of several ranges and of new memory. */
#include "policy.h"

#include <assert.h>

#include "recorded_calls.h"

/* --- changing --------------------------------------------------------------------------- */

/* An attribute of a policy is one of these two, or the bit of an accessed-by member. The preferred
 * location comes first, because copies of read-mostly pages collapse to it. */
enum { PREFERRED = -2, READ_MOSTLY = -1 };

enum { MOST_NAMED = 3 }; /* spans in a message */

/* After a failure: stop the change, or try the rest. UNDO_CHANGE also tries the rest, and undoes a
 * failed change even where its advice is not recorded. */
typedef enum { STOP_CHANGE, TRY_REST, UNDO_CHANGE } failure_mode;

/* The pages that one call advises: all adjacent pages; adjacent pages with equal records, which the
 * driver records together; or a single page, which the driver always records. */
typedef enum { GROUP_ADJACENT, GROUP_EQUAL, GROUP_SINGLE } page_grouping;

/* A change in progress. Its span is advised when the next pages do not belong to it. */
typedef struct {
    mm_driver *cu;
    failure_mode on_failure;
    int attribute;
    mm_range span; /* adjacent pages with one wanted policy */
    size_t runs; /* in the span */
    bool lacking; /* some pages of the span do not have the wanted policy */
    const mm_policy *wanted;
    page_grouping grouping;
    bool unverified; /* some advice may not be recorded */
    bool nodes_ignored; /* the machine ignores NUMA nodes as preferred locations */
    CUmemLocation
        current_node; /* the node of HOST_NUMA_CURRENT; its type is INVALID until it is known */
    size_t failures;
    mm_status *st;
} change;

static bool
is_same_advice(int attribute, const mm_policy *a, const mm_policy *b)
{
    switch (attribute) {
    case READ_MOSTLY:
        return a->read_mostly == b->read_mostly;
    case PREFERRED:
        return mm_same_location(a->preferred, b->preferred);
    default:
        assert(attribute >= 0 && attribute <= MM_HOST_BIT);
        return ((a->accessed_by ^ b->accessed_by) >> attribute & 1) == 0;
    }
}

/* The advice that gives pages an attribute of a policy. */
static CUmem_advise
attribute_advice(int attribute, const mm_policy *policy, CUmemLocation *location)
{
    *location = mm_host(); /* for advice whose location the driver ignores */
    if (attribute == READ_MOSTLY) {
        return policy->read_mostly ? CU_MEM_ADVISE_SET_READ_MOSTLY
                                   : CU_MEM_ADVISE_UNSET_READ_MOSTLY;
    }
    if (attribute == PREFERRED) {
        if ((int)policy->preferred.type == CU_MEM_LOCATION_TYPE_INVALID) {
            return CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION;
        }
        *location = policy->preferred;
        return CU_MEM_ADVISE_SET_PREFERRED_LOCATION;
    }
    *location = mm_location_from_bit(attribute);
    return policy->accessed_by >> attribute & 1 ? CU_MEM_ADVISE_SET_ACCESSED_BY
                                                : CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

/* The preferred location that reads back from pages with this policy. */
static CUmemLocation
recorded_preference(const change *c, const mm_policy *policy)
{
    if (c->nodes_ignored && mm_is_numa_host(policy->preferred)) {
        return mm_host();
    }
    return policy->preferred.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
                   && (int)c->current_node.type != CU_MEM_LOCATION_TYPE_INVALID
               ? c->current_node
               : policy->preferred;
}

static int
readvise_span_node(change *c, CUmemLocation location, mm_status *st)
{
    CUmemLocation node;
    int rc = mm_range_readvise_node(c->cu, c->span, &node, st);

    c->nodes_ignored = node.type != CU_MEM_LOCATION_TYPE_HOST_NUMA;
    if (rc == 0 && !c->nodes_ignored && location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT) {
        c->current_node = node;
    }
    return rc;
}

/* Adds to the status that the span is not restored. */
static void
report_span(change *c, CUmem_advise advice, CUmemLocation location)
{
    char text[MM_LOCATION_TEXT];

    mm_status_add(c->st, "Not restored: %s%s%s of %zu bytes at 0x%llx.", mm_advice_name(advice),
                  mm_advice_needs_location(advice) ? " " : "",
                  mm_advice_needs_location(advice) ? mm_location_text(location, text) : "",
                  c->span.size, (unsigned long long)c->span.start);
}

/* False for undoing, and for later groupings, which repeat advice only to have it recorded by the
 * driver. */
static bool
is_first_advice(const change *c)
{
    return c->grouping == GROUP_ADJACENT && c->on_failure != UNDO_CHANGE;
}

static void
advise_span(change *c)
{
    uint64_t begun = mm_call_begin();
    CUmemLocation location;
    CUmem_advise advice;
    mm_status st = {.kind = MM_OK};
    int rc;

    c->unverified =
        c->unverified || (c->lacking && (c->runs > 1 || c->grouping != GROUP_ADJACENT));
    c->runs = 0;
    if (!c->lacking || (c->failures > 0 && c->on_failure == STOP_CHANGE)) {
        return;
    }
    assert(c->span.size > 0);
    advice = attribute_advice(c->attribute, c->wanted, &location);
    if (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION) {
        location = recorded_preference(c, c->wanted);
    }
    rc = mm_range_advise_once(c->cu, c->span, advice, location, &st);
    if (rc == 0 && advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && mm_is_numa_host(location)
        && c->span.allocation != 0) {
        rc = readvise_span_node(c, location, &st);
    }
    if (begun != 0 && rc == 0 && is_first_advice(c)) {
        mm_record_advice(c->span, advice, location, begun);
    }
    if (rc < 0 && c->failures++ == 0) {
        *c->st = st;
    }
    if (rc < 0 && c->on_failure != STOP_CHANGE && c->failures <= MOST_NAMED) {
        report_span(c, advice, location);
    }
}

/* True if the record of pages agrees with the wanted policy. */
static bool
has_wanted_record(const change *c, const mm_policy *present, const mm_policy *wanted)
{
    return c->attribute == PREFERRED
               ? mm_same_location(present->preferred, recorded_preference(c, wanted))
               : is_same_advice(c->attribute, present, wanted);
}

/* Extends the span by pages, or advises it and begins another one. A whole span is advised even if
 * only some of its pages lack the advice, because the records of the others may be wrong. System
 * memory has no records, and counts as lacking all advice. */
static void
extend_span(change *c, mm_range pages, const mm_policy *present, const mm_policy *wanted)
{
    if (c->runs > 0
        && (c->grouping != GROUP_ADJACENT || pages.start != mm_range_end(c->span)
            || pages.allocation != c->span.allocation
            || !is_same_advice(c->attribute, c->wanted, wanted))) {
        advise_span(c);
    }
    if (c->runs++ == 0) {
        c->span = (mm_range){pages.start, 0, pages.allocation};
        c->wanted = wanted;
        c->lacking = false;
    }
    c->span.size += pages.size;
    c->lacking = c->lacking || pages.allocation == 0 || !has_wanted_record(c, present, wanted);
}

/* extend_span for pages with one record and one wanted policy, which may need a call for each
 * page. */
static void
extend_span_by_group(change *c, mm_range pages, const mm_policy *present, const mm_policy *wanted)
{
    CUdeviceptr page = mm_page_size(), end = mm_range_end(pages);

    assert(pages.size > 0);
    if (c->grouping != GROUP_ADJACENT && pages.allocation == 0) {
        return; /* outside of managed allocations there is no record */
    }
    while (c->grouping == GROUP_SINGLE && pages.start / page < (end - 1) / page) {
        mm_range first = mm_first_page(pages);
        extend_span(c, first, present, wanted);
        pages.start += first.size;
        pages.size -= first.size;
    }
    extend_span(c, pages, present, wanted);
}

/* Walks the pages that are in both lists. */
static void
change_attribute(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    size_t i = 0, j = 0;

    c->runs = 0;
    c->lacking = false;
    while (i < from->count && j < to->count) {
        const mm_page_run *present = &from->run[i], *wanted = &to->run[j];
        CUdeviceptr start = present->range.start, end = mm_range_end(present->range);
        CUdeviceptr wanted_end = mm_range_end(wanted->range);
        start = start > wanted->range.start ? start : wanted->range.start;
        i += end <= wanted_end;
        j += wanted_end <= end;
        end = end < wanted_end ? end : wanted_end;
        if (start < end) {
            mm_range pages = {start, (size_t)(end - start), present->range.allocation};
            extend_span_by_group(c, pages, &present->policy, &wanted->policy);
        }
    }
    advise_span(c);
}

static void
change_all_attributes(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    c->unverified = c->on_failure == UNDO_CHANGE && c->grouping == GROUP_ADJACENT;
    for (c->attribute = PREFERRED; c->attribute <= MM_HOST_BIT; c->attribute++) {
        if (c->attribute < c->cu->device_count || c->attribute == MM_HOST_BIT) {
            change_attribute(c, from, to);
        }
    }
}

/* The driver does not tell the advice of system memory: such memory gets one run without a
 * policy. */
static int
read_runs(mm_driver *cu, mm_range range, mm_page_runs *runs, mm_status *st)
{
    mm_page_run unknown = {.range = range};

    return range.allocation == 0 && range.size > 0
               ? mm_page_runs_append(runs, &unknown, st)
               : mm_page_runs_read(cu, range, MM_BY_RECORD, runs, st);
}

static int
read_again(mm_driver *cu, const mm_page_runs *list, mm_page_runs *now, mm_status *st)
{
    for (size_t i = 0; i < list->count; i++) {
        if (read_runs(cu, list->run[i].range, now, st) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Repeats advice for pages without its record (see advice.c): first by runs of one record, which
 * are recorded completely, then page by page. */
static void
readvise_pages(change *c, const mm_page_runs *from, const mm_page_runs *to)
{
    for (c->grouping = GROUP_EQUAL;
         c->grouping <= GROUP_SINGLE && c->unverified && c->failures == 0; c->grouping++) {
        mm_page_runs now = {0};
        if (read_again(c->cu, from, &now, c->st) == 0) {
            change_all_attributes(c, &now, to);
        } else {
            c->failures++;
        }
        mm_page_runs_free(&now);
    }
}

/* Changes the pages that are in both lists from one policy to the other: one call for each
 * attribute and span that differs, repeated where it is not recorded. `from` must be read by
 * record; for UNDO_CHANGE it is the target of the failed change. The status has the first failure
 * and, unless that stopped the change, the spans that were not changed. */
static int
change_pages(mm_driver *cu, const mm_page_runs *from, const mm_page_runs *to,
             failure_mode on_failure, mm_status *st)
{
    change c = {.cu = cu, .on_failure = on_failure, .st = st};

    change_all_attributes(&c, from, to);
    readvise_pages(&c, from, to);
    if (on_failure != STOP_CHANGE && c.failures > MOST_NAMED) {
        mm_status_add(st, "And %zu more.", c.failures - MOST_NAMED);
    }
    return c.failures > 0 ? -1 : 0;
}

/* --- policies --------------------------------------------------------------------------- */

/* Driver 580 keeps records of freed memory in new memory of up to this size (conformance: records
 * of freed memory). */
enum { MOST_BYTES_WITH_OLD_RECORDS = 2 << 20 };

int
mm_policy_advise_new(mm_driver *cu, mm_range memory, const mm_policy *policy, mm_status *st)
{
    mm_page_run fresh = {.range = memory}, advised = {.range = memory, .policy = *policy};
    mm_page_runs wanted = {.run = &advised, .count = 1, .capacity = 1}, present = {0};
    int rc;

    if (memory.size == 0) {
        return 0;
    }
    rc = memory.size <= MOST_BYTES_WITH_OLD_RECORDS
             ? mm_page_runs_read(cu, memory, MM_BY_RECORD, &present, st)
             : mm_page_runs_append(&present, &fresh, st);
    if (rc == 0) {
        rc = change_pages(cu, &present, &wanted, STOP_CHANGE, st);
    }
    mm_page_runs_free(&present);
    return rc;
}

int
mm_policy_read(mm_driver *cu, mm_batch *b, mm_page_runs *runs, mm_status *st)
{
    int rc = 0;

    assert(!b->edges_interleaved);
    *runs = (mm_page_runs){0};
    for (size_t i = 0; i < b->count; i++) {
        b->transfers[i].location = mm_host();
    }
    mm_batch_merge(b);
    if (b->ordered) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory to sort %zu ranges", b->count);
    }
    for (size_t i = 0; rc == 0 && i < b->count; i++) {
        rc = read_runs(cu, b->transfers[i].range, runs, st);
    }
    if (rc < 0) {
        mm_page_runs_free(runs);
    }
    return rc;
}

/* One policy for all ranges, as runs. */
static int
make_uniform_runs(const mm_batch *b, const mm_policy *policy, mm_page_runs *runs, mm_status *st)
{
    *runs = (mm_page_runs){0};
    for (size_t i = 0; i < b->count; i++) {
        mm_page_run run = {.range = b->transfers[i].range, .policy = *policy};
        if (mm_page_runs_append(runs, &run, st) < 0) {
            mm_page_runs_free(runs);
            return -1;
        }
    }
    return 0;
}

/* True if the pages match the list exactly; false if they do not, or the driver cannot say. */
static bool
matches_runs(mm_driver *cu, mm_batch *b, const mm_page_runs *list)
{
    mm_page_runs present;
    mm_status ignored;
    bool same;

    if (mm_policy_read(cu, b, &present, &ignored) < 0) {
        return false;
    }
    same = present.count == list->count;
    for (size_t i = 0; same && i < present.count; i++) {
        same = present.run[i].range.start == list->run[i].range.start
               && present.run[i].range.allocation != 0
               && mm_same_policy(&present.run[i].policy, &list->run[i].policy);
    }
    mm_page_runs_free(&present);
    return same;
}

/* Undoes a failed change on all pages, including the advice that failed, because a driver may act
 * and then report an earlier error. Memory that refuses all advice, such as a pool's, refuses the
 * undo too, but has not changed. */
static void
undo_change(mm_driver *cu, mm_batch *b, const mm_page_runs *wanted, const mm_page_runs *before,
            mm_status *st)
{
    mm_status undo;

    if (change_pages(cu, wanted, before, UNDO_CHANGE, &undo) < 0 && !matches_runs(cu, b, before)) {
        mm_status_add(st, "%s", undo.detail);
    }
}

int
mm_policy_apply(mm_driver *cu, mm_batch *b, const mm_policy *policy, mm_page_runs *before,
                mm_status *st)
{
    mm_page_runs wanted;
    int rc;

    if (mm_policy_read(cu, b, before, st) < 0) {
        return -1;
    }
    rc = make_uniform_runs(b, policy, &wanted, st);
    if (rc == 0) {
        rc = change_pages(cu, before, &wanted, STOP_CHANGE, st);
        if (rc < 0) {
            undo_change(cu, b, &wanted, before, st);
        }
        mm_page_runs_free(&wanted);
    }
    if (rc < 0) {
        mm_page_runs_free(before);
    }
    return rc;
}

int
mm_policy_restore(mm_driver *cu, mm_batch *b, const mm_page_runs *before, mm_status *st)
{
    mm_page_runs present;
    int rc;

    if (mm_policy_read(cu, b, &present, st) < 0) {
        mm_status_add(st, "Nothing was restored");
        return -1;
    }
    rc = change_pages(cu, &present, before, TRY_REST, st);
    mm_page_runs_free(&present);
    return rc;
}
