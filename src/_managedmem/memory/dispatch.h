/* dispatch.h: how several ranges reach the driver: which of them share a batch call, which go alone
 * and why, and the calls themselves. */
#ifndef MM_DISPATCH_H
#define MM_DISPATCH_H

#include "batch.h"

/* How a move reaches the driver: in the batch call, or by a call of its own, and then why. */
typedef enum {
    MM_BATCHED,
    MM_SINGLE_REQUESTED, /* dispatch="loop" */
    MM_SINGLE_ONE, /* there is no other */
    MM_SINGLE_ORDERED, /* ranges share pages and have different locations */
    MM_SINGLE_NO_BATCH_CALL, /* the driver has no batch call */
    MM_SINGLE_NO_CONCURRENT_ACCESS, /* a device lacks concurrent access, which the batch call needs */
    MM_SINGLE_TO_HOST,
    MM_SINGLE_SMALL,
    MM_SINGLE_RESIDENT, /* it was prefetched there last */
    MM_SINGLE_REMAINDER /* no other one gains from the batch call */
} mm_route;

/* Whether a move can be faster in a batch call, as far as that does not depend on where its pages
 * are. */
bool mm_may_gain_from_batch(mm_action what, const mm_transfer *m);

/* What a batch is issued from: the way of each move and the arrays of a batch call. Room for few
 * moves lies in the struct itself. */
typedef struct {
    CUdeviceptr *starts;
    size_t *sizes;
    size_t *first; /* index of the first range of each location */
    CUmemLocation *where;
    unsigned char *routes; /* an mm_route each */
    size_t locations;
    void *block; /* NULL when few is enough */
    struct {
        CUdeviceptr starts[MM_INLINE_COUNT];
        size_t sizes[MM_INLINE_COUNT], first[MM_INLINE_COUNT];
        CUmemLocation where[MM_INLINE_COUNT];
        unsigned char routes[MM_INLINE_COUNT];
    } inline_;
} mm_batch_arrays;

MM_NODISCARD int mm_batch_arrays_init(mm_batch_arrays *w, size_t count, mm_status *st);
void mm_batch_arrays_free(mm_batch_arrays *w);

/* Fills the arrays with the moves whose way is MM_BATCHED, or with all where `all` is set. */
void mm_batch_arrays_fill(mm_batch_arrays *w, const mm_batch *b, bool all);

/* How an operation is to be done. */
typedef struct {
    CUstream stream;
    mm_dispatch dispatch;
    mm_defer defer;
} mm_dispatch_options;

/* Refuses what the driver lacks and a stream that captures a graph. */
MM_NODISCARD int mm_dispatch_check(mm_driver *cu, mm_action what, const mm_dispatch_options *how,
                                   mm_status *st);

/* Decides the way of every move of a batch that is laid out; returns how many go together. A
 * context must be current. */
size_t mm_dispatch_decide(mm_driver *cu, mm_action what, const mm_batch *b, mm_dispatch dispatch,
                          unsigned char *routes);

/* Whether the batch is queued behind a host function, for the sake of how many bytes to where. */
bool mm_dispatch_defers(const mm_batch *b, mm_defer defer, size_t *bytes, CUmemLocation *where);

/* Issues a batch that is laid out; for an empty one only the arguments are checked. Edges (or NULL) are
 * prefetched before the first discard, interleaved ones before their move. work has space for the
 * batch; ready holds the arrays of all its moves, or is NULL. Allocates nothing. */
MM_NODISCARD int mm_dispatch_run(mm_driver *cu, mm_action what, const mm_batch *b,
                                 const mm_batch *edges, const mm_batch_arrays *prebuilt,
                                 mm_batch_arrays *work, const mm_dispatch_options *how,
                                 mm_status *st);

#endif
