/* The emulated driver's model: every type and function that its files share.
 *
 * Layers. A file calls only files in lines below its own: tools/check_sources.py reads this list.
 *   inspect.c                               controls for tests: looking inside, arming faults
 *   procaddress.c                           from names to entry points
 *   entry_context.c entry_copy.c entry_device.c entry_graph.c entry_memory.c entry_pointer.c
 *   entry_pool.c entry_registered.c entry_stream.c entry_uvm.c entry_virtual.c
 *   queues.c calls.c                        running operations; begin and end of a driver call
 *   capture.c page_advice.c pools.c         capture, advice and pools: what calls mean
 *   allocations.c events.c                  the objects that users hold
 *   graphs.c                                more of these: graphs, their nodes, user objects
 *   residency.c streams.c
 *   touches.c                               pages that a device or the host touches; evictions
 *   places.c
 *   frames.c                                memory of devices that managed pages take
 *   uvm_events.c                            records of moves and faults, for clients of queues
 *   regions.c                               mappings with the values of their pages
 *   devices.c runs.c page_map.c call_log.c faults.c
 *   config.c lock.c                         configuration, mutex
 *
 * One mutex guards everything here. An entry point takes it in emu_call_begin and gives it back in
 * emu_call_end; functions of the model expect it held. In between it is released only around the
 * host functions of streams, and while a thread waits for another one (emu_wait). */
#ifndef MANAGEDMEM_EMULATOR_H
#define MANAGEDMEM_EMULATOR_H

/* All versions of the vendor's prototypes, under their own names. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lists.h"

#define EMU_EXPORT __attribute__((visibility("default")))

enum {
    EMU_MAX_DEVICES = 16,
    EMU_MAX_NODES = 16,
    EMU_CONTEXT_DEPTH = 64,
    EMU_CALL_TEXT = 384,
};

/* ---- config.c ---------------------------------------------------------------------------- */

/* The byte in discarded pages. */
enum { EMU_POISON = 0xDB };
enum emu_discard { EMU_DISCARD_POISON, EMU_DISCARD_KEEP, EMU_DISCARD_ZERO };

/* Disturbances of the event queues of the nvidia-uvm module. Each has a value, such as n; 0 turns
 * it off. */
enum emu_queue_fault {
    EMU_QUEUE_ABSENT, /* the device file is missing */
    EMU_QUEUE_DENIED, /* the device file may not be opened */
    EMU_QUEUE_REFUSED, /* no queue can be made */
    EMU_QUEUE_LAYOUT, /* records have an unknown layout */
    EMU_QUEUE_DROP, /* every nth record is dropped, and counted */
    EMU_QUEUE_LOSE, /* every nth record is lost, and not counted */
    EMU_QUEUE_GARBAGE, /* a record of garbage comes before every nth */
    EMU_QUEUE_LATE, /* records wait for the nth flush */
    EMU_QUEUE_BRANCH, /* n is the branch of the module: requests differ by branch */
    EMU_QUEUE_UNLISTED, /* 1: the module lists only devices with a context; 2: only the first */
    EMU_QUEUE_FAULTS,
};

struct emu_config {
    int devices;
    int numa_nodes;
    int driver;              /* 13000 is CUDA 13.0 */
    bool concurrent;         /* concurrentManagedAccess of every device */
    bool pageable;           /* pageableMemoryAccess of every device */
    bool integrated;         /* devices share the memory of the host */
    bool confidential;       /* no device accesses memory of the host in place */
    bool nopeers;            /* no device accesses the memory of another */
    bool noinit;             /* cuInit finds no device */
    bool lazy;               /* operations run only when a call waits for them */
    enum emu_discard discard;
    size_t capacity;         /* memory of each device, in bytes */
    size_t page;             /* bytes */
    int queue_faults[EMU_QUEUE_FAULTS];
    const char *name;        /* the name of every device */
};

/* The configuration. The first caller reads it from the environment; it never changes. */
const struct emu_config *emu_config(void);
/* The error in the environment, or an empty string. Callers read it when they open the library. */
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

/* Ends the process with a message, where driver 580 would use freed memory, and crash or hang. */
__attribute__((noreturn)) void emu_crash(const char *reason);

/* ---- calls.c ----------------------------------------------------------------------------- */

/* Bits of a call. Bookkeeping calls are logged only in verbose mode. */
enum emu_call_kind {
    EMU_CALL_WORK = 0,
    EMU_CALL_BOOKKEEPING = 1,
    EMU_CALL_BEFORE_INIT = 2, /* legal before cuInit */
};

