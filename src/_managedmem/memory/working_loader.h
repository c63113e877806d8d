/* working_loader.h: a working set at work: its decisions, its memory, and the thread that carries
 * them out.
 *
 * Calls of one set may come from any thread at once. They make short driver calls and take a lock
 * that is never held during one, so the GIL must be released. A forked child must call nothing but
 * mm_loader_end and mm_loader_free, which do nothing there. */
#ifndef MM_WORKING_LOADER_H
#define MM_WORKING_LOADER_H

#include "working_memory.h"
#include "working_set.h"

typedef struct mm_loader mm_loader;

/* --- working_loader.c ------------------------------------------------------------------- */

/* An empty set, with a thread and streams of its own on the device; NULL on failure. `owner` is for
 * mm_loaders_end. */
mm_loader *mm_loader_new(mm_driver *cu, int device, size_t budget, const void *owner,
                         mm_status *st);

/* Ends the set: finishes the call of its thread that is under way, and restores the advice of all
 * groups. A call after a failure tries again to restore what is left. */
MM_NODISCARD int mm_loader_close(mm_loader *l, mm_status *st);

bool mm_loader_is_closed(const mm_loader *l);

/* True once it needs the memory of its groups no more. */
bool mm_loader_has_ended(const mm_loader *l);

/* Closes the set for an owner that releases the memory afterwards. Tries twice; a second failure is
 * ignored. Does nothing in a forked child. */
void mm_loader_end(mm_loader *l);

/* The same, and frees the set; NULL is allowed. A forked child frees nothing. */
void mm_loader_free(mm_loader *l);

/* Ends the threads of all sets of this owner; their advice stays. */
void mm_loaders_end(const void *owner);

/* --- working_groups.c ------------------------------------------------------------------- */

/* Adds a group over these ranges, which must not be empty; all or nothing. The caller has entered
 * their guards, and keeps the guards alive until the group is removed or the set has ended.
 * `at_home`: no page of them is on a device. Fails with MM_BAD_VALUE if they share a page with another
 * group of any set. */
MM_NODISCARD int mm_loader_add(mm_loader *l, const mm_working_range *ranges, size_t count,
                               mm_group_access access, bool at_home, mm_group_id *group,
                               mm_status *st);

/* Takes a group out: waits for what was queued for it, and restores its advice. The caller may free its
 * guards then. Fails if it is acquired or was removed, and in a host
 * function; then nothing changes. If the restoration fails, the group is not used any more, and a call
 * again tries the rest. */
MM_NODISCARD int mm_loader_remove(mm_loader *l, mm_group_id group, mm_status *st);

/* Sets one round, without groups that were removed; or none if count is 0. */
MM_NODISCARD int mm_loader_give_order(mm_loader *l, const mm_group_id *round, size_t count,
                                      mm_status *st);

/* --- working_uses.c --------------------------------------------------------------------- */

/* Work that is queued on the stream afterwards finds the group on the device, or, for
 * MM_USE_MAPPED, where it is. `reads`: the work only reads the group, which makes a difference if others
 * write it. A default stream is that of the set's device. */
MM_NODISCARD int mm_loader_acquire(mm_loader *l, mm_group_id group, bool reads, CUstream stream,
                                   mm_working_use *use, mm_status *st);

/* Ends a use, with the work that is queued on the stream by now. Does nothing once the set has
 * ended. Fails with MM_REFUSED if the group is not acquired, and, before anything, if the stream
 * captures a graph. After other failures the group is released. */
MM_NODISCARD int mm_loader_release(mm_loader *l, mm_group_id group, CUstream stream,
                                   mm_status *st);

/* The same for a use whose stream is gone: contents of the group are kept from then on. */
MM_NODISCARD int mm_loader_release_unrecorded(mm_loader *l, mm_group_id group, mm_status *st);

/* --- working_reports.c ------------------------------------------------------------------ */

typedef struct {
    mm_working_counts decided;
    uint64_t loads; /* done, with or without success */
    uint64_t bytes_loaded, bytes_home; /* copied by loads and drops that succeeded */
    uint64_t failures;
    size_t reserved, physical; /* bytes on the device: as decided, and by now */
    uint32_t groups;
    mm_status error; /* the last failure of the thread; kind MM_OK: none */
} mm_loader_report;

void mm_loader_read_report(mm_loader *l, mm_loader_report *report);

typedef struct {
    size_t bytes;
    bool resident; /* on the device by now */
    unsigned held;
    bool removed; /* or about to be; once it is, the rest is 0 */
} mm_loader_group_report;

void mm_loader_read_group(mm_loader *l, mm_group_id group, mm_loader_group_report *report);

#endif
