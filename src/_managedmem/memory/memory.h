/* memory.h: one stretch of memory, owned or wrapped, with its counts of users and its guard.
 *
 * Whoever holds a reference may ask about the memory; the address itself may only be used between
 * enter and leave, or export and unexport, of the guard. A reference comes with a hold: the last
 * hold to go ends the memory. A hold can be given up before its reference, by a closed view.
 * Closing frees exactly once. All of it works from any thread and needs no interpreter. */
#ifndef MM_MEMORY_H
#define MM_MEMORY_H

#include "allocation.h"
#include "guard.h"
#include "pool.h"
#include "range.h"

typedef struct {
    mm_guard guard;
    atomic_size_t references; /* keep this struct */
    atomic_size_t holds;      /* keep the memory */
    _Atomic(CUdeviceptr) allocation; /* start of the managed allocation; 0 until that is known */
    CUdeviceptr start;
    size_t size;
    mm_pool_block *block; /* of pool memory, until it is freed */
    int device; /* whose own memory it is, from a device pool; else MM_ANY_DEVICE */
    bool owned; /* freed here: the block, or by the address in allocation */
    bool pooled; /* from a pool: freed in the order of a stream */
    atomic_flag reordering; /* a lock on the stream of the block, held for a few instructions */
} mm_memory;

/* Allocates managed memory on pages of its own; for 0 bytes nothing, with start 0. Advice, prefetch and discard act on whole pages,
 * and the driver packs small allocations 512 bytes apart on shared ones. */
mm_memory *mm_memory_allocate(mm_driver *cu, size_t size, mm_status *st);

/* Allocates from a pool in the order of the stream; shared may be NULL. Managed memory is rounded
 * to whole pages, so that its neighbours in the pool are left alone. */
mm_memory *mm_memory_allocate_from(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream,
                                   mm_stream *shared, mm_status *st);

/* Wraps memory that somebody else frees. */
mm_memory *mm_memory_wrap(CUdeviceptr start, size_t size, mm_status *st);

void mm_memory_retain(mm_memory *m);

/* Gives up a hold with its reference. True for the last hold: the caller then ends the memory. */
MM_NODISCARD bool mm_memory_drop(mm_memory *m);

/* Ends memory whose last hold is gone: waits for calls under way and frees what is owned, unless it
 * is closed. That can block: then call it without the GIL. Errors of the free are dropped: the
 * driver may already be shut down. */
void mm_memory_end(mm_memory *m);
bool mm_memory_end_blocks(const mm_memory *m);

/* Both in one. */
void mm_memory_release(mm_memory *m);

/* Gives up a hold and keeps its reference, until mm_memory_forget. True for the last hold: the
 * caller then calls mm_memory_retire, which ends the memory and leaves the reference. */
MM_NODISCARD bool mm_memory_let_go(mm_memory *m);
void mm_memory_retire(mm_memory *m);
void mm_memory_forget(mm_memory *m);

/* Closes: *first says whether this call did it. After a failed free the memory counts as closed. */
MM_NODISCARD int mm_memory_close(mm_memory *m, bool *first, mm_status *st);

/* The same; memory of a pool is freed in the order of *stream, or for NULL of the stream that it was
 * allocated on. */
MM_NODISCARD int mm_memory_close_on(mm_memory *m, const CUstream *stream, bool *first,
                                    mm_status *st);

/* Memory of a pool will be freed in the order of this stream; shared may be NULL. *done is false when
 * the memory is closed. */
MM_NODISCARD int mm_memory_set_stream(mm_driver *cu, mm_memory *m, CUstream stream,
                                      mm_stream *shared, bool *done, mm_status *st);

/* Fails when memory of a pool cannot be freed now, because the stream of mm_memory_close_on captures
 * a graph. */
MM_NODISCARD int mm_memory_refuse_capture(mm_driver *cu, mm_memory *m, const CUstream *stream,
                                          mm_status *st);

/* Checks that an operation may be done on the memory; a yes for managed memory is remembered. */
MM_NODISCARD int mm_memory_check(mm_driver *cu, mm_memory *m, mm_operation op, mm_status *st);

#endif
