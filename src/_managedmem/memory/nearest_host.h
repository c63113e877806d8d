/* nearest_host.h: the host memory that is nearest to a device. */
#ifndef MM_NEAREST_HOST_H
#define MM_NEAREST_HOST_H

#include "../driver/driver.h"
#include "location.h"

/* Stores the NUMA node nearest to the device if the memory of the host is on several nodes, else
 * the host. With one node, drivers do not record a node that is asked for. */
MM_NODISCARD int mm_nearest_host(mm_driver *cu, int device, CUmemLocation *host, mm_status *st);

#endif
