/* growth.h: growth of arrays. */
#ifndef MM_GROWTH_H
#define MM_GROWTH_H

#include "../driver/status.h"

#include <stdint.h>
#include <stdlib.h>

/* Returns the array, which is enlarged and may move if *capacity is below `needed` items of `size`
 * bytes. On failure the array and *capacity stay as they are: the caller compares *capacity with
 * `needed`. Grows by a half at least, so that a sequence of additions costs linear time. */
static inline void *
mm_grow(void *items, size_t *capacity, size_t needed, size_t size, mm_status *st)
{
    enum { LEAST = 4 };
    size_t bigger = *capacity + *capacity / 2 + LEAST;
    void *moved;

    if (needed <= *capacity) {
        return items;
    }
    bigger = bigger < needed ? needed : bigger;
    moved = bigger > SIZE_MAX / size ? NULL : realloc(items, bigger * size);
    if (moved == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu items of %zu bytes", bigger,
                      size);
        return items;
    }
    *capacity = bigger;
    return moved;
}

#endif
