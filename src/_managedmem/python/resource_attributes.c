/* resource_attributes.c: the type PoolAttributes: the driver's attributes of a pool. */
#include "leak_warnings.h"
#include "resource.h"

/* Keeps the pool, not the resource, because a pool outlives its closed resource. */
typedef struct {
    PyObject_HEAD
    mm_pool *pool;
} attributes_object;

static mm_pool *
pool_of(PyObject *op)
{
    return ((attributes_object *)op)->pool;
}

/* The closures of the properties point to these. */
static const CUmemPool_attribute release_threshold = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                 reserved_mem_current = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                 reserved_mem_high = CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
                                 used_mem_current = CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                                 used_mem_high = CU_MEMPOOL_ATTR_USED_MEM_HIGH;

static PyObject *
attributes_get(PyObject *op, void *closure)
{
    mm_driver *cu = mm_open(mm_type_state(Py_TYPE(op)));
    uint64_t value = 0;
    mm_status st;

    if (cu == NULL) {
        return NULL;
    }
    return mm_pool_get_attribute(cu, pool_of(op), *(const CUmemPool_attribute *)closure, &value,
                                 &st)
                   < 0
               ? mm_raise(mm_type_state(Py_TYPE(op)), &st)
               : PyLong_FromUnsignedLongLong(value);
}

static int
read_threshold(PyObject *value, uint64_t *out)
{
    PyObject *index;

    if (value == NULL) {
        PyErr_SetString(PyExc_AttributeError,
                        "release_threshold cannot be deleted; assign a number of bytes");
        return -1;
    }
    if (PyBool_Check(value) || !PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "release_threshold must be an int, got %R", value);
        return -1;
    }
    index = PyNumber_Index(value);
    if (index == NULL) {
        return -1;
    }
    *out = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (*out == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear(); /* OverflowError: negative or more than 64 bits */
        PyErr_Format(PyExc_ValueError, "release_threshold must be in 0 to 2**64 - 1, got %R",
                     value);
        return -1;
    }
    return 0;
}

static int
attributes_set_threshold(PyObject *op, PyObject *value, void *Py_UNUSED(closure))
{
    mm_state *state = mm_type_state(Py_TYPE(op));
    uint64_t threshold;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (read_threshold(value, &threshold) < 0 || (cu = mm_open(state)) == NULL) {
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_pool_set_attribute(cu, pool_of(op), release_threshold, threshold, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        (void)mm_raise(state, &st);
    }
    return rc;
}

PyObject *
mm_resource_get_attributes(PyObject *op, void *Py_UNUSED(closure))
{
    mm_pool *pool;
    PyObject *self;

    if (mm_resource_check_pooled(op) < 0 || mm_resource_enter(op) == NULL) {
        return NULL;
    }
    pool = mm_resource_of(op)->pool;
    mm_pool_retain(pool);
    mm_resource_leave(op);
    self = mm_alloc_object(mm_type_state(Py_TYPE(op))->attributes_type);
    if (self != NULL) {
        ((attributes_object *)self)->pool = pool;
    } else {
        mm_pool_drop(pool);
    }
    return self;
}

static void
attributes_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    Py_BEGIN_ALLOW_THREADS
    mm_pool_drop(pool_of(op));
    Py_END_ALLOW_THREADS
    mm_report_leaks();
    mm_free_object(op);
}

static PyObject *
attributes_repr(PyObject *op)
{
    const CUmemPool_attribute shown[] = {release_threshold, reserved_mem_current,
                                         reserved_mem_high, used_mem_current, used_mem_high};
    enum { COUNT = sizeof shown / sizeof *shown };
    mm_driver *cu = mm_driver_usable();
    unsigned long long now[COUNT];
    mm_status ignored;

    for (int i = 0; i < COUNT; i++) {
        uint64_t value = 0;
        if (cu == NULL || mm_pool_get_attribute(cu, pool_of(op), shown[i], &value, &ignored) < 0) {
            return PyUnicode_FromString("<PoolAttributes of a pool that cannot be queried>");
        }
        now[i] = value;
    }
    return PyUnicode_FromFormat("<PoolAttributes release_threshold=%llu reserved_mem_current=%llu "
                                "reserved_mem_high=%llu used_mem_current=%llu used_mem_high=%llu>",
                                now[0], now[1], now[2], now[3], now[4]);
}

PyDoc_STRVAR(
    attributes_doc,
    "The attributes of a driver pool, in bytes; each read queries the driver.\n"
    "\n"
    "The value of resource.attributes. It keeps the pool, so it can be read after the resource is\n"
    "closed. Raises CUDAError when the driver refuses. Safe from every thread.\n"
    "Driver: cuMemPoolGetAttribute, cuMemPoolSetAttribute.");

static PyGetSetDef attributes_getset[] = {
    {"release_threshold", attributes_get, attributes_set_threshold,
     "How much unused memory the pool keeps when a stream, event or device is waited for.\n\n"
     "It is 2**64 - 1, which keeps all, unless assigned. ValueError below 0 or above 2**64 - 1.",
     (void *)(uintptr_t)&release_threshold},
    {"reserved_mem_current", attributes_get, NULL,
     "The memory that the pool has taken from the system, used or not.",
     (void *)(uintptr_t)&reserved_mem_current},
    {"reserved_mem_high", attributes_get, NULL, "The most that reserved_mem_current has been.",
     (void *)(uintptr_t)&reserved_mem_high},
    {"used_mem_current", attributes_get, NULL, "The memory that allocations use now.",
     (void *)(uintptr_t)&used_mem_current},
    {"used_mem_high", attributes_get, NULL, "The most that used_mem_current has been.",
     (void *)(uintptr_t)&used_mem_high},
    {NULL, NULL, NULL, NULL, NULL},
};

/* clang-format off */
static PyType_Slot attributes_slots[] = {
    {Py_tp_doc, (void *)attributes_doc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_tp_dealloc, attributes_dealloc},
    {Py_tp_repr, attributes_repr},
    {Py_tp_getset, attributes_getset},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec attributes_spec = {
    .name = "managedmem.typing.PoolAttributes",
    .basicsize = sizeof(attributes_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = attributes_slots,
};

int
mm_pool_attributes_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &attributes_spec, &state->attributes_type);
}
