/* batch.h: one operation on several ranges: merging neighbours, choosing between one driver call
 * for all and a call for each, and taking advice back when it fails in the middle. */
#ifndef MM_BATCH_H
#define MM_BATCH_H

#include "pages.h"

typedef struct {
    mm_range range;
    CUmemLocation where;
} mm_transfer;

enum { MM_INLINE_COUNT = 8 };

/* Few moves lie in the struct itself, so that small calls allocate nothing. */
typedef struct {
    mm_transfer *transfers;
    size_t count;
    size_t batchable; /* once laid out: so many at the front may go into one batch call */
    bool ordered; /* ranges on one page have different locations: the last one must win */
    bool edges_interleaved; /* in order: the edges of each range are issued right before it */
    mm_transfer inline_[MM_INLINE_COUNT];
} mm_batch;

MM_NODISCARD int mm_batch_init(mm_batch *b, size_t count, mm_status *st);
void mm_batch_free(mm_batch *b);

/* A batch with the same moves; to be freed also when this fails. */
MM_NODISCARD int mm_batch_copy(mm_batch *to, const mm_batch *from, mm_status *st);

typedef enum { MM_DO_PREFETCH, MM_DO_DISCARD, MM_DO_DISCARD_PREFETCH } mm_action;
typedef enum { MM_DISPATCH_AUTO, MM_DISPATCH_BATCH, MM_DISPATCH_LOOP } mm_dispatch;

/* All of these merge first, which changes the batch and may leave it empty. */
MM_NODISCARD int mm_batch_prefetch(mm_driver *cu, mm_batch *b, CUstream stream,
                                   mm_dispatch dispatch, mm_defer defer, mm_status *st);
MM_NODISCARD int mm_batch_discard(mm_driver *cu, mm_batch *b, CUstream stream,
                                  mm_dispatch dispatch, mm_status *st);
MM_NODISCARD int mm_batch_discard_prefetch(mm_driver *cu, mm_batch *b, CUstream stream,
                                           mm_dispatch dispatch, mm_defer defer, mm_status *st);

/* One advice for all ranges, each with its own location; all or nothing. Where more than one is left
 * after merging, asks each that was given first what it has; where its pages differed, they have no
 * such advice after a failure. */
MM_NODISCARD int mm_batch_advise(mm_driver *cu, mm_batch *b, CUmem_advise advice, mm_status *st);

/* The steps of the operations, for plans, which take them once and execute often. */

/* Drops empty ranges. Joins ranges of one allocation and location that overlap or have less than a
 * page between them. If ranges of different locations overlap or share a page, all ranges keep their
 * order, so that the last one wins. */
void mm_batch_merge(mm_batch *b);

/* Merges, and orders the moves for the driver. */
void mm_batch_prepare(mm_batch *b, mm_action what);

/* Shrinks every range to whole pages. What is cut off goes to edges, a new batch that is laid out. If
 * they are interleaved, each range has two edges, which may be empty. */
MM_NODISCARD int mm_batch_split_edges(mm_batch *b, mm_batch *edges, mm_status *st);

#endif
