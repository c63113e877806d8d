/* nearest_host.c: chooses the host memory near a device. */
#include "nearest_host.h"

#include <dlfcn.h>
#include <string.h>

#include "pagemap.h"

/* The emulated driver has nodes of its own. */
static bool
has_several_nodes(const mm_driver *cu)
{
    void *symbol = cu->emulated ? dlsym(cu->library, "emu_numa_nodes") : NULL;
    int (*count)(void);

    memcpy(&count, &symbol, sizeof symbol);
    return symbol != NULL ? count() > 1 : mm_pagemap_has_nodes(&mm_kernel_pagemap);
}

int
mm_nearest_host(mm_driver *cu, int device, CUmemLocation *host, mm_status *st)
{
    int node = -1;

    if (has_several_nodes(cu)) {
        MM_TRY(cu, DeviceGetAttribute, st, &node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device);
    }
    *host = node >= 0 ? mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, node) : mm_host();
    return 0;
}
