/* location_set.h: live sets of locations: the common part of AccessedBySetProxy and
 * PeerAccessibleBySetProxy. Each adds the functions that read and change its members. */
#ifndef MM_LOCATION_SET_H
#define MM_LOCATION_SET_H

#include "location_object.h"

/* A kind of set: its functions, which act on its owner, a buffer or a resource. Those of type int
 * return 0, or -1 with an exception. */
typedef struct {
    const char *name; /* of the type */
    const char *owner_name; /* of the owner's type, for messages */
    bool (*is_closed)(PyObject *owner);
    int (*raise_closed)(PyObject *owner);

    /* Queries the driver for the members. */
    int (*read)(PyObject *owner, mm_location_set *set);

    /* Reads the members before a change that may remove some. For members that cannot be queried,
     * *set becomes `removed`, so that the change advises every location that it names. NULL if
     * members can always be queried. */
    int (*read_before)(PyObject *owner, mm_location_set removed, mm_location_set *set);

    /* Changes the members from one set to a different set; all or nothing. */
    int (*change)(PyObject *owner, mm_location_set from, mm_location_set to);

    /* Removes a location that is not a member, but that a part of the memory may have. NULL for
     * memory whose parts are always alike. */
    int (*remove_from_parts)(PyObject *owner, mm_location_set member);

    /* Reads the location that a value stands for, member or not. TypeError or ValueError for a value
     * that stands for none. */
    int (*read_location)(mm_state *state, PyObject *value, CUmemLocation *location);

    /* Reads the member that a value stands for; *member is 0 for a location that the set ignores.
     * TypeError or ValueError for a value that cannot be a member. Without strict, the value is
     * only searched for or removed, and need not be checked fully. */
    int (*read_member)(mm_state *state, PyObject *owner, PyObject *value, bool strict,
                       mm_location_set *member);
} mm_set_kind;

/* Reads an iterable of members. An item that cannot be a member is an error if strict, and is left
 * out otherwise. owner may be NULL for a kind that does not use it. */
int mm_set_read_members(mm_state *state, const mm_set_kind *kind, PyObject *owner,
                        PyObject *values, bool strict, mm_location_set *set);

/* mm_set_read_members for accessed_by. */
int mm_read_members(mm_state *state, PyObject *values, bool strict, mm_location_set *set);

/* ValueError for a NUMA host, which cannot be a member of accessed_by. */
int mm_check_accessed_by(CUmemLocation location);

/* A set of that kind, with a reference to its owner. */
PyObject *mm_set_new(mm_state *state, PyTypeObject *type, const mm_set_kind *kind,
                     PyObject *owner);

/* Assigns to the property that returns the set. */
int mm_set_assign(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *value);

/* Makes the type and adds it to the module. */
int mm_set_add_type(PyObject *module, const char *name, const char *doc, PyTypeObject **out);

#endif
