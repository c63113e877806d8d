/* working_group_object.c: the type WorkingGroup: its properties and its life. */
#include "working_objects.h"

/* --- reading ------------------------------------------------------------------------------ */

static PyObject *
group_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(mm_working_group_of(op)->bytes);
}

static PyObject *
group_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *name = mm_working_group_of(op)->name;

    return Py_NewRef(name ? name : Py_None);
}

static PyObject *
group_get_access(PyObject *op, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(mm_group_access_name(mm_working_group_of(op)->access));
}

static PyObject *
group_get_set(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(mm_working_group_of(op)->set);
}

static PyObject *
group_get_is_resident(PyObject *op, void *Py_UNUSED(closure))
{
    mm_loader *loader = mm_working_loader_of(mm_working_group_of(op)->set);
    mm_loader_group_report report;

    if (loader == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    mm_loader_read_group(loader, mm_working_group_of(op)->id, &report);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(report.resident);
}

static PyObject *
group_repr(PyObject *op)
{
    const mm_working_group_object *group = mm_working_group_of(op);
    PyObject *name =
        group->name ? PyUnicode_FromFormat(" name=%R", group->name) : PyUnicode_FromString("");
    PyObject *text = NULL;

    if (name != NULL) {
        text = PyUnicode_FromFormat("<WorkingGroup number=%llu%U access=%s nbytes=%zu%s>",
                                    (unsigned long long)group->id.number, name,
                                    mm_group_access_name(group->access), group->bytes,
                                    atomic_load(&group->removed) ? ", removed" : "");
        Py_DECREF(name);
    }
    return text;
}

/* --- life --------------------------------------------------------------------------------- */

void
mm_working_group_release_targets(PyObject *op)
{
    mm_working_group_object *group = mm_working_group_of(op);
    PyObject *items, *exports;

    MM_LOCK(op);
    items = group->items;
    exports = group->exports;
    group->items = group->exports = NULL;
    MM_UNLOCK();
    /* Outside of the lock, because releasing targets can run Python code. */
    Py_XDECREF(items);
    Py_XDECREF(exports);
}

static int
group_traverse(PyObject *op, visitproc visit, void *arg)
{
    const mm_working_group_object *group = mm_working_group_of(op);

    Py_VISIT(Py_TYPE(op));
    Py_VISIT(group->set);
    Py_VISIT(group->items);
    Py_VISIT(group->exports);
    return 0;
}

/* A group is garbage with its set, or was removed. The collector may clear the set's list before the
 * set, which must not use the memory after its end. */
static void
end_set_of(const mm_working_group_object *group)
{
    if (group->added && group->items != NULL) {
        mm_working_set_end(group->set);
    }
}

/* The reference to the set stays, because other garbage may use the group. */
static int
group_clear(PyObject *op)
{
    end_set_of(mm_working_group_of(op));
    mm_working_group_release_targets(op);
    return 0;
}

static void
group_dealloc(PyObject *op)
{
    mm_working_group_object *group = mm_working_group_of(op);

    PyObject_GC_UnTrack(op);
    PyObject_ClearWeakRefs(op);
    end_set_of(group);
    Py_CLEAR(group->items);
    Py_CLEAR(group->exports);
    Py_CLEAR(group->name);
    Py_CLEAR(group->set);
    mm_free_object(op);
}

/* --- the type ----------------------------------------------------------------------------- */

PyDoc_STRVAR(
    group_doc,
    "A group of memory in a WorkingSet, made by WorkingSet.add().\n"
    "\n"
    "`with group.use(stream=s):` around the code that queues work on s. Uses of one group may nest and\n"
    "overlap, on several streams and in several threads. Keeps its set. repr() shows its number, from 0\n"
    "on in the order of adding. Safe from every thread.");

static PyMethodDef group_methods[] = {
    MM_METHOD("use", mm_working_group_use, mm_working_group_use_doc),
    MM_METHOD("acquire", mm_working_group_acquire, mm_working_group_acquire_doc),
    MM_METHOD("release", mm_working_group_release, mm_working_group_release_doc),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"nbytes", group_get_nbytes, NULL, "Its bytes on the device, in whole pages.", NULL},
    {"name", group_get_name, NULL, "Its name, or None.", NULL},
    {"access", group_get_access, NULL, "\"read\", \"write\" or \"scratch\".", NULL},
    {"set", group_get_set, NULL, "The WorkingSet that it belongs to.", NULL},
    {"is_resident", group_get_is_resident, NULL,
     "True while the set keeps all of it on the device; calls outside of the set do not\n"
     "change it. Driver: cuEventQuery.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef group_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(mm_working_group_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

/* clang-format off */
static PyType_Slot group_slots[] = {
    {Py_tp_doc, (void *)group_doc},
    {Py_tp_traverse, group_traverse},
    {Py_tp_clear, group_clear},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_repr, group_repr},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_getset},
    {Py_tp_members, group_members},
    {0, NULL},
};
/* clang-format on */

static PyType_Spec group_spec = {
    .name = "managedmem.WorkingGroup",
    .basicsize = sizeof(mm_working_group_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_slots,
};

int
mm_working_group_type_init(PyObject *module, mm_state *state)
{
    return mm_add_type(module, &group_spec, &state->working_group_type);
}
