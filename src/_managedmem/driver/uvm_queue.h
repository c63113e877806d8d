/* uvm_queue.h: an event queue of the nvidia-uvm kernel module: records of moves and faults in the
 * managed memory of this process, or of another one.
 *
 * Any number of queues may exist, beside the queues of profilers, and none needs a privilege. The
 * module writes records into memory of this process. With an emulated driver, its own queues are
 * used. */
#ifndef MM_UVM_QUEUE_H
#define MM_UVM_QUEUE_H

#include <sys/types.h>

#include "uvm_abi.h"
#include "uvm_calls.h"

/* Processors, beside the ordinals of devices. */
enum {
    MM_ON_HOST = -1,
    MM_NO_PROCESSOR = -2,
    MM_OTHER_PROCESSOR = 0x7fff /* a device that this process does not use */
};

enum { MM_UVM_MOST_FILES = 32 }; /* file descriptors of the module in a process */

/* A structure of zeros is a closed queue. The members are private. */
typedef struct mm_uvm_queue {
    mm_uvm_calls calls;
    void *memory; /* the control block, then the records; NULL: closed */
    size_t memory_size;
    mm_uvm_control *control;
    const unsigned char *records;
    uint32_t count, next; /* next: the first record that was not read */
    int file, space_file, wake_file;
    int device_count;
    CUuuid device_id[MM_MAX_DEVICES];
    bool version_first; /* requests of this module begin with the version: branch 560 */
    pid_t owner;
} mm_uvm_queue;

/* Opens a queue of `count` records, a power of two, for the managed memory of this process;
 * nothing is recorded yet. Fails with MM_TRACE_UNAVAILABLE: st->detail is one sentence, st->code
 * the errno or the module's result. */
MM_NODISCARD int mm_uvm_queue_open(mm_driver *cu, mm_uvm_queue *q, uint32_t count, mm_status *st);

/* mm_uvm_queue_open with the given system calls in place of the driver's. */
MM_NODISCARD int mm_uvm_queue_open_through(const mm_uvm_calls *calls, mm_uvm_queue *q,
                                           uint32_t count, mm_status *st);

/* mm_uvm_queue_open_through for the managed memory that belongs to one of these files of the
 * module. The files must stay open at least as long as the queue. */
MM_NODISCARD int mm_uvm_queue_open_for(const mm_uvm_calls *calls, const int *files, int file_count,
                                       mm_uvm_queue *q, uint32_t count, mm_status *st);

/* Begins to record these types, one bit each, such as 1 << MM_UVM_MIGRATION. */
MM_NODISCARD int mm_uvm_queue_enable(mm_uvm_queue *q, uint64_t types, mm_status *st);
void mm_uvm_queue_disable(mm_uvm_queue *q, uint64_t types);

/* Waits until the queue is half full. False after so many milliseconds (-1: never), after a wake,
 * or after a signal. */
bool mm_uvm_queue_wait(mm_uvm_queue *q, int milliseconds);

/* Ends the wait of another thread; if none waits, the next wait ends at once. */
void mm_uvm_queue_wake(mm_uvm_queue *q);

/* Delivers the records of finished work into the queue. */
MM_NODISCARD int mm_uvm_queue_flush(mm_uvm_queue *q, mm_status *st);

/* Copies at most `most` of the oldest records, removes them, and returns their number. One thread
 * at a time. */
size_t mm_uvm_queue_read(mm_uvm_queue *q, unsigned char (*records)[MM_UVM_RECORD_BYTES],
                         size_t most);

/* The number of records of these types that were dropped since the queue was opened, because it
 * was full. */
uint64_t mm_uvm_queue_dropped(const mm_uvm_queue *q, uint64_t types);

/* Stores the processor of each of the module's indices: an ordinal, MM_ON_HOST for index 0,
 * MM_OTHER_PROCESSOR for a device that this process does not use, MM_NO_PROCESSOR for an unused
 * index. */
MM_NODISCARD int mm_uvm_queue_processors(mm_driver *cu, mm_uvm_queue *q,
                                         int16_t processors[MM_UVM_PROCESSORS], mm_status *st);

/* Repeats mm_uvm_queue_processors, when the module may list more devices than before. Does not
 * call the driver, so any thread may call it. */
MM_NODISCARD int mm_uvm_queue_processors_again(mm_uvm_queue *q,
                                               int16_t processors[MM_UVM_PROCESSORS],
                                               mm_status *st);

/* Closes the queue; a second time does nothing. No other thread may use it. A forked child forgets
 * the queue of its parent, and reads nothing from it. */
void mm_uvm_queue_close(mm_uvm_queue *q);

#endif
