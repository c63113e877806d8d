/* driver.c: opens libcuda (or the emulated driver) and resolves the function table.
 *
 * Owns the process-wide state of the driver: the selected name, the log of tried libraries, and
 * the published table. One thread at a time has the turn to change them. fork() does not wait
 * for the turn, because the library being opened may fork itself. A child that was forked while
 * its parent opened a driver cannot use one. */
#include "driver.h"

#include "clock.h"

#include <assert.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Not a mutex, which a forked child could not unlock if a thread of its parent holds it. */
enum { FREE, TAKEN, OPENING };
static atomic_int turn;
static char names[2][PATH_MAX]; /* the selected name, and space for the next one */
static _Atomic(const char *) selected;
static char tried[2048];
static char opened_path[PATH_MAX];
static mm_driver table;
static _Atomic(mm_driver *) published;
atomic_size_t mm_least_device_memory = SIZE_MAX;
static atomic_bool forked; /* the parent had opened the driver, or was opening it: unusable here */

typedef struct {
    const char *name;
    int version;
    bool required;
    size_t offset;
} entry_point;

static const entry_point entry_points[] = {
#define MM_ROW(name, version, required) {"cu" #name, version, required, offsetof(mm_driver, name)},
#define MM_ROW_REQUIRED(name, version) MM_ROW(name, version, true)
#define MM_ROW_OPTIONAL(name, version) MM_ROW(name, version, false)
    MM_REQUIRED_FUNCTIONS(MM_ROW_REQUIRED) MM_OPTIONAL_FUNCTIONS(MM_ROW_OPTIONAL)};

static void
note_tried(const char *path, const char *reason)
{
    size_t used = strlen(tried);

    assert(atomic_load(&turn) != FREE && used < sizeof tried);
    (void)snprintf(tried + used, sizeof tried - used, "%s%.400s: %.400s", used ? "\n" : "", path,
                   reason);
}

/* The emulated driver is beside this library, which dladdr finds. */
static int
emulator_path(char *path, size_t size)
{
    Dl_info info;
    const char *slash;

    if (dladdr(&published, &info) == 0 || info.dli_fname == NULL) {
        return -1;
    }
    slash = strrchr(info.dli_fname, '/');
    return snprintf(path, size, "%.*s%s", slash ? (int)(slash - info.dli_fname + 1) : 0,
                    info.dli_fname, "libmanagedmem_emulator.so")
                   < (int)size
               ? 0
               : -1;
}

/* Copies the path of the library that a name selects: "cuda", "emulator", or a path. */
static int
library_path(const char *name, char *path, size_t size, mm_status *st)
{
    if (strcmp(name, "cuda") == 0) {
        /* The runtime name: the unversioned one exists only where a toolkit is installed. */
        name = "libcuda.so.1";
    } else if (strcmp(name, "emulator") == 0) {
        return emulator_path(path, size) == 0
                   ? 0
                   : mm_fail(st, MM_NO_DRIVER, "cannot find the emulated driver of this package");
    } else if (strchr(name, '/') == NULL) {
        return mm_fail(st, MM_BAD_VALUE,
                       "MANAGEDMEM_DRIVER must be \"cuda\", \"emulator\" or a path with a slash, "
                       "got \"%s\"",
                       name);
    }
    if (snprintf(path, size, "%s", name) >= (int)size) {
        return mm_fail(st, MM_BAD_VALUE, "the driver's path is longer than %zu bytes", size);
    }
    return 0;
}

/* Object and function pointers need not be convertible in ISO C, so the bytes are copied. */
static void
store_pointer(void *out, void *pointer)
{
    memcpy(out, &pointer, sizeof pointer);
}

static int
fail_no_driver(mm_status *st, const char *path, const char *reason)
{
    note_tried(path, reason);
    return mm_fail(st, MM_NO_DRIVER,
                   "no usable CUDA driver. Tried:\n%s\nOn a machine without a GPU, "
                   "managedmem.emulator.enable() or MANAGEDMEM_DRIVER=emulator gives an emulated "
                   "driver.",
                   tried);
}

static int
fail_too_old(mm_status *st, const char *path, int version)
{
    char reason[96];

    (void)snprintf(reason, sizeof reason, "CUDA %d.%d, older than 12.2", version / 1000,
                   version % 1000 / 10);
    note_tried(path, reason);
    return mm_fail(st, MM_DRIVER_TOO_OLD,
                   "the CUDA driver is too old: %s supports CUDA %d.%d, managedmem needs 12.2 or "
                   "newer. Update the NVIDIA driver (535 or newer).",
                   path, version / 1000, version % 1000 / 10);
}

/* CUDA 13.0 added the batch calls together. A driver that lacks one of them counts as older. */
static void
unset_partial_batches(mm_driver *t)
{
    if (t->MemPrefetchBatchAsync == NULL || t->MemDiscardBatchAsync == NULL
        || t->MemDiscardAndPrefetchBatchAsync == NULL) {
        t->MemPrefetchBatchAsync = NULL;
        t->MemDiscardBatchAsync = NULL;
        t->MemDiscardAndPrefetchBatchAsync = NULL;
    }
}

