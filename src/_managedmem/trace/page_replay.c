/* page_replay.c: the direction of the last move of every page. */
#include "page_replay.h"

#include <assert.h>

enum { PAGE = 1 << MM_BLOCK_PAGE_BITS };

/* Indices of mm_page_word.pages. */
typedef enum { UP, DOWN } direction;

void
mm_page_replay_free(mm_page_replay *replay)
{
    mm_block_table_free(&replay->blocks);
    *replay = (mm_page_replay){0};
}

void
mm_page_replay_begin_part(mm_page_replay *replay)
{
    replay->part++;
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

/* Pages of a block that turned, and if the first and the last page of the move are among them. */
typedef struct {
    uint64_t pages;
    bool first, last;
} turned_pages;

/* Sets the last direction of the pages in the mask. Stores which of them turned back from a move
 * of this part, and which from a move of an earlier part. */
static void
turn_word(mm_page_word *word, uint64_t mask, direction now, uint64_t *within, uint64_t *across)
{
    uint64_t back = word->pages[!now] & mask;

    *within = back & word->recent;
    *across = back & ~word->recent;
    word->pages[now] |= mask;
    word->pages[!now] &= ~mask;
    word->recent |= mask;
}

static void
count_turned(turned_pages *turned, uint64_t back, uint64_t first, uint64_t last)
{
    turned->pages += (uint64_t)__builtin_popcountll(back);
    turned->first = turned->first || (back & first) != 0;
    turned->last = turned->last || (back & last) != 0;
}

/* Sets the last direction of pages of a block, and counts those that turned back. */
static void
turn_pages(mm_page_block *block, size_t first, size_t last, direction now, turned_pages *within,
           turned_pages *across)
{
    for (size_t word = first / 64; word <= last / 64; word++) {
        uint64_t mask = UINT64_MAX, first_bit = 0, last_bit = 0, back, back_across;
        if (word == first / 64) {
            mask &= UINT64_MAX << first % 64;
            first_bit = (uint64_t)1 << first % 64;
        }
        if (word == last / 64) {
            mask &= UINT64_MAX >> (63 - last % 64);
            last_bit = (uint64_t)1 << last % 64;
        }
        turn_word(&block->words[word], mask, now, &back, &back_across);
        if (back != 0) {
            count_turned(within, back, first_bit, last_bit);
        }
        if (back_across != 0) {
            count_turned(across, back_across, first_bit, last_bit);
        }
    }
}

static mm_page_block *
present_block(const mm_page_replay *replay, uint64_t number)
{
    mm_page_block *block = mm_block_table_find(&replay->blocks, number);

    assert(block != NULL);
    if (block->epoch != replay->part) {
        block->epoch = replay->part;
        for (size_t word = 0; word < MM_BLOCK_WORDS; word++) {
            block->words[word].recent = 0;
        }
    }
    return block;
}

/* The bytes of a move from start to end, in one block, that are on turned pages. `joined`: the
 * page of the start turned at the move before, which this one continues. */
static uint64_t
turned_bytes(turned_pages *turned, uint64_t start, uint64_t end, bool joined)
{
    uint64_t bytes;

    if (turned->pages == 0 && !joined) {
        return 0;
    }
    if (joined) {
        /* The page has this direction since the last move, so it was not counted again. */
        assert(!turned->first);
        turned->first = true;
        turned->last =
            turned->last || start >> MM_BLOCK_PAGE_BITS == (end - 1) >> MM_BLOCK_PAGE_BITS;
        turned->pages++;
    }
    bytes = turned->pages * PAGE;
    bytes -= turned->first ? start % PAGE : 0;
    bytes -= turned->last ? (PAGE - end % PAGE) % PAGE : 0;
    return bytes;
}

/* Adds the part of a move in one block. `joined`: the move continues the last one, and begins on
 * the page where that ended. */
static void
move_in_block(mm_page_replay *replay, uint64_t start, uint64_t end, direction now, bool joined,
              mm_turned *turned)
{
    mm_page_block *block = present_block(replay, start >> MM_BLOCK_BITS);
    size_t first = (size_t)(start >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES;
    size_t last = (size_t)((end - 1) >> MM_BLOCK_PAGE_BITS) % MM_BLOCK_PAGES;
    turned_pages within = {0}, across = {0};

    turn_pages(block, first, last, now, &within, &across);
    turned->within += turned_bytes(&within, start, end, joined && replay->last_turned);
    turned->across += turned_bytes(&across, start, end, joined && replay->last_turned_across);
    replay->last_turned = within.last;
    replay->last_turned_across = across.last;
}

mm_turned
mm_page_replay_move(mm_page_replay *replay, const mm_event *move)
{
    uint64_t at = move->address, end = move->address + move->amount;
    direction now = move->destination > move->source ? UP : DOWN;
    bool joined = at % PAGE != 0 && is_one_move(replay, move);
    mm_turned turned = {0};

    if (move->amount == 0 || move->source == move->destination) {
        return turned;
    }
    while (at < end) {
        uint64_t last = at | (((uint64_t)1 << MM_BLOCK_BITS) - 1); /* of the block */
        uint64_t stop = last < end ? last + 1 : end;
        move_in_block(replay, at, stop, now, joined, &turned);
        joined = false;
        at = stop;
    }
    replay->last = *move;
    replay->any = true;
    return turned;
}
