/* The emulated driver's model: every type and function that its files share.
 *
 * Layers.  A file calls only files in lines below its own; tests/test_sources.py reads this list.
 *   inspect.c                               controls for tests: looking inside, arming faults
 *   procaddress.c                           from names to entry points
 *   entry_copy.c entry_device.c entry_memory.c entry_pointer.c entry_pool.c entry_stream.c
 *   queues.c calls.c                        running operations; begin and end of a driver call
 *   capture.c policy.c pools.c              the meaning of calls
 *   allocations.c events.c                  the objects that users hold
 *   residency.c streams.c
 *   regions.c                               mappings with the values of their pages
 *   devices.c runs.c call_log.c faults.c
 *   config.c lock.c                         configuration, mutex
 *
 * One mutex guards everything here.  An entry point takes it in emu_call_begin and gives it back in
 * emu_call_end; functions of the model expect it held.  It is released only around the functions
 * that a stream runs for its user. */
#ifndef MANAGEDMEM_EMULATOR_H
#define MANAGEDMEM_EMULATOR_H

/* All versions of the vendor's prototypes, under their own names. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#if CUDA_VERSION < 13010
/* Newer than the oldest supported headers. */
extern CUresult cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData,
                                    unsigned int syncMode);
#endif

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EMU_EXPORT __attribute__((visibility("default")))

enum {
    EMU_MAX_DEVICES = 16,
    EMU_MAX_NODES = 16,
    EMU_CONTEXT_DEPTH = 64,
    EMU_CALL_TEXT = 384,
};

/* ---- config.c ---------------------------------------------------------------------------- */

enum emu_discard { EMU_DISCARD_POISON, EMU_DISCARD_KEEP, EMU_DISCARD_ZERO };

struct emu_config {
    int devices;
    int numa_nodes;
    int driver;              /* 13000 is CUDA 13.0 */
    bool concurrent;         /* concurrentManagedAccess of every device */
    bool pageable;           /* pageableMemoryAccess of every device */
    bool nopeers;            /* no device reaches another's memory */
    bool noinit;             /* cuInit finds no device */
    bool lazy;               /* streams run only when something waits for them */
    enum emu_discard discard;
    size_t capacity;         /* bytes of each device */
    size_t page;             /* bytes */
    const char *name;        /* what the devices call themselves */
};

/* The configuration; read from the environment by the first caller and never changed after. */
const struct emu_config *emu_config(void);
/* What is wrong with the environment, for whoever opens the library; empty when nothing is. */
EMU_EXPORT const char *emu_config_error(void);

/* ---- lock.c ------------------------------------------------------------------------------ */

void emu_unlock(void);
void emu_lock(void);
/* Waits, with the mutex released, for the next broadcast. */
void emu_wait(void);
void emu_broadcast(void);
/* Called by cuInit when it succeeds. */
void emu_set_initialised(void);
bool emu_initialised(void);
/* True in a forked child of a process that called cuInit. */
bool emu_forked(void);

/* ---- calls.c ----------------------------------------------------------------------------- */

/* What kind of call it is: bookkeeping calls are logged only in verbose mode. */
enum emu_call_kind {
    EMU_CALL_WORK = 0,
    EMU_CALL_BOOKKEEPING = 1,
    EMU_CALL_BEFORE_INIT = 2,    /* legal before cuInit */
};

struct emu_call {
    const char *function;
    unsigned int kind;
    CUresult fail_after;         /* injected: what to return although the call worked */
    size_t used;
    char text[EMU_CALL_TEXT];
};

/* Begins an entry point: takes the mutex, answers injected faults and missing initialisation.
 * On anything but CUDA_SUCCESS the call is over (logged, mutex released): return that value. */
