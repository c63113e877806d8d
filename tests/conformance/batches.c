/* Conformance cases of the batch calls, of discard, and of what discarded bytes read as. */
#include "topics.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    report("batch of one 100 B at +10",
           cu.prefetch_batch((CUdeviceptr[]){a + 10}, (size_t[]){100}, 1, &f->host, &zero, 1, 0,
                             f->stream));
    query("its page", a, 4096);
    query("the next page", a + 4096, 4096);
    report("discard of 8", cu.discard_batch(p, s, 8, 0, f->stream));
    report("discard+prefetch of 8",
           cu.discard_prefetch(p, s, 8, &f->dev, &zero, 1, 0, f->stream));
    report("set rm", cu.advise(a, size, 1, f->dev));
    report("set ab H", cu.advise(a, size, 5, f->host));
    report("discard with policies", cu.discard_batch(&a, &size, 1, 0, f->stream));
    query("after discard with policies", a, size);
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
    report("batch bad element in the middle", cu.prefetch_batch(bad, s, 3, &f->dev, &one, 1, 0, st));
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

/* The second fill differs from the first: a driver that lost a write would show the first one. */
void
topic_discarded_bytes(struct fixture *f)
{
    CUdeviceptr a = managed(4 * M);
    size_t size = 4 * M, zero = 0;

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
    report("discard 100 B inside a page",
           cu.discard_batch((CUdeviceptr[]){a + 10}, (size_t[]){100}, 1, 0, f->stream));
    report("discard 1.5 pages",
           cu.discard_batch((CUdeviceptr[]){a + 65536 + 2048}, (size_t[]){6144}, 1, 0, f->stream));
    cu.stream_sync(f->stream);
    printf("neighbours of a sub-page discard: before %d inside %d after %d; of 1.5 pages: before %d"
           " inside %d\n", byte_at(a), byte_at(a + 20), byte_at(a + 300), byte_at(a + 65536),
           byte_at(a + 65536 + 5000));
    report("discard of one page, shifted by half",
           cu.discard_batch((CUdeviceptr[]){a + M + 2048}, (size_t[]){4096}, 1, 0, f->stream));
    cu.stream_sync(f->stream);
    printf("  first half page %d, second %d, next page %d\n", byte_at(a + M),
           byte_at(a + M + 2048), byte_at(a + M + 4096));
    report("discard of two pages, shifted by half",
           cu.discard_batch((CUdeviceptr[]){a + 2 * M + 2048}, (size_t[]){8192}, 1, 0, f->stream));
    cu.stream_sync(f->stream);
    printf("  pages %d %d %d\n", byte_at(a + 2 * M), byte_at(a + 2 * M + 4096),
           byte_at(a + 2 * M + 8192));
    report("discard of 1.5 pages from a page start",
           cu.discard_batch((CUdeviceptr[]){a + 3 * M}, (size_t[]){6144}, 1, 0, f->stream));
    cu.stream_sync(f->stream);
    printf("  pages %d %d\n", byte_at(a + 3 * M), byte_at(a + 3 * M + 4096));
    report("discard of one page, host-resident",
           (fill(a, 8, size),
            cu.discard_batch((CUdeviceptr[]){a + M}, (size_t[]){4096}, 1, 0, f->stream)));
    cu.stream_sync(f->stream);
    printf("  before %d inside %d after %d\n", byte_at(a + M - 1), byte_at(a + M),
           byte_at(a + M + 4096));
    report("discard, write, prefetch D",
           (cu.discard_batch(&a, &size, 1, 0, f->stream), cu.stream_sync(f->stream),
            fill(a, 9, size), cu.prefetch(a, size, f->dev, 0, f->stream)));
    cu.stream_sync(f->stream);
    printf("  reads %d %d\n", byte_at(a), byte_at(a + 3 * M));
    report("discard+prefetch D",
           cu.discard_prefetch(&a, &size, 1, &f->dev, &zero, 1, 0, f->stream));
    cu.stream_sync(f->stream);
    printf("  reads %d %d\n", byte_at(a), byte_at(a + 3 * M));
    report("fill on the stream, discard, fill on the stream",
           (cu.set8(a, 3, size, f->stream), cu.discard_batch(&a, &size, 1, 0, f->stream),
            cu.set8(a, 4, size, f->stream)));
    cu.stream_sync(f->stream);
    printf("  reads %d %d\n", byte_at(a), byte_at(a + 3 * M));
}

/* How many pages of a range the kernel has mapped for the CPU: shows where the pages are. */
static void
show_page_map(const char *label, CUdeviceptr ptr, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), count = size / page, mapped = 0;
    uint64_t *entries = calloc(count, sizeof *entries);
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    ssize_t want = (ssize_t)(count * sizeof *entries), got = -1;

    if (file >= 0 && entries != NULL) {
        got = pread(file, entries, (size_t)want, (off_t)(ptr / page * sizeof *entries));
    }
    for (size_t i = 0; got == want && i < count; i++) {
        mapped += (size_t)(entries[i] >> 63);
    }
    if (got == want) {
        printf("pagemap %-24s %zu of %zu pages mapped on the CPU\n", label, mapped, count);
    }
    else {
        printf("pagemap %-24s not readable\n", label);
    }
    if (file >= 0) {
        close(file);
    }
    free(entries);
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
