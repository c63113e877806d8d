/* Conformance cases of pointer attributes and of memory pools. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t M = MIB;

static void
show_pointer(const char *label, CUdeviceptr ptr)
{
    int is_managed = -1, type = -1, ordinal = -1;
    CUdeviceptr start = ptr, dev = 0;
    void *host = NULL;
    size_t size = 0;
    CUresult r[7];

    r[0] = cu.pointer_get(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr);
    r[1] = cu.pointer_get(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr);
    r[2] = cu.pointer_get(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr);
    r[3] = cu.pointer_get(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr);
    r[4] = cu.pointer_get(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr);
    r[5] = cu.pointer_get(&dev, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ptr);
    r[6] = cu.pointer_get(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, ptr);
    printf("%s: managed %d type %d ordinal %d start %+lld size %zu\n", label, is_managed, type,
           ordinal, (long long)(start - ptr), size);
    printf("%s: codes %d %d %d %d %d %d %d device pointer is it %d host pointer is it %d\n", label,
           (int)r[0], (int)r[1], (int)r[2], (int)r[3], (int)r[4], (int)r[5], (int)r[6], dev == ptr,
           (CUdeviceptr)(uintptr_t)host == ptr);
}

void
topic_pointers(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), dv = 0, gone = managed(M);
    CUcontext ctx = NULL;
    CUmemoryPool pool = (CUmemoryPool)(uintptr_t)1;
    unsigned long long id = 0, id2 = 0;
    unsigned int flag = 99;
    void *pinned = NULL, *system = malloc(4096);
    int v = -77;

    show_pointer("alloc", a);
    show_pointer("alloc, inside", a + 100);
    show_pointer("alloc, last byte", a + 4 * M - 1);
    cu.prefetch(a, 4 * M, f->host, 0, f->stream);
    cu.stream_sync(f->stream);
    show_pointer("alloc, prefetched H", a);
    report("context", cu.pointer_get(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, a));
    value("  is the primary", ctx == f->ctx);
    report("buffer id", cu.pointer_get(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, a));
    report("buffer id of another", cu.pointer_get(&id2, CU_POINTER_ATTRIBUTE_BUFFER_ID, gone));
    value("  they differ", id != id2);
    report("sync memops", cu.pointer_get(&flag, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, a));
    value("  flag", flag);
    report("mapped", cu.pointer_get(&v, CU_POINTER_ATTRIBUTE_MAPPED, a));
    value("  flag", v);
    report("pool handle", cu.pointer_get(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, a));
    value("  is NULL", pool == NULL);
    report("attribute 0", cu.pointer_get(&v, (CUpointer_attribute)0, a));
    report("attribute 99", cu.pointer_get(&v, (CUpointer_attribute)99, a));
    report("into NULL", cu.pointer_get(NULL, CU_POINTER_ATTRIBUTE_IS_MANAGED, a));
    if (cu.mem_alloc(&dv, M) == CUDA_SUCCESS) {
        show_pointer("device", dv);
    }
    if (cu.alloc_host(&pinned, 4096) == CUDA_SUCCESS) {
        show_pointer("pinned", (CUdeviceptr)(uintptr_t)pinned);
        report("free pinned", cu.free_host(pinned));
    }
    show_pointer("malloc'd", (CUdeviceptr)(uintptr_t)system);
    show_pointer("NULL", 0);
    report("free", cu.mem_free(gone));
    show_pointer("freed", gone);
    free(system);
}

static void
show_plural(const char *label, CUdeviceptr ptr)
{
    int is_managed = -1, type = -1, ordinal = -77;
    CUdeviceptr start = 1;    /* what the driver leaves alone shows */
    size_t size = 1;
    CUpointer_attribute asked[] = {
        CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *data[] = {&is_managed, &type, &start, &size, &ordinal};
    CUresult result = cu.pointer_get_all(5, asked, data, ptr);

    printf("%-24s %d managed %d type %d ordinal %d", label, (int)result, is_managed, type,
           ordinal);
    if (start <= 1) {
        printf(" start %s size %s\n", start == 1 ? "untouched" : "zero",
               size == 1 ? "untouched" : "zero");
    } else {
        printf(" start %+lld size %zu\n", (long long)(start - ptr), size);
    }
}

