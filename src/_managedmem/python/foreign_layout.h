/* foreign_layout.h: from the shape and the strides of another library's array to the range that its
 * elements cover. */
#ifndef MM_FOREIGN_LAYOUT_H
#define MM_FOREIGN_LAYOUT_H

#include "../memory/range.h"
#include "args.h"
#include "foreign_class.h"

enum { MM_FOREIGN_DIMENSIONS = 64 };

#define MM_LAZY_TENSOR                                                                      \
    "is a lazy conjugate or negative, whose values are not those in memory: make it plain " \
    "with resolve_conj().resolve_neg() first"
#define MM_PYTHON_OBJECTS                                                                 \
    "refers to Python objects, and bytes in place of a reference would end the process: " \
    "convert it to numbers, as array.astype(\"float64\") does"

/* One target that is not a ManagedBuffer. */
typedef struct {
    mm_range range;
    bool dense; /* no gaps */
    bool strided; /* not C-contiguous: a copy of the bytes would be another array */
    bool swapped; /* elements of the other byte order */
    bool objects; /* elements that refer to Python objects */
    bool lazy; /* a tensor whose values are the conjugates or negatives of what lies in memory */
    bool read_only;
    bool vouched; /* the object keeps its memory alive, even system memory */
    bool ordered; /* set by the caller: the work must follow the producer's */
    CUstream producer; /* if ordered, the stream of the producer's work; NULL for none */
    PyObject *export; /* to keep while the range is used: a memoryview or a capsule; or NULL */
} mm_foreign;

/* The elements of an array; strides are in bytes, and NULL means C order. */
typedef struct {
    int dimensions;
    Py_ssize_t itemsize;
    const Py_ssize_t *shape, *strides;
} mm_array_layout;

/* True for an array without elements. Callers make it an empty range, and do not read its address,
 * which may be 0. */
bool mm_has_no_elements(const mm_array_layout *layout);

/* Computes the extent in memory from the address of element 0. */
int mm_read_extent(PyObject *value, CUdeviceptr first, const mm_array_layout *layout,
                   mm_foreign *out);

/* Reads a tuple of at most MM_FOREIGN_DIMENSIONS ints; returns their number, or -1. */
int mm_read_ints(PyObject *tuple, const char *name, Py_ssize_t *out);

int mm_refuse_size(PyObject *value);

/* True for the mark of a byte order, such as ">", that is not the host's. */
bool mm_is_other_order(char mark);

#endif
