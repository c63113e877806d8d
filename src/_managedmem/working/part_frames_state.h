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

/* A part. Its place is in mm_frames.places. */
typedef struct {
    CUdeviceptr home;
    mm_guard *memory; /* of managed memory that may be closed before the part leaves; or NULL */
    CUevent filled; /* behind its latest copy to a frame */
    CUevent sent; /* behind its latest copy home, if is_sent */
    bool is_sent;
    mm_part_access access;
    bool is_live; /* it was not removed */
    bool was_loaded; /* once or more */
    bool is_stale; /* it was written at home during a use, after which it is dropped */
    bool was_used; /* since it was added, or written at home */
    bool is_written_by_graph; /* at launches, which are not seen: a copy is good for one use */
    unsigned held;
    unsigned writers; /* of these, uses that write the frame, until they have sent it home */
    mm_use_rate rate;
    mm_release_list *releases; /* since it was loaded */
    size_t most_ends; /* with more releases, those that have passed are removed */
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
    atomic_bool is_idle; /* it is closed, and no call is under way */
    atomic_bool has_ended; /* its streams, events and slab are freed too */
    mm_slab *slab; /* NULL for managed memory */
    CUstream inward, outward;
    CUevent all_sent;
    mm_operation_lock turn; /* to suspend or to resume */
    pthread_mutex_t lock; /* of all that follows; held during driver calls, but not during waits */
    mm_use_order order;
    mm_placement placement;
    mm_place *places; /* by the numbers of parts, like `parts` */
    frame_part *parts;
    size_t place_capacity, part_capacity;
    uint32_t count;
    frame_capture *captures; /* whose graphs live, as far as is known */
    bool is_suspended; /* no part gets a frame */
    uint32_t ring_frames; /* the number of the latest frame in a graph */
    size_t ring; /* bytes behind the room of the placement, which belong to the graphs */
    mm_use_clock clock;
    unsigned rounds; /* under way */
    round_end ends[ROUND_ENDS]; /* the latest ones */
    unsigned end_count;
    bool missed; /* writes at home that could not be followed: frames may be stale */
    /* The number of failures after which the device has to be waited for before a part is loaded,
     * and how many of them a wait has followed. */
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

/* The address at which work uses a part that is present. */
static inline CUdeviceptr
mm_frames_address(const mm_frames *f, uint32_t number)
{
    return f->is_managed ? f->parts[number].home : f->slab->start + f->places[number].offset;
}

/* --- part_copies.c: not under the lock ------------------------------------------------------- */

/* Notes a failure that needs no recovery. */
void mm_frames_note_failure(mm_frames *f, const mm_status *failure);

/* --- the same, under the lock ------------------------------------------------------------------ */

/* Notes a failure after which no part is loaded until the device has been waited for. A later use
 * does that wait: without the lock, and only if no stream captures. */
void mm_frames_recover(mm_frames *f, const mm_status *failure);

/* Takes out the parts that lie in these bytes. The inward stream follows the work that still reads
 * or writes them. In a scope. */
MM_NODISCARD int mm_frames_clear(mm_frames *f, size_t offset, size_t bytes, mm_status *st);

/* Takes out a part unless it is in use. A load in its place follows its uses. In a scope. */
MM_NODISCARD int mm_frames_drop(mm_frames *f, uint32_t number, mm_status *st);

/* mm_frames_drop for a part that leaves the set: managed memory stays where it is. In a scope. */
MM_NODISCARD int mm_frames_forget(mm_frames *f, uint32_t number, mm_status *st);

/* Loads a part, and evicts for it only parts with a distance of at least `least`. False if that
 * gives no room, or if the driver refuses. */
bool mm_frames_load(mm_frames *f, uint32_t number, uint32_t least);

/* Copies a part home, behind its uses. In a scope. */
MM_NODISCARD int mm_frames_send_home(mm_frames *f, uint32_t number, mm_status *st);

/* Stores for each part the number of uses that are expected before its next use. */
void mm_frames_measure_distances(mm_frames *f);

/* Notes the end of a round, after which nothing is loaded ahead. */
void mm_frames_note_round_end(mm_frames *f);

/* Loads the parts that are expected next, while each evicts only parts that are expected later. */
void mm_frames_look_ahead(mm_frames *f);

/* --- part_graphs.c: not under the lock -------------------------------------------------------- */

/* Begins a use of a part by work that the stream captures: in a frame, or at home. */
mm_part_use mm_frames_capture(mm_frames *f, uint32_t number, mm_device_stream stream);

/* Ends a captured use, or lets it go on. */
void mm_frames_end_captured(mm_frames *f, mm_part_use use, bool written, bool goes_on,
                            mm_device_stream stream);

/* Lets the copies that are captured from now on follow the work that the stream has captured. */
void mm_frames_follow_captured(mm_frames *f, mm_device_stream stream);

/* --- the same, under the lock ----------------------------------------------------------------- */

/* Marks a part in use as stale if a replay may have written it at home, so that new uses are at
 * home until the present uses end. Does nothing if a use writes the frame. */
void mm_frames_expect_replay(mm_frames *f, uint32_t number);

/* Forgets graphs that are gone, and takes the room back after the last one. */
void mm_frames_prune_captures(mm_frames *f);

/* True if a use of the part was captured and has not ended. */
bool mm_frames_is_captured(const mm_frames *f, uint32_t number);

/* Forgets the number of a removed part, which another part may get. */
void mm_frames_forget_captured(mm_frames *f, uint32_t number);

/* Forgets all graphs; the memory that they use lives on. */
void mm_frames_free_captures(mm_frames *f);

#endif
