/* Conformance cases of streams, events, host functions, copies, attachment and graph capture. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const size_t M = MIB;

static volatile unsigned char *
bytes_of(CUdeviceptr ptr)
{
    return (volatile unsigned char *)(uintptr_t)ptr;
}

void
topic_no_context(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), t = 0;
    size_t size = M, zero = 0, s = 4 * M;
    int v[4] = {0};
    CUstream stream = NULL;
    CUmemoryPool pool = NULL;

    cu.ctx_set(NULL);
    report("no ctx: advise rm", cu.advise(a, M, 1, f->dev));
    report("no ctx: advise pl D", cu.advise(a, M, 3, f->dev));
    report("no ctx: advise 99", cu.advise(a, M, (CUmem_advise)99, f->dev));
    report("no ctx: prefetch, own stream", cu.prefetch(a, M, f->dev, 0, f->stream));
    report("no ctx: prefetch, legacy", cu.prefetch(a, M, f->dev, 0, NULL));
    report("no ctx: prefetch, legacy, flags 1", cu.prefetch(a, M, f->dev, 1, NULL));
    report("no ctx: prefetch, per-thread", cu.prefetch(a, M, f->dev, 0, CU_STREAM_PER_THREAD));
    report("no ctx: batch", cu.prefetch_batch(&a, &s, 1, &f->dev, &zero, 1, 0, f->stream));
    report("no ctx: batch, legacy", cu.prefetch_batch(&a, &s, 1, &f->dev, &zero, 1, 0, NULL));
    report("no ctx: discard", cu.discard_batch(&a, &size, 1, 0, f->stream));
    report("no ctx: attr", cu.range_get(v, 4, 1, a, M));
    report("no ctx: ptr attr", cu.pointer_get(v, CU_POINTER_ATTRIBUTE_IS_MANAGED, a));
    report("no ctx: alloc", cu.alloc(&t, M, CU_MEM_ATTACH_GLOBAL));
    report("no ctx: alloc, flags 9", cu.alloc(&t, M, 9));
    report("no ctx: stream create", cu.stream_create(&stream, CU_STREAM_NON_BLOCKING));
    report("no ctx: stream sync", cu.stream_sync(f->stream));
    report("no ctx: stream sync, legacy", cu.stream_sync(NULL));
    report("no ctx: memset, own stream", cu.set8(a, 1, 4096, f->stream));
    report("no ctx: copy", cu.copy(a, a + 4096, 4096));
    report("no ctx: is capturing, own stream",
           cu.is_capturing(f->stream, (CUstreamCaptureStatus *)v));
    report("no ctx: is capturing, legacy", cu.is_capturing(NULL, (CUstreamCaptureStatus *)v));
    report("no ctx: default pool", cu.pool_default(&pool, &f->dev, CU_MEM_ALLOCATION_TYPE_PINNED));
    cu.ctx_set(f->ctx);
    t = managed(M);
    cu.ctx_set(NULL);
    report("no ctx: free", cu.mem_free(t));
}

void
topic_streams(struct fixture *f)
{
    CUstream stream = NULL, blocking;
    CUcontext ctx = NULL;
    CUevent first = NULL, second = NULL, late = NULL;
    float milliseconds = -1.0f;
    CUdeviceptr a = managed(M);

    report("create flags 0", cu.stream_create(&stream, CU_STREAM_DEFAULT));
    report("create flags 9", cu.stream_create(&blocking, 9));
    report("create into NULL", cu.stream_create(NULL, 0));
    report("context of it", cu.stream_ctx(stream, &ctx));
    value("  is the primary", ctx == f->ctx);
    report("context of the legacy stream", cu.stream_ctx(NULL, &ctx));
    value("  is the primary", ctx == f->ctx);
    report("query, idle", cu.stream_query(stream));
    report("query, legacy", cu.stream_query(NULL));
    report("query, per-thread", cu.stream_query(CU_STREAM_PER_THREAD));
    report("host function", cu.host_func(stream, nap, (void *)(uintptr_t)30000));
    report("query, busy", cu.stream_query(stream));
    report("event create", cu.event_create(&first, CU_EVENT_DEFAULT));
    report("event create, no timing", cu.event_create(&second, CU_EVENT_DISABLE_TIMING));
    report("event create, flags 64", cu.event_create(&late, 64));
    report("event query, never recorded", cu.event_query(first));
    report("event elapsed, never recorded", cu.event_elapsed(&milliseconds, first, first));
    report("event record", cu.event_record(first, stream));
    report("event query, busy", cu.event_query(first));
    report("wait for it on another stream", cu.stream_wait(f->stream, first, 0));
    report("wait, flags 9", cu.stream_wait(f->stream, first, 9));
    report("event synchronize", cu.event_sync(first));
    report("event query, done", cu.event_query(first));
    report("event record, no timing", cu.event_record(second, stream));
    report("event elapsed, no timing", cu.event_elapsed(&milliseconds, first, second));
    report("event destroy", cu.event_destroy(first));
    report("event destroy", cu.event_destroy(second));
    report("host function, NULL", cu.host_func(stream, NULL, NULL));
    report("synchronize", cu.stream_sync(stream));
    report("query, done", cu.stream_query(stream));
    report("host function on legacy", cu.host_func(NULL, nap, (void *)(uintptr_t)20000));
    report("prefetch after it on legacy", cu.prefetch(a, M, f->dev, 0, NULL));
    query("  at once", a, M);
    report("synchronize legacy", cu.stream_sync(NULL));
    report("destroy", cu.stream_destroy(stream));
    report("destroy NULL", cu.stream_destroy(NULL));
    report("destroy CU_STREAM_LEGACY", cu.stream_destroy(CU_STREAM_LEGACY));
    report("context synchronize", cu.ctx_sync());
}

/* Blocking streams and the legacy stream wait for each other; a batch must obey that too.  A
 * host function writes 1 everywhere 20 ms late.  What a discard leaves is undefined, except that
 * it must not be what was written before it: 1 shows that the discard did not wait. */