/* Fills the table's pointers. Presets the outputs, because a driver does not write them for a
 * version above its own. */
static int
resolve_entry_points(mm_driver *t, PFN_cuGetProcAddress_v12000 get, const char *path,
                     mm_status *st)
{
    for (size_t i = 0; i < sizeof entry_points / sizeof *entry_points; i++) {
        const entry_point *e = &entry_points[i];
        CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        void *pointer = NULL;
        CUresult code =
            get(e->name, &pointer, e->version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found);

        if (code != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS) {
            pointer = NULL;
        }
        if (pointer == NULL && e->required) {
            char reason[96];
            (void)snprintf(reason, sizeof reason, "has no %s of version %d", e->name, e->version);
            return fail_no_driver(st, path, reason);
        }
        store_pointer((char *)t + e->offset, pointer);
    }
    unset_partial_batches(t);
    return 0;
}

static int
fail_first_call(mm_driver *t, const char *path, const char *function, CUresult code, mm_status *st)
{
    const char *name = NULL;
    char reason[160];

    assert(code != CUDA_SUCCESS);
    MM_IGNORE(t->GetErrorName(code, &name)); /* the name then stays NULL */
    (void)snprintf(reason, sizeof reason, "opened, but %s failed with %s (%d)", function,
                   name ? name : "?", (int)code);
    return fail_no_driver(st, path, reason);
}

static CUresult
query_access(mm_driver *t)
{
    t->concurrent_access = true;
    t->direct_host_access = false;
    for (int i = 0; i < t->device_count; i++) {
        int concurrent = 0, direct = 0;
        CUresult code =
            t->DeviceGetAttribute(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, i);
        if (code == CUDA_SUCCESS) {
            code = t->DeviceGetAttribute(
                &direct, CU_DEVICE_ATTRIBUTE_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, i);
        }
        if (code != CUDA_SUCCESS) {
            return code;
        }
        t->concurrent_access = t->concurrent_access && concurrent;
        t->direct_host_access = t->direct_host_access || direct;
    }
    return CUDA_SUCCESS;
}

static CUresult
query_memory(mm_driver *t)
{
    size_t least = SIZE_MAX;

    for (int i = 0; i < t->device_count; i++) {
        CUresult code = t->DeviceTotalMem(&t->memory[i], i);
        if (code != CUDA_SUCCESS) {
            return code;
        }
        t->all_memory += t->memory[i];
        least = t->memory[i] < least ? t->memory[i] : least;
    }
    atomic_store(&mm_least_device_memory, least);
    return CUDA_SUCCESS;
}

static int
count_devices(mm_driver *t, const char *path, mm_status *st)
{
    char reason[160];
    CUresult code = t->Init(0);

    if (code != CUDA_SUCCESS) {
        return fail_first_call(t, path, "cuInit", code, st);
    }
    code = t->DeviceGetCount(&t->device_count);
    if (code != CUDA_SUCCESS) {
        return fail_first_call(t, path, "cuDeviceGetCount", code, st);
    }
    if (t->device_count < 1 || t->device_count > MM_MAX_DEVICES) {
        (void)snprintf(reason, sizeof reason, "opened, but has %d devices; 1 to %d can be used",
                       t->device_count, MM_MAX_DEVICES);
        return fail_no_driver(st, path, reason);
    }
    code = query_access(t);
    if (code != CUDA_SUCCESS) {
        return fail_first_call(t, path, "cuDeviceGetAttribute", code, st);
    }
    code = query_memory(t);
    return code == CUDA_SUCCESS ? 0 : fail_first_call(t, path, "cuDeviceTotalMem", code, st);
}

/* The emulated driver describes a wrong configuration; cuInit returns only a code. */
static int
check_emulator(void *library, const char *path, mm_status *st)
{
    void *symbol = dlsym(library, "emu_config_error");
    const char *(*config_error)(void);

    if (symbol == NULL) {
        return 0;
    }
    store_pointer(&config_error, symbol);
    if (config_error()[0] == '\0') {
        return 0;
    }
    note_tried(path, config_error());
    return mm_fail(st, MM_NO_DRIVER, "the emulated driver has a wrong configuration. %s",
                   config_error());
}

static void
acquire_turn(int purpose)
{
    assert(purpose != FREE);
    for (int seen = FREE; !atomic_compare_exchange_strong(&turn, &seen, purpose); seen = FREE) {
        mm_nap();
    }
}

static void
release_turn(void)
{
    atomic_store(&turn, FREE);
}

/* The thread that had the turn does not exist in the child. */
static void
after_fork_in_child(void)
{
    if (atomic_load(&published) != NULL || atomic_load(&turn) == OPENING) {
        atomic_store(&forked, true);
    }
    release_turn();
}

