/* foreign_dlpack.h: reading memory by DLPack. */
#ifndef MM_FOREIGN_DLPACK_H
#define MM_FOREIGN_DLPACK_H

#include "foreign_layout.h"

/* Reads an object by __dlpack__: 1 if it was read, 0 if it has no such method, -1 with an
 * exception. */
int mm_read_dlpack(mm_state *state, PyObject *value, mm_foreign *out);

#endif
