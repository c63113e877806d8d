/* recorded_events.c: storing events, their parts, the sums of those beyond the limit, and
 * assigning them to memories. */
#include "recorded_events.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../memory/growth.h"
#include "host_views.h"

enum {
    SPILLED_AT_ONCE = 1 << 15
}; /* events beyond the limit that are added to the sums together */

/* --- life --------------------------------------------------------------------------------- */

static size_t
mapped_bytes(const mm_recorded_events *e)
{
    return e->limit * sizeof *e->events;
}

int
mm_recorded_init(mm_recorded_events *e, size_t limit, mm_status *st)
{
    void *events;

    assert(limit > 0 && limit < SIZE_MAX / sizeof(mm_event));
    *e = (mm_recorded_events){.limit = limit};
    events = mmap(NULL, mapped_bytes(e), PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (events == MAP_FAILED) {
        return mm_fail(st, MM_NO_MEMORY,
                       "no address space for a trace of %zu events: give it a smaller limit",
                       limit);
    }
    e->events = events;
    return mm_recorded_reserve(e, st);
}

void
mm_recorded_free(mm_recorded_events *e)
{
    mm_attribution_free(e->spilled_sums);
    if (e->events != NULL) {
        (void)munmap(e->events, mapped_bytes(e));
    }
    free(e->spilled);
    free(e->parts);
    *e = (mm_recorded_events){0};
}

/* --- storing ------------------------------------------------------------------------------ */

static int
add_to_sums(mm_recorded_events *e, size_t count, mm_status *st)
{
    mm_allocation_record *allocations = NULL;
    size_t allocation_count = 0;
    int rc;

    if (e->spilled_sums == NULL && (e->spilled_sums = mm_attribution_new(st)) == NULL) {
        return -1;
    }
    if (mm_allocation_log_copy(&allocations, &allocation_count, st) < 0) {
        return -1;
    }
    rc = mm_attribution_set_memories(e->spilled_sums, allocations, allocation_count, NULL, 0, st);
    if (rc == 0) {
        rc = mm_attribution_add(e->spilled_sums, (uint32_t)e->part_count, e->spilled, count, NULL,
                                st);
    }
    mm_allocation_records_free(allocations, allocation_count);
    return rc;
}

static void
add_spilled(mm_recorded_events *e)
{
    size_t count = e->spilled_count;
    mm_status ignored;

    e->spilled_count = 0;
    if (count > 0 && add_to_sums(e, count, &ignored) < 0) {
        e->lost += count;
    }
}

/* Calls count in no sum. Only calls that are host views are needed, for the causes of moves. */
static void
spill_event(mm_recorded_events *e, const mm_event *event)
{
    e->truncated = true;
    if (event->kind == MM_CALL && !mm_is_host_view(event)) {
        return;
    }
    if (e->spilled == NULL) {
        e->spilled = malloc(SPILLED_AT_ONCE * sizeof *e->spilled);
    }
    if (e->spilled == NULL) {
        e->lost++;
        return;
    }
    e->spilled[e->spilled_count++] = *event;
    if (e->spilled_count == SPILLED_AT_ONCE) {
        add_spilled(e);
    }
}

/* System memory moves page by page, each page with a record, and such records would soon exceed
 * the limit. A joined event stays in a block of 2 MiB, because the module works in such blocks. */
bool
mm_event_join(mm_event *event, const mm_event *page, uint64_t page_size)
{
    enum { BLOCK_BITS = 21 };

    if (event->kind != MM_MOVE || page->kind != MM_MOVE || page->amount != page_size
        || page->address != event->address + event->amount
        || page->address >> BLOCK_BITS != event->address >> BLOCK_BITS
        || page->source != event->source || page->destination != event->destination
        || page->cause != event->cause || page->access != event->access
        || page->flags != event->flags
        || page->start - page->extra != event->start - event->extra) {
        return false;
    }
    event->amount += page_size;
    event->end = page->end > event->end ? page->end : event->end;
    return true;
}

void
mm_recorded_keep(mm_recorded_events *e, const mm_event *event)
{
    if (e->kept < e->limit) {
        e->events[e->kept++] = *event;
    } else {
        spill_event(e, event);
    }
}

/* --- parts -------------------------------------------------------------------------------- */

void
mm_recorded_begin(mm_recorded_events *e, uint64_t start)
{
    assert(e->part_count < e->part_capacity);
    e->parts[e->part_count] = (mm_recorded_part){.start = start, .first = e->kept};
}

int
mm_recorded_reserve(mm_recorded_events *e, mm_status *st)
{
    size_t needed = e->part_count + 2;

    e->parts = mm_grow(e->parts, &e->part_capacity, needed, sizeof *e->parts, st);
    return e->part_capacity < needed ? -1 : 0;
}

void
mm_recorded_end_part(mm_recorded_events *e, uint64_t end)
{
    mm_recorded_part *part = &e->parts[e->part_count];

    assert(e->part_count < e->part_capacity);
    add_spilled(e);
    part->count = e->kept - part->first;
    part->end = end;
    e->part_count++;
    if (e->part_count < e->part_capacity) {
        mm_recorded_begin(e, end);
    }
}

int
mm_recorded_copy_parts(const mm_recorded_events *e, mm_recorded_part **parts, size_t *count,
                       mm_status *st)
{
    *parts = calloc(e->part_count + 1, sizeof **parts);
    if (*parts == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %zu parts", e->part_count);
    }
    memcpy(*parts, e->parts, e->part_count * sizeof **parts);
    *count = e->part_count;
    return 0;
}

/* --- results ------------------------------------------------------------------------------ */

int
mm_recorded_result_init(const mm_recorded_events *e, mm_recorded_result *result, mm_status *st)
{
    *result = (mm_recorded_result){0};
    result->sums = mm_attribution_new(st);
    if (result->sums == NULL) {
        return -1;
    }
    return mm_recorded_copy_parts(e, &result->parts, &result->part_count, st);
}

size_t
mm_recorded_result_events(const mm_recorded_result *result)
{
    const mm_recorded_part *last = result->parts + result->part_count - 1;

    return result->part_count > 0 ? last->first + last->count : 0;
}

int
mm_recorded_attribute(const mm_recorded_events *e, mm_recorded_result *result, mm_status *st)
{
    for (size_t i = 0; i < result->part_count; i++) {
        mm_recorded_part *part = &result->parts[i];
        size_t before = result->pieces.count;
        if (mm_attribution_add(result->sums, (uint32_t)i, e->events + part->first, part->count,
                               &result->pieces, st)
            < 0) {
            return -1;
        }
        part->pieces = result->pieces.count - before;
    }
    return 0;
}

int
mm_recorded_merge(const mm_recorded_events *e, mm_recorded_result *result, mm_status *st)
{
    return e->spilled_sums != NULL ? mm_attribution_merge(result->sums, e->spilled_sums, st) : 0;
}

void
mm_recorded_result_free(mm_recorded_result *result)
{
    mm_attribution_free(result->sums);
    free(result->pieces.items);
    free(result->parts);
    *result = (mm_recorded_result){0};
}
