/* The page table of the host: reads from the kernel's page map which pages this process has
 * mapped, unmaps pages, and maps them. Knows addresses only; the bytes stay as they are. */
#include "emulator.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not in the headers of older systems. Linux has the last of these from 5.18 on. */
enum { LOCK_ON_FAULT = 1, ADVICE_POPULATE_WRITE = 23, ADVICE_DONTNEED_LOCKED = 24 };

/* The argument of PAGEMAP_SCAN, which Linux has from 6.7 on. */
struct scan_span {
    uint64_t start, end, categories;
};
struct scan_request {
    uint64_t size, flags, start, end, walk_end, spans, span_count, max_pages;
    uint64_t inverted, mask, any_of, returned;
};
#define SCAN_PAGES _IOWR('f', 16, struct scan_request)
_Static_assert(sizeof(struct scan_request) == 96, "not the kernel's structure");
static const uint64_t SCAN_PRESENT = 1 << 3;
static const uint64_t ENTRY_PRESENT = (uint64_t)1 << 63;

static int file = -1;
static struct stat opened; /* the identity of the file, as long as `file` is not negative */
static bool no_scan;       /* the kernel has no PAGEMAP_SCAN */

/* The file stays open, so that a process at its limit of descriptors keeps it. A program can
 * close a descriptor that it does not know, so its identity is checked before each use. */
bool
emu_map_open(void)
{
    struct stat now;

    if (file >= 0 && fstat(file, &now) == 0 && now.st_dev == opened.st_dev
        && now.st_ino == opened.st_ino) {
        return true;
    }
    file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file >= 0 && fstat(file, &opened) != 0) {
        (void)close(file);
        file = -1;
    }
    return file >= 0;
}

size_t
emu_map_page_size(void)
{
    static size_t size;

    if (size == 0) {
        size = (size_t)sysconf(_SC_PAGESIZE);
    }
    return size;
}

/* Repeats the request until it has reached `end`: one request ends when all of its spans are
 * filled. */
static bool
scan(CUdeviceptr start, CUdeviceptr end, emu_span_visit visit, void *argument)
{
    struct scan_span spans[16] = {{0}};
    struct scan_request request = {.size = sizeof request,
                                   .spans = (uint64_t)(uintptr_t)spans,
                                   .span_count = sizeof spans / sizeof *spans,
                                   .mask = SCAN_PRESENT,
                                   .returned = SCAN_PRESENT,
                                   .end = end};

    while (start < end) {
        int count;
        request.start = start;
        count = ioctl(file, SCAN_PAGES, &request);
        if (count < 0 || request.walk_end <= start) {
            return false;
        }
        for (int i = 0; i < count; i++) {
            visit((CUdeviceptr)spans[i].start, (CUdeviceptr)spans[i].end, argument);
        }
        start = (CUdeviceptr)request.walk_end;
    }
    return true;
}

/* For kernels without PAGEMAP_SCAN: reads the contents of the file, one entry for each page. */
static bool
read_entries(CUdeviceptr start, CUdeviceptr end, emu_span_visit visit, void *argument)
{
    uint64_t entries[512];
    size_t page = emu_map_page_size();
    CUdeviceptr mapped = 0; /* the start of the present run, or 0 */

    for (CUdeviceptr at = start; at < end;) {
        size_t left = (size_t)(end - at) / page;
        size_t count =
            left < sizeof entries / sizeof *entries ? left : sizeof entries / sizeof *entries;
        ssize_t size = (ssize_t)(count * sizeof *entries);

        if (pread(file, entries, (size_t)size, (off_t)(at / page * sizeof *entries)) != size) {
            return false;
        }
        for (size_t i = 0; i < count; i++, at += page) {
            bool present = (entries[i] & ENTRY_PRESENT) != 0;
            if (present && mapped == 0) {
                mapped = at;
            } else if (!present && mapped != 0) {
                visit(mapped, at, argument);
                mapped = 0;
            }
        }
    }
    if (mapped != 0) {
        visit(mapped, end, argument);
    }
    return true;
}

bool
emu_map_visit(CUdeviceptr start, CUdeviceptr end, emu_span_visit visit, void *argument)
{
    if (!emu_map_open()) {
        return false;
    }
    if (!no_scan) {
        if (scan(start, end, visit, argument)) {
            return true;
        }
        no_scan = true;
    }
    return read_entries(start, end, visit, argument);
}

/* A kernel that is short of memory unmaps pages, which would then seem untouched by the host.
 * Locked pages stay mapped. A process without the right to lock memory locks up to
 * RLIMIT_MEMLOCK. */
void
emu_map_keep(CUdeviceptr start, size_t size)
{
#ifdef SYS_mlock2
    (void)syscall(SYS_mlock2, start, size, LOCK_ON_FAULT);
#else
    (void)start;
    (void)size;
#endif
}

bool
emu_map_advise(CUdeviceptr start, size_t size, int advice)
{
    void *address = (void *)(uintptr_t)start;

    if (advice == MADV_DONTNEED && madvise(address, size, ADVICE_DONTNEED_LOCKED) == 0) {
        return true;
    }
    /* The munlock() of sanitizers does nothing, so this is the system call. */
    return madvise(address, size, advice) == 0
           || (errno == EINVAL && syscall(SYS_munlock, address, size) == 0
               && madvise(address, size, advice) == 0);
}

/* Uses write faults, because a read fault maps pages around it too. Linux has an advice for this
 * from 5.14 on. If memory is short, the advice fails, and the pages stay unmapped. */
void
emu_map_fill(CUdeviceptr start, size_t size)
{
    if (madvise((void *)(uintptr_t)start, size, ADVICE_POPULATE_WRITE) == 0 || errno != EINVAL) {
        return;
    }
    for (CUdeviceptr at = start; at < start + size; at += emu_map_page_size()) {
        (void)atomic_fetch_or((_Atomic unsigned char *)(uintptr_t)at, 0);
    }
}
