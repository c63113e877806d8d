/* pages.h: what the driver has been told about pages: reading it as runs of equal pages, and
 * changing it from one state to another. */
#ifndef MM_PAGES_H
#define MM_PAGES_H

#include "advice.h"

/* All that can be advised about a page. */
typedef struct {
    bool read_mostly;
    CUmemLocation preferred; /* type INVALID where unset */
    mm_location_set accessed_by;
} mm_policy;

bool mm_same_policy(const mm_policy *a, const mm_policy *b);

/* Neighbouring pages for which the driver's answers are the same. */
typedef struct {
    mm_range range;
    mm_policy policy;
    CUmemLocation prefetched; /* the last prefetch's; type INVALID where none */
} mm_page_run;

/* Runs in the order of their addresses, without overlaps. All zero is an empty list. */
typedef struct {
    mm_page_run *run;
    size_t count, capacity;
} mm_page_runs;

void mm_page_runs_free(mm_page_runs *runs);

MM_NODISCARD int mm_page_runs_add(mm_page_runs *runs, const mm_page_run *more, mm_status *st);

/* Runs are compared by the meaning of their records, or by the records themselves: batch calls record
 * the host with another id than single calls, so two records can have one meaning. */
typedef enum { MM_BY_MEANING, MM_BY_RECORD } mm_run_comparison;

/* Appends the runs of a range, which must lie behind those in the list. Queries page by page: for a
 * longer range the driver answers "unset" both if no page has an advice and if only some have it. */
MM_NODISCARD int mm_page_runs_read(mm_driver *cu, mm_range range, mm_run_comparison comparison,
                                   mm_page_runs *runs, mm_status *st);

/* After a failure: stop the change, or try the rest. MM_UNDO tries the rest, and undoes a failed change
 * even where its advice is not recorded. */
typedef enum { MM_STOP, MM_TRY_ALL, MM_UNDO } mm_on_failure;

/* Changes the pages that are in both lists from one policy to the other: advises what differs, once for
 * each stretch, and again where the driver did not record it. `from` must be read by record; for
 * MM_UNDO it is the target of the failed change. The status has the first failure, and unless that
 * stopped the change, the stretches that were not changed. */
MM_NODISCARD int mm_pages_change(mm_driver *cu, const mm_page_runs *from, const mm_page_runs *to,
                                 mm_on_failure how, mm_status *st);

#endif
