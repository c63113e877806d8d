/* holder_replay.c: the last event of each page decides. Most events move whole blocks, so those are
 * kept for the block, and pages have a time of their own only where events move parts of it. */
#include "holder_replay.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/presence.h"
#include "../memory/range.h"

#define BLOCK ((uint64_t)2 << 20) /* of addresses */
#define DISCARDED UINT64_MAX /* the time of an event that no other one follows */

/* Pages of a span in one block. */
typedef struct {
    uint64_t time; /* of the last event on all of them; 0 before one */
    uint32_t set; /* of that event */
    bool has_parts; /* some have a later event of their own */
} replay_block;

typedef struct {
    mm_page_holders *h;
    uint64_t *time; /* of the event of each page in blocks with parts; 0 before one */
    replay_block *block; /* of each span in turn */
    size_t *first_block; /* of each span */
} holder_replay;

/* --- one event -------------------------------------------------------------------------- */

static uint32_t
set_of_processor(int16_t processor)
{
    if (processor == MM_ON_HOST) {
        return (uint32_t)1 << MM_SET_HOST_BIT;
    }
    return processor >= 0 && processor < MM_SET_HOST_BIT ? (uint32_t)1 << processor : 0;
}

/* False for events that change the place of no page. *time is that at which the module worked on
 * the page: moves of one push begin one after the other on the device, but the module, which locks
 * the block, took them all at the beginning of the push. */
static bool
read_event(const mm_event *event, uint32_t *set, uint64_t *time)
{
    *time = event->start;
    switch (event->kind) {
    case MM_MOVE:
        *time -= event->extra;
        *set = set_of_processor(event->destination);
        return true;
    case MM_EVICTION:
    case MM_DUPLICATE_END:
        *set = set_of_processor(event->destination);
        return true;
    case MM_DUPLICATE:
        *set = event->extra;
        return true;
    case MM_CALL:
        *set = 0;
        *time = DISCARDED;
        return event->cause == MM_DISCARD || event->cause == MM_DISCARD_PREFETCH;
    default:
        return false;
    }
}

/* Events come from the last record to the first. Of two at one time the later record counts, which
 * comes first here. */
static void
set_pages(holder_replay *replay, size_t first, size_t end, uint32_t set, uint64_t time)
{
    for (size_t i = first; i < end; i++) {
        if (time > replay->time[i]) {
            replay->time[i] = time;
            replay->h->page[i] = set;
        }
    }
}

/* The part of a span in the block of an address. */
static mm_span
part_in_block(const mm_held_span *span, uint64_t address)
{
    uint64_t start = address / BLOCK * BLOCK;

    return mm_span_inside((mm_span){start, start + BLOCK}, (mm_span){span->start, span->end});
}

static size_t
page_index(const mm_held_span *span, uint64_t address)
{
    return span->first + (size_t)((address - span->start) / mm_page_size());
}

/* Applies an event to a part of a span, block by block. */
static void
set_part(holder_replay *replay, size_t span_index, mm_span part, uint32_t set, uint64_t time)
{
    const mm_held_span *span = &replay->h->span[span_index];
    replay_block *blocks = &replay->block[replay->first_block[span_index]];

    while (part.start < part.end) {
        replay_block *block = &blocks[part.start / BLOCK - span->start / BLOCK];
        mm_span all = part_in_block(span, part.start);
        mm_span here = mm_span_inside(part, all);
        if (time > block->time && here.start == all.start && here.end == all.end) {
            block->time = time;
            block->set = set;
        } else if (time > block->time) {
            block->has_parts = true;
            set_pages(replay, page_index(span, here.start), page_index(span, here.end - 1) + 1,
                      set, time);
        }
        part.start = here.end;
    }
}

static void
apply_event(holder_replay *replay, const mm_event *event)
{
    mm_span all = {event->address, event->address + event->amount};
    uint64_t time;
    uint32_t set;

    if (!read_event(event, &set, &time)) {
        return;
    }
    for (size_t i = mm_page_holders_find(replay->h, all.start);
         i < replay->h->count && replay->h->span[i].start < all.end; i++) {
        const mm_held_span *span = &replay->h->span[i];
        if (event->start >= span->since) {
            set_part(replay, i, mm_span_inside(all, (mm_span){span->start, span->end}), set, time);
        }
    }
}

/* --- all events ------------------------------------------------------------------------- */

/* Gives pages the set of their block, unless they have a later one. */
static void
set_from_blocks(holder_replay *replay, size_t span_index)
{
    const mm_held_span *span = &replay->h->span[span_index];
    const replay_block *block = &replay->block[replay->first_block[span_index]];

    for (uint64_t at = span->start; at < span->end; block++) {
        mm_span part = part_in_block(span, at);
        size_t end = page_index(span, part.end - 1) + 1;
        for (size_t i = page_index(span, at); i < end; i++) {
            if (block->time > (block->has_parts ? replay->time[i] : 0)) {
                replay->h->page[i] = block->set;
            }
        }
        at = part.end;
    }
}

static size_t
count_blocks(const mm_held_span *span)
{
    return (size_t)((span->end - 1) / BLOCK - span->start / BLOCK) + 1;
}

static int
init_replay(holder_replay *replay, mm_page_holders *h, mm_status *st)
{
    size_t blocks = 0;

    *replay = (holder_replay){
        .h = h,
        .time = calloc(h->page_count + 1, sizeof *replay->time),
        .first_block = calloc(h->count + 1, sizeof *replay->first_block),
    };
    if (replay->time == NULL || replay->first_block == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for the times of %zu pages",
                      h->page_count);
        return -1;
    }
    for (size_t i = 0; i < h->count; i++) {
        replay->first_block[i] = blocks;
        blocks += count_blocks(&h->span[i]);
    }
    replay->block = calloc(blocks + 1, sizeof *replay->block);
    if (replay->block == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu blocks", blocks);
        return -1;
    }
    return 0;
}

int
mm_replay_holders(mm_page_holders *h, const mm_event *events, size_t count, mm_status *st)
{
    holder_replay replay;
    int rc = init_replay(&replay, h, st);

    for (size_t i = count; rc == 0 && i > 0; i--) {
        apply_event(&replay, &events[i - 1]);
    }
    for (size_t i = 0; rc == 0 && i < h->count; i++) {
        set_from_blocks(&replay, i);
    }
    free(replay.time);
    free(replay.block);
    free(replay.first_block);
    return rc;
}
