/* unsupported.c: passing over ranges that cannot take an operation on this system. */
#include "unsupported.h"

#include <assert.h>

#include "advice.h"

bool
mm_batch_is_empty(const mm_batch *b)
{
    for (size_t i = 0; i < b->count; i++) {
        if (b->transfers[i].range.size > 0) {
            return false;
        }
    }
    return true;
}

/* True if no range can take the operation: the calls for discards and for batches came with CUDA
 * 13.0, and drivers refuse them if one device lacks concurrent access. */
static bool
is_unsupported(const mm_driver *cu, mm_operation op, mm_dispatch dispatch)
{
    bool needs_batch_calls = op != MM_PREFETCH || dispatch == MM_DISPATCH_BATCH;

    return needs_batch_calls && (cu->MemDiscardBatchAsync == NULL || !cu->concurrent_access);
}

bool
mm_may_skip_prefetches(const mm_driver *cu)
{
    return !cu->concurrent_access || is_unsupported(cu, MM_PREFETCH, MM_DISPATCH_BATCH);
}

static bool
has_whole_page(mm_range range)
{
    mm_status ignored;

    return mm_range_whole_pages(&range, &ignored) == 0;
}

size_t
mm_skip_unsupported(const mm_driver *cu, mm_operation op, mm_batch *b, mm_dispatch dispatch)
{
    bool all = is_unsupported(cu, op, dispatch);
    size_t skipped = 0;

    assert(op == MM_PREFETCH || mm_discards(op));
    for (size_t i = 0; i < b->count; i++) {
        mm_range *range = &b->transfers[i].range;
        if (range->size > 0 && (all || (mm_discards(op) && !has_whole_page(*range)))) {
            range->size = 0;
            skipped++;
        }
    }
    return skipped;
}

/* Prefetches range by range, because each may have a location of its own and the device of the
 * stream counts too. Targets keep their order, so that the last one wins. Host functions are queued
 * only on request, because most of these calls are refused. */
static int
prefetch_each(mm_driver *cu, const mm_batch *b, const mm_dispatch_options *options,
              size_t *skipped, mm_status *st)
{
    mm_defer defer = options->defer == MM_DEFER_YES ? MM_DEFER_YES : MM_DEFER_NO;

    for (size_t i = 0; i < b->count; i++) {
        const mm_transfer *t = &b->transfers[i];
        if (mm_range_prefetch(cu, t->range, t->location, options->stream, defer, st) == 0) {
            continue;
        }
        if (st->kind != MM_DRIVER_CALL || st->code != CUDA_ERROR_INVALID_DEVICE) {
            return -1;
        }
        ++*skipped;
    }
    return 0;
}

int
mm_batch_run_or_skip(mm_driver *cu, mm_operation op, mm_batch *b,
                     const mm_dispatch_options *options, size_t *skipped, mm_status *st)
{
    if (op == MM_PREFETCH && !cu->concurrent_access) {
        return prefetch_each(cu, b, options, skipped, st);
    }
    /* A driver without discards refuses empty discards too. */
    return is_unsupported(cu, op, options->dispatch) ? 0 : mm_batch_run(cu, op, b, options, st);
}

/* --- advice ----------------------------------------------------------------------------- */

/* Passes over ranges whose location is a device without concurrent access, which drivers refuse. */
static int
skip_locations(mm_driver *cu, mm_batch *b, size_t *skipped, mm_status *st)
{
    for (size_t i = 0; i < b->count; i++) {
        mm_transfer *t = &b->transfers[i];
        int concurrent = 1;
        if (t->range.size == 0 || t->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
            continue;
        }
        MM_TRY(cu, DeviceGetAttribute, st, &concurrent,
               CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, t->location.id);
        if (!concurrent) {
            t->range.size = 0;
            ++*skipped;
        }
    }
    return 0;
}

/* Sets *pooled if the range is pool memory; for other managed memory the driver answers NULL. */
static int
is_pool_memory(mm_driver *cu, mm_range range, bool *pooled, mm_status *st)
{
    CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
    CUmemoryPool pool = NULL;
    void *out = &pool;

    *pooled = false;
    if (range.size > 0 && range.allocation != 0) {
        MM_TRY(cu, PointerGetAttributes, st, 1, &attribute, &out, range.start);
        *pooled = pool != NULL;
    }
    return 0;
}

/* Sets *refused if the driver refuses the advice because the range is pool memory. Another driver
 * may accept it, so this one is asked. *before becomes the earlier advice. */
static int
is_advice_refused(mm_driver *cu, const mm_transfer *t, CUmem_advise advice,
                  mm_advice_before *before, bool *refused, mm_status *st)
{
    if (mm_advice_query(cu, t->range, advice, t->location, before, st) < 0) {
        return -1;
    }
    if (mm_range_advise_once(cu, t->range, advice, t->location, st) == 0) {
        return 0;
    }
    *refused = st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_SUPPORTED;
    if (!*refused) {
        mm_advice_restore(cu, t->range, advice, t->location, before, MM_FAILED);
    }
    return *refused ? 0 : -1;
}

