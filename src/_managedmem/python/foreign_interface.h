/* foreign_interface.h: reading memory by __cuda_array_interface__ and __array_interface__. */
#ifndef MM_FOREIGN_INTERFACE_H
#define MM_FOREIGN_INTERFACE_H

#include "foreign_layout.h"

/* Each reads an object by one attribute: 1 if it was read, 0 if the object lacks the attribute, -1
 * with an exception. */
int mm_read_cuda_interface(mm_state *state, PyObject *value, mm_foreign *out);
int mm_read_host_interface(mm_state *state, PyObject *value, mm_foreign *out);

#endif
