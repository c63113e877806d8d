/* working_reports.c: the counters of a working set at work, and the state of each group. */
#include "working_groups.h"

void
mm_loader_read_report(mm_loader *l, mm_loader_report *report)
{
    mm_loader_lock(l);
    *report = l->report;
    report->decided = l->set.counts;
    report->reserved = mm_guard_is_closed(&l->guard) ? 0 : l->set.reserved;
    report->groups = l->set.order.live;
    mm_loader_unlock(l);
    report->physical = atomic_load(&l->physical);
}

/* True if the group's latest command with a ticket is done, as far as the driver says. */
static bool
is_group_done(mm_loader *l, CUevent done, uint64_t ticket)
{
    CUresult code = CUDA_ERROR_NOT_READY;
    mm_status ignored;
    mm_scope scope;

    if (atomic_load(&l->issued) < ticket || !mm_guard_enter(&l->guard)) {
        return false;
    }
    if (mm_loader_has_completed(l, ticket)) {
        code = CUDA_SUCCESS;
    } else if (mm_scope_enter_relaxed(&scope, l->cu, l->device, &ignored) == 0) {
        code = l->cu->EventQuery(done);
        mm_scope_leave(&scope);
    }
    mm_guard_leave(&l->guard);
    return code == CUDA_SUCCESS;
}

void
mm_loader_read_group(mm_loader *l, mm_group_id group, mm_loader_group_report *report)
{
    const mm_loader_group *found;
    uint64_t ticket = 0;
    CUevent done = NULL;

    *report = (mm_loader_group_report){.removed = true};
    mm_loader_lock(l);
    found = mm_loader_find_group(l, group);
    if (found != NULL) {
        const mm_group_state *g = &l->set.groups[group.place];
        *report = (mm_loader_group_report){.bytes = g->bytes,
                                           .resident = g->present,
                                           .held = g->held,
                                           .removed = found->removal != MM_NOT_REMOVED};
        ticket = g->ticket;
        done = found->done;
    }
    mm_loader_unlock(l);
    report->resident = report->resident && is_group_done(l, done, ticket);
}
