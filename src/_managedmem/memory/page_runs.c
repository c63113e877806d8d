/* page_runs.c: lists of page runs, and reading them from the driver. */
#include "page_runs.h"

#include <assert.h>
#include <stdlib.h>

#include "growth.h"

void
mm_page_runs_free(mm_page_runs *runs)
{
    free(runs->run);
    *runs = (mm_page_runs){0};
}

static bool
is_continuation(const mm_page_run *last, const mm_page_run *run)
{
    return mm_range_end(last->range) == run->range.start
           && last->range.allocation == run->range.allocation
           && mm_same_policy(&last->policy, &run->policy)
           && last->prefetched.type == run->prefetched.type
           && last->prefetched.id == run->prefetched.id;
}

int
mm_page_runs_append(mm_page_runs *runs, const mm_page_run *run, mm_status *st)
{
    assert(runs->count <= runs->capacity);
    if (runs->count > 0 && is_continuation(&runs->run[runs->count - 1], run)) {
        runs->run[runs->count - 1].range.size += run->range.size;
        return 0;
    }
    runs->run = mm_grow(runs->run, &runs->capacity, runs->count + 1, sizeof *runs->run, st);
    if (runs->capacity == runs->count) {
        return -1;
    }
    runs->run[runs->count++] = *run;
    return 0;
}

/* Queries all records of the run's range in one call, in the caller's scope. */
MM_GUARD_ARRAYS static CUresult
query_run(mm_driver *cu, mm_page_run *run, mm_run_comparison comparison)
{
    enum { READ_MOSTLY, PREFERRED_TYPE, PREFERRED_ID, ACCESSED_BY, LAST_TYPE, LAST_ID, COUNT };
    CUmem_range_attribute attributes[COUNT] = {
        [READ_MOSTLY] = CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
        [PREFERRED_TYPE] = CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE,
        [PREFERRED_ID] = CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID,
        [ACCESSED_BY] = CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        [LAST_TYPE] = CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
        [LAST_ID] = CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID,
    };
    int answers[COUNT] = {0}, ordinals[MM_MAX_DEVICES + 1];
    size_t capacity = mm_accessed_by_capacity(cu), sizes[COUNT];
    void *out[COUNT];
    CUresult code;

    assert(mm_in_scope());
    for (size_t i = 0; i < COUNT; i++) {
        out[i] = i == ACCESSED_BY ? ordinals : &answers[i];
        sizes[i] = i == ACCESSED_BY ? capacity * sizeof *ordinals : sizeof *answers;
    }
    code = cu->MemRangeGetAttributes(out, sizes, attributes, COUNT, run->range.start,
                                     run->range.size);
    if (code == CUDA_SUCCESS) {
        run->policy = (mm_policy){
            .read_mostly = answers[READ_MOSTLY] != 0,
            .preferred = mm_location_from_attributes(cu->device_count, answers[PREFERRED_TYPE],
                                                     answers[PREFERRED_ID]),
            .accessed_by = mm_accessed_by_set(ordinals, capacity),
        };
        run->prefetched =
            comparison == MM_BY_RECORD
                ? mm_location((CUmemLocationType)answers[LAST_TYPE], answers[LAST_ID])
                : mm_location_from_attributes(cu->device_count, answers[LAST_TYPE],
                                              answers[LAST_ID]);
    }
    return code;
}

int
mm_page_runs_read(mm_driver *cu, mm_range range, mm_run_comparison comparison, mm_page_runs *runs,
                  mm_status *st)
{
    CUdeviceptr page = mm_page_size(), at = range.start, end = mm_range_end(range);
    CUresult code = CUDA_SUCCESS;
    mm_scope scope;
    int rc;

    if (range.size == 0) {
        return 0;
    }
    rc = mm_scope_enter(&scope, cu, MM_ANY_DEVICE, st);
    if (rc < 0) {
        return -1;
    }
    while (rc == 0 && at < end) {
        CUdeviceptr next = at / page * page + page;
        mm_page_run run = {.range = {.start = at, .allocation = range.allocation}};
        run.range.size = (size_t)((next < end ? next : end) - at);
        code = query_run(cu, &run, comparison);
        rc = code == CUDA_SUCCESS ? mm_page_runs_append(runs, &run, st)
                                  : mm_fail_call(st, "cuMemRangeGetAttributes", (int)code);
        at += run.range.size;
    }
    mm_scope_leave(&scope);
    return code == CUDA_SUCCESS ? rc : mm_range_diagnose(cu, range, mm_host(), MM_QUERY, st);
}
