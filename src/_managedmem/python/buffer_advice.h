/* buffer_advice.h: the getters and setters of buffer_advice.c, for the type's table. */
#ifndef MM_BUFFER_ADVICE_H
#define MM_BUFFER_ADVICE_H

#include "buffer.h"

PyObject *mm_buffer_get_read_mostly(PyObject *op, void *closure);
int mm_buffer_set_read_mostly(PyObject *op, PyObject *value, void *closure);
PyObject *mm_buffer_get_preferred_location(PyObject *op, void *closure);
int mm_buffer_set_preferred_location(PyObject *op, PyObject *value, void *closure);
PyObject *mm_buffer_get_accessed_by(PyObject *op, void *closure);
int mm_buffer_set_accessed_by(PyObject *op, PyObject *value, void *closure);
PyObject *mm_buffer_get_last_prefetch_location(PyObject *op, void *closure);

#endif
