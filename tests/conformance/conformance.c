/* Conformance cases: what a CUDA driver answers about managed memory, one line per case.
 *
 *     conformance LIBRARY [TOPIC]
 *
 * The same program runs on a real driver (the output becomes golden/<name>.txt) and on the
 * emulated one (the output must equal that file).  Lines hold codes and values, never
 * addresses or times. One function per topic; a topic's process has at most 80 MiB of managed
 * memory. Cases about streams, capture, pools and several devices are in the files named so. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "harness.h"
#include "topics.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t M = MIB;

/* One answer of cuGetProcAddress: code, status, whether a function came back.  999 and 'untouched'
 * show outputs that the driver left alone. */
static void *
show_lookup(const char *label, const char *name, int version, cuuint64_t flags)
{
    static char marker;
    void *function = &marker;
    int status = 999;
    CUresult result =
        cu.lookup(name, &function, version, flags, (CUdriverProcAddressQueryResult *)&status);

    printf("%-52s %d status %d function %s\n", label, (int)result, status,
           function == &marker ? "untouched"
           : function == NULL  ? "NULL"
                               : "yes");
    return function;
}

static void
topic_lookup(struct fixture *f)
{
    int version = 0;
    void *old, *new_;

    (void)f;
    report("cuDriverGetVersion before cuInit", cu.driver_version(&version));
    value("driver version", version);
    old = show_lookup("cuMemAdvise 8000", "cuMemAdvise", 8000, 0);
    value("  cuMemAdvise 12010 is the same",
          show_lookup("cuMemAdvise 12010", "cuMemAdvise", 12010, 0) == old);
    new_ = show_lookup("cuMemAdvise 12020", "cuMemAdvise", 12020, 0);
    value("  it is another function", new_ != old);
    show_lookup("cuMemAdvise 7000", "cuMemAdvise", 7000, 0);
    old = show_lookup("cuMemPrefetchAsync 8000", "cuMemPrefetchAsync", 8000, 0);
    new_ = show_lookup("cuMemPrefetchAsync 12020", "cuMemPrefetchAsync", 12020, 0);
    value("  it is another function", new_ != old);
    show_lookup("cuMemPrefetchAsync 12020, per-thread", "cuMemPrefetchAsync", 12020, 2);
    old = show_lookup("cuCtxGetDevice 12080", "cuCtxGetDevice", 12080, 0);
    new_ = show_lookup("cuCtxGetDevice 13000", "cuCtxGetDevice", 13000, 0);
    value("  it is another function", new_ != old);
    old = show_lookup("cuDevicePrimaryCtxRelease 8000", "cuDevicePrimaryCtxRelease", 8000, 0);
    new_ = show_lookup("cuDevicePrimaryCtxRelease 11000", "cuDevicePrimaryCtxRelease", 11000, 0);
    value("  it is another function", new_ != old);
    old = show_lookup("cuGetProcAddress 11030", "cuGetProcAddress", 11030, 0);
    new_ = show_lookup("cuGetProcAddress 12000", "cuGetProcAddress", 12000, 0);
    value("  it is another function", new_ != old);
    show_lookup("cuMemPrefetchBatchAsync 13000", "cuMemPrefetchBatchAsync", 13000, 0);
    show_lookup("cuMemPrefetchBatchAsync 12080", "cuMemPrefetchBatchAsync", 12080, 0);
    show_lookup("newer than the driver", "cuMemAdvise", version + 10, 0);
    show_lookup("newer than the driver, unknown name", "cuNoSuchThing", version + 1000, 0);
    show_lookup("unknown name", "cuNoSuchThing", version, 0);
    show_lookup("suffixed name", "cuMemAdvise_v2", version, 0);
}

