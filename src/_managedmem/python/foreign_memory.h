/* foreign_memory.h: from an object of another library to the range of memory that it stands for. */
#ifndef MM_FOREIGN_MEMORY_H
#define MM_FOREIGN_MEMORY_H

#include "../memory/range.h"
#include "args.h"
#include "foreign_class.h"

/* One target that is not a ManagedBuffer. */
typedef struct {
    mm_range range;
    bool dense; /* no gaps */
    bool read_only; /* of an array; for an export, mm_is_read_only asks the memoryview */
    bool vouched; /* if it is system memory, the object holds it */
    CUstream producer; /* the stream in an array's interface; NULL for none */
    PyObject *export; /* a memoryview to keep while the range is used, or NULL */
} mm_foreign;

int mm_read_foreign(mm_state *state, PyObject *value, mm_foreign *out);

/* The same by __cuda_array_interface__ only, where the object is no torch tensor: 1, 0 if it has none or
 * is a tensor, or -1 with an exception. */
int mm_read_interface(mm_state *state, PyObject *value, mm_foreign *out);

/* The same for an object of the buffer protocol. */
int mm_read_exported(PyObject *value, mm_foreign *out);

/* Whether an object of the buffer protocol, or a torch tensor, holds this memory now: 1, 0 or -1 with an
 * exception. While *held (unless NULL) is kept, an object of the buffer protocol goes on holding it; it is
 * set with answer 1 only. */
int mm_holds_memory(mm_state *state, PyObject *value, CUdeviceptr start, size_t size,
                    PyObject **held);

/* Clears the exception of an object that refuses to show its memory, and is then true; false for one that
 * must be passed on, such as MemoryError or KeyboardInterrupt. */
bool mm_clear_refusal(void);

/* In buffer_host_access.c: ValueError for memory that the driver would copy on the host, but that the object
 * does not hold. */
int mm_check_foreign_copied(mm_state *state, const mm_foreign *side);

/* Whether the object is one array or tensor, which may be iterable and still is one target: 1, 0
 * or -1 with an exception. */
int mm_is_array(mm_state *state, PyObject *value);

/* Raises `error` about a foreign object, named by its type: the repr of an array may wait for a
 * GPU, or read all of it. Returns -1. */
int mm_refuse_foreign(PyObject *error, PyObject *value, const char *why);

#endif
