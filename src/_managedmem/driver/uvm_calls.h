/* uvm_calls.h: the system calls that event queues need: the kernel's, or the emulated driver's. */
#ifndef MM_UVM_CALLS_H
#define MM_UVM_CALLS_H

#include <poll.h>

#include "driver.h"

/* Like open, ioctl, poll and close: -1 with errno on failure. */
typedef struct {
    int (*open)(const char *path, int flags);
    int (*ioctl)(int file, unsigned long request, void *argument);
    int (*poll)(struct pollfd *files, unsigned long count, int milliseconds);
    int (*close)(int file);
    int (*files)(int *files, int most); /* the process's files of the module: their number */
} mm_uvm_calls;

/* Fails with MM_TRACE_UNAVAILABLE if the driver is emulated and has no event queues. */
MM_NODISCARD int mm_uvm_calls_find(const mm_driver *cu, mm_uvm_calls *calls, mm_status *st);

#endif
