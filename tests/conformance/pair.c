/* Conformance cases that need two devices. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const size_t M = MIB;

static CUmemLocation
device_place(int ordinal)
{
    return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
}

static CUcontext
second_context(void)
{
    CUdevice device = 0;
    CUcontext ctx = NULL;

    report("context of device 1", cu.device_get(&device, 1) != CUDA_SUCCESS
                                      ? CUDA_ERROR_INVALID_DEVICE
                                      : cu.primary_retain(&ctx, device));
    return ctx;
}

void
topic_pair_accessed_by(struct fixture *f)
{
    CUmemLocation d0 = device_place(0), d1 = device_place(1), absent = device_place(f->devices);
    size_t size = 64 * M;
    CUdeviceptr a = managed(size);
    int can = -1, two[2] = {-77, -77};

    cu.can_access_peer(&can, 0, 1);
    printf("can access peer 0->1 %d\n", can);
    report("ab 1", cu.advise(a, size, 5, d1));
    query("ab 1", a, size);
    report("ab 0", cu.advise(a, size, 5, d0));
    query("ab 1,0", a, size);
    report("ab H", cu.advise(a, size, 5, f->host));
    query("ab 1,0,H", a, size);
    cu.range_get(two, sizeof two, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, a, size);
    printf("  two places [%d %d]\n", two[0], two[1]);
    report("half unset 0", cu.advise(a, size / 2, 6, d0));
    query("half", a, size);
    report("unset 0", cu.advise(a, size, 6, d0));
    query("ab 1,H", a, size);
    report("unset 1", cu.advise(a, size, 6, d1));
    report("unset H", cu.advise(a, size, 6, f->host));
    report("ab dev nd", cu.advise(a, size, 5, absent));
    report("pl 1", cu.advise(a, size, 3, d1));
    query("pl 1", a, size);
    report("pl unset", cu.advise(a, size, 4, d0));
    query("pl unset with D0", a, size);
    report("free", cu.mem_free(a));
}

void
topic_pair_prefetch(struct fixture *f)
{
    size_t size = 64 * M, sizes[4], indices[4];
    CUdeviceptr a = managed(size), parts[4];
    CUmemLocation places[4];
    CUcontext ctx = second_context();
    CUstream other;

    cu.ctx_set(ctx);
    other = new_stream(CU_STREAM_NON_BLOCKING);
    cu.ctx_set(f->ctx);
    memset((void *)(uintptr_t)a, 1, size);
    cu.prefetch(a, size, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    report("prefetch 0->1 on stream of 0", cu.prefetch(a, size, device_place(1), 0, f->stream));
    cu.stream_sync(f->stream);
    query("on 1", a, size);
    report("prefetch 1->0 on stream of 1", cu.prefetch(a, size, f->dev, 0, other));
    cu.stream_sync(other);
    query("after", a, size);
    for (int i = 0; i < 4; i++) {
        parts[i] = a + (size_t)i * 16 * M;
        sizes[i] = 16 * M;
        places[i] = device_place(i % 2);
        indices[i] = (size_t)i;
    }
    report("batch to two devices",
           cu.prefetch_batch(parts, sizes, 4, places, indices, 4, 0, f->stream));
    cu.stream_sync(f->stream);
    query("q0", parts[0], sizes[0]);
    query("q1", parts[1], sizes[1]);
    printf("byte %d\n", *(volatile unsigned char *)(uintptr_t)parts[1]);
    report("prefetch to absent device", cu.prefetch(a, M, device_place(f->devices), 0, f->stream));
    report("discard on stream of 1", cu.discard_batch(parts, sizes, 1, 0, other));
    cu.stream_sync(other);
    report("free", cu.mem_free(a));
}

void
topic_pair_pools(struct fixture *f)
{
    CUmemoryPool pool = NULL;
    CUmemPoolProps props;
    CUmemAccess_flags flags = (CUmemAccess_flags)99;
    CUmemLocation d1 = device_place(1);
    CUmemAccessDesc other = {d1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemAccessDesc owner = {f->dev, CU_MEM_ACCESS_FLAGS_PROT_NONE};

    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = f->dev;
    report("device pool", cu.pool_create(&pool, &props));
    report("get access 1", cu.pool_get_access(&flags, pool, &d1));
    printf("  flags %d\n", (int)flags);
    report("set access 1 rw", cu.pool_set_access(pool, &other, 1));
    report("get access 1", cu.pool_get_access(&flags, pool, &d1));
    printf("  flags %d\n", (int)flags);
    report("set owner none", cu.pool_set_access(pool, &owner, 1));
    owner.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    report("set owner rw", cu.pool_set_access(pool, &owner, 1));
    owner.location = device_place(f->devices);
    report("set absent device", cu.pool_set_access(pool, &owner, 1));
    other.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    report("revoke 1", cu.pool_set_access(pool, &other, 1));
    report("get H", cu.pool_get_access(&flags, pool, &f->host));
    printf("  flags %d\n", (int)flags);
    report("destroy", cu.pool_destroy(pool));
    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED;
    report("managed pool", cu.pool_create(&pool, &props));
    report("managed get access 1", cu.pool_get_access(&flags, pool, &d1));
    printf("  flags %d\n", (int)flags);
    report("managed get access H", cu.pool_get_access(&flags, pool, &f->host));
    printf("  flags %d\n", (int)flags);
    report("managed revoke 1", cu.pool_set_access(pool, &other, 1));
    report("destroy", cu.pool_destroy(pool));
}

static CUmemoryPool
device_pool(int ordinal)
{
    CUmemPoolProps props;
    CUmemoryPool pool = NULL;

    memset(&props, 0, sizeof props);
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = device_place(ordinal);
    cu.pool_create(&pool, &props);
    return pool;
}

/* What streams of device 1 may do with memory x of device 0, with either context current. */
static void
show_pool_copies(const char *label, struct fixture *f, CUcontext ctx, CUstream other,
                 CUdeviceptr x, CUdeviceptr theirs)
{
    static char host[4096];
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)host;

    printf("%s\n", label);
    cu.ctx_set(ctx);
    report("ctx 1, stream 1: x to theirs", cu.copy_async(theirs, x, sizeof host, other));
    report("ctx 1, stream 1: theirs to x", cu.copy_async(x, theirs, sizeof host, other));
    report("ctx 1, stream 1: x to host", cu.copy_async(at, x, sizeof host, other));
    report("ctx 1, stream 1: host to x", cu.copy_async(x, at, sizeof host, other));
    report("ctx 1, legacy: x to theirs", cu.copy_async(theirs, x, sizeof host, NULL));
    report("ctx 1, stream 0: x to host", cu.copy_async(at, x, sizeof host, f->stream));
    report("ctx 1, stream 0: fill x", cu.set8(x, 1, sizeof host, f->stream));
    cu.ctx_set(f->ctx);
    report("ctx 0, stream 0: x to theirs", cu.copy_async(theirs, x, sizeof host, f->stream));
    report("ctx 0, stream 0: fill x", cu.set8(x, 2, sizeof host, f->stream));
    report("synchronize 0", cu.stream_sync(f->stream));
    report("synchronize 1", cu.stream_sync(other));
}

