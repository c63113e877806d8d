/* leak_warnings.c: CUDAWarning, and the reports of frees that the driver refused where nothing can be
 * raised: in deallocations, and where something is freed late. */
#include "leak_warnings.h"

#include <stdlib.h>

#include "foreign_resource.h"

/* The message, such as "cuMemFree failed with CUDA_ERROR_UNKNOWN (999): unknown error. 4096 bytes
 * of managed memory may have leaked". */
static PyObject *
leak_text(const mm_leak *leak)
{
    mm_driver *cu = mm_driver_peek();
    const char *name = NULL, *text = NULL, *thing = mm_leaked_thing(leak->function);

    if (cu != NULL) {
        /* The texts of an unknown code stay NULL. */
        MM_IGNORE(cu->GetErrorName((CUresult)leak->code, &name));
        MM_IGNORE(cu->GetErrorString((CUresult)leak->code, &text));
    }
    name = name ? name : "an unknown error";
    return leak->size > 0
               ? PyUnicode_FromFormat(
                     "%s failed with %s (%d)%s%s. %zu bytes of %s may have leaked", leak->function,
                     name, leak->code, text ? ": " : "", text ? text : "", leak->size, thing)
               : PyUnicode_FromFormat("%s failed with %s (%d)%s%s. It may have leaked: %s",
                                      leak->function, name, leak->code, text ? ": " : "",
                                      text ? text : "", thing);
}

/* The warning belongs to the line of Python that runs now, and the filters of the warnings module
 * show it once for each line. */
static void
warn_of_leak(mm_state *state, const mm_leak *leak)
{
    PyObject *text = leak_text(leak), *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    const char *message = bytes ? PyBytes_AsString(bytes) : NULL;

    if (message == NULL || PyErr_WarnEx(state->cuda_warning, message, 1) < 0) {
        if (!mm_import_failed_at_exit()) {
            PyErr_WriteUnraisable(state->cuda_warning);
        }
        PyErr_Clear(); /* an error at exit; others were reported above */
    }
    Py_XDECREF(bytes);
    Py_XDECREF(text);
}

/* Looks up the state of the module; NULL if the module was cleared before a deallocation. *module
 * is a reference to keep while the state is used. */
static mm_state *
find_state(PyObject **module)
{
    PyObject *name = PyUnicode_FromString("managedmem._managedmem");
    mm_state *state = NULL;

    *module = name ? PyImport_GetModule(name) : NULL;
    if (*module != NULL && PyModule_Check(*module)) {
        state = PyModule_GetState(*module);
    }
    Py_XDECREF(name);
    PyErr_Clear(); /* MemoryError: a later call reports */
    return state != NULL && state->cuda_warning != NULL ? state : NULL;
}

void
mm_report_leaks_now(void)
{
    mm_leak *leak, *next;
    mm_exception saved;
    PyObject *module;
    mm_state *state;

    MM_ASSERT_LEFT();
    mm_exception_save(&saved);
    state = find_state(&module);
    for (leak = state ? mm_leaks_take() : NULL; leak != NULL; leak = next) {
        next = leak->next;
        warn_of_leak(state, leak);
        free(leak);
    }
    Py_XDECREF(module);
    mm_exception_restore(&saved);
}

/* A pending call, in the main interpreter. */
static int
report_from_main(void *Py_UNUSED(nothing))
{
    mm_report_leaks();
    return 0;
}

void
mm_report_leaks_soon(void)
{
    if (mm_leaks_are_known()) {
        MM_IGNORE(Py_AddPendingCall(report_from_main, NULL)); /* if full, a later call reports */
    }
}

PyDoc_STRVAR(
    cuda_warning_doc,
    "The driver refused to free something where no exception can be raised.\n"
    "\n"
    "Issued when an object that was not closed is dropped, or when memory is freed late. The\n"
    "message has the error of the driver and what may have leaked. The default filters show it\n"
    "once for each line of Python. If a filter makes it an error\n"
    "(warnings.filterwarnings(\"error\", category=CUDAWarning)), it goes to sys.unraisablehook.\n"
    "Failures of a driver that is shut down are not reported. Use close() or a with block to get\n"
    "a CUDAError instead.");

int
mm_leak_warnings_init(PyObject *module, mm_state *state)
{
    state->cuda_warning = PyErr_NewExceptionWithDoc("managedmem.CUDAWarning", cuda_warning_doc,
                                                    PyExc_RuntimeWarning, NULL);
    return state->cuda_warning ? PyModule_AddObjectRef(module, "CUDAWarning", state->cuda_warning)
                               : -1;
}
