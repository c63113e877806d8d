/* foreign_class.c: the library that an object belongs to, by the names of its class and of the
 * class's module. */
#include "foreign_class.h"

#include <string.h>

/* The __module__ of a class, or None; a new reference. */
static PyObject *
module_of_class(mm_state *state, PyObject *type)
{
    PyObject *module = PyObject_GetAttr(type, state->name_module);

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

/* The class and all its bases, in the order in which attributes are looked up. NULL, without an
 * exception, if memory runs out or a metaclass hides them: the object is then not recognised, and
 * its use raises an error. */
static PyObject *
classes_of(mm_state *state, PyTypeObject *type)
{
    PyObject *classes = PyObject_GetAttr((PyObject *)type, state->name_mro);

    if (classes == NULL || !PyTuple_Check(classes)) {
        PyErr_Clear(); /* any error of a metaclass */
        Py_CLEAR(classes);
    }
    return classes;
}

static bool
is_class_named(PyObject *type, const char *name)
{
    PyObject *found = PyType_Check(type) ? PyType_GetName((PyTypeObject *)type) : NULL;
    bool answer;

    if (found == NULL) {
        PyErr_Clear(); /* MemoryError: the object is not recognised, and its use raises an error */
        return false;
    }
    answer = PyUnicode_CompareWithASCIIString(found, name) == 0;
    Py_DECREF(found);
    return answer;
}

static bool
has_class(mm_state *state, PyObject *classes, mm_foreign_class class)
{
    Py_ssize_t count = classes ? PyTuple_Size(classes) : 0;
    bool found = false;

    for (Py_ssize_t i = 0; !found && i < count; i++) {
        PyObject *type = PyTuple_GetItem(classes, i), *module;
        if (class.name == NULL || is_class_named(type, class.name)) {
            module = module_of_class(state, type);
            found = is_module_of(module, class.package);
            Py_DECREF(module);
        }
    }
    return found;
}

static bool
is_subclass(mm_state *state, PyTypeObject *type, mm_foreign_class class)
{
    PyObject *classes;
    bool answer;

    assert(!PyErr_Occurred()); /* the look-up would clear it */
    classes = classes_of(state, type);
    answer = has_class(state, classes, class);
    Py_XDECREF(classes);
    return answer;
}

bool
mm_is_class_from(mm_state *state, PyTypeObject *type, const char *package)
{
    return is_subclass(state, type, (mm_foreign_class){package, NULL});
}

bool
mm_is_from(mm_state *state, PyObject *object, const char *package)
{
    return mm_is_class_from(state, Py_TYPE(object), package);
}

bool
mm_is_instance(mm_state *state, PyObject *object, const char *package, const char *name)
{
    return is_subclass(state, Py_TYPE(object), (mm_foreign_class){package, name});
}

/* The modules of the object's class and of its bases; NULL as in classes_of. */
static PyObject *
modules_of(mm_state *state, PyObject *object)
{
    PyObject *classes = classes_of(state, Py_TYPE(object));
    Py_ssize_t count = classes ? PyTuple_Size(classes) : 0;
    PyObject *modules = classes ? PyTuple_New(count) : NULL;

    for (Py_ssize_t i = 0; modules != NULL && i < count; i++) {
        PyTuple_SetItem(modules, i, module_of_class(state, PyTuple_GetItem(classes, i)));
    }
    Py_XDECREF(classes);
    PyErr_Clear(); /* MemoryError: the object is not recognised */
    return modules;
}

bool
mm_matches_class(mm_state *state, PyObject *object, mm_foreign_class class, PyObject **modules)
{
    Py_ssize_t count;
    bool answer = false;

    assert(class.package != NULL || class.name == NULL);
    assert(!PyErr_Occurred());
    if (class.package == NULL) {
        return true;
    }
    if (class.name != NULL) {
        return mm_is_instance(state, object, class.package, class.name);
    }
    if (*modules == NULL) {
        *modules = modules_of(state, object);
    }
    count = *modules ? PyTuple_Size(*modules) : 0;
    for (Py_ssize_t i = 0; !answer && i < count; i++) {
        answer = is_module_of(PyTuple_GetItem(*modules, i), class.package);
    }
    return answer;
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

/* mm_get_optional for a key of a dict. A defaultdict must not make a value for a missing key. */
static int
get_key(PyObject *dict, const char *name, PyObject **out)
{
    PyObject *key = PyUnicode_FromString(name);
    int found = key ? PyDict_Contains(dict, key) : -1;

    if (found > 0) {
        *out = PyObject_GetItem(dict, key);
        found = *out ? 1 : -1;
    }
    Py_XDECREF(key);
    return found;
}

/* TypeError that names the options. */
static int
refuse_options(PyObject *options, const char *const *names, size_t count)
{
    PyObject *text = PyUnicode_FromString(names[0]);

    for (size_t i = 1; text != NULL && i < count; i++) {
        PyObject *longer = PyUnicode_FromFormat("%U, %s", text, names[i]);
        Py_DECREF(text);
        text = longer;
    }
    if (text != NULL) {
        PyErr_Format(
            PyExc_TypeError,
            "options must be None, an object with some of these attributes, or a dict with only "
            "these keys: %U; got %R",
            text, options);
        Py_DECREF(text);
    }
    return -1;
}

int
mm_read_options(PyObject *options, const char *const *names, size_t count, PyObject **values)
{
    bool is_dict = PyDict_Check(options);
    Py_ssize_t found = 0;
    int rc = 0;

    memset(values, 0, count * sizeof *values);
    for (size_t i = 0; rc >= 0 && i < count; i++) {
        rc = is_dict ? get_key(options, names[i], &values[i])
                     : mm_get_optional(options, names[i], &values[i]);
        found += rc > 0;
        if (values[i] == Py_None) {
            Py_CLEAR(values[i]);
        }
    }
    if (rc >= 0 && (is_dict ? found < PyDict_Size(options) : found == 0)) {
        rc = refuse_options(options, names, count);
    }
    for (size_t i = 0; rc < 0 && i < count; i++) {
        Py_CLEAR(values[i]);
    }
    return rc < 0 ? -1 : 0;
}

PyObject *
mm_type_text(PyObject *value)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__module__");
    PyObject *name = PyType_GetQualName(Py_TYPE(value)), *text = NULL;

    if (module != NULL && name != NULL) {
        text = PyUnicode_FromFormat("%S.%U", module, name);
    }
    Py_XDECREF(module);
    Py_XDECREF(name);
    return text;
}

int
mm_refuse_foreign(PyObject *error, PyObject *value, const char *reason)
{
    PyObject *subject = mm_type_text(value);

    if (subject != NULL) {
        PyErr_Format(error, "%U %s", subject, reason);
        Py_DECREF(subject);
    }
    return -1;
}

int
mm_foreign_class_init(PyObject *Py_UNUSED(module), mm_state *state)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&state->name_module, "__module__"}, {&state->name_mro, "__mro__"},
        {&state->name_data_ptr, "data_ptr"}, {&state->name_shape, "shape"},
        {&state->name_stride, "stride"},     {&state->name_element_size, "element_size"},
    };

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        *names[i].name = PyUnicode_InternFromString(names[i].text);
        if (*names[i].name == NULL) {
            return -1;
        }
    }
    return 0;
}
