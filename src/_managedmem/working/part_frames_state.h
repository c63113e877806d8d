/* part_frames_state.h: the inside of a set of frames, for the files of this room that make it up. */
#ifndef MM_PART_FRAMES_STATE_H
#define MM_PART_FRAMES_STATE_H

#include <pthread.h>

#include "../memory/guard.h"
#include "../memory/working_order.h"
#include "../memory/working_releases.h"
#include "part_frames.h"
#include "placement.h"
#include "slab.h"

/* A part besides its place. */
typedef struct {
    CUdeviceptr home;
    CUevent filled; /* behind its latest copy to a frame */
    CUevent sent; /* behind its latest copy home, if is_sent */
    bool is_sent;
    bool is_written; /* by some of its uses */
    unsigned held;
    mm_release_list *releases; /* since it was loaded */
} frame_part;

/* The last uses of a round. What follows them belongs to the next one. */
typedef struct {
    uint32_t first, second, times; /* as in mm_order_walk */
} round_end;

enum { ROUND_ENDS = 8 };

struct mm_frames {
    mm_driver *cu;
    int device;
    bool host_waits;
    mm_guard guard; /* calls under way; closed: the set has ended */
    mm_slab *slab;
    CUstream inward, outward;
    CUevent all_sent;
    pthread_mutex_t lock; /* of all that follows; held during driver calls that only queue */
    mm_working_order order;
    mm_placement placement;
    mm_place *places; /* of the parts, as the next one */
    frame_part *parts;
    size_t place_capacity, part_capacity;
    uint32_t count;
    uint64_t turns;
    unsigned rounds; /* under way */
    round_end ends[ROUND_ENDS]; /* the latest ones */
    unsigned end_count;
    bool missed; /* writes at home that could not be followed: what is in frames may be old */
    bool broken; /* frames are in an unknown state: nothing is loaded any more */
    mm_release_list *pool;
    mm_frames_report report;
};

static inline void
mm_frames_lock(mm_frames *f)
{
    (void)pthread_mutex_lock(&f->lock);
}

static inline void
mm_frames_unlock(mm_frames *f)
{
    (void)pthread_mutex_unlock(&f->lock);
}

/* --- part_copies.c: under the lock -------------------------------------------------------- */

/* Notes a failure, and waits for the device, so that all frames can be used again. In a scope. */
void mm_frames_recover(mm_frames *f, const mm_status *failure);

/* Takes a part out that is not in use; its frame still follows its uses. In a scope. */
MM_NODISCARD int mm_frames_drop(mm_frames *f, uint32_t number, mm_status *st);

/* Loads a part, for which only parts with a distance of at least `least` go. False if that leaves no
 * room, or the driver refuses. */
bool mm_frames_load(mm_frames *f, uint32_t number, uint32_t least);

/* Copies a part home, behind its uses. In a scope. */
MM_NODISCARD int mm_frames_send_home(mm_frames *f, uint32_t number, mm_status *st);

/* Stores the number of uses before the next one of each part. */
void mm_frames_measure_distances(mm_frames *f);

/* Notes that a round ends: copies that were loaded for the next one would be dropped when it begins. */
void mm_frames_note_round_end(mm_frames *f);

/* Loads the parts that are expected next, as long as only parts with a later use go for them. */
void mm_frames_look_ahead(mm_frames *f);

#endif