static void
topic_before_init(struct fixture *f)
{
    int count = 0;
    CUdevice device = 0;
    CUcontext ctx = NULL;
    CUstream stream = NULL;
    CUdeviceptr ptr = 0;
    const char *text = NULL;

    report("cuDeviceGetCount", cu.device_count(&count));
    report("cuDeviceGet", cu.device_get(&device, 0));
    report("cuCtxGetCurrent", cu.ctx_get(&ctx));
    report("cuCtxSetCurrent NULL", cu.ctx_set(NULL));
    report("cuMemAllocManaged", cu.alloc(&ptr, 4096, CU_MEM_ATTACH_GLOBAL));
    report("cuMemFree NULL", cu.mem_free(0));
    report("cuMemAdvise", cu.advise(4096, 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, f->host));
    report("cuMemPrefetchAsync", cu.prefetch(4096, 4096, f->host, 0, NULL));
    report("cuMemRangeGetAttribute",
           cu.range_get(&count, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 4096, 4096));
    report("cuPointerGetAttribute", cu.pointer_get(&count, CU_POINTER_ATTRIBUTE_IS_MANAGED, 4096));
    report("cuStreamCreate", cu.stream_create(&stream, CU_STREAM_NON_BLOCKING));
    report("cuGetErrorName 1", cu.error_name(CUDA_ERROR_INVALID_VALUE, &text));
    printf("  text %s\n", text);
    text = "unchanged";
    report("cuGetErrorName 12345", cu.error_name((CUresult)12345, &text));
    printf("  text %s\n", text == NULL ? "NULL" : text);
    report("cuGetErrorString 2", cu.error_string(CUDA_ERROR_OUT_OF_MEMORY, &text));
    printf("  text %s\n", text);
    report("cuInit flags 1", cu.init(1));
    report("cuInit", cu.init(0));
    report("cuInit again", cu.init(0));
}

static void
show_device(int ordinal)
{
    static const struct {
        int attribute;
        const char *name;
    } attributes[] = {
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, "managed"},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, "concurrentManaged"},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, "pageable"},
        {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, "pageableHostPT"},
        {CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, "directManagedFromHost"},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, "hostNumaId"},
        {CU_DEVICE_ATTRIBUTE_NUMA_ID, "numaId"},
        {CU_DEVICE_ATTRIBUTE_NUMA_CONFIG, "numaConfig"},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "pools"},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED, "hostNumaPools"},
        {CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED, "hostPools"},
    };
    CUdevice device = 0;

    report("cuDeviceGet", cu.device_get(&device, ordinal));
    printf("dev %d:", ordinal);
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        int got = -99;
        CUresult result =
            cu.device_attribute(&got, (CUdevice_attribute)attributes[i].attribute, device);
        printf(" %s=%d%s", attributes[i].name, got, result == CUDA_SUCCESS ? "" : "(err)");
    }
    printf("\n");
}

static void
topic_devices(struct fixture *f)
{
    char name[256] = "";
    CUuuid uuid = {{0}}, uuid2 = {{0}}, zero = {{0}};
    size_t total = 0, free_bytes = 0, ctx_total = 0;
    int got = -99;
    CUdevice device = 0;

    value("devices", f->devices);
    for (int i = 0; i < f->devices; i++) {
        show_device(i);
    }
    report("cuDeviceGet -1", cu.device_get(&device, -1));
    report("cuDeviceGet count", cu.device_get(&device, f->devices));
    report("cuDeviceGet NULL", cu.device_get(NULL, 0));
    report("attribute 9999", cu.device_attribute(&got, (CUdevice_attribute)9999, f->device));
    report("attribute, device 99",
           cu.device_attribute(&got, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 99));
    report("attribute, NULL",
           cu.device_attribute(NULL, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, f->device));
    report("name", cu.device_name(name, sizeof name, f->device));
    value("  name is not empty", name[0] != '\0');
    report("name, device 99", cu.device_name(name, sizeof name, 99));
    report("uuid", cu.device_uuid(&uuid, f->device));
    report("uuid, second form", cu.device_uuid2(&uuid2, f->device));
    value("  not zero", memcmp(&uuid, &zero, sizeof uuid) != 0);
    value("  both forms agree", memcmp(&uuid, &uuid2, sizeof uuid) == 0);
    report("total", cu.device_total(&total, f->device));
    report("info", cu.mem_info(&free_bytes, &ctx_total));
    value("  free <= total", free_bytes <= ctx_total && free_bytes > 0);
    value("  both totals agree", total == ctx_total);
    report("can access peer, itself", cu.can_access_peer(&got, f->device, f->device));
    value("  can access", got);
    report("can access peer, device 99", cu.can_access_peer(&got, f->device, 99));
}

