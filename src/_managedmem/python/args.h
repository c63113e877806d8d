/* args.h: reading the values of arguments. Reading may run Python code, so callers read all
 * arguments before they enter a buffer. Functions that return int return 0, or -1 with an
 * exception that says which value is wrong. */
#ifndef MM_ARGS_H
#define MM_ARGS_H

#include "../memory/dispatch.h"
#include "errors.h"
#include "signature.h"

/* Reads an int that is not a bool. Raises `error` for other objects; messages call the value
 * `name`. */
int mm_read_index(PyObject *value, const char *name, PyObject *error, long long *out);

/* Reads a byte count of 0 or more. TypeError for an object that is not an int, ValueError for a
 * bad count. */
int mm_read_size(PyObject *value, const char *name, size_t *out);

/* Reads an address: a positive int, or an object whose __int__ returns one, such as a
 * CUdeviceptr. */
int mm_read_address(PyObject *value, CUdeviceptr *out);

/* Reads True or False, of Python or of NumPy. TypeError for anything else, ints included. */
int mm_read_flag_slow(mm_state *state, PyObject *value, const char *name, bool *out);

static inline int
mm_read_flag(mm_state *state, PyObject *value, const char *name, bool *out)
{
    if (value != Py_True && value != Py_False) {
        return mm_read_flag_slow(state, value, name, out);
    }
    *out = value == Py_True;
    return 0;
}

/* Reads an address and a byte count. The address may be 0 if the count is 0. */
int mm_read_address_range(PyObject *address, PyObject *bytes, CUdeviceptr *start, size_t *size);

/* Reads "auto", "batch" or "loop". NULL means "auto". */
int mm_read_dispatch(PyObject *value, mm_dispatch *out);

/* Reads True or False, of Python or of NumPy. */
int mm_read_defer_flag(mm_state *state, PyObject *value, mm_defer *out);

/* Reads None, True or False. NULL means None. */
static inline int
mm_read_defer(mm_state *state, PyObject *value, mm_defer *out)
{
    *out = MM_DEFER_AUTO;
    return value == NULL || value == Py_None ? 0 : mm_read_defer_flag(state, value, out);
}

/* Reads "raise" or "skip". *skips is true for "skip". */
int mm_read_unsupported_text(PyObject *value, bool *skips);

/* mm_read_unsupported_text, but NULL means "raise". */
static inline int
mm_read_unsupported(PyObject *value, bool *skips)
{
    *skips = false;
    return value == NULL ? 0 : mm_read_unsupported_text(value, skips);
}

/* Returns the UTF-8 of a str without null characters, borrowed from the str. Returns NULL without
 * an exception for everything else. */
const char *mm_read_text(PyObject *value);

#endif
