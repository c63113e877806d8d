/* oversubscription.h: warnings before an allocation, advice or a prefetch for which devices or the
 * host lack memory. */
#ifndef MM_OVERSUBSCRIPTION_H
#define MM_OVERSUBSCRIPTION_H

#include "../memory/allocation_log.h"
#include "../memory/batch.h"
#include "compat.h"

/* True if this many bytes may exceed the whole memory of a device. */
static inline bool
mm_may_not_fit(size_t bytes)
{
    return bytes > atomic_load_explicit(&mm_least_device_memory, memory_order_relaxed);
}

/* The functions below issue a UserWarning once for each line that calls this package, and run
 * Python code for that. They return -1 with an exception if a filter turns the warning into an
 * error. */

MM_COLD int mm_warn_of_bytes(size_t bytes, size_t living);

/* Before an allocation of managed memory: warns if devices and host together may lack the bytes. */
static inline int
mm_warn_of_allocation(const mm_driver *cu, size_t bytes)
{
    size_t living = atomic_load_explicit(&mm_managed_bytes, memory_order_relaxed);

    return bytes > cu->all_memory || living > cu->all_memory - bytes
               ? mm_warn_of_bytes(bytes, living)
               : 0;
}

MM_COLD int mm_warn_of_large_place(size_t bytes, CUmemLocation location);

/* Before memory moves to a location or prefers it: warns if that is a device with less memory. */
static inline int
mm_warn_of_place(size_t bytes, CUmemLocation location)
{
    return mm_may_not_fit(bytes) ? mm_warn_of_large_place(bytes, location) : 0;
}

/* The same for several ranges; bytes that they share count once. */
int mm_warn_of_places(const mm_transfer *transfers, size_t count);

#endif
