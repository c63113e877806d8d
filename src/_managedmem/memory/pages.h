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
    size_t count, room;
} mm_page_runs;

void mm_page_runs_free(mm_page_runs *runs);

MM_NODISCARD int mm_page_runs_add(mm_page_runs *runs, const mm_page_run *more, mm_status *st);

/* How answers are compared: by what they mean, or as the driver records them. Batch calls record the
 * host with another id than single calls do: that means the same, but the driver keeps two records. */
typedef enum { MM_BY_MEANING, MM_BY_RECORD } mm_alike;

/* Appends the runs of a range, which must lie behind those that are there. Asks once for each page:
 * of a range, the driver says "unset" both where no page has an advice and where some have it, so no
 * longer range would do. */
MM_NODISCARD int mm_page_runs_read(mm_driver *cu, mm_range range, mm_alike alike,
                                   mm_page_runs *runs, mm_status *st);

/* What a failure stops: the rest of a change; or nothing, where things are put back. MM_UNDO is for a
 * change that failed: what it may have done is taken back also where it is not recorded. */
typedef enum { MM_STOP, MM_TRY_ALL, MM_UNDO } mm_on_failure;

/* Takes all pages that two lists have in common from one policy to the other: the advice that
 * differs, once for each stretch, and again where the driver did not record it. `from` must have
 * been read by record; for MM_UNDO it is what the change was to lead to. The status is the first
 * failure's; unless that stops the change, it also says what is not as it should be. */
MM_NODISCARD int mm_pages_change(mm_driver *cu, const mm_page_runs *from, const mm_page_runs *to,
                                 mm_on_failure how, mm_status *st);

#endif
