/* location_set_peers.c: the type PeerAccessibleBySetProxy, the live set behind resource.peer_accessible_by: each
 * read asks the driver about every device, each change is one driver call. */
#include "foreign_location.h"
#include "location_set.h"
#include "resource.h"

static bool
is_closed(PyObject *owner)
{
    return mm_guard_is_closed(&mm_resource_of(owner)->guard);
}

static int
read_peers(PyObject *owner, mm_location_set *set)
{
    mm_driver *cu = mm_resource_begin(owner);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return -1;
    }
    rc = mm_pool_peers(cu, mm_resource_of(owner)->pool, set, &st);
    mm_resource_end(owner);
    if (rc < 0) {
        (void)mm_raise(mm_type_state(Py_TYPE(owner)), &st);
    }
    return rc;
}

/* Without the GIL: the driver maps all that the pool has. */
static int
change_peers(PyObject *owner, mm_location_set from, mm_location_set to)
{
    mm_driver *cu = mm_resource_begin(owner);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_pool_change_peers(cu, mm_resource_of(owner)->pool, from, to, &st);
    mm_resource_end(owner);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(mm_type_state(Py_TYPE(owner)), &st);
    }
    return rc;
}

/* The owner has access anyway and is left out. What comes in must be within reach. */
static int
read_peer(mm_state *state, PyObject *owner, PyObject *value, bool strict, mm_location_set *member)
{
    int device, own = mm_resource_of(owner)->where.id, rc;
    bool can = true;
    mm_driver *cu;
    mm_status st;

    if (mm_read_device(state, value, &device) < 0) {
        return -1;
    }
    if (device == own) {
        *member = 0;
        return 0;
    }
    if (strict) {
        cu = mm_resource_begin(owner);
        if (cu == NULL) {
            return -1;
        }
        rc = mm_pool_reachable(cu, mm_resource_of(owner)->pool, device, &can, &st);
        mm_resource_end(owner);
        if (rc < 0) {
            (void)mm_raise(state, &st);
            return -1;
        }
    }
    if (!can) {
        PyErr_Format(PyExc_ValueError,
                     "Device(%d) cannot reach the memory of Device(%d): this system has no peer "
                     "access between them",
                     device, own);
        return -1;
    }
    *member = mm_location_bit(mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device));
    return 0;
}

static const mm_set_kind peers = {
    .name = "PeerAccessibleBySetProxy",
    .owner_name = "DeviceMemoryResource",
    .is_closed = is_closed,
    .raise_closed = mm_resource_raise_closed,
    .read = read_peers,
    .change = change_peers,
    .read_member = read_peer,
};

PyObject *
mm_peers_get(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));

    if (is_closed(op)) {
        (void)mm_resource_raise_closed();
        return NULL;
    }
    return mm_set_new(state, state->peers_type, &peers, op);
}

int
mm_peers_set(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "peer_accessible_by cannot be deleted; assign an empty set");
        return -1;
    }
    return mm_set_assign(mm_type_state(Py_TYPE(op)), &peers, op, value);
}

PyDoc_STRVAR(
    peers_doc,
    "The other devices that may use the memory of a pool: a live, mutable set.\n"
    "\n"
    "What resource.peer_accessible_by gives. It has every method of set and is a\n"
    "collections.abc.MutableSet; its members are Devices. Nothing is stored: each read asks the driver\n"
    "about every device, and every change reads all its arguments first, asks once, and then makes one\n"
    "driver call, or none where nothing changes. A change takes effect at the call, for all memory of\n"
    "the pool, and can take long where there is much: change many devices at once. If the driver\n"
    "refuses, nothing has changed. Operators give plain sets. Iteration is over a snapshot, ascending.\n"
    "\n"
    "Devices of other libraries and ordinals stand for Devices. The owner has access anyway and is left\n"
    "out. add() and other ways in raise TypeError for what is no device, and ValueError for one that\n"
    "is not there or out of reach; `in`, discard() and other ways out take anything. Safe from every\n"
    "thread; two threads that change one set at a time may overwrite each other.\n"
    "Driver: cuMemPoolGetAccess, cuMemPoolSetAccess, cuDeviceCanAccessPeer.");

int
mm_peers_init(PyObject *module, mm_state *state)
{
    return mm_set_add_type(module, "managedmem.PeerAccessibleBySetProxy", peers_doc,
                           &state->peers_type);
}
