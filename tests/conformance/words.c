/* Conformance cases of page-locked memory, and of streams that wait for words of memory and write
 * them.  Only a wait that a later line ends is ever queued. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static CUdeviceptr
address_of(const volatile void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

static void
show_pointer(const char *label, CUdeviceptr ptr)
{
    unsigned int type = 77, is_managed = 77;
    CUdeviceptr device_pointer = 0;

    report(label, cu.pointer_get(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr));
    (void)cu.pointer_get(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr);
    (void)cu.pointer_get(&device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ptr);
    printf("  type %u managed %u same address on the device %d\n", type, is_managed,
           device_pointer == ptr);
}

void
topic_pinned(struct fixture *f)
{
    unsigned char *p = NULL, *q = NULL;
    CUdeviceptr a = managed(MIB), d = 0;

    report("portable", cu.host_alloc((void **)&p, MIB, CU_MEMHOSTALLOC_PORTABLE));
    show_pointer("  its kind", address_of(p));
    report("flags 0", cu.host_alloc((void **)&q, 100, 0));
    report("  free", cu.free_host(q));
    report("flags 7", cu.host_alloc((void **)&q, 100, 7));
    report("  free", cu.free_host(q));
    report("flags 8", cu.host_alloc((void **)&q, 100, 8));
    report("size 0", cu.host_alloc((void **)&q, 0, 0));
    report("into NULL", cu.host_alloc(NULL, 100, 0));
    cu.ctx_set(NULL);
    report("no ctx: alloc", cu.host_alloc((void **)&q, 100, 0));
    report("no ctx: free of nothing known", cu.free_host(&d));
    cu.ctx_set(f->ctx);
    report("fill 5", cu.set8(a, 5, MIB, f->stream));
    report("copy from managed memory", cu.copy_async(address_of(p), a, MIB, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %d %d\n", p[0], p[MIB - 1]);
    report("copy past end", cu.copy_async(address_of(p + 1), a, MIB, f->stream));
    report("free from the middle", cu.free_host(p + 4096));
    report("free as device memory", cu.mem_free(address_of(p)));
    report("free of managed memory as host memory", cu.free_host((void *)(uintptr_t)a));
    report("free", cu.free_host(p));
    report("double free", cu.free_host(p));
    report("free NULL", cu.free_host(NULL));
    report("prefetch of managed memory afterwards", cu.prefetch(a, MIB, f->dev, 0, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
}

static void
show_attributes(const struct fixture *f)
{
    int wide = -7, nor = -7, flush = -7;

    cu.device_attribute(&wide, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, f->device);
    cu.device_attribute(&nor, CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, f->device);
    cu.device_attribute(&flush, CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, f->device);
    printf("64 bit %d nor %d flush %d\n", wide, nor, flush);
}

/* A wait that must be refused, and would be over at once if it were not. */
static void
check_word(struct fixture *f, const char *label, CUdeviceptr word, unsigned int flags)
{
    printf("%s\n", label);
    report("  wait", cu.wait_value(f->stream, word, 0, flags));
    report("  write", cu.write_value(f->stream, word, 0, flags));
}

void
topic_word_checks(struct fixture *f)
{
    CUdeviceptr m = managed(4096), d = 0;
    uint32_t *word = NULL, *pageable = calloc(1, sizeof *pageable);

    show_attributes(f);
    if (pageable == NULL || cu.host_alloc((void **)&word, 4096, 0) != CUDA_SUCCESS) {
        free(pageable);
        return;
    }
    memset(word, 0, 4096);
    check_word(f, "good", address_of(word), 0);
    check_word(f, "NULL", 0, 0);
    check_word(f, "misaligned", address_of(word) + 2, 0);
    check_word(f, "last word", address_of(word + 1023), 0);
    check_word(f, "pageable memory", address_of(pageable), 0);
    check_word(f, "managed memory", m, 0);
    check_word(f, "flags 4", address_of(word), 4);
    check_word(f, "flags 1", address_of(word), 1);
    check_word(f, "flush", address_of(word), CU_STREAM_WAIT_VALUE_FLUSH);
    if (cu.mem_alloc(&d, 4096) == CUDA_SUCCESS) {
        report("device memory: fill 0", cu.set8(d, 0, 4096, f->stream));
        check_word(f, "device memory", d, 0);
    }
    report("legacy stream: wait", cu.wait_value(NULL, address_of(word), 0, 0));
    report("per-thread stream: write",
           cu.write_value(CU_STREAM_PER_THREAD, address_of(word), 0, 0));
    cu.ctx_set(NULL);
    report("no ctx: wait, own stream", cu.wait_value(f->stream, address_of(word), 0, 0));
    report("no ctx: write, legacy", cu.write_value(NULL, address_of(word), 0, 0));
    cu.ctx_set(f->ctx);
    report("synchronize", cu.ctx_sync());
    free(pageable);
}

