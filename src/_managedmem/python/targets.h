/* targets.h: reading a target or a sequence of targets into ranges that are safe to use.
 *
 * Reading may run Python code and validates everything. Entering, right before the driver is
 * called, runs none: it enters the guards of the buffers and the stream, so that no other thread
 * closes them. */
#ifndef MM_TARGETS_H
#define MM_TARGETS_H

#include "buffer.h"
#include "foreign_memory.h"

typedef struct {
    mm_state *state;
    mm_driver *cu;
    const char *name; /* of the argument, for messages */
    PyObject *items; /* a tuple, which keeps the targets alive */
    PyObject *exports; /* memoryviews and capsules of targets, or NULL */
    mm_guard **guards; /* the entered ones; space for each target and a stream */
    size_t entered;
    bool is_collection; /* a sequence, not one target */
    bool skips; /* passes over memory that the operation does not act on */
    size_t skipped; /* the number of targets passed over; their ranges are empty */
    mm_batch batch; /* a transfer for each target, to the host until the caller sets a location */
    mm_guard *inline_guards[MM_INLINE_COUNT + 1];
    mm_device_stream *producers; /* streams of arrays to be discarded or copied; or NULL */
    size_t producer_count;
} mm_targets;

/* Accepts a ManagedBuffer, an object that shows its memory by any protocol of foreign_memory.c, or a
 * list, tuple or other iterable of these. After a failure, -1 with an exception, there is nothing
 * to release. */
int mm_targets_read(mm_state *state, PyObject *value, mm_operation op, mm_targets *t);

/* mm_targets_read, but passes over the targets whose memory the operation does not act on, if
 * `skips`. */
int mm_targets_read_or_skip(mm_state *state, PyObject *value, mm_operation op, bool skips,
                            mm_targets *t);

/* The targets as a tuple; *is_collection is false for a single target. */
PyObject *mm_targets_tuple(mm_state *state, PyObject *value, bool *is_collection);

/* One target, read and checked. Only the range and read_only are set for a ManagedBuffer. */
typedef mm_foreign mm_target;

/* In buffer_host_access.c: ValueError for memory that the driver does not know, so that it would
 * copy on the host, and that the object does not keep alive. */
int mm_check_foreign_copied(mm_state *state, const mm_foreign *side);

int mm_target_read(mm_state *state, mm_driver *cu, PyObject *value, mm_operation op,
                   mm_target *target);

/* Reads one target in the caller's own way. If the producer's stream is a default stream, *device
 * is the device of that stream. -1 with an exception. */
typedef int mm_target_reader(mm_targets *t, PyObject *value, void *context, mm_target *target,
                             int *device);

/* mm_targets_read, but with the caller's reader. Messages call the argument `name`. */
int mm_targets_read_by(mm_state *state, PyObject *value, const char *name,
                       mm_target_reader *reader, void *context, mm_targets *t);

/* Puts "list[i]: ", or "list: " if i is -1, before the message of the current TypeError, ValueError
 * or RuntimeError. Other errors stay as they are, because driver errors have attributes. */
void mm_name_item(const char *list, Py_ssize_t i);

/* Reads one location for all targets, or a list or other iterable with one for each. */
int mm_targets_read_locations(mm_targets *t, PyObject *value);

/* Enters the stream (NULL for none) and the targets. MM_REFUSED if one of them is closed; then
 * none is entered. Runs no Python code and does not raise. */
MM_NODISCARD int mm_targets_enter(mm_targets *t, const mm_stream_use *stream, mm_status *st);

/* Leaves all guards; the targets can be entered again. Needs no GIL and must precede attaching. */
void mm_targets_leave(mm_targets *t);

/* Replaces views by their root buffers, so that the ranges stay targets when the views are closed.
 * The targets must not be entered. */
int mm_targets_hold_roots(mm_targets *t);

/* Removes targets whose memory was freed: closed buffers and freed addresses. The batch must still
 * have a transfer for each target. */
int mm_targets_remove_freed(mm_targets *t);

/* Reads the stream and the options of an operation; NULL is the default of each. Runs Python code
 * and enters nothing. */
int mm_read_dispatch_options(mm_state *state, PyObject *stream, PyObject *dispatch,
                             PyObject *defer, mm_stream_use *use, mm_dispatch_options *options);

/* Releases the targets, which must not be entered. */
void mm_targets_release(mm_targets *t);

/* Makes later work on the stream wait for the producers of arrays that will be discarded or copied. */
MM_NODISCARD int mm_targets_follow(const mm_targets *t, mm_device_stream stream, mm_status *st);

/* --- one prefetch or discard of targets, with the arguments of the free functions as objects ------ */

/* Methods of a buffer use it only for calls with rare arguments, such as unsupported=. */

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
