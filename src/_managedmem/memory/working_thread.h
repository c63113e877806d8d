/* working_thread.h: the parts of a working set at work, and its thread, which carries out the commands.
 *
 * The callers decide under the lock. The thread carries out the commands in the order of the queue, on
 * streams of its own. It alone waits for the ends of uses. It waits on the host, because advice is not
 * stream-ordered.
 * Behind a load it records an event, for which the streams of the callers wait. A caller waits until
 * the thread has queued the load: a stream must never wait for what is yet to be queued, because
 * driver calls that wait for the device, such as cuMemFree, may keep the thread from queueing it. */
#ifndef MM_WORKING_THREAD_H
#define MM_WORKING_THREAD_H

#include <pthread.h>

#include "../driver/threads.h"
#include "working_loader.h"
#include "working_releases.h"

/* On one stream, a prefetch begins when the one before has ended. Four keep the link busy
 * with loads of 2 MiB. */
enum { MM_LOAD_STREAMS = 4 };

#define MM_NO_USE UINT64_MAX /* in place of a ticket */

/* A group is taken out by one thread at a time. */
typedef enum {
    MM_NOT_REMOVED,
    MM_BEING_REMOVED,
    MM_NOT_RESTORED /* its advice could not be restored: it may be removed again */
} mm_group_removal;

typedef struct {
    mm_working_memory memory;
    /* "The thread's": only the set's thread reads and writes it. */
    CUstream stream; /* for its loads */
    CUevent done; /* behind its latest command with a ticket */
    bool on_device; /* the thread's; its bytes are in `physical` */
    bool was_home; /* the thread's; before, the only contents may be on a device */
    bool left_over; /* the thread's; a drop has failed and must be tried again */
    bool copied; /* the thread's; read_mostly may be set for uses that only read a written group */
    bool leaving; /* the thread's; its contents may still be on their way home */
    mm_group_removal removal; /* under the lock */
    size_t ends_under_way; /* under the lock: those of its uses, when last counted */
    /* Under the lock: the end of a use could not be recorded. Never reset: that use may be later than
     * the drop that the thread carries out. */
    bool uncertain;
} mm_loader_group;

struct mm_loader {
    mm_driver *cu;
    const void *owner;
    mm_guard guard; /* calls under way; closed: the set has ended */
    CUstream streams[MM_LOAD_STREAMS]; /* for loads, each for every fourth group */
    CUstream away; /* for what leaves the device */
    CUevent left; /* behind that */
    bool away_is_busy; /* the thread's; `left` may not have passed yet */
    pthread_t thread;
    int device;
    atomic_bool has_ended; /* without a thread, and with all advice restored */
    bool has_thread;
    bool sleeping, ending; /* under the lock */
    mm_turn turn; /* one add, removal, close or end at a time */
    /* Under the lock. */
    pthread_mutex_t lock;
    pthread_cond_t wanted; /* a sleeping thread has something to do */
    pthread_cond_t issued_more;
    mm_working_set set;
    mm_loader_group **groups; /* by places; NULL in a vacant one */
    size_t group_capacity;
    mm_release_list *pool;
    CUevent *spare_events; /* of groups that were removed; with space for all events */
    size_t spare_count, spare_capacity;
    size_t events; /* of all groups and spare; in the turn */
    uint64_t added; /* groups so far; in the turn */
    mm_loader_report report; /* without the parts of the decisions */
    /* Tickets: those whose commands are queued on the stream, and those that are done. */
    atomic_uint_fast64_t issued, completed;
    atomic_uint_fast64_t awaited; /* the latest ticket that a caller has waited for */
    /* A hint: the latest ticket at the latest acquisition; MM_NO_USE since the latest release. */
    atomic_uint_fast64_t use_began;
    uint64_t call_ns; /* the thread's: the time that the latest load took to queue */
    atomic_size_t physical;
    mm_loader *next; /* in the list of all of them */
};

static inline void
mm_loader_lock(mm_loader *l)
{
    (void)pthread_mutex_lock(&l->lock);
}

static inline void
mm_loader_unlock(mm_loader *l)
{
    (void)pthread_mutex_unlock(&l->lock);
}

static inline bool
mm_loader_has_completed(const mm_loader *l, uint64_t ticket)
{
    return ticket <= atomic_load_explicit(&l->completed, memory_order_acquire);
}

/* Wakes the thread if it sleeps and a command is queued. Under the lock. */
void mm_loader_wake_thread(mm_loader *l);

/* Waits until the thread has queued the command of the ticket. The caller does not hold the lock. */
void mm_loader_wait_until_issued(mm_loader *l, uint64_t ticket);

/* One round of waiting awake, which began at `since`, by mm_monotonic_clock. */
void mm_loader_wait_awake(uint64_t since);

MM_NODISCARD int mm_loader_start_thread(mm_loader *l, mm_status *st);

/* Closes the set to new calls, waits for those under way, and ends the thread. Does nothing without
 * a thread. In the turn. */
MM_NODISCARD int mm_loader_end_thread(mm_loader *l, mm_status *st);

#endif
