/* location_set.c: live sets of locations: every method of Python's set, built on the owner's read
 * and change.
 *
 * A set has no state except its owner: each operation reads all its arguments, reads the set once,
 * and changes all members that differ in one step. Members are bits of a mask, so that the set
 * algebra is arithmetic. */
#include "location_set.h"

typedef struct {
    PyObject_HEAD
    PyObject *weakrefs;
    mm_state *state;
    const mm_set_kind *kind;
    PyObject *owner;
} set_object;

static set_object *
set_of(PyObject *op)
{
    return (set_object *)op;
}

static int set_contains(PyObject *op, PyObject *value);

/* Compares a slot, because an operand can be of any type: the proxy types are in the module's
 * state, which cannot be found from such a type. */
static bool
is_proxy(PyObject *op)
{
    return PyType_GetSlot(Py_TYPE(op), Py_sq_contains) == (void *)set_contains;
}

static int
read_set(const set_object *s, mm_location_set *set)
{
    assert(s->owner != NULL);
    return s->kind->read(s->owner, set);
}

static int
change_set(const set_object *s, mm_location_set from, mm_location_set to)
{
    return from == to ? 0 : s->kind->change(s->owner, from, to);
}

/* --- conversions ------------------------------------------------------------------------ */

/* Clears the error if it says that a value is no location or cannot be a member. Returns false for
 * other errors, which stay set. */
static bool
clear_misfit(void)
{
    bool refusal =
        PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError);

    if (refusal) {
        PyErr_Clear(); /* TypeError or ValueError */
    }
    return refusal;
}

/* Stores the member that a value stands for, or 0 if the value cannot be a member. Returns -1 for
 * other errors. */
static int
find_member(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *value,
            mm_location_set *member)
{
    int rc;

    assert(!PyErr_Occurred());
    *member = 0;
    rc = kind->read_member(state, owner, value, false, member);
    if (rc < 0) {
        *member = 0;
    }
    return rc < 0 && !clear_misfit() ? -1 : 0;
}

/* Replaces the TypeError for an argument that is not iterable with a message that helps. */
static void
raise_not_iterable(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *value)
{
    mm_location_set member;

    assert(PyErr_Occurred());
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
        return;
    }
    PyErr_Clear(); /* TypeError of PyObject_GetIter, which says less */
    if (kind->read_member(state, owner, value, true, &member) == 0) {
        PyErr_Format(PyExc_TypeError,
                     "%R is one location and not iterable: wrap it in a set, {%R}", value, value);
    } else if (clear_misfit()) { /* not a location either */
        PyErr_Format(PyExc_TypeError,
                     "an iterable of locations is needed, such as a set, got %R; pass set() for "
                     "no locations",
                     value);
    }
}

int
mm_set_read_members(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *values,
                    bool strict, mm_location_set *set)
{
    PyObject *iterator, *value;
    int rc = 0;

    *set = 0;
    iterator = PyObject_GetIter(values);
    if (iterator == NULL) {
        raise_not_iterable(state, kind, owner, values);
        return -1;
    }
    while (rc == 0 && (value = PyIter_Next(iterator)) != NULL) {
        mm_location_set member = 0;
        rc = strict ? kind->read_member(state, owner, value, true, &member)
                    : find_member(state, kind, owner, value, &member);
        *set |= member;
        Py_DECREF(value);
    }
    Py_DECREF(iterator);
    return rc < 0 || PyErr_Occurred() ? -1 : 0;
}

/* 1 for a collections.abc.Set, which operators accept like a set; else 0, or -1 with an
 * exception. */
static int
is_abc_set(PyObject *op)
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

/* The Device or Host that an item of an operand stands for; the item itself if it stands for none. */
static PyObject *
to_location(const set_object *s, PyObject *item)
{
    CUmemLocation location;

    assert(!PyErr_Occurred());
    if (s->kind->read_location(s->state, item, &location) == 0) {
        return mm_location_object_new(s->state, location);
    }
    return clear_misfit() ? Py_NewRef(item) : NULL;
}

/* A plain set of the items, in which the locations are Devices and Hosts. */
static PyObject *
set_of_items(const set_object *s, PyObject *items)
{
    PyObject *iterator = PyObject_GetIter(items), *set, *item;
    int rc;

    set = iterator ? PySet_New(NULL) : NULL;
    rc = set ? 0 : -1;
    while (rc == 0 && (item = PyIter_Next(iterator)) != NULL) {
        PyObject *location = to_location(s, item);
        rc = location ? PySet_Add(set, location) : -1;
        Py_XDECREF(location);
        Py_DECREF(item);
    }
    Py_XDECREF(iterator);
    if (rc < 0 || PyErr_Occurred()) {
        Py_CLEAR(set);
    }
    return set;
}

