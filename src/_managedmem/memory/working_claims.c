/* working_claims.c: the ranges of the memory of all working sets, in a tree.
 *
 * The tree is a treap: ordered by the starts of the ranges, a heap by random priorities. Ranges share no
 * page, but for those of memory that was closed, whose addresses may belong to other memory by now. */
#include "working_claims.h"

#include <assert.h>
#include <pthread.h>

/* Guards the tree; nothing else is locked while it is held. */
static pthread_mutex_t claims_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_working_range *claimed_ranges;
static uint64_t latest_priority = 1;

/* --- the tree ----------------------------------------------------------------------------- */

static bool
is_lower(const mm_working_range *a, const mm_working_range *b)
{
    return a->range.start != b->range.start ? a->range.start < b->range.start : a < b;
}

static CUdeviceptr
highest_page(const mm_working_range *root)
{
    return root != NULL ? root->claim.page_behind : 0;
}

static mm_working_range *
with_highest_page(mm_working_range *root)
{
    CUdeviceptr lower = highest_page(root->claim.lower), higher = highest_page(root->claim.higher);

    root->claim.page_behind = mm_page_behind(&root->range);
    if (root->claim.page_behind < lower) {
        root->claim.page_behind = lower;
    }
    if (root->claim.page_behind < higher) {
        root->claim.page_behind = higher;
    }
    return root;
}

/* Divides a tree into the ranges that are lower than one, and the others. */
static void
split_ranges(mm_working_range *root, const mm_working_range *at, mm_working_range **lower,
             mm_working_range **others)
{
    if (root == NULL) {
        *lower = *others = NULL;
    } else if (is_lower(root, at)) {
        split_ranges(root->claim.higher, at, &root->claim.higher, others);
        *lower = with_highest_page(root);
    } else {
        split_ranges(root->claim.lower, at, lower, &root->claim.lower);
        *others = with_highest_page(root);
    }
}

/* All ranges of the first tree are lower. */
static mm_working_range *
join_trees(mm_working_range *lower, mm_working_range *higher)
{
    if (lower == NULL || higher == NULL) {
        return lower != NULL ? lower : higher;
    }
    if (lower->claim.priority > higher->claim.priority) {
        lower->claim.higher = join_trees(lower->claim.higher, higher);
        return with_highest_page(lower);
    }
    higher->claim.lower = join_trees(lower, higher->claim.lower);
    return with_highest_page(higher);
}

static void
insert_range(mm_working_range *range)
{
    mm_working_range *lower, *others;

    latest_priority =
        latest_priority * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    range->claim.priority = latest_priority >> 16;
    range->claim.lower = range->claim.higher = NULL;
    split_ranges(claimed_ranges, range, &lower, &others);
    claimed_ranges = join_trees(join_trees(lower, with_highest_page(range)), others);
}

static mm_working_range *
without_range(mm_working_range *root, const mm_working_range *range)
{
    assert(root != NULL);
    if (root == range) {
        return join_trees(root->claim.lower, root->claim.higher);
    }
    if (is_lower(range, root)) {
        root->claim.lower = without_range(root->claim.lower, range);
    } else {
        root->claim.higher = without_range(root->claim.higher, range);
    }
    return with_highest_page(root);
}

/* The lowest range that has a page in common with this one; NULL if there is none. */
static const mm_working_range *
find_common_page(const mm_working_range *root, const mm_range *range)
{
    const mm_working_range *found;

    if (highest_page(root) <= mm_first_page_of(range)) {
        return NULL;
    }
    found = find_common_page(root->claim.lower, range);
    if (found != NULL || mm_first_page_of(&root->range) >= mm_page_behind(range)) {
        return found;
    }
    if (mm_page_behind(&root->range) > mm_first_page_of(range)
        && (root->guard == NULL || !mm_guard_is_closed(root->guard))) {
        return root;
    }
    return find_common_page(root->claim.higher, range);
}

/* --- claims ------------------------------------------------------------------------------- */

static int
refuse_shared_page(const mm_working_memory *m, const mm_range *range,
                   const mm_working_range *claimed, mm_status *st)
{
    const mm_working_memory *other = claimed->claim.claimant;
    CUdeviceptr first = mm_first_page_of(range), theirs = mm_first_page_of(&claimed->range);
    unsigned long long page = (first > theirs ? first : theirs) * mm_page_size();

    if (m->set == other->set) {
        return mm_fail(st, MM_BAD_VALUE,
                       "the targets share the page at 0x%llx with group %llu of the working set: "
                       "memory can be in one group, and groups need pages of their own",
                       page, (unsigned long long)other->number);
    }
    return mm_fail(st, MM_BAD_VALUE,
                   "the targets share the page at 0x%llx with group %llu of another working set: "
                   "close that one first",
                   page, (unsigned long long)other->number);
}

static int
refuse_claimed_pages(const mm_working_memory *m, mm_status *st)
{
    for (size_t i = 0; i < m->count; i++) {
        const mm_working_range *found = find_common_page(claimed_ranges, &m->ranges[i].range);
        if (found != NULL) {
            return refuse_shared_page(m, &m->ranges[i].range, found, st);
        }
    }
    return 0;
}

int
mm_claim_memory(mm_working_memory *m, mm_status *st)
{
    int rc;

    (void)pthread_mutex_lock(&claims_mutex);
    rc = refuse_claimed_pages(m, st);
    for (size_t i = 0; rc == 0 && i < m->count; i++) {
        m->ranges[i].claim.claimant = m;
        insert_range(&m->ranges[i]);
    }
    (void)pthread_mutex_unlock(&claims_mutex);
    return rc;
}

void
mm_give_back_claim(mm_working_memory *m)
{
    (void)pthread_mutex_lock(&claims_mutex);
    for (size_t i = 0; i < m->count && m->ranges[i].claim.claimant != NULL; i++) {
        claimed_ranges = without_range(claimed_ranges, &m->ranges[i]);
        m->ranges[i].claim.claimant = NULL;
    }
    (void)pthread_mutex_unlock(&claims_mutex);
}
