/* numpy_allocator.c: the memory of NumPy's arrays inside numpy_allocator(): a handler of NumPy
 * (NEP 49), and the functions that make one and set it.
 *
 * NumPy is found at run time, so that neither the build nor the import needs it. NumPy keeps the
 * handler in a context variable, and each array keeps the handler's capsule, so that the handler
 * lives as long as its blocks. The functions of a handler may be called at any time, in any thread,
 * attached or not. */
#include <stdlib.h>
#include <string.h>

#include "../memory/allocator.h"

#include "interpreter.h"
#include "module_functions.h"
#include "policy_object.h"
#include "resource.h"

/* --- the interface of NumPy ------------------------------------------------------------- */

#define CAPSULE_NAME "mem_handler"

/* Indices in the table of NumPy's C API, and the version of the table from NumPy 1.22 on. */
enum { GET_VERSION = 211, SET_HANDLER = 304, VERSION_OF_HANDLERS = 15 };

typedef unsigned int (*get_version_function)(void);
typedef PyObject *(*set_handler_function)(PyObject *);

/* PyDataMem_Handler, version 1. */
typedef struct {
    char name[127];
    uint8_t version;
    void *context;
    void *(*allocate)(void *context, size_t size);
    void *(*allocate_zeroed)(void *context, size_t count, size_t size);
    void *(*reallocate)(void *context, void *block, size_t size);
    void (*release)(void *context, void *block, size_t size);
} numpy_handler;

typedef struct {
    numpy_handler interface;
    mm_preset preset;
    size_t minimum; /* bytes; smaller arrays have system memory */
} handler;

/* --- blocks of system memory ---------------------------------------------------------------- */

/* A block of managed memory starts at a page border, and a block of system memory never does. Sizes
 * cannot tell them apart: NumPy may free a block with another size than it was allocated with. */
static bool
is_managed_block(const void *block)
{
    return (uintptr_t)block % mm_page_size() == 0;
}

/* Lies in front of a block of system memory. */
typedef struct {
    void *allocation;
    size_t size;
} block_header;

/* malloc aligns to 16 bytes. */
_Static_assert(sizeof(block_header) == 16, "a header keeps the alignment");

static block_header *
header_of(void *block)
{
    assert(!is_managed_block(block));
    return (block_header *)block - 1;
}

static void *
make_system_block(size_t size, bool zeroed)
{
    size_t whole = size + 2 * sizeof(block_header);
    block_header *header;

    if (whole < size) {
        return NULL; /* unreached: NumPy's sizes are signed */
    }
    header = zeroed ? calloc(1, whole) : malloc(whole);
    if (header == NULL) {
        return NULL;
    }
    *header = (block_header){header, size};
    if (is_managed_block(header + 1)) {
        header[1] = *header;
        header++;
    }
    return header + 1;
}

/* --- the functions of a handler ------------------------------------------------------------- */

typedef struct {
    const handler *handler;
    size_t size;
    bool zeroed;
    void *block; /* the result */
} allocation;

static void
make_managed_block(void *argument)
{
    allocation *a = argument;

    a->block = mm_preset_allocate(&a->handler->preset, a->size, "NumPy");
    if (a->block != NULL && a->zeroed) {
        memset(a->block, 0, a->size);
    }
}

/* A forked child cannot use the driver, so all of its arrays have system memory. */
static bool
is_for_system(const handler *h, size_t size)
{
    return size < h->minimum || mm_driver_forked();
}

static void *
make_block(void *context, size_t size, bool zeroed)
{
    allocation a = {.handler = context, .size = size ? size : 1, .zeroed = zeroed};

    if (is_for_system(a.handler, a.size)) {
        return make_system_block(a.size, zeroed);
    }
    mm_run_here(make_managed_block, &a);
    return a.block;
}

static void *
handler_allocate(void *context, size_t size)
{
    return make_block(context, size, false);
}

static void *
handler_allocate_zeroed(void *context, size_t count, size_t size)
{
    return size != 0 && count > SIZE_MAX / size ? NULL : make_block(context, count * size, true);
}

static void
free_managed(void *block)
{
    managedmem_free(block, 0, 0, NULL);
}

static void
handler_release(void *Py_UNUSED(context), void *block, size_t Py_UNUSED(size))
{
    if (block == NULL) {
        return;
    }
    if (is_managed_block(block)) {
        mm_run_detached(free_managed, block);
    } else {
        free(header_of(block)->allocation);
    }
}

/* ndarray.resize() has checked that no other object uses the memory. This must hold until resize()
 * has the new block, so the thread stays attached. A managed block is freed in another thread,
 * because the driver may wait for work that needs the GIL. */
