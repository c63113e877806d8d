/* result_object.c: the object behind an array of numpy(copy=True), and the functions behind
 * managedmem.result_cache. */
#include "result_object.h"

#include <string.h>

#include "module_functions.h"

typedef struct {
    PyObject_HEAD
    mm_result_block *block; /* NULL until mm_result_set */
    size_t size;
    const mm_dtype *dtype;
    int dimensions;
    Py_ssize_t shape[MM_MAX_DIMENSIONS];
    Py_ssize_t strides[MM_MAX_DIMENSIONS];
} result_object;

PyObject *
mm_result_new(const mm_buffer *b)
{
    PyObject *op = mm_alloc_object(b->state->result_type);
    result_object *self = (result_object *)op;

    if (op == NULL) {
        return NULL;
    }
    self->size = b->size;
    self->dtype = b->dtype;
    self->dimensions = b->dimensions;
    memcpy(self->shape, b->shape, sizeof self->shape);
    memcpy(self->strides, b->strides, sizeof self->strides);
    return op;
}

void
mm_result_set(PyObject *result, mm_result_block *block)
{
    assert(((result_object *)result)->block == NULL);
    ((result_object *)result)->block = block;
}

/* Ignores the flags, because NumPy and memoryview, which make the array, accept all fields. */
static int
result_getbuffer(PyObject *op, Py_buffer *view, int Py_UNUSED(flags))
{
    result_object *self = (result_object *)op;

    if (self->block == NULL) { /* found by gc.get_objects() while its memory is made */
        view->obj = NULL;
        return MM_ERROR(PyExc_BufferError, "the memory of this object is not allocated yet");
    }
    *view = (Py_buffer){
        .buf = self->block->bytes,
        .obj = Py_NewRef(op),
        .len = (Py_ssize_t)self->size,
        .itemsize = self->dtype->itemsize,
        .ndim = self->dimensions,
        .format = (char *)(uintptr_t)self->dtype->format,
        .shape = self->dimensions > 0 ? self->shape : NULL,
        .strides = self->dimensions > 0 ? self->strides : NULL,
    };
    return 0;
}

/* May run in a garbage collection: makes no driver call. */
static void
result_dealloc(PyObject *op)
{
    result_object *self = (result_object *)op;

    PyObject_GC_UnTrack(op);
    if (self->block != NULL) {
        mm_result_release(self->block);
    }
    mm_free_object(op);
}

static PyType_Slot result_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t)"Host memory that returns to managedmem.result_cache."},
    {Py_tp_dealloc, result_dealloc},
    {Py_tp_traverse, mm_traverse_type},
    {Py_bf_getbuffer, result_getbuffer},
    {0, NULL},
};

static PyType_Spec result_spec = {
    .name = "managedmem._managedmem.ResultMemory",
    .basicsize = sizeof(result_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = result_slots,
};

/* The type is not in the module: only arrays refer to its objects. */
int
mm_result_init(PyObject *module, mm_state *state)
{
    state->result_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &result_spec, NULL);
    return state->result_type ? 0 : -1;
}

/* --- managedmem.result_cache ------------------------------------------------------------------ */

const char mm_results_usage_doc[] =
    "_results_usage()\n--\n\n"
    "The limit of page-locked results, the bytes of all such results, and those of idle ones.";

PyObject *
mm_results_usage(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    mm_result_usage usage = mm_result_blocks_usage();

    return Py_BuildValue("(KKK)", (unsigned long long)usage.limit, (unsigned long long)usage.held,
                         (unsigned long long)usage.idle);
}

static PyObject *
trim(size_t keep)
{
    Py_BEGIN_ALLOW_THREADS
    mm_result_blocks_trim(keep);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

const char mm_results_limit_doc[] = "_results_limit(limit, /)\n--\n\n"
                                    "Set the limit in bytes, and free idle blocks beyond it.";

PyObject *
mm_results_limit(PyObject *Py_UNUSED(module), PyObject *limit)
{
    size_t bytes;

    if (mm_read_size(limit, "max_nbytes", &bytes) < 0) {
        return NULL;
    }
    mm_result_blocks_set_limit(bytes);
    return trim(bytes);
}

const char mm_results_trim_doc[] = "_results_trim(keep, /)\n--\n\n"
                                   "Free idle blocks until at most `keep` bytes are idle.";

PyObject *
mm_results_trim(PyObject *Py_UNUSED(module), PyObject *keep)
{
    size_t bytes;

    return mm_read_size(keep, "keep", &bytes) < 0 ? NULL : trim(bytes);
}
