/* args.h: reading arguments. Everything here may run Python code, so it comes before any buffer is
 * entered. Functions return 0, or -1 with an exception that names the function and the argument. */
#ifndef MM_ARGS_H
#define MM_ARGS_H

#include "../memory/dispatch.h"
#include "errors.h"

/* A function's parameters: the first `positional` may be given by position, all by name. */
typedef struct {
    const char *function;
    const char *const *names;
    int required, positional, total;
} mm_parameters;

/* Sorts the arguments of a FASTCALL|KEYWORDS method into out; missing ones become NULL. */
int mm_args(const mm_parameters *p, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
            PyObject **out);

/* The same for a tuple and dict, as constructors get them. */
int mm_args_new(const mm_parameters *p, PyObject *args, PyObject *kwargs, PyObject **out);

/* An int that is not a bool: PyErr_Format(error, ...) names `what` otherwise. */
int mm_read_index(PyObject *value, const char *what, PyObject *error, long long *out);

/* A byte count of 0 or more: TypeError unless it is an int, ValueError for a bad one. */
int mm_read_size(PyObject *value, const char *what, size_t *out);

/* An address: a positive int, or an object with one behind __int__ such as a CUdeviceptr. */
int mm_read_address(PyObject *value, CUdeviceptr *out);

/* True or False, also of NumPy; TypeError for anything else, ints included. */
int mm_read_numpy_flag(mm_state *state, PyObject *value, const char *name, bool *out);

static inline int
mm_read_flag(mm_state *state, PyObject *value, const char *name, bool *out)
{
    if (value != Py_True && value != Py_False) {
        return mm_read_numpy_flag(state, value, name, out);
    }
    *out = value == Py_True;
    return 0;
}

/* An address and a byte count. The address may be 0 if the count is 0. */
int mm_read_address_range(PyObject *address, PyObject *bytes, CUdeviceptr *start, size_t *size);

/* "auto", "batch" or "loop"; None, True or False. NULL is the default. */
int mm_read_dispatch(PyObject *value, mm_dispatch *out);
int mm_read_given_defer(mm_state *state, PyObject *value, mm_defer *out);

static inline int
mm_read_defer(mm_state *state, PyObject *value, mm_defer *out)
{
    *out = MM_DEFER_AUTO;
    return value == NULL || value == Py_None ? 0 : mm_read_given_defer(state, value, out);
}

/* The UTF-8 of a str without NUL; NULL without an exception for anything else. */
const char *mm_read_text(PyObject *value);

#endif