static void
topic_contexts(struct fixture *f)
{
    CUcontext again = NULL, ctx = NULL;
    CUdevice device = -5;
    unsigned int flags = 99;
    int active = -1;
    size_t a = 0, b = 0;

    report("state", cu.primary_state(f->device, &flags, &active));
    printf("  flags %u active %d\n", flags, active);
    report("retain again", cu.primary_retain(&again, f->device));
    value("  same handle", again == f->ctx);
    report("retain device 99", cu.primary_retain(&again, 99));
    report("release once", cu.primary_release(f->device));
    report("current", cu.ctx_get(&ctx));
    value("  is the primary", ctx == f->ctx);
    report("device of current", cu.ctx_device(&device));
    value("  device", device);
    if (cu.ctx_device13 != NULL) {
        report("device of ctx, 13000 form", cu.ctx_device13(&device, f->ctx));
        report("device of NULL ctx, 13000 form", cu.ctx_device13(&device, NULL));
        report("synchronize, 13000 form", cu.ctx_sync13(f->ctx));
        report("synchronize NULL, 13000 form", cu.ctx_sync13(NULL));
    }
    report("push", cu.ctx_push(f->ctx));
    report("pop", cu.ctx_pop(&ctx));
    value("  popped the primary", ctx == f->ctx);
    report("pop the last", cu.ctx_pop(&ctx));
    report("current of an empty stack", cu.ctx_get(&ctx));
    value("  is NULL", ctx == NULL);
    report("pop an empty stack", cu.ctx_pop(&ctx));
    report("device of an empty stack", cu.ctx_device(&device));
    report("synchronize an empty stack", cu.ctx_sync());
    report("info of an empty stack", cu.mem_info(&a, &b));
    report("push NULL", cu.ctx_push(NULL));
    report("set NULL", cu.ctx_set(NULL));
    report("set the primary", cu.ctx_set(f->ctx));
    report("pop into NULL", cu.ctx_pop(NULL));
    report("current", cu.ctx_get(&ctx));
    value("  is NULL", ctx == NULL);
    report("get current into NULL", cu.ctx_get(NULL));
    report("release the last", cu.primary_release(f->device));
    report("release once too often", cu.primary_release(f->device));
    report("state", cu.primary_state(f->device, &flags, &active));
    printf("  flags %u active %d\n", flags, active);
}

static void
topic_allocation(struct fixture *f)
{
    CUdeviceptr p = 0, big;
    CUresult result;

    (void)f;
    report("size 0", cu.alloc(&p, 0, CU_MEM_ATTACH_GLOBAL));
    report("flags 0", cu.alloc(&p, 4096, 0));
    report("flags 3", cu.alloc(&p, 4096, 3));
    report("flags 4 (single)", cu.alloc(&p, 4096, CU_MEM_ATTACH_SINGLE));
    report("NULL", cu.alloc(NULL, 4096, CU_MEM_ATTACH_GLOBAL));
    report("size 0, flags 0", cu.alloc(&p, 0, 0));
    big = managed(2 * M);
    value("2 MiB: 2 MiB aligned", big % (2 * M) == 0);
    report("free in the middle", cu.mem_free(big + 4096));
    report("free", cu.mem_free(big));
    report("double free", cu.mem_free(big));
    report("free NULL", cu.mem_free(0));
    result = cu.mem_free((CUdeviceptr)(uintptr_t)&p);
    report("free of the stack", result);
}

/* Small allocations lie close together, and advice is for whole pages: what one is told, its
 * neighbour hears.  The gap between two shows the unit in which the driver hands memory out. */
