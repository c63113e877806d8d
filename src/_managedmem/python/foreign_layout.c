/* foreign_layout.c: from the shape and the strides of another library's array to the range that its
 * elements cover. */
#include "foreign_layout.h"

#include <stdlib.h>

bool
mm_has_no_elements(const mm_array_layout *layout)
{
    bool empty = false;

    for (int i = 0; i < layout->dimensions; i++) {
        if (layout->shape[i] < 0) {
            return false; /* mm_read_extent refuses it */
        }
        empty = empty || layout->shape[i] == 0;
    }
    return empty;
}

int
mm_refuse_size(PyObject *value)
{
    return mm_refuse_foreign(PyExc_ValueError, value, "describes more memory than there can be");
}

/* True if strided elements fill their extent without a gap or an overlap: in some order of the
 * axes, each axis steps over exactly the bytes that the axes before it cover. */
static bool
fills_extent(const mm_array_layout *layout)
{
    const Py_ssize_t *strides = layout->strides;
    long long covered = layout->itemsize;
    uint64_t left = 0;

    assert(layout->dimensions <= MM_FOREIGN_DIMENSIONS);
    for (int i = 0; i < layout->dimensions; i++) {
        left |= (uint64_t)(layout->shape[i] > 1) << i;
    }
    while (left != 0) {
        int next = 0;
        while (next < layout->dimensions
               && !((left >> next & 1) && llabs(strides[next]) == covered)) {
            next++;
        }
        if (next == layout->dimensions) {
            return false;
        }
        left &= ~((uint64_t)1 << next);
        covered *= layout->shape[next];
    }
    return true;
}

/* True if the elements lie in C order without gaps, as those of a ManagedBuffer do. */
static bool
is_c_contiguous(const mm_array_layout *layout)
{
    uint64_t step = (uint64_t)layout->itemsize; /* may wrap around if another length is 0 */
    bool contiguous = true;

    for (int i = layout->dimensions - 1; i >= 0; i--) {
        if (layout->shape[i] == 0) {
            return true;
        }
        contiguous = contiguous && (layout->shape[i] == 1 || (uint64_t)layout->strides[i] == step);
        step *= (uint64_t)layout->shape[i];
    }
    return contiguous;
}

/* The numbers come from foreign code, so every product and sum is checked. */
int
mm_read_extent(PyObject *value, CUdeviceptr first, const mm_array_layout *layout, mm_foreign *out)
{
    const Py_ssize_t *shape = layout->shape, *strides = layout->strides;
    long long low = 0, high = layout->itemsize, bytes = layout->itemsize;

    assert(layout->dimensions >= 0 && layout->itemsize >= 0);
    for (int i = 0; i < layout->dimensions; i++) {
        long long reach = 0;
        if (shape[i] < 0) {
            return mm_refuse_foreign(PyExc_ValueError, value,
                                     "has a negative length in its shape");
        }
        if (__builtin_mul_overflow(bytes, (long long)shape[i], &bytes)
            || (strides && __builtin_mul_overflow((long long)strides[i], shape[i] - 1LL, &reach))
            || __builtin_add_overflow(reach < 0 ? low : high, reach, reach < 0 ? &low : &high)) {
            return mm_refuse_size(value);
        }
    }
    if (strides && __builtin_sub_overflow(high, low, &bytes)) {
        return mm_refuse_size(value);
    }
    assert(low <= 0 && bytes >= 0);
    out->range.start = first + (CUdeviceptr)low;
    out->range.size = (size_t)bytes;
    if (out->range.start > first || out->range.size > UINT64_MAX - out->range.start) {
        return mm_refuse_foreign(PyExc_ValueError, value,
                                 "describes memory outside the address space");
    }
    out->dense = strides == NULL || fills_extent(layout);
    out->strided = strides != NULL && !is_c_contiguous(layout);
    return 0;
}

int
mm_read_ints(PyObject *tuple, const char *name, Py_ssize_t *out)
{
    Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;

    if (count < 0 || count > MM_FOREIGN_DIMENSIONS) {
        return MM_ERROR(PyExc_TypeError, "%s must be a tuple of at most %d ints, got %R", name,
                        (int)MM_FOREIGN_DIMENSIONS, tuple);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long number;
        if (mm_read_index(PyTuple_GetItem(tuple, i), name, PyExc_TypeError, &number) < 0) {
            return -1;
        }
        out[i] = (Py_ssize_t)number;
    }
    return (int)count;
}

bool
mm_is_other_order(char mark)
{
    bool little = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;

    return mark == (little ? '>' : '<') || (little && mark == '!');
}
