/* policy_object.h: the struct behind MigrationPolicy, and taking hold of targets to apply one to them. */
#ifndef MM_POLICY_OBJECT_H
#define MM_POLICY_OBJECT_H

#include "../memory/policy.h"
#include "targets.h"

/* Nothing in it changes once the object is made. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_policy policy;
} mm_policy_object;

/* Applies the policy to "a target or several". On success *before has what was there, and the
 * targets are read but not entered; on failure nothing needs to be ended. */
int mm_policy_apply_to(mm_state *state, const mm_policy *policy, PyObject *targets, mm_targets *t,
                       mm_page_runs *before);

/* What policy.applied(targets) gives. */
PyObject *mm_applied_policy_new(mm_state *state, PyObject *policy, PyObject *targets);

#endif
