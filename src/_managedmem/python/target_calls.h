/* target_calls.h: one prefetch or discard of targets, with the arguments of the free functions as
 * objects. The methods of a buffer come here with the arguments that only few calls have. */
#ifndef MM_TARGET_CALLS_H
#define MM_TARGET_CALLS_H

#include "targets.h"

/* The parameters; discard() has only some of them. */
enum {
    MM_CALL_TARGETS,
    MM_CALL_LOCATION,
    MM_CALL_STREAM,
    MM_CALL_DISPATCH,
    MM_CALL_DEFER,
    MM_CALL_UNSUPPORTED,
    MM_CALL_ARGC
};

/* Runs a prefetch or discard of one target or several. NULL arguments have their defaults. */
PyObject *mm_run_on_targets(mm_state *state, mm_operation op, PyObject *const argv[MM_CALL_ARGC]);

/* The result of a call on targets: None; the number of targets that were passed over, if that was
 * requested; NULL with the exception of the status if rc is -1. Releases the targets. */
PyObject *mm_targets_result(mm_targets *t, int rc, const mm_status *st);

#endif
