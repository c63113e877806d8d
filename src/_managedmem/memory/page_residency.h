/* page_residency.h: where the pages of ranges are, as far as that is known, with the evidence. */
#ifndef MM_PAGE_RESIDENCY_H
#define MM_PAGE_RESIDENCY_H

#include "batch.h"
#include "pagemap.h"

typedef enum {
    MM_PLACE_HOST, /* on the host, perhaps with copies on devices */
    MM_PLACE_NOT_HOST,
    MM_PLACE_NOWHERE, /* in no memory: never used */
    MM_PLACE_DEVICE
} mm_place;

/* A page map is certain, and so is the driver's answer. A last prefetch is a hint: the pages can
 * have moved since. */
typedef enum { MM_BY_PAGE_MAP, MM_BY_PAGE_MAP_AND_PREFETCH, MM_BY_DRIVER } mm_place_evidence;

/* Neighbouring pages with equal evidence. Python reads these structs as "<QQBBB5x". */
typedef struct {
    uint64_t offset, size; /* in bytes from the start of the range */
    uint8_t place, evidence;
    uint8_t hint; /* 0 for none, else 1 + the index in mm_places.hint of the device of
                   * MM_PLACE_DEVICE, or of the destination of the last prefetch */
} mm_place_run;

_Static_assert(sizeof(mm_place_run) == 24, "the struct that Python reads");

enum { MM_MOST_HINTS = 250 };

/* The places of one range. */
typedef struct {
    mm_place_run *run; /* in order, without gaps; neighbours differ */
    size_t count, capacity;
    uint64_t on_host; /* bytes */
    uint64_t *node_bytes; /* on_host by nodes: MM_MOST_NODES counts; NULL if that is not known */
} mm_range_places;

/* The places of several ranges. */
typedef struct {
    mm_range_places *range;
    size_t count;
    CUmemLocation hint[MM_MOST_HINTS];
    size_t hint_count;
} mm_places;

/* Reads the places of the ranges of a batch, in its order. Pages that the host has mapped are on
 * the host; the driver is asked about the others. Fails with MM_UNSUPPORTED if the page map of
 * this system does not show places, and the driver does not know them. *out is to be freed even
 * after a failure. */
MM_NODISCARD int mm_places_read(mm_driver *cu, mm_pagemap_source *source, const mm_batch *ranges,
                                mm_places *out, mm_status *st);

void mm_places_free(mm_places *places);

#endif
