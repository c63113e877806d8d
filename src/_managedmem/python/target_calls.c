/* target_calls.c: a prefetch or discard of targets. All arguments are read and checked before the
 * first call that changes anything. */
#include "target_calls.h"

#include "../memory/unsupported.h"
#include "stream_object.h"

PyObject *
mm_targets_result(mm_targets *t, int rc, const mm_status *st)
{
    mm_state *state = t->state;
    size_t skipped = t->skipped;
    bool counts = t->skips;

    mm_targets_release(t);
    if (rc < 0) {
        return mm_raise(state, st);
    }
    return counts ? PyLong_FromSize_t(skipped) : Py_NewRef(Py_None);
}

PyObject *
mm_run_on_targets(mm_state *state, mm_operation op, PyObject *const argv[MM_CALL_ARGC])
{
    mm_dispatch_options options;
    mm_stream_use stream;
    bool skips;
    mm_targets t;
    mm_status st;
    int rc;

    assert(op == MM_PREFETCH || mm_discards(op));
    if (mm_read_unsupported(argv[MM_CALL_UNSUPPORTED], &skips) < 0
        || mm_targets_read_or_skip(state, argv[MM_CALL_TARGETS], op, skips, &t) < 0) {
        return NULL;
    }
    if ((op != MM_DISCARD && mm_targets_read_locations(&t, argv[MM_CALL_LOCATION]) < 0)
        || mm_read_dispatch_options(state, argv[MM_CALL_STREAM], argv[MM_CALL_DISPATCH],
                                    argv[MM_CALL_DEFER], &stream, &options)
               < 0) {
        mm_targets_release(&t);
        return NULL;
    }
    t.skipped += skips ? mm_skip_unsupported(t.cu, op, &t.batch, options.dispatch) : 0;
    rc = mm_targets_enter(&t, &stream, &st);
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        rc = t.producer_count > 0 && !(skips && mm_batch_is_empty(&t.batch))
                 ? mm_targets_follow(&t, options.stream, &st)
                 : 0;
        if (rc == 0) {
            rc = skips ? mm_batch_run_or_skip(t.cu, op, &t.batch, &options, &t.skipped, &st)
                       : mm_batch_run(t.cu, op, &t.batch, &options, &st);
        }
        mm_targets_leave(&t);
        Py_END_ALLOW_THREADS
    }
    return mm_targets_result(&t, rc, &st);
}
