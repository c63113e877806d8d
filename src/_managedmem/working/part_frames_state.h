/* part_frames_state.h: the internals of a set of frames, for the files part_*.c. */
#ifndef MM_PART_FRAMES_STATE_H
#define MM_PART_FRAMES_STATE_H

#include <pthread.h>

#include "../driver/threads.h"
#include "../memory/guard.h"
#include "part_frames.h"
#include "placement.h"
#include "slab.h"
#include "use_ends.h"
#include "use_order.h"

/* A part, without its place. */
typedef struct {
    CUdeviceptr home;
    mm_guard *memory; /* of managed memory that may be closed before the part leaves; or NULL */
    CUevent filled; /* behind its latest copy to a frame */
    CUevent sent; /* behind its latest copy home, if is_sent */
    bool is_sent;
    mm_part_access access;
    bool is_live; /* it was not removed */
    bool was_loaded; /* once or more */
    bool is_stale; /* it was written at home while it is in use: it goes at the end of that */
    bool was_used; /* since it was added, or written at home */
    bool is_written_by_graph; /* at replays, which are not seen: a copy is good for one use */
    unsigned held;
    unsigned writers; /* of these, uses that write the frame, until they have sent it home */
    mm_use_rate rate;
    mm_release_list *releases; /* since it was loaded */
    size_t most_ends; /* the number of releases to look through */
} frame_part;

/* The last uses of a round, before the uses of the next. */
typedef struct {
    uint32_t first, second, times; /* as in mm_order_walk */
} round_end;

enum { ROUND_ENDS = 8 };

/* A graph into which uses of parts were captured. */
typedef struct frame_capture frame_capture;

struct mm_frames {
    mm_deferred_free deferred;
    mm_frames *next, *previous; /* in the list of sets; protected by its lock */
    mm_driver *cu;
    int device;
    bool host_waits;
    CUmemLocation host; /* the memory nearest to the device */
    bool is_managed; /* parts keep their address, and are prefetched instead of copied */
    mm_guard guard; /* calls under way */
    atomic_bool is_idle; /* once it is closed, and none is */
    atomic_bool has_ended; /* and the driver has its objects back */
    mm_slab *slab; /* NULL for managed memory */
    CUstream inward, outward;
    CUevent all_sent;
    mm_operation_lock turn; /* to suspend or to resume */
    pthread_mutex_t lock; /* of all that follows; held during calls that queue, or recover */
    mm_use_order order;
    mm_placement placement;
    mm_place *places; /* of the parts, as the next one */
    frame_part *parts;
    size_t place_capacity, part_capacity;
    uint32_t count;
    frame_capture *captures; /* whose graphs live, as far as is known */
    bool is_suspended; /* no part gets a frame */
    uint32_t ring_frames; /* the number of their latest frame */
    size_t ring; /* bytes behind the room of the placement, which belong to these graphs */
    mm_use_clock clock;
    unsigned rounds; /* under way */
    round_end ends[ROUND_ENDS]; /* the latest ones */
    unsigned end_count;
    bool missed; /* writes at home that could not be followed: frames may be stale */
    /* Failures after which the device has to be waited for before a frame is used again, and those
     * that were followed by a wait. */
    uint64_t troubles, waited;
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

/* The address of a part that is there, for work. */
static inline CUdeviceptr
mm_frames_address(const mm_frames *f, uint32_t number)
{
    return f->is_managed ? f->parts[number].home : f->slab->start + f->places[number].offset;
}

/* --- part_copies.c: not under the lock ------------------------------------------------------- */

/* Notes a failure after which nothing is wrong. */
void mm_frames_note_failure(mm_frames *f, const mm_status *failure);

/* --- the same, under the lock ------------------------------------------------------------------ */

/* Notes a failure. Nothing is loaded before the device was waited for, which a later use does: not under
 * the lock, nor beside a capture. */
void mm_frames_recover(mm_frames *f, const mm_status *failure);

/* Takes the parts out that lie there; the inward stream follows what still reads or writes them.
 * In a scope. */
MM_NODISCARD int mm_frames_clear(mm_frames *f, size_t offset, size_t bytes, mm_status *st);

/* Takes a part out that is not in use; its frame still follows its uses. In a scope. */
MM_NODISCARD int mm_frames_drop(mm_frames *f, uint32_t number, mm_status *st);

/* mm_frames_drop for a part that leaves the set: managed memory stays where it is. In a scope. */
MM_NODISCARD int mm_frames_forget(mm_frames *f, uint32_t number, mm_status *st);

/* Loads a part, for which only parts with a distance of at least `least` go. False if that leaves
 * no room, or the driver refuses. */
bool mm_frames_load(mm_frames *f, uint32_t number, uint32_t least);

/* Copies a part home, behind its uses. In a scope. */
MM_NODISCARD int mm_frames_send_home(mm_frames *f, uint32_t number, mm_status *st);

/* Stores the number of uses before the next one of each part. */
void mm_frames_measure_distances(mm_frames *f);

/* Notes the end of a round, after which nothing is loaded ahead. */
void mm_frames_note_round_end(mm_frames *f);

/* Loads the parts that are expected next, as long as they replace only parts that are used later
 * than they are. */
void mm_frames_look_ahead(mm_frames *f);

/* --- part_graphs.c: not under the lock -------------------------------------------------------- */

/* Uses a part in a frame in work that a stream captures, or at home. */
mm_part_use mm_frames_capture(mm_frames *f, uint32_t number, mm_device_stream stream);

/* Ends a captured use, or lets it go on. */
void mm_frames_end_captured(mm_frames *f, mm_part_use use, bool written, bool goes_on,
                            mm_device_stream stream);

/* Lets the copies that are captured from now on follow the work that the stream has captured. */
void mm_frames_follow_captured(mm_frames *f, mm_device_stream stream);

/* --- the same, under the lock ----------------------------------------------------------------- */

/* A frame in use may be older than its home, which a replay has written: the part is used at home
 * until then, unless a use writes the frame. */
void mm_frames_expect_replay(mm_frames *f, uint32_t number);

/* Forgets graphs that are gone, and takes the room back after the last one. */
void mm_frames_prune_captures(mm_frames *f);

/* True if a use of the part was captured and has not ended. */
bool mm_frames_is_captured(const mm_frames *f, uint32_t number);

/* The number may go to another part from now on. */
void mm_frames_forget_captured(mm_frames *f, uint32_t number);

/* Forgets all graphs; what they use lives on. */
void mm_frames_free_captures(mm_frames *f);

#endif
