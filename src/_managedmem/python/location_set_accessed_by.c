/* location_set_accessed_by.c: the type AccessedBySetProxy, the live set behind buf.accessed_by: each read is one
 * query of the driver, each change one advice for every member that differs. */
#include "../memory/advice.h"
#include "buffer.h"
#include "foreign_location.h"
#include "location_set.h"

static bool
is_closed(PyObject *owner)
{
    return mm_buffer_is_closed(mm_buffer_of(owner));
}

static int
read_accessed_by(PyObject *owner, mm_location_set *set)
{
    mm_buffer *b = mm_buffer_of(owner);
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0) {
        return -1;
    }
    rc = mm_range_accessed_by(use.cu, use.range, set, &st);
    mm_buffer_leave(&use);
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* One advice for each member in which the sets differ, without the GIL: it can wait for migrations
 * of other threads. */
static int
change_accessed_by(PyObject *owner, mm_location_set from, mm_location_set to)
{
    mm_buffer *b = mm_buffer_of(owner);
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_ADVISE, NULL, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_change_accessed_by(use.cu, use.range, from, to, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

/* Where the driver refuses this there is nothing to put back. */
static int
remove_partial(PyObject *owner, mm_location_set member)
{
    mm_buffer *b = mm_buffer_of(owner);
    mm_buffer_use use;
    mm_status st;
    int rc;

    if (mm_buffer_enter(b, MM_ADVISE, NULL, &use) < 0) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_range_switch_accessed_by(use.cu, use.range, member, false, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(b->state, &st);
    }
    return rc;
}

static int
read_accessed_by_member(mm_state *state, PyObject *Py_UNUSED(owner), PyObject *value,
                        bool Py_UNUSED(strict), mm_location_set *member)
{
    CUmemLocation where;

    if (mm_read_accessed_by_member(state, value, &where) < 0) {
        return -1;
    }
    *member = mm_location_bit(where);
    return 0;
}

static const mm_set_kind accessed_by = {
    .name = "AccessedBySetProxy",
    .owner_name = "ManagedBuffer",
    .is_closed = is_closed,
    .raise_closed = mm_buffer_raise_closed,
    .read = read_accessed_by,
    .change = change_accessed_by,
    .remove_partial = remove_partial,
    .read_member = read_accessed_by_member,
};

int
mm_read_members(mm_state *state, PyObject *values, bool strict, mm_location_set *set)
{
    return mm_set_read_members(state, &accessed_by, NULL, values, strict, set);
}

PyObject *
mm_accessed_by_new(mm_state *state, PyObject *buffer)
{
    return mm_set_new(state, state->accessed_by_type, &accessed_by, buffer);
}

int
mm_accessed_by_assign(mm_buffer *b, PyObject *value)
{
    return mm_set_assign(b->state, &accessed_by, (PyObject *)b, value);
}

PyDoc_STRVAR(
    accessed_by_doc,
    "The locations that keep a mapping of every page of a buffer: a live, mutable set.\n"
    "\n"
    "What buf.accessed_by gives. It has every method of set and is a collections.abc.MutableSet; its\n"
    "members are Devices and Host(). Nothing is stored: each read asks the driver, and every change\n"
    "reads all its arguments first, asks once, and then advises once for each member that differs.\n"
    "Where members came in, it asks once more, and repeats the advice while they do not show. If the\n"
    "driver fails in the middle, what was done is taken back. Operators give plain sets. Iteration is\n"
    "over a snapshot, devices ascending and then Host(). A location that covers only a part of the\n"
    "pages is no member, but discard() takes it out of all of them.\n"
    "\n"
    "add() and other ways in raise TypeError for what is no location and ValueError for a NUMA host;\n"
    "`in`, discard() and other ways out take anything. Safe from every thread; two threads that change\n"
    "one set at a time may overwrite each other. Driver: cuMemRangeGetAttribute, cuMemAdvise.");

int
mm_accessed_by_init(PyObject *module, mm_state *state)
{
    return mm_set_add_type(module, "managedmem.AccessedBySetProxy", accessed_by_doc,
                           &state->accessed_by_type);
}
