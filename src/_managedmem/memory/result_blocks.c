/* result_blocks.c: blocks of host memory for copies of results: the lists of those in use and idle,
 * the limit, taking and freeing. No driver call is made under the lock. */
#include "result_blocks.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

/* Sizes of blocks are multiples of this, so that results of nearly equal size share blocks. */
static const size_t STEP = (size_t)64 << 10;

/* Each list is a circle with a sentinel. The block that became idle last comes first. */
static mm_result_block idle_blocks = {.next = &idle_blocks, .previous = &idle_blocks};
static mm_result_block used_blocks = {.next = &used_blocks, .previous = &used_blocks};
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static mm_result_usage usage = {.limit = (size_t)256 << 20};

/* --- lists, under the lock -------------------------------------------------------------------- */

static void
unlink_block(mm_result_block *block)
{
    block->previous->next = block->next;
    block->next->previous = block->previous;
}

static void
link_block(mm_result_block *block, mm_result_block *before)
{
    block->previous = before;
    block->next = before->next;
    before->next->previous = block;
    before->next = block;
}

static void
link_idle(mm_result_block *block)
{
    link_block(block, &idle_blocks);
    usage.idle += block->capacity;
}

/* The smallest idle block for a size, if at most half of it would be unused. */
static mm_result_block *
find_idle_block(size_t size)
{
    mm_result_block *best = NULL;

    for (mm_result_block *b = idle_blocks.next; b != &idle_blocks; b = b->next) {
        if (!b->spoiled && b->capacity >= size && b->capacity / 2 <= size
            && (best == NULL || b->capacity < best->capacity)) {
            best = b;
        }
    }
    return best;
}

/* Takes out the block that has been idle for longest, if `more` bytes do not fit into the limit
 * beside those held, or if more than `keep` bytes are idle; else returns NULL. */
static mm_result_block *
take_out_idle_block(size_t more, size_t keep)
{
    mm_result_block *block = NULL;

    (void)pthread_mutex_lock(&blocks_lock);
    if (idle_blocks.previous != &idle_blocks
        && (more > usage.limit || usage.held > usage.limit - more || usage.idle > keep)) {
        block = idle_blocks.previous;
        block->previous->next = &idle_blocks;
        idle_blocks.previous = block->previous;
        usage.held -= block->capacity;
        usage.idle -= block->capacity;
    }
    (void)pthread_mutex_unlock(&blocks_lock);
    return block;
}

/* --- freeing ---------------------------------------------------------------------------------- */

static void
make_idle_again(mm_result_block *block)
{
    (void)pthread_mutex_lock(&blocks_lock);
    link_idle(block);
    usage.held += block->capacity;
    (void)pthread_mutex_unlock(&blocks_lock);
}

/* False during a capture, which a wait for a device could break, and in a host function. */
static bool
enter_to_free(mm_scope *scope, mm_driver *cu)
{
    bool capturing = true;
    mm_status ignored;

    return mm_streams_are_capturing(cu, &capturing, &ignored) == 0 && !capturing
           && mm_scope_enter_relaxed(scope, cu, MM_ANY_DEVICE, &ignored) == 0;
}

/* Frees idle blocks as take_out_idle_block says, while that is possible. Except in a host function,
 * a failure means that the driver is shut down or unusable. */
static void
free_idle_blocks(mm_driver *cu, size_t more, size_t keep)
{
    mm_result_block *block = take_out_idle_block(more, keep);
    mm_scope scope;

    if (block == NULL) {
        return;
    }
    if (enter_to_free(&scope, cu)) {
        CUresult code;
        while (block != NULL
               && (code = cu->MemFreeHost(block->bytes)) != CUDA_ERROR_NOT_PERMITTED) {
            mm_leak_note(code, "cuMemFreeHost", block->capacity);
            free(block);
            block = take_out_idle_block(more, keep);
        }
        mm_scope_leave(&scope);
    }
    if (block != NULL) {
        make_idle_again(block);
    }
}

void
mm_result_blocks_trim(size_t keep)
{
    mm_driver *cu = mm_driver_usable();

    if (cu != NULL) {
        free_idle_blocks(cu, 0, keep);
    }
}

/* --- taking ----------------------------------------------------------------------------------- */

/* False for memory that was freed with its context, when the context was reset. */
static bool
still_exists(mm_driver *cu, const mm_result_block *block)
{
    mm_pointer_attributes attributes;
    mm_status ignored;

    return mm_pointer_query(cu, (CUdeviceptr)(uintptr_t)block->bytes, &attributes, &ignored) < 0
           || attributes.type == CU_MEMORYTYPE_HOST;
}

/* An idle block that fits, now in use; or NULL. */
static mm_result_block *
reuse_block(mm_driver *cu, size_t size)
{
    mm_result_block *block;

    for (;;) {
        (void)pthread_mutex_lock(&blocks_lock);
        block = find_idle_block(size);
        if (block != NULL) {
            unlink_block(block);
            link_block(block, &used_blocks);
            usage.idle -= block->capacity;
        }
        (void)pthread_mutex_unlock(&blocks_lock);
        if (block == NULL || still_exists(cu, block)) {
            return block;
        }
        (void)pthread_mutex_lock(&blocks_lock);
        unlink_block(block);
        usage.held -= block->capacity;
        (void)pthread_mutex_unlock(&blocks_lock);
        free(block);
    }
}

/* Counts the bytes of a new block as held, and frees idle blocks to make space for them. False if
 * they do not fit, or idle blocks could not be freed. */
