/* Injected faults: armed failures of single calls, and the lasting failure of a broken context. */
#include "control.h"

#include <stdio.h>
#include <string.h>

enum { FAULT_LIMIT = 64 };

static struct {
    char function[48];
    unsigned int countdown;
    CUresult code;
    bool after, lasting;
} faults[FAULT_LIMIT];
static size_t fault_count;
static int fault_fired;
static CUresult lasting_fault; /* the result of all calls that need a working context, if not 0 */

bool
emu_fault_arm(const char *function, unsigned int nth, CUresult code, int flags)
{
    if (nth == 0 || fault_count == FAULT_LIMIT) {
        return false;
    }
    snprintf(faults[fault_count].function, sizeof faults[0].function, "%s", function);
    faults[fault_count].countdown = nth;
    faults[fault_count].code = code;
    faults[fault_count].after = (flags & EMU_FAIL_AFTER) != 0;
    faults[fault_count].lasting = (flags & EMU_FAIL_LASTING) != 0;
    fault_count++;
    return true;
}

/* Counts a call for all armed failures of it, and removes the first that is due from the list.
 * Returns its former index, or -1. */
static int
take_fault(const char *function, CUresult *code, bool *after)
{
    int hit = -1;

    for (size_t i = 0; i < fault_count; i++) {
        if (strcmp(faults[i].function, "*") != 0 && strcmp(faults[i].function, function) != 0) {
            continue;
        }
        if (faults[i].countdown > 1) {
            faults[i].countdown--;
        } else if (hit < 0) {
            hit = (int)i;
            *code = faults[i].code;
            *after = faults[i].after;
        }
    }
    if (hit >= 0) {
        if (faults[hit].lasting) {
            lasting_fault = faults[hit].code;
        }
        fault_count--;
        memmove(&faults[hit], &faults[hit + 1], (fault_count - (size_t)hit) * sizeof *faults);
        fault_fired++;
    }
    return hit;
}

CUresult
emu_fault_take(const char *function, bool needs_context, CUresult *fail_after)
{
    CUresult code = CUDA_SUCCESS;
    bool after = false, lasts = lasting_fault != CUDA_SUCCESS;

    if (take_fault(function, &code, &after) >= 0) {
        if (!after) {
            return code;
        }
        *fail_after = code;
    }
    return lasts && needs_context ? lasting_fault : CUDA_SUCCESS;
}

void
emu_fail_clear(void)
{
    emu_lock();
    fault_count = 0;
    fault_fired = 0;
    lasting_fault = CUDA_SUCCESS;
    emu_unlock();
}

int
emu_fail_fired(void)
{
    int fired;

    emu_lock();
    fired = fault_fired;
    emu_unlock();
    return fired;
}
