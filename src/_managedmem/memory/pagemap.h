/* pagemap.h: the pages of an address range that the host has mapped, from the kernel's page map
 * of this process, and their NUMA nodes. No page is touched, and the driver is not called. */
#ifndef MM_PAGEMAP_H
#define MM_PAGEMAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../driver/status.h"

/* The addresses from start up to end. */
typedef struct {
    uint64_t start, end;
} mm_span;

/* Spans in the order of their addresses; adjacent spans are joined. All zero is an empty list. */
typedef struct {
    mm_span *span;
    size_t count, capacity;
} mm_spans;

void mm_spans_free(mm_spans *spans);

/* The system calls that are needed. They return -1 with errno on failure. */
typedef struct {
    int (*open)(const char *path);
    int (*ioctl)(int file, unsigned long request, void *argument);
    ssize_t (*pread)(int file, void *to, size_t size, off_t offset);
    int (*close)(int file);
    long (*move_pages)(unsigned long count, void **pages, int *nodes); /* only asks for nodes */
} mm_pagemap_calls;

typedef enum { MM_NODES_UNKNOWN, MM_ONE_NODE, MM_SEVERAL_NODES } mm_node_count;

/* The calls, and the abilities of the kernel, once a call has shown them. */
typedef struct {
    const mm_pagemap_calls *calls;
    atomic_bool lacks_scan; /* the kernel has no PAGEMAP_SCAN, which Linux has from 6.7 on */
    atomic_int nodes; /* mm_node_count */
} mm_pagemap_source;

extern mm_pagemap_source mm_kernel_pagemap;

/* The open page map of this process. A forked child has another page map, so the file is opened for
 * each use. */
typedef struct {
    mm_pagemap_source *source;
    int file;
} mm_pagemap;

/* Fails with MM_SYSTEM_CALL, for example if /proc is not mounted. */
MM_NODISCARD int mm_pagemap_open(mm_pagemap *map, mm_pagemap_source *source, mm_status *st);
void mm_pagemap_close(mm_pagemap *map);

/* Appends the mapped pages of a range, which lies behind those in the list and consists of whole
 * pages. After a failure the list has some of them. */
MM_NODISCARD int mm_pagemap_read(mm_pagemap *map, mm_span range, mm_spans *mapped, mm_status *st);

/* Nodes with greater numbers are not counted. */
enum { MM_MOST_NODES = 64 };

/* True if the pages of this machine can be on several NUMA nodes. */
bool mm_pagemap_has_nodes(mm_pagemap_source *source);

/* The intersection of two spans. */
mm_span mm_span_inside(mm_span span, mm_span limits);

/* Adds the bytes of mapped pages, as far as they are inside the limits, to the bytes of their
 * nodes. Pages that were unmapped meanwhile are not counted. False if this process may not ask;
 * some of the pages are counted then. */
MM_NODISCARD bool mm_pagemap_count_nodes(mm_pagemap_source *source, const mm_spans *mapped,
                                         mm_span limits, uint64_t bytes[MM_MOST_NODES]);

#endif
