/* foreign.h: from an object of another library to the range of memory that it stands for. */
#ifndef MM_FOREIGN_H
#define MM_FOREIGN_H

#include "../memory/range.h"
#include "args.h"

/* One target that is no ManagedBuffer. */
typedef struct {
    mm_range range;
    bool dense;        /* no gaps */
    bool read_only;    /* an array's own word; that of an export is asked of it */
    CUstream producer; /* an array's stream, whose work on it comes first; NULL for none */
    PyObject *export;  /* a memoryview to keep while the range is used, or NULL */
} mm_foreign;

int mm_read_foreign(mm_state *state, PyObject *value, mm_foreign *out);

/* Whether the object is one array or tensor, which may be iterable and still is one target: 1, 0
 * or -1 with an exception. */
int mm_is_array(mm_state *state, PyObject *value);

/* Raises `error` about a foreign object, named by its type: the repr of an array may wait for a
 * GPU, or read all of it. Returns -1. */
int mm_refuse_foreign(PyObject *error, PyObject *value, const char *why);

#endif
