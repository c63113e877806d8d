/* dispatch.h: issuing several ranges: which of them share a batch call, which have a call of their
 * own and why, and the calls themselves. */
#ifndef MM_DISPATCH_H
#define MM_DISPATCH_H

#include <stdint.h>

#include "batch.h"
#include "prefetch.h"
#include "stream.h"

/* The call for a transfer: the batch call, or a single call for the named reason. */
typedef enum {
    MM_BATCHED,
    MM_SINGLE_REQUESTED, /* dispatch="loop" */
    MM_SINGLE_ONE, /* the batch has no other transfer */
    MM_SINGLE_ORDERED, /* ranges share pages and have different locations */
    MM_SINGLE_NO_BATCH_CALL,
    MM_SINGLE_NO_CONCURRENT_ACCESS, /* a device lacks it, and the batch call needs it */
    MM_SINGLE_TO_HOST,
    MM_SINGLE_SMALL,
    MM_SINGLE_RESIDENT, /* the last prefetch of the range went to this location */
    MM_SINGLE_REMAINDER /* no other transfer would share the batch call */
} mm_route;

/* The route of each transfer, and the arrays for a batch call. Up to MM_INLINE_COUNT transfers need
 * no allocation. */
typedef struct {
    CUdeviceptr *starts;
    size_t *sizes;
    size_t *first; /* index of the first range of each location */
    CUmemLocation *location;
    unsigned char *routes; /* an mm_route each */
    size_t locations;
    void *block; /* NULL if inline_ is enough */
    struct {
        CUdeviceptr starts[MM_INLINE_COUNT];
        size_t sizes[MM_INLINE_COUNT], first[MM_INLINE_COUNT];
        CUmemLocation location[MM_INLINE_COUNT];
        unsigned char routes[MM_INLINE_COUNT];
    } inline_;
} mm_batch_arrays;

MM_NODISCARD int mm_batch_arrays_init(mm_batch_arrays *arrays, size_t count, mm_status *st);
void mm_batch_arrays_free(mm_batch_arrays *arrays);

/* Fills the arrays with the transfers whose route is MM_BATCHED, or with all of them. */
void mm_batch_arrays_fill(mm_batch_arrays *arrays, const mm_batch *b, bool all);

typedef enum { MM_DISPATCH_AUTO, MM_DISPATCH_BATCH, MM_DISPATCH_LOOP } mm_dispatch;

typedef struct {
    CUstream stream;
    mm_dispatch dispatch;
    mm_defer defer; /* not read for a discard */
} mm_dispatch_options;

/* Prefetches the batch, discards it, or both. First prepares the batch, which changes it and may
 * leave it empty, then issues it. Nothing is issued if a range cannot be discarded. */
MM_NODISCARD int mm_batch_run(mm_driver *cu, mm_operation op, mm_batch *b,
                              const mm_dispatch_options *options, mm_status *st);

/* The steps of mm_batch_run, for plans, which prepare once and issue often. */

/* Refuses operations that the driver lacks, and a stream that captures a graph. */
MM_NODISCARD int mm_dispatch_check(mm_driver *cu, mm_operation op,
                                   const mm_dispatch_options *options, mm_status *st);

/* Sets the route of every transfer of a prepared batch; returns the number of MM_BATCHED ones. In
 * the caller's scope. */
size_t mm_dispatch_decide(mm_driver *cu, mm_operation op, const mm_batch *b, mm_dispatch dispatch,
                          unsigned char *routes);

/* True if the batch is queued behind a host function. Stores in *bytes the total that decided this,
 * and in *location the destination of these bytes. */
bool mm_dispatch_defers(const mm_batch *b, mm_defer defer, size_t *bytes, CUmemLocation *location);

/* One execution of a prepared batch; it allocates nothing. */
typedef struct {
    mm_driver *cu;
    mm_operation op;
    const mm_batch *batch;
    const mm_batch *edges; /* made by mm_batch_prepare */
    const mm_batch_arrays *prebuilt; /* the arrays of all transfers; or NULL */
    mm_batch_arrays *work; /* with space for the batch */
    /* Set by mm_dispatch_enter. */
    mm_scope scope;
    mm_batch_stream stream; /* of all calls, and of the host function that defers them */
    const mm_batch_arrays *arrays; /* of the batch call: prebuilt or work */
    size_t batched; /* the number of transfers in it */
    uint64_t begun; /* as mm_call_begin returned it */
} mm_dispatch_call;

/* Checks the call, enters a scope, decides the routes, and queues the host function if there is to
 * be one. Returns 1 if the caller must issue and leave, 0 if the batch is empty and the caller must
 * do neither, -1 on failure. */
MM_NODISCARD int mm_dispatch_enter(mm_dispatch_call *call, const mm_dispatch_options *options,
                                   mm_status *st);
MM_NODISCARD int mm_dispatch_issue(const mm_dispatch_call *call, mm_status *st);
void mm_dispatch_leave(mm_dispatch_call *call);

#endif
