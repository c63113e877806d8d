/* location_object.h: the objects for locations: the common base of the types Host and Device. */
#ifndef MM_LOCATION_OBJECT_H
#define MM_LOCATION_OBJECT_H

#include "errors.h"

#include "../memory/location.h"

/* A Host or a Device. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    CUmemLocation location;
} mm_location_object;

/* The location of an object that is known to be a Host or a Device. */
static inline CUmemLocation
mm_location_of(PyObject *op)
{
    return ((mm_location_object *)op)->location;
}

/* The interned Host or Device; a new reference. None for the location that means "unset". */
PyObject *mm_location_object_new(mm_state *state, CUmemLocation location);

/* Allocates a Host or Device without interning it. */
PyObject *mm_new_location(PyTypeObject *type, CUmemLocation location);

/* The members of a set, as a frozenset; a new reference. */
PyObject *mm_location_frozenset(mm_state *state, mm_location_set set);

/* The location of a device by its ordinal; ValueError if this system has no such device. */
int mm_device_location(mm_state *state, long long ordinal, CUmemLocation *out);

/* The location of the calling thread's current device. */
int mm_current_device_location(mm_state *state, CUmemLocation *out);

/* Slots of both types. */
PyObject *mm_location_repr(PyObject *op);
extern PyMemberDef mm_location_members[];

#endif
