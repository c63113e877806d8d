/* placement.h: the places of parts in one piece of device memory: the parts that are there, and the
 * parts to evict for a new one.
 *
 * A part takes bytes that lie together. The evicted parts are neighbours: the run with enough room
 * whose next use is farthest away or, if unknown, that is used least. Nothing here calls the driver
 * or locks. */
#ifndef MM_PLACEMENT_H
#define MM_PLACEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../driver/status.h"

#define MM_UNEXPECTED UINT32_MAX /* the distance of a part whose next use is not foreseen */

/* Starts of parts are multiples of this, as in torch's own memory. */
enum { MM_PART_ALIGNMENT = 512 };

typedef struct {
    size_t bytes, offset; /* offset: while it is present */
    bool present;
    bool fixed; /* it must stay where it is */
    uint32_t distance; /* uses expected before its next one */
    double heat; /* the recent rate of uses, to compare parts that are not expected */
} mm_place;

typedef struct {
    size_t room;
    uint32_t *present; /* the parts that are there, in the order of their offsets */
    size_t count, capacity;
} mm_placement;

void mm_placement_free(mm_placement *p);

/* The first offset behind a part at which another one can start. */
static inline size_t
mm_place_end(size_t offset, size_t bytes)
{
    return (offset + bytes + MM_PART_ALIGNMENT - 1) / MM_PART_ALIGNMENT * MM_PART_ALIGNMENT;
}

/* Lets `count` parts be present at once. */
MM_NODISCARD int mm_placement_reserve(mm_placement *p, size_t count, mm_status *st);

/* Finds the offset for a part. Only parts with a distance of at least `least` may be evicted for
 * it. False if there is no such offset. */
bool mm_placement_find(const mm_placement *p, const mm_place *places, size_t bytes, uint32_t least,
                       size_t *offset);

/* Takes out the first part that lies in the bytes from `offset` on; MM_UNEXPECTED if none does. */
uint32_t mm_placement_take(mm_placement *p, mm_place *places, size_t offset, size_t bytes);

/* Puts a part at an offset where no other part lies. */
void mm_placement_put(mm_placement *p, mm_place *places, uint32_t part, size_t offset);

#endif
