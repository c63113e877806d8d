/* state.c: functions for all heap types: adding a type to the module, records, traversal. */
#include "state.h"

int
mm_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
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

int
mm_traverse_type(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    return 0;
}
