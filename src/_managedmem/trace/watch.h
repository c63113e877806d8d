/* watch.h: the events of the managed memory of another process, which need not know of it.
 *
 * The kernel gives this process the file of the nvidia-uvm module that the other process has open,
 * if this user may trace that process. While a watch has the file, the module keeps the memory of
 * the other process, even after the process has ended: free the watch then. Devices have no
 * ordinals here: each is MM_OTHER_PROCESSOR. */
#ifndef MM_WATCH_H
#define MM_WATCH_H

#include "../memory/event.h"

typedef struct mm_watch mm_watch;

/* Begins to record `process`; if cu is not NULL, this process instead, with the queues of the
 * emulated driver if cu is emulated. NULL on failure: MM_TRACE_UNAVAILABLE or MM_NO_MEMORY. */
mm_watch *mm_watch_start(mm_driver *cu, pid_t process, mm_status *st);

/* Removes up to `most` of the oldest events, and returns their number: below `most` if no more are
 * there. One thread at a time. */
size_t mm_watch_read(mm_watch *w, mm_event *events, size_t most);

typedef struct {
    uint64_t lost; /* records that came faster than they were read */
    uint64_t rejected; /* records that are not as the module writes them */
} mm_watch_report;

mm_watch_report mm_watch_read_report(const mm_watch *w);

/* Ends the recording. */
void mm_watch_free(mm_watch *w);

#endif
