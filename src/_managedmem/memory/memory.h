/* memory.h: one piece of memory, owned or wrapped, with its references, its holds and its guard.
 *
 * A reference keeps this struct, a hold keeps the memory. The address may only be used between
 * enter and leave, or export and unexport, of the guard. References and holds are acquired
 * together; a closed view releases its hold before its reference. The release of the last hold
 * retires the memory. Closing frees exactly once. All functions may be called in any thread,
 * without an interpreter. */
#ifndef MM_MEMORY_H
#define MM_MEMORY_H

#include "allocation.h"
#include "attachment.h"
#include "guard.h"
#include "allocation_log.h"
#include "pool.h"
#include "range.h"

/* is_host_accessible of from_handle(), for wrapped memory. */
typedef enum { MM_HOST_UNSPECIFIED, MM_HOST_ACCESSIBLE, MM_HOST_INACCESSIBLE } mm_host_accessible;

typedef struct {
    mm_host_accessible host;
    bool read_only; /* must not be written or discarded */
} mm_access;

typedef struct {
    mm_deferred_free deferred;
    mm_guard guard;
    atomic_size_t references; /* keep this struct */
    atomic_size_t holds;      /* keep the memory */
    _Atomic(CUdeviceptr) allocation; /* start of the managed allocation; 0 until that is known */
    CUdeviceptr start;
    size_t size;
    mm_pool_block *block; /* of pool memory, until it is freed */
    int device;       /* the owner of memory from a device pool, else MM_ANY_DEVICE */
    bool owned;       /* freed here: the block, or by the address in allocation */
    bool pooled;      /* from a pool: freed in the order of a stream */
    mm_access access; /* of wrapped memory; set before other threads see it */
    atomic_flag order_lock; /* of block->order; held for a few instructions */
    mm_attachment attachment; /* of managed memory without a pool */
    mm_allocation_entry entry; /* its place in the list of memories, and its name */
} mm_memory;

/* True if no query is needed to tell what memory it is: it was allocated here, or is known to be in
 * a managed allocation. */
static inline bool
mm_memory_is_known(const mm_memory *m)
{
    return m->owned || atomic_load_explicit(&m->allocation, memory_order_relaxed) != 0;
}

/* Allocates managed memory on pages of its own: advice, prefetch and discard act on whole
 * pages, and the driver packs small allocations 512 bytes apart. The memory is attached to every
 * device or to the host. 0 bytes have the address 0 and no allocation. */
mm_memory *mm_memory_allocate(mm_driver *cu, size_t size, CUmemAttach_flags to, mm_status *st);

/* Allocates from a pool in the order of the stream; shared may be NULL. Managed memory is rounded
 * to whole pages, so that operations on it do not reach its neighbours in the pool. */
mm_memory *mm_memory_allocate_from(mm_driver *cu, mm_pool *pool, size_t size, CUstream stream,
                                   mm_stream *shared, mm_status *st);

/* Wraps memory that other code frees. */
mm_memory *mm_memory_wrap(CUdeviceptr start, size_t size, mm_status *st);

/* Adds wrapped memory to the list of memories even without a name, because it ends with its
 * buffer. */
void mm_memory_add_entry(mm_memory *m);

/* Acquires a hold and a reference. */
void mm_memory_retain(mm_memory *m);

/* Releases a hold. True for the last one: the caller must then call mm_memory_retire. */
MM_NODISCARD bool mm_memory_release_hold(mm_memory *m);

/* Closes memory that has no hold left: waits for calls under way, and frees owned memory. Call it
 * without the GIL if mm_memory_closing_blocks; else it only ends the entry in the list of memories.
 * Inside a host function the memory is freed later. Other failures are noted (leaks.h). */
void mm_memory_retire(mm_memory *m);

/* True if closing the memory can wait for calls or frees memory. */
bool mm_memory_closing_blocks(const mm_memory *m);

/* Releases a reference. The last one frees the struct. */
void mm_memory_release_reference(mm_memory *m);

/* Releases a hold, retires the memory after the last one, and releases the reference. */
void mm_memory_release(mm_memory *m);

/* Closes the memory; *first becomes true if this call closed it. Memory of a pool is freed in the
 * order of *stream, or in the stream of its block if stream is NULL. After a failed free the memory
 * counts as closed, except inside a host function, where it stays open. */
MM_NODISCARD int mm_memory_close(mm_memory *m, const CUstream *stream, bool *first, mm_status *st);

/* Opens memory again that mm_memory_close has closed, because its owner could not free it. */
void mm_memory_reopen(mm_memory *m);

/* Sets the name, or removes it with NULL. *done is false if the memory is closed. */
MM_NODISCARD int mm_memory_set_name(mm_memory *m, const char *name, bool *done, mm_status *st);

/* Sets the stream in whose order memory of a pool is freed; shared may be NULL. *done is false
 * if the memory is closed. */
MM_NODISCARD int mm_memory_set_stream(mm_driver *cu, mm_memory *m, CUstream stream,
                                      mm_stream *shared, bool *done, mm_status *st);

/* Fails if mm_memory_close with this stream cannot free memory of a pool, because the stream
 * captures a graph. */
MM_NODISCARD int mm_memory_refuse_capture(mm_driver *cu, mm_memory *m, const CUstream *stream,
                                          mm_status *st);

/* Checks that the memory allows the operation. Managed memory is checked only once. */
MM_NODISCARD int mm_memory_check(mm_driver *cu, mm_memory *m, mm_operation op, mm_status *st);

#endif
