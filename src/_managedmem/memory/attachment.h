/* attachment.h: attaching managed memory to the host, to one stream or to every device, and the
 * wait that an attachment requires before a host access.
 *
 * Where a device lacks concurrent access, the host may use managed memory only while no device
 * works, unless the memory is attached to the host, or to a stream that is idle. The driver does
 * not report attachments, so they are recorded here. If every device has concurrent access,
 * attachments have no effect, and no stream is kept. */
#ifndef MM_ATTACHMENT_H
#define MM_ATTACHMENT_H

#include "stream.h"

/* All zero: to every device. */
typedef struct {
    _Atomic(CUmemAttach_flags) to; /* the host or a stream; 0: every device */
    bool in_force; /* attached to the host, and the stream has reached the attachment */
    int device; /* whose primary context has the stream; MM_ANY_DEVICE: it is in another context */
    bool legacy; /* the stream is the legacy one of its context */
    mm_stream *shared; /* keeps the stream; or NULL */
    uint64_t serial; /* the number of attachments so far */
} mm_attachment;

/* Attaches a whole allocation, in the order of the stream; shared may be NULL. The allocation 0 is
 * empty. Fails, and changes nothing, if the stream captures. If the driver call fails, the memory
 * counts as attached to every device. */
MM_NODISCARD int mm_attach(mm_driver *cu, mm_attachment *a, CUdeviceptr allocation,
                           CUmemAttach_flags to, mm_device_stream stream, mm_stream *shared,
                           mm_status *st);

/* What the memory is attached to: every device, the host, or one stream. */
CUmemAttach_flags mm_attachment_now(const mm_attachment *a);

/* Waits until the host may access the memory: for a stream or for all devices, or not at all. Only
 * for systems where a device lacks concurrent access. */
MM_NODISCARD int mm_attachment_wait(mm_driver *cu, mm_attachment *a, mm_status *st);

/* Fails if the device of the stream lacks concurrent access, and the memory is attached to the host
 * or to another stream. Drivers refuse such fills, while they make such copies on the host. If
 * nothing keeps the other stream, the check is left to the driver. The caller is in the scope of
 * the stream. */
MM_NODISCARD int mm_attachment_check_fill(mm_driver *cu, mm_attachment *a, CUstream stream,
                                          mm_status *st);

/* Releases the stream. No call may be under way. */
void mm_attachment_end(mm_attachment *a);

#endif