void
topic_pointers_plural(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), dv = 0, gone = managed(M), small = managed(100);
    void *pinned = NULL, *system = malloc(4096);
    int v = -77;
    void *data[2] = {&v, &v};
    CUpointer_attribute asked[2] = {CU_POINTER_ATTRIBUTE_IS_MANAGED, (CUpointer_attribute)99};

    (void)f;
    show_plural("managed", a);
    show_plural("managed, inside", a + 5000);
    show_plural("managed, 100 bytes", small);
    show_plural("managed, after the 100", small + 100);
    if (cu.mem_alloc(&dv, M) == CUDA_SUCCESS) {
        show_plural("device", dv);
    }
    if (cu.alloc_host(&pinned, 4096) == CUDA_SUCCESS) {
        show_plural("pinned", (CUdeviceptr)(uintptr_t)pinned);
    }
    show_plural("malloc'd", (CUdeviceptr)(uintptr_t)system);
    show_plural("NULL", 0);
    report("free", cu.mem_free(gone));
    show_plural("freed", gone);
    report("zero attributes", cu.pointer_get_all(0, asked, data, a));
    report("NULL attributes", cu.pointer_get_all(1, NULL, data, a));
    report("NULL data", cu.pointer_get_all(1, asked, NULL, a));
    report("second attribute 99", cu.pointer_get_all(2, asked, data, a));
    value("  first", v);
    cu.ctx_set(NULL);
    show_plural("managed, no context", a);
    free(system);
}

