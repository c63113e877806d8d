/* watch.h: the events of the managed memory of another process, which need not know of it.
 *
 * The kernel gives this process the other's file of the nvidia-uvm module, if this user may trace it.
 * While a watch has the file, the module keeps the memory of the other process, even when that has
 * ended: free the watch then. Devices have no ordinals here: each is MM_OTHER_PROCESSOR. */
#ifndef MM_WATCH_H
#define MM_WATCH_H

#include "../memory/event.h"

typedef struct mm_watch mm_watch;

/* Begins to record. With a driver the process is this one, and the emulated driver's queues are used
 * where it is that. NULL with MM_TRACE_UNAVAILABLE on failure. */
mm_watch *mm_watch_start(mm_driver *cu, pid_t process, mm_status *st);

/* Removes up to `most` of the oldest events, and returns their number: fewer if there are no
 * others. One thread at a time. */
size_t mm_watch_read(mm_watch *w, mm_event *events, size_t most);

typedef struct {
    uint64_t lost; /* records that came faster than they were read */
    uint64_t rejected; /* records that are not as the module writes them */
} mm_watch_report;

mm_watch_report mm_watch_read_report(const mm_watch *w);

/* Ends the recording. */
void mm_watch_free(mm_watch *w);

#endif
