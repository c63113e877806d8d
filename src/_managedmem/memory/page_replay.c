/* page_replay.c: the direction of the last move of every page. */
#include "page_replay.h"

#include <assert.h>

enum { PAGE = 1 << MM_BLOCK_PAGE_BITS };

/* Index into the bits of a block. */
typedef enum { UP, DOWN } direction;

void
mm_page_replay_free(mm_page_replay *replay)
{
    mm_block_table_free(&replay->blocks);
    *replay = (mm_page_replay){0};
}

void
mm_page_replay_restart(mm_page_replay *replay)
{
    replay->epoch++;
    replay->any = false;
}

int
mm_page_replay_reserve(mm_page_replay *replay, uint64_t start, uint64_t end, mm_status *st)
{
    return mm_block_table_add_range(&replay->blocks, start, end, st);
}

static bool
is_one_move(const mm_page_replay *replay, const mm_event *move)
{
    const mm_event *last = &replay->last;

    return replay->any && last->address + last->amount == move->address
           && last->start == move->start && last->end == move->end && last->source == move->source
           && last->destination == move->destination;
}

/* Sets the last direction of pages of a block, and returns the number of those that turned;
 * *first_turned and *last_turned are for the pages at the ends. */
static uint64_t
turn_pages(mm_page_block *block, size_t first, size_t last, direction now, bool *first_turned,
           bool *last_turned)
{
    uint64_t turned = 0;

    for (size_t word = first / 64; word <= last / 64; word++) {
        uint64_t mask = UINT64_MAX, back;
        if (word == first / 64) {
            mask &= UINT64_MAX << first % 64;
        }
        if (word == last / 64) {
            mask &= UINT64_MAX >> (63 - last % 64);
        }
        back = block->pages[!now][word] & mask;
        turned += back != 0 ? (uint64_t)__builtin_popcountll(back) : 0;
        block->pages[now][word] |= mask;
        block->pages[!now][word] &= ~mask;
        *first_turned = word == first / 64 ? (back >> first % 64 & 1) != 0 : *first_turned;
        *last_turned = word == last / 64 && (back >> last % 64 & 1) != 0;
    }
    return turned;
}

static mm_page_block *
present_block(const mm_page_replay *replay, uint64_t number)
{
    mm_page_block *block = mm_block_table_find(&replay->blocks, number);

    assert(block != NULL);
    if (block->epoch != replay->epoch) {
        *block = (mm_page_block){.epoch = replay->epoch};
    }
    return block;
}

/* The part of a move in one block. Returns the bytes that turned back. `joined`: the last page of
 * the last move is the first one of this, and had the same move. */
static uint64_t
move_in_block(mm_page_replay *replay, uint64_t start, uint64_t end, direction now, bool joined)
{
    mm_page_block *block = present_block(replay, start >> MM_BLOCK_BITS);
    size_t first = (size_t)(start >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES;
    size_t last = (size_t)((end - 1) >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES;
    bool first_turned = false, last_turned = false;
    uint64_t pages = turn_pages(block, first, last, now, &first_turned, &last_turned);
    uint64_t bytes;

    if (joined && replay->last_turned) {
        /* The page has this direction since the last move, so it was not counted again. */
        assert(!first_turned);
        first_turned = true;
        last_turned = last_turned || first == last;
        pages++;
    }
    bytes = pages * PAGE;
    bytes -= first_turned ? start % PAGE : 0;
    bytes -= last_turned ? (PAGE - end % PAGE) % PAGE : 0;
    replay->last_turned = last_turned;
    return bytes;
}

uint64_t
mm_page_replay_move(mm_page_replay *replay, const mm_event *move)
{
    uint64_t at = move->address, end = move->address + move->amount, turned = 0;
    bool joined = at % PAGE != 0 && is_one_move(replay, move);

    if (move->amount == 0 || move->source == move->destination) {
        return 0;
    }
    while (at < end) {
        uint64_t last = at | (((uint64_t)1 << MM_BLOCK_BITS) - 1); /* of the block */
        uint64_t stop = last < end ? last + 1 : end;
        turned +=
            move_in_block(replay, at, stop, move->destination > move->source ? UP : DOWN, joined);
        joined = false;
        at = stop;
    }
    replay->last = *move;
    replay->any = true;
    return turned;
}
