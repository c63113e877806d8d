/* location_set_accessed_by.c: the type AccessedBySetProxy, the live set behind buf.accessed_by.
 * Each read is one query of the driver. Each change advises once for every member that differs. */
#include "../memory/advice.h"
#include "buffer.h"
#include "foreign_location.h"
#include "location_set.h"

static bool
is_buffer_closed(PyObject *owner)
{
    return mm_buffer_is_closed(mm_buffer_of(owner));
}

static int
raise_buffer_closed(PyObject *owner)
{
    return mm_buffer_raise_closed(mm_buffer_of(owner));
}

/* Queries the members of an entered buffer, and leaves the buffer. */
static int
query_and_leave(mm_buffer *b, const mm_buffer_use *use, mm_location_set *set)
{
    PyThreadState *detached = mm_buffer_begin_query(use);
    mm_status st;
    int rc = mm_range_accessed_by(use->cu, use->range, set, &st);

    mm_buffer_end_query(use, detached);
    return mm_raise_failure(b->state, rc, &st);
}

static int
read_accessed_by(PyObject *owner, mm_location_set *set)
{
    mm_buffer *b = mm_buffer_of(owner);
    mm_buffer_use use;

    return mm_buffer_enter(b, MM_QUERY, NULL, &use) < 0 ? -1 : query_and_leave(b, &use, set);
}

/* For system memory, whose advice the driver does not report, the answer is `removed`. */
static int
read_accessed_by_before(PyObject *owner, mm_location_set removed, mm_location_set *set)
{
    mm_buffer *b = mm_buffer_of(owner);
    mm_buffer_use use;

    if (mm_buffer_enter(b, MM_ADVISE, NULL, &use) < 0) {
        return -1;
    }
    if (use.range.allocation == 0 && use.range.size > 0) {
        mm_location_set devices = ((mm_location_set)1 << use.cu->device_count) - 1;
        *set = removed & (devices | mm_location_bit(mm_host()));
        mm_buffer_leave(&use);
        return 0;
    }
    return query_and_leave(b, &use, set);
}

typedef struct {
    mm_location_set from, to;
} member_change;

static int
change_entered(mm_driver *cu, mm_range range, const void *arguments, mm_status *st)
{
    const member_change *sets = arguments;

    return mm_range_change_accessed_by(cu, range, sets->from, sets->to, st);
}

static int
change_accessed_by(PyObject *owner, mm_location_set from, mm_location_set to)
{
    member_change sets = {from, to};

    assert(from != to);
    return mm_buffer_advise(mm_buffer_of(owner), change_entered, &sets);
}

static int
unset_member(mm_driver *cu, mm_range range, const void *arguments, mm_status *st)
{
    const mm_location_set *member = arguments;

    return mm_range_switch_accessed_by(cu, range, *member, false, st);
}

/* If the driver refuses this single call, nothing has to be restored. */
static int
remove_from_parts_accessed_by(PyObject *owner, mm_location_set member)
{
    assert(member != 0);
    return mm_buffer_advise(mm_buffer_of(owner), unset_member, &member);
}

MM_COLD static int
refuse_numa_host(CUmemLocation location)
{
    char text[MM_LOCATION_TEXT];

    return MM_ERROR(
        PyExc_ValueError,
        "%s cannot be in accessed_by: the driver takes devices and Host(), but no NUMA host",
        mm_location_text(location, text));
}

int
mm_check_accessed_by(CUmemLocation location)
{
    assert(!PyErr_Occurred());
    return mm_is_numa_host(location) ? refuse_numa_host(location) : 0;
}

static int
read_accessed_by_member(mm_state *state, PyObject *Py_UNUSED(owner), PyObject *value,
                        bool Py_UNUSED(strict), mm_location_set *member)
{
    CUmemLocation location;

    if (mm_read_location(state, value, &location) < 0 || mm_check_accessed_by(location) < 0) {
        return -1;
    }
    *member = mm_location_bit(location);
    assert(*member != 0); /* NUMA hosts were refused */
    return 0;
}

static const mm_set_kind accessed_by = {
    .name = "AccessedBySetProxy",
    .owner_name = "ManagedBuffer",
    .is_closed = is_buffer_closed,
    .raise_closed = raise_buffer_closed,
    .read = read_accessed_by,
    .read_before = read_accessed_by_before,
    .change = change_accessed_by,
    .remove_from_parts = remove_from_parts_accessed_by,
    .read_location = mm_read_location,
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
    assert(mm_is_buffer(state, buffer));
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
    "The value of buf.accessed_by. It has every method of set and is a collections.abc.MutableSet; its\n"
    "members are Devices and Host(). Nothing is stored: each read queries the driver. A change reads all\n"
    "its arguments, queries once, and advises once for each member that differs. After adding\n"
    "members it queries once more, and repeats the advice until the members read back. If the\n"
    "driver fails in the middle, the change is undone. Operators return plain sets. Iteration is\n"
    "over a snapshot: devices ascending, then Host(). A location that only some pages have is not\n"
    "a member, but discard() removes it from all pages.\n"
    "\n"
    "All methods and operators accept devices and hosts of other libraries as Devices and Host().\n"
    "Methods that add raise TypeError for objects that are not locations and ValueError for NUMA hosts;\n"
    "`in`, operators and methods that remove accept any object. All raise RuntimeError when the buffer is\n"
    "closed.\n"
    "\n"
    "The members of system memory, which devices with pageable_memory_access reach, cannot be\n"
    "queried: reading them, remove(), pop() and ^= raise ValueError. Other changes advise every\n"
    "location that they name, and an assignment unsets every other location.\n"
    "Safe from every thread; of two threads that change one set at the same time, one may undo the\n"
    "other's change. Driver: cuMemRangeGetAttribute, cuMemAdvise.");

int
mm_accessed_by_init(PyObject *module, mm_state *state)
{
    return mm_set_add_type(module, "managedmem.typing.AccessedBySetProxy", accessed_by_doc,
                           &state->accessed_by_type);
}
