/* uvm_abi.h: the interface of the nvidia-uvm kernel module to its event queues: numbers of
 * requests, layouts of their arguments, of the control block and of the records; nothing else.
 *
 * The interface is private to the module. The open modules 535 to 595 differ in the lengths of two
 * arguments, so that requests pass more bytes than any module reads, and in the places of their
 * statuses. It is trusted only after the test of uvm_self_test.h has passed. */
#ifndef MM_UVM_ABI_H
#define MM_UVM_ABI_H

#include <stddef.h>
#include <stdint.h>

#define MM_UVM_DEVICE "/dev/nvidia-uvm"
#define MM_UVM_TOOLS_DEVICE "/dev/nvidia-uvm-tools"

enum {
    MM_UVM_RECORD_BYTES = 64,
    MM_UVM_PROCESSORS = 33, /* the host is 0; records name processors by this index */
    MM_UVM_TABLE_ROWS = 257, /* no module writes a longer table of identifiers */
    MM_UVM_ID_BYTES = 16,
    MM_UVM_LAYOUT = 1, /* the version of records that is asked for */
    MM_UVM_TYPES = 64 /* types of records, with a counter for each in the control block */
};

/* Bare numbers, without the usual directions and sizes. */
enum {
    MM_UVM_MAKE_QUEUE = 56, /* of the tools' file */
    MM_UVM_ENABLE = 58, /* of the tools' file */
    MM_UVM_DISABLE = 59, /* of the tools' file */
    MM_UVM_LIST_PROCESSORS = 64, /* of the process's own file */
    MM_UVM_FLUSH = 67 /* of the process's own file */
};

/* Statuses of requests that reached the module. */
enum {
    MM_UVM_OK = 0,
    MM_UVM_ILLEGAL_ACTION = 0x16,
    MM_UVM_NO_PERMISSION = 0x1b,
    MM_UVM_INVALID_ADDRESS = 0x1e,
    MM_UVM_INVALID_ARGUMENT = 0x1f,
    MM_UVM_NO_MEMORY = 0x51,
    MM_UVM_NOT_SUPPORTED = 0x56
};

/* The status comes first; the version behind it is read by 550 and 555 only. Branch 560 reads the
 * version in the first place, and stores the status in the second. */
typedef struct {
    uint64_t records, count, control; /* addresses of whole pages; a power of two */
    uint8_t processor[MM_UVM_ID_BYTES];
    uint32_t all_processors, space_file, status_or_version, version_or_status, unused[10];
} mm_uvm_queue_request;

typedef struct {
    uint64_t types; /* bits */
    uint32_t status, unused[5];
} mm_uvm_types_request;

/* The status is the first word from 565 on. Before, it is the second: the first is a count, of
 * which 0 asks for the table of this version, and in branch 560 the version. */
typedef struct {
    uint64_t table;
    uint32_t status_or_input, status, unused[4];
} mm_uvm_list_request;

typedef struct {
    uint32_t status, unused[7];
} mm_uvm_flush_request;

/* Indices are below the number of records. The module moves `put`, the reader `get`; one record
 * stays free. */
typedef struct {
    _Atomic uint32_t get_ahead, get_behind, put_ahead, put_behind;
    _Atomic uint64_t dropped[MM_UVM_TYPES];
} mm_uvm_control;

_Static_assert(offsetof(mm_uvm_queue_request, status_or_version) == 48,
               "the layout is the module's");
_Static_assert(offsetof(mm_uvm_queue_request, version_or_status) == 52,
               "the layout is the module's");
_Static_assert(sizeof(mm_uvm_queue_request) == 96, "room for every module's argument");
_Static_assert(offsetof(mm_uvm_types_request, status) == 8, "the layout is the module's");
_Static_assert(offsetof(mm_uvm_list_request, status) == 12, "the layout is the module's");
_Static_assert(offsetof(mm_uvm_control, dropped) == 16, "the layout is the module's");
_Static_assert(sizeof(mm_uvm_control) == 528, "the layout is the module's");

typedef enum {
    MM_UVM_HOST_FAULT = 1,
    MM_UVM_MIGRATION = 2,
    MM_UVM_DEVICE_FAULT = 3,
    MM_UVM_REPLAY = 4,
    MM_UVM_FAULT_OVERFLOW = 5,
    MM_UVM_FATAL_FAULT = 6,
    MM_UVM_DUPLICATE = 7,
    MM_UVM_DUPLICATE_END = 8,
    MM_UVM_PAGE_SIZE = 9,
    MM_UVM_THRASHING = 10,
    MM_UVM_THROTTLE_BEGIN = 11,
    MM_UVM_THROTTLE_END = 12,
    MM_UVM_REMOTE_MAP = 13,
    MM_UVM_EVICTION = 14,
    MM_UVM_KNOWN_TYPES = 15
} mm_uvm_type;

#endif