static void
late_write(struct fixture *f, CUstream stream, struct late_write *job)
{
    CUdeviceptr a = (CUdeviceptr)(uintptr_t)job->bytes;

    cu.prefetch(a, job->size, f->host, 0, stream);
    report("late write", cu.host_func(stream, write_late, job));
}

static void
show_late_write(const struct late_write *job)
{
    volatile unsigned char *bytes = job->bytes;

    report("  synchronize", cu.ctx_sync());
    printf("  late write is there: %d %d\n", bytes[0] == 1, bytes[job->size - 1] == 1);
}

void
topic_stream_order(struct fixture *f)
{
    size_t size = 4 * M, zero = 0;
    CUdeviceptr a = managed(size);
    CUstream b = new_stream(CU_STREAM_DEFAULT);
    struct late_write job = {(unsigned char *)(uintptr_t)a, size, 1};
    volatile unsigned char *bytes = bytes_of(a);

    late_write(f, NULL, &job);
    report("blocking, after legacy: fill 2", cu.set8(a, 2, size, b));
    show_late_write(&job);
    late_write(f, NULL, &job);
    report("blocking, after legacy: discard+prefetch D",
           cu.discard_prefetch(&a, &size, 1, &f->dev, &zero, 1, 0, b));
    show_late_write(&job);
    late_write(f, NULL, &job);
    report("blocking, after legacy: discard", cu.discard_batch(&a, &size, 1, 0, b));
    report("  fill first half 3", cu.set8(a, 3, size / 2, b));
    report("  prefetch D", cu.prefetch_batch(&a, &size, 1, &f->dev, &zero, 1, 0, b));
    show_late_write(&job);
    printf("  first half %d\n", bytes[0]);
    late_write(f, b, &job);
    report("legacy, after blocking: fill 4", cu.set8(a, 4, size, NULL));
    show_late_write(&job);
    late_write(f, b, &job);
    report("blocking: discard+prefetch D",
           cu.discard_prefetch(&a, &size, 1, &f->dev, &zero, 1, 0, b));
    report("legacy, after blocking: fill 5", cu.set8(a, 5, size, NULL));
    report("  synchronize", cu.ctx_sync());
    printf("  %d %d\n", bytes[0], bytes[size - 1]);
    late_write(f, NULL, &job);
    report("per-thread, after legacy: fill 6", cu.set8(a, 6, size, CU_STREAM_PER_THREAD));
    show_late_write(&job);
    late_write(f, NULL, &job);
    report("per-thread, after legacy: discard+prefetch D",
           cu.discard_prefetch(&a, &size, 1, &f->dev, &zero, 1, 0, CU_STREAM_PER_THREAD));
    show_late_write(&job);
}

