/* foreign_class.c: the library that an object belongs to, by the names of its class and of the
 * class's module. */
#include "foreign_class.h"

#include <string.h>

/* The __module__ of a class, or None; a new reference. */
static PyObject *
module_of_class(mm_state *state, PyTypeObject *type)
{
    PyObject *module = PyObject_GetAttr((PyObject *)type, state->name_module);

    if (module == NULL) {
        PyErr_Clear(); /* AttributeError: a type without a module is from no package */
        module = Py_NewRef(Py_None);
    }
    return module;
}

static bool
is_module_of(PyObject *module, const char *package)
{
    size_t length = strlen(package);
    Py_ssize_t size = 0;
    const char *name = NULL;

    if (PyUnicode_Check(module)) {
        name = PyUnicode_AsUTF8AndSize(module, &size);
    }
    if (name == NULL) {
        PyErr_Clear(); /* UnicodeEncodeError: a lone surrogate, which no package has in its name */
        return false;
    }
    return (size_t)size >= length && memcmp(name, package, length) == 0
           && (name[length] == '.' || (size_t)size == length);
}

bool
mm_is_class_from(mm_state *state, PyTypeObject *type, const char *package)
{
    PyObject *module = module_of_class(state, type);
    bool answer = is_module_of(module, package);

    Py_DECREF(module);
    return answer;
}

bool
mm_is_from(mm_state *state, PyObject *object, const char *package)
{
    return mm_is_class_from(state, Py_TYPE(object), package);
}

static bool
is_class_named(PyTypeObject *type, const char *name)
{
    PyObject *found = PyType_GetName(type);
    bool answer;

    if (found == NULL) {
        PyErr_Clear(); /* MemoryError: the object is not recognised, and its use raises an error */
        return false;
    }
    answer = PyUnicode_CompareWithASCIIString(found, name) == 0;
    Py_DECREF(found);
    return answer;
}

bool
mm_is_instance(mm_state *state, PyObject *object, const char *package, const char *name)
{
    PyTypeObject *type = Py_TYPE(object);

    assert(!PyErr_Occurred()); /* the look-up would clear it */
    while (type != NULL
           && !(is_class_named(type, name) && mm_is_class_from(state, type, package))) {
        type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base);
    }
    return type != NULL;
}

bool
mm_matches_class(mm_state *state, PyObject *object, mm_foreign_class class, PyObject **module)
{
    assert(class.package != NULL || class.name == NULL);
    if (class.package == NULL) {
        return true;
    }
    if (class.name != NULL) {
        return mm_is_instance(state, object, class.package, class.name);
    }
    if (*module == NULL) {
        *module = module_of_class(state, Py_TYPE(object));
    }
    return is_module_of(*module, class.package);
}

int
mm_get_optional(PyObject *object, const char *name, PyObject **out)
{
    assert(!PyErr_Occurred());
    *out = PyObject_GetAttrString(object, name);
    if (*out != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear(); /* AttributeError: the object lacks the attribute */
    return 0;
}

int
mm_foreign_class_init(PyObject *Py_UNUSED(module), mm_state *state)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&state->name_module, "__module__"},
        {&state->name_data_ptr, "data_ptr"},
        {&state->name_shape, "shape"},
        {&state->name_stride, "stride"},
        {&state->name_element_size, "element_size"},
    };

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *names[i].name = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name == NULL) {
            return -1;
        }
    }
    return 0;
}
