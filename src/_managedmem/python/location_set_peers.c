/* location_set_peers.c: the type PeerAccessibleBySetProxy, the live set behind
 * resource.peer_accessible_by. Each read queries every device. Each change is one driver call. */
#include "foreign_location.h"
#include "location_set.h"
#include "resource.h"

static bool
is_resource_closed(PyObject *owner)
{
    return mm_guard_is_closed(&mm_resource_of(owner)->guard);
}

static int
raise_resource_closed(PyObject *Py_UNUSED(owner))
{
    return mm_resource_raise_closed();
}

static int
read_peers(PyObject *owner, mm_location_set *set)
{
    mm_driver *cu = mm_resource_enter(owner);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return -1;
    }
    rc = mm_pool_peers(cu, mm_resource_of(owner)->pool, set, &st);
    mm_resource_leave(owner);
    return mm_raise_failure(mm_type_state(Py_TYPE(owner)), rc, &st);
}

/* Releases the GIL, because mapping all memory of the pool takes long. */
static int
change_peers(PyObject *owner, mm_location_set from, mm_location_set to)
{
    mm_driver *cu = mm_resource_enter(owner);
    mm_status st;
    int rc;

    if (cu == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_pool_change_peers(cu, mm_resource_of(owner)->pool, from, to, &st);
    mm_resource_leave(owner);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(mm_type_state(Py_TYPE(owner)), rc, &st);
}

/* The pool's own device always has access, and *member is 0 for it. A device to add (strict) must
 * be able to reach the pool. */
static int
read_peer(mm_state *state, PyObject *owner, PyObject *value, bool strict, mm_location_set *member)
{
    int device, own = mm_resource_of(owner)->location.id, rc;
    bool reachable = true;
    mm_driver *cu;
    mm_status st;

    assert(mm_resource_of(owner)->location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    if (mm_read_device(state, value, &device) < 0) {
        return -1;
    }
    if (device == own) {
        *member = 0;
        return 0;
    }
    if (strict) {
        cu = mm_resource_enter(owner);
        if (cu == NULL) {
            return -1;
        }
        rc = mm_pool_is_reachable(cu, mm_resource_of(owner)->pool, device, &reachable, &st);
        mm_resource_leave(owner);
        if (rc < 0) {
            return mm_raise_failure(state, -1, &st);
        }
    }
    if (!reachable) {
        return MM_ERROR(
            PyExc_ValueError,
            "Device(%d) cannot reach the memory of Device(%d): this system has no peer "
            "access between them",
            device, own);
    }
    assert(device >= 0 && device < MM_HOST_BIT);
    *member = mm_location_bit(mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device));
    return 0;
}

static int
read_peer_location(mm_state *state, PyObject *value, CUmemLocation *location)
{
    int device, rc = mm_read_device(state, value, &device);

    *location = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, rc < 0 ? 0 : device);
    return rc;
}

static const mm_set_kind peers = {
    .name = "PeerAccessibleBySetProxy",
    .owner_name = "DeviceMemoryResource",
    .is_closed = is_resource_closed,
    .raise_closed = raise_resource_closed,
    .read = read_peers,
    .change = change_peers,
    .read_location = read_peer_location,
    .read_member = read_peer,
};

PyObject *
mm_peers_get(PyObject *op, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));

    if (is_resource_closed(op)) {
        (void)mm_resource_raise_closed();
        return NULL;
    }
    return mm_set_new(state, state->peers_type, &peers, op);
}

int
mm_peers_set(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    if (value == NULL) {
        return MM_ERROR(PyExc_AttributeError,
                        "peer_accessible_by cannot be deleted; assign an empty set");
    }
    return mm_set_assign(mm_type_state(Py_TYPE(op)), &peers, op, value);
}

PyDoc_STRVAR(
    peers_doc,
    "The other devices that may use the memory of a pool: a live, mutable set.\n"
    "\n"
    "The value of resource.peer_accessible_by. It has every method of set and is a\n"
    "collections.abc.MutableSet; its members are Devices. Nothing is stored: each read queries the\n"
    "driver for every device. A change reads all its arguments, queries once, and makes one driver call,\n"
    "or none if nothing changes. It takes effect at the call, for all memory of the pool. A call\n"
    "for much memory takes long: change several devices at once. If the driver refuses, nothing\n"
    "has changed. Operators return plain sets. Iteration is over a snapshot, ascending.\n"
    "\n"
    "All methods and operators accept ordinals and devices of other libraries as Devices. The\n"
    "pool's own device always has access and is never a member. Methods that add raise TypeError\n"
    "for objects that are not devices, and ValueError for a device that does not exist or cannot\n"
    "reach the pool; `in`, operators and methods that remove accept any object. All raise\n"
    "RuntimeError when the resource is closed. Safe from every thread; of two threads that change\n"
    "one set at the same time, one may undo the other's change.\n"
    "Driver: cuMemPoolGetAccess, cuMemPoolSetAccess, cuDeviceCanAccessPeer.");

int
mm_peers_init(PyObject *module, mm_state *state)
{
    return mm_set_add_type(module, "managedmem.typing.PeerAccessibleBySetProxy", peers_doc,
                           &state->peers_type);
}