/* Prints whether a stream that waits for `value` passes while the word is `now`; then lets it. */
static void
passes(struct fixture *f, volatile uint32_t *word, const char *label, uint32_t now,
       uint32_t wanted, unsigned int flags, uint32_t released)
{
    CUresult waiting;

    *word = now;
    __sync_synchronize();
    report(label, cu.wait_value(f->stream, address_of(word), wanted, flags));
    nap((void *)(uintptr_t)20000);
    waiting = cu.stream_query(f->stream);
    if (waiting == CUDA_ERROR_NOT_READY) {
        nap((void *)(uintptr_t)1000);
        waiting = cu.stream_query(f->stream);
    }
    report("  query", waiting);
    *word = released;
    __sync_synchronize();
    report("  synchronize", cu.stream_sync(f->stream));
}

void
topic_word_values(struct fixture *f)
{
    volatile uint32_t *word = NULL;

    if (cu.host_alloc((void **)&word, 4096, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
        return;
    }
    passes(f, word, "5 geq 5", 5, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    passes(f, word, "4 geq 5", 4, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    passes(f, word, "5 + 2^31 - 1 geq 5", 0x80000004u, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    passes(f, word, "5 + 2^31 geq 5", 0x80000005u, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    passes(f, word, "3 geq 2^32 - 16", 3, 0xfffffff0u, CU_STREAM_WAIT_VALUE_GEQ, 3);
    passes(f, word, "6 eq 5", 6, 5, CU_STREAM_WAIT_VALUE_EQ, 5);
    passes(f, word, "6 and 2", 6, 2, CU_STREAM_WAIT_VALUE_AND, 2);
    passes(f, word, "5 and 2", 5, 2, CU_STREAM_WAIT_VALUE_AND, 2);
    passes(f, word, "1 nor 2", 1, 2, CU_STREAM_WAIT_VALUE_NOR, 1);
    passes(f, word, "0xffff nor 0xffff0000", 0xffffu, 0xffff0000u, CU_STREAM_WAIT_VALUE_NOR, 0);
}

void
topic_word_order(struct fixture *f)
{
    CUdeviceptr a = managed(MIB);
    CUstream other = new_stream(CU_STREAM_NON_BLOCKING), gone = new_stream(CU_STREAM_NON_BLOCKING);
    volatile uint32_t *word = NULL;
    CUevent event = NULL;

    if (cu.host_alloc((void **)&word, 4096, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS) {
        return;
    }
    *word = 0;
    report("fill 1", cu.set8(a, 1, MIB, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    cu.event_create(&event, CU_EVENT_DISABLE_TIMING);
    report("wait for 1", cu.wait_value(f->stream, address_of(word), 1, 0));
    report("fill 2", cu.set8(a, 2, MIB, f->stream));
    report("event record", cu.event_record(event, f->stream));
    report("other stream waits for it", cu.stream_wait(other, event, 0));
    report("query", cu.stream_query(f->stream));
    report("event query", cu.event_query(event));
    report("query of the other stream", cu.stream_query(other));
    report("third stream: write 1", cu.write_value(gone, address_of(word), 1, 0));
    report("event synchronize", cu.event_sync(event));
    report("synchronize the other stream", cu.stream_sync(other));
    printf("  %d word %u\n", *(volatile unsigned char *)(uintptr_t)a, *word);
    report("wait for 2", cu.wait_value(gone, address_of(word), 2, 0));
    report("fill 3", cu.set8(a, 3, MIB, gone));
    report("write 3", cu.write_value(gone, address_of(word), 3, 0));
    report("destroy the waiting stream", cu.stream_destroy(gone));
    printf("  word %u\n", *word);
    *word = 2;
    __sync_synchronize();
    report("context synchronize", cu.ctx_sync());
    printf("  %d word %u\n", *(volatile unsigned char *)(uintptr_t)a, *word);
    report("free", cu.free_host((void *)(uintptr_t)word));
    cu.event_destroy(event);
}

void
topic_word_capture(struct fixture *f)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)9;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUgraph graph = NULL;
    volatile uint32_t *word = NULL;

    if (cu.host_alloc((void **)&word, 4096, 0) != CUDA_SUCCESS) {
        return;
    }
    *word = 0;
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    report("wait", cu.wait_value(f->stream, address_of(word), 1, 0));
    report("write", cu.write_value(f->stream, address_of(word), 1, 0));
    cu.is_capturing(f->stream, &status);
    printf("  status %d word %u\n", (int)status, *word);
    report("end", cu.end_capture(f->stream, &graph));
    if (graph != NULL) {
        cu.graph_destroy(graph);
        graph = NULL;
    }
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    report("free of pinned memory in a capture", cu.free_host((void *)(uintptr_t)word));
    cu.is_capturing(f->stream, &status);
    printf("  status %d\n", (int)status);
    report("end", cu.end_capture(f->stream, &graph));
    cu.begin_capture(f->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    cu.exchange_mode(&mode);
    report("the same, relaxed", cu.free_host((void *)(uintptr_t)word));
    cu.exchange_mode(&mode);
    cu.is_capturing(f->stream, &status);
    printf("  status %d\n", (int)status);
    report("end", cu.end_capture(f->stream, &graph));
    if (graph != NULL) {
        cu.graph_destroy(graph);
    }
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
