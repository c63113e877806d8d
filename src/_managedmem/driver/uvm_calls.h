/* uvm_calls.h: the system calls that event queues need: the kernel's, or the emulated driver's. */
#ifndef MM_UVM_CALLS_H
#define MM_UVM_CALLS_H

#include <poll.h>

#include "driver.h"

/* Like open, ioctl, poll and close: -1 with errno on failure. `files` stores the file descriptors
 * of the module that this process has open, `most` at most, and returns their number. */
typedef struct {
    int (*open)(const char *path, int flags);
    int (*ioctl)(int file, unsigned long request, void *argument);
    int (*poll)(struct pollfd *files, unsigned long count, int milliseconds);
    int (*close)(int file);
    int (*files)(int *files, int most);
} mm_uvm_calls;

/* Stores the kernel's calls, or those of an emulated driver; cu may be NULL. Fails with
 * MM_TRACE_UNAVAILABLE if the driver is emulated and has no event queues. */
MM_NODISCARD int mm_uvm_calls_find(const mm_driver *cu, mm_uvm_calls *calls, mm_status *st);

/* Duplicates the files of a device that another process has open; the caller closes them. Returns their
 * number, at least 1. Fails with MM_TRACE_UNAVAILABLE. */
MM_NODISCARD int mm_uvm_files_of(pid_t process, const char *device, int *files, int most,
                                 mm_status *st);

void mm_uvm_files_close(const int *files, int count);

#endif
