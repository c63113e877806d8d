/* policy.c: reading, applying and restoring the advice of several ranges, page by page. */
#include "policy.h"

int
mm_policy_read(mm_driver *cu, mm_batch *b, mm_page_runs *runs, mm_status *st)
{
    int rc = 0;

    *runs = (mm_page_runs){0};
    for (size_t i = 0; i < b->count; i++) {
        b->transfers[i].where = mm_host();
    }
    mm_batch_merge(b);
    if (b->ordered) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory to sort %zu ranges", b->count);
    }
    for (size_t i = 0; rc == 0 && i < b->count; i++) {
        rc = mm_page_runs_read(cu, b->transfers[i].range, MM_BY_RECORD, runs, st);
    }
    if (rc < 0) {
        mm_page_runs_free(runs);
    }
    return rc;
}

/* The same policy for all ranges, as runs. */
static int
uniform(const mm_batch *b, const mm_policy *policy, mm_page_runs *runs, mm_status *st)
{
    *runs = (mm_page_runs){0};
    for (size_t i = 0; i < b->count; i++) {
        mm_page_run run = {.range = b->transfers[i].range, .policy = *policy};
        if (mm_page_runs_add(runs, &run, st) < 0) {
            mm_page_runs_free(runs);
            return -1;
        }
    }
    return 0;
}

/* Whether the pages have just what the list says; no also where the driver does not tell. */
static bool
is_present(mm_driver *cu, mm_batch *b, const mm_page_runs *list)
{
    mm_page_runs present;
    mm_status ignored;
    bool same;

    if (mm_policy_read(cu, b, &present, &ignored) < 0) {
        return false;
    }
    same = present.count == list->count;
    for (size_t i = 0; same && i < present.count; i++) {
        same = present.run[i].range.start == list->run[i].range.start
               && mm_same_policy(&present.run[i].policy, &list->run[i].policy);
    }
    mm_page_runs_free(&present);
    return same;
}

/* After a failure: back again, also for what was not reached and for the advice that failed, as a
 * driver may report an earlier error after it acted. What refuses all advice, as pool memory does,
 * refuses this one too, and is as it was. */
static void
go_back(mm_driver *cu, mm_batch *b, const mm_page_runs *wanted, const mm_page_runs *before,
        mm_status *st)
{
    mm_status undo;

    if (mm_pages_change(cu, wanted, before, MM_UNDO, &undo) < 0 && !is_present(cu, b, before)) {
        mm_status_add(st, "%s", undo.detail);
    }
}

int
mm_policy_apply(mm_driver *cu, mm_batch *b, const mm_policy *policy, mm_page_runs *before,
                mm_status *st)
{
    mm_page_runs wanted;
    int rc;

    if (mm_policy_read(cu, b, before, st) < 0) {
        return -1;
    }
    rc = uniform(b, policy, &wanted, st);
    if (rc == 0) {
        rc = mm_pages_change(cu, before, &wanted, MM_STOP, st);
        if (rc < 0) {
            go_back(cu, b, &wanted, before, st);
        }
        mm_page_runs_free(&wanted);
    }
    if (rc < 0) {
        mm_page_runs_free(before);
    }
    return rc;
}

int
mm_policy_restore(mm_driver *cu, mm_batch *b, const mm_page_runs *before, mm_status *st)
{
    mm_page_runs present;
    int rc;

    if (mm_policy_read(cu, b, &present, st) < 0) {
        mm_status_add(st, "Nothing was restored.");
        return -1;
    }
    rc = mm_pages_change(cu, &present, before, MM_TRY_ALL, st);
    mm_page_runs_free(&present);
    return rc;
}
