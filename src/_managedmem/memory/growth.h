/* growth.h: growth of arrays. */
#ifndef MM_GROWTH_H
#define MM_GROWTH_H

#include "../driver/status.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

/* The array, moved so that it has room for `needed` items of `size` bytes, which is more than its
 * *capacity; NULL on failure, which leaves it as it is. Grows by a half at least, so that a
 * sequence of additions costs linear time. */
static inline void *
mm_grow(void *items, size_t *capacity, size_t needed, size_t size, mm_status *st)
{
    size_t bigger = *capacity + *capacity / 2;
    void *moved;

    assert(needed > *capacity);
    bigger = bigger < needed ? needed : bigger;
    moved = bigger > SIZE_MAX / size ? NULL : realloc(items, bigger * size);
    if (moved == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu items of %zu bytes", bigger,
                      size);
        return NULL;
    }
    *capacity = bigger;
    return moved;
}

#endif
