/* leak_warnings.h: CUDAWarning, for frees that the driver refused where nothing can be raised. */
#ifndef MM_LEAK_WARNINGS_H
#define MM_LEAK_WARNINGS_H

#include "../memory/leaks.h"
#include "errors.h"

void mm_report_leaks_now(void);

/* Warns of the frees that failed in any thread since the last call. Call it after code that may
 * free, attached and with no guard entered. It keeps the current exception and raises none: a
 * warning that a filter turns into an error goes to sys.unraisablehook. */
static inline void
mm_report_leaks(void)
{
    MM_ASSERT_LEFT();
    if (mm_leaks_are_known()) {
        mm_report_leaks_now();
    }
}

/* For threads that may be detached: the main thread reports at its next instruction. */
void mm_report_leaks_soon(void);

#endif
