/* foreign_location.h: reading location arguments: a Device or Host, or the device of another
 * library. */
#ifndef MM_FOREIGN_LOCATION_H
#define MM_FOREIGN_LOCATION_H

#include "../memory/location.h"
#include "args.h"

/* Reads a Device or Host, or a device or host of torch, cuda.core, cuda.bindings, CuPy, numba or
 * JAX. ValueError for None, TypeError for any other object. */
int mm_read_location(mm_state *state, PyObject *value, CUmemLocation *out);

/* Reads the argument of Device() or Host(). ValueError for other objects and for a location of the
 * other type. */
int mm_read_location_id(mm_state *state, PyObject *value, bool device, CUmemLocation *out);

/* Reads the ordinal of a Device, a device of another library, or an int, which cannot be mistaken
 * for the host here. TypeError for other objects, ValueError for a device that does not exist. */
int mm_read_device(mm_state *state, PyObject *value, int *ordinal);

#endif