static void
topic_small_allocations(struct fixture *f)
{
    static const size_t sizes[] = {1,          512, 4096,    8192,        65536,       512 * KIB,
                                   MIB - 4096, MIB, MIB + 1, 3 * MIB / 2, 2 * MIB - 1, 2 * MIB};
    CUdeviceptr small[3] = {0}, page[3] = {0}, again = 0;
    size_t size = 100;

    for (int i = 0; i < 3; i++) {
        small[i] = managed(100);
    }
    for (int i = 0; i < 3; i++) {
        page[i] = managed(4096);
    }
    value("100 bytes: page aligned", small[0] % 4096 == 0 && small[1] % 4096 == 0);
    value("100 bytes: two share a page", small[0] / 4096 == small[1] / 4096);
    value("100 bytes: two share 64 KiB", small[0] / 65536 == small[1] / 65536);
    value("4096 bytes: page aligned", page[0] % 4096 == 0 && page[1] % 4096 == 0);
    value("4096 bytes: two share a page", page[0] / 4096 == page[1] / 4096);
    value("4096 bytes: two share 64 KiB", page[0] / 65536 == page[1] / 65536);
    report("advise on one of them",
           cu.advise(small[0], 100, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev));
    query("100 bytes", small[0], 100);
    query("100 bytes, neighbour", small[1], 100);
    query("4096 bytes", page[0], 4096);
    report("advise on 101 of 100 bytes",
           cu.advise(small[0], 101, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev));
    report("advise on 4096 of 100 bytes",
           cu.advise(small[0], 4096, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev));
    report("prefetch 4096 of 100 bytes", cu.prefetch(small[0], 4096, f->dev, 0, f->stream));
    report("prefetch one of them", cu.prefetch(small[0], 100, f->dev, 0, f->stream));
    query("prefetched", small[0], 100);
    query("prefetched, neighbour", small[1], 100);
    report("free of a small one", cu.mem_free(small[1]));
    report("double free of a small one", cu.mem_free(small[1]));
    again = managed(100);
    value("its address is used again", again == small[1]);
    query("the one in its place", again, 100);
    report("discard of 100 bytes", cu.discard_batch(&small[0], &size, 1, 0, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    value("100 bytes: gap in multiples of 512", (long long)(small[2] - again) / 512);
    value("  rest", (long long)(small[2] - again) % 512);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CUdeviceptr x, y;
        (void)managed(1);
        x = managed(sizes[i]);
        y = managed(sizes[i]);
        printf("%7zu bytes behind 1 byte: page aligned %d, 2 MiB aligned %d, gap to the next %s\n",
               sizes[i], x % 4096 == 0, x % (2 * M) == 0,
               y - x == (sizes[i] + 511) / 512 * 512 ? "rounded to 512"
               : y - x == 2 * M                      ? "2 MiB"
                                                     : "other");
    }
}

static void
topic_advise_checks(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), b = managed(4 * M), dv = 0;
    void *system = aligned_alloc(4096, M);

    report("device memory", cu.mem_alloc(&dv, M));
    report("advise 99, device memory, D9", cu.advise(dv, M, (CUmem_advise)99, f->dev9));
    report("advise pl device memory, D9", cu.advise(dv, M, 3, f->dev9));
    report("advise pl managed, D9", cu.advise(a, M, 3, f->dev9));
    report("advise ab managed, D9", cu.advise(a, M, 5, f->dev9));
    report("advise rm managed, D9 (ignored?)", cu.advise(a, M, 1, f->dev9));
    report("advise rm managed, type 77", cu.advise(a, M, 1, f->unknown));
    report("advise rm managed, NONE", cu.advise(a, M, 1, f->none));
    report("advise pl NONE", cu.advise(a, M, 3, f->none));
    report("advise unset rm NONE", cu.advise(a, M, 2, f->none));
    report("advise unset pl NONE", cu.advise(a, M, 4, f->none));
    report("advise unset pl type 77", cu.advise(a, M, 4, f->unknown));
    report("advise unset ab NONE", cu.advise(a, M, 6, f->none));
    report("advise ab NUMA", cu.advise(a, M, 5, f->numa));
    report("advise ab NUMA_CURRENT", cu.advise(a, M, 5, f->numa_current));
    report("advise count 0", cu.advise(a, 0, 1, f->dev));
    report("advise null", cu.advise(0, M, 1, f->dev));
    report("advise wrap-around", cu.advise(a, (size_t)-1, 1, f->dev));
    report("advise past end", cu.advise(a, 4 * M + 4096, 1, f->dev));
    report("advise one byte past end", cu.advise(a, 4 * M + 1, 1, f->dev));
    report("advise before the start", cu.advise(a - 4096, 8192, 1, f->dev));
    report("advise 100 B at +10", cu.advise(a + 10, 100, 1, f->dev));
    report("advise spanning two allocations",
           cu.advise(a < b ? a : b, (a < b ? b - a : a - b) + M, 1, f->dev));
    report("advise device memory", cu.advise(dv, M, 1, f->dev));
    if (system != NULL) {
        CUdeviceptr s = (CUdeviceptr)(uintptr_t)system;
        memset(system, 1, M);
        report("advise rm malloc'd", cu.advise(s, M, 1, f->dev));
        report("advise pl malloc'd", cu.advise(s, M, 3, f->dev));
        report("advise ab malloc'd", cu.advise(s, M, 5, f->dev));
    }
    report("v8000 rm -1", cu.advise8(a, M, 1, CU_DEVICE_CPU));
    report("v8000 rm -2", cu.advise8(a, M, 1, CU_DEVICE_INVALID));
    report("v8000 rm 9", cu.advise8(a, M, 1, 9));
    report("v8000 pl -1", cu.advise8(a, M, 3, CU_DEVICE_CPU));
    report("v8000 pl 0", cu.advise8(a, M, 3, 0));
    report("v8000 pl 9", cu.advise8(a, M, 3, 9));
    report("v8000 pl -2", cu.advise8(a, M, 3, CU_DEVICE_INVALID));
    report("v8000 ab -1", cu.advise8(a, M, 5, CU_DEVICE_CPU));
    report("v8000 ab -2", cu.advise8(a, M, 5, CU_DEVICE_INVALID));
    query("after the v8000 calls", a, M);
    free(system);
}

