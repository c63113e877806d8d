/* page_runs.h: the driver's records of pages, as runs of equal pages. */
#ifndef MM_PAGE_RUNS_H
#define MM_PAGE_RUNS_H

#include "advice.h"

/* Neighbouring pages for which the driver's answers are the same. */
typedef struct {
    mm_range range;
    mm_policy policy;
    CUmemLocation prefetched; /* of the last prefetch; type INVALID if none */
} mm_page_run;

/* Runs in the order of their addresses. They overlap only where the memory of a range was freed, as
 * under a stale wrapper. All zero is an empty list. */
typedef struct {
    mm_page_run *run;
    size_t count, capacity;
} mm_page_runs;

void mm_page_runs_free(mm_page_runs *runs);

/* Appends a run, or extends the last one by it. */
MM_NODISCARD int mm_page_runs_append(mm_page_runs *runs, const mm_page_run *run, mm_status *st);

/* Runs are compared by the meaning of their records, or by the records themselves: batch calls
 * record the host with another id than single calls, so two records can have one meaning
 * (conformance: batch to hosts). */
typedef enum { MM_BY_MEANING, MM_BY_RECORD } mm_run_comparison;

/* Appends the runs of a range, which must lie behind the runs in the list. Queries page by page,
 * because for a longer range the driver answers "unset" both if no page has the advice and if only
 * some have it. */
MM_NODISCARD int mm_page_runs_read(mm_driver *cu, mm_range range, mm_run_comparison comparison,
                                   mm_page_runs *runs, mm_status *st);

#endif