/* Passes over pool memory if the driver refuses the advice on the first range of it. If the driver
 * accepts, *advised is that range, which has the advice now, and *before its earlier advice. */
static int
skip_pool_memory(mm_driver *cu, mm_batch *b, CUmem_advise advice, size_t *skipped,
                 mm_transfer *advised, mm_advice_before *before, mm_status *st)
{
    bool pooled, refused = false;

    advised->range.size = 0;
    for (size_t i = 0; i < b->count && advised->range.size == 0; i++) {
        mm_transfer *t = &b->transfers[i];
        if (is_pool_memory(cu, t->range, &pooled, st) < 0
            || (pooled && !refused
                && is_advice_refused(cu, t, advice, before, &refused, st) < 0)) {
            return -1;
        }
        if (pooled && refused) {
            t->range.size = 0;
            ++*skipped;
        } else if (pooled) {
            *advised = *t;
        }
    }
    return 0;
}

int
mm_batch_advise_or_skip(mm_driver *cu, mm_batch *b, CUmem_advise advice, size_t *skipped,
                        mm_status *st)
{
    mm_advice_before before;
    mm_transfer advised;
    int rc;

    if ((!cu->concurrent_access && skip_locations(cu, b, skipped, st) < 0)
        || skip_pool_memory(cu, b, advice, skipped, &advised, &before, st) < 0) {
        return -1;
    }
    rc = mm_batch_advise(cu, b, advice, st);
    if (rc < 0 && advised.range.size > 0) {
        mm_advice_restore(cu, advised.range, advice, advised.location, &before, MM_ADVISED);
    }
    return rc;
}

/* --- policies --------------------------------------------------------------------------- */

/* Passes over all ranges if the policy names a device without concurrent access. */
static int
skip_policy_locations(mm_driver *cu, mm_batch *b, const mm_policy *policy, size_t *skipped,
                      mm_status *st)
{
    mm_location_set members = policy->accessed_by;
    CUmemLocation location = policy->preferred;

    do {
        for (size_t i = 0; i < b->count; i++) {
            b->transfers[i].location = location;
        }
        if (skip_locations(cu, b, skipped, st) < 0) {
            return -1;
        }
    } while (mm_next_location(&members, &location));
    return 0;
}

/* Sets *lacking to the first pages of the range that do not have the policy; empty if all pages
 * have it. */
static int
find_lacking_pages(mm_driver *cu, mm_range range, const mm_policy *policy, mm_page_run *lacking,
                   mm_status *st)
{
    mm_page_runs runs = {0};
    int rc = mm_page_runs_read(cu, range, MM_BY_RECORD, &runs, st);

    lacking->range.size = 0;
    for (size_t i = 0; rc == 0 && lacking->range.size == 0 && i < runs.count; i++) {
        if (!mm_same_policy(&runs.run[i].policy, policy)) {
            *lacking = runs.run[i];
        }
    }
    mm_page_runs_free(&runs);
    return rc;
}

/* Asks the driver by repeating advice that the pages have, which changes nothing. */
static int
is_all_advice_refused(mm_driver *cu, const mm_page_run *pages, bool *refused, mm_status *st)
{
    CUmem_advise present = pages->policy.read_mostly ? CU_MEM_ADVISE_SET_READ_MOSTLY
                                                     : CU_MEM_ADVISE_UNSET_READ_MOSTLY;
    int rc = mm_range_advise_once(cu, pages->range, present, mm_host(), st);

    *refused = rc < 0 && st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_NOT_SUPPORTED;
    return *refused ? 0 : rc;
}

/* Passes over pool memory that lacks the policy, if the driver refuses advice on the first range of
 * such memory. */
static int
skip_policy_pools(mm_driver *cu, mm_batch *b, const mm_policy *policy, size_t *skipped,
                  mm_status *st)
{
    bool asked = false, refused = false, pooled;
    mm_page_run lacking;

    for (size_t i = 0; i < b->count && (refused || !asked); i++) {
        mm_range *range = &b->transfers[i].range;
        if (is_pool_memory(cu, *range, &pooled, st) < 0) {
            return -1;
        }
        lacking.range.size = 0;
        if (pooled && find_lacking_pages(cu, *range, policy, &lacking, st) < 0) {
            return -1;
        }
        if (lacking.range.size > 0 && !asked
            && is_all_advice_refused(cu, &lacking, &refused, st) < 0) {
            return -1;
        }
        asked = asked || lacking.range.size > 0;
        if (lacking.range.size > 0 && refused) {
            range->size = 0;
            ++*skipped;
        }
    }
    return 0;
}

int
mm_policy_apply_or_skip(mm_driver *cu, mm_batch *b, const mm_policy *policy, mm_page_runs *before,
                        size_t *skipped, mm_status *st)
{
    mm_batch work;
    int rc;

    if ((!cu->concurrent_access && skip_policy_locations(cu, b, policy, skipped, st) < 0)
        || skip_policy_pools(cu, b, policy, skipped, st) < 0) {
        return -1;
    }
    rc = mm_batch_copy(&work, b, st);
    if (rc == 0) {
        rc = mm_policy_apply(cu, &work, policy, before, st);
    }
    mm_batch_free(&work);
    return rc;
}