void
topic_busy_streams(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), b = managed(4 * M);
    CUstream own = new_stream(CU_STREAM_NON_BLOCKING);

    memset((void *)(uintptr_t)a, 1, 4 * M);
    report("host function", cu.host_func(f->stream, nap, (void *)(uintptr_t)50000));
    report("prefetch behind it", cu.prefetch(a, 4 * M, f->dev, 0, f->stream));
    query("  at once", a, 4 * M);
    report("free with a prefetch queued", cu.mem_free(a));
    report("synchronize", cu.stream_sync(f->stream));
    report("host function", cu.host_func(own, nap, (void *)(uintptr_t)50000));
    report("prefetch behind it", cu.prefetch(b, 4 * M, f->dev, 0, own));
    report("destroy the busy stream", cu.stream_destroy(own));
    report("context synchronize", cu.ctx_sync());
    query("  afterwards", b, 4 * M);
}

void
topic_copies(struct fixture *f)
{
    CUdeviceptr a = managed(M), b = managed(M), dv = 0;
    unsigned char host[64];
    volatile unsigned char *x = bytes_of(a), *y = bytes_of(b);

    report("fill 8 bit", cu.set8(a, 0x11, M, f->stream));
    report("fill 16 bit", cu.set16(a, 0x2233, 8, f->stream));
    report("fill 32 bit", cu.set32(a + 32, 0x44556677, 2, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %x %x %x | %x %x %x %x %x | %x\n", x[0], x[1], x[16], x[32], x[33], x[34], x[35],
           x[40], x[M - 1]);
    report("fill 16 bit at +1", cu.set16(a + 1, 1, 8, f->stream));
    report("fill 32 bit at +2", cu.set32(a + 2, 1, 8, f->stream));
    report("fill of nothing", cu.set8(a, 1, 0, f->stream));
    report("fill past end", cu.set8(a, 1, M + 1, f->stream));
    report("fill NULL", cu.set8(0, 1, 16, f->stream));
    report("copy", cu.copy_async(b, a, M, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %x %x %x\n", y[0], y[32], y[M - 1]);
    report("copy of nothing", cu.copy_async(b, a, 0, f->stream));
    report("copy past end", cu.copy_async(b, a, M + 1, f->stream));
    report("copy NULL", cu.copy_async(0, a, 16, f->stream));
    memset(host, 7, sizeof host);
    report("copy from host", cu.copy_to_device(a, host, sizeof host, f->stream));
    report("copy to host", cu.copy_to_host(host, b, 1, f->stream));
    report("copy on device", cu.copy_on_device(b + 64, a, 32, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %x %x %x\n", x[0], host[0], y[64]);
    report("copy, any to any", cu.copy_async(b, (CUdeviceptr)(uintptr_t)host, 8, f->stream));
    report("copy, blocking", cu.copy(a, b, 8));
    report("synchronize", cu.stream_sync(f->stream));
    printf("  %x\n", x[0]);
    if (cu.mem_alloc(&dv, M) == CUDA_SUCCESS) {
        report("copy to device memory", cu.copy_async(dv, a, M, f->stream));
        report("copy from device memory", cu.copy_async(b, dv, M, f->stream));
        report("synchronize", cu.stream_sync(f->stream));
        printf("  %x\n", y[0]);
        report("free device memory", cu.mem_free(dv));
    }
    query("copies leave the last prefetch", a, M);
}

void
topic_attach(struct fixture *f)
{
    CUdeviceptr a = 0, b = managed(M);
    CUstream s = f->stream;

    report("host-attached", cu.alloc(&a, M, CU_MEM_ATTACH_HOST));
    report("host-attached: prefetch D", cu.prefetch(a, M, f->dev, 0, s));
    query("host-attached", a, M);
    report("host-attached: advise", cu.advise(a, M, 1, f->dev));
    report("attach half", cu.attach(s, a, M / 2, CU_MEM_ATTACH_SINGLE));
    report("attach single", cu.attach(s, a, 0, CU_MEM_ATTACH_SINGLE));
    report("attach single, null stream", cu.attach(NULL, a, 0, CU_MEM_ATTACH_SINGLE));
    report("attach global", cu.attach(s, a, 0, CU_MEM_ATTACH_GLOBAL));
    report("attach whole, with its length", cu.attach(s, b, M, CU_MEM_ATTACH_GLOBAL));
    report("attach host, null stream", cu.attach(NULL, b, 0, CU_MEM_ATTACH_HOST));
    report("sync_memops on managed",
           cu.pointer_set(&(unsigned int){1}, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, a));
    report("set is_managed",
           cu.pointer_set(&(unsigned int){1}, CU_POINTER_ATTRIBUTE_IS_MANAGED, a));
    report("free", cu.mem_free(a));
    report("double free", cu.mem_free(a));
    report("final sync", cu.ctx_sync());
}

/* Flags that are none of the three are not asked for: driver 580 crashes. */
void
topic_attach_ranges(struct fixture *f)
{
    CUdeviceptr a = managed(2 * M);

    report("attach null", cu.attach(f->stream, 0, 0, CU_MEM_ATTACH_GLOBAL));
    report("attach from the middle", cu.attach(f->stream, a + 4096, 0, CU_MEM_ATTACH_GLOBAL));
}

static void
end_capture(CUstream stream)
{
    CUgraph graph = NULL;

    report("  end", cu.end_capture(stream, &graph));
    if (graph != NULL) {
        cu.graph_destroy(graph);
    }
}

static void
show_status(CUstream stream)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)9;

    cu.is_capturing(stream, &status);
    printf("  status %d\n", (int)status);
}

void
topic_capture(struct fixture *f)
{
    size_t size = 4 * M, zero = 0;
    CUdeviceptr a = managed(size), t = 0;
    int v = 0;

    for (int mode = 0; mode < 3; mode++) {
        CUstream k = new_stream(CU_STREAM_NON_BLOCKING);

        printf("capture mode %d\n", mode);
        cu.begin_capture(k, (CUstreamCaptureMode)mode);
        report("  advise", cu.advise(a, M, 2, f->dev));
        report("  attr", cu.range_get(&v, 4, 1, a, M));
        report("  prefetch on the other stream", cu.prefetch(a, M, f->dev, 0, f->stream));
        end_capture(k);
        cu.begin_capture(k, (CUstreamCaptureMode)mode);
        t = 0;
        report("  alloc", cu.alloc(&t, M, CU_MEM_ATTACH_GLOBAL));
        end_capture(k);
        if (t != 0) {
            cu.mem_free(t);
        }
        cu.begin_capture(k, (CUstreamCaptureMode)mode);
        report("  prefetch on it", cu.prefetch(a, M, f->dev, 0, k));
        show_status(k);
        end_capture(k);
        cu.begin_capture(k, (CUstreamCaptureMode)mode);
        report("  batch on it", cu.prefetch_batch(&a, &size, 1, &f->dev, &zero, 1, 0, k));
        show_status(k);
        end_capture(k);
        cu.begin_capture(k, (CUstreamCaptureMode)mode);
        report("  discard on it", cu.discard_batch(&a, &size, 1, 0, k));
        end_capture(k);
        report("  end without begin", cu.end_capture(k, &(CUgraph){NULL}));
        cu.stream_destroy(k);
    }
    report("begin, mode 7", cu.begin_capture(f->stream, (CUstreamCaptureMode)7));
    report("begin on the legacy stream", cu.begin_capture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

enum alone {
    ALONE_ADVISE,
    ALONE_ALLOC,
    ALONE_FREE,
    ALONE_ATTRIBUTE,
    ALONE_POINTER,
    ALONE_PREFETCH_OTHER,
    ALONE_BATCH_OTHER,
    ALONE_DISCARD_OTHER,
    ALONE_COPY_OTHER,
    ALONE_FILL_OTHER,
    ALONE_SYNC_OTHER,
    ALONE_QUERY_OTHER,
    ALONE_CTX_SYNC,
    ALONE_PREFETCH_LEGACY,
    ALONE_STREAM_CREATE,
    ALONE_EVENT_CREATE,
    ALONE_EVENT_OTHER,
    ALONE_FILL_IT,
    ALONE_COPY_IT,
    ALONE_HOST_FUNC_IT,
    ALONE_PREFETCH_IT,
    ALONE_BAD_PREFETCH_IT,
    ALONE_BAD_ADVISE,
    ALONE_SYNC_IT,
    ALONE_QUERY_IT,
    ALONE_POOL_ALLOC_OTHER,
    ALONE_ATTACH_IT,
    ALONE_EVENT_QUERY,
    ALONE_EVENT_SYNC,
    ALONE_HOST_FUNC_OTHER,
    ALONE_WAIT_OTHER,
    ALONE_DEVICE_ALLOC,
    ALONE_PINNED_ALLOC,
    ALONE_INFO,
    ALONE_ATTRIBUTE_BAD,
    ALONE_FREE_BAD,
    ALONE_COUNT
};

static const char *const alone_names[ALONE_COUNT] = {
    "advise",
    "alloc",
    "free",
    "range attribute",
    "pointer attribute",
    "prefetch, other stream",
    "batch, other stream",
    "discard, other stream",
    "copy, other stream",
    "fill, other stream",
    "synchronize, other stream",
    "query, other stream",
    "context synchronize",
    "prefetch, legacy",
    "stream create and destroy",
    "event create and destroy",
    "event on other stream",
    "fill, it",
    "copy, it",
    "host function, it",
    "prefetch, it",
    "prefetch with flags 1, it",
    "advise 99",
    "synchronize, it",
    "query, it",
    "pool alloc, other stream",
    "attach, it",
    "event query",
    "event synchronize",
    "host function, other stream",
    "wait for event, other stream",
    "device memory alloc",
    "pinned alloc",
    "memory info",
    "range attribute 9",
    "free of nothing known",
};

struct alone_state {
    struct fixture *f;
    CUdeviceptr a, b, doomed;
    CUstream it, other;
    CUevent event;
};

static CUresult
alone_call_more(const struct alone_state *x, enum alone asked)
{
    CUdeviceptr t = 0;
    void *pinned = NULL;
    size_t free_bytes = 0, total = 0;
    int v = 0;

    switch (asked) {
    case ALONE_EVENT_QUERY:
        return cu.event_query(x->event);
    case ALONE_EVENT_SYNC:
        return cu.event_sync(x->event);
    case ALONE_HOST_FUNC_OTHER:
        return cu.host_func(x->other, nap, NULL);
    case ALONE_WAIT_OTHER:
        return cu.stream_wait(x->other, x->event, 0);
    case ALONE_DEVICE_ALLOC:
        return cu.mem_alloc(&t, 4096);
    case ALONE_PINNED_ALLOC:
        return cu.alloc_host(&pinned, 4096);
    case ALONE_INFO:
        return cu.mem_info(&free_bytes, &total);
    case ALONE_ATTRIBUTE_BAD:
        return cu.range_get(&v, 4, 9, x->a, M);
    case ALONE_FREE_BAD:
        return cu.mem_free(x->a + 1);
    default:
        return CUDA_ERROR_UNKNOWN;
    }
}

static CUresult
alone_call(const struct alone_state *x, enum alone asked)
{
    size_t size = M, zero = 0;
    int v = 0;
    CUdeviceptr t = 0, a = x->a;
    CUstream stream = NULL;
    CUevent event = NULL;
    CUresult result;

    switch (asked) {
    case ALONE_ADVISE:
        return cu.advise(a, M, 1, x->f->dev);
    case ALONE_ALLOC:
        return cu.alloc(&t, M, CU_MEM_ATTACH_GLOBAL);
    case ALONE_FREE:
        return cu.mem_free(x->doomed);
    case ALONE_ATTRIBUTE:
        return cu.range_get(&v, 4, 1, a, M);
    case ALONE_POINTER:
        return cu.pointer_get(&v, CU_POINTER_ATTRIBUTE_IS_MANAGED, a);
    case ALONE_PREFETCH_OTHER:
        return cu.prefetch(a, M, x->f->dev, 0, x->other);
    case ALONE_BATCH_OTHER:
        return cu.prefetch_batch(&a, &size, 1, &x->f->dev, &zero, 1, 0, x->other);
    case ALONE_DISCARD_OTHER:
        return cu.discard_batch(&a, &size, 1, 0, x->other);
    case ALONE_COPY_OTHER:
        return cu.copy_async(x->b, a, M, x->other);
    case ALONE_FILL_OTHER:
        return cu.set8(a, 1, M, x->other);
    case ALONE_SYNC_OTHER:
        return cu.stream_sync(x->other);
    case ALONE_QUERY_OTHER:
        return cu.stream_query(x->other);
    case ALONE_CTX_SYNC:
        return cu.ctx_sync();
    case ALONE_PREFETCH_LEGACY:
        return cu.prefetch(a, M, x->f->dev, 0, NULL);
    case ALONE_STREAM_CREATE:
        result = cu.stream_create(&stream, CU_STREAM_NON_BLOCKING);
        return result == CUDA_SUCCESS ? cu.stream_destroy(stream) : result;
    case ALONE_EVENT_CREATE:
        result = cu.event_create(&event, CU_EVENT_DISABLE_TIMING);
        return result == CUDA_SUCCESS ? cu.event_destroy(event) : result;
    case ALONE_EVENT_OTHER:
        return cu.event_record(x->event, x->other);
    case ALONE_FILL_IT:
        return cu.set8(a, 1, M, x->it);
    case ALONE_COPY_IT:
        return cu.copy_async(x->b, a, M, x->it);
    case ALONE_HOST_FUNC_IT:
        return cu.host_func(x->it, nap, NULL);
    case ALONE_PREFETCH_IT:
        return cu.prefetch(a, M, x->f->dev, 0, x->it);
    case ALONE_BAD_PREFETCH_IT:
        return cu.prefetch(a, M, x->f->dev, 1, x->it);
    case ALONE_BAD_ADVISE:
        return cu.advise(a, M, (CUmem_advise)99, x->f->dev);
    case ALONE_SYNC_IT:
        return cu.stream_sync(x->it);
    case ALONE_QUERY_IT:
        return cu.stream_query(x->it);
    case ALONE_POOL_ALLOC_OTHER:
        return cu.alloc_async(&t, M, x->other);
    case ALONE_ATTACH_IT:
        return cu.attach(x->it, a, 0, CU_MEM_ATTACH_GLOBAL);
    default:
        return alone_call_more(x, asked);
    }
}

/* Each call in a capture of its own; once as the thread is, once with the thread's mode relaxed
 * around the call.  "code / status of the capture / code of its end". */
void
topic_capture_alone(struct fixture *f)
{
    struct alone_state x = {.f = f, .a = managed(M), .b = managed(M), .other = f->stream};

    cu.event_create(&x.event, CU_EVENT_DISABLE_TIMING);
    for (int relaxed = 0; relaxed < 2; relaxed++) {
        for (int asked = 0; asked < ALONE_COUNT; asked++) {
            CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
            CUstreamCaptureStatus status = (CUstreamCaptureStatus)9;
            CUgraph graph = NULL;
            CUresult call, end;

            x.doomed = managed(4096);
            x.it = new_stream(CU_STREAM_NON_BLOCKING);
            cu.begin_capture(x.it, CU_STREAM_CAPTURE_MODE_GLOBAL);
            if (relaxed) {
                cu.exchange_mode(&mode);
            }
            call = alone_call(&x, (enum alone)asked);
            if (relaxed) {
                cu.exchange_mode(&mode);
            }
            cu.is_capturing(x.it, &status);
            end = cu.end_capture(x.it, &graph);
            printf("%-8s %-30s %d / %d / %d\n", relaxed ? "relaxed" : "global", alone_names[asked],
                   (int)call, (int)status, (int)end);
            if (graph != NULL) {
                cu.graph_destroy(graph);
            }
            cu.stream_destroy(x.it);
        }
    }
    cu.ctx_sync();
}

static void
show_legacy_queries(const char *kind, unsigned int flags, CUstreamCaptureMode mode)
{
    static const CUstream streams[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    static const char *const names[] = {"NULL", "CU_STREAM_LEGACY", "per-thread"};
    CUstream stream = new_stream(flags), idle = new_stream(CU_STREAM_NON_BLOCKING);
    CUstreamCaptureStatus status;
    CUresult result;

    printf("%s stream captures, mode %d\n", kind, (int)mode);
    report("  begin", cu.begin_capture(stream, mode));
    for (int i = 0; i < 3; i++) {
        status = (CUstreamCaptureStatus)9;
        result = cu.is_capturing(streams[i], &status);
        printf("  is capturing %-37s %d status %d\n", names[i], (int)result, (int)status);
    }
    status = (CUstreamCaptureStatus)9;
    result = cu.is_capturing(idle, &status);
    printf("  is capturing %-37s %d status %d\n", "an idle stream", (int)result, (int)status);
    show_status(stream);
    end_capture(stream);
    cu.stream_destroy(stream);
    cu.stream_destroy(idle);
}

void
topic_capture_blocking(struct fixture *f)
{
    (void)f;
    show_legacy_queries("blocking", CU_STREAM_DEFAULT, CU_STREAM_CAPTURE_MODE_GLOBAL);
    show_legacy_queries("blocking", CU_STREAM_DEFAULT, CU_STREAM_CAPTURE_MODE_RELAXED);
}

void
topic_capture_non_blocking(struct fixture *f)
{
    (void)f;
    show_legacy_queries("non-blocking", CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
    show_legacy_queries("non-blocking", CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED);
}

void
topic_capture_legacy(struct fixture *f)
{
    CUdeviceptr a = managed(M);

    for (int asked = 0; asked < 3; asked++) {
        CUstream stream = new_stream(CU_STREAM_DEFAULT);

        report("blocking stream captures, relaxed",
               cu.begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        if (asked == 0) {
            report("  prefetch, legacy", cu.prefetch(a, M, f->dev, 0, NULL));
        } else if (asked == 1) {
            report("  fill, legacy", cu.set8(a, 1, M, NULL));
        } else {
            report("  host function, legacy", cu.host_func(NULL, nap, NULL));
        }
        show_status(stream);
        end_capture(stream);
        cu.stream_destroy(stream);
    }
}

void
topic_capture_mode(struct fixture *f)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

    report("exchange mode", cu.exchange_mode(&mode));
    value("  was", (long long)mode);
    report("exchange mode back", cu.exchange_mode(&mode));
    value("  was", (long long)mode);
    report("is capturing into NULL", cu.is_capturing(f->stream, NULL));
    mode = (CUstreamCaptureMode)7;
    report("exchange mode 7", cu.exchange_mode(&mode));
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
