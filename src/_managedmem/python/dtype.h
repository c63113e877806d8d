/* dtype.h: the element types of a buffer, by every name that other libraries use. */
#ifndef MM_DTYPE_H
#define MM_DTYPE_H

#include "state.h"

#include <stdint.h>

typedef struct {
    const char *name;    /* NumPy's and torch's: "float32" */
    const char *typestr; /* of __cuda_array_interface__: "<f4" */
    const char *format;  /* of the buffer protocol: "f" */
    uint8_t itemsize;
    uint8_t dlpack_code;
} mm_dtype;

/* True for bfloat16 and the 8-bit floats, for which only DLPack has codes. */
static inline bool
mm_is_plain_bytes(const mm_dtype *dtype)
{
    return dtype->typestr[1] == 'V';
}

/* The name of the unsigned integers of the same size. For elements of 1 or 2 bytes. */
static inline const char *
mm_dtype_bits(const mm_dtype *dtype)
{
    return dtype->itemsize == 1 ? "uint8" : "uint16";
}

/* The element type of a name ("float32", "f4", "<f4"), a Python type, a NumPy dtype or scalar
 * type, or a torch dtype; uint8 for NULL and None. NULL with TypeError for anything else. */
const mm_dtype *mm_read_dtype(PyObject *value);

/* All element types; the first is uint8. */
enum { MM_DTYPE_COUNT = 23 };
extern const mm_dtype mm_dtypes[MM_DTYPE_COUNT];

/* A new reference to the DType of an element type, the value of buf.dtype. */
PyObject *mm_dtype_object(mm_state *state, const mm_dtype *dtype);

#endif
