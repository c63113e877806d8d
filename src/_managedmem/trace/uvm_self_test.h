/* uvm_self_test.h: a test of the module's records, which must report a known move exactly. */
#ifndef MM_UVM_SELF_TEST_H
#define MM_UVM_SELF_TEST_H

#include "../driver/uvm_queue.h"

/* Moves 64 KiB to the first device that has concurrent managed access and is not integrated. Fails
 * with MM_TRACE_UNAVAILABLE unless the records report exactly that move, and with MM_DRIVER_CALL
 * if a driver call fails. A test that has passed is not repeated in the process. Leaves no memory,
 * advice or stream, and the thread's current context as it was; allowed during captures. Blocks,
 * so the GIL must be released. */
MM_NODISCARD int mm_uvm_self_test(mm_driver *cu, mm_status *st);

#endif
