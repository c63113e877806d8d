/* plan_object.h: the struct behind PrefetchPlan, for the files that make up the type. */
#ifndef MM_PLAN_OBJECT_H
#define MM_PLAN_OBJECT_H

#include "../memory/plan.h"
#include "compat.h"

/* A PrefetchPlan. A change of its entries drops the prepared plans, and the next execution prepares
 * a new one; executions under way keep the old one. Fields are read and written under the object's
 * lock. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *kept; /* a private list: (target, memoryview or None) of each entry; or NULL */
    mm_plan_entry *entries;
    size_t count, capacity;
    mm_plan *prefetch, *discard_prefetch; /* prepared; or NULL */
} mm_plan_object;

static inline mm_plan_object *
mm_plan_of(PyObject *op)
{
    return (mm_plan_object *)op;
}

/* In plan_fill.c. */

/* Releases the prepared plans, after a change of the entries; under the object's lock. */
void mm_plan_drop_prepared(mm_plan_object *self);

PyObject *mm_plan_tp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
mm_keyword_method mm_plan_add, mm_plan_fit_targets, mm_plan_from_module, mm_plan_from_policy;
extern const char mm_plan_doc[], mm_plan_add_doc[], mm_plan_fit_doc[], mm_plan_from_module_doc[],
    mm_plan_from_policy_doc[];

/* In plan_explain.c: the driver calls of an execution and their reasons, as a str: a heading, a
 * line for each kind of call, and remarks. */
PyObject *mm_plan_explanation(const mm_plan_preview *preview, const mm_dispatch_options *options,
                              const mm_plan_entry *entries, size_t count);

#endif
