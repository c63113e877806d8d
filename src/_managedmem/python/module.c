/* module.c: the module managedmem._managedmem: its initialisation and its slots. */
#include "interpreter.h"
#include "module_functions.h"
#include "state.h"

static int
module_exec(PyObject *module)
{
    static int (*const parts[])(PyObject *, mm_state *) = {
        mm_errors_init,
        mm_leak_warnings_init,
        mm_host_init,
        mm_device_init,
        mm_stream_init,
        mm_buffer_init,
        mm_accessed_by_init,
        mm_managed_resource_init,
        mm_foreign_class_init,
        mm_plan_init,
        mm_page_runs_init,
        mm_policy_init,
        mm_applied_policy_init,
        mm_device_resource_init,
        mm_peers_init,
        mm_pool_attributes_init,
        mm_dtype_init,
        mm_recorder_init,
        mm_watch_init,
        mm_result_init,
        mm_frames_init,
        mm_slab_init,
        /* Last, because its handler of the interpreter's exit would stay registered if a later
         * part failed. */
        mm_interpreter_init,
    };

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i](module, mm_module_state(module)) < 0) {
            /* Some functions of CPython fail without an exception when memory runs out. */
            if (PyErr_Occurred() == NULL) {
                (void)PyErr_NoMemory();
            }
            return -1;
        }
    }
    return 0;
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    mm_state *state = mm_module_state(module);

#define MM_VISIT(type, name) Py_VISIT(state->name);
    MM_STATE_OBJECTS(MM_VISIT)
#undef MM_VISIT
    return 0;
}

static int
module_clear(PyObject *module)
{
    mm_state *state = mm_module_state(module);

#define MM_CLEAR(type, name) Py_CLEAR(state->name);
    MM_STATE_OBJECTS(MM_CLEAR)
#undef MM_CLEAR
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear((PyObject *)module);
    mm_interpreter_release(mm_module_state((PyObject *)module)->interpreter);
}

PyDoc_STRVAR(module_doc, "The C extension behind managedmem; import managedmem instead.");

static PyModuleDef_Slot slots_311[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef_Slot slots_312[] = {
    {Py_mod_exec, module_exec},
    {MM_MOD_MULTIPLE_INTERPRETERS, MM_PER_INTERPRETER_GIL_SUPPORTED},
    {0, NULL},
};

static PyModuleDef_Slot slots_313[] = {
    {Py_mod_exec, module_exec},
    {MM_MOD_MULTIPLE_INTERPRETERS, MM_PER_INTERPRETER_GIL_SUPPORTED},
    {MM_MOD_GIL, MM_MOD_GIL_NOT_USED},
    {0, NULL},
};

/* One definition for each set of slots: 3.11 and 3.12 refuse slots that they do not know, and the
 * same binary runs on all versions. */
/* clang-format off */
#define DEFINE_MODULE(number)               \
    static PyModuleDef module_##number = {  \
        PyModuleDef_HEAD_INIT,              \
        .m_name = "managedmem._managedmem", \
        .m_doc = module_doc,                \
        .m_size = sizeof(mm_state),         \
        .m_methods = mm_functions,          \
        .m_slots = slots_##number,          \
        .m_traverse = module_traverse,      \
        .m_clear = module_clear,            \
        .m_free = module_free,              \
    };
/* clang-format on */
DEFINE_MODULE(311)
DEFINE_MODULE(312)
DEFINE_MODULE(313)

PyMODINIT_FUNC
PyInit__managedmem(void)
{
    if (Py_Version < 0x030c0000) {
        return PyModuleDef_Init(&module_311);
    }
    return PyModuleDef_Init(Py_Version < 0x030d0000 ? &module_312 : &module_313);
}
