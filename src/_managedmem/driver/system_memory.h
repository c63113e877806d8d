/* system_memory.h: the memory that the system can still give. */
#ifndef MM_SYSTEM_MEMORY_H
#define MM_SYSTEM_MEMORY_H

#include <stddef.h>

/* Bytes that programs can still take without swapping: what is free, and what the system can
 * reclaim. 0 where Linux does not say. */
size_t mm_available_system_memory(void);

#endif