static void *
handler_reallocate(void *context, void *block, size_t size)
{
    allocation a = {.handler = context, .size = size ? size : 1};
    bool managed = block != NULL && is_managed_block(block);
    size_t present;

    if (block == NULL) {
        return handler_allocate(context, size);
    }
    present = managed ? mm_block_size(block) : header_of(block)->size;
    if (present == 0 || (managed && size <= present && size >= present / 2)) {
        return present == 0 ? NULL : block;
    }
    if (is_for_system(a.handler, a.size)) {
        a.block = make_system_block(a.size, false);
    } else {
        make_managed_block(&a);
    }
    if (a.block != NULL) {
        memcpy(a.block, block, present < a.size ? present : a.size);
        if (managed) {
            mm_run_elsewhere(free_managed, block);
        } else {
            free(header_of(block)->allocation);
        }
    }
    return a.block;
}

/* --- making and setting a handler ------------------------------------------------------- */

static void
free_handler(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, CAPSULE_NAME));
}

static PyObject *
new_handler(const mm_preset *preset, size_t minimum)
{
    handler *h = malloc(sizeof *h);
    PyObject *capsule;

    if (h == NULL) {
        return PyErr_NoMemory();
    }
    *h = (handler){
        .interface = {.name = "managedmem",
                      .version = 1,
                      .context = h,
                      .allocate = handler_allocate,
                      .allocate_zeroed = handler_allocate_zeroed,
                      .reallocate = handler_reallocate,
                      .release = handler_release},
        .preset = *preset,
        .minimum = minimum,
    };
    capsule = PyCapsule_New(h, CAPSULE_NAME, free_handler);
    if (capsule == NULL) {
        free(h);
    }
    return capsule;
}

const char mm_numpy_handler_doc[] =
    "_numpy_handler(policy, minimum)\n--\n\n"
    "A capsule for _set_numpy_handler(): arrays of `minimum` bytes or more have managed memory.\n"
    "\n"
    "A page is allocated and advised as a trial. Raises TypeError and ValueError for bad arguments,\n"
    "CUDAError for advice that the driver refuses.";

PyObject *
mm_numpy_handler(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { POLICY, MINIMUM, ARGC };
    static mm_signature signature = {.doc = mm_numpy_handler_doc};
    mm_state *state = mm_module_state(module);
    const mm_policy *policy;
    mm_preset preset = {0};
    PyObject *argv[ARGC];
    size_t minimum;
    mm_driver *cu;
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || mm_read_policy(state, argv[POLICY], &policy) < 0
        || mm_read_size(argv[MINIMUM], "minimum", &minimum) < 0 || (cu = mm_open(state)) == NULL
        || mm_check_access(cu) < 0) {
        return NULL;
    }
    if (policy != NULL) {
        preset = (mm_preset){.preferred = policy->preferred,
                             .accessed_by = policy->accessed_by,
                             .read_mostly = policy->read_mostly};
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_preset_try(cu, &preset, &st);
    Py_END_ALLOW_THREADS
    return mm_raise_failure(state, rc, &st) < 0 ? NULL : new_handler(&preset, minimum);
}

/* The capsule with the table of NumPy's C API. */
static PyObject *
import_table(void)
{
    PyObject *core = PyImport_ImportModule("numpy._core._multiarray_umath"), *table;

    if (core == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_Clear();
        core = PyImport_ImportModule("numpy.core._multiarray_umath"); /* NumPy 1 */
    }
    table = core ? PyObject_GetAttrString(core, "_ARRAY_API") : NULL;
    Py_XDECREF(core);
    return table;
}

const char mm_set_numpy_handler_doc[] =
    "_set_numpy_handler(handler, /)\n--\n\n"
    "Set NumPy's handler in the current context, and return the previous one.";

PyObject *
mm_set_numpy_handler(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    PyObject *table = import_table();
    void **entries = table ? PyCapsule_GetPointer(table, NULL) : NULL;
    set_handler_function set_handler;
    get_version_function get_version;

    Py_XDECREF(table); /* NumPy's module keeps it */
    if (entries == NULL) {
        return NULL;
    }
    memcpy(&get_version, &entries[GET_VERSION], sizeof get_version);
    if (get_version() < VERSION_OF_HANDLERS) {
        PyErr_SetString(PyExc_ImportError,
                        "numpy_allocator() needs NumPy 1.22 or newer: pip install -U numpy");
        return NULL;
    }
    memcpy(&set_handler, &entries[SET_HANDLER], sizeof set_handler);
    return set_handler(capsule);
}
