/* result_blocks.h: blocks of host memory for copies of results, with a bounded cache.
 *
 * Devices copy to page-locked memory at the speed of the link. But the driver takes longer to
 * allocate such memory than to copy to it, and waits for devices before it frees it. So blocks
 * return to a cache when their arrays die, and are used again. One limit bounds all page-locked
 * blocks of results, in use or idle; a block beyond the limit is ordinary memory. The state is
 * process-wide. All functions may be called in any thread, without an interpreter. */
#ifndef MM_RESULT_BLOCKS_H
#define MM_RESULT_BLOCKS_H

#include "copy.h"

typedef struct mm_result_block {
    struct mm_result_block *next, *previous; /* in the list of idle blocks, or of those in use */
    void *bytes;
    size_t capacity; /* of page-locked memory */
    bool page_locked; /* else from malloc */
    bool spoiled; /* a failed copy may still write to it: to be freed, not used again */
} mm_result_block;

/* Returns a block with a complete copy of the range, made behind the work on the stream. NULL on
 * failure, or while the stream captures a graph. Makes driver calls that block. */
mm_result_block *mm_result_copy(mm_driver *cu, mm_range range, CUstream stream, mm_status *st);

/* Returns a block to the cache. Makes no driver call, because garbage collection calls it, even in
 * the middle of a graph capture. */
void mm_result_release(mm_result_block *block);

/* True if the address lies in a page-locked block that is in use. */
bool mm_result_contains(CUdeviceptr p);

/* True for memory that may be freed or reused once the call returns: system memory, and the memory
 * of an array of numpy(copy=True). `found` is the driver's answer for the address. */
static inline bool
mm_is_transient(const mm_pointer_attributes *found, CUdeviceptr p)
{
    return !found->managed
           && (found->type == 0 || (found->type == CU_MEMORYTYPE_HOST && mm_result_contains(p)));
}

typedef struct {
    size_t limit; /* in bytes, like the other members */
    size_t held; /* of all page-locked blocks */
    size_t idle; /* of those in the cache */
} mm_result_usage;

mm_result_usage mm_result_blocks_usage(void);

/* Sets the limit. Idle blocks beyond it are freed by mm_result_blocks_trim. */
void mm_result_blocks_set_limit(size_t limit);

/* Frees idle blocks, the longest idle first, until at most `keep` bytes are idle and the limit is
 * kept. Does nothing without a driver, in a forked child, and while a stream is known to capture a
 * graph. Blocks, because the driver waits for devices. */
void mm_result_blocks_trim(size_t keep);

#endif