static void
topic_advise_matrix(struct fixture *f)
{
    static const char *const advices[] = {"set_rm",   "unset_rm", "set_pl",
                                          "unset_pl", "set_ab",   "unset_ab"};
    static const char *const names[] = {"D0", "H", "N0", "NC", "N999", "D99"};
    const CUmemLocation places[] = {f->dev,          f->host,    f->numa,
                                    f->numa_current, f->numa999, f->dev99};
    CUdeviceptr p = managed(4 * M);

    for (int i = 0; i < 6; i++) {
        printf("%-9s", advices[i]);
        for (int j = 0; j < 6; j++) {
            printf(" %s:%d", names[j], cu.advise(p, 4 * M, (CUmem_advise)(i + 1), places[j]));
        }
        printf("\n");
        cu.advise(p, 4 * M, 2, f->dev);
        cu.advise(p, 4 * M, 4, f->dev);
        cu.advise(p, 4 * M, 6, f->dev);
        cu.advise(p, 4 * M, 6, f->host);
    }
    printf("prefetch ");
    for (int j = 0; j < 6; j++) {
        printf(" %s:%d", names[j], cu.prefetch(p, 4 * M, places[j], 0, f->stream));
    }
    printf("\n");
    report("synchronize", cu.stream_sync(f->stream));
    query("after matrix", p, 4 * M);
}

static int
attribute(CUdeviceptr p, size_t size, CUmem_range_attribute asked)
{
    int value = -77;

    cu.range_get(&value, sizeof value, asked, p, size);
    return value;
}

/* Three advices are said to ignore their location; what each location makes of them. */
static void
topic_ignored_locations(struct fixture *f)
{
    static const char *const names[] = {"D0", "H", "N0", "NC", "N999", "D99"};
    const CUmemLocation places[] = {f->dev,          f->host,    f->numa,
                                    f->numa_current, f->numa999, f->dev99};
    CUdeviceptr p = managed(4 * M);

    for (int i = 0; i < 6; i++) {
        printf("%-5s", names[i]);
        printf(" set rm %d", cu.advise(p, 4 * M, 1, places[i]));
        printf(" gives %d", attribute(p, 4 * M, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY));
        cu.advise(p, 4 * M, 1, f->dev);
        printf(", unset rm %d", cu.advise(p, 4 * M, 2, places[i]));
        printf(" gives %d", attribute(p, 4 * M, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY));
        cu.advise(p, 4 * M, 2, f->dev);
        cu.advise(p, 4 * M, 3, f->dev);
        printf(", unset pl %d", cu.advise(p, 4 * M, 4, places[i]));
        printf(" gives %d\n", attribute(p, 4 * M, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION));
        cu.advise(p, 4 * M, 4, f->dev);
    }
}

static void
topic_read_back(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M);
    size_t all = 4 * M, half = 2 * M;

