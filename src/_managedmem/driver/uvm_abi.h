/* uvm_abi.h: the interface of the nvidia-uvm kernel module to its event queues: numbers of
 * requests, layouts of their arguments, of the control block and of the records; nothing else.
 *
 * The interface is private to the module. The open modules 535 to 595 differ in the places of
 * their statuses and in the lengths of two arguments, so requests pass more bytes than any module
 * reads. The interface is trusted only after the test of uvm_self_test.h has passed. */
#ifndef MM_UVM_ABI_H
#define MM_UVM_ABI_H

#include <stddef.h>
#include <stdint.h>

#define MM_UVM_DEVICE "/dev/nvidia-uvm"
#define MM_UVM_TOOLS_DEVICE "/dev/nvidia-uvm-tools"

enum {
    MM_UVM_RECORD_BYTES = 64,
    MM_UVM_PROCESSORS = 33, /* indices by which records name processors; 0 is the host */
    MM_UVM_TABLE_ROWS = 257, /* no module writes a longer table of identifiers */
    MM_UVM_ID_BYTES = 16,
    MM_UVM_LAYOUT = 1, /* the version of records that is asked for */
    MM_UVM_TYPES = 64 /* types of records, with a counter for each in the control block */
};

/* Numbers of ioctl requests, without the usual bits for direction and size. */
enum {
    MM_UVM_MAKE_QUEUE = 56, /* on a file of MM_UVM_TOOLS_DEVICE */
    MM_UVM_ENABLE = 58, /* the same */
    MM_UVM_DISABLE = 59, /* the same */
    MM_UVM_LIST_PROCESSORS = 64, /* on the process's file of MM_UVM_DEVICE */
    MM_UVM_FLUSH = 67 /* the same */
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

/* Modules store the status in status_or_version; 550 and 555 also read the version in
 * version_or_status. Branch 560 has the two in exchanged places. */
typedef struct {
    uint64_t records, count, control; /* records, control: whole pages; count: a power of two */
    uint8_t processor[MM_UVM_ID_BYTES];
    uint32_t all_processors, space_file, status_or_version, version_or_status, unused[10];
} mm_uvm_queue_request;

typedef struct {
    uint64_t types; /* one bit for each */
    uint32_t status, unused[5];
} mm_uvm_types_request;

/* From 565 on, the module stores the status in status_or_input. Older modules store it in
 * `status`, and read status_or_input: branch 560 as the version, the others as a count, where 0
 * asks for the table of this version. */
typedef struct {
    uint64_t table;
    uint32_t status_or_input, status, unused[4];
} mm_uvm_list_request;

typedef struct {
    uint32_t status, unused[7];
} mm_uvm_flush_request;

/* The module moves the `put` indices, the reader the `get` indices. They are below the number of
 * records, of which one always stays free. */
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
