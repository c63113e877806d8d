/* module_functions.h: the module's free functions. */
#ifndef MM_MODULE_FUNCTIONS_H
#define MM_MODULE_FUNCTIONS_H

#include "compat.h"

extern PyMethodDef mm_functions[];

/* _register_preset, in allocator_functions.c. */
PyObject *mm_register_preset(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);

/* The function _synchronize, in buffer_arrays.c. */
PyObject *mm_synchronize(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* residency(), in buffer_residency.c. */
PyObject *mm_residency(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames);
extern const char mm_residency_doc[];

#endif
