/* Conformance cases of the batch calls, of discard, and of what discarded bytes read as. */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t M = MIB;

static int
byte_at(CUdeviceptr ptr)
{
    return *(volatile unsigned char *)(uintptr_t)ptr;
}

static void
fill(CUdeviceptr ptr, int with, size_t size)
{
    memset((void *)(uintptr_t)ptr, with, size);
}

void
topic_batch(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), p[8];
    size_t size = 4 * M, zero = 0, s[8], halves[2] = {0, 4};
    CUmemLocation two[2] = {f->dev, f->host};

    query("fresh", a, size);
    report("batch H", cu.prefetch_batch(&a, &size, 1, &f->host, &zero, 1, 0, f->stream));
    query("after batch H", a, size);
    report("discard", cu.discard_batch(&a, &size, 1, 0, f->stream));
    query("after discard", a, size);
    report("discard+prefetch D",
           cu.discard_prefetch(&a, &size, 1, &f->dev, &zero, 1, 0, f->stream));
    query("after discard+prefetch D", a, size);
    report("batch N0", cu.prefetch_batch(&a, &size, 1, &f->numa, &zero, 1, 0, f->stream));
    query("after batch N0", a, size);
    report("batch NC", cu.prefetch_batch(&a, &size, 1, &f->numa_current, &zero, 1, 0, f->stream));
    query("after batch NC", a, size);
    for (size_t i = 0; i < 8; i++) {
        p[i] = a + i * (M / 2);
        s[i] = M / 2;
    }
    report("batch of 8 to D", cu.prefetch_batch(p, s, 8, &f->dev, &zero, 1, 0, f->stream));
    query("after batch of 8", a, size);
    report("batch of 8, half to D, half to H",
           cu.prefetch_batch(p, s, 8, two, halves, 2, 0, f->stream));
    query("first half", a, 2 * M);
    query("second half", a + 2 * M, 2 * M);
    report("batch of one 100 B at +10", cu.prefetch_batch((CUdeviceptr[]){a + 10}, (size_t[]){100},
                                                          1, &f->host, &zero, 1, 0, f->stream));
    query("its page", a, 4096);
    query("the next page", a + 4096, 4096);
    report("discard of 8", cu.discard_batch(p, s, 8, 0, f->stream));
    report("discard+prefetch of 8", cu.discard_prefetch(p, s, 8, &f->dev, &zero, 1, 0, f->stream));
    report("set rm", cu.advise(a, size, 1, f->dev));
    report("set ab H", cu.advise(a, size, 5, f->host));
    report("discard with policies", cu.discard_batch(&a, &size, 1, 0, f->stream));
    query("after discard with policies", a, size);
    report("synchronize", cu.stream_sync(f->stream));
}

/* Which number of the host each call leaves in the driver's records, and whether a query of the
 * pages of all three calls joins them. */
void
topic_batch_hosts(struct fixture *f)
{
    const int numbers[] = {-1, 5};

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        CUmemLocation host = {.type = CU_MEM_LOCATION_TYPE_HOST, .id = numbers[i]};
        CUdeviceptr a = managed(3 * M), b = a + M;
        size_t size = M, zero = 0;

        printf("host %d\n", numbers[i]);
        report("batch", cu.prefetch_batch(&a, &size, 1, &host, &zero, 1, 0, f->stream));
        report("discard+prefetch",
               cu.discard_prefetch(&b, &size, 1, &host, &zero, 1, 0, f->stream));
        report("single", cu.prefetch(a + 2 * M, M, host, 0, f->stream));
        query("after batch", a, M);
        query("after discard+prefetch", b, M);
        query("after single", a + 2 * M, M);
        query("after all", a, 3 * M);
    }
    report("synchronize", cu.stream_sync(f->stream));
}

