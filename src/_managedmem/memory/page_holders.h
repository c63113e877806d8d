/* page_holders.h: the processors that have the pages of some ranges, as far as that is known. */
#ifndef MM_PAGE_HOLDERS_H
#define MM_PAGE_HOLDERS_H

#include <stdint.h>

#include "batch.h"

/* Neighbouring pages, from start up to end. */
typedef struct {
    uint64_t start, end;
    uint64_t since; /* the memory exists from this time on, in nanoseconds of mm_raw_clock */
    size_t first; /* index of its first page */
} mm_held_span;

/* All zero knows nothing. */
typedef struct {
    mm_held_span *span; /* in order; none shares a page with another one */
    size_t count;
    uint32_t *page; /* a set of processors for each page, as in an event's `extra`; 0: unknown */
    size_t page_count;
} mm_page_holders;

#define MM_NO_BIRTH UINT64_MAX

/* Makes spans of all pages that the ranges touch; nothing is known of them yet. `since` has a time
 * for each range; MM_NO_BIRTH leaves the range out. Fails with MM_NO_MEMORY. */
MM_NODISCARD int mm_page_holders_init(mm_page_holders *h, const mm_batch *ranges,
                                      const uint64_t *since, mm_status *st);

void mm_page_holders_free(mm_page_holders *h);

/* Index of the first span that ends above an address; the count if none does. */
size_t mm_page_holders_find(const mm_page_holders *h, uint64_t address);

/* The sets of processors of the pages that a range touches, in order; NULL if no span has all of
 * these pages. */
const uint32_t *mm_page_holders_of(const mm_page_holders *h, mm_range range);

#endif