/* Runs when this library is loaded, before any thread can acquire the turn. */
__attribute__((constructor)) static void
register_fork_handler(void)
{
    (void)pthread_atfork(NULL, NULL, after_fork_in_child);
}

static int
read_version(mm_driver *t, void *library, mm_status *st)
{
    void *symbol = dlsym(library, "cuDriverGetVersion");
    int (*get_version)(int *), rc;
    char reason[96];

    if (symbol == NULL) {
        return fail_no_driver(st, opened_path,
                              "is not a CUDA driver: it has no cuDriverGetVersion");
    }
    store_pointer(&get_version, symbol);
    rc = get_version(&t->version);
    if (rc != 0) {
        (void)snprintf(reason, sizeof reason, "opened, but cuDriverGetVersion failed with %d", rc);
        return fail_no_driver(st, opened_path, reason);
    }
    return t->version < MM_DRIVER_FLOOR ? fail_too_old(st, opened_path, t->version) : 0;
}

static int
open_library(mm_driver *t, mm_status *st)
{
    const char *chosen = atomic_load(&selected);
    const char *name = chosen ? chosen : secure_getenv("MANAGEDMEM_DRIVER");
    PFN_cuGetProcAddress_v12000 get;
    void *library, *symbol;

    assert(atomic_load(&turn) == OPENING);
    if (library_path(name && *name ? name : "cuda", opened_path, sizeof opened_path, st) < 0) {
        return -1;
    }
    library = dlopen(opened_path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        return fail_no_driver(st, opened_path, error ? error : "cannot be opened");
    }
    if (read_version(t, library, st) < 0) {
        return -1;
    }
    symbol = dlsym(library, "cuGetProcAddress_v2");
    if (symbol == NULL) {
        return fail_no_driver(st, opened_path, "has no cuGetProcAddress_v2");
    }
    store_pointer(&get, symbol);
    if (check_emulator(library, opened_path, st) < 0
        || resolve_entry_points(t, get, opened_path, st) < 0
        || count_devices(t, opened_path, st) < 0) {
        return -1;
    }
    t->emulated = dlsym(library, "emu_log_count") != NULL;
    t->path = opened_path;
    t->library = library;
    note_tried(opened_path, "opened");
    return 0;
}

static int
fail_forked(mm_status *st)
{
    return mm_fail(st, MM_FORKED,
                   "this process was forked after the CUDA driver was opened: CUDA and managed "
                   "memory cannot be used after fork(). Start workers with the \"spawn\" method, "
                   "or fork before the first use.");
}

mm_driver *
mm_driver_open(mm_status *st)
{
    mm_driver *t = atomic_load_explicit(&published, memory_order_acquire);

    if (atomic_load_explicit(&forked, memory_order_relaxed)) {
        (void)fail_forked(st);
        return NULL;
    }
    if (t != NULL) {
        return t;
    }
    acquire_turn(OPENING);
    t = atomic_load(&published);
    if (t == NULL) {
        memset(&table, 0, sizeof table);
        tried[0] = '\0';
        if (open_library(&table, st) == 0) {
            t = &table;
            assert(t->device_count > 0 && t->version >= MM_DRIVER_FLOOR);
            atomic_store(&published, t);
        }
    }
    release_turn();
    return t;
}

int
mm_driver_select(const char *name, mm_status *st)
{
    char path[PATH_MAX];
    int rc = library_path(name, path, sizeof path, st);

    if (rc < 0) {
        return rc;
    }
    acquire_turn(TAKEN);
    if (atomic_load(&published) != NULL) {
        rc = mm_fail(st, MM_REFUSED,
                     "the driver %s is already open; a driver must be chosen before the first use",
                     table.path);
    } else {
        char *other = names[atomic_load(&selected) == names[0]];
        (void)snprintf(other, sizeof names[0], "%s", name);
        atomic_store(&selected, other);
    }
    release_turn();
    return rc;
}

mm_driver *
mm_driver_peek(void)
{
    return atomic_load_explicit(&published, memory_order_acquire);
}

mm_driver *
mm_driver_usable(void)
{
    return atomic_load_explicit(&forked, memory_order_relaxed) ? NULL : mm_driver_peek();
}

void
mm_driver_tried(char *text, unsigned long size)
{
    acquire_turn(TAKEN);
    (void)snprintf(text, size, "%s", tried);
    release_turn();
}

bool
mm_driver_forked(void)
{
    return atomic_load_explicit(&forked, memory_order_relaxed);
}

int
mm_driver_lacks(const mm_driver *cu, const char *feature, mm_status *st)
{
    return mm_fail(st, MM_UNSUPPORTED,
                   "%s needs a driver with CUDA 13.0 or newer (580 or newer); this one supports "
                   "CUDA %d.%d",
                   feature, cu->version / 1000, cu->version % 1000 / 10);
}
