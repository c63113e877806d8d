/* signature.c: reads the parameters of a function from its docstring, and sorts arguments by hand:
 * the generic parser costs more than most driver calls. */
#include "signature.h"

#include <string.h>

#include "errors.h"

/* The first `positional` parameters can be passed by position, and all parameters by name, except
 * those in front of a "/". The first `required` have no default. */
typedef struct {
    int required, positional, total;
} parameter_counts;

/* Words are packed. `counts` has the three counts in its low bytes, and COUNTS_READ above. A name
 * has its length in the lowest byte, and above its place in the docstring. */
enum { BYTE_BITS = 8, BYTE_MASK = 0xff, COUNTS_READ = 1 << 24 };

/* The end of a parameter: the comma or the bracket behind its default. No default has a comma or a
 * bracket in quotes. */
static const char *
skip_default(const char *c)
{
    for (int depth = 0; depth > 0 || (*c != ',' && *c != ')'); c++) {
        assert(*c != '\0');
        depth += (*c == '(') - (*c == ')');
    }
    return c;
}

MM_COLD static unsigned
read_docstring(mm_signature *s)
{
    static const char between[] = ", \n";
    unsigned names[MM_MOST_PARAMETERS] = {0}, counts;
    int required = 0, positional = -1, total = 0;
    const char *c = strchr(s->doc, '(') + 1;

    for (c += strspn(c, between); *c != ')'; c += strspn(c, between)) {
        size_t length = strcspn(c, "=,)");
        if (*c == '/') {
            memset(names, 0, sizeof names);
        } else if (*c == '*') {
            assert(length == 1);
            positional = total;
        } else if (*c != '$') { /* the object that the method belongs to is not an argument */
            assert(total < MM_MOST_PARAMETERS && length <= BYTE_MASK);
            names[total++] = (unsigned)(c - s->doc) << BYTE_BITS | (unsigned)length;
            required = c[length] == '=' ? required : total;
        }
        c = skip_default(c + length);
    }
    positional = positional < 0 ? total : positional;
    counts = (unsigned)(COUNTS_READ | total << 2 * BYTE_BITS | positional << BYTE_BITS | required);
    for (int i = 0; i < total; i++) {
        atomic_store_explicit(&s->names[i], names[i], memory_order_relaxed);
    }
    atomic_store_explicit(&s->counts, counts, memory_order_release);
    return counts;
}

static inline parameter_counts
counts_of(mm_signature *s)
{
    unsigned counts = atomic_load_explicit(&s->counts, memory_order_acquire);

    if (counts == 0) {
        counts = read_docstring(s);
    }
    return (parameter_counts){.required = (int)(counts & BYTE_MASK),
                              .positional = (int)(counts >> BYTE_BITS & BYTE_MASK),
                              .total = (int)(counts >> 2 * BYTE_BITS & BYTE_MASK)};
}

/* Where a parameter's name begins in the docstring. *length is 0 for a positional-only one. */
static inline const char *
name_at(const mm_signature *s, int i, size_t *length)
{
    unsigned name = atomic_load_explicit(&s->names[i], memory_order_relaxed);

    *length = name & BYTE_MASK;
    return s->doc + (name >> BYTE_BITS);
}

/* The index of a parameter; -1 if no parameter has the name, with an exception if the name cannot
 * be encoded. Compares UTF-8, which a str caches: PyUnicode_CompareWithASCIIString is several
 * times slower. */
static int
find_parameter(const mm_signature *s, int total, PyObject *name)
{
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);

    if (text == NULL || length == 0) {
        return -1;
    }
    for (int i = 0; i < total; i++) {
        size_t known_length;
        const char *known = name_at(s, i, &known_length);
        if (known_length == (size_t)length && known[0] == text[0]
            && memcmp(text, known, known_length) == 0) {
            return i;
        }
    }
    return -1;
}

enum { NAME_TEXT = 32, NAMES_TEXT = 128 };

/* Copies a name out of the docstring, for PyErr_Format, which takes no length before Python 3.12. */
static const char *
print_name(const char *name, size_t length, char text[NAME_TEXT])
{
    (void)PyOS_snprintf(text, NAME_TEXT, "%.*s", (int)length, name);
    return text;
}

static const char *
function_name(const mm_signature *s, char text[NAME_TEXT])
{
    return print_name(s->doc, strcspn(s->doc, "("), text);
}