void
topic_pair_copies(struct fixture *f)
{
    CUmemoryPool pool = device_pool(0);
    CUmemAccessDesc access = {device_place(1), CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr x = 0, theirs = 0;
    CUcontext ctx = second_context();
    CUstream other;

    cu.ctx_set(ctx);
    other = new_stream(CU_STREAM_NON_BLOCKING);
    report("memory of device 1", cu.mem_alloc(&theirs, M));
    cu.ctx_set(f->ctx);
    report("alloc x", cu.pool_alloc(&x, M, pool, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    show_pool_copies("no access", f, ctx, other, x, theirs);
    report("let in 1", cu.pool_set_access(pool, &access, 1));
    show_pool_copies("access", f, ctx, other, x, theirs);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    report("put out 1", cu.pool_set_access(pool, &access, 1));
    show_pool_copies("no access again", f, ctx, other, x, theirs);
    report("free on stream 1", cu.free_async(x, other));
    report("synchronize", cu.stream_sync(other));
    report("destroy", cu.pool_destroy(pool));
}

/* By themselves: whether these are refused, or end the context. */
void
topic_pair_no_access(struct fixture *f)
{
    CUmemoryPool pool = device_pool(0);
    CUdeviceptr x = 0, theirs = 0;
    CUcontext ctx = second_context();
    CUstream other;

    report("alloc x", cu.pool_alloc(&x, M, pool, f->stream));
    report("synchronize", cu.stream_sync(f->stream));
    cu.ctx_set(ctx);
    other = new_stream(CU_STREAM_NON_BLOCKING);
    report("memory of device 1", cu.mem_alloc(&theirs, M));
    report("ctx 1, stream 1: fill x", cu.set8(x, 1, M, other));
    report("synchronize", cu.stream_sync(other));
    cu.ctx_set(f->ctx);
    report("ctx 0, stream 1: x to theirs", cu.copy_async(theirs, x, M, other));
    report("synchronize", cu.stream_sync(other));
}

/* A destroyed pool's peers on the next pool: a known fault of drivers. */
void
topic_pair_new_pools(struct fixture *f)
{
    CUmemAccessDesc access[2] = {{device_place(1), CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                                 {f->dev, CU_MEM_ACCESS_FLAGS_PROT_NONE}};
    CUmemAccess_flags flags = (CUmemAccess_flags)99;

    for (int i = 0; i < 3; i++) {
        CUmemoryPool pool = device_pool(0);
        report("get access 1", cu.pool_get_access(&flags, pool, &access[0].location));
        printf("  flags %d\n", (int)flags);
        report("a map that is half bad", cu.pool_set_access(pool, access, 2));
        cu.pool_get_access(&flags, pool, &access[0].location);
        printf("  flags %d\n", (int)flags);
        report("let in 1", cu.pool_set_access(pool, access, 1));
        report("destroy", cu.pool_destroy(pool));
    }
}

void
topic_pair_contexts(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), b;
    CUcontext ctx = second_context();
    int ordinal = -1;

    report("make it current", cu.ctx_set(ctx));
    report("ctx 1 current, prefetch to 0 on legacy", cu.prefetch(a, M, f->dev, 0, NULL));
    report("ctx 1 current, advise", cu.advise(a, M, 5, f->dev));
    b = managed(4 * M);
    report("ordinal of its memory",
           cu.pointer_get(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, b));
    value("  ordinal", ordinal);
    report("prefetch to 1 on a stream of 0", cu.prefetch(b, M, device_place(1), 0, f->stream));
    query("  it", b, M);
    report("synchronize", cu.ctx_sync());
    report("free from the other ctx", cu.mem_free(a));
    report("make context 0 current", cu.ctx_set(f->ctx));
    report("free", cu.mem_free(b));
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */
