/* dispatch.h: how several ranges reach the driver: which of them share a batch call, which go alone
 * and why, and the calls themselves. */
#ifndef MM_DISPATCH_H
#define MM_DISPATCH_H

#include "batch.h"

/* How a move reaches the driver: in the batch call, or by a call of its own, and then why. */
typedef enum {
    MM_TOGETHER,
    MM_ALONE_ASKED, /* dispatch="loop" */
    MM_ALONE_SINGLE, /* there is no other */
    MM_ALONE_IN_ORDER, /* ranges share pages and have different locations */
    MM_ALONE_NO_CALL, /* the driver has no batch call */
    MM_ALONE_NO_ACCESS, /* a device lacks concurrent access, which the batch call needs */
    MM_ALONE_TO_HOST,
    MM_ALONE_SMALL,
    MM_ALONE_THERE, /* it was prefetched there last */
    MM_ALONE_LEFT_OVER /* no other one gains from the batch call */
} mm_way;

/* Whether a move can be faster in a batch call, as far as that does not depend on where its pages
 * are. */
bool mm_may_gain_from_batch(mm_action what, const mm_move *m);

/* What a batch is issued from: the way of each move and the arrays of a batch call. Room for few
 * moves lies in the struct itself. */
typedef struct {
    CUdeviceptr *starts;
    size_t *sizes;
    size_t *first; /* index of the first range of each location */
    CUmemLocation *where;
    unsigned char *ways; /* an mm_way each */
    size_t locations;
    void *block; /* NULL when few is enough */
    struct {
        CUdeviceptr starts[MM_FEW];
        size_t sizes[MM_FEW], first[MM_FEW];
        CUmemLocation where[MM_FEW];
        unsigned char ways[MM_FEW];
    } few;
} mm_work;

MM_NODISCARD int mm_work_init(mm_work *w, size_t count, mm_status *st);
void mm_work_free(mm_work *w);

/* Fills the arrays with the moves whose way is MM_TOGETHER, or with all where `all` is set. */
void mm_work_fill(mm_work *w, const mm_batch *b, bool all);

/* How an operation is to be done. */
typedef struct {
    CUstream stream;
    mm_dispatch dispatch;
    mm_defer defer;
} mm_how;

/* Refuses what the driver lacks and a stream that captures a graph. */
MM_NODISCARD int mm_dispatch_check(mm_driver *cu, mm_action what, const mm_how *how,
                                   mm_status *st);

/* Decides the way of every move of a batch that is laid out; returns how many go together. A
 * context must be current. */
size_t mm_dispatch_decide(mm_driver *cu, mm_action what, const mm_batch *b, mm_dispatch dispatch,
                          unsigned char *ways);

/* Whether the batch is queued behind a host function, for the sake of how many bytes to where. */
bool mm_dispatch_defers(const mm_batch *b, mm_defer defer, size_t *bytes, CUmemLocation *where);

/* Issues a batch that is laid out; for an empty one only the arguments are checked. Edges (or NULL) are
 * prefetched before the first discard, interleaved ones before their move. work has space for the
 * batch; ready holds the arrays of all its moves, or is NULL. Allocates nothing. */
MM_NODISCARD int mm_dispatch_run(mm_driver *cu, mm_action what, const mm_batch *b,
                                 const mm_batch *edges, const mm_work *ready, mm_work *work,
                                 const mm_how *how, mm_status *st);

#endif
