/* copy_pairs.h: several copies in stream order, and copies with hints for the driver.
 *
 * A pair is a source and a destination of one size. The range of each has the start of its
 * allocation. The start is 0 for memory that may go once the call returns, such as system memory:
 * its copies are complete when the call returns. The location of a transfer is a hint for the
 * driver; type NONE means no hint. */
#ifndef MM_COPY_PAIRS_H
#define MM_COPY_PAIRS_H

#include "batch.h"

typedef struct {
    mm_transfer from, to;
    size_t number; /* the place in the order of the caller */
} mm_copy_pair;

typedef struct {
    mm_device_stream stream;
    CUmemcpySrcAccessOrder order; /* of reading the sources */
    unsigned int flags; /* CUmemcpyFlags */
} mm_copy_options;

typedef struct {
    mm_driver *cu;
    mm_copy_options options;
    mm_copy_pair *pairs;
    size_t count;
    bool hinted; /* the driver is given hints, an order or flags besides the ranges */
} mm_copies;

/* Pairs the sources of one batch with the destinations of another, which has the same count. Fails
 * with MM_BAD_VALUE if the sizes of a pair differ, or if a destination overlaps another destination
 * or a source. Drops empty pairs, and joins pairs that are adjacent on both sides. Makes no driver
 * call. The copies can be freed even after a failure. */
MM_NODISCARD int mm_copies_init(mm_copies *copies, mm_driver *cu, const mm_batch *from,
                                const mm_batch *to, const mm_copy_options *options, mm_status *st);
void mm_copies_free(mm_copies *copies);

/* Queues the copies. Waits for them if the memory of a side may go once the call returns, or if a
 * source must be read during the call. */
MM_NODISCARD int mm_copies_issue(mm_copies *copies, mm_status *st);

/* Makes one copy of at least 1 byte with hints, between ranges that do not overlap and are not
 * system memory. */
MM_NODISCARD int mm_copy_hinted(mm_driver *cu, mm_transfer to, mm_transfer from,
                                const mm_copy_options *options, mm_status *st);

#endif