static bool
reserve_bytes(mm_driver *cu, size_t size)
{
    bool fits;

    (void)pthread_mutex_lock(&blocks_lock);
    fits = size <= usage.limit && usage.held - usage.idle <= usage.limit - size;
    (void)pthread_mutex_unlock(&blocks_lock);
    if (!fits) {
        return false;
    }
    free_idle_blocks(cu, size, SIZE_MAX);
    (void)pthread_mutex_lock(&blocks_lock);
    fits = size <= usage.limit && usage.held <= usage.limit - size;
    usage.held += fits ? size : 0;
    (void)pthread_mutex_unlock(&blocks_lock);
    return fits;
}

static void
return_bytes(size_t size)
{
    (void)pthread_mutex_lock(&blocks_lock);
    usage.held -= size;
    (void)pthread_mutex_unlock(&blocks_lock);
}

/* The memory belongs to the primary context of the current device, because that context stays. The
 * end of a context of the user would free the memory. */
static int
lock_pages(mm_driver *cu, size_t size, void **bytes, mm_status *st)
{
    int device;

    if (mm_current_device(cu, &device, st) < 0) {
        return -1;
    }
    MM_TRY_IN(mm_scope_enter_relaxed, device, cu, MemHostAlloc, st, bytes, size,
              CU_MEMHOSTALLOC_PORTABLE);
    return 0;
}

/* Gives a new block page-locked memory and lists it as in use. */
static int
lock_block(mm_driver *cu, mm_result_block *block, mm_status *st)
{
    if (lock_pages(cu, block->capacity, &block->bytes, st) < 0) {
        block->bytes = NULL;
        return -1;
    }
    block->page_locked = true;
    (void)pthread_mutex_lock(&blocks_lock);
    link_block(block, &used_blocks);
    (void)pthread_mutex_unlock(&blocks_lock);
    return 0;
}

static size_t
in_steps(size_t size)
{
    assert(size <= SIZE_MAX - STEP);
    return (size + STEP - 1) / STEP * STEP;
}

/* lock_block within the limit; false on any failure. */
static bool
lock_block_within_limit(mm_driver *cu, mm_result_block *block, size_t size)
{
    mm_status ignored;

    block->capacity = in_steps(size);
    if (!reserve_bytes(cu, block->capacity)) {
        return false;
    }
    if (lock_block(cu, block, &ignored) < 0) {
        return_bytes(block->capacity);
        return false;
    }
    return true;
}

/* Frees idle blocks that were in use when the limit became lower. Without this, they could be used
 * again and again, and would never be freed. */
static void
keep_limit(mm_driver *cu)
{
    bool beyond;

    (void)pthread_mutex_lock(&blocks_lock);
    beyond = usage.held > usage.limit && usage.idle > 0;
    (void)pthread_mutex_unlock(&blocks_lock);
    if (beyond) {
        free_idle_blocks(cu, 0, SIZE_MAX);
    }
}

static mm_result_block *
take_block(mm_driver *cu, size_t size, mm_status *st)
{
    mm_result_block *block;

    keep_limit(cu);
    block = reuse_block(cu, size);
    if (block != NULL) {
        return block;
    }
    block = calloc(1, sizeof *block);
    if (block != NULL && !lock_block_within_limit(cu, block, size)) {
        block->bytes = malloc(size);
    }
    if (block == NULL || block->bytes == NULL) {
        free(block);
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    return block;
}

void
mm_result_release(mm_result_block *block)
{
    if (!block->page_locked) {
        free(block->bytes);
        free(block);
        return;
    }
    if (mm_driver_forked()) {
        return; /* the block is the parent's, and a thread of the parent may hold the lock */
    }
    (void)pthread_mutex_lock(&blocks_lock);
    unlink_block(block);
    link_idle(block);
    (void)pthread_mutex_unlock(&blocks_lock);
}

mm_result_block *
mm_result_copy(mm_driver *cu, mm_range range, CUstream stream, mm_status *st)
{
    mm_result_block *block;

    assert(range.size > 0);
    if (mm_stream_refuse_capture(cu, stream, "a wait for the stream", st) < 0
        || (block = take_block(cu, range.size, st)) == NULL) {
        return NULL;
    }
    if (mm_copy(cu, (CUdeviceptr)(uintptr_t)block->bytes, range.start, range.size,
                (mm_device_stream){stream, MM_ANY_DEVICE}, true, st)
        < 0) {
        block->spoiled = true;
        mm_result_release(block);
        return NULL;
    }
    return block;
}

/* --- questions and the limit ------------------------------------------------------------------ */

bool
mm_result_contains(CUdeviceptr p)
{
    bool found = false;

    (void)pthread_mutex_lock(&blocks_lock);
    for (const mm_result_block *b = used_blocks.next; b != &used_blocks && !found; b = b->next) {
        found = p - (CUdeviceptr)(uintptr_t)b->bytes < b->capacity;
    }
    (void)pthread_mutex_unlock(&blocks_lock);
    return found;
}

mm_result_usage
mm_result_blocks_usage(void)
{
    mm_result_usage now = {0};

    if (mm_driver_forked()) {
        return now;
    }
    (void)pthread_mutex_lock(&blocks_lock);
    now = usage;
    (void)pthread_mutex_unlock(&blocks_lock);
    return now;
}

void
mm_result_blocks_set_limit(size_t limit)
{
    if (mm_driver_forked()) {
        return;
    }
    (void)pthread_mutex_lock(&blocks_lock);
    usage.limit = limit;
    (void)pthread_mutex_unlock(&blocks_lock);
}
