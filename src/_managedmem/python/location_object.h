/* location_object.h: the Python objects for locations, and the way from any such object to a location. */
#ifndef MM_LOCATION_OBJECT_H
#define MM_LOCATION_OBJECT_H

#include "args.h"

/* Host and Device are the same inside: a location ready for the driver. */
typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    CUmemLocation where;
} mm_location_object;

/* The interned Host or Device; a new reference. None where the driver says "unset". */
PyObject *mm_location_object_new(mm_state *state, CUmemLocation where);
PyObject *mm_host_object(mm_state *state, CUmemLocation where);
PyObject *mm_device_object(mm_state *state, int ordinal);

/* Allocates a Host or Device without interning it. */
PyObject *mm_new_location(PyTypeObject *type, CUmemLocation where);

/* The members of a set, as a frozenset; a new reference. */
PyObject *mm_location_frozenset(mm_state *state, mm_location_set set);

/* Reads a location: ours, or a device of torch, CuPy, numba, JAX, cuda.core or cuda.bindings.
 * ValueError for None, TypeError for what is none. */
int mm_read_location(mm_state *state, PyObject *value, CUmemLocation *out);

/* The same for the argument of Device() or Host(). Any other object, or a location of the other kind, is
 * a ValueError. */
int mm_read_location_id(mm_state *state, PyObject *value, bool device, CUmemLocation *out);

/* The location of a device by its ordinal; ValueError where this system has no such device. */
int mm_device_location(mm_state *state, long long ordinal, CUmemLocation *out);

/* The same for members of accessed_by; NUMA hosts are a ValueError. */
int mm_read_accessed_by_member(mm_state *state, PyObject *value, CUmemLocation *out);

/* Reads an iterable of members, an AccessedBySetProxy too. Strictly, everything in it must be one
 * that accessed_by takes; otherwise what is none is left out. */
int mm_read_members(mm_state *state, PyObject *values, bool strict, mm_location_set *set);

/* The ordinal of a device: a Device, of another library too, or an int, which here can mean nothing
 * else. TypeError for what is none, ValueError for one that is not there. */
int mm_read_device(mm_state *state, PyObject *value, int *ordinal);

/* What Host and Device share as types. */
void mm_location_dealloc(PyObject *self);
extern PyMemberDef mm_location_members[];

#endif
