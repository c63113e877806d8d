/* copy_pairs.h: several copies in stream order, and copies with hints for the driver.
 *
 * A pair is a source and a destination of one size. The range of each has the start of its allocation;
 * without one it is system memory, whose copies are complete when the call returns. The location of
 * a transfer is a hint; of type NONE it is none. */
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
    bool hinted; /* the driver is told more than the ranges */
} mm_copies;

/* Pairs sources with destinations and checks them: sizes, and that a destination overlaps neither
 * another one nor a source (else MM_BAD_VALUE). Both batches have one count. Drops empty pairs,
 * and joins pairs that follow each other on both sides. Calls no driver. The copies can be freed
 * even after a failure. */
MM_NODISCARD int mm_copies_init(mm_copies *copies, mm_driver *cu, const mm_batch *from,
                                const mm_batch *to, const mm_copy_options *options, mm_status *st);
void mm_copies_free(mm_copies *copies);

/* Queues the copies; waits where a source or the memory of a side may go once the call returns. */
MM_NODISCARD int mm_copies_issue(mm_copies *copies, mm_status *st);

/* One copy of at least 1 byte with hints, between ranges that do not overlap and are no system
 * memory. */
MM_NODISCARD int mm_copy_hinted(mm_driver *cu, mm_transfer to, mm_transfer from,
                                const mm_copy_options *options, mm_status *st);

#endif
