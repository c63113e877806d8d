/* use_ends.h: the ends of the uses of a part, as events: a drop waits for them.
 *
 * A pool keeps the events for later uses. Lists and the pool belong to a set; "under the lock"
 * means that the caller holds the lock of that set. */
#ifndef MM_USE_ENDS_H
#define MM_USE_ENDS_H

#include <pthread.h>

#include "../memory/stream.h"

/* The end of the latest use on a stream. */
typedef struct mm_release_list mm_release_list;
struct mm_release_list {
    CUevent event;
    mm_context context; /* the event ends with it */
    unsigned long long stream; /* by cuStreamGetId: no other stream ever has this number */
    uint64_t begun, added; /* the release clock before the event was recorded, and when the release
                            * was added: see mm_release_add */
    mm_release_list *next;
};

/* Records the end of a use on the stream, with an event of *pool, which the lock protects, or a
 * new one. NULL on failure. The caller does not hold the lock. */
mm_release_list *mm_release_record(mm_driver *cu, mm_device_stream stream, pthread_mutex_t *lock,
                                   mm_release_list **pool, mm_status *st);

/* Adds a release to a list, and moves earlier releases of the same stream to the pool. Both stay if
 * two threads recorded them at once, because either may be the later one. Under the lock. */
mm_release_list *mm_release_add(mm_release_list *list, mm_release_list *added,
                                mm_release_list **pool);

/* The number of releases in a list. */
size_t mm_releases_count(const mm_release_list *list);

/* Appends a list to another. */
mm_release_list *mm_releases_join(mm_release_list *list, mm_release_list *behind);

/* Takes the releases whose work is known to be done out of *list, and returns them for the pool.
 * Frees releases whose context has ended. In a scope; the caller does not hold the lock. */
mm_release_list *mm_releases_take_passed(mm_driver *cu, mm_release_list **list);

/* Moves a whole list to the pool. Under the lock. */
void mm_release_keep(mm_release_list *list, mm_release_list **pool);

/* Destroys the events of a list, and frees it. */
void mm_releases_free(mm_driver *cu, mm_release_list *list);

#endif
