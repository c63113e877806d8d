/* foreign_class.h: the library that an object belongs to: the package and the class of its type,
 * without importing the package. */
#ifndef MM_FOREIGN_CLASS_H
#define MM_FOREIGN_CLASS_H

#include "errors.h"

/* True if the object's type, or one of its bases, comes from the package, such as "torch", or from a
 * module of it: other programs derive from the classes of libraries. */
bool mm_is_from(mm_state *state, PyObject *object, const char *package);
bool mm_is_class_from(mm_state *state, PyTypeObject *type, const char *package);

/* True if the object's type is the class `name` of that package, or derives from it, wherever the
 * derived class was defined. */
bool mm_is_instance(mm_state *state, PyObject *object, const char *package, const char *name);

/* The first columns of a table with a row for each library. A row with package and name matches as
 * mm_is_instance does; without a name, as mm_is_from does. Without a package it matches any
 * object. */
typedef struct {
    const char *package, *name;
} mm_foreign_class;

/* True if the object matches. *modules caches the modules of its class and of the bases for the other
 * rows of the table: it is NULL before the first row, and the caller releases it after the last. */
bool mm_matches_class(mm_state *state, PyObject *object, mm_foreign_class class,
                      PyObject **modules);

/* Reads an attribute. Returns 1 with a new reference in *out, 0 without an exception if the
 * attribute is missing, -1 with an exception. *out is NULL unless the result is 1. */
int mm_get_optional(PyObject *object, const char *name, PyObject **out);

/* Reads cuda.core's options: a dict, or an object with some of the attributes. TypeError for other
 * objects and for a dict with other keys. Stores new references in values, and NULL for an option
 * that is missing or None. */
int mm_read_options(PyObject *options, const char *const *names, size_t count, PyObject **values);

/* The type name of a foreign object for messages, such as "numpy.ndarray". */
PyObject *mm_type_text(PyObject *value);

/* Raises `error` with the type of a foreign object and the reason. The repr is not shown: that of
 * an array may wait for a GPU, or read the whole array. Returns -1. */
int mm_refuse_foreign(PyObject *error, PyObject *value, const char *reason);

#endif
