/* copy_pairs.c: checks, merges and issues several copies, and passes their hints to the driver. */
#include "copy_pairs.h"

#include <assert.h>
#include <stdlib.h>

#include "copy.h"

/* From this size on, a copy keeps the copy engine busy for longer than the next call takes. */
enum { ALONE_FROM = 1 << 20 };

/* --- pairs ------------------------------------------------------------------------------ */

static bool
is_system(const mm_copy_pair *pair)
{
    return pair->from.range.allocation == 0 || pair->to.range.allocation == 0;
}

static bool
is_hinted(const mm_copy_pair *pair)
{
    return pair->from.location.type != CU_MEM_LOCATION_TYPE_NONE
           || pair->to.location.type != CU_MEM_LOCATION_TYPE_NONE;
}

static int
pair_up(mm_copies *c, const mm_batch *from, const mm_batch *to, mm_status *st)
{
    for (size_t i = 0; i < from->count; i++) {
        const mm_copy_pair pair = {from->transfers[i], to->transfers[i], i};
        if (pair.from.range.size != pair.to.range.size) {
            return mm_fail(st, MM_BAD_VALUE,
                           "cannot copy pair %zu: the source has %zu bytes, the destination %zu",
                           i, pair.from.range.size, pair.to.range.size);
        }
        if (pair.from.range.size > 0) {
            c->pairs[c->count++] = pair;
            c->hinted = c->hinted || is_hinted(&pair);
        }
    }
    return 0;
}

static int
compare_destinations(const void *a, const void *b)
{
    const mm_copy_pair *x = a, *y = b;
    CUdeviceptr left = x->to.range.start, right = y->to.range.start;

    return left < right ? -1 : left > right;
}

static void
sort_pairs(mm_copies *c)
{
    for (size_t i = 1; i < c->count; i++) {
        if (compare_destinations(&c->pairs[i - 1], &c->pairs[i]) > 0) {
            qsort(c->pairs, c->count, sizeof *c->pairs, compare_destinations);
            return;
        }
    }
}

