/* foreign_memory.h: reading the memory of an object of another library. */
#ifndef MM_FOREIGN_MEMORY_H
#define MM_FOREIGN_MEMORY_H

#include "../memory/range.h"
#include "args.h"
#include "foreign_class.h"

/* One target that is not a ManagedBuffer. */
typedef struct {
    mm_range range;
    bool dense; /* no gaps */
    bool strided; /* not C-contiguous: a copy of the bytes would be another array */
    bool read_only; /* of an array; for an export, mm_is_read_only queries the memoryview */
    bool vouched; /* the object keeps its memory alive, also system memory */
    CUstream producer; /* the stream in an array's interface; NULL for none */
    PyObject *export; /* a memoryview to keep while the range is used, or NULL */
} mm_foreign;

/* Reads an object of any kind; TypeError for one that shows no memory. */
int mm_read_foreign(mm_state *state, PyObject *value, mm_foreign *out);

/* Reads an object by its __cuda_array_interface__: 1 if it was read; 0 if the object has none or
 * is a torch tensor, whose interface can raise; -1 with an exception. */
int mm_read_interface(mm_state *state, PyObject *value, mm_foreign *out);

/* Reads an object by the buffer protocol: 1 if it was read, 0 if the object lacks it, -1 with an
 * exception. */
int mm_read_exported(mm_state *state, PyObject *value, mm_foreign *out);

/* 1 if an exporter of the buffer protocol or a torch tensor holds this memory now, 0 if not, -1
 * with an exception. If held is not NULL and the result is 1, *held is a new reference that keeps
 * the export. */
int mm_holds_memory(mm_state *state, PyObject *value, CUdeviceptr start, size_t size,
                    PyObject **held);

/* Clears the exception of an object that refuses to show its memory and returns true. False for an
 * exception that must propagate, such as MemoryError or KeyboardInterrupt. */
bool mm_clear_refusal(void);

/* 1 if the object is an array or tensor, which is one target even if it can be iterated over; 0 if
 * not, -1 with an exception. */
int mm_is_array(mm_state *state, PyObject *value);

/* Raises `error` with the type of a foreign object and the reason: the repr of an array may wait
 * for a GPU, or read all of it. Returns -1. */
int mm_refuse_foreign(PyObject *error, PyObject *value, const char *reason);

#endif