void
topic_batch_checks(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), b = managed(4 * M), dv = 0;
    CUdeviceptr p[3] = {a, b, a + M}, bad[3] = {a, 0, b};
    size_t s[3] = {4 * M, 4 * M, M}, s0[3] = {4 * M, 0, M}, one = 0;
    size_t i0[2] = {0, 1}, i1[2] = {1, 2}, i2[2] = {0, 0}, i3[2] = {0, 2}, i4[3] = {0, 1, 1};
    CUmemLocation two[3] = {f->dev, f->host, f->dev}, odd[2] = {f->dev, f->dev9};
    CUstream st = f->stream;

    report("device memory", cu.mem_alloc(&dv, 4 * M));
    bad[1] = dv;
    report("batch flags 1", cu.prefetch_batch(p, s, 2, &f->dev, &one, 1, 1, st));
    report("batch numLocs 0", cu.prefetch_batch(p, s, 2, &f->dev, &one, 0, 0, st));
    report("batch idx0 = 1", cu.prefetch_batch(p, s, 2, two, i1, 2, 0, st));
    report("batch idx not increasing", cu.prefetch_batch(p, s, 2, two, i2, 2, 0, st));
    query("  first", a, 4 * M);
    query("  second", b, 4 * M);
    report("batch idx not increasing, of 3", cu.prefetch_batch(p, s, 3, two, i4, 3, 0, st));
    report("batch idx == count", cu.prefetch_batch(p, s, 2, two, i3, 2, 0, st));
    report("batch numLocs > count", cu.prefetch_batch(p, s, 1, two, i0, 2, 0, st));
    report("batch zero-size element", cu.prefetch_batch(p, s0, 2, &f->dev, &one, 1, 0, st));
    report("batch overlapping elements", cu.prefetch_batch(p, s, 3, &f->dev, &one, 1, 0, st));
    cu.prefetch(a, 4 * M, f->host, 0, st);
    cu.prefetch(b, 4 * M, f->host, 0, st);
    report("batch bad element in the middle",
           cu.prefetch_batch(bad, s, 3, &f->dev, &one, 1, 0, st));
    query("  first element after it", a, 4 * M);
    query("  last element after it", b, 4 * M);
    report("batch bad second location", cu.prefetch_batch(p, s, 2, odd, i0, 2, 0, st));
    query("  first element after it", a, 4 * M);
    report("batch count 0", cu.prefetch_batch(p, s, 0, &f->dev, &one, 1, 0, st));
    report("batch null pointers", cu.prefetch_batch(NULL, s, 1, &f->dev, &one, 1, 0, st));
    report("batch null sizes", cu.prefetch_batch(p, NULL, 1, &f->dev, &one, 1, 0, st));
    report("batch null locations", cu.prefetch_batch(p, s, 1, NULL, &one, 1, 0, st));
    report("batch null indices", cu.prefetch_batch(p, s, 1, &f->dev, NULL, 1, 0, st));
    report("batch NONE", cu.prefetch_batch(p, s, 1, &f->none, &one, 1, 0, st));
    report("batch N999", cu.prefetch_batch(p, s, 1, &f->numa999, &one, 1, 0, st));
    report("batch D9", cu.prefetch_batch(p, s, 1, &f->dev9, &one, 1, 0, st));
    report("batch null stream", cu.prefetch_batch(p, s, 1, &f->dev, &one, 1, 0, NULL));
    report("batch CU_STREAM_LEGACY",
           cu.prefetch_batch(p, s, 1, &f->dev, &one, 1, 0, CU_STREAM_LEGACY));
    report("batch per-thread",
           cu.prefetch_batch(p, s, 1, &f->dev, &one, 1, 0, CU_STREAM_PER_THREAD));
    report("discard count 0", cu.discard_batch(p, s, 0, 0, st));
    report("discard null", cu.discard_batch(NULL, s, 1, 0, st));
    report("discard flags 1", cu.discard_batch(p, s, 1, 1, st));
    report("discard device memory", cu.discard_batch(&dv, s, 1, 0, st));
    report("discard zero-size element", cu.discard_batch(p, s0, 2, 0, st));
    report("discard past end", cu.discard_batch(p, (size_t[]){4 * M + 4096}, 1, 0, st));
    report("discard unaligned 100 B",
           cu.discard_batch((CUdeviceptr[]){a + 10}, (size_t[]){100}, 1, 0, st));
    report("discard null stream", cu.discard_batch(p, s, 1, 0, NULL));
    report("discard CU_STREAM_LEGACY", cu.discard_batch(p, s, 1, 0, CU_STREAM_LEGACY));
    report("discard per-thread", cu.discard_batch(p, s, 1, 0, CU_STREAM_PER_THREAD));
    report("discard+prefetch flags 1", cu.discard_prefetch(p, s, 1, &f->dev, &one, 1, 1, st));
    report("discard+prefetch D9", cu.discard_prefetch(p, s, 1, &f->dev9, &one, 1, 0, st));
    report("discard+prefetch null stream",
           cu.discard_prefetch(p, s, 1, &f->dev, &one, 1, 0, NULL));
    report("synchronize", cu.ctx_sync());
}

