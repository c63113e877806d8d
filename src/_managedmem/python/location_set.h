/* location_set.h: live sets of locations: what AccessedBySetProxy and PeerAccessibleBySetProxy have
 * in common, which is all but where the members are kept. */
#ifndef MM_LOCATION_SET_H
#define MM_LOCATION_SET_H

#include "location_object.h"

/* A kind of set, by what its owner (a buffer, a resource) can do. */
typedef struct {
    const char *name; /* of the type */
    const char *owner_name; /* of the owner's type, for messages */
    bool (*is_closed)(PyObject *owner);
    int (*raise_closed)(void);

    /* Asks the driver for the members. */
    int (*read)(PyObject *owner, mm_location_set *set);

    /* Goes from one set to another, which differ; all or nothing. */
    int (*change)(PyObject *owner, mm_location_set from, mm_location_set to);

    /* Takes out a member that does not show but may be there in part. NULL where none can be. */
    int (*remove_partial)(PyObject *owner, mm_location_set member);

    /* The member that a value stands for; 0 for one that is left out. TypeError or ValueError for
     * what can be no member; of a value that is only looked for or taken out (!strict), less need
     * be checked. */
    int (*read_member)(mm_state *state, PyObject *owner, PyObject *value, bool strict,
                       mm_location_set *member);
} mm_set_kind;

/* Reads an iterable of members. Strictly, everything in it must be one that the set takes. */
int mm_set_read_members(mm_state *state, const mm_set_kind *kind, PyObject *owner,
                        PyObject *values, bool strict, mm_location_set *set);

/* The same for the members of accessed_by, without a set. */
int mm_read_members(mm_state *state, PyObject *values, bool strict, mm_location_set *set);

/* A set of that kind, which keeps its owner. */
PyObject *mm_set_new(mm_state *state, PyTypeObject *type, const mm_set_kind *kind,
                     PyObject *owner);

/* Assignment to the property that gives the set. */
int mm_set_assign(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *value);

/* Makes the type and adds it to the module. */
int mm_set_add_type(PyObject *module, const char *name, const char *doc, PyTypeObject **into);

#endif
