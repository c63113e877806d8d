/* address_map.h: ranges of addresses that do not overlap, in order, each with an index. */
#ifndef MM_ADDRESS_MAP_H
#define MM_ADDRESS_MAP_H

#include "../driver/status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t start, end;
    uint32_t index;
} mm_address_range;

/* All zero is an empty map. */
typedef struct {
    mm_address_range *ranges;
    size_t count, capacity;
} mm_address_map;

void mm_address_map_free(mm_address_map *map);

/* The range with this address, or NULL. Lowers *limit, which is above the address, to the next
 * address for which the answer may be another one. */
const mm_address_range *mm_address_map_find(const mm_address_map *map, uint64_t address,
                                            uint64_t *limit);

/* Assigns a range of addresses, which is not empty, to an index, in place of their earlier
 * indices. Joins neighbours with the same index. */
MM_NODISCARD int mm_address_map_paint(mm_address_map *map, uint64_t start, uint64_t end,
                                      uint32_t index, mm_status *st);

/* Removes the ranges with this index or a higher one. */
void mm_address_map_remove_from(mm_address_map *map, uint32_t index);

#endif
