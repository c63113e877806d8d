/* part_frames.h: parts of memory whose home is the host, and which a device holds in turn, in frames of one piece
 * of device memory.
 *
 * A part is copied to a frame before its use, and ahead of it where the order of uses is known, on a stream
 * of the set. Streams wait for each other by events: no call waits for the device, and there is no thread.
 * Calls of one set may come from any thread at once, without the GIL. A forked child must call
 * nothing but mm_frames_free, which does nothing there. */
#ifndef MM_PART_FRAMES_H
#define MM_PART_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "../driver/context.h"

typedef struct mm_frames mm_frames;

/* What is done in the order of the calls, and what was done so far. */
typedef struct {
    size_t room; /* the bytes that the frames take on the device */
    size_t present; /* those of parts that are there, or on their way */
    uint32_t parts;
    uint64_t acquired;
    uint64_t hits; /* of these, parts that were there or on their way */
    uint64_t mapped; /* of these, parts that were used at home: there was no room */
    uint64_t loads, ahead; /* all of them, and those before the acquisition */
    uint64_t drops;
    uint64_t bytes_loaded, bytes_home;
    uint64_t failures; /* of driver calls, after which parts were used at home */
    mm_status error; /* the last failure; kind MM_OK: none */
} mm_frames_report;

/* A set without parts, whose frames have `room` bytes of the device. `host_waits` for work that the host
 * does in place of the device: acquisitions and mm_frames_settle then wait for their copies. NULL on failure. */
mm_frames *mm_frames_new(mm_driver *cu, int device, size_t room, bool host_waits, mm_status *st);

/* Between these, code of the caller alone uses the parts, and what it writes at home is not seen: parts are
 * loaded ahead inside of a round only. A round begins with what is at home by the work that is queued on
 * the stream. Rounds of several threads overlap. A use outside of rounds waits for its own copy, which
 * follows the work on its stream. */
MM_NODISCARD int mm_frames_begin_round(mm_frames *f, CUstream stream, mm_status *st);
void mm_frames_end_round(mm_frames *f);

/* Adds a part over page-locked memory, which must last as long as the set. `is_written` if some of its
 * uses write it. */
MM_NODISCARD int mm_frames_add(mm_frames *f, CUdeviceptr home, size_t bytes, bool is_written,
                               uint32_t *part, mm_status *st);

/* The address of the part for work that is queued on the stream afterwards: in a frame, which
 * mm_frames_release must follow; or 0 if the part has to be used at home. That is so if the frames that
 * are in use leave no room, if the stream captures a graph, whose replays no copy would precede, after a
 * refusal of the driver, and once the set is closed. */
CUdeviceptr mm_frames_acquire(mm_frames *f, uint32_t part, bool writes, CUstream stream);

/* Ends a use with the work that is queued on the stream by now. If it has `written` the part, copies it
 * home: what reads it there has to follow mm_frames_settle. On failure the part stays in its frame for
 * good, and that is its place. */
MM_NODISCARD int mm_frames_release(mm_frames *f, uint32_t part, bool written, CUstream stream,
                                   mm_status *st);

/* The work that is queued on the stream by now has written the part at home: a copy of it is dropped unless
 * it is in use, and the next one follows that work. */
MM_NODISCARD int mm_frames_changed(mm_frames *f, uint32_t part, CUstream stream, mm_status *st);

/* Lets later work on the stream follow all copies home so far. */
MM_NODISCARD int mm_frames_settle(mm_frames *f, CUstream stream, mm_status *st);

/* The number of parts. */
uint32_t mm_frames_count(mm_frames *f);

void mm_frames_read_report(mm_frames *f, mm_frames_report *report);

/* Closes the set, and frees the frames after a wait for the device. Later acquisitions give 0. */
void mm_frames_close(mm_frames *f);

/* The same, and frees the set; NULL is allowed. */
void mm_frames_free(mm_frames *f);

#endif
