/* allocator_functions.c: gives presets of advice the names of exported functions, which another
 * library's allocator calls. */
#include "../memory/allocator.h"

#include "module_functions.h"
#include "foreign_location.h"
#include "location_set.h"
#include "resource.h"

enum { PREFERRED, ACCESSED_BY, READ_MOSTLY, OWN_DEVICE, ARGC };

static int
read_preset(mm_state *state, PyObject *const argv[ARGC], mm_preset *preset)
{
    *preset = (mm_preset){.own_device = argv[OWN_DEVICE] == Py_True};
    if (mm_read_flag(state, argv[READ_MOSTLY], "read_mostly", &preset->read_mostly) < 0
        || (argv[PREFERRED] != Py_None
            && mm_read_location(state, argv[PREFERRED], &preset->preferred) < 0)) {
        return -1;
    }
    return mm_read_members(state, argv[ACCESSED_BY], true, &preset->accessed_by);
}

const char mm_register_preset_doc[] =
    "_register_preset(preferred_location, accessed_by, read_mostly, own_device)\n--\n\n"
    "Names of the exported functions that allocate with this advice and free.\n"
    "\n"
    "With own_device, each block prefers, and is accessed by, the device it is allocated for. A page\n"
    "is allocated and advised as a trial. Equal presets have one function, for the life of the\n"
    "process. Raises TypeError and ValueError for bad arguments, CUDAError for advice that the driver\n"
    "refuses, RuntimeError when no function is left.";

PyObject *
mm_register_preset(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static mm_signature signature = {.doc = mm_register_preset_doc};
    mm_state *state = mm_module_state(module);
    char name[MM_ALLOCATOR_NAME];
    PyObject *argv[ARGC];
    mm_preset preset;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_preset(state, argv, &preset) < 0 || (cu = mm_open(state)) == NULL
        || mm_check_access(cu) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_preset_register(cu, &preset, name, &st);
    Py_END_ALLOW_THREADS
    return rc < 0 ? mm_raise(state, &st) : Py_BuildValue("(ss)", name, MM_FREE_NAME);
}
