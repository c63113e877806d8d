/* state.c: functions for all heap types: adding a type to the module, records, traversal; and calls of
 * functions in Python. */
#include "state.h"

int
mm_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

int
mm_add_final_type(PyObject *module, const char *name, size_t size, unsigned flags,
                  PyType_Slot *slots, PyTypeObject **type)
{
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)size,
        .flags = flags | Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };

    return mm_add_type(module, &spec, type);
}

PyObject *
mm_record_new(PyTypeObject *type, PyObject *const *fields, int count)
{
    PyObject *record = PyStructSequence_New(type);

    for (int i = 0; i < count; i++) {
        if (record != NULL && fields[i] != NULL) {
            PyStructSequence_SetItem(record, i, fields[i]);
        } else {
            Py_CLEAR(record);
            Py_XDECREF(fields[i]);
        }
    }
    return record;
}

PyObject *
mm_call_python(const char *module, const char *function, const char *format, ...)
{
    PyObject *imported = PyImport_ImportModule(module);
    PyObject *callable = imported ? PyObject_GetAttrString(imported, function) : NULL;
    PyObject *args = NULL, *answer = NULL;
    va_list values;

    if (callable != NULL) {
        va_start(values, format);
        args = Py_VaBuildValue(format, values);
        va_end(values);
    }
    if (args != NULL) {
        answer = PyObject_CallObject(callable, args);
        Py_DECREF(args);
    }
    Py_XDECREF(callable);
    Py_XDECREF(imported);
    return answer;
}

int
mm_traverse_type(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    return 0;
}

void
mm_dealloc_value(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    mm_free_object(op);
}