/* An operand as a plain set or frozenset. An object that stands for a location, such as an ordinal,
 * becomes the Device or Host in it, so that methods and operators treat the object as `in` does. */
static PyObject *
to_plain_set(const set_object *s, PyObject *op)
{
    PyObject *set = is_proxy(op) ? PySet_New(op) : set_of_items(s, op), *frozen;

    if (set == NULL || !PyFrozenSet_Check(op)) {
        return set;
    }
    frozen = PyFrozenSet_New(set);
    Py_DECREF(set);
    return frozen;
}

/* --- reading ---------------------------------------------------------------------------- */

static int
set_contains(PyObject *op, PyObject *value)
{
    const set_object *s = set_of(op);
    mm_location_set member, set;

    if (find_member(s->state, s->kind, s->owner, value, &member) < 0 || read_set(s, &set) < 0) {
        return -1;
    }
    return (set & member) != 0;
}

static Py_ssize_t
set_length(PyObject *op)
{
    mm_location_set set;

    return read_set(set_of(op), &set) < 0 ? -1 : __builtin_popcountll(set);
}

/* Iterates over a snapshot: devices ascending, then the host. */
static PyObject *
set_iter(PyObject *op)
{
    PyObject *list, *iterator;
    CUmemLocation location;
    mm_location_set set;

    if (read_set(set_of(op), &set) < 0) {
        return NULL;
    }
    list = PyList_New(0);
    while (list != NULL && mm_next_location(&set, &location)) {
        if (mm_append_item(list, mm_location_object_new(set_of(op)->state, location)) < 0) {
            Py_CLEAR(list);
        }
    }
    iterator = list ? PyObject_GetIter(list) : NULL;
    Py_XDECREF(list);
    return iterator;
}

static PyObject *
set_repr(PyObject *op)
{
    const mm_set_kind *kind = set_of(op)->kind;
    PyObject *set, *text;

    if (kind->is_closed(set_of(op)->owner)) {
        return PyUnicode_FromFormat("<%s of a closed %s>", kind->name, kind->owner_name);
    }
    if (mm_driver_forked()) {
        return PyUnicode_FromFormat("<%s in a forked process>", kind->name);
    }
    set = PySet_New(op);
    text = set ? PyUnicode_FromFormat("%s(%R)", kind->name, set) : NULL;
    Py_XDECREF(set);
    return text;
}

