/* queued_frees.h: which frees of a pool have not run yet: one event for each stream that freed. */
#ifndef MM_QUEUED_FREES_H
#define MM_QUEUED_FREES_H

#include "stream.h"

#include <pthread.h>

typedef struct mm_free_event {
    struct mm_free_event *next;
    CUcontext context; /* of a default stream; NULL for others */
    unsigned long long stream_id; /* of other streams: a handle may be used again */
    CUevent event;
} mm_free_event;

typedef struct {
    pthread_mutex_t lock;
    mm_free_event *events;
    bool unknown; /* a free is queued that no event stands for */
} mm_queued_frees;

void mm_queued_frees_init(mm_queued_frees *frees);

/* Notes a free on the stream with its result: one that failed may be queued all the same. In the
 * scope of that call, whose capture mode is relaxed. */
void mm_queued_frees_add(mm_driver *cu, mm_queued_frees *frees, CUstream stream, CUresult result);

/* Destroys the events that were reached; true if none is left, so that every free has run. In a
 * relaxed scope. A driver that has ended counts as done. */
bool mm_queued_frees_done(mm_driver *cu, mm_queued_frees *frees);

/* Frees the notes without a driver, in a forked child. */
void mm_queued_frees_drop(mm_queued_frees *frees);

#endif
