/* part_frames.h: sets of parts. The home of a part is memory of the host. A device holds the parts
 * in turn: in frames, which are places in one piece of device memory, or at their own address if
 * the memory is managed.
 *
 * A part is copied to a frame before its use, or earlier if the order of uses is known, on a
 * stream of the set. Managed memory is prefetched instead, to the device and home again. Streams
 * wait for each other by events, and the set has no thread. Acquisitions and releases wait for the
 * device only after a failure, or with `host_waits`. Several threads may call functions of one set
 * at once, without the GIL. A forked child must call nothing but mm_frames_free, which does
 * nothing there. */
#ifndef MM_PART_FRAMES_H
#define MM_PART_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "../driver/context.h"
#include "../memory/guard.h"

typedef struct mm_frames mm_frames;

/* The access of the uses of a part. */
typedef enum {
    MM_PART_READ,
    MM_PART_WRITE, /* some uses write the part */
    MM_PART_SCRATCH /* its contents are not needed after a use */
} mm_part_access;

/* The contents and counters of a set. Work counts once it is queued, copies by graphs never. */
typedef struct {
    size_t room; /* the bytes that the frames take, or that managed parts may take at once */
    size_t kept; /* `room`, or 0 while suspended; of managed parts: all that were on the device */
    size_t present; /* the bytes of parts that are on the device, or on their way */
    uint32_t parts;
    uint64_t acquired;
    uint64_t hits; /* of these, parts that were there or on their way */
    uint64_t mapped; /* of these, parts that were used at home, mostly for lack of room */
    uint64_t loads, ahead; /* all loads, and the loads before an acquisition */
    uint64_t drops;
    uint64_t bytes_loaded, bytes_home;
    uint64_t failures; /* of driver calls, after which parts may be used at home */
    mm_status error; /* the last failure; kind MM_OK: none */
} mm_frames_report;

/* A set without parts. Its frames take `room` bytes of the device. With `is_managed` it has no
 * frames, and its parts may take `room` bytes at once. mm_frames_suspend needs frames and
 * `can_suspend`. `host_waits` is for work that the host does in place of the device: acquisitions
 * and mm_frames_settle then wait for their copies. NULL on failure. */
mm_frames *mm_frames_new(mm_driver *cu, int device, size_t room, bool host_waits, bool is_managed,
                         bool can_suspend, mm_status *st);

/* Parts are loaded ahead only in rounds, because outside of rounds the caller may write parts at
 * home unnoticed. A round follows the work that is queued on the stream when the round begins.
 * Rounds of several threads may overlap. Each use outside of rounds copies its part anew, behind
 * the work on its stream. */
MM_NODISCARD int mm_frames_begin_round(mm_frames *f, CUstream stream, mm_status *st);
void mm_frames_end_round(mm_frames *f);

/* Adds a part over page-locked or managed memory, which must last as long as the part. */
MM_NODISCARD int mm_frames_add(mm_frames *f, CUdeviceptr home, size_t bytes, mm_part_access access,
                               uint32_t *part, mm_status *st);

/* Sets the guard of a part's managed memory, which is entered for each driver call with that
 * memory. A part whose memory was closed is not moved any more, because its address may have a new
 * owner. The guard must last as long as the part. */
void mm_frames_guard(mm_frames *f, uint32_t part, mm_guard *memory);

/* Removes a part that is not in use; a later part may get its number. Copies from and to its home
 * may be under way. Managed memory stays where it is. */
MM_NODISCARD int mm_frames_remove(mm_frames *f, uint32_t part, mm_status *st);

/* Sets one round of uses to expect, in place of the learned order; a count of 0 removes it. */
MM_NODISCARD int mm_frames_give_order(mm_frames *f, const uint32_t *parts, size_t count,
                                      mm_status *st);

/* True if the part is in a frame or on its way there. */
bool mm_frames_have(mm_frames *f, uint32_t part);

/* A use of a part. */
typedef struct {
    uint32_t part;
    uint32_t frame; /* the number of the frame in a graph that it was captured into, or 0 */
    CUdeviceptr address; /* 0: at home */
} mm_part_use;

/* Begins a use by work that is queued on the stream afterwards. Its address is in a frame or of
 * managed memory, and mm_frames_release must follow. The address is 0 if the part has to be used
 * at home: if frames in use leave no room, after a refusal of the driver, and in a closed set.
 *
 * If the stream captures a graph, the copies become nodes of the graph. The second half of the
 * room then belongs to the graphs of the set until the last of these graphs is gone, and they must
 * not run at the same time. The frames, and homes in slabs, live as long as the graph does. Parts
 * of managed memory, and all parts with `host_waits`, are used at home. */
mm_part_use mm_frames_acquire(mm_frames *f, uint32_t part, bool writes, CUstream stream);

/* Ends a use behind the work that is queued on the stream by now. A part that was `written` is
 * copied home; work that reads it at home has to follow mm_frames_settle. With `goes_on` the part
 * is only copied, and stays acquired. On failure it stays acquired too, because its contents are
 * in the frame alone.
 *
 * A captured use has to end in its capture. After the capture no node can be added: the frame
 * stays taken, and a write is not copied home, which counts as a failure. */
MM_NODISCARD int mm_frames_release(mm_frames *f, mm_part_use use, bool written, bool goes_on,
                                   CUstream stream, mm_status *st);

/* Tells the set that the work queued on the stream by now has written the part at home. Its frame
 * is dropped, at once or after its present uses, and the next copy follows that work. */
MM_NODISCARD int mm_frames_changed(mm_frames *f, uint32_t part, CUstream stream, mm_status *st);

/* Lets later work on the stream follow all copies home so far. */
MM_NODISCARD int mm_frames_settle(mm_frames *f, CUstream stream, mm_status *st);

/* Waits for all copies home so far; for copies of graphs only if no stream captures. */
MM_NODISCARD int mm_frames_wait(mm_frames *f, mm_status *st);

/* Waits for the device; MM_REFUSED if a stream captures a graph, which the wait would destroy. */
MM_NODISCARD int mm_frames_synchronize(mm_frames *f, mm_status *st);

/* Gives the memory of the frames back to the driver, after a wait for the device. Parts are used
 * at home until mm_frames_resume. Graphs may be launched meanwhile: their frames have memory of
 * the host. MM_REFUSED if a part is in use or a stream captures. On failure the frames stay,
 * empty. */
MM_NODISCARD int mm_frames_suspend(mm_frames *f, mm_status *st);

/* Takes memory of the device for the frames again, at the same addresses. On failure the set stays
 * suspended. */
MM_NODISCARD int mm_frames_resume(mm_frames *f, mm_status *st);

/* An upper bound: the number of each part is below it. */
uint32_t mm_frames_count(mm_frames *f);

void mm_frames_read_report(mm_frames *f, mm_frames_report *report);

/* Adds report.kept of each set of the process to kept[its device]. */
void mm_frames_add_kept(uint64_t kept[MM_MAX_DEVICES]);

/* Closes the set, and frees the frames after a wait for the device. Later acquisitions give 0. */
void mm_frames_close(mm_frames *f);

/* mm_frames_close, and frees the set; NULL is allowed. */
void mm_frames_free(mm_frames *f);

#endif
