/* signature.h: the parameters of a function, as the first line of its docstring has them, and sorting
 * the arguments of a call by them. Functions return 0, or -1 with an exception that names the function
 * and the argument. */
#ifndef MM_SIGNATURE_H
#define MM_SIGNATURE_H

#include <stdatomic.h>

#include "../driver/status.h"
#include "compat.h"

enum { MM_MOST_PARAMETERS = 8 };

/* The parameters of a function, in the order of an enum of its own:
 *
 *     PyDoc_STRVAR(fill_doc, "fill($self, value, *, stream=None)\n--\n\n...");
 *
 *     enum { VALUE, STREAM, ARGC };
 *     static mm_signature signature = {.doc = fill_doc};
 *     PyObject *argv[ARGC];
 *
 * The first call reads the docstring. Concurrent threads and interpreters each read it, and store
 * the same words: `counts` last, which publishes the others. */
typedef struct {
    const char *doc;
    atomic_uint counts;
    atomic_uint names[MM_MOST_PARAMETERS];
} mm_signature;

/* Stores the arguments of a FASTCALL|KEYWORDS method in argv, borrowed; NULL for missing ones. */
int mm_signature_args(mm_signature *s, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                      PyObject **argv);

/* mm_signature_args for the tuple and dict of a constructor. */
int mm_signature_args_new(mm_signature *s, PyObject *args, PyObject *kwargs, PyObject **argv);

#endif
