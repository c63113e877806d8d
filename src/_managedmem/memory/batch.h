/* batch.h: several ranges for one operation: merging neighbours, keeping an order that matters,
 * cutting the edges off discards, and advising all ranges. */
#ifndef MM_BATCH_H
#define MM_BATCH_H

#include "range.h"

/* A range and its destination. */
typedef struct {
    mm_range range;
    CUmemLocation location;
} mm_transfer;

enum { MM_INLINE_COUNT = 8 };

/* A list of transfers, which needs no allocation for up to MM_INLINE_COUNT of them. */
typedef struct {
    mm_transfer *transfers;
    size_t count;
    size_t batchable; /* once prepared: the number at the front that may share a batch call */
    bool ordered; /* ranges on one page have different locations: the last one must win */
    bool edges_interleaved; /* and `ordered`: edges are issued right before their own range */
    mm_transfer inline_[MM_INLINE_COUNT];
} mm_batch;

/* mm_batch_init_empty makes a batch without a range, mm_batch_one a batch with one range. Neither
 * need be freed. */
static inline void
mm_batch_init_empty(mm_batch *b)
{
    b->transfers = b->inline_;
    b->count = b->batchable = 0;
    b->ordered = b->edges_interleaved = false;
}

static inline void
mm_batch_one(mm_batch *b, mm_range range, CUmemLocation location)
{
    mm_batch_init_empty(b);
    b->count = 1;
    b->transfers[0] = (mm_transfer){range, location};
}

/* A batch with space for `count` transfers, which the caller fills. It can be freed even after a
 * failure. */
MM_NODISCARD int mm_batch_init(mm_batch *b, size_t count, mm_status *st);
void mm_batch_free(mm_batch *b);

/* A batch with the same transfers. It can be freed even after a failure. */
MM_NODISCARD int mm_batch_copy(mm_batch *to, const mm_batch *from, mm_status *st);

/* Removes empty ranges. Joins ranges of one allocation and location that overlap or have less than
 * a page between them. If ranges of different locations overlap or share a page, all ranges keep
 * their order, so that the last one wins. */
void mm_batch_merge(mm_batch *b);

/* True for a small prefetch, for which the batch call gains nothing. */
static inline bool
mm_is_small_transfer(mm_operation op, const mm_transfer *transfer)
{
    enum { PREFETCH_BATCH_FROM = 64 << 10 };

    return op == MM_PREFETCH && transfer->range.size < PREFETCH_BATCH_FROM;
}

/* Makes a batch ready to be issued: shrinks discards to whole pages, merges, and moves the
 * transfers that a batch call can make faster to the front. *edges becomes a prepared batch of the
 * parts that were cut off the ranges of a discard_prefetch; they are to be prefetched with their
 * contents. With edges_interleaved each transfer has two edges, which may be empty. *edges can be
 * freed even after a failure. */
MM_NODISCARD int mm_batch_prepare(mm_batch *b, mm_operation op, mm_batch *edges, mm_status *st);

/* Gives one advice to all ranges, each with its own location; all or nothing. Merges the batch. If
 * more than one range is left, the earlier advice of each original range is queried first. A
 * failure restores it. Where the pages of a range differed, the advice is unset if the call had
 * set it. */
MM_NODISCARD int mm_batch_advise(mm_driver *cu, mm_batch *b, CUmem_advise advice, mm_status *st);

#endif
