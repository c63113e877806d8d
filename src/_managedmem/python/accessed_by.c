/* accessed_by.c: the type AccessedBySetProxy, the live set behind buf.accessed_by.
 *
 * It has no state but its buffer: each read is one query of the driver, and each change is one
 * query and one advice for every member that differs. Inside, a set of locations is a bit mask, so
 * that all of the set algebra is arithmetic. */
#include "buffer.h"
#include "location.h"

typedef struct {
    PyObject_HEAD PyObject *weakrefs;
    PyObject *buffer;
} proxy_object;

static mm_buffer *
buffer_of(PyObject *op)
{
    return mm_buffer_of(((proxy_object *)op)->buffer);
}

static int proxy_contains(PyObject *op, PyObject *value);

/* Operators get operands of any type, and those carry no state to compare types with. */
static bool
is_proxy(PyObject *op)
{
    return PyType_GetSlot(Py_TYPE(op), Py_sq_contains) == (void *)proxy_contains;
}

/* --- the driver's side ------------------------------------------------------------------ */

static int
read_set(mm_buffer *b, mm_location_set *set)
{
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_begin(b, MM_QUERY, &use) < 0) {
        return -1;
    }
    rc = mm_range_accessed_by(use.cu, use.range, set, &st);
    mm_buffer_end(&use);
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* One advice for each member in which `from`, what the set is taken to be, differs from `to`. */
static int
change_set(mm_buffer *b, mm_location_set from, mm_location_set to)
{
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (from == to) {
        return 0;
    }
    if (mm_buffer_begin(b, MM_ADVISE, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_change_accessed_by(use.cu, use.range, from, to, &st);
    Py_END_ALLOW_THREADS
    mm_buffer_end(&use);
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* --- Python's side ---------------------------------------------------------------------- */

/* The member that a value stands for, or 0 for what can be no member. -1 only for an error that is
 * not about the value. */
static int
find_member(mm_state *state, PyObject *value, mm_location_set *member)
{
    CUmemLocation where;

    *member = 0;
    if (mm_read_location(state, value, &where) == 0) {
        *member = mm_location_bit(where);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return -1;
    }
    PyErr_Clear(); /* TypeError or ValueError: no location, so no member */
    return 0;
}

int
mm_read_members(mm_state *state, PyObject *values, bool strict, mm_location_set *set)
{
    PyObject *iterator, *value;
    int rc = 0;

    *set = 0;
    if (is_proxy(values)) {
        return read_set(buffer_of(values), set);
    }
    iterator = PyObject_GetIter(values);
    if (iterator == NULL) {
        return -1;
    }
    while (rc == 0 && (value = PyIter_Next(iterator)) != NULL) {
        mm_location_set member = 0;
        CUmemLocation where;
        if (strict) {
            rc = mm_read_accessor(state, value, &where);
            member = rc == 0 ? mm_location_bit(where) : 0;
        } else {
            rc = find_member(state, value, &member);
        }
        *set |= member;
        Py_DECREF(value);
    }
    Py_DECREF(iterator);
    return rc < 0 || PyErr_Occurred() ? -1 : 0;
}

/* Devices ascending, then the host. */
static PyObject *
list_members(mm_state *state, mm_location_set set)
{
    PyObject *list = PyList_New(0);

    for (int bit = 0; list != NULL && bit <= MM_HOST_BIT; bit++) {
        if (set >> bit & 1) {
            PyObject *member = mm_location_object_new(state, mm_bit_location(bit));
            if (member == NULL || PyList_Append(list, member) < 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(member);
        }
    }
    return list;
}

static PyObject *
member_list(PyObject *op)
{
    mm_location_set set;

    return read_set(buffer_of(op), &set) < 0 ? NULL : list_members(buffer_of(op)->state, set);
}

/* A plain set with the members of now. */
static PyObject *
plain_set(PyObject *op)
{
    PyObject *list = member_list(op), *set;

    set = list ? PySet_New(list) : NULL;
    Py_XDECREF(list);
    return set;
}

/* Whether an operand may stand beside a set in an operator: any collections.abc.Set. */
static int
is_set(PyObject *op)
{
    PyObject *module, *abc;
    int answer = -1;

    if (is_proxy(op) || PyAnySet_Check(op)) {
        return 1;
    }
    module = PyImport_ImportModule("collections.abc");
    abc = module ? PyObject_GetAttrString(module, "Set") : NULL;
    if (abc != NULL) {
        answer = PyObject_IsInstance(op, abc);
    }
    Py_XDECREF(module);
    Py_XDECREF(abc);
    return answer;
}

/* An operand as a plain set or frozenset; a new reference. */
static PyObject *
as_plain(PyObject *op)
{
    if (is_proxy(op)) {
        return plain_set(op);
    }
    return PyAnySet_Check(op) ? Py_NewRef(op) : PySet_New(op);
}

/* --- reading ---------------------------------------------------------------------------- */

static int
proxy_contains(PyObject *op, PyObject *value)
{
    mm_location_set member, set;

    if (find_member(buffer_of(op)->state, value, &member) < 0
        || read_set(buffer_of(op), &set) < 0) {
        return -1;
    }
    return (set & member) != 0;
}

static Py_ssize_t
proxy_length(PyObject *op)
{
    mm_location_set set;

    return read_set(buffer_of(op), &set) < 0 ? -1 : __builtin_popcountll(set);
}

static PyObject *
proxy_iter(PyObject *op)
{
    PyObject *list = member_list(op), *iterator;

    iterator = list ? PyObject_GetIter(list) : NULL;
    Py_XDECREF(list);
    return iterator;
}

static PyObject *
proxy_repr(PyObject *op)
{
    PyObject *set, *text;

    if (mm_buffer_is_closed(buffer_of(op))) {
        return PyUnicode_FromString("<AccessedBySetProxy of a closed ManagedBuffer>");
    }
    if (mm_driver_forked()) {
        return PyUnicode_FromString("<AccessedBySetProxy in a forked process>");
    }
    set = plain_set(op);
    text = set ? PyUnicode_FromFormat("AccessedBySetProxy(%R)", set) : NULL;
    Py_XDECREF(set);
    return text;
}

static PyObject *
proxy_richcompare(PyObject *op, PyObject *other, int how)
{
    PyObject *mine, *theirs, *answer = NULL;
    int comparable = is_set(other);

    if (comparable <= 0) {
        return comparable < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    mine = plain_set(op);
    theirs = mine ? as_plain(other) : NULL;
    if (theirs != NULL) {
        answer = PyObject_RichCompare(mine, theirs, how);
    }
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return answer;
}

/* Methods that only read are those of a plain set of now. */
static PyObject *
ask_plain(PyObject *op, PyObject *args, const char *method)
{
    PyObject *set = plain_set(op), *bound = NULL, *answer = NULL;

    if (set != NULL) {
        bound = PyObject_GetAttrString(set, method);
    }
    if (bound != NULL) {
        answer = PyObject_Call(bound, args, NULL);
    }
    Py_XDECREF(set);
    Py_XDECREF(bound);
    return answer;
}

#define READING_METHOD(name)                                    \
    static PyObject *proxy_##name(PyObject *op, PyObject *args) \
    {                                                           \
        return ask_plain(op, args, #name);                      \
    }

READING_METHOD(union)
READING_METHOD(intersection)
READING_METHOD(difference)
READING_METHOD(symmetric_difference)
READING_METHOD(issubset)
READING_METHOD(issuperset)
READING_METHOD(isdisjoint)

static PyObject *
proxy_copy(PyObject *op, PyObject *Py_UNUSED(none))
{
    return plain_set(op);
}

/* Operators give plain sets, whichever side the proxy is on. */
static PyObject *
operate(PyObject *left, PyObject *right, PyObject *(*number)(PyObject *, PyObject *))
{
    PyObject *a, *b, *answer = NULL;
    int fits = is_set(left);

    fits = fits > 0 ? is_set(right) : fits;
    if (fits <= 0) {
        return fits < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    a = as_plain(left);
    b = a ? as_plain(right) : NULL;
    if (b != NULL) {
        answer = number(a, b);
    }
    Py_XDECREF(a);
    Py_XDECREF(b);
    return answer;
}

static PyObject *
proxy_or(PyObject *left, PyObject *right)
{
    return operate(left, right, PyNumber_Or);
}

static PyObject *
proxy_and(PyObject *left, PyObject *right)
{
    return operate(left, right, PyNumber_And);
}

static PyObject *
proxy_subtract(PyObject *left, PyObject *right)
{
    return operate(left, right, PyNumber_Subtract);
}

static PyObject *
proxy_xor(PyObject *left, PyObject *right)
{
    return operate(left, right, PyNumber_Xor);
}

/* --- changing --------------------------------------------------------------------------- */

typedef enum { UNION, INTERSECTION, DIFFERENCE, SYMMETRIC_DIFFERENCE } algebra;

static mm_location_set
combine(algebra how, mm_location_set a, mm_location_set b)
{
    switch (how) {
    case UNION:
        return a | b;
    case INTERSECTION:
        return a & b;
    case DIFFERENCE:
        return a & ~b;
    default:
        return a ^ b;
    }
}

/* Reads all operands first, then the set once, then changes what differs. What is taken away need
 * not be a possible member; what may come in must be. */
static int
change(PyObject *op, algebra how, PyObject *const *others, Py_ssize_t count)
{
    mm_buffer *b = buffer_of(op);
    bool strict = how == UNION || how == SYMMETRIC_DIFFERENCE;
    mm_location_set operand = how == INTERSECTION ? ~(mm_location_set)0 : 0, one, now;

    for (Py_ssize_t i = 0; i < count; i++) {
        if (mm_read_members(b->state, others[i], strict, &one) < 0) {
            return -1;
        }
        operand = how == INTERSECTION ? operand & one : operand | one;
    }
    return read_set(b, &now) < 0 ? -1 : change_set(b, now, combine(how, now, operand));
}

static PyObject *
change_method(PyObject *op, algebra how, PyObject *const *others, Py_ssize_t count)
{
    if (change(op, how, others, count) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
proxy_update(PyObject *op, PyObject *const *others, Py_ssize_t count)
{
    return change_method(op, UNION, others, count);
}

static PyObject *
proxy_intersection_update(PyObject *op, PyObject *const *others, Py_ssize_t count)
{
    return change_method(op, INTERSECTION, others, count);
}

static PyObject *
proxy_difference_update(PyObject *op, PyObject *const *others, Py_ssize_t count)
{
    return change_method(op, DIFFERENCE, others, count);
}

static PyObject *
proxy_symmetric_difference_update(PyObject *op, PyObject *other)
{
    return change_method(op, SYMMETRIC_DIFFERENCE, &other, 1);
}

static PyObject *
change_in_place(PyObject *op, PyObject *other, algebra how)
{
    int fits = is_set(other);

    if (fits <= 0) {
        return fits < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    return change(op, how, &other, 1) < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
proxy_inplace_or(PyObject *op, PyObject *other)
{
    return change_in_place(op, other, UNION);
}

static PyObject *
proxy_inplace_and(PyObject *op, PyObject *other)
{
    return change_in_place(op, other, INTERSECTION);
}

static PyObject *
proxy_inplace_subtract(PyObject *op, PyObject *other)
{
    return change_in_place(op, other, DIFFERENCE);
}

static PyObject *
proxy_inplace_xor(PyObject *op, PyObject *other)
{
    return change_in_place(op, other, SYMMETRIC_DIFFERENCE);
}

static PyObject *
proxy_add(PyObject *op, PyObject *value)
{
    mm_buffer *b = buffer_of(op);
    CUmemLocation where;
    mm_location_set now;

    if (mm_read_accessor(b->state, value, &where) < 0 || read_set(b, &now) < 0
        || change_set(b, now, now | mm_location_bit(where)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Takes a member out; *was says whether it was there. */
static int
take_out(PyObject *op, PyObject *value, bool *was)
{
    mm_buffer *b = buffer_of(op);
    mm_location_set member, now;

    if (find_member(b->state, value, &member) < 0 || read_set(b, &now) < 0) {
        return -1;
    }
    *was = (now & member) != 0;
    return change_set(b, now, now & ~member);
}

/* Sent to the driver whether or not the member shows, for it may cover a part of the pages. */
static PyObject *
proxy_discard(PyObject *op, PyObject *value)
{
    mm_buffer *b = buffer_of(op);
    mm_location_set member;

    if (mm_buffer_check_open(b) < 0 || find_member(b->state, value, &member) < 0
        || change_set(b, member, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
proxy_remove(PyObject *op, PyObject *value)
{
    bool was;

    if (take_out(op, value, &was) < 0) {
        return NULL;
    }
    if (!was) {
        PyErr_SetObject(PyExc_KeyError, value);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
proxy_pop(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_buffer *b = buffer_of(op);
    mm_location_set now;

    if (read_set(b, &now) < 0) {
        return NULL;
    }
    if (now == 0) {
        PyErr_SetString(PyExc_KeyError, "pop from an empty set");
        return NULL;
    }
    if (change_set(b, now, now & (now - 1)) < 0) {
        return NULL;
    }
    return mm_location_object_new(b->state, mm_bit_location(__builtin_ctzll(now)));
}

static PyObject *
proxy_clear_members(PyObject *op, PyObject *Py_UNUSED(none))
{
    mm_location_set now;

    if (read_set(buffer_of(op), &now) < 0 || change_set(buffer_of(op), now, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

int
mm_accessed_by_assign(mm_buffer *b, PyObject *value)
{
    mm_location_set wanted, now;

    if (mm_buffer_check_open(b) < 0) {
        return -1;
    }
    /* What `buf.accessed_by |= ...` ends with: the change is made already. */
    if (is_proxy(value) && buffer_of(value) == b) {
        return 0;
    }
    if (mm_read_members(b->state, value, true, &wanted) < 0 || read_set(b, &now) < 0) {
        return -1;
    }
    return change_set(b, now, wanted);
}

/* --- the type --------------------------------------------------------------------------- */

PyObject *
mm_accessed_by_new(mm_state *state, PyObject *buffer)
{
    PyObject *self = mm_alloc_object(state->accessed_by_type);

    if (self != NULL) {
        ((proxy_object *)self)->buffer = Py_NewRef(buffer);
    }
    return self;
}

static int
proxy_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((proxy_object *)op)->buffer);
    return 0;
}

static void
proxy_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    Py_CLEAR(((proxy_object *)op)->buffer);
    mm_free_object(op);
}

static PyObject *
proxy_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    PyErr_Format(PyExc_TypeError, "%s cannot be pickled: it belongs to its buffer; pickle set(it)",
                 "AccessedBySetProxy");
    (void)op;
    return NULL;
}

PyDoc_STRVAR(
    proxy_doc,
    "The locations that keep a mapping of every page of a buffer: a live, mutable set.\n"
    "\n"
    "What buf.accessed_by gives. It has every method of set and is a collections.abc.MutableSet; its\n"
    "members are Devices and Host(). Nothing is stored: each read asks the driver, and every change\n"
    "reads all its arguments first, asks once, and then advises once for each member that differs; if\n"
    "the driver fails in the middle, what was done is taken back. Operators give plain sets. Iteration\n"
    "is over a snapshot, devices ascending and then Host(). A location that covers only a part of the\n"
    "pages is no member.\n"
    "\n"
    "add() and other ways in raise TypeError for what is no location and ValueError for a NUMA host;\n"
    "`in`, discard() and other ways out take anything. Safe from every thread; two threads that change\n"
    "one set at a time may overwrite each other. Driver: cuMemRangeGetAttribute, cuMemAdvise.");

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef proxy_methods[] = {
    {"add", proxy_add, METH_O, "add($self, location, /)\n--\n\nAdd a Device or Host()."},
    {"discard", proxy_discard, METH_O,
     "discard($self, location, /)\n--\n\nTake a member out, also where it covers only some pages."},
    {"remove", proxy_remove, METH_O,
     "remove($self, location, /)\n--\n\nTake a member out; KeyError if it is not there."},
    {"pop", proxy_pop, METH_NOARGS,
     "pop($self, /)\n--\n\nTake a member out and return it; KeyError if there is none."},
    {"clear", proxy_clear_members, METH_NOARGS, "clear($self, /)\n--\n\nTake all members out."},
    {"update", FAST(proxy_update),
     "update($self, /, *others)\n--\n\nAdd the members of all others."},
    {"intersection_update", FAST(proxy_intersection_update),
     "intersection_update($self, /, *others)\n--\n\nKeep what is in all others too."},
    {"difference_update", FAST(proxy_difference_update),
     "difference_update($self, /, *others)\n--\n\nTake out what is in any of the others."},
    {"symmetric_difference_update", proxy_symmetric_difference_update, METH_O,
     "symmetric_difference_update($self, other, /)\n--\n\nKeep what is in exactly one of both."},
    {"union", proxy_union, METH_VARARGS,
     "union($self, /, *others)\n--\n\nA plain set with the members of all."},
    {"intersection", proxy_intersection, METH_VARARGS,
     "intersection($self, /, *others)\n--\n\nA plain set of what is in all."},
    {"difference", proxy_difference, METH_VARARGS,
     "difference($self, /, *others)\n--\n\nA plain set of what is in none of the others."},
    {"symmetric_difference", proxy_symmetric_difference, METH_VARARGS,
     "symmetric_difference($self, other, /)\n--\n\nA plain set of what is in exactly one of both."},
    {"issubset", proxy_issubset, METH_VARARGS,
     "issubset($self, other, /)\n--\n\nWhether the other has every member."},
    {"issuperset", proxy_issuperset, METH_VARARGS,
     "issuperset($self, other, /)\n--\n\nWhether this has every member of the other."},
    {"isdisjoint", proxy_isdisjoint, METH_VARARGS,
     "isdisjoint($self, other, /)\n--\n\nWhether both have no member in common."},
    {"copy", proxy_copy, METH_NOARGS, "copy($self, /)\n--\n\nA plain set of the members of now."},
    {"__reduce__", proxy_reduce, METH_NOARGS,
     "__reduce__($self, /)\n--\n\nRaises TypeError: the set belongs to its buffer."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef proxy_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(proxy_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot proxy_slots[] = {
    {Py_tp_doc, (void *)proxy_doc},
    {Py_tp_traverse, proxy_traverse},
    {Py_tp_dealloc, proxy_dealloc},
    {Py_tp_repr, proxy_repr},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_richcompare, proxy_richcompare},
    {Py_tp_iter, proxy_iter},
    {Py_tp_methods, proxy_methods},
    {Py_tp_members, proxy_members},
    {Py_sq_contains, proxy_contains},
    {Py_sq_length, proxy_length},
    {Py_nb_or, proxy_or},
    {Py_nb_and, proxy_and},
    {Py_nb_subtract, proxy_subtract},
    {Py_nb_xor, proxy_xor},
    {Py_nb_inplace_or, proxy_inplace_or},
    {Py_nb_inplace_and, proxy_inplace_and},
    {Py_nb_inplace_subtract, proxy_inplace_subtract},
    {Py_nb_inplace_xor, proxy_inplace_xor},
    {0, NULL},
};

static PyType_Spec proxy_spec = {
    .name = "managedmem.AccessedBySetProxy",
    .basicsize = sizeof(proxy_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = proxy_slots,
};

int
mm_accessed_by_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &proxy_spec, &state->accessed_by_type);
}
