/* location.h: locations of memory, sets of them, and the names of advice.
 *
 * A location is the driver's own struct. The host is always type HOST, never device -1: CUDA 13
 * would take that for a device. */
#ifndef MM_LOCATION_H
#define MM_LOCATION_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

/* A set of locations, as accessed-by lists hold them: bit n is device n, the last bit the host. */
typedef uint64_t mm_location_set;

enum { MM_HOST_BIT = 63 };

static inline CUmemLocation
mm_location(CUmemLocationType type, int id)
{
    CUmemLocation location = {.type = type};
    location.id = id;
    return location;
}

static inline CUmemLocation
mm_host(void)
{
    return mm_location(CU_MEM_LOCATION_TYPE_HOST, 0);
}

/* A location from the driver's answers; type INVALID means none. The id is meaningful only for a
 * device and a NUMA node, and is 0 for the others.
 *
 * A driver that reads type and id separately may mix two locations if the record changes in
 * between. An id that the type cannot have gives type INVALID. */
static inline CUmemLocation
mm_location_from_attributes(int device_count, int type, int id)
{
    bool device = type == CU_MEM_LOCATION_TYPE_DEVICE;

    if (!device && type != CU_MEM_LOCATION_TYPE_HOST_NUMA) {
        return mm_location((CUmemLocationType)type, 0);
    }
    if (id < 0 || (device && id >= device_count)) {
        return mm_location(CU_MEM_LOCATION_TYPE_INVALID, 0);
    }
    return mm_location((CUmemLocationType)type, id);
}

static inline bool
mm_is_numa_host(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
           || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

static inline bool
mm_same_location(CUmemLocation a, CUmemLocation b)
{
    return a.type == b.type
           && (a.id == b.id || a.type == CU_MEM_LOCATION_TYPE_HOST
               || a.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT);
}

/* Returns the location to pass in an array. From an array, the driver records the id of a host as
 * it is given; from a call with one location, it records CU_DEVICE_CPU. So the host gets that id in
 * arrays too, because a query finds a location only if the records of all pages are equal. */
static inline CUmemLocation
mm_location_in_array(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_HOST
               ? mm_location(CU_MEM_LOCATION_TYPE_HOST, CU_DEVICE_CPU)
               : location;
}

/* The member of a set for a device or the host; 0 for NUMA hosts, which no set holds. */
mm_location_set mm_location_bit(CUmemLocation location);

static inline CUmemLocation
mm_location_from_bit(int bit)
{
    assert(bit >= 0 && bit <= MM_HOST_BIT);
    return bit == MM_HOST_BIT ? mm_host() : mm_location(CU_MEM_LOCATION_TYPE_DEVICE, bit);
}

/* Removes the first member, devices before the host; false if the set is empty:
 *     while (mm_next_location(&set, &location)) */
static inline bool
mm_next_location(mm_location_set *set, CUmemLocation *location)
{
    if (*set == 0) {
        return false;
    }
    *location = mm_location_from_bit(__builtin_ctzll(*set));
    *set &= *set - 1;
    return true;
}

enum { MM_LOCATION_TEXT = 32 };

/* Writes the location as Python spells it, such as "Device(0)". Returns text. */
const char *mm_location_text(CUmemLocation location, char text[MM_LOCATION_TEXT]);

/* The six kinds of advice and their names in this library. An unknown name gives 0. */
CUmem_advise mm_advice_from_name(const char *name);
const char *mm_advice_name(CUmem_advise advice);

/* True if the driver reads the location, which is then required. */
bool mm_advice_needs_location(CUmem_advise advice);

/* True for advice about accessed_by. */
bool mm_is_accessed_by_advice(CUmem_advise advice);

#define MM_ADVICE_NAMES                                                                      \
    "set_read_mostly, unset_read_mostly, set_preferred_location, unset_preferred_location, " \
    "set_accessed_by, unset_accessed_by"

#endif