/* The number of sorted pairs whose destination begins before an address. */
static size_t
count_before(const mm_copies *c, CUdeviceptr address)
{
    size_t low = 0, high = c->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (c->pairs[middle].to.range.start < address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static int
refuse_overlap(const char *side, size_t number, size_t destination, mm_range a, mm_range b,
               mm_status *st)
{
    CUdeviceptr start = a.start > b.start ? a.start : b.start;
    CUdeviceptr end = mm_range_end(a) < mm_range_end(b) ? mm_range_end(a) : mm_range_end(b);

    return mm_fail(
        st, MM_BAD_VALUE,
        "cannot copy: the %s of pair %zu and the destination of pair %zu share %zu bytes, "
        "and copies of one call have no order: give each destination memory of its own, "
        "or copy in several calls",
        side, number, destination, (size_t)(end - start));
}

/* Refuses overlaps, because the driver copies in no defined order. The pairs are sorted. */
static int
check_overlaps(const mm_copies *c, mm_status *st)
{
    for (size_t i = 1; i < c->count; i++) {
        const mm_copy_pair *pair = &c->pairs[i], *before = pair - 1;
        if (pair->to.range.start < mm_range_end(before->to.range)) {
            return refuse_overlap("destination", pair->number, before->number, pair->to.range,
                                  before->to.range, st);
        }
    }
    for (size_t i = 0; i < c->count; i++) {
        mm_range source = c->pairs[i].from.range;
        size_t before = count_before(c, mm_range_end(source));
        const mm_copy_pair *last = before > 0 ? &c->pairs[before - 1] : NULL;
        if (last != NULL && mm_range_end(last->to.range) > source.start) {
            return refuse_overlap("source", c->pairs[i].number, last->number, source,
                                  last->to.range, st);
        }
    }
    return 0;
}

/* A driver refuses a range over two allocations. */
static bool
follows(const mm_transfer *left, const mm_transfer *right)
{
    return mm_range_end(left->range) == right->range.start
           && left->range.allocation == right->range.allocation
           && mm_same_location(left->location, right->location);
}

static void
join_copies(mm_copies *c)
{
    size_t last = 0;

    for (size_t i = 1; i < c->count; i++) {
        mm_copy_pair *pair = &c->pairs[last];
        const mm_copy_pair *next = &c->pairs[i];
        if (!is_system(pair) && follows(&pair->from, &next->from)
            && follows(&pair->to, &next->to)) {
            pair->from.range.size += next->from.range.size;
            pair->to.range.size += next->to.range.size;
        } else {
            c->pairs[++last] = *next;
        }
    }
    c->count = c->count > 0 ? last + 1 : 0;
}

int
mm_copies_init(mm_copies *c, mm_driver *cu, const mm_batch *from, const mm_batch *to,
               const mm_copy_options *options, mm_status *st)
{
    assert(from->count == to->count);
    *c = (mm_copies){.cu = cu, .options = *options};
    c->hinted = options->order != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || options->flags != 0;
    if (from->count == 0) {
        return 0;
    }
    c->pairs = malloc(from->count * sizeof *c->pairs);
    if (c->pairs == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu copies", from->count);
    }
    if (pair_up(c, from, to, st) < 0) {
        return -1;
    }
    sort_pairs(c);
    if (check_overlaps(c, st) < 0) {
        return -1;
    }
    join_copies(c);
    return 0;
}

void
mm_copies_free(mm_copies *c)
{
    free(c->pairs);
}

/* --- routes ----------------------------------------------------------------------------- */

/* Moves the pairs of the batch call to the front, and returns their number. */
static size_t
choose_batch(mm_copies *c)
{
    size_t batched = 0;

    for (size_t i = 0; i < c->count; i++) {
        mm_copy_pair pair = c->pairs[i];
        if (!is_system(&pair) && (c->hinted || pair.to.range.size < ALONE_FROM)) {
            c->pairs[i] = c->pairs[batched];
            c->pairs[batched++] = pair;
        }
    }
    return batched > 1 || c->hinted ? batched : 0;
}

/* A graph has no node for a batch of copies, and the driver refuses a batch on the legacy stream.
 * If there are hints, another stream stands in for the legacy stream. */
static bool
has_batch_call(const mm_copies *c, bool capturing)
{
    return !capturing && c->cu->MemcpyBatchAsync != NULL && c->cu->concurrent_access
           && (c->hinted || !mm_is_legacy_stream(c->options.stream.handle));
}

/* True if a copy outside the batch call must be complete when this call returns: its source must be
 * read during the call, or the memory of a side may go afterwards. */
static bool
must_wait(const mm_copies *c, size_t batched)
{
    bool now = c->options.order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;

    for (size_t i = batched; i < c->count; i++) {
        if (now || is_system(&c->pairs[i])) {
            return true;
        }
    }
    return false;
}

/* --- calls, in a scope -------------------------------------------------------------------- */

/* The arrays of a batch call. attributes[i] applies to the copies from index first[i] on. */
typedef struct {
    CUdeviceptr *to, *from;
    size_t *sizes, *first;
    CUmemcpyAttributes *attributes;
    size_t runs;
} copy_arrays;

static int
arrays_init(copy_arrays *a, size_t count, mm_status *st)
{
    a->to = calloc(count, sizeof *a->to + sizeof *a->from + sizeof *a->sizes + sizeof *a->first
                              + sizeof *a->attributes);
    if (a->to == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu copies", count);
    }
    a->from = a->to + count;
    a->sizes = (size_t *)(a->from + count);
    a->first = a->sizes + count;
    a->attributes = (CUmemcpyAttributes *)(a->first + count);
    return 0;
}

static void
arrays_fill(copy_arrays *a, const mm_copies *c, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const mm_copy_pair *pair = &c->pairs[i], *before = i > 0 ? pair - 1 : NULL;
        a->to[i] = pair->to.range.start;
        a->from[i] = pair->from.range.start;
        a->sizes[i] = pair->to.range.size;
        if (before == NULL || !mm_same_location(before->from.location, pair->from.location)
            || !mm_same_location(before->to.location, pair->to.location)) {
            CUmemcpyAttributes *attributes = &a->attributes[a->runs];
            attributes->srcAccessOrder = c->options.order;
            attributes->srcLocHint = pair->from.location;
            attributes->dstLocHint = pair->to.location;
            attributes->flags = c->options.flags;
            a->first[a->runs++] = i;
        }
    }
}

static int
fail_pair(const mm_copies *c, size_t at, mm_status *st)
{
    const mm_copy_pair *pair = &c->pairs[at];

    mm_status_add(st, "The driver refused the copy of %zu bytes from 0x%llx to 0x%llx (pair %zu).",
                  pair->to.range.size, (unsigned long long)pair->from.range.start,
                  (unsigned long long)pair->to.range.start, pair->number);
    return -1;
}

static int
queue_batch(const mm_copies *c, size_t count, const copy_arrays *a, CUstream stream, mm_status *st)
{
    size_t failed = count;
    bool single = count == 1 && c->cu->MemcpyWithAttributesAsync != NULL;
    CUresult code = single
                        ? c->cu->MemcpyWithAttributesAsync(a->to[0], a->from[0], a->sizes[0],
                                                           a->attributes, stream)
                        : c->cu->MemcpyBatchAsync(a->to, a->from, a->sizes, count, a->attributes,
                                                  a->first, a->runs, &failed, stream);

    assert(mm_in_scope() && !mm_is_legacy_stream(stream));
    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, single ? "cuMemcpyWithAttributesAsync" : "cuMemcpyBatchAsync",
                       (int)code);
    failed = count == 1 ? 0 : failed;
    if (failed < count) { /* else the driver has named no pair */
        mm_copy_explain(c->cu, a->to[failed], st);
        mm_copy_explain(c->cu, a->from[failed], st);
        return fail_pair(c, failed, st);
    }
    mm_status_add(st, "The driver refused a batch of %zu copies.", count);
    return -1;
}

