/* policy_object.h: the struct behind MigrationPolicy, and applying one to targets. */
#ifndef MM_POLICY_OBJECT_H
#define MM_POLICY_OBJECT_H

#include "../memory/policy.h"
#include "targets.h"

/* Immutable. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_policy policy;
} mm_policy_object;

/* Reads a policy= that was given: *policy points into the MigrationPolicy, which must outlive it.
 * -1 with TypeError for another object. */
int mm_read_given_policy(mm_state *state, PyObject *value, const mm_policy **policy);

/* mm_read_given_policy, but *policy is NULL for None and for a missing argument. */
static inline int
mm_read_policy(mm_state *state, PyObject *value, const mm_policy **policy)
{
    *policy = NULL;
    return value == NULL || value == Py_None ? 0 : mm_read_given_policy(state, value, policy);
}

/* A new MigrationPolicy. */
PyObject *mm_policy_object_new(mm_state *state, const mm_policy *policy);

/* In policy_applied.c. Applies the policy to a target or a sequence of targets. If `skips`, passes over
 * targets that cannot take the policy. On success *before has the earlier advice, and *t has the
 * targets, which are not entered; the caller frees both. On failure there is nothing to free. */
int mm_policy_apply_to(mm_state *state, const mm_policy *policy, PyObject *targets, bool skips,
                       mm_targets *t, mm_page_runs *before);

/* The AppliedPolicy that policy.applied(targets, unsupported=...) returns. */
PyObject *mm_applied_policy_new(mm_state *state, PyObject *policy, PyObject *targets, bool skips);

#endif
