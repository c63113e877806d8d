/* working_thread.h: the parts of a working set at work, and its thread, which carries out the commands.
 *
 * The callers decide under the lock, and the thread carries out the commands in their order, on a
 * stream of its own. It alone waits for the ends of uses, on the host, because advice is given there.
 * Behind a load its stream writes the ticket of the command into a word, for which the streams of the
 * callers wait: so a caller may be many loads ahead of the thread, and waits for none. Where the
 * driver cannot wait for words, the caller waits until the thread has issued the load, and its stream
 * waits for an event.
 *
 * Streams that wait for a word may share a queue of the device with the stream that has to write it,
 * which the driver cannot know. The thread notices such a standstill, writes the word itself and uses
 * no words any more: the waits are for speed, and contents are right without them. Only a use that
 * waits for a discard must not go on before it: so memory for which a stream waits already is brought
 * home instead, and a use of memory that is being discarded waits on the host. */
#ifndef MM_WORKING_THREAD_H
#define MM_WORKING_THREAD_H

#include <pthread.h>

#include "../driver/threads.h"
#include "working_loader.h"
#include "working_releases.h"
#include "working_words.h"

typedef struct {
    mm_working_memory memory;
    CUevent loaded; /* behind the latest load, where no words are used */
    bool on_device; /* the thread's; its bytes are in `physical` */
    bool was_home; /* the thread's; before, the only contents may be on a device */
    bool discarding; /* under the lock: uses must not yet wait for its tickets */
    uint64_t
        awaited; /* under the lock: the last of its tickets that streams wait for by the word */
    bool left_over; /* the thread's; a drop has failed and must be tried again */
    bool uncertain; /* under the lock: the end of a use could not be recorded; for good, because it
                     * may be the end of a later use than the thread knows */
} mm_loader_group;

struct mm_loader {
    mm_driver *cu;
    const void *owner;
    mm_guard guard; /* calls under way; closed: the set has ended */
    CUstream stream;
    mm_word *word; /* NULL: streams wait for events */
    pthread_t thread;
    int device;
    uint32_t word_base; /* value of the word for ticket 0 */
    atomic_bool by_words;
    bool has_thread;
    bool in_discard; /* the thread's */
    bool sleeping, ending; /* under the lock */
    mm_turn turn; /* one add, close or end at a time */
    /* Under the lock. */
    pthread_mutex_t lock;
    pthread_cond_t wanted; /* a sleeping thread has something to do */
    pthread_cond_t issued_more;
    mm_working_set set;
    mm_loader_group **groups;
    size_t group_capacity;
    mm_release_list *pool;
    uint64_t awaited; /* the last ticket that streams wait for by the word */
    mm_loader_report report; /* without the parts of the decisions */
    /* Tickets: those whose loads are queued on the stream, and those that are done. */
    atomic_uint_fast64_t issued, completed;
    atomic_size_t physical;
    uint64_t progressed; /* the thread's: when that was seen last */
    uint64_t let_go; /* the thread's: the last ticket whose uses a standstill let go on */
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

/* The value of the word at which a ticket is done. */
static inline uint32_t
mm_loader_word_value(const mm_loader *l, uint64_t ticket)
{
    return l->word_base + (uint32_t)ticket;
}

static inline bool
mm_loader_has_completed(const mm_loader *l, uint64_t ticket)
{
    return ticket <= atomic_load_explicit(&l->completed, memory_order_acquire)
           || (atomic_load(&l->by_words)
               && mm_word_has_reached(l->word, mm_loader_word_value(l, ticket)));
}

MM_NODISCARD int mm_loader_start_thread(mm_loader *l, mm_status *st);

/* Ends all calls under way and the thread, once it has let all uses go on. Does nothing without a
 * thread. In the turn. */
MM_NODISCARD int mm_loader_end_thread(mm_loader *l, mm_status *st);

#endif
