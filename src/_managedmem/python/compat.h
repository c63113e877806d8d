/* compat.h: Python.h, and the only place that looks at Python versions. */
#ifndef MM_COMPAT_H
#define MM_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <structmember.h>

/* A binary for the stable ABI of 3.11 cannot name these slots, yet newer interpreters want them,
 * so their numbers stand here; module.c picks the slots that fit the running version. */
#define MM_MOD_MULTIPLE_INTERPRETERS 3
#define MM_PER_INTERPRETER_GIL_SUPPORTED ((void *)2)
#define MM_MOD_GIL 4
#define MM_MOD_GIL_NOT_USED ((void *)1)

#endif
