/* copies.h: the sides and hints of copies, and managedmem.copy(). Reading may run Python code. */
#ifndef MM_COPIES_H
#define MM_COPIES_H

#include "../memory/copy_pairs.h"
#include "foreign_memory.h"

#define MM_CANNOT_WRITE "cannot be copied into: it is read-only"

/* Reads and checks one side of a copy: a ManagedBuffer or an object of another library. ValueError
 * unless it is C-contiguous, in the byte order of the host (or in any, if `bytes` is true) and,
 * for a destination, writable. Sets the range, the producer and the export of *side. */
int mm_read_copied(mm_state *state, PyObject *value, bool writable, bool bytes, mm_foreign *side);

/* Hints for one copy. A location of type NONE is no hint. */
typedef struct {
    mm_copy_options options; /* without the stream */
    CUmemLocation from, to;
    bool given;
} mm_copy_hints;

/* Reads cuda.core's CopyOptions, an object with its attributes, or a dict of them; NULL and None are no
 * hints. */
int mm_read_copy_hints(mm_state *state, PyObject *options, mm_copy_hints *hints);

PyObject *mm_copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
extern const char mm_copy_function_doc[];

#endif