struct emu_call {
    const char *function;
    unsigned int kind;
    CUresult fail_after; /* an injected failure, returned after the call has acted */
    size_t used;
    char text[EMU_CALL_TEXT];
};

/* Begins an entry point: takes the mutex, checks for injected faults and for cuInit. With any other
 * result than CUDA_SUCCESS the call has ended (logged, mutex released), and the entry point must
 * return this result. */
CUresult emu_call_begin(struct emu_call *call, const char *function, unsigned int kind,
                        const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Adds outputs of the call to its log line. */
void emu_call_out(struct emu_call *call, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Ends an entry point: logs it and releases the mutex. The entry point must return the result. */
CUresult emu_call_end(struct emu_call *call, CUresult result);

/* Returns the result of a step that fails. In an entry point, EMU_STEP ends the call. */
#define EMU_TRY(step)                  \
    do {                               \
        CUresult result_ = (step);     \
        if (result_ != CUDA_SUCCESS) { \
            return result_;            \
        }                              \
    } while (0)

/* ---- call_log.c -------------------------------------------------------------------------- */

/* Adds the line of a call; bookkeeping calls only in verbose mode. */
void emu_log_call(const struct emu_call *call, CUresult result);

/* ---- faults.c ---------------------------------------------------------------------------- */

/* Arms a failure; flags as for emu_fail. False: too many are armed, or nth is 0. */
bool emu_fault_arm(const char *function, unsigned int nth, CUresult code, int flags);
/* Returns the failure with which a call must end before it acts, or CUDA_SUCCESS. Sets *fail_after
 * to a failure that must come after the call has acted. */
CUresult emu_fault_take(const char *function, bool needs_context, CUresult *fail_after);

/* ---- runs.c: values per page, stored as runs --------------------------------------------- */

/* Places of a page are bits: bit i is device i, and bit EMU_HOST_BIT + i is NUMA node i of the
 * host. */
enum { EMU_HOST_BIT = 32 };

struct emu_policy {
    uint64_t accessed_by; /* bits of devices; EMU_HOST_BIT for the host */
    int32_t preferred_type, preferred_id; /* type 0: none */
    int32_t prefetch_type, prefetch_id; /* last requested; type 0: none */
    uint32_t read_mostly;
    uint32_t zero; /* keeps the bytes comparable */
};

struct emu_page {
    uint64_t places; /* bits of the places with a copy; 0: never populated */
    uint64_t discarded; /* 1 between a discard and the next write or move */
    uint64_t unmapped; /* 1: the host has a copy, but no mapping until it touches the page */
    uint64_t remote; /* bits of devices that access the page in place */
};

/* Values are compared word by word, so unused bytes must be zero. */
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

/* Sets all pages to zero bytes. False: out of memory. */
bool emu_runs_init(struct emu_runs *runs, size_t pages);
void emu_runs_free(struct emu_runs *runs);
/* Calls `change` on each run inside [first, end), split as needed, and merges equal neighbours.
 * False: out of memory, nothing changed. */
bool emu_runs_change(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
                     void *argument);
/* emu_runs_change, but it can skip runs, as driver 580 does in its records (topic "records"). Each
 * step changes the run at a page and merges it with equal neighbours. The next step begins further
 * on by the length of the merged run. If that run began before the page of the step, this is too
 * far, and later pages are skipped. */
bool emu_runs_walk(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
                   void *argument);
/* A run, or the part of it that lies in a range. */
struct emu_part {
    const union emu_value *value;
    size_t first, end;
};
/* Steps to the run that begins at the end of the present one. False: the range has ended. */
bool emu_runs_next(const struct emu_runs *runs, size_t end, struct emu_part *part);
#define EMU_EACH_RUN(part, runs, from, to) \
    for (struct emu_part part = {.end = (from)}; emu_runs_next(runs, to, &(part));)
const union emu_value *emu_runs_at(const struct emu_runs *runs, size_t page);
/* The number of pages of the run that contains a page. */
size_t emu_runs_length(const struct emu_runs *runs, size_t page);

/* ---- page_map.c: the host's page table ---------------------------------------------------- */

typedef void (*emu_span_visit)(CUdeviceptr start, CUdeviceptr end, void *argument);

/* Opens the kernel's page map of this process. False: it cannot be read. */
bool emu_map_open(void);
/* Bytes of a page of the system. */
size_t emu_map_page_size(void);
/* Calls `visit` for each run of mapped pages in [start, end). False: the page map cannot be read,
 * or not to the end. */
bool emu_map_visit(CUdeviceptr start, CUdeviceptr end, emu_span_visit visit, void *argument);
/* Keeps pages mapped once they are mapped, as far as this process may lock memory. */
void emu_map_keep(CUdeviceptr start, size_t size);
/* Calls madvise for memory that may be locked. Unlocks the memory if madvise fails otherwise. */
bool emu_map_advise(CUdeviceptr start, size_t size, int advice);
/* Maps all pages of a range, and no others, without changing their bytes. */
void emu_map_fill(CUdeviceptr start, size_t size);

/* ---- devices.c: devices, contexts, the calling thread ------------------------------------- */

struct emu_stream;
struct emu_pool;
struct emu_frame;

/* The contents of a frame of a device, in the order of eviction. */
enum emu_frame_use {
    EMU_FRAME_NONE, /* it is not taken */
    EMU_FRAME_UNUSED, /* its pages have left */
    EMU_FRAME_DISCARDED,
    EMU_FRAME_USED,
    EMU_FRAME_USES,
};

/* The frames of a device with one use, the first to be evicted first. */
struct emu_frame_list {
    struct emu_frame *first, *last;
    size_t count;
};

/* The primary context of a device, or a user's context. A destroyed context stays in memory: the
 * next new one takes over its record, and so its handle, unless the stack of a thread still holds
 * it. */
struct emu_context {
    struct emu_context *next; /* in the list of contexts that users made */
    size_t stacked; /* how often the stacks of threads hold it */
    struct emu_device *device;
    bool primary, destroyed;
    struct emu_stream *legacy;
    uint64_t id; /* unique in the process */
};

struct emu_device {
    int ordinal;
    unsigned int retained; /* references to the primary context */
    struct emu_context primary;
    size_t allocated; /* bytes of cuMemAlloc, cuMemCreate and device pools */
    struct emu_frame_list frames[EMU_FRAME_USES]; /* of managed memory */
    size_t peak; /* the most bytes that were taken at once */
    struct emu_pool *default_pool, *pool;
};

/* The context stack and capture mode of a thread. */
struct emu_thread {
    uint64_t id;
    int depth;
    struct emu_context *stack[EMU_CONTEXT_DEPTH];
    CUstreamCaptureMode mode;
    bool in_stream_function; /* inside a host function, where most calls are refused */
};

struct emu_thread *emu_thread(void);
/* NULL: the device does not exist. */
struct emu_device *emu_device(int ordinal);
/* True if any context of the device lives. */
bool emu_device_has_context(int ordinal);
/* Writes the 16 bytes of its UUID. */
void emu_device_uuid(int ordinal, void *out);
/* The bytes that are taken of a device: cuMemAlloc, cuMemCreate, device pools, frames. */
size_t emu_device_taken(const struct emu_device *device);
/* Updates the peak. Called when more is taken. */
void emu_device_note_peak(struct emu_device *device);
/* The calling thread's current context. NULL if there is none, or it was destroyed. */
struct emu_context *emu_context(void);
/* The device of the current context, or NULL. */
struct emu_device *emu_current(void);
/* The result of a call that needs a current context and finds none. */
CUresult emu_no_context(void);
/* Makes a context current; the stack must have room. */
void emu_context_push(struct emu_thread *thread, struct emu_context *context);
/* Takes the current context off the stack, which must not be empty. The context may be
 * destroyed. */
struct emu_context *emu_context_pop(struct emu_thread *thread);
/* The context of a handle, even a destroyed one. NULL: the handle is unknown. */
struct emu_context *emu_context_find(CUcontext handle);
/* Makes a context for a user. NULL: out of memory. */
struct emu_context *emu_context_new(struct emu_device *device);
/* Marks a user's context as destroyed. All that belongs to it must have ended before. */
void emu_context_end(struct emu_context *context);
/* The number of contexts that users made and have not destroyed. */
size_t emu_context_count(void);

/* ---- regions.c --------------------------------------------------------------------------- */

/* The unit of large managed allocations, and of regions that allocations share. */
enum { EMU_BLOCK = 2 << 20 };
/* The size of the address window, and so the largest allocation. */
#define EMU_WINDOW ((size_t)1 << 38)

enum emu_kind { EMU_MANAGED, EMU_DEVICE, EMU_PINNED, EMU_RESERVED /* addresses alone */ };

/* A mapping of whole pages for one or many allocations: the advice in effect, the records that
 * queries read, and the places of the pages. */
struct emu_region {
    struct emu_region *next;
    CUdeviceptr base;
    size_t size;
    enum emu_kind kind;
    size_t allocations;
    bool small; /* shared by small managed allocations */
    bool blind; /* its pages cannot be unmapped, so the page map does not show touches */
    struct emu_pool *pool;
    struct emu_device *device; /* the owner (device kind), or the current device at its creation */
    struct emu_runs policies, records, pages;
    uint64_t *checksums; /* of discarded pages; NULL unless discards keep bytes */
    struct emu_frame *frames; /* of managed memory: for each device, one frame for each block */
    size_t framed; /* the number of frames that are taken */
    uint64_t emptied; /* the number of waits before the latest free of an allocation */
};

/* NULL: out of memory or addresses. */
struct emu_region *emu_region_new(enum emu_kind kind, size_t size, struct emu_device *device,
                                  struct emu_pool *pool);
/* Managed memory needs emu_pages_forget before. */
void emu_region_delete(struct emu_region *region);
/* Makes whole pages in a region accessible, or not. */
void emu_region_open(CUdeviceptr ptr, size_t size, bool open);
struct emu_region *emu_regions(void);
/* The pages that [ptr, ptr + size) touches: [*first, *end). */
void emu_page_span(const struct emu_region *region, CUdeviceptr ptr, size_t size, size_t *first,
                   size_t *end);
/* The address by which the emulated devices reach the bytes at `ptr`. Access to it maps no page for
 * the host. For memory outside of regions it is `ptr` itself. */
unsigned char *emu_bytes(CUdeviceptr ptr);
size_t emu_round_up(size_t value, size_t unit);

/* ---- allocations.c ----------------------------------------------------------------------- */

struct emu_allocation {
    CUdeviceptr base;
    size_t size; /* as requested */
    struct emu_region *region;
    enum emu_kind kind;
    struct emu_device *device;
    struct emu_pool *pool;
    const struct emu_context *context; /* it ends with this context; NULL: with none */
    unsigned int attach, first_attach; /* CUmemAttach_flags: now, and at the allocation */
    uint64_t attach_stream; /* the id of the stream of the last attachment */
    unsigned int sync_memops;
    bool freed; /* a stream-ordered free is queued */
    uint64_t id;
};

/* Makes an allocation in pages of its own, in a shared region, or in a region of the pool. */
CUresult emu_allocate(enum emu_kind kind, size_t size, struct emu_device *device,
                      struct emu_pool *pool, struct emu_allocation **out);
/* Makes an allocation at an address in a reserved region. INVALID_VALUE: it would overlap
 * another. */
CUresult emu_allocate_in(struct emu_region *region, CUdeviceptr base, size_t size,
                         enum emu_kind kind, struct emu_device *device,
                         struct emu_allocation **out);
void emu_release(struct emu_allocation *allocation);
/* Releases the memory of a context, except for memory of pools. */
void emu_release_context(const struct emu_context *context);
/* Releases empty regions of a pool, but keeps at least `keep` bytes. With `noticed`, releases only
 * regions whose latest free is followed by a wait of the program: before such a wait,
 * cuMemPoolTrimTo gives nothing back (topic "frees of pools"). */
void emu_pool_regions_trim(struct emu_pool *pool, size_t keep, bool noticed);
size_t emu_pool_regions_bytes(const struct emu_pool *pool);
/* Called after a wait for a stream, an event or a context: pools now notice earlier frees. */
void emu_notice_frees(void);
/* The allocation at an address, or NULL. */
struct emu_allocation *emu_find(CUdeviceptr ptr);
/* The allocation that contains [ptr, ptr + size), or NULL. */
struct emu_allocation *emu_find_range(CUdeviceptr ptr, size_t size);
/* emu_find_range for managed memory alone. */
struct emu_allocation *emu_find_managed(CUdeviceptr ptr, size_t size);
/* The memory at an address that cuMemHostRegister has page-locked, as an allocation without a
 * region. NULL if there is none. */
struct emu_allocation *emu_find_registered(CUdeviceptr ptr);
/* False for managed memory that is attached to the host or to another stream, if the devices lack
 * concurrent access. The end of a stream ends its attachments. */
bool emu_is_attached(CUdeviceptr ptr, const struct emu_stream *stream);
/* The number of live allocations, and the sum of their sizes. */
size_t emu_allocation_count(void);
size_t emu_allocation_bytes(void);

/* ---- page_advice.c ----------------------------------------------------------------------- */

/* Applies advice whose arguments have been checked. */
CUresult emu_policy_advise(struct emu_region *region, CUdeviceptr ptr, size_t size,
                           CUmem_advise advice, CUmemLocation location);
/* Records the last prefetch of a range. */
CUresult emu_policy_prefetched(struct emu_region *region, CUdeviceptr ptr, size_t size,
                               CUmemLocation location);
/* Checks an attribute and the size of its output; CUDA_SUCCESS or CUDA_ERROR_INVALID_VALUE. */
CUresult emu_policy_check(CUmem_range_attribute attribute, const void *data, size_t size);
/* Reads one attribute of a range into `data`. */
void emu_policy_read(const struct emu_region *region, CUdeviceptr ptr, size_t size,
                     CUmem_range_attribute attribute, int *data, size_t data_size);

/* ---- uvm_events.c: the event queues of the nvidia-uvm module -------------------------------- */

#define EMU_DEVICE_BITS (((uint64_t)1 << EMU_HOST_BIT) - 1)

enum { EMU_UVM_CONTROL_BYTES = 528 };
enum emu_uvm_type {
    EMU_UVM_CPU_FAULT = 1,
    EMU_UVM_MIGRATION = 2,
    EMU_UVM_GPU_FAULT = 3,
    EMU_UVM_DUPLICATE = 7,
    EMU_UVM_DUPLICATE_END = 8,
    EMU_UVM_MAP_REMOTE = 13,
    EMU_UVM_EVICTION = 14,
};
enum emu_uvm_cause {
    EMU_UVM_REQUESTED = 1, /* by a prefetch or by advice */
    EMU_UVM_COHERENCE = 2, /* a fault */
    EMU_UVM_EVICTED = 4,
};

/* Disturbances of the queues, from emu_config() unless they were set since. */
void emu_queue_set_fault(enum emu_queue_fault fault, unsigned int value);
unsigned int emu_queue_fault(enum emu_queue_fault fault);

/* One open file of the tools device, by its descriptor. NULL: there is no such file. */
struct emu_listener;
struct emu_listener *emu_listener_find(int file);
bool emu_listener_new(int file);
void emu_listener_delete(struct emu_listener *listener);
/* Gives a listener its queue: `count` records and a control block of the client. False: it has one
 * already. */
bool emu_listener_start(struct emu_listener *listener, void *records, uint32_t count,
                        void *control);
/* Starts or ends listening to types of events (bits). False: the listener has no queue. */
bool emu_listener_enable(struct emu_listener *listener, uint64_t types, bool on);
bool emu_listener_half_full(const struct emu_listener *listener);
/* Delivers the late records that are due. */
void emu_listeners_flush(void);

bool emu_uvm_wanted(enum emu_uvm_type type);
/* Places are bits, as in struct emu_page. */
void emu_uvm_migrated(CUdeviceptr start, size_t size, uint64_t from, uint64_t to,
                      enum emu_uvm_cause cause);
void emu_uvm_host_faulted(CUdeviceptr start, size_t size, bool write);
/* The number of faults of a device that touches a range. */
size_t emu_device_faults(CUdeviceptr start, size_t size);
void emu_uvm_device_faulted(CUdeviceptr start, size_t size, uint64_t device, bool write);
void emu_uvm_duplicated(CUdeviceptr start, size_t size, uint64_t places);
void emu_uvm_unduplicated(CUdeviceptr start, size_t size, uint64_t place);
void emu_uvm_mapped_remotely(CUdeviceptr start, size_t size, uint64_t from, uint64_t to);
void emu_uvm_evicted(CUdeviceptr start, size_t size, uint64_t from, uint64_t to,
                     CUdeviceptr incoming);

/* ---- places.c: the places of a run of pages ------------------------------------------------ */

/* The bit of the preferred location, or 0. */
uint64_t emu_preferred_bit(const struct emu_policy *policy);
struct emu_counters {
    uint64_t bytes_htod, bytes_dtoh, bytes_dtod, cpu_faults, gpu_faults, duplications;
};
extern struct emu_counters emu_counted;
extern uint64_t emu_bytes_in_place; /* that devices have accessed in place, on another processor */

/* The bit of the place that a location names. */
uint64_t emu_place_bit(CUmemLocation location);
/* The bit of the place where a device, or the host (-1), holds pages. An integrated device holds
 * them in the memory of the host. */
uint64_t emu_holder_bit(int device);
/* Sets the places of the run [first, end) of `value`. Unmaps the run if the host loses it. */
void emu_places_set(struct emu_region *region, union emu_value *value, size_t first, size_t end,
                    uint64_t places);
/* Maps a run that has come to the host, unless it is so large that it may be sparse. */
void emu_places_map(struct emu_region *region, union emu_value *value, size_t first, size_t end);
void emu_places_unmap(struct emu_region *region, size_t first, size_t end);
/* Counts and records that the pages [first, end) move. */
void emu_places_moved(const struct emu_region *region, size_t first, size_t end, uint64_t from,
                      uint64_t to, enum emu_uvm_cause cause);
/* Counts and records that pages now have copies in all these places. */
void emu_places_duplicated(const struct emu_region *region, size_t first, size_t end,
                           uint64_t places);
CUdeviceptr emu_page_address(const struct emu_region *region, size_t page);
/* Overwrites a page as configured. Keeps a checksum if the region has room for checksums. */
void emu_page_discard(struct emu_region *region, size_t page);
/* True if a discarded page still has the bytes that the discard left. */
bool emu_page_untouched(const struct emu_region *region, size_t page);

/* ---- frames.c ----------------------------------------------------------------------------- */

/* The memory of one device for one block. Blocks of managed regions begin at multiples of
 * EMU_BLOCK. */
struct emu_frame {
    struct emu_frame *next, *previous; /* in the device's list of frames with this use */
    struct emu_region *region;
    size_t first; /* page of the block */
    size_t pages; /* the number of pages of the block that the device holds */
    enum emu_frame_use use;
};

/* The end of the block of a page, at most `end`. */
size_t emu_block_end(size_t page, size_t end);
bool emu_frame_taken(const struct emu_region *region, size_t page, int device);
/* Takes a frame for the block of a page. There must be room. */
void emu_frame_take(struct emu_region *region, size_t page, int device);
/* Moves the frames of pages on devices (bits), if they are taken, to the end of the list of a
 * use. */
void emu_frames_mark(const struct emu_region *region, size_t first, size_t end, uint64_t places,
                     enum emu_frame_use use);
/* The frame that is evicted next, or NULL. */
struct emu_frame *emu_frame_to_evict(const struct emu_device *device);
void emu_frame_give_back(struct emu_frame *frame, int device);
/* Counts pages that come to devices (bits) or leave them. The frames of the pages must be taken. */
void emu_frames_count(const struct emu_region *region, size_t first, size_t end, uint64_t places,
                      bool arrives);
/* Gives back all frames of a region. */
void emu_frames_release(struct emu_region *region);

/* ---- touches.c ---------------------------------------------------------------------------- */

/* Reads or writes a range as a processor would (device -1: the host). */
void emu_pages_touch(struct emu_region *region, CUdeviceptr ptr, size_t size, int device,
                     bool write);
/* Notices which pages the host has touched since they left it. Called before anything that depends
 * on the places of pages. */
void emu_pages_observe(struct emu_region *region, size_t first, size_t end);
/* emu_pages_observe for all regions. `device` has touched the pages: -1 for the host, else the
 * device whose kernel has just run. */
void emu_regions_observe(int device);
/* Evicts frames until `bytes` of a device are free. The records name `incoming` as the memory that
 * needs them. False: even all frames are not enough (nothing is evicted), or out of memory. */
bool emu_room_make(struct emu_device *device, size_t bytes, CUdeviceptr incoming);
/* Takes a frame for the block of a page, and may evict others for it. False: there is no room. */
bool emu_room_take(struct emu_region *region, size_t page, int device);

/* ---- residency.c ------------------------------------------------------------------------- */

void emu_pages_prefetch(struct emu_region *region, CUdeviceptr ptr, size_t size,
                        CUmemLocation location);
void emu_pages_discard(struct emu_region *region, CUdeviceptr ptr, size_t size);
/* Discards system memory. Its pages are not tracked; only their bytes are lost. */
void emu_system_discard(CUdeviceptr ptr, size_t size);
/* Leaves one copy of each page, the preferred one if it exists. Called when read-mostly is
 * unset. */
void emu_pages_collapse(struct emu_region *region, size_t first, size_t end, uint64_t preferred);
/* Notices the last touches of a region and gives back its frames, before the region is deleted. */
void emu_pages_forget(struct emu_region *region);

/* ---- streams.c --------------------------------------------------------------------------- */

struct emu_capture;
struct emu_graph;
struct emu_node;

/* Nodes of a graph. */
struct emu_nodes {
    struct emu_node **list;
    size_t count;
};

enum emu_stream_kind { EMU_STREAM_OWN, EMU_STREAM_LEGACY, EMU_STREAM_PER_THREAD };

/* A point in a stream, reached after `serial` operations. */
struct emu_point {
    uint64_t stream, serial;
};

struct emu_op;

struct emu_stream {
    struct emu_stream *next;
    uint64_t id;
    enum emu_stream_kind kind;
    struct emu_context *context;
    struct emu_device *device; /* of the context */
    uint64_t thread; /* the owner of a per-thread stream */
    unsigned int flags;
    uint64_t queued, done; /* serials */
    struct emu_op *head, *tail;
    bool running; /* a thread runs its head operation, and may have released the mutex */
    bool destroyed; /* by its user; the stream is removed when its queue is empty */
    bool ended; /* it was removed with a user's context */
    struct emu_capture *capture;
    struct emu_nodes front; /* the nodes that the next captured node depends on */
};

/* Finds the stream of a handle. 0 and 1: the legacy stream of the current context; 2: its
 * per-thread stream. Without a current context, these give emu_no_context(). INVALID_HANDLE for
 * unknown handles. The process ends for a stream that ended with a user's context. */
CUresult emu_stream_find(CUstream handle, struct emu_stream **out);
CUresult emu_stream_new(struct emu_context *context, enum emu_stream_kind kind, unsigned int flags,
                        struct emu_stream **out);
/* NULL for a stream that has been deleted. */
struct emu_stream *emu_stream_by_id(uint64_t id);
/* True also if the stream has been deleted. */
bool emu_point_reached(struct emu_point point);
/* Makes the handle of a stream unknown. Its queue may still hold operations. */
void emu_stream_destroyed(struct emu_stream *stream);
/* Forgets a stream whose queue is empty. A later stream gets its handle. Until then, the handle of
 * a stream that ended with a user's context stays known. */
void emu_stream_remove(struct emu_stream *stream, bool ended_with_context);
bool emu_stream_idle(const struct emu_stream *stream);
bool emu_streams_idle(void);
bool emu_stream_blocking(const struct emu_stream *stream);
struct emu_stream *emu_streams(void);
size_t emu_stream_count(void);

/* ---- events.c ---------------------------------------------------------------------------- */

struct emu_event {
    struct emu_event *next;
    uint64_t id;
    unsigned int flags;
    const struct emu_context *context;
    bool recorded;
    struct emu_point point;
    struct emu_capture *capture;
    struct emu_nodes front; /* the stream's front when the event was recorded in a capture */
    double milliseconds; /* the time at which it was reached */
};

CUresult emu_event_new(const struct emu_context *context, unsigned int flags,
                       struct emu_event **out);
struct emu_event *emu_event_find(CUevent handle);
void emu_event_delete(struct emu_event *event);
/* Ends all events of a context. A later call with one of them ends the process. */
void emu_events_delete(const struct emu_context *context);
/* True even for an event that was never recorded. */
bool emu_event_reached(const struct emu_event *event);
/* Stores the time at which an event is reached. */
void emu_event_reach(uint64_t id);
/* Detaches the events recorded in a capture that has ended. */
void emu_events_leave(const struct emu_capture *capture);
size_t emu_event_count(void);

/* ---- graphs.c (and graphs.h) ------------------------------------------------------------- */

CUresult emu_nodes_add(struct emu_nodes *set, struct emu_node *const *list, size_t count);
CUresult emu_nodes_set(struct emu_nodes *set, struct emu_node *const *list, size_t count);
void emu_nodes_clear(struct emu_nodes *set);

/* ---- capture.c --------------------------------------------------------------------------- */

/* For calls that are unsafe during a capture. 900: a capture forbids the call, and is now
 * broken. */
CUresult emu_capture_unsafe(void);
/* For calls on a stream that cannot become nodes. 900: the stream captures. 906: it is the legacy
 * stream and a blocking stream captures. Both break the capture. 901: it is broken already. */
CUresult emu_capture_refuse(struct emu_stream *stream);
/* For calls that can become nodes. *captured: the stream captures, and the caller adds a node
 * instead of running the operation. */
CUresult emu_capture_record(struct emu_stream *stream, bool *captured);
/* Makes an operation a node of the graph that the stream captures. */
CUresult emu_capture_add(struct emu_stream *stream, const struct emu_op *op);
/* Adds nodes to those that the next node of the stream will depend on. `alone`: replaces those. */
CUresult emu_capture_follow(struct emu_stream *stream, const struct emu_nodes *nodes, bool alone);
/* *graph: NULL unless the stream captures. */
CUresult emu_capture_status(struct emu_stream *stream, CUstreamCaptureStatus *status, uint64_t *id,
                            struct emu_graph **graph);
CUresult emu_capture_begin(struct emu_stream *stream, CUstreamCaptureMode mode);
CUresult emu_capture_end(struct emu_stream *stream, CUgraph *graph);
/* Lets a stream that waits for an event join the capture in which the event was recorded. */
CUresult emu_capture_join(struct emu_stream *stream, const struct emu_event *event);
/* Ends the capture of a stream that is destroyed in the middle of it. */
void emu_capture_abandon(struct emu_stream *stream);
/* For waits for a whole context. 900: some of its streams capture, and the captures are broken
 * now. */
CUresult emu_capture_refuse_context(const struct emu_context *context);

/* ---- pools.c ----------------------------------------------------------------------------- */

struct emu_pool {
    struct emu_pool *next;
    CUmemAllocationType type;
    CUmemLocation location;
    bool is_default, dying;
    uint64_t access; /* bits of devices with access besides the owner */
    int reuse[3];
    cuuint64_t threshold, used, used_high, reserved_high;
    size_t max_size; /* the most bytes that may be used; 0: no bound */
    size_t live; /* allocations whose free has not run */
    size_t queued; /* frees that have not run */
};

/* A location and type, with its default and its current pool. */
struct emu_pool_home {
    struct emu_pool_home *next;
    CUmemLocation location;
    CUmemAllocationType type;
    struct emu_pool *default_pool, *current;
};

CUresult emu_pool_new(const CUmemPoolProps *props, struct emu_pool **out);
struct emu_pool *emu_pool_find(CUmemoryPool handle);
/* The default and the current pool of a location and type, made at their first use. */
CUresult emu_pool_home(CUmemLocation location, CUmemAllocationType type,
                       struct emu_pool_home **out);
/* True if a device can access the memory of a device pool. */
bool emu_pool_admits(const struct emu_pool *pool, int device);
void emu_pool_delete(struct emu_pool *pool);
CUresult emu_pool_allocate(struct emu_pool *pool, size_t size, struct emu_allocation **out);
/* Called when a free is queued. Its memory counts as unused from then on (topic "frees of
 * pools"). */
void emu_pool_queue_release(struct emu_allocation *allocation);
/* Returns an allocation to its pool. */
void emu_pool_release(struct emu_allocation *allocation);
/* The number of pools that users have made and not destroyed. */
size_t emu_pool_count(void);

/* ---- queues.c ---------------------------------------------------------------------------- */

enum emu_op_kind {
    EMU_OP_PREFETCH,
    EMU_OP_DISCARD,
    EMU_OP_DISCARD_SYSTEM,
    EMU_OP_COPY,
    EMU_OP_FILL,
    EMU_OP_FUNCTION,
    EMU_OP_KERNEL, /* a function that stands for a kernel */
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
    size_t size; /* in bytes; of a fill: in elements */
    CUmemLocation location;
    unsigned int pattern, width;
    void (*function)(void *argument);
    void *argument;
    uint64_t event;
    struct emu_allocation *allocation;
};

/* Queues a copy of `op`, with its waits. Runs it now if streams are eager. */
CUresult emu_stream_submit(struct emu_stream *stream, const struct emu_op *op);
/* Queues a wait for a point of another stream. */
CUresult emu_stream_submit_after(struct emu_stream *stream, struct emu_point point);
/* Runs all queued operations. */
void emu_stream_drain(struct emu_stream *stream);
/* emu_stream_drain for all streams of a context, or of all contexts (NULL). */
void emu_streams_drain(const struct emu_context *context);
/* Runs what can run without waiting for other threads. True: the point is reached. */
bool emu_point_poll(struct emu_point point);
/* Abandons a capture and makes the handle unknown. The stream is removed after its last
 * operation. */
void emu_stream_delete(struct emu_stream *stream);
/* emu_stream_delete for all streams of a context. */
void emu_streams_delete(const struct emu_context *context);
CUresult emu_event_record(struct emu_event *event, struct emu_stream *stream);
void emu_event_drain(const struct emu_event *event);
/* As emu_point_poll, for the point at which an event was recorded. */
bool emu_event_poll(const struct emu_event *event);
/* Switches to lazy or eager; eager runs all queued operations that need not wait. */
void emu_streams_schedule(bool lazy);
bool emu_streams_lazy(void);

#endif
