/* module_functions.h: the module's free functions. */
#ifndef MM_MODULE_FUNCTIONS_H
#define MM_MODULE_FUNCTIONS_H

#include "compat.h"

extern PyMethodDef mm_functions[];

/* The function _synchronize, in buffer_arrays.c. */
PyObject *mm_synchronize(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
extern const char mm_synchronize_doc[];

/* The functions _results_usage, _results_limit and _results_trim, in result_object.c. */
PyObject *mm_results_usage(PyObject *module, PyObject *none);
PyObject *mm_results_limit(PyObject *module, PyObject *limit);
PyObject *mm_results_trim(PyObject *module, PyObject *keep);
extern const char mm_results_usage_doc[], mm_results_limit_doc[], mm_results_trim_doc[];

/* residency(), in buffer_residency.c. */
PyObject *mm_residency(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames);
extern const char mm_residency_doc[];

#endif
