/* working_objects.h: the structs behind WorkingSet and WorkingGroup, for the files of the two
 * types. */
#ifndef MM_WORKING_OBJECTS_H
#define MM_WORKING_OBJECTS_H

#include "../memory/working_loader.h"
#include "errors.h"

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_loader *loader; /* until the end of the object */
    size_t budget;
    int device;
    /* A private dict whose keys are the groups, in the order of adding, also while one is being added. */
    PyObject *groups;
    PyObject *order; /* the tuple that was given; or NULL. Under the object's lock */
} mm_working_set_object;

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    PyObject *set;
    PyObject *name; /* or NULL */
    /* Keep the memory until the set has ended; under the object's lock. */
    PyObject *items, *exports;
    atomic_bool added; /* the set uses its memory until it has ended, or the group is removed */
    atomic_bool removed; /* it is not used any more */
    mm_group_id id;
    mm_group_access access;
    size_t bytes;
} mm_working_group_object;

static inline mm_working_set_object *
mm_working_set_of(PyObject *op)
{
    return (mm_working_set_object *)op;
}

static inline mm_working_group_object *
mm_working_group_of(PyObject *op)
{
    return (mm_working_group_object *)op;
}

/* The set at work, or NULL with an exception in a forked child, which must not touch it. */
static inline mm_loader *
mm_working_loader_of(PyObject *set)
{
    mm_state *state = mm_type_state(Py_TYPE(set));

    return mm_open(state) == NULL ? NULL : mm_working_set_of(set)->loader;
}

/* Ends the set without raising, and without the GIL. */
static inline void
mm_working_set_end(PyObject *set)
{
    mm_loader *loader = mm_working_set_of(set)->loader;

    if (loader != NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_loader_end(loader);
        Py_END_ALLOW_THREADS
    }
}

/* The name of an access in Python. */
static inline const char *
mm_group_access_name(mm_group_access access)
{
    static const char *const names[] = {
        [MM_GROUP_READ] = "read",
        [MM_GROUP_WRITE] = "write",
        [MM_GROUP_SCRATCH] = "scratch",
    };

    return names[access];
}

/* --- working_set_groups.c ----------------------------------------------------------------- */

/* Reads targets and adds a group of them to the set: WorkingSet.add(). */
PyObject *mm_working_set_add_group(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
extern const char mm_working_set_add_doc[];

/* Takes a group out of the set: WorkingSet.remove(). */
PyObject *mm_working_set_remove_group(PyObject *op, PyObject *value);
extern const char mm_working_set_remove_doc[];

/* --- working_group_object.c --------------------------------------------------------------- */

/* Releases the targets of a group, once its set has ended or the group is removed. */
void mm_working_group_release_targets(PyObject *op);

/* --- working_use_object.c ----------------------------------------------------------------- */

/* The methods of WorkingGroup that begin and end uses. */
PyObject *mm_working_group_use(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *mm_working_group_acquire(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
PyObject *mm_working_group_release(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
extern const char mm_working_group_use_doc[], mm_working_group_acquire_doc[],
    mm_working_group_release_doc[];

#endif
