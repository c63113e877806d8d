/* The symbols that the library exports besides the vendor's, for tests and for
 * managedmem/emulator.py. */
#ifndef MANAGEDMEM_EMULATOR_CONTROL_H
#define MANAGEDMEM_EMULATOR_CONTROL_H

#include "emulator.h"

/* The call log has a line for each call: `cuMemAdvise(ptr=0x.., count=4096, ...) -> 0`. */
EMU_EXPORT void emu_log_clear(void);
EMU_EXPORT size_t emu_log_count(void);
/* Copies line i. Returns its length, or -1 for a line that does not exist. */
EMU_EXPORT int emu_log_entry(size_t i, char *text, size_t size);
/* Also logs the bookkeeping calls (current context, capture status and the like). */
EMU_EXPORT void emu_log_verbose(int on);
/* Calls `callback`, for example PyGILState_Check(), in the thread of each logged call. A result
 * other than 0 adds " probed" to the line. NULL ends these calls. */
EMU_EXPORT void emu_log_probe(int (*callback)(void));

enum {
    EMU_FAIL_AFTER = 1, /* the call takes effect before it fails */
    EMU_FAIL_LASTING = 2, /* all later calls that need a working context fail too */
};

/* Lets the nth call from now on (1: the next) of `function` ("*": of any function) fail with
 * `code`. Returns -1 if too many failures are armed, -2 for an unknown name. */
EMU_EXPORT int emu_fail(const char *function, unsigned int nth, int code, int flags);
EMU_EXPORT void emu_fail_clear(void);
/* The name of the ith function that can fail, NULL after the last. Names can repeat. */
EMU_EXPORT const char *emu_fail_name(size_t i);
/* The number of armed failures that have happened since the last emu_fail_clear. */
EMU_EXPORT int emu_fail_fired(void);

/* The number of NUMA nodes of the host. */
EMU_EXPORT int emu_numa_nodes(void);

EMU_EXPORT size_t emu_live_allocations(void);
EMU_EXPORT size_t emu_live_bytes(void);
EMU_EXPORT size_t emu_live_streams(void);
EMU_EXPORT size_t emu_live_events(void);
EMU_EXPORT size_t emu_live_pools(void);
EMU_EXPORT size_t emu_live_contexts(void);
/* The depth of the calling thread's context stack. */
EMU_EXPORT size_t emu_context_depth(void);

/* Gives the place of all pages of a range. *type 0: not in one place, -1: never populated, 1:
 * the device *id, 2: the NUMA node *id of the host. Returns -1 for a range that is not managed. */
EMU_EXPORT int emu_residency(CUdeviceptr ptr, size_t size, int *type, int *id);
/* Touches a range as a processor would (device -1: the host): faults, moves, copies, counts.
 * Returns -1 for a range that is not managed, and for a device that does not exist. */
EMU_EXPORT int emu_touch(CUdeviceptr ptr, size_t size, int device, int write);
/* Bytes that are taken of a device. used: frames with managed pages. kept: frames that their pages
 * have left. plain: other memory. peak: the most of all three together since the counters were
 * cleared. */
struct emu_frames {
    uint64_t used, kept, plain, peak;
};
/* Returns -1 for a device that does not exist. */
EMU_EXPORT int emu_frames(int device, struct emu_frames *out);
EMU_EXPORT void emu_counters(struct emu_counters *out);
EMU_EXPORT void emu_counters_clear(void);
/* Bytes that devices have used in place, on another processor, since the start of the process. */
EMU_EXPORT uint64_t emu_used_in_place(void);

/* 0: operations run when they are queued; 1: they run when a call waits for them. */
EMU_EXPORT void emu_schedule(int lazy);
/* These functions stand for system calls on the files of the nvidia-uvm module: open of
 * /dev/nvidia-uvm-tools, ioctl, poll and close. Poll takes at most 8 files, of the module or the
 * kernel. */
struct pollfd;
EMU_EXPORT int emu_uvm_open(const char *path, int flags);
EMU_EXPORT int emu_uvm_ioctl(int file, unsigned long request, void *argument);
EMU_EXPORT int emu_uvm_poll(struct pollfd *files, unsigned long count, int milliseconds);
EMU_EXPORT int emu_uvm_close(int file);
/* The process's open files of /dev/nvidia-uvm, at most `most`. Returns their number. */
EMU_EXPORT int emu_uvm_files(int *files, int most);
/* Sets the value of a disturbance of the queues: absent, denied, refused, layout, drop, lose,
 * garbage, late, branch or unlisted. 0 ends it. Returns -1 for an unknown name. */
EMU_EXPORT int emu_uvm_disturb(const char *name, unsigned int value);

/* Queues a "kernel": fn(arg) runs in stream order and may use managed and device memory. */
EMU_EXPORT int emu_launch(CUstream stream, void (*fn)(void *argument), void *argument);

#endif
