/* world.h: the emulated driver as the C unit tests see it: opened from a path, with its
 * controls. */
#ifndef WORLD_H
#define WORLD_H

#include <dlfcn.h>
#include <limits.h>
#include <string.h>

#include "check.h"
#include "driver/uvm_queue.h"
#include "memory/advice.h"
#include "memory/dispatch.h"
#include "memory/memory.h"

typedef struct {
    mm_driver *cu;
    void (*fail)(const char *function, unsigned nth, int code, int after);
    void (*fail_clear)(void);
    int (*fail_fired)(void);
    void (*log_clear)(void);
    size_t (*log_count)(void);
    int (*log_entry)(size_t i, char *text, size_t size);
    size_t (*live_allocations)(void);
    size_t (*live_streams)(void);
    size_t (*live_events)(void);
    size_t (*live_pools)(void);
    size_t (*context_depth)(void);
    void (*schedule)(int lazy);
    int (*launch)(CUstream stream, void (*run)(void *argument), void *argument);
    CUresult (*begin_capture)(CUstream stream, CUstreamCaptureMode mode);
    CUresult (*end_capture)(CUstream stream, CUgraph *graph);
    CUresult (*destroy_graph)(CUgraph graph);
    CUresult (*instantiate)(CUgraphExec *made, CUgraph graph, unsigned long long flags);
    CUresult (*launch_graph)(CUgraphExec graph, CUstream stream);
    CUresult (*destroy_executable)(CUgraphExec graph);
    CUresult (*create_context)(CUcontext *context, unsigned int flags, CUdevice device);
    CUresult (*destroy_context)(CUcontext context);
    int (*touch)(CUdeviceptr ptr, size_t size, int device, int write);
    int (*residency)(CUdeviceptr ptr, size_t size, int *type, int *id);
    int (*disturb_queue)(const char *name, unsigned int value);
    PFN_cuMemGetLocationInfo_v13040
        locate; /* which the emulated driver of CUDA 13.0 does not offer */
} emulated_world;

extern emulated_world world;

/* Opens the emulated driver at path and fills `world`; ends the process when that fails. */
void world_open(const char *path);

/* The same, with device 0 current in the calling thread. */
void world_open_on_device(const char *path);

/* The same, of a driver with at least two devices. */
void world_open_devices(const char *path);

/* The path of a file in the folder of another file. */
void world_path_beside(const char *path, const char *name, char found[PATH_MAX]);

mm_memory *world_allocate(size_t size);

/* A stream of a device. */
CUstream world_make_stream(int device, unsigned flags);

/* mm_batch_run, without deferring. */
int world_run(mm_driver *cu, mm_operation op, mm_batch *b, CUstream stream, mm_dispatch dispatch,
              mm_status *st);

/* An open queue of so many records, which records all types. */
mm_uvm_queue world_open_queue(uint32_t count);

/* The number of open files of this process. */
int world_count_files(void);

/* How many logged calls begin with this function's name. */
size_t world_calls(const char *function);

#endif
