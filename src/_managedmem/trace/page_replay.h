/* page_replay.h: follows moves page by page, to find those that go back. */
#ifndef MM_PAGE_REPLAY_H
#define MM_PAGE_REPLAY_H

#include "../memory/event.h"
#include "block_table.h"

#include <stdbool.h>

/* All zero has seen no move. */
typedef struct {
    mm_block_table blocks;
    uint64_t part; /* the epoch of blocks whose `recent` bits are about the present part */
    mm_event last; /* the last move of the part, and whether its last page turned back */
    bool any, last_turned, last_turned_across;
} mm_page_replay;

/* Bytes that turned back from a move of the same part, and from a move of an earlier part. */
typedef struct {
    uint64_t within, across;
} mm_turned;

void mm_page_replay_free(mm_page_replay *replay);

/* The next moves belong to another part. */
void mm_page_replay_begin_part(mm_page_replay *replay);

/* Makes room for moves of addresses from start to before end. */
MM_NODISCARD int mm_page_replay_reserve(mm_page_replay *replay, uint64_t start, uint64_t end,
                                        mm_status *st);

/* Follows a move, for which there is room, and returns how many of its bytes turned back: those on
 * pages whose last move had the other direction. A direction goes up or down in the order host,
 * device 0, device 1 and so on. A move that continues the last one (the next addresses at the same
 * time in the same direction) is one move with it, even on a page that both share. */
mm_turned mm_page_replay_move(mm_page_replay *replay, const mm_event *move);

#endif
