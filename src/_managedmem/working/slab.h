/* slab.h: one piece of plain memory: frames on a device, or page-locked memory of the host that
 * the device reads and writes in place. Neither migrates, so both take the requested bytes and no
 * more, apart from rounding. */
#ifndef MM_SLAB_H
#define MM_SLAB_H

#include "../memory/leaks.h"

/* The memory at the addresses of a slab that can be suspended. */
typedef struct {
    size_t bytes; /* of the addresses, in whole units of the driver; 0: plain memory */
    size_t unit;
    CUmemLocation host; /* the location of memory of the host */
    CUmemGenericAllocationHandle frames, home; /* of the device, and of the host while suspended */
    bool has_frames, has_home;
    size_t at_home; /* bytes at the end of the slab that `home` stands for */
    bool keeps; /* `home` has their contents */
    bool is_suspended;
} mm_slab_mapping;

typedef struct mm_slab {
    mm_deferred_free deferred;
    struct mm_slab *next; /* in the list of slabs on the host */
    atomic_size_t holders; /* its owner, and graphs */
    CUdeviceptr start;
    size_t size;
    int device;
    atomic_ullong readers; /* a bit for each other device that reads it over the bus */
    bool on_host, is_listed;
    bool is_shared; /* other processes map it too */
    bool locked; /* of host memory: the driver has page-locked it */
    mm_slab_mapping mapping;
} mm_slab;

/* Memory of the device, in whole units of the driver if it can be suspended. NULL on failure. */
mm_slab *mm_slab_on_device(mm_driver *cu, int device, size_t size, bool can_suspend,
                           mm_status *st);

/* Memory of the host in huge pages where the system has them, all zero. The caller fills it, and
 * then page-locks it: locking pages that exist takes a tenth of the time. A forked child does not
 * have it. */
mm_slab *mm_slab_on_host(int device, size_t size, mm_status *st);

/* Memory of the host that several processes share: that of a file of memfd_create, which nobody
 * can shrink. The caller may close the file. */
mm_slab *mm_slab_of_file(int device, int file, mm_status *st);

MM_NODISCARD int mm_slab_lock(mm_driver *cu, mm_slab *slab, mm_status *st);

/* Another device reads the memory from now on: freeing waits for that device too. */
static inline void
mm_slab_add_reader(mm_slab *slab, int device)
{
    (void)atomic_fetch_or(&slab->readers, 1ULL << (unsigned)device);
}

/* The slab of the host with these bytes, to which it adds a holder; NULL if there is none. */
mm_slab *mm_slab_hold(CUdeviceptr start, size_t bytes);

static inline void
mm_slab_add_holder(mm_slab *slab)
{
    (void)atomic_fetch_add(&slab->holders, 1);
}

/* Gives up a holder. The last one frees the memory and the struct, after a wait for the device.
 * They are freed later if a stream captures, or if the driver refuses inside a host function. A
 * forked child frees nothing. */
void mm_slab_free(mm_slab *slab);

/* mm_slab_free for a thread of the driver, which must not call CUDA: the memory is freed later. */
void mm_slab_defer_free(mm_slab *slab);

/* --- slab_mapping.c: memory of a device that goes and comes back at its address --------------------- */

/* Takes addresses and maps memory of the device there, for a new slab. */
MM_NODISCARD int mm_slab_map(mm_driver *cu, mm_slab *slab, mm_status *st);

/* Gives the memory back to the driver, after a wait for the device. Addresses from the offset
 * `kept_from` on, rounded down, stay valid: they have memory of the host, with the contents if
 * `keeps`. Nobody may use the memory during the call, nor the other addresses until
 * mm_slab_resume. Does nothing if the slab is suspended. On failure nothing changes. */
MM_NODISCARD int mm_slab_suspend(mm_driver *cu, mm_slab *slab, size_t kept_from, bool keeps,
                                 mm_status *st);

/* Takes memory of the device again, with the contents that were kept. Nobody may use the memory
 * during the call. On failure the slab stays suspended. */
MM_NODISCARD int mm_slab_resume(mm_driver *cu, mm_slab *slab, mm_status *st);

/* Frees the memory and the addresses; false in a host function: try again later. In a relaxed
 * scope. */
bool mm_slab_unmap(mm_driver *cu, mm_slab *slab);

#endif