#define STEP(label, call)         \
    do {                          \
        report("  " label, call); \
        query(label, a, all);     \
    } while (0)
    query("fresh", a, all);
    STEP("set_rm", cu.advise(a, all, 1, f->dev));
    STEP("rm unset", cu.advise(a, all, 2, f->dev));
    STEP("pl N0", cu.advise(a, all, 3, f->numa));
    STEP("pl NC after N0", cu.advise(a, all, 3, f->numa_current));
    STEP("pl H", cu.advise(a, all, 3, f->host));
    STEP("pl NC after H", cu.advise(a, all, 3, f->numa_current));
    STEP("pl D", cu.advise(a, all, 3, f->dev));
    STEP("pl NC after D", cu.advise(a, all, 3, f->numa_current));
    STEP("pl D again", cu.advise(a, all, 3, f->dev));
    STEP("pl N0 after D", cu.advise(a, all, 3, f->numa));
    STEP("pl H again", cu.advise(a, all, 3, f->host));
    STEP("pl N0 after H", cu.advise(a, all, 3, f->numa));
    STEP("pl D for the last time", cu.advise(a, all, 3, f->dev));
    STEP("pl D, first page unset", cu.advise(a, 4096, 4, f->dev));
    query("  second page", a + 4096, 4096);
    STEP("pl unset", cu.advise(a, all, 4, f->dev));
    STEP("ab D0", cu.advise(a, all, 5, f->dev));
    STEP("ab D0+H", cu.advise(a, all, 5, f->host));
    STEP("ab H", cu.advise(a, all, 6, f->dev));
    STEP("ab none", cu.advise(a, all, 6, f->host));
    STEP("half rm", cu.advise(a, half, 1, f->dev));
    cu.advise(a, half, 2, f->dev);
    STEP("half pl D0", cu.advise(a, half, 3, f->dev));
    cu.advise(a, half, 4, f->dev);
    STEP("half ab D0", cu.advise(a, half, 5, f->dev));
    cu.advise(a, half, 6, f->dev);
    STEP("prefetch H (no sync)", cu.prefetch(a, all, f->host, 0, f->stream));
    STEP("half prefetched D0", cu.prefetch(a, half, f->dev, 0, f->stream));
    STEP("prefetch N0", cu.prefetch(a, all, f->numa, 0, f->stream));
    STEP("prefetch NC", cu.prefetch(a, all, f->numa_current, 0, f->stream));
    STEP("single prefetch D", cu.prefetch(a, all, f->dev, 0, f->stream));
    STEP("prefetch 100 B at +10 to H", cu.prefetch(a + 10, 100, f->host, 0, f->stream));
    query("  the rest", a + 4096, all - 4096);
    STEP("advise 100 B at +10 rm", cu.advise(a + 10, 100, 1, f->dev));
    query("  its page", a, 4096);
    STEP("prefetch D, v8000", cu.prefetch8(a, all, 0, f->stream));
    STEP("prefetch -1, v8000", cu.prefetch8(a, all, CU_DEVICE_CPU, f->stream));
#undef STEP
    report("synchronize", cu.stream_sync(f->stream));
}

static void
topic_prefetch_checks(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), dv = 0, next = 0, block[8];
    void *system = aligned_alloc(4096, M);

    report("device memory", cu.mem_alloc(&dv, M));
    report("prefetch device memory", cu.prefetch(dv, M, f->dev, 0, f->stream));
    report("prefetch device memory, D9", cu.prefetch(dv, M, f->dev9, 0, f->stream));
    report("prefetch device memory, flags 1", cu.prefetch(dv, M, f->dev, 1, f->stream));
    report("prefetch managed, D9", cu.prefetch(a, M, f->dev9, 0, f->stream));
    report("prefetch managed, D9, flags 1", cu.prefetch(a, M, f->dev9, 1, f->stream));
    report("prefetch NONE", cu.prefetch(a, M, f->none, 0, f->stream));
    report("prefetch type 77", cu.prefetch(a, M, f->unknown, 0, f->stream));
    report("prefetch N999", cu.prefetch(a, M, f->numa999, 0, f->stream));
    report("prefetch size 0", cu.prefetch(a, 0, f->dev, 0, f->stream));
    report("prefetch size 0 D9", cu.prefetch(a, 0, f->dev9, 0, f->stream));
    report("prefetch null", cu.prefetch(0, M, f->dev, 0, f->stream));
    report("prefetch flags 1", cu.prefetch(a, M, f->dev, 1, f->stream));
    report("prefetch past end", cu.prefetch(a, 4 * M + 4096, f->dev, 0, f->stream));
    report("prefetch wrap-around", cu.prefetch(a, (size_t)-1, f->dev, 0, f->stream));
    report("prefetch unaligned 100 B at +10", cu.prefetch(a + 10, 100, f->dev, 0, f->stream));
    report("prefetch legacy", cu.prefetch(a, M, f->dev, 0, NULL));
    report("prefetch CU_STREAM_LEGACY", cu.prefetch(a, M, f->dev, 0, CU_STREAM_LEGACY));
    report("prefetch per-thread", cu.prefetch(a, M, f->dev, 0, CU_STREAM_PER_THREAD));
    if (system != NULL) {
        CUdeviceptr s = (CUdeviceptr)(uintptr_t)system;
        memset(system, 1, M);
        report("prefetch malloc'd", cu.prefetch(s, M, f->dev, 0, f->stream));
    }
    report("v8000 prefetch 0", cu.prefetch8(a, M, 0, f->stream));
    report("v8000 prefetch -1", cu.prefetch8(a, M, CU_DEVICE_CPU, f->stream));
    report("v8000 prefetch -2", cu.prefetch8(a, M, CU_DEVICE_INVALID, f->stream));
    report("v8000 prefetch 9", cu.prefetch8(a, M, 9, f->stream));
    for (int i = 0; i < 8; i++) {
        block[i] = managed(2 * M);
    }
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            next = block[i] + 2 * M == block[j] ? block[i] : next;
        }
    }
    value("two adjacent allocations found", next != 0);
    if (next != 0) {
        report("prefetch spanning two", cu.prefetch(next, 4 * M, f->dev, 0, f->stream));
        query("  first", next, 2 * M);
        query("  second", next + 2 * M, 2 * M);
        report("advise spanning two", cu.advise(next, 4 * M, 1, f->dev));
        report("copy spanning two", cu.set8(next, 1, 4 * M, f->stream));
    }
    report("synchronize", cu.stream_sync(f->stream));
    free(system);
}

