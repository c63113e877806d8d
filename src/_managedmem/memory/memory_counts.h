/* memory_counts.h: bytes and numbers of memories by source and device, with their peaks.
 *
 * The lock of the list of memories (allocation_log.c) protects the counts of the process. */
#ifndef MM_MEMORY_COUNTS_H
#define MM_MEMORY_COUNTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../driver/driver.h"

/* The resource that memory comes from. */
typedef enum {
    MM_FROM_NOWHERE, /* memory that other code frees: in the list for its name, and not counted */
    MM_FROM_DRIVER,
    MM_FROM_OTHERS, /* its buffer gives it back to a resource of other code */
    MM_FROM_MANAGED_POOL,
    MM_FROM_DEVICE_POOL,
    MM_SOURCES
} mm_source;

enum {
    MM_NO_DEVICE = -1,
    MM_COUNTED_DEVICES = MM_MAX_DEVICES + 1 /* MM_NO_DEVICE is the first */
};

typedef struct {
    uint64_t bytes, peak_bytes;
    uint64_t living, made;
} mm_memory_counts;

typedef struct {
    mm_memory_counts all;
    mm_memory_counts by[MM_SOURCES][MM_COUNTED_DEVICES]; /* the second index is the device + 1 */
} mm_memory_tally;

/* Counts memory that begins; `again` is true if it had ended before, and resumes. */
void mm_tally_begin(mm_memory_tally *tally, mm_source source, int device, size_t bytes,
                    bool again);

void mm_tally_end(mm_memory_tally *tally, mm_source source, int device, size_t bytes);

/* Sets each peak to the present bytes. */
void mm_tally_reset_peaks(mm_memory_tally *tally);

#endif
