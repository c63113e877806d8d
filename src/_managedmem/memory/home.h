/* home.h: the host memory that is nearest to a device. */
#ifndef MM_HOME_H
#define MM_HOME_H

#include "../driver/driver.h"
#include "location.h"

/* The node of the host nearest to the device where its memory is on several NUMA nodes, else the
 * host: with one node, drivers forget a node that is asked for. */
MM_NODISCARD int mm_home_for(mm_driver *cu, int device, CUmemLocation *home, mm_status *st);

#endif
