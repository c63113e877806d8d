/* foreign_memory.h: reading the memory of an object of another library. */
#ifndef MM_FOREIGN_MEMORY_H
#define MM_FOREIGN_MEMORY_H

#include "foreign_layout.h"

/* Reads an object by the first protocol that does not refuse; TypeError for an object that shows
 * no memory. `ordered` is true if the work on the memory must follow the work of its producer. */
int mm_read_foreign(mm_state *state, PyObject *value, bool ordered, mm_foreign *out);

/* Reads the owner of a wrapped range by the buffer protocol or an array interface. 1 if it was
 * read; 0 if it shows no memory, refuses to now, or is a torch tensor; -1 with an exception. */
int mm_read_owner(mm_state *state, PyObject *value, mm_foreign *out);

/* 1 if the object holds this memory now, 0 if not, -1 with an exception. Asks torch tensors, and
 * objects that show host memory. If held is not NULL and the result is 1, *held is a new reference
 * that keeps the memory exported. */
int mm_holds_memory(mm_state *state, PyObject *value, CUdeviceptr start, size_t size,
                    PyObject **held);

/* 1 if the object is an array or tensor, which is one target even if it can be iterated over; 0 if
 * not, -1 with an exception. */
int mm_is_array(mm_state *state, PyObject *value);

#endif