/* Lists the parameters from `first` on, after an introduction; "" if none of them has a name. */
static void
list_parameters(const mm_signature *s, int first, int total, const char *introduction,
                char text[NAMES_TEXT])
{
    text[0] = '\0';
    for (int i = first; i < total; i++) {
        size_t used = strlen(text), length;
        const char *name = name_at(s, i, &length);
        if (length > 0) {
            (void)PyOS_snprintf(text + used, NAMES_TEXT - used,
                                "%s%.*s=", used == 0 ? introduction : ", ", (int)length, name);
        }
    }
}

/* Keys may be of any type in f(**{5: 2}). */
MM_COLD static int
refuse_keyword(const mm_signature *s, int total, PyObject *name)
{
    char function[NAME_TEXT], named[NAMES_TEXT];

    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "keywords must be strings");
    } else if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_UnicodeError)) {
        list_parameters(s, 0, total, "; there are: ", named);
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'%s",
                     function_name(s, function), name, named);
    }
    return -1;
}

MM_COLD static int
refuse_repeated(const mm_signature *s, PyObject *name)
{
    char function[NAME_TEXT];

    return MM_ERROR(PyExc_TypeError, "%s() got multiple values for argument '%U'",
                    function_name(s, function), name);
}

static int
store_keyword(const mm_signature *s, int total, PyObject *name, PyObject *value, PyObject **argv)
{
    int i = find_parameter(s, total, name);

    if (i < 0) {
        return refuse_keyword(s, total, name);
    }
    assert(i < total && value != NULL);
    if (argv[i] != NULL) {
        return refuse_repeated(s, name);
    }
    argv[i] = value;
    return 0;
}

/* Names the keyword-only parameters, which may have been passed by position. */
MM_COLD static int
refuse_positional(const mm_signature *s, parameter_counts counts, Py_ssize_t nargs)
{
    char function[NAME_TEXT], named[NAMES_TEXT];

    list_parameters(s, counts.positional, counts.total, "; by name only: ", named);
    if (counts.positional == 0) {
        PyErr_Format(PyExc_TypeError, "%s() takes no positional arguments (%zd given)%s",
                     function_name(s, function), nargs, named);
    } else {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d positional argument%s (%zd given)%s",
                     function_name(s, function), counts.positional,
                     counts.positional == 1 ? "" : "s", nargs, named);
    }
    return -1;
}

static int
check_nargs(const mm_signature *s, parameter_counts counts, Py_ssize_t nargs)
{
    MM_ASSERT_LEFT(); /* no method is called while this thread has entered a guard */
    assert(!PyErr_Occurred());
    assert(counts.required <= counts.positional && counts.positional <= counts.total);
    return nargs > counts.positional ? refuse_positional(s, counts, nargs) : 0;
}

MM_COLD static int
refuse_missing(const mm_signature *s, int i)
{
    char function[NAME_TEXT], missing[NAME_TEXT];
    size_t length;
    const char *name = name_at(s, i, &length);

    return MM_ERROR(PyExc_TypeError, "%s() missing required argument '%s' (pos %d)",
                    function_name(s, function), print_name(name, length, missing), i + 1);
}

static int
check_missing(const mm_signature *s, int required, PyObject **argv)
{
    for (int i = 0; i < required; i++) {
        if (argv[i] == NULL) {
            return refuse_missing(s, i);
        }
    }
    return 0;
}

int
mm_signature_args(mm_signature *s, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                  PyObject **argv)
{
    Py_ssize_t named = kwnames ? PyTuple_Size(kwnames) : 0;
    parameter_counts counts = counts_of(s);

    if (check_nargs(s, counts, nargs) < 0) {
        return -1;
    }
    for (int i = 0; i < counts.total; i++) {
        argv[i] = i < nargs ? args[i] : NULL;
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        if (store_keyword(s, counts.total, PyTuple_GetItem(kwnames, i), args[nargs + i], argv)
            < 0) {
            return -1;
        }
    }
    return check_missing(s, counts.required, argv);
}

int
mm_signature_args_new(mm_signature *s, PyObject *args, PyObject *kwargs, PyObject **argv)
{
    Py_ssize_t nargs = PyTuple_Size(args), position = 0;
    parameter_counts counts = counts_of(s);
    PyObject *name, *value;

    if (check_nargs(s, counts, nargs) < 0) {
        return -1;
    }
    for (int i = 0; i < counts.total; i++) {
        argv[i] = i < nargs ? PyTuple_GetItem(args, i) : NULL;
    }
    while (kwargs && PyDict_Next(kwargs, &position, &name, &value)) {
        if (store_keyword(s, counts.total, name, value, argv) < 0) {
            return -1;
        }
    }
    return check_missing(s, counts.required, argv);
}
