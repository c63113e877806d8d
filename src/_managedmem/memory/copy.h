/* copy.h: copies and fills in stream order. */
#ifndef MM_COPY_H
#define MM_COPY_H

#include "range.h"

/* Copies between any two addresses that the device or host can reach, at least 1 byte. `device`
 * is the one of a default stream, MM_ANY_DEVICE the caller's. System memory may be gone after the
 * return, so a copy of it waits until it is done, and refuses a stream that captures. */
MM_NODISCARD int mm_copy(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size,
                         CUstream stream, int device, bool system, mm_status *st);

/* Fills the range with a pattern of 1, 2 or 4 bytes, whose width divides the size. An empty range is
 * not filled. */
MM_NODISCARD int mm_fill(mm_driver *cu, mm_range range, const unsigned char pattern[4],
                         unsigned width, CUstream stream, int device, mm_status *st);

#endif
