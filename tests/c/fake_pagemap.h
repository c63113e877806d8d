/* fake_pagemap.h: a source of page maps in front of the kernel's: its calls fail or lie as `fake` says,
 * and machines have several NUMA nodes. */
#ifndef FAKE_PAGEMAP_H
#define FAKE_PAGEMAP_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "memory/pagemap.h"
#include "memory/range.h"

static inline uint64_t
page_size(void)
{
    return (uint64_t)mm_page_size();
}

enum { NODES_FILE = 1000 };

static struct {
    int opened, closed, scans, reads;
    int open_error, scan_error, read_error; /* errno of the next ones, or 0 */
    int scan_after; /* so many scans work before scan_error */
    int read_errors; /* how many reads fail */
    ssize_t longest_read; /* or 0 */
    void (*lie)(uint64_t *argument, int *count); /* about a scan */
    const char *nodes; /* the contents of has_memory; NULL: there is no such file */
    long (*move_pages)(unsigned long count, void **pages, int *nodes);
} fake;

static inline int
fake_open(const char *path)
{
    if (strstr(path, "has_memory") != NULL) {
        errno = ENOENT;
        fake.opened += fake.nodes != NULL;
        return fake.nodes != NULL ? NODES_FILE : -1;
    }
    CHECK_EQUAL(strcmp(path, "/proc/self/pagemap"), 0);
    if (fake.open_error != 0) {
        errno = fake.open_error;
        fake.open_error = fake.open_error == EINTR ? 0 : fake.open_error;
        return -1;
    }
    fake.opened++;
    return mm_kernel_pagemap.calls->open(path);
}

static inline int
fake_ioctl(int file, unsigned long request, void *argument)
{
    int count;

    fake.scans++;
    CHECK(fcntl(file, F_GETFD) & FD_CLOEXEC);
    if (fake.scan_error != 0 && fake.scans > fake.scan_after) {
        errno = fake.scan_error;
        return -1;
    }
    count = mm_kernel_pagemap.calls->ioctl(file, request, argument);
    if (fake.lie != NULL) {
        fake.lie(argument, &count);
    }
    return count;
}

static inline ssize_t
fake_pread(int file, void *to, size_t size, off_t offset)
{
    ssize_t length;

    if (file == NODES_FILE) {
        length = (ssize_t)strlen(fake.nodes);
        CHECK((size_t)length <= size);
        memcpy(to, fake.nodes, (size_t)length);
        return length;
    }
    fake.reads++;
    if (fake.read_errors > 0) {
        fake.read_errors--;
        errno = fake.read_error;
        return fake.read_error != 0 ? -1 : 0;
    }
    length = mm_kernel_pagemap.calls->pread(file, to, size, offset);
    return fake.longest_read > 0 && length > fake.longest_read ? fake.longest_read : length;
}

static inline int
fake_close(int file)
{
    fake.closed++;
    return file == NODES_FILE ? 0 : mm_kernel_pagemap.calls->close(file);
}

static inline long
fake_move_pages(unsigned long count, void **pages, int *nodes)
{
    CHECK(fake.move_pages != NULL);
    return fake.move_pages(count, pages, nodes);
}

static const mm_pagemap_calls fake_calls = {fake_open, fake_ioctl, fake_pread, fake_close,
                                            fake_move_pages};

/* A source about whose kernel nothing is known. */
static inline mm_pagemap_source
fresh_source(void)
{
    memset(&fake, 0, sizeof fake);
    return (mm_pagemap_source){.calls = &fake_calls};
}

/* Page n is on node n % 3, but every fifth one is gone. */
static uint64_t node_start;

static inline long
spread_pages(unsigned long count, void **pages, int *nodes)
{
    for (unsigned long i = 0; i < count; i++) {
        uint64_t n = ((uint64_t)(uintptr_t)pages[i] - node_start) / page_size();
        nodes[i] = n % 5 == 0 ? -ENOENT : (int)(n % 3);
    }
    return 0;
}

static inline long
refuse_to_tell(unsigned long count, void **pages, int *nodes)
{
    (void)count;
    (void)pages;
    (void)nodes;
    errno = EPERM;
    return -1;
}

#endif
