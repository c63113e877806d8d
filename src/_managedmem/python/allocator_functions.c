/* allocator_functions.c: the way from Python to a pair of exported functions that another library's allocator
 * calls. */
#include "../memory/allocator.h"

#include "module_functions.h"
#include "foreign_location.h"
#include "location_set.h"

/* Reads and checks the values, of which only the driver knows whether this system can do them. */
static int
read_preset(mm_state *state, PyObject *const given[4], mm_preset *preset)
{
    *preset = (mm_preset){.own_device = given[3] == Py_True};
    if (mm_read_flag(state, given[2], "read_mostly", &preset->read_mostly) < 0) {
        return -1;
    }
    if (given[0] != Py_None && mm_read_location(state, given[0], &preset->preferred) < 0) {
        return -1;
    }
    return mm_read_members(state, given[1], true, &preset->accessed_by);
}

PyObject *
mm_register_preset(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"preferred_location", "accessed_by", "read_mostly",
                                        "own_device"};
    static const mm_parameters parameters = {"_register_preset", names, 4, 4, 4};
    mm_state *state = mm_module_state(module);
    char name[MM_ALLOCATOR_NAME];
    PyObject *given[4];
    mm_preset preset;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_args(&parameters, args, nargs, kwnames, given) < 0
        || read_preset(state, given, &preset) < 0 || (cu = mm_open(state)) == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_preset_register(cu, &preset, name, &st);
    Py_END_ALLOW_THREADS
    return rc < 0 ? mm_raise(state, &st) : Py_BuildValue("(ss)", name, MM_FREE_NAME);
}
