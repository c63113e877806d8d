/* compat.h: Python.h, the differences between its versions, and the rows of method tables. */
#ifndef MM_COMPAT_H
#define MM_COMPAT_H

#define PY_SSIZE_T_CLEAN
/* Keeps docstrings even if Python was built without them: signatures are read from them. */
#define WITH_DOC_STRINGS 1
#include <Python.h>

#include <assert.h>
#include <structmember.h>

#include "../memory/guard.h"

/* Headers from 3.12 on omit the reference, because None is immortal there. The same binary must
 * keep counts right on 3.11. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)

/* From 3.12 on some objects are immortal. Interpreters with a GIL of their own share them, so their
 * counts, whose low 32 bits are negative, must not be written. Older headers write them. */
#if PY_VERSION_HEX < 0x030c0000 && !defined(Py_REF_DEBUG)
static inline PyObject *
mm_incref(PyObject *op)
{
    if ((int32_t)op->ob_refcnt >= 0) {
        op->ob_refcnt++;
    }
    return op;
}

static inline void
mm_decref(PyObject *op)
{
    if ((int32_t)op->ob_refcnt < 0) {
        return;
    }
    op->ob_refcnt--;
    if (op->ob_refcnt == 0) {
        _Py_Dealloc(op);
    }
}

static inline PyObject *
mm_xincref(PyObject *op)
{
    return op != NULL ? mm_incref(op) : NULL;
}

static inline void
mm_xdecref(PyObject *op)
{
    if (op != NULL) {
        mm_decref(op);
    }
}

#undef Py_INCREF
#undef Py_XINCREF
#undef Py_NewRef
#undef Py_XNewRef
#undef Py_DECREF
#undef Py_XDECREF
#define Py_INCREF(op) ((void)mm_incref((PyObject *)(op)))
#define Py_XINCREF(op) ((void)mm_xincref((PyObject *)(op)))
#define Py_NewRef(op) mm_incref((PyObject *)(op))
#define Py_XNewRef(op) mm_xincref((PyObject *)(op))
#define Py_DECREF(op) mm_decref((PyObject *)(op))
#define Py_XDECREF(op) mm_xdecref((PyObject *)(op))
#endif

/* Guards are left before attaching, before objects are created or dropped, and before exceptions
 * are raised: these can run Python code, which may close an entered guard and then wait for its
 * own thread forever. A daemon thread that attaches while the interpreter ends never returns to
 * leave. */
#define MM_ASSERT_LEFT() assert(mm_guards_entered() == 0)
#undef Py_END_ALLOW_THREADS
#define Py_END_ALLOW_THREADS     \
    MM_ASSERT_LEFT();            \
    PyEval_RestoreThread(_save); \
    }

/* Between MM_LOCK and MM_UNLOCK no other thread reads or writes the object's fields, as long as no
 * Python code runs in between. In builds with a GIL, the GIL ensures this. */
#ifdef Py_GIL_DISABLED
#define MM_LOCK(op) Py_BEGIN_CRITICAL_SECTION(op)
#define MM_UNLOCK() Py_END_CRITICAL_SECTION()
#else
#define MM_LOCK(op) \
    {               \
        (void)(op);
#define MM_UNLOCK() }
#endif

/* Rows of a method table. MM_METHOD and MM_CLASS_METHOD take keywords, MM_POSITIONAL_METHOD
 * does not. */
#define MM_METHOD_ROW(name, function, flags, doc) \
    {(name), (PyCFunction)(void (*)(void))(function), METH_FASTCALL | (flags), (doc)}
#define MM_METHOD(name, function, doc) MM_METHOD_ROW(name, function, METH_KEYWORDS, doc)
#define MM_CLASS_METHOD(name, function, doc) \
    MM_METHOD_ROW(name, function, METH_KEYWORDS | METH_CLASS, doc)
#define MM_POSITIONAL_METHOD(name, function, doc) MM_METHOD_ROW(name, function, 0, doc)

/* Types for headers, which declare the functions that such rows name: methods that take keywords,
 * methods that do not, and the getters and setters of properties. */
typedef PyObject *mm_keyword_method(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                                    PyObject *kwnames);
typedef PyObject *mm_positional_method(PyObject *op, PyObject *const *args, Py_ssize_t nargs);
typedef PyObject *mm_plain_method(PyObject *op, PyObject *argument_or_none);
typedef PyObject *mm_getter(PyObject *op, void *closure);
typedef int mm_setter(PyObject *op, PyObject *value, void *closure);

/* The members of a type whose objects have the field `weakrefs`. */
#define MM_WEAK_MEMBERS(object)                                                         \
    {                                                                                   \
        {"__weaklistoffset__", T_PYSSIZET, offsetof(object, weakrefs), READONLY, NULL}, \
        {NULL, 0, 0, 0, NULL},                                                          \
    }

/* True if each thread has a current thread state of its own, so that any thread may call
 * PyThreadState_Swap. In 3.11 the whole process has only one. */
static inline int
mm_swap_is_local(void)
{
    return Py_Version >= 0x030c0000;
}

/* The stable ABI of 3.11 has no names for these slots, which newer interpreters read. module.c
 * picks the slots of the running version. */
#define MM_MOD_MULTIPLE_INTERPRETERS 3
#define MM_PER_INTERPRETER_GIL_SUPPORTED ((void *)2)
#define MM_MOD_GIL 4
#define MM_MOD_GIL_NOT_USED ((void *)1)

#endif
