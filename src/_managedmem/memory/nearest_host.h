/* nearest_host.h: the host memory that is nearest to a device. */
#ifndef MM_NEAREST_HOST_H
#define MM_NEAREST_HOST_H

#include "../driver/driver.h"
#include "location.h"

/* The node of the host nearest to the device where its memory is on several NUMA nodes, else the
 * host: with one node, drivers forget a node that is asked for. */
MM_NODISCARD int mm_nearest_host(mm_driver *cu, int device, CUmemLocation *host, mm_status *st);

#endif
