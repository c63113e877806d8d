/* copy.h: copies and fills in stream order. */
#ifndef MM_COPY_H
#define MM_COPY_H

#include "attachment.h"
#include "range.h"

/* Copies at least 1 byte between any two addresses that the device or the host can access.
 * `transient` is true if the memory of one of them may be freed or reused after the return: then
 * the call waits for the copy, and refuses a stream that captures. */
MM_NODISCARD int mm_copy(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size,
                         mm_device_stream stream, bool transient, mm_status *st);

/* Queues a copy of at least 1 byte, in the scope of its stream. */
MM_NODISCARD int mm_copy_queue(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t size,
                               CUstream stream, mm_status *st);

/* Adds to the status of a refused copy or fill that the current device has no access to the pool
 * memory at p, if that is so. In a scope. */
void mm_copy_explain(mm_driver *cu, CUdeviceptr p, mm_status *st);

/* Fills the range with a pattern of 1, 2 or 4 bytes, whose width divides the size. Does nothing
 * for an empty range. Fails if the attachment of the memory rules the stream out. */
MM_NODISCARD int mm_fill(mm_driver *cu, mm_range range, mm_attachment *attachment,
                         const unsigned char pattern[4], unsigned width, mm_device_stream stream,
                         mm_status *st);

#endif
