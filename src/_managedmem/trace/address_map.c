/* address_map.c: sorted ranges of addresses: finding one, and giving addresses to an index. */
#include "address_map.h"

#include "../memory/growth.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

void
mm_address_map_free(mm_address_map *map)
{
    free(map->ranges);
    *map = (mm_address_map){0};
}

/* The number of ranges that end at the address or below it. */
static size_t
ranges_below(const mm_address_map *map, uint64_t address)
{
    size_t low = 0, high = map->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (map->ranges[middle].end <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const mm_address_range *
mm_address_map_find(const mm_address_map *map, uint64_t address, uint64_t *limit)
{
    size_t at = ranges_below(map, address);
    const mm_address_range *range;
    uint64_t change;

    assert(*limit > address);
    if (at == map->count) {
        return NULL;
    }
    range = &map->ranges[at];
    change = range->start <= address ? range->end : range->start;
    *limit = change < *limit ? change : *limit;
    return range->start <= address ? range : NULL;
}

/* Replaces the ranges from `first` to before `last` by the new ones, for which there is room. */
static void
replace_ranges(mm_address_map *map, size_t first, size_t last, const mm_address_range *made,
               size_t count)
{
    assert(map->count - (last - first) + count <= map->capacity);
    memmove(map->ranges + first + count, map->ranges + last,
            (map->count - last) * sizeof *map->ranges);
    memcpy(map->ranges + first, made, count * sizeof *made);
    map->count = map->count - (last - first) + count;
}

int
mm_address_map_paint(mm_address_map *map, uint64_t start, uint64_t end, uint32_t index,
                     mm_status *st)
{
    mm_address_range made[3], painted = {start, end, index};
    /* Neighbours that only touch the new range are replaced too: by themselves, or joined. */
    size_t first = start > 0 ? ranges_below(map, start - 1) : 0, last = first, count = 0;

    assert(start < end);
    map->ranges = mm_grow(map->ranges, &map->capacity, map->count + 2, sizeof *map->ranges, st);
    if (map->capacity < map->count + 2) {
        return -1;
    }
    while (last < map->count && map->ranges[last].start <= end) {
        last++;
    }
    if (first < last) {
        mm_address_range left = map->ranges[first], right = map->ranges[last - 1];
        if (left.start < start && left.index != index) {
            made[count++] = (mm_address_range){left.start, start, left.index};
        } else if (left.start < start) {
            painted.start = left.start;
        }
        painted.end = right.end > end && right.index == index ? right.end : end;
        made[count++] = painted;
        if (right.end > end && right.index != index) {
            made[count++] = (mm_address_range){end, right.end, right.index};
        }
    } else {
        made[count++] = painted;
    }
    replace_ranges(map, first, last, made, count);
    return 0;
}

void
mm_address_map_remove_from(mm_address_map *map, uint32_t index)
{
    size_t kept = 0;

    for (size_t i = 0; i < map->count; i++) {
        if (map->ranges[i].index < index) {
            map->ranges[kept++] = map->ranges[i];
        }
    }
    map->count = kept;
}