CUresult emu_call_begin(struct emu_call *call, const char *function, unsigned int kind,
                        const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Adds what the call gave back to its log line. */
void emu_call_out(struct emu_call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Ends an entry point: logs it, releases the mutex, returns what the caller shall return. */
CUresult emu_call_end(struct emu_call *call, CUresult result);

/* The one way into every entry point: declares `call`, or returns early. */
#define EMU_BEGIN(function, kind, ...)                                        \
    struct emu_call call;                                                     \
    do {                                                                      \
        CUresult early_ = emu_call_begin(&call, function, kind, __VA_ARGS__); \
        if (early_ != CUDA_SUCCESS) {                                         \
            return early_;                                                    \
        }                                                                     \
    } while (0)

/* Defines an entry point under a hidden name of our own and exports the vendor's name as an
 * alias. Inside the library only the hidden names are used: a real driver in the same process,
 * loaded with global scope, can then never be called in place of this one. */
#define EMU_ENTRY(symbol, ...)                                         \
    extern __typeof__(symbol) symbol                                   \
        __attribute__((alias("emu_" #symbol), visibility("default"))); \
    CUresult emu_##symbol(__VA_ARGS__)

/* ---- call_log.c -------------------------------------------------------------------------- */

/* Adds the line of a call; bookkeeping calls only in verbose mode. */
void emu_log_call(const struct emu_call *call, CUresult result);

/* ---- faults.c ---------------------------------------------------------------------------- */

/* Arms a failure; flags as for emu_fail.  False: too many wait, or nth is 0. */
bool emu_fault_arm(const char *function, unsigned int nth, CUresult code, int flags);
/* The failure that a call has before it acts, or CUDA_SUCCESS.  *fail_after is set if an armed
 * failure comes after the call has acted. */
CUresult emu_fault_take(const char *function, bool needs_context, CUresult *fail_after);

/* ---- runs.c: values per page, stored as runs --------------------------------------------- */

/* Places where a page can be, as bits: devices from 0, host NUMA nodes from EMU_HOST_BIT. */
enum { EMU_HOST_BIT = 32 };

struct emu_policy {
    uint64_t accessed_by; /* bits of devices; EMU_HOST_BIT for the host */
    int32_t preferred_type, preferred_id; /* type 0: none */
    int32_t prefetch_type, prefetch_id; /* last requested; type 0: none */
    uint32_t read_mostly;
    uint32_t zero; /* keeps the bytes comparable */
};

struct emu_page {
    uint64_t places; /* bits of the places that hold a copy; 0: never populated */
    uint64_t discarded; /* 1 between a discard and the next write or move */
};

/* Compared word by word: what a member does not fill stays zero. */
enum { EMU_VALUE_WORDS = 4 };
union emu_value {
    struct emu_policy policy;
    struct emu_page page;
    uint64_t words[EMU_VALUE_WORDS];
};
_Static_assert(sizeof(union emu_value) == EMU_VALUE_WORDS * sizeof(uint64_t),
               "a value has bytes outside its words");

struct emu_run {
    size_t first; /* page; the run ends where the next begins */
    union emu_value value;
};

/* Sorted runs over pages [0, pages), neighbours always different. */
struct emu_runs {
    size_t pages, count, capacity;
    struct emu_run *run;
};

typedef void (*emu_run_change)(union emu_value *value, size_t first, size_t end, void *argument);
typedef void (*emu_run_visit)(const union emu_value *value, size_t first, size_t end,
                              void *argument);

/* All pages hold zero bytes.  False: out of memory. */
bool emu_runs_init(struct emu_runs *runs, size_t pages);
void emu_runs_free(struct emu_runs *runs);
/* Calls `change` on each run inside [first, end), split as needed, and merges what became equal.
 * False: out of memory, nothing changed. */
bool emu_runs_change(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
                     void *argument);
/* The same, but steps through the range as the driver does through its records. Measured with
 * driver 580: a run is changed and merged with equal neighbours, and the next one is looked for as
 * many pages behind the place where this one was found as the merged run is long. So where it was
 * merged with what lies before it, runs are left out. */
bool emu_runs_walk(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
                   void *argument);
void emu_runs_visit(const struct emu_runs *runs, size_t first, size_t end, emu_run_visit visit,
                    void *argument);
const union emu_value *emu_runs_at(const struct emu_runs *runs, size_t page);

/* ---- devices.c: devices, primary contexts, the calling thread ----------------------------- */

struct emu_stream;
struct emu_pool;

/* A device and its primary context (the only kind of context there is). */
struct emu_device {
    int ordinal;
    unsigned int retained;
    size_t allocated; /* bytes of cuMemAlloc and of device pools */
    size_t resident; /* bytes of managed pages that it holds */
    struct emu_stream *legacy;
    struct emu_pool *default_pool, *pool;
};

/* The calling thread: its context stack and capture mode. */
struct emu_thread {
    uint64_t id;
    int depth;
    struct emu_device *stack[EMU_CONTEXT_DEPTH];
    CUstreamCaptureMode mode;
    bool in_stream_function; /* runs a host function: must not call the driver */
};

struct emu_thread *emu_thread(void);
/* NULL when there is no such device. */
struct emu_device *emu_device(int ordinal);
/* The calling thread's current context, or NULL. */
struct emu_device *emu_current(void);
/* The device behind a context handle, or NULL. */
struct emu_device *emu_device_of(CUcontext ctx);
CUcontext emu_context_of(struct emu_device *device);

/* ---- regions.c --------------------------------------------------------------------------- */

/* The unit of large managed allocations, and of regions that allocations share. */
enum { EMU_BLOCK = 2 << 20 };
/* Bytes of the window of addresses, the most that one allocation can have. */
#define EMU_WINDOW ((size_t)1 << 38)

enum emu_kind { EMU_MANAGED, EMU_DEVICE, EMU_PINNED };

/* A mapping of whole pages: the policies that hold, the records that queries answer from, and the
 * places of the pages. One or many allocations lie in it. */
struct emu_region {
    struct emu_region *next;
    CUdeviceptr base;
    size_t size;
    enum emu_kind kind;
    size_t allocations;
    bool small; /* holds small managed allocations side by side */
    struct emu_pool *pool;
    struct emu_device *device; /* whose memory it is (device kind), or where it was made */
    struct emu_runs policies, records, pages;
    uint64_t *checksums; /* per page, of discarded pages (only where discards keep bytes) */
    uint64_t used; /* when it last moved to a device: the oldest is evicted first */
    uint64_t emptied; /* the number of waits at the free of its last allocation */
};

/* NULL: out of memory or addresses. */
struct emu_region *emu_region_new(enum emu_kind kind, size_t size, struct emu_device *device,
                                  struct emu_pool *pool);
/* The region's pages must have been forgotten (emu_pages_forget). */
void emu_region_delete(struct emu_region *region);
struct emu_region *emu_regions(void);
/* Pages that [ptr, ptr + size) touches. */
void emu_page_span(const struct emu_region *region, CUdeviceptr ptr, size_t size, size_t *first,
                   size_t *end);
size_t emu_round_up(size_t value, size_t unit);

/* ---- allocations.c ----------------------------------------------------------------------- */

struct emu_allocation {
    CUdeviceptr base;
    size_t size; /* as asked for */
    struct emu_region *region;
    enum emu_kind kind;
    struct emu_device *device;
    struct emu_pool *pool;
    unsigned int attach;
    unsigned int sync_memops;
    bool freed; /* a stream-ordered free is queued */
    uint64_t id;
};

/* A new allocation of its own pages, or inside one of the pool's regions. */
CUresult emu_allocate(enum emu_kind kind, size_t size, struct emu_device *device,
                      struct emu_pool *pool, struct emu_allocation **out);
void emu_release(struct emu_allocation *allocation);
/* Releases empty regions of a pool, but keeps at least `keep` bytes.  Measured: a region counts as empty
 * only after a wait behind its frees; `noticed` false skips that test. */
void emu_pool_regions_trim(struct emu_pool *pool, size_t keep, bool noticed);
size_t emu_pool_regions_bytes(const struct emu_pool *pool);
/* Counts a wait for a stream, an event or a context, behind which frees are noticed. */
void emu_notice_frees(void);
/* The allocation that holds the address, or NULL. */
struct emu_allocation *emu_find(CUdeviceptr ptr);
/* The allocation that holds all of [ptr, ptr + size), or NULL. */
struct emu_allocation *emu_find_range(CUdeviceptr ptr, size_t size);
/* The number of live allocations and of their bytes. */
size_t emu_allocation_count(void);
size_t emu_allocation_bytes(void);

/* ---- policy.c ---------------------------------------------------------------------------- */

/* Applies an advice that has been checked. */
CUresult emu_policy_advise(struct emu_region *region, CUdeviceptr ptr, size_t size,
                           CUmem_advise advice, CUmemLocation location);
/* Records the last prefetch of a range. */
CUresult emu_policy_prefetched(struct emu_region *region, CUdeviceptr ptr, size_t size,
                               CUmemLocation location);
/* Checks the size of one attribute's place; CUDA_SUCCESS or CUDA_ERROR_INVALID_VALUE. */
CUresult emu_policy_check(CUmem_range_attribute attribute, const void *data, size_t size);
/* Writes one attribute of a range. */
void emu_policy_read(const struct emu_region *region, CUdeviceptr ptr, size_t size,
                     CUmem_range_attribute attribute, int *data, size_t data_size);

/* ---- residency.c ------------------------------------------------------------------------- */

struct emu_counters {
    uint64_t bytes_htod, bytes_dtoh, bytes_dtod, cpu_faults, gpu_faults, duplications;
};
extern struct emu_counters emu_counted;

/* The bit of the place that a location names. */
uint64_t emu_place_bit(CUmemLocation location);
void emu_pages_prefetch(struct emu_region *region, CUdeviceptr ptr, size_t size,
                        CUmemLocation location);
void emu_pages_discard(struct emu_region *region, CUdeviceptr ptr, size_t size);
/* The same for system memory, whose pages are not tracked: only their bytes are lost. */
void emu_system_discard(CUdeviceptr ptr, size_t size);
/* A processor reads or writes a range (device -1: the host). */
void emu_pages_touch(struct emu_region *region, CUdeviceptr ptr, size_t size, int device,
                     bool write);
/* After read-mostly was taken back: copies collapse to one. */
void emu_pages_collapse(struct emu_region *region, size_t first, size_t end, uint64_t preferred);
/* The pages of a region that goes away leave their devices. */
void emu_pages_forget(struct emu_region *region);
/* Notices pages that the host has touched without telling anyone. */
void emu_pages_observe(struct emu_region *region, size_t first, size_t end);

/* ---- streams.c --------------------------------------------------------------------------- */

struct emu_capture;

enum emu_stream_kind { EMU_STREAM_OWN, EMU_STREAM_LEGACY, EMU_STREAM_PER_THREAD };

/* A point in a stream: reached when the stream has done `serial` operations. */
struct emu_point {
    uint64_t stream, serial;
};

struct emu_op;

struct emu_stream {
    struct emu_stream *next;
    uint64_t id;
    enum emu_stream_kind kind;
    struct emu_device *device;
    uint64_t thread; /* of a per-thread stream */
    unsigned int flags;
    int priority;
    uint64_t queued, done; /* serials */
    struct emu_op *head, *tail;
    bool running; /* some thread runs its head with the mutex released */
    struct emu_capture *capture;
};

/* Finds the stream behind a handle.  0 and 1: the current context's legacy stream (no context:
 * INVALID_CONTEXT); 2: the thread's own; else one that exists, or INVALID_HANDLE. */
CUresult emu_stream_find(CUstream handle, struct emu_stream **out);
CUresult emu_stream_new(struct emu_device *device, enum emu_stream_kind kind, unsigned int flags,
                        struct emu_stream **out);
/* NULL for a stream that has been deleted. */
struct emu_stream *emu_stream_by_id(uint64_t id);
/* Forgets and frees a stream whose queue is empty; emu_stream_delete empties it first. */
void emu_stream_remove(struct emu_stream *stream);
bool emu_stream_idle(const struct emu_stream *stream);
/* The streams of a device, or of all devices (NULL). */
bool emu_streams_idle(const struct emu_device *device);
bool emu_stream_blocking(const struct emu_stream *stream);
struct emu_stream *emu_streams(void);
size_t emu_stream_count(void);

/* ---- events.c ---------------------------------------------------------------------------- */

struct emu_event {
    struct emu_event *next;
    uint64_t id;
    unsigned int flags;
    struct emu_device *device;
    bool recorded;
    struct emu_point point;
    struct emu_capture *capture;
    double milliseconds; /* when it was reached */
};

CUresult emu_event_new(struct emu_device *device, unsigned int flags, struct emu_event **out);
struct emu_event *emu_event_find(CUevent handle);
void emu_event_delete(struct emu_event *event);
/* True if the event was never recorded, too. */
bool emu_event_reached(const struct emu_event *event);
/* Notes the time at which the event with this id is reached. */
void emu_event_reach(uint64_t id);
/* Takes the events recorded in a capture out of it, when it is over. */
void emu_events_leave(const struct emu_capture *capture);
size_t emu_event_count(void);

/* ---- capture.c --------------------------------------------------------------------------- */

/* For a call that is unsafe while a graph is captured: 900, and the capture is broken. */
CUresult emu_capture_unsafe(void);
/* For a call on a stream that cannot be recorded: 900 and broken when it captures; 906 when it is
 * the legacy stream and a blocking stream captures. */
CUresult emu_capture_refuse(struct emu_stream *stream);
/* For a call that can be recorded: sets *captured when the stream captures (then nothing runs). */
CUresult emu_capture_record(struct emu_stream *stream, bool *captured);
CUresult emu_capture_status(struct emu_stream *stream, CUstreamCaptureStatus *status,
                            uint64_t *id);
CUresult emu_capture_begin(struct emu_stream *stream, CUstreamCaptureMode mode);
CUresult emu_capture_end(struct emu_stream *stream, CUgraph *graph);
/* The stream waits for an event recorded in a capture: it joins that capture. */
void emu_capture_join(struct emu_stream *stream, struct emu_capture *capture);
/* The stream goes away in the middle of its capture. */
void emu_capture_abandon(struct emu_stream *stream);
/* A device-wide wait while streams of the device capture. */
CUresult emu_capture_refuse_device(const struct emu_device *device);
CUresult emu_graph_delete(CUgraph graph);

/* ---- pools.c ----------------------------------------------------------------------------- */

struct emu_pool {
    struct emu_pool *next;
    CUmemAllocationType type;
    CUmemLocation location;
    bool is_default, dying;
    uint64_t access; /* devices allowed besides the owner */
    int reuse[3];
    cuuint64_t threshold, used, used_high, reserved_high;
    size_t live; /* allocations whose free has not run */
    size_t queued; /* frees that have not run */
};

CUresult emu_pool_new(const CUmemPoolProps *props, struct emu_pool **out);
struct emu_pool *emu_pool_find(CUmemoryPool handle);
/* The default pool of a place and type, made at the first use. */
CUresult emu_pool_default(CUmemLocation location, CUmemAllocationType type, struct emu_pool **out);
CUresult emu_pool_current(CUmemLocation location, CUmemAllocationType type, struct emu_pool **out);
CUresult emu_pool_set_current(CUmemLocation location, CUmemAllocationType type,
                              struct emu_pool *pool);
/* Whether a device may use the memory of a device pool. */
bool emu_pool_admits(const struct emu_pool *pool, int device);
/* True if frees of the pool are queued. */
bool emu_pool_frees_queued(const struct emu_pool *pool);
void emu_pool_delete(struct emu_pool *pool);
CUresult emu_pool_allocate(struct emu_pool *pool, size_t size, struct emu_allocation **out);
/* Called when a free is queued.  Measured: the memory counts as unused from then on. */
void emu_pool_queue_release(struct emu_allocation *allocation);
/* Gives an allocation back to its pool. */
void emu_pool_release(struct emu_allocation *allocation);
/* How many pools users made and have not destroyed. */
size_t emu_pool_count(void);

/* ---- queues.c ---------------------------------------------------------------------------- */

enum emu_op_kind {
    EMU_OP_PREFETCH,
    EMU_OP_DISCARD,
    EMU_OP_DISCARD_SYSTEM,
    EMU_OP_COPY,
    EMU_OP_FILL,
    EMU_OP_FUNCTION,
    EMU_OP_EVENT,
    EMU_OP_WAIT,
    EMU_OP_RELEASE,
    EMU_OP_NOTHING,
};

struct emu_op {
    struct emu_op *next;
    enum emu_op_kind kind;
    uint64_t serial;
    size_t waits;
    struct emu_point *wait;
    CUdeviceptr ptr, source;
    size_t size; /* bytes; of a fill: elements */
    CUmemLocation location;
    unsigned int pattern, width;
    void (*function)(void *argument);
    void *argument;
    uint64_t event;
    struct emu_allocation *allocation;
};

/* Queues a copy of `op` (its waits included) and lets it run when streams are eager. */
CUresult emu_stream_submit(struct emu_stream *stream, const struct emu_op *op);
/* The same, but waits for `point` first. */
CUresult emu_stream_submit_after(struct emu_stream *stream, struct emu_point point);
/* Runs all queued operations. */
void emu_stream_drain(struct emu_stream *stream);
/* The same for all streams of a device, or of all devices (NULL). */
void emu_streams_drain(const struct emu_device *device);
/* Abandons a capture, runs all queued operations, then removes the stream. */
void emu_stream_delete(struct emu_stream *stream);
CUresult emu_event_record(struct emu_event *event, struct emu_stream *stream);
void emu_event_drain(const struct emu_event *event);
/* Switches to lazy or eager; eager runs all queued operations. */
void emu_streams_schedule(bool lazy);
bool emu_streams_lazy(void);

#endif