static void
topic_range_attributes(struct fixture *f)
{
    static const size_t sizes[] = {0, 2, 4, 6, 8, 16};
    CUdeviceptr a = managed(4 * M), b = managed(4 * M), dv = 0;
    int v[4] = {-77, -77, -77, -77}, own = 0;
    char label[64];

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(label, sizeof label, "attr rm dataSize %zu", sizes[i]);
        report(label, cu.range_get(v, sizes[i], 1, a, M));
        snprintf(label, sizeof label, "attr ab dataSize %zu", sizes[i]);
        report(label, cu.range_get(v, sizes[i], 3, a, M));
    }
    report("attr NULL data", cu.range_get(NULL, 4, 1, a, M));
    report("attr count 0", cu.range_get(v, 4, 1, a, 0));
    report("attr past end", cu.range_get(v, 4, 1, a, 4 * M + 1));
    report("attr span two allocations",
           cu.range_get(v, 4, 1, a < b ? a : b, (a < b ? b - a : a - b) + M));
    report("attr attribute 0", cu.range_get(v, 4, 0, a, M));
    report("attr attribute 9", cu.range_get(v, 4, 9, a, M));
    report("attr null", cu.range_get(v, 4, 1, 0, M));
    report("attr of the stack", cu.range_get(v, 4, 1, (CUdeviceptr)(uintptr_t)&own, 4));
    if (cu.mem_alloc(&dv, M) == CUDA_SUCCESS) {
        report("attr of device memory", cu.range_get(v, 4, 1, dv, M));
    }
    report("accessed by D0", cu.advise(a, 4 * M, 5, f->dev));
    report("accessed by H", cu.advise(a, 4 * M, 5, f->host));
    v[0] = v[1] = v[2] = -77;
    report("attr ab into one place", cu.range_get(v, 4, 3, a, M));
    printf("  [%d]\n", v[0]);
    report("attr ab into three places", cu.range_get(v, 12, 3, a, M));
    printf("  [%d %d %d]\n", v[0], v[1], v[2]);
}

static void
topic_range_attributes_plural(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M);
    int got[4] = {-77, -77, -77, -77};
    void *data[4] = {&got[0], &got[1], &got[2], &got[3]};
    size_t sizes[4] = {4, 4, 4, 4}, bad[4] = {4, 3, 4, 4};
    CUmem_range_attribute asked[4] = {CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
                                      CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID,
                                      CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
                                      CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID};

