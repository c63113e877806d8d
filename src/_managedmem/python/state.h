/* state.h: the module's state, which holds all Python objects of the module in an interpreter; and
 * functions for all heap types. */
#ifndef MM_STATE_H
#define MM_STATE_H

#include "compat.h"

/* Generates the struct, module_traverse and module_clear. */
#define MM_STATE_OBJECTS(X)                \
    X(PyTypeObject, host_type)             \
    X(PyTypeObject, device_type)           \
    X(PyTypeObject, memory_info_type)      \
    X(PyTypeObject, stream_type)           \
    X(PyTypeObject, buffer_type)           \
    X(PyTypeObject, accessed_by_type)      \
    X(PyTypeObject, managed_resource_type) \
    X(PyTypeObject, plan_type)             \
    X(PyTypeObject, plan_entry_type)       \
    X(PyTypeObject, page_run_type)         \
    X(PyTypeObject, policy_type)           \
    X(PyTypeObject, applied_policy_type)   \
    X(PyTypeObject, device_resource_type)  \
    X(PyTypeObject, peers_type)            \
    X(PyTypeObject, attributes_type)       \
    X(PyTypeObject, dtype_type)            \
    X(PyTypeObject, recorder_type)         \
    X(PyTypeObject, watch_type)            \
    X(PyTypeObject, result_type)           \
    X(PyTypeObject, slab_type)             \
    X(PyTypeObject, frames_type)           \
    X(PyObject, dtypes)                    \
    X(PyObject, cuda_error)                \
    X(PyObject, out_of_memory_error)       \
    X(PyObject, not_found_error)           \
    X(PyObject, too_old_error)             \
    X(PyObject, export_error)              \
    X(PyObject, ipc_error)                 \
    X(PyObject, trace_unavailable_error)   \
    X(PyObject, trace_busy_error)          \
    X(PyObject, cuda_warning)              \
    X(PyObject, any_host)                  \
    X(PyObject, current_numa_host)         \
    X(PyObject, numa_hosts)                \
    X(PyObject, devices)                   \
    X(PyObject, name_module)               \
    X(PyObject, name_mro)                  \
    X(PyObject, name_data_ptr)             \
    X(PyObject, name_shape)                \
    X(PyObject, name_stride)               \
    X(PyObject, name_element_size)

typedef struct {
#define MM_STATE_MEMBER(type, name) type *name;
    MM_STATE_OBJECTS(MM_STATE_MEMBER)
#undef MM_STATE_MEMBER
    struct mm_interpreter *interpreter; /* for threads that are not attached to it */
} mm_state;

static inline mm_state *
mm_module_state(PyObject *module)
{
    mm_state *state = (mm_state *)PyModule_GetState(module);

    assert(state != NULL);
    return state;
}

/* For types that cannot be subclassed. ManagedBuffer can be, so each buffer carries the state. */
static inline mm_state *
mm_type_state(PyTypeObject *type)
{
    mm_state *state = (mm_state *)PyType_GetModuleState(type);

    assert(state != NULL);
    return state;
}

/* A new object of a heap type, all zero. */
static inline PyObject *
mm_alloc_object(PyTypeObject *type)
{
    MM_ASSERT_LEFT();
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

/* Frees the object and releases its reference to the type, at the end of every tp_dealloc. */
static inline void
mm_free_object(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);

    MM_ASSERT_LEFT();
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

/* tp_traverse of objects that refer only to their type. */
int mm_traverse_type(PyObject *op, visitproc visit, void *arg);

/* tp_dealloc of such objects, which may have weak references. */
void mm_dealloc_value(PyObject *op);

/* Each part adds its types to the module: 0 or -1 with an exception. */
typedef int mm_part_init(PyObject *module, mm_state *state);
mm_part_init mm_errors_init, mm_leak_warnings_init, mm_host_init, mm_device_init, mm_stream_init,
    mm_buffer_init, mm_accessed_by_init, mm_managed_resource_init, mm_foreign_class_init,
    mm_plan_init, mm_page_runs_init, mm_policy_init, mm_applied_policy_init,
    mm_device_resource_init, mm_peers_init, mm_pool_attributes_init, mm_interpreter_init,
    mm_dtype_init, mm_recorder_init, mm_result_init, mm_frames_init, mm_slab_init, mm_watch_init;

/* Creates a heap type from a spec, stores it in *type and adds it to the module. */
int mm_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

/* mm_add_type for a type that Python code can neither change nor derive from; `flags` are added to
 * its usual flags. */
int mm_add_final_type(PyObject *module, const char *name, size_t size, unsigned flags,
                      PyType_Slot *slots, PyTypeObject **type);

/* Imports a module and calls a function of it. `format` is one of Py_BuildValue that makes a
 * tuple of arguments and steals no reference. A new reference, or NULL with an exception. */
PyObject *mm_call_python(const char *module, const char *function, const char *format, ...);

/* A named tuple of these fields, whose references it steals. If a field is NULL, with an
 * exception, releases the others and returns NULL. */
PyObject *mm_record_new(PyTypeObject *type, PyObject *const *fields, int count);

/* Sets an item of a new tuple, and steals its reference. -1 also if the item is NULL, for which an
 * exception is set already. */
static inline int
mm_set_item(PyObject *tuple, Py_ssize_t i, PyObject *item)
{
    return item != NULL ? PyTuple_SetItem(tuple, i, item) : -1;
}

/* mm_set_item for the end of a list. */
static inline int
mm_append_item(PyObject *list, PyObject *item)
{
    int rc = item != NULL ? PyList_Append(list, item) : -1;

    Py_XDECREF(item);
    return rc;
}

#endif