static void
show_managed_pool(struct fixture *f, CUmemoryPool pool)
{
    CUdeviceptr x = 0, y = 0;
    CUmemAccessDesc access = {f->dev, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t size = 100;
    CUmemoryPool of = NULL;
    CUstream s = f->stream;

    report("alloc x", cu.pool_alloc(&x, size, pool, s));
    report("alloc y", cu.pool_alloc(&y, size, pool, s));
    value("y - x", (long long)(y - x));
    report("pool handle of x", cu.pointer_get(&of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, x));
    value("  is the pool", of == pool);
    show_pointer("pool", x);
    for (int advice = 1; advice <= 6; advice++) {
        char label[32];
        snprintf(label, sizeof label, "pool advise %d", advice);
        report(label, cu.advise(x, size, (CUmem_advise)advice, f->dev));
    }
    report("pool advise 99", cu.advise(x, size, (CUmem_advise)99, f->dev));
    report("pool advise pl D9", cu.advise(x, size, 3, f->dev9));
    query("pool memory", x, size);
    report("pool prefetch", cu.prefetch(x, size, f->dev, 0, s));
    query("pool, prefetched", x, size);
    query("neighbour", y, size);
    memset((void *)(uintptr_t)x, 3, size);
    report("pool set access", cu.pool_set_access(pool, &access, 1));
    report("pool prefetch 4096 of 100", cu.prefetch(x, 4096, f->dev, 0, s));
    report("pool discard", cu.discard_batch(&x, &size, 1, 0, s));
    report("cuMemFree of pool memory", cu.mem_free(x));
    report("cuMemFreeAsync", cu.free_async(y, s));
    report("cuMemFreeAsync again", cu.free_async(y, s));
    report("synchronize", cu.stream_sync(s));
}

static void
show_left(const char *label, CUmemoryPool pool)
{
    cuuint64_t reserved = 0, used = 0;

    report(label, cu.pool_trim(pool, 0));
    cu.pool_get(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved);
    cu.pool_get(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
    printf("  reserved is %s used %llu\n", reserved == 0 ? "zero," : "more,",
           (unsigned long long)used);
}

/* A pool counts its memory as unused only after a wait that follows the free. The pool is destroyed
 * after all frees, because driver 580 crashes behind a queued one (probes/pool_end.c). */
void
topic_pool_frees(struct fixture *f)
{
    CUmemPoolProps props;
    CUmemoryPool pool = NULL;
    CUdeviceptr x = 0;
    CUevent event = NULL;
    CUstream streams[] = {NULL, f->stream};
    cuuint64_t keep = UINT64_MAX;

    for (size_t i = 0; i < 4; i++) {
        CUstream s = streams[i % 2];
        memset(&props, 0, sizeof props);
        props.allocType = i < 2 ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location = i < 2 ? f->host : f->dev;
        printf("%s pool, %s stream\n", i < 2 ? "managed" : "device", s ? "own" : "legacy");
        report("create", cu.pool_create(&pool, &props));
        cu.pool_set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
        cu.event_create(&event, CU_EVENT_DISABLE_TIMING);
        report("allocate", cu.pool_alloc(&x, 4096, pool, s));
        show_left("trim", pool);
        cu.host_func(s, nap, (void *)(uintptr_t)40000);
        report("free", cu.free_async(x, s));
        cu.event_record(event, s);
        show_left("trim, free queued", pool);
        while (cu.event_query(event) == CUDA_ERROR_NOT_READY) {
        }
        show_left("trim, free has run", pool);
        report("event synchronize", cu.event_sync(event));
        show_left("trim, waited", pool);
        report("destroy", cu.pool_destroy(pool));
        cu.event_destroy(event);
    }
}

void
topic_managed_pools(struct fixture *f)
{
    CUmemPoolProps props;
    CUmemoryPool pool = NULL, other = NULL, current = NULL;
    CUmemAllocationType type = CU_MEM_ALLOCATION_TYPE_MANAGED;
    CUdeviceptr a = managed(M);

    memset(&props, 0, sizeof props);
    props.allocType = type;
    report("pool NONE", cu.pool_create(&pool, &props));
    props.maxSize = M;
    report("pool maxSize", cu.pool_create(&other, &props));
    props.maxSize = 0;
    props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    report("pool handle type fd", cu.pool_create(&other, &props));
    props.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
    show_managed_pool(f, pool);
    report("free_async of plain managed memory", cu.free_async(a, f->stream));
    report("destroy", cu.pool_destroy(pool));
    props.location = f->dev;
    report("managed pool loc D0", cu.pool_create(&pool, &props));
    props.location = f->numa;
    report("managed pool loc N0", cu.pool_create(&pool, &props));
    props.location = f->host;
    report("managed pool loc H", cu.pool_create(&pool, &props));
    props.location = f->numa_current;
    report("managed pool loc NC", cu.pool_create(&pool, &props));
    props.location = f->dev9;
    report("managed pool loc D9", cu.pool_create(&other, &props));
    props.allocType = CU_MEM_ALLOCATION_TYPE_INVALID;
    report("pool type 0", cu.pool_create(&other, &props));
    report("default managed pool H", cu.pool_default(&pool, &f->host, type));
    report("default managed pool NONE", cu.pool_default(&pool, &f->none, type));
    report("default managed pool D0", cu.pool_default(&pool, &f->dev, type));
    report("default managed pool N0", cu.pool_default(&pool, &f->numa, type));
    report("default managed pool D9", cu.pool_default(&other, &f->dev9, type));
    report("default pool NULL", cu.pool_default(NULL, &f->dev, type));
    report("default pool NULL location", cu.pool_default(&other, NULL, type));
    report("default pool type 0",
           cu.pool_default(&other, &f->dev, CU_MEM_ALLOCATION_TYPE_INVALID));
    report("default pool pinned NONE",
           cu.pool_default(&other, &f->none, CU_MEM_ALLOCATION_TYPE_PINNED));
    report("current managed pool D0", cu.pool_current(&current, &f->dev, type));
    value("  is the default", current == pool || current != NULL);
    report("destroy the default", cu.pool_destroy(pool));
    memset(&props, 0, sizeof props);
    props.allocType = type;
    props.location = f->dev;
    report("managed pool loc D0", cu.pool_create(&other, &props));
    report("make it current", cu.pool_set_current(&f->dev, type, other));
    report("current", cu.pool_current(&current, &f->dev, type));
    value("  is it", current == other);
    report("make it current elsewhere", cu.pool_set_current(&f->host, type, other));
    report("make NULL current", cu.pool_set_current(&f->dev, type, NULL));
}

static void
show_pool_numbers(const char *label, CUmemoryPool pool)
{
    printf("%s:", label);
    for (int attribute = 1; attribute <= 8; attribute++) {
        cuuint64_t got = 0;
        CUresult result = cu.pool_get(pool, (CUmemPool_attribute)attribute, &got);

        /* How much a pool reserves is the driver's affair: only whether it does. */
        if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
            || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
            got = got != 0;
        }
        if (attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES) {
            got &= 0xffffffffu;
        }
        printf(" %d:%llu%s", attribute, (unsigned long long)got,
               result == CUDA_SUCCESS ? "" : "(err)");
    }
    printf("\n");
}

static void
show_pool(struct fixture *f, CUmemAllocationType type)
{
    CUmemPoolProps props;
    CUmemoryPool pool = NULL;
    CUdeviceptr x = 0;
    cuuint64_t number = 1;
    int off = 0;
    CUmemAccess_flags flags = (CUmemAccess_flags)99;

    memset(&props, 0, sizeof props);
    props.allocType = type;
    props.location = type == CU_MEM_ALLOCATION_TYPE_PINNED ? f->dev : f->none;
    report("create", cu.pool_create(&pool, &props));
    show_pool_numbers("fresh", pool);
    report("alloc", cu.pool_alloc(&x, 100, pool, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    show_pool_numbers("100 bytes allocated", pool);
    report("free", cu.free_async(x, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    show_pool_numbers("freed", pool);
    number = 1u << 20;
    report("set release threshold", cu.pool_set(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &number));
    report("set reuse", cu.pool_set(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &off));
    number = 1;
    report("set used high to 1", cu.pool_set(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &number));
    report("set used now", cu.pool_set(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &number));
    number = 0;
    report("set used high to 0", cu.pool_set(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &number));
    show_pool_numbers("after it", pool);
    report("get attribute 99", cu.pool_get(pool, (CUmemPool_attribute)99, &number));
    report("trim", cu.pool_trim(pool, 0));
    x = 1;
    report("alloc of nothing", cu.pool_alloc(&x, 0, pool, f->stream));
    printf("  gives %s\n", x == 0 ? "NULL" : x == 1 ? "nothing" : "an address");
    report("alloc from NULL", cu.pool_alloc(&x, 100, NULL, f->stream));
    report("access of D0", cu.pool_get_access(&flags, pool, &f->dev));
    value("  flags", (long long)flags);
    report("access of H", cu.pool_get_access(&flags, pool, &f->host));
    value("  flags", (long long)flags);
    report("destroy", cu.pool_destroy(pool));
    report("destroy NULL", cu.pool_destroy(NULL));
}

void
topic_pools(struct fixture *f)
{
    CUdeviceptr x = 0;
    int is_managed = -1;

    printf("device pool\n");
    show_pool(f, CU_MEM_ALLOCATION_TYPE_PINNED);
    printf("managed pool\n");
    show_pool(f, CU_MEM_ALLOCATION_TYPE_MANAGED);
    report("cuMemAllocAsync", cu.alloc_async(&x, 4096, f->stream));
    report("is managed", cu.pointer_get(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, x));
    value("  flag", is_managed);
    report("cuMemFreeAsync", cu.free_async(x, f->stream));
    report("cuMemAllocAsync, legacy", cu.alloc_async(&x, 4096, NULL));
    report("cuMemFreeAsync, legacy", cu.free_async(x, NULL));
    report("synchronize", cu.ctx_sync());
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