#define PLURAL(label, call)                                          \
    do {                                                             \
        report(label, call);                                         \
        printf("  [%d %d %d %d]\n", got[0], got[1], got[2], got[3]); \
        got[0] = got[1] = got[2] = got[3] = -77;                     \
    } while (0)
    PLURAL("fresh", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    cu.advise(a, 4 * M, 3, f->host);
    PLURAL("pl H", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    cu.advise(a, 4 * M, 3, f->dev);
    cu.prefetch(a, 4 * M, f->host, 0, f->stream);
    PLURAL("pl D, prefetched H", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    cu.prefetch(a, 4 * M, f->dev, 0, f->stream);
    PLURAL("prefetched D", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    cu.prefetch(a, 2 * M, f->numa, 0, f->stream);
    PLURAL("half prefetched N0", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    PLURAL("zero attributes", cu.range_get_all(data, sizes, asked, 0, a, 4 * M));
    PLURAL("NULL data", cu.range_get_all(NULL, sizes, asked, 4, a, 4 * M));
    PLURAL("NULL sizes", cu.range_get_all(data, NULL, asked, 4, a, 4 * M));
    PLURAL("NULL attributes", cu.range_get_all(data, sizes, NULL, 4, a, 4 * M));
    PLURAL("second size 3", cu.range_get_all(data, bad, asked, 4, a, 4 * M));
    asked[1] = (CUmem_range_attribute)99;
    PLURAL("second attribute 99", cu.range_get_all(data, sizes, asked, 4, a, 4 * M));
    PLURAL("count 0", cu.range_get_all(data, sizes, asked, 1, a, 0));
    PLURAL("past end", cu.range_get_all(data, sizes, asked, 1, a, 4 * M + 1));
#undef PLURAL
    report("synchronize", cu.stream_sync(f->stream));
}

static const struct topic topics[] = {
    {"lookup", topic_lookup, true, 0, 0},
    {"before cuInit", topic_before_init, true, 0, 0},
    {"devices", topic_devices, false, 1, 0},
    {"contexts", topic_contexts, false, 1, 0},
    {"allocation", topic_allocation, false, 1, 0},
    {"small allocations", topic_small_allocations, false, 1, 13000},
    {"advise checks", topic_advise_checks, false, 1, 0},
    {"advise matrix", topic_advise_matrix, false, 1, 0},
    {"ignored locations", topic_ignored_locations, false, 1, 0},
    {"read-back", topic_read_back, false, 1, 0},
    {"records", topic_records, false, 1, 0},
    {"queries of records", topic_record_queries, false, 1, 0},
    {"records of freed memory", topic_freed_records, false, 1, 0},
    {"prefetch checks", topic_prefetch_checks, false, 1, 0},
    {"range attributes", topic_range_attributes, false, 1, 0},
    {"range attributes, plural", topic_range_attributes_plural, false, 1, 0},
    {"batch", topic_batch, false, 1, 13000},
    {"batch to hosts", topic_batch_hosts, false, 1, 13000},
    {"batch checks", topic_batch_checks, false, 1, 13000},
    {"discarded bytes", topic_discarded_bytes, false, 1, 13000},
    {"page map", topic_page_map, false, 1, 0},
    {"no context", topic_no_context, false, 1, 13000},
    {"streams and events", topic_streams, false, 1, 0},
    {"stream order", topic_stream_order, false, 1, 13000},
    {"busy streams", topic_busy_streams, false, 1, 0},
    {"copies and fills", topic_copies, false, 1, 0},
    {"attach", topic_attach, false, 1, 0},
    {"attach, odd ranges", topic_attach_ranges, false, 1, 0},
    {"capture", topic_capture, false, 1, 13000},
    {"capture, each call alone", topic_capture_alone, false, 1, 13000},
    {"capture in a blocking stream", topic_capture_blocking, false, 1, 0},
    {"capture in a non-blocking stream", topic_capture_non_blocking, false, 1, 0},
    {"capture and the legacy stream", topic_capture_legacy, false, 1, 0},
    {"capture mode", topic_capture_mode, false, 1, 0},
    {"pointer attributes", topic_pointers, false, 1, 0},
    {"pointer attributes, plural", topic_pointers_plural, false, 1, 0},
    {"managed pools", topic_managed_pools, false, 1, 13000},
    {"frees of pools", topic_pool_frees, false, 1, 13000},
    {"pool attributes and access", topic_pools, false, 1, 13000},
    {"two devices: accessed by", topic_pair_accessed_by, false, 2, 0},
    {"two devices: prefetch", topic_pair_prefetch, false, 2, 13000},
    {"two devices: pool access", topic_pair_pools, false, 2, 13000},
    {"two devices: contexts", topic_pair_contexts, false, 2, 0},
    {"two devices: copies of pool memory", topic_pair_copies, false, 2, 13000},
    {"two devices: work without access", topic_pair_no_access, false, 2, 13000},
    {"two devices: new pools", topic_pair_new_pools, false, 2, 13000},
    {"pinned memory", topic_pinned, false, 1, 0},
    {"pinned memory of no bytes", topic_pinned_empty, false, 1, 0},
    {"pinned memory in a capture", topic_pinned_capture, false, 1, 0},
    {"locations", topic_locations, false, 1, 13040},
    {"locations in captures and of system memory", topic_locations_elsewhere, false, 1, 13040},
};

int
main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s LIBRARY [TOPIC]\n", argv[0]);
        return 2;
    }
    return run_topics(argv[1], topics, sizeof topics / sizeof *topics, argc > 2 ? argv[2] : NULL);
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