static PyObject *
set_richcompare(PyObject *op, PyObject *other, int operation)
{
    PyObject *present, *compared, *answer = NULL;
    int comparable = is_abc_set(other);

    if (comparable <= 0) {
        return comparable < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    present = PySet_New(op);
    compared = present ? to_plain_set(set_of(op), other) : NULL;
    if (compared != NULL) {
        answer = PyObject_RichCompare(present, compared, operation);
    }
    Py_XDECREF(present);
    Py_XDECREF(compared);
    return answer;
}

static PyObject *
to_plain_sets(const set_object *s, PyObject *operands)
{
    Py_ssize_t count = PyTuple_Size(operands);
    PyObject *sets = PyTuple_New(count);

    for (Py_ssize_t i = 0; sets != NULL && i < count; i++) {
        if (mm_set_item(sets, i, to_plain_set(s, PyTuple_GetItem(operands, i))) < 0) {
            Py_CLEAR(sets);
        }
    }
    return sets;
}

/* Calls a method that changes nothing, on a plain set of the present members. */
static PyObject *
call_plain_method(PyObject *op, PyObject *args, const char *method)
{
    PyObject *operands = to_plain_sets(set_of(op), args);
    PyObject *set = operands ? PySet_New(op) : NULL;
    PyObject *bound = set ? PyObject_GetAttrString(set, method) : NULL;
    PyObject *answer = bound ? PyObject_Call(bound, operands, NULL) : NULL;

    Py_XDECREF(operands);
    Py_XDECREF(set);
    Py_XDECREF(bound);
    return answer;
}

#define READING_METHOD(name, doc)                             \
    PyDoc_STRVAR(set_##name##_doc, doc);                      \
    static PyObject *set_##name(PyObject *op, PyObject *args) \
    {                                                         \
        return call_plain_method(op, args, #name);            \
    }

READING_METHOD(
    union,
    "union($self, /, *others)\n--\n\nA plain set of the members of this set and of all others.")
READING_METHOD(
    intersection,
    "intersection($self, /, *others)\n--\n\nA plain set of the members that all others have.")
READING_METHOD(
    difference,
    "difference($self, /, *others)\n--\n\nA plain set of the members that none of the others has.")
READING_METHOD(
    symmetric_difference,
    "symmetric_difference($self, other, /)\n--\n\nA plain set of the members of exactly one of the two.")
READING_METHOD(issubset,
               "issubset($self, other, /)\n--\n\nTrue if the other has every member of this set.")
READING_METHOD(
    issuperset,
    "issuperset($self, other, /)\n--\n\nTrue if this set has every member of the other.")
READING_METHOD(isdisjoint,
               "isdisjoint($self, other, /)\n--\n\nTrue if the two have no member in common.")

PyDoc_STRVAR(set_shallow_copy_doc, "__copy__($self, /)\n--\n\nThe same as copy().");

PyDoc_STRVAR(set_copy_doc, "copy($self, /)\n--\n\nA plain set of the present members.");

static PyObject *
set_copy(PyObject *op, PyObject *Py_UNUSED(none_or_memo))
{
    return PySet_New(op);
}

PyDoc_STRVAR(set_deepcopy_doc,
             "__deepcopy__($self, memo, /)\n--\n\nThe same as copy(): members are immutable.");

/* Returns a plain set. The proxy may be either operand. */
static PyObject *
apply_operator(PyObject *left, PyObject *right, PyObject *(*number)(PyObject *, PyObject *))
{
    const set_object *s = set_of(is_proxy(left) ? left : right);
    PyObject *a, *b, *answer = NULL;
    int sets = is_abc_set(left);

    sets = sets > 0 ? is_abc_set(right) : sets;
    if (sets <= 0) {
        return sets < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    a = to_plain_set(s, left);
    b = a ? to_plain_set(s, right) : NULL;
    if (b != NULL) {
        answer = number(a, b);
    }
    Py_XDECREF(a);
    Py_XDECREF(b);
    return answer;
}

/* --- changing --------------------------------------------------------------------------- */

typedef enum { UNION, INTERSECTION, DIFFERENCE, SYMMETRIC_DIFFERENCE } set_operation;

static int
read_before(const mm_set_kind *kind, PyObject *owner, mm_location_set removed,
            mm_location_set *set)
{
    return kind->read_before != NULL ? kind->read_before(owner, removed, set)
                                     : kind->read(owner, set);
}

/* Adds and removes members, even where the present members cannot be queried. */
static int
add_and_remove(const mm_set_kind *kind, PyObject *owner, mm_location_set added,
               mm_location_set removed)
{
    mm_location_set now, wanted;

    assert((added & removed) == 0);
    if (read_before(kind, owner, removed, &now) < 0) {
        return -1;
    }
    wanted = (now & ~removed) | added;
    return now == wanted ? 0 : kind->change(owner, now, wanted);
}

static int
apply_operand(const set_object *s, set_operation operation, mm_location_set operand)
{
    mm_location_set now;

    switch (operation) {
    case UNION:
        return add_and_remove(s->kind, s->owner, operand, 0);
    case INTERSECTION:
        return add_and_remove(s->kind, s->owner, 0, ~operand);
    case DIFFERENCE:
        return add_and_remove(s->kind, s->owner, 0, operand);
    default:
        assert(operation == SYMMETRIC_DIFFERENCE);
        return read_set(s, &now) < 0 ? -1 : change_set(s, now, now ^ operand);
    }
}

/* Reads all operands first, then the set once, then changes the members that differ. Operands that
 * can add members are read strictly. */
static int
change_members(PyObject *op, set_operation operation, PyObject *const *others, Py_ssize_t count)
{
    const set_object *s = set_of(op);
    bool strict = operation == UNION || operation == SYMMETRIC_DIFFERENCE;
    mm_location_set operand = operation == INTERSECTION ? ~(mm_location_set)0 : 0, one;

    for (Py_ssize_t i = 0; i < count; i++) {
        if (mm_set_read_members(s->state, s->kind, s->owner, others[i], strict, &one) < 0) {
            return -1;
        }
        operand = operation == INTERSECTION ? operand & one : operand | one;
    }
    return apply_operand(s, operation, operand);
}

static PyObject *
change_method(PyObject *op, set_operation operation, PyObject *const *others, Py_ssize_t count)
{
    if (change_members(op, operation, others, count) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

#define CHANGING_METHOD(name, operation, doc)                                            \
    PyDoc_STRVAR(set_##name##_doc, doc);                                                 \
    static PyObject *set_##name(PyObject *op, PyObject *const *others, Py_ssize_t count) \
    {                                                                                    \
        return change_method(op, operation, others, count);                              \
    }

CHANGING_METHOD(update, UNION, "update($self, /, *others)\n--\n\nAdd the members of all others.")
CHANGING_METHOD(
    intersection_update, INTERSECTION,
    "intersection_update($self, /, *others)\n--\n\nKeep the members that all others have.")
CHANGING_METHOD(
    difference_update, DIFFERENCE,
    "difference_update($self, /, *others)\n--\n\nRemove the members that any of the others has.")

PyDoc_STRVAR(
    set_symmetric_difference_update_doc,
    "symmetric_difference_update($self, other, /)\n--\n\nKeep the members of exactly one of the two.");

static PyObject *
set_symmetric_difference_update(PyObject *op, PyObject *other)
{
    return change_method(op, SYMMETRIC_DIFFERENCE, &other, 1);
}

static PyObject *
change_in_place(PyObject *op, PyObject *other, set_operation operation)
{
    int sets = is_abc_set(other);

    if (sets <= 0) {
        return sets < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    return change_members(op, operation, &other, 1) < 0 ? NULL : Py_NewRef(op);
}

/* Defines an operator and its in-place form, which changes the set. */
#define OPERATOR(name, number, operation)                              \
    static PyObject *set_##name(PyObject *left, PyObject *right)       \
    {                                                                  \
        return apply_operator(left, right, number);                    \
    }                                                                  \
    static PyObject *set_inplace_##name(PyObject *op, PyObject *other) \
    {                                                                  \
        return change_in_place(op, other, operation);                  \
    }

OPERATOR(or, PyNumber_Or, UNION)
OPERATOR(and, PyNumber_And, INTERSECTION)
OPERATOR(subtract, PyNumber_Subtract, DIFFERENCE)
OPERATOR(xor, PyNumber_Xor, SYMMETRIC_DIFFERENCE)

PyDoc_STRVAR(set_add_doc,
             "add($self, location, /)\n--\n\nAdd a location; does nothing if it is a member.");

static PyObject *
set_add(PyObject *op, PyObject *value)
{
    const set_object *s = set_of(op);
    mm_location_set member = 0;

    if (s->kind->read_member(s->state, s->owner, value, true, &member) < 0
        || add_and_remove(s->kind, s->owner, member, 0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(set_discard_doc,
             "discard($self, location, /)\n--\n\nRemove a location if it is a member.");

static PyObject *
set_discard(PyObject *op, PyObject *value)
{
    const set_object *s = set_of(op);
    mm_location_set member, now;

    if (find_member(s->state, s->kind, s->owner, value, &member) < 0
        || read_before(s->kind, s->owner, member, &now) < 0
        || change_set(s, now, now & ~member) < 0
        || ((member & ~now) != 0 && s->kind->remove_from_parts != NULL
            && s->kind->remove_from_parts(s->owner, member) < 0)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    set_remove_doc,
    "remove($self, location, /)\n--\n\nRemove a location; KeyError if it is not a member.");

static PyObject *
set_remove(PyObject *op, PyObject *value)
{
    const set_object *s = set_of(op);
    mm_location_set member, now;
    PyObject *args;

    if (find_member(s->state, s->kind, s->owner, value, &member) < 0 || read_set(s, &now) < 0
        || change_set(s, now, now & ~member) < 0) {
        return NULL;
    }
    if ((now & member) == 0) {
        args = PyTuple_Pack(1, value); /* a tuple alone would become the arguments of KeyError */
        if (args != NULL) {
            PyErr_SetObject(PyExc_KeyError, args);
            Py_DECREF(args);
        }
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(set_pop_doc,
             "pop($self, /)\n--\n\nRemove a member and return it; KeyError for an empty set.");

static PyObject *
set_pop(PyObject *op, PyObject *Py_UNUSED(none))
{
    const set_object *s = set_of(op);
    mm_location_set now, rest;
    CUmemLocation location;

    if (read_set(s, &now) < 0) {
        return NULL;
    }
    rest = now;
    if (!mm_next_location(&rest, &location)) {
        return PyErr_Format(PyExc_KeyError, "pop from an empty set");
    }
    return change_set(s, now, rest) < 0 ? NULL : mm_location_object_new(s->state, location);
}

PyDoc_STRVAR(set_clear_members_doc, "clear($self, /)\n--\n\nRemove all members.");

static PyObject *
set_clear_members(PyObject *op, PyObject *Py_UNUSED(none))
{
    if (add_and_remove(set_of(op)->kind, set_of(op)->owner, 0, ~(mm_location_set)0) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

int
mm_set_assign(mm_state *state, const mm_set_kind *kind, PyObject *owner, PyObject *value)
{
    mm_location_set members;

    assert(value != NULL); /* the property refuses to be deleted */
    if (kind->is_closed(owner)) {
        return kind->raise_closed(owner);
    }
    /* `owner.property |= ...` ends with this assignment, after its operator made the change. */
    if (is_proxy(value) && set_of(value)->kind == kind && set_of(value)->owner == owner) {
        return 0;
    }
    if (mm_set_read_members(state, kind, owner, value, true, &members) < 0) {
        return -1;
    }
    return add_and_remove(kind, owner, members, ~members);
}

/* --- the type --------------------------------------------------------------------------- */

PyObject *
mm_set_new(mm_state *state, PyTypeObject *type, const mm_set_kind *kind, PyObject *owner)
{
    PyObject *self = mm_alloc_object(type);

    assert(kind != NULL && owner != NULL);
    if (self != NULL) {
        set_of(self)->state = state;
        set_of(self)->kind = kind;
        set_of(self)->owner = Py_NewRef(owner);
    }
    return self;
}

static int
set_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(set_of(op)->owner);
    return 0;
}

static void
set_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    Py_CLEAR(set_of(op)->owner);
    mm_free_object(op);
}

PyDoc_STRVAR(set_reduce_doc,
             "__reduce__($self, /)\n--\n\nRaises TypeError: the set belongs to its owner.");

static PyObject *
set_reduce(PyObject *op, PyObject *Py_UNUSED(none))
{
    return PyErr_Format(PyExc_TypeError,
                        "%s cannot be pickled: it belongs to its %s; pickle set(it)",
                        set_of(op)->kind->name, set_of(op)->kind->owner_name);
}

static PyMethodDef set_methods[] = {
    {"add", set_add, METH_O, set_add_doc},
    {"discard", set_discard, METH_O, set_discard_doc},
    {"remove", set_remove, METH_O, set_remove_doc},
    {"pop", set_pop, METH_NOARGS, set_pop_doc},
    {"clear", set_clear_members, METH_NOARGS, set_clear_members_doc},
    MM_POSITIONAL_METHOD("update", set_update, set_update_doc),
    MM_POSITIONAL_METHOD("intersection_update", set_intersection_update,
                         set_intersection_update_doc),
    MM_POSITIONAL_METHOD("difference_update", set_difference_update, set_difference_update_doc),
    {"symmetric_difference_update", set_symmetric_difference_update, METH_O,
     set_symmetric_difference_update_doc},
    {"union", set_union, METH_VARARGS, set_union_doc},
    {"intersection", set_intersection, METH_VARARGS, set_intersection_doc},
    {"difference", set_difference, METH_VARARGS, set_difference_doc},
    {"symmetric_difference", set_symmetric_difference, METH_VARARGS, set_symmetric_difference_doc},
    {"issubset", set_issubset, METH_VARARGS, set_issubset_doc},
    {"issuperset", set_issuperset, METH_VARARGS, set_issuperset_doc},
    {"isdisjoint", set_isdisjoint, METH_VARARGS, set_isdisjoint_doc},
    {"copy", set_copy, METH_NOARGS, set_copy_doc},
    {"__copy__", set_copy, METH_NOARGS, set_shallow_copy_doc},
    {"__deepcopy__", set_copy, METH_O, set_deepcopy_doc},
    {"__reduce__", set_reduce, METH_NOARGS, set_reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef set_members[] = MM_WEAK_MEMBERS(set_object);

int
mm_set_add_type(PyObject *module, const char *name, const char *doc, PyTypeObject **out)
{
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)doc},
        {Py_tp_traverse, set_traverse},
        {Py_tp_dealloc, set_dealloc},
        {Py_tp_repr, set_repr},
        {Py_tp_hash, PyObject_HashNotImplemented},
        {Py_tp_richcompare, set_richcompare},
        {Py_tp_iter, set_iter},
        {Py_tp_methods, set_methods},
        {Py_tp_members, set_members},
        {Py_sq_contains, set_contains},
        {Py_sq_length, set_length},
        {Py_nb_or, set_or},
        {Py_nb_and, set_and},
        {Py_nb_subtract, set_subtract},
        {Py_nb_xor, set_xor},
        {Py_nb_inplace_or, set_inplace_or},
        {Py_nb_inplace_and, set_inplace_and},
        {Py_nb_inplace_subtract, set_inplace_subtract},
        {Py_nb_inplace_xor, set_inplace_xor},
        {0, NULL},
    };

    return mm_add_final_type(module, name, sizeof(set_object), Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots, out);
}
