/* slab.h: one piece of plain memory: frames on a device, or page-locked memory of the host that
 * the device reads and writes where it lies. Neither migrates, so both take what they are asked
 * for and nothing else. */
#ifndef MM_SLAB_H
#define MM_SLAB_H

#include "../memory/late_frees.h"

typedef struct {
    mm_late_free late;
    CUdeviceptr start;
    size_t size;
    int device;
    bool on_host;
    bool locked; /* of host memory: the driver has page-locked it */
} mm_slab;

/* Memory of the device. NULL on failure. */
mm_slab *mm_slab_on_device(mm_driver *cu, int device, size_t size, mm_status *st);

/* Memory of the host in huge pages where the system has them, all zero. The caller fills it, and
 * then page-locks it: locking pages that exist takes a tenth of the time. A forked child does not
 * have it. */
mm_slab *mm_slab_on_host(int device, size_t size, mm_status *st);
MM_NODISCARD int mm_slab_lock(mm_driver *cu, mm_slab *slab, mm_status *st);

/* Frees the memory and the struct, after a wait for the device; later, if a stream captures or the
 * driver refuses inside a host function. A forked child frees nothing. */
void mm_slab_free(mm_slab *slab);

#endif
