/* functions.h: the module's free functions. */
#ifndef MM_FUNCTIONS_PY_H
#define MM_FUNCTIONS_PY_H

#include "compat.h"

extern PyMethodDef mm_functions[];

#endif
