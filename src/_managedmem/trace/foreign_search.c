/* foreign_search.c: chooses the addresses to ask about. */
#include "foreign_search.h"

/* Small allocations begin at multiples of the first step, and lie up to 5 KiB apart, as seen on an
 * H100. After SMALL_STEPS steps without an answer, each further step doubles, because a call for
 * each 512 bytes would take too long in large memory that was freed. */
enum { FIRST_STEP = 512, LAST_STEP = 65536, SMALL_STEPS = 12 };

/* A page, as its bit in a block. */
typedef struct {
    uint64_t block, bit;
    size_t word;
} page_bit;

static page_bit
bit_of_page(uint64_t address)
{
    size_t page = (size_t)(address >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES;

    return (page_bit){address >> MM_BLOCK_BITS, (uint64_t)1 << page % 64, page / 64};
}

static bool
was_asked(const mm_foreign_search *search, uint64_t address)
{
    page_bit page = bit_of_page(address);
    const mm_page_block *block = mm_block_table_find(search->asked, page.block);

    return block != NULL && (block->words[page.word].pages[0] & page.bit) != 0;
}

static int
note_asked(const mm_foreign_search *search, uint64_t address, mm_status *st)
{
    page_bit page = bit_of_page(address);
    mm_page_block *block = mm_block_table_add(search->asked, page.block, st);

    if (block == NULL) {
        return -1;
    }
    block->words[page.word].pages[0] |= page.bit;
    return 0;
}

/* Queries one address. Refuses an allocation that is a living memory of this library, or that
 * overlaps an earlier answer. */
static bool
find_new_allocation(const mm_foreign_search *search, uint64_t address, CUdeviceptr *start,
                    size_t *size)
{
    uint64_t limit;

    if (!search->find(search->context, address, start, size) || *start > address
        || address - *start >= *size || *size > UINT64_MAX - *start
        || mm_memory_index_has_living(&search->memories->index, *start)) {
        return false;
    }
    limit = *start + *size;
    return mm_address_map_find(&search->memories->foreign, *start, &limit) == NULL
           && limit == *start + *size;
}

int
mm_search_foreign(const mm_foreign_search *search, uint64_t start, uint64_t end, mm_status *st)
{
    uint64_t at = start, step = FIRST_STEP, page = UINT64_MAX, steps = 0;

    while (at < end) {
        CUdeviceptr found = 0;
        uint64_t limit = end;
        size_t size = 0;
        if (mm_address_map_find(&search->memories->foreign, at, &limit) != NULL) {
            at = limit;
            step = FIRST_STEP;
            steps = 0;
            continue;
        }
        /* A page can hold several allocations, so this walk may query it again. */
        if (page == at >> MM_BLOCK_PAGE_BITS || !was_asked(search, at)) {
            page = at >> MM_BLOCK_PAGE_BITS;
            if (find_new_allocation(search, at, &found, &size)) {
                if (mm_traced_memories_add_foreign(search->memories, found, size, st) < 0) {
                    return -1;
                }
                continue;
            }
            if (note_asked(search, at, st) < 0) {
                return -1;
            }
        }
        if (end - at <= step) {
            return 0;
        }
        at = (at / step + 1) * step;
        step = ++steps > SMALL_STEPS && step < LAST_STEP ? 2 * step : step;
    }
    return 0;
}