/* Discards [start, start + length) of a fresh buffer full of 7 that lies on one side, then
 * moves it to the other: pages that were discarded move without their bytes.  Shows which of
 * the pages around the range kept them. */
static void
show_discarded_pages(struct fixture *f, bool on_device, size_t start, size_t length)
{
    CUdeviceptr a = managed(2 * M), ptr = a + start;
    size_t first = start / 4096 * 4096 - 4096;
    CUresult result;

    fill(a, 7, 2 * M);
    cu.prefetch(a, 2 * M, on_device ? f->dev : f->host, 0, f->stream);
    cu.stream_sync(f->stream);
    result = cu.discard_batch(&ptr, &length, 1, 0, f->stream);
    cu.prefetch(a, 2 * M, on_device ? f->host : f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    printf("%s, %5zu bytes from +%-4zu %d pages:", on_device ? "device" : "host  ", length,
           start % 4096, (int)result);
    for (size_t page = first; page <= start + length + 4096; page += 4096) {
        printf(" %s", byte_at(a + page) == 7 ? "kept" : "lost");
    }
    printf("\n");
    cu.mem_free(a);
}

void
topic_discarded_bytes(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M), b = managed(4 * M);
    size_t size = 4 * M;

    fill(a, 5, size);
    cu.discard_batch(&a, &size, 1, 0, f->stream);
    cu.stream_sync(f->stream);
    printf("read after discard (host-resident): %d\n", byte_at(a));
    cu.prefetch(a, size, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    printf("... then prefetch D and read: %d\n", byte_at(a));
    fill(a, 5, size);
    cu.prefetch(a, size, f->dev, 0, f->stream);
    cu.discard_batch(&a, &size, 1, 0, f->stream);
    cu.stream_sync(f->stream);
    printf("read after discard (device-resident): %d\n", byte_at(a));
    fill(a, 7, size);
    cu.prefetch(a, size, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    /* What is read now is 5 or 7, with the load of the machine: nothing to record. */
    fill(b, 5, size);
    cu.discard_batch(&b, &size, 1, 0, f->stream);
    cu.stream_sync(f->stream);
    fill(b, 9, size);
    cu.prefetch(b, size, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    printf("discard, write 9 without a read before it, prefetch D and read: %d\n", byte_at(b));
    /* What is read after it is 4 or, with the load of the machine, 9: nothing to record. */
    report("fill on the stream, discard, fill on the stream",
           (cu.set8(b, 3, size, f->stream), cu.discard_batch(&b, &size, 1, 0, f->stream),
            cu.set8(b, 4, size, f->stream)));
    cu.stream_sync(f->stream);
    for (int on_device = 0; on_device < 2; on_device++) {
        show_discarded_pages(f, on_device, 65536, 4096);
        show_discarded_pages(f, on_device, 65536 + 10, 100);
        show_discarded_pages(f, on_device, 65536 + 2048, 4096);
        show_discarded_pages(f, on_device, 65536 + 2048, 6144);
        show_discarded_pages(f, on_device, 65536 + 2048, 8192);
        show_discarded_pages(f, on_device, 65536, 6144);
        show_discarded_pages(f, on_device, 65536, 2048);
        show_discarded_pages(f, on_device, 65536, 65536);
    }
}

void
topic_page_map(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M);

    show_page_map("fresh", a, 4 * M);
    fill(a, 1, 4 * M);
    cu.prefetch(a, 4 * M, f->host, 0, f->stream);
    cu.stream_sync(f->stream);
    show_page_map("after prefetch H", a, 4 * M);
    cu.prefetch(a, 4 * M, f->dev, 0, f->stream);
    cu.stream_sync(f->stream);
    show_page_map("after prefetch D", a, 4 * M);
    cu.advise(a, 4 * M, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev);
    (void)byte_at(a);
    show_page_map("read-mostly, one read", a, 4 * M);
    cu.advise(a, 4 * M, CU_MEM_ADVISE_UNSET_READ_MOSTLY, f->dev);
    show_page_map("read-mostly removed", a, 4 * M);
}
