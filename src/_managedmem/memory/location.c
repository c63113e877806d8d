/* location.c: names and sets of locations, names of advice. */
#include "location.h"

#include <stdio.h>
#include <string.h>

mm_location_set
mm_location_bit(CUmemLocation location)
{
    assert(location.type != CU_MEM_LOCATION_TYPE_HOST || location.id == 0);
    if (location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0
        && location.id < MM_HOST_BIT) {
        return (mm_location_set)1 << location.id;
    }
    return location.type == CU_MEM_LOCATION_TYPE_HOST ? (mm_location_set)1 << MM_HOST_BIT : 0;
}

const char *
mm_location_text(CUmemLocation location, char text[MM_LOCATION_TEXT])
{
    switch ((int)location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        (void)snprintf(text, MM_LOCATION_TEXT, "Device(%d)", location.id);
        break;
    case CU_MEM_LOCATION_TYPE_HOST:
        (void)snprintf(text, MM_LOCATION_TEXT, "Host()");
        break;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        (void)snprintf(text, MM_LOCATION_TEXT, "Host(numa_id=%d)", location.id);
        break;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
        (void)snprintf(text, MM_LOCATION_TEXT, "Host.numa_current()");
        break;
    default:
        (void)snprintf(text, MM_LOCATION_TEXT, "location type %d", (int)location.type);
    }
    return text;
}

static const struct {
    const char *name;
    CUmem_advise advice;
} advices[] = {
    {"set_read_mostly", CU_MEM_ADVISE_SET_READ_MOSTLY},
    {"unset_read_mostly", CU_MEM_ADVISE_UNSET_READ_MOSTLY},
    {"set_preferred_location", CU_MEM_ADVISE_SET_PREFERRED_LOCATION},
    {"unset_preferred_location", CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION},
    {"set_accessed_by", CU_MEM_ADVISE_SET_ACCESSED_BY},
    {"unset_accessed_by", CU_MEM_ADVISE_UNSET_ACCESSED_BY},
};

CUmem_advise
mm_advice_from_name(const char *name)
{
    for (size_t i = 0; i < sizeof advices / sizeof *advices; i++) {
        if (strcmp(name, advices[i].name) == 0) {
            return advices[i].advice;
        }
    }
    return (CUmem_advise)0;
}

const char *
mm_advice_name(CUmem_advise advice)
{
    for (size_t i = 0; i < sizeof advices / sizeof *advices; i++) {
        if (advice == advices[i].advice) {
            return advices[i].name;
        }
    }
    return ""; /* not reached: callers pass one of the six */
}

bool
mm_is_accessed_by_advice(CUmem_advise advice)
{
    return advice == CU_MEM_ADVISE_SET_ACCESSED_BY || advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY;
}

bool
mm_advice_needs_location(CUmem_advise advice)
{
    return advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION || mm_is_accessed_by_advice(advice);
}
