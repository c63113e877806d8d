/* placement.c: choosing places, by one walk along the parts that are there. */
#include "placement.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../memory/growth.h"

void
mm_placement_free(mm_placement *p)
{
    free(p->present);
    *p = (mm_placement){.room = p->room};
}

int
mm_placement_reserve(mm_placement *p, size_t count, mm_status *st)
{
    p->present = mm_grow(p->present, &p->capacity, count, sizeof *p->present, st);
    return p->capacity >= count ? 0 : -1;
}

static size_t
end_of(const mm_place *place)
{
    return mm_place_end(place->offset, place->bytes);
}

/* The cost of making room for a part: of the parts that go, the nearest next use, the most heat,
 * and the bytes. */
typedef struct {
    uint32_t distance;
    double heat;
    size_t bytes;
} loss;

static bool
is_smaller_loss(const loss *a, const loss *b)
{
    if (a->distance != b->distance) {
        return a->distance > b->distance;
    }
    if (a->heat != b->heat) {
        return a->heat < b->heat;
    }
    return a->bytes < b->bytes;
}

/* The cost of placing a part at `start`, before which the first `i` parts end. False if a part
 * there must stay, or the room is too short. */
static bool
measure_loss(const mm_placement *p, const mm_place *places, size_t i, size_t start, size_t bytes,
             uint32_t least, loss *out)
{
    *out = (loss){.distance = MM_UNEXPECTED};
    if (start > p->room || bytes > p->room - start) {
        return false;
    }
    for (; i < p->count && places[p->present[i]].offset < start + bytes; i++) {
        const mm_place *place = &places[p->present[i]];
        if (place->fixed || place->distance < least) {
            return false;
        }
        out->distance = place->distance < out->distance ? place->distance : out->distance;
        out->heat = place->heat > out->heat ? place->heat : out->heat;
        out->bytes += place->bytes;
    }
    return true;
}

bool
mm_placement_find(const mm_placement *p, const mm_place *places, size_t bytes, uint32_t least,
                  size_t *offset)
{
    bool found = false;
    size_t start = 0;
    loss best = {0}; /* some compilers do not see that found guards it */

    for (size_t i = 0; i <= p->count; i++) {
        loss now;
        if (measure_loss(p, places, i, start, bytes, least, &now)
            && (!found || is_smaller_loss(&now, &best))) {
            found = true;
            best = now;
            *offset = start;
        }
        start = i < p->count ? end_of(&places[p->present[i]]) : start;
    }
    return found;
}

/* The index of the first part that ends behind an offset. */
static size_t
index_behind(const mm_placement *p, const mm_place *places, size_t offset)
{
    size_t i = 0;

    while (i < p->count && end_of(&places[p->present[i]]) <= offset) {
        i++;
    }
    return i;
}

static void
remove_index(mm_placement *p, mm_place *places, size_t i)
{
    places[p->present[i]].present = false;
    p->count--;
    memmove(&p->present[i], &p->present[i + 1], (p->count - i) * sizeof *p->present);
}

uint32_t
mm_placement_take(mm_placement *p, mm_place *places, size_t offset, size_t bytes)
{
    size_t i = index_behind(p, places, offset);
    uint32_t part;

    if (i == p->count || places[p->present[i]].offset >= offset + bytes) {
        return MM_UNEXPECTED;
    }
    part = p->present[i];
    assert(!places[part].fixed);
    remove_index(p, places, i);
    return part;
}

void
mm_placement_put(mm_placement *p, mm_place *places, uint32_t part, size_t offset)
{
    size_t i = index_behind(p, places, offset);

    assert(p->count < p->capacity && !places[part].present);
    memmove(&p->present[i + 1], &p->present[i], (p->count - i) * sizeof *p->present);
    p->present[i] = part;
    p->count++;
    places[part].offset = offset;
    places[part].present = true;
}
