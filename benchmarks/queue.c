/* queue.c: a bare event queue of the kernel module, without a recorder, and loads of the host.
 * tracing.py builds it with the extension's files for queues, and loads it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

#include "driver/uvm_queue.h"
#include "trace/uvm_records.h"

enum { RECORDS = 1 << 16, PAGE = 4096 }; /* as many as those of a trace */

static mm_driver driver; /* only its members for queues */
static mm_uvm_queue queue;
static uint64_t types;
static mm_status status;

/* The reason for the last failure. */
const char *
queue_failure(void)
{
    return status.detail;
}

/* Opens and enables the queue of the driver at this path. -1 on failure. */
int
queue_open(const char *path, int emulated)
{
    driver.path = path;
    driver.emulated = emulated != 0;
    driver.library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    types = mm_uvm_types(true);
    if (mm_uvm_queue_open(&driver, &queue, RECORDS, &status) < 0) {
        return -1;
    }
    return mm_uvm_queue_enable(&queue, types, &status);
}

/* Closes it. Returns the number of records that it holds and has dropped, -1 on failure. */
int64_t
queue_close(void)
{
    unsigned char records[256][MM_UVM_RECORD_BYTES];
    size_t read = 256;
    int64_t count;

    if (queue.memory == NULL) {
        return mm_fail(&status, MM_REFUSED, "the queue is not open");
    }
    count = mm_uvm_queue_flush(&queue, &status);
    mm_uvm_queue_disable(&queue, types);
    while (count >= 0 && read == 256) {
        read = mm_uvm_queue_read(&queue, records, 256);
        count += (int64_t)read;
    }
    count += count >= 0 ? (int64_t)mm_uvm_queue_dropped(&queue, types) : 0;
    mm_uvm_queue_close(&queue);
    return count;
}

/* Reads a byte of each page. */
int
load_pages(uint64_t start, size_t size)
{
    const volatile unsigned char *bytes = (const unsigned char *)(uintptr_t)start;
    int sum = 0;

    for (size_t i = 0; i < size; i += PAGE) {
        sum += bytes[i];
    }
    return sum;
}
