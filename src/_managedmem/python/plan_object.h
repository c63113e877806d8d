/* plan_object.h: what the files behind PrefetchPlan share. */
#ifndef MM_PLAN_OBJECT_H
#define MM_PLAN_OBJECT_H

#include "../memory/plan.h"
#include "compat.h"

/* A PrefetchPlan. What is laid out is dropped by a change and made again by the next execution;
 * executions that are under way keep theirs. Fields are read and written under the object's lock. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *kept; /* a list, never shown: (target, memoryview or None) of each entry; or NULL */
    mm_plan_entry *entries;
    size_t count, capacity;
    mm_plan *prefetch, *discard_prefetch; /* laid out; or NULL */
} mm_plan_object;

static inline mm_plan_object *
mm_plan_of(PyObject *op)
{
    return (mm_plan_object *)op;
}

void mm_plan_drop_layouts(mm_plan_object *self);

/* In plan_fill.c: what adds entries. */
PyObject *mm_plan_tp_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
PyObject *mm_plan_add(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *mm_plan_fit_targets(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *mm_plan_from_module(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *mm_plan_from_policy(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
extern const char mm_plan_add_doc[], mm_plan_fit_doc[], mm_plan_from_module_doc[],
    mm_plan_from_policy_doc[];

/* In plan_explain.c: what an execution would call, and why, as a str: a heading, a line for each kind
 * of call, and remarks. Uses up the ways in the outlook. */
PyObject *mm_plan_words(mm_plan_preview *o, const mm_dispatch_options *how,
                        const mm_plan_entry *entries, size_t count);

#endif
