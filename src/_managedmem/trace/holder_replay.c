/* holder_replay.c: the last event of each page decides. Events are read from the last one to the
 * first, so that most blocks are decided early and older events of them are skipped. */
#include "holder_replay.h"

#include <assert.h>
#include <stdlib.h>

#include "../memory/presence.h"
#include "../memory/range.h"

#define BLOCK ((uint64_t)2 << 20) /* of addresses */
#define DISCARDED UINT64_MAX /* the time of an event that no other one follows */

typedef struct {
    mm_page_holders *h;
    uint64_t *time; /* of the event that decided the page; 0 before one */
    uint64_t
        *decided; /* of each block: all of its pages in a span have this time or a later one */
    size_t *first_block; /* of each span: index into `decided` */
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

/* Of events at one time the first one here is the last one that was recorded. */
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

/* Applies an event to a part of a span, block by block. */
static void
set_part(holder_replay *replay, size_t span_index, mm_span part, uint32_t set, uint64_t time)
{
    const mm_held_span *span = &replay->h->span[span_index];
    uint64_t page = mm_page_size(), at = part.start, end;

    for (; at < part.end; at = end) {
        uint64_t block_start = at / BLOCK * BLOCK;
        uint64_t *decided = &replay->decided[replay->first_block[span_index]
                                             + (size_t)(at / BLOCK - span->start / BLOCK)];
        mm_span inside = mm_span_inside((mm_span){block_start, block_start + BLOCK},
                                        (mm_span){span->start, span->end});
        end = inside.end < part.end ? inside.end : part.end;
        if (time <= *decided) {
            continue;
        }
        set_pages(replay, span->first + (size_t)((at - span->start) / page),
                  span->first + (size_t)((end - span->start + page - 1) / page), set, time);
        if (at == inside.start && end == inside.end) {
            *decided = time;
        }
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
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for the times of %zu pages",
                       h->page_count);
    }
    for (size_t i = 0; i < h->count; i++) {
        replay->first_block[i] = blocks;
        blocks += count_blocks(&h->span[i]);
    }
    replay->decided = calloc(blocks + 1, sizeof *replay->decided);
    if (replay->decided == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for the times of %zu blocks", blocks);
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
    free(replay.time);
    free(replay.decided);
    free(replay.first_block);
    return rc;
}
