/* embed.c: the fuzz target for protocol input of the extension. Hosts a Python interpreter and gives each
 * input to protocols.run(), which makes calls from it. An exception from run() is a finding, like a
 * report of a sanitizer. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

static PyObject *run; /* protocols.run */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static _Noreturn void
give_up(void)
{
    PyErr_Print();
    abort();
}

int
LLVMFuzzerInitialize(int *argc, char ***argv)
{
    PyObject *module;

    (void)argc;
    (void)argv;
    Py_InitializeEx(0); /* leaves the signals to libFuzzer */
    module = PyImport_ImportModule("protocols");
    run = module != NULL ? PyObject_GetAttrString(module, "run") : NULL;
    if (run == NULL) {
        give_up();
    }
    Py_DECREF(module);
    return 0;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    PyObject *result = PyObject_CallFunction(run, "y#", (const char *)data, (Py_ssize_t)size);

    if (result == NULL) {
        give_up();
    }
    Py_DECREF(result);
    return 0;
}
