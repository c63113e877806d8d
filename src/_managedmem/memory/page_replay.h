/* page_replay.h: follows moves page by page, to find those that go back. */
#ifndef MM_PAGE_REPLAY_H
#define MM_PAGE_REPLAY_H

#include "block_table.h"
#include "event.h"

#include <stdbool.h>

/* All zero has seen no move. */
typedef struct {
    mm_block_table blocks;
    uint64_t epoch; /* of the blocks that the present replay has changed */
    mm_event last; /* the last move, and whether its last page turned back */
    bool any, last_turned;
} mm_page_replay;

void mm_page_replay_free(mm_page_replay *replay);

/* Forgets all moves. */
void mm_page_replay_restart(mm_page_replay *replay);

/* Makes room for moves of addresses from start to before end. */
MM_NODISCARD int mm_page_replay_reserve(mm_page_replay *replay, uint64_t start, uint64_t end,
                                        mm_status *st);

/* Follows a move, for which there is room, and returns how many of its bytes turned back: those on
 * pages whose last move had the other direction. Directions are those of the order host, device 0,
 * device 1 and so on. A move that continues the last one (the next addresses at the same time in
 * the same direction) is one move with it, also on a page that both share. */
uint64_t mm_page_replay_move(mm_page_replay *replay, const mm_event *move);

#endif
