/* event.h: an event of managed memory, as a recording keeps it; nothing else. */
#ifndef MM_EVENT_H
#define MM_EVENT_H

#include "../driver/uvm_queue.h"

/* Kinds of events. An event names processors in `source` and `destination`, or as a set in
 * `extra`. */
typedef enum {
    MM_MOVE, /* from source to destination; extra: its start, in ns from the start of its push */
    MM_HOST_FAULT, /* of the source, which is the host; extra: the thread */
    MM_DEVICE_FAULT, /* of the source, a device */
    MM_REMOTE_MAP, /* the source reaches the memory at the destination; extra: mm_remote_cause */
    MM_THRASHING, /* between the set of processors */
    MM_THROTTLING, /* of the source: its accesses waited from start to end */
    MM_DUPLICATE, /* the set of processors has copies */
    MM_DUPLICATE_END, /* only the destination keeps the memory */
    MM_EVICTION, /* from source to destination, to make space for other memory */
    MM_CALL, /* a call of this library; cause: its mm_operation, MM_QUERY for a host view */
    MM_EVENT_KINDS
} mm_event_kind;

/* Causes of moves: the numbers of the nvidia-uvm module, and one that the recording finds out. */
typedef enum {
    MM_CAUSE_UNKNOWN, /* including accesses of a debugger */
    MM_CAUSE_REQUESTED, /* a prefetch, or a move that advice asked for */
    MM_CAUSE_FAULT,
    MM_CAUSE_SPECULATIVE, /* beside pages that faulted, by the module's own prediction */
    MM_CAUSE_EVICTION,
    MM_CAUSE_ACCESS_COUNTERS,
    MM_CAUSE_HOST_VIEW, /* a prefetch that numpy() or a similar view made; not the module's */
    MM_CAUSES
} mm_cause;

enum { MM_MODULE_CAUSES = MM_CAUSE_HOST_VIEW };

/* Causes of remote mappings, the module's numbers. */
typedef enum {
    MM_REMOTE_BY_FAULT = 1,
    MM_REMOTE_BY_THRASHING,
    MM_REMOTE_BY_ADVICE,
    MM_REMOTE_WITHOUT_MEMORY, /* the device's memory is full */
    MM_REMOTE_BY_EVICTION
} mm_remote_cause;

enum { MM_NO_ACCESS, MM_READ_ACCESS, MM_WRITE_ACCESS, MM_ATOMIC_ACCESS }; /* `access` */

#define MM_NO_MEMORY_INDEX UINT32_MAX

enum { MM_SET_HOST_BIT = 31 }; /* of a set of processors in `extra`; bit n is device n */

/* Python reads it as "<4QI2h4BI". */
typedef struct {
    uint64_t start, end; /* ns of CLOCK_MONOTONIC_RAW; equal where nothing lasts */
    uint64_t address, amount; /* amount: bytes; 1 for a fault and for throttling */
    uint32_t memory; /* index of the memory, or MM_NO_MEMORY_INDEX */
    int16_t source, destination; /* ordinal, MM_ON_HOST, MM_NO_PROCESSOR, MM_OTHER_PROCESSOR */
    uint8_t kind, cause, access, flags;
    uint32_t extra;
} mm_event;

_Static_assert(sizeof(mm_event) == 48, "Python reads 48 bytes");
_Static_assert(offsetof(mm_event, memory) == 32 && offsetof(mm_event, kind) == 40
                   && offsetof(mm_event, extra) == 44,
               "Python reads these offsets");

#endif