static int
issue_together(const mm_copies *c, size_t count, mm_status *st)
{
    mm_batch_stream stream;
    copy_arrays arrays = {0};
    int rc;

    if (count == 0) {
        return 0;
    }
    if (arrays_init(&arrays, count, st) < 0) {
        return -1;
    }
    arrays_fill(&arrays, c, count);
    rc = mm_batch_stream_acquire(c->cu, c->options.stream.handle, &stream, st);
    if (rc == 0) {
        rc = queue_batch(c, count, &arrays, stream.stream, st);
        mm_batch_stream_release(c->cu, &stream);
    }
    free(arrays.to);
    return rc;
}

static int
issue_alone(const mm_copies *c, size_t first, mm_status *st)
{
    for (size_t i = first; i < c->count; i++) {
        const mm_copy_pair *pair = &c->pairs[i];
        if (mm_copy_queue(c->cu, pair->to.range.start, pair->from.range.start, pair->to.range.size,
                          c->options.stream.handle, st)
            < 0) {
            return c->count > 1 ? fail_pair(c, i, st) : -1;
        }
    }
    return 0;
}

/* Waits even after a failure, because earlier copies may be queued. */
static int
wait_for_copies(const mm_copies *c, int rc, mm_status *st)
{
    CUresult code = c->cu->StreamSynchronize(c->options.stream.handle);

    return rc < 0 || code == CUDA_SUCCESS ? rc
                                          : mm_fail_call(st, "cuStreamSynchronize", (int)code);
}

static int
issue_in_scope(mm_copies *c, mm_status *st)
{
    CUstream stream = c->options.stream.handle;
    bool capturing = false, waits;
    size_t batched;
    int rc;

    if (mm_stream_is_capturing(c->cu, stream, &capturing, st) < 0) {
        return -1;
    }
    batched = has_batch_call(c, capturing) ? choose_batch(c) : 0;
    waits = must_wait(c, batched);
    if (waits
        && mm_stream_refuse_capture(
               c->cu, stream, "a copy of system memory, or one that is read during the call", st)
               < 0) {
        return -1;
    }
    rc = issue_together(c, batched, st);
    if (rc == 0) {
        rc = issue_alone(c, batched, st);
    }
    return waits ? wait_for_copies(c, rc, st) : rc;
}

int
mm_copies_issue(mm_copies *c, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (c->count == 0) {
        return 0;
    }
    if (mm_scope_enter_stream(&scope, c->cu, c->options.stream, st) < 0) {
        return -1;
    }
    rc = issue_in_scope(c, st);
    mm_scope_leave(&scope);
    return rc;
}

int
mm_copy_hinted(mm_driver *cu, mm_transfer to, mm_transfer from, const mm_copy_options *options,
               mm_status *st)
{
    mm_copy_pair pair = {from, to, 0};
    mm_copies copies = {cu, *options, &pair, 1, true};

    assert(from.range.size > 0 && from.range.size == to.range.size && !is_system(&pair));
    return mm_copies_issue(&copies, st);
}
