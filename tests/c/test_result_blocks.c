/* test_result_blocks.c: copies of results in blocks that are used again, in one thread and in several:
 * contents, the limit, host functions, and memory that went with its context. */
#include <string.h>

#include "memory/result_blocks.h"
#include "world.h"

enum { WORKERS = 4, ROUNDS = 60, SIZE = 100000, STEP = 65536, CAPACITY = 2 * STEP };

static const size_t LIMIT = (size_t)256 << 20;

static mm_range
allocate(size_t size)
{
    mm_range range = {.size = size};
    mm_status st;

    range.start = mm_allocate_pages(world.cu, size, CU_MEM_ATTACH_GLOBAL, &range.allocation, &st);
    CHECK(range.start != 0);
    return range;
}

static void
release(mm_range range)
{
    mm_status st;

    CHECK_OK(mm_free(world.cu, range.allocation, &st), &st);
}

static mm_result_block *
copy_of(mm_range range)
{
    mm_status st;
    mm_result_block *block = mm_result_copy(world.cu, range, NULL, &st);

    CHECK(block != NULL);
    return block;
}

/* Whether all bytes of a block, up to a size, have this value. */
static bool
holds(const mm_result_block *block, int value, size_t size)
{
    const unsigned char *bytes = block->bytes;

    return bytes[0] == value && memcmp(bytes, bytes + 1, size - 1) == 0;
}

static void
check_usage(size_t held, size_t idle)
{
    mm_result_usage now = mm_result_blocks_usage();

    CHECK_EQUAL(now.held, held);
    CHECK_EQUAL(now.idle, idle);
}

TEST(blocks_are_used_again)
{
    mm_range range = allocate(SIZE);
    mm_result_block *block, *other;
    void *bytes;

    memset((void *)(uintptr_t)range.start, 7, SIZE);
    block = copy_of(range);
    bytes = block->bytes;
    CHECK(block->page_locked && holds(block, 7, SIZE));
    CHECK_EQUAL(block->capacity, CAPACITY);
    CHECK(mm_result_contains((CUdeviceptr)(uintptr_t)bytes + SIZE));
    CHECK(!mm_result_contains((CUdeviceptr)(uintptr_t)bytes + CAPACITY));
    CHECK(!mm_result_contains(range.start));
    check_usage(CAPACITY, 0);
    mm_result_release(block);
    CHECK(!mm_result_contains((CUdeviceptr)(uintptr_t)bytes));
    check_usage(CAPACITY, CAPACITY);
    memset((void *)(uintptr_t)range.start, 8, SIZE);
    block = copy_of(range);
    other = copy_of(range);
    CHECK(block->bytes == bytes && other->bytes != bytes);
    CHECK(holds(block, 8, SIZE) && holds(other, 8, SIZE));
    mm_result_release(block);
    mm_result_release(other);
    mm_result_blocks_trim(CAPACITY);
    check_usage(CAPACITY, CAPACITY);
    mm_result_blocks_trim(0);
    check_usage(0, 0);
    release(range);
}

TEST(the_limit_gives_ordinary_memory)
{
    mm_range range = allocate(SIZE), small = {.start = range.start, .size = STEP};
    mm_result_block *first, *second;

    mm_result_blocks_set_limit(CAPACITY + STEP - 1);
    first = copy_of(range);
    second = copy_of(range);
    CHECK(first->page_locked && !second->page_locked);
    CHECK(holds(second, 0, SIZE));
    mm_result_release(second);
    mm_result_release(first);
    first = copy_of(small); /* half of the idle block */
    CHECK_EQUAL(first->capacity, CAPACITY);
    mm_result_release(first);
    small.size = STEP / 2;
    first = copy_of(small); /* too little: the idle block goes */
    CHECK(first->page_locked);
    check_usage(STEP, 0);
    mm_result_release(first);
    mm_result_blocks_set_limit(0);
    mm_result_blocks_trim(SIZE_MAX);
    check_usage(0, 0);
    mm_result_blocks_set_limit(LIMIT);
    release(range);
}

TEST(memory_that_has_gone_is_forgotten)
{
    mm_range range = allocate(SIZE);
    mm_result_block *block = copy_of(range);

    CHECK_EQUAL(world.cu->MemFreeHost(block->bytes), 0);
    mm_result_release(block);
    block = copy_of(range);
    CHECK(holds(block, 0, SIZE));
    check_usage(CAPACITY, 0);
    mm_result_release(block);
    mm_result_blocks_trim(0);
    release(range);
}

static void
trim(void *argument)
{
    (void)argument;
    mm_result_blocks_trim(0);
}

/* A driver frees nothing in a host function, and asks for no stream there. */
TEST(host_functions_free_nothing)
{
    mm_range range = allocate(SIZE);
    CUstream stream = NULL;
    mm_status st;

    mm_result_release(copy_of(range));
    CHECK_OK(mm_stream_create(world.cu, &stream, &st), &st);
    CHECK_EQUAL(world.cu->LaunchHostFunc(stream, trim, NULL), 0);
    CHECK_EQUAL(world.cu->StreamSynchronize(stream), 0);
    CHECK_EQUAL(world.cu->StreamDestroy(stream), 0);
    check_usage(CAPACITY, CAPACITY);
    world.fail("cuMemFreeHost", 1, CUDA_ERROR_NOT_PERMITTED, 0);
    mm_result_blocks_trim(0);
    check_usage(CAPACITY, CAPACITY);
    mm_result_blocks_trim(0);
    check_usage(0, 0);
    release(range);
}

static void *
copy_often(void *argument)
{
    mm_range range = allocate(SIZE);

    (void)argument;
    for (int i = 0; i < ROUNDS; i++) {
        mm_range part = {.start = range.start, .size = i % 3 == 0 ? SIZE : STEP};
        mm_result_block *block;

        memset((void *)(uintptr_t)range.start, i + 1, SIZE);
        block = copy_of(part);
        CHECK(holds(block, i + 1, part.size));
        CHECK(mm_result_blocks_usage().held <= 3 * (size_t)CAPACITY);
        mm_result_release(block);
        if (i % 10 == 0) {
            mm_result_blocks_trim(STEP);
        }
    }
    release(range);
    return NULL;
}

TEST(threads_share_the_blocks)
{
    size_t live = world.live_allocations();

    mm_result_blocks_set_limit((size_t)3 * CAPACITY);
    check_threads(WORKERS, copy_often, NULL);
    mm_result_blocks_trim(0);
    mm_result_blocks_set_limit(LIMIT);
    check_usage(0, 0);
    CHECK_EQUAL(world.live_allocations(), live);
}

TEST_MAIN(world_open)
