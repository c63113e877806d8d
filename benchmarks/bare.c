/* bare.c: loops over bare driver calls, timed in C, the floor for every Python library, and calls
 * of Python functions, timed by the same code. bare.py builds and loads it, and opens the driver
 * of managedmem. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* The arguments of a loop, so that all loops have one signature. */
typedef struct {
    CUdeviceptr pointer;
    size_t size;
    CUstream stream;
    int device;
} target;

static void *driver;

static double
now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* Nanoseconds of one of `count` calls, or minus the error code of the first call that failed. */
#define TIMED_LOOP(name, symbol, prototype, ...)                                       \
    double name(const target *t, int count)                                            \
    {                                                                                  \
        prototype function = (prototype)dlsym(driver, symbol);                         \
        CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = t->device}; \
        CUmemLocation host = {.type = CU_MEM_LOCATION_TYPE_HOST};                      \
        int answer[8] = {0};                                                           \
        double start = now();                                                          \
                                                                                       \
        for (int i = 0; i < count; i++) {                                              \
            CUresult code = function(__VA_ARGS__);                                     \
            if (code != CUDA_SUCCESS) {                                                \
                return -(double)code;                                                  \
            }                                                                          \
        }                                                                              \
        (void)device, (void)host, (void)answer;                                        \
        return (now() - start) / count;                                                \
    }

TIMED_LOOP(bare_read_mostly, "cuMemRangeGetAttribute", PFN_cuMemRangeGetAttribute_v8000, answer, 4,
           CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, t->pointer, t->size)
TIMED_LOOP(bare_preferred_location, "cuMemRangeGetAttribute", PFN_cuMemRangeGetAttribute_v8000,
           answer, 4, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, t->pointer, t->size)
TIMED_LOOP(bare_accessed_by, "cuMemRangeGetAttribute", PFN_cuMemRangeGetAttribute_v8000, answer,
           32, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, t->pointer, t->size)
TIMED_LOOP(bare_set_read_mostly, "cuMemAdvise_v2", PFN_cuMemAdvise_v12020, t->pointer, t->size,
           CU_MEM_ADVISE_SET_READ_MOSTLY, device)
TIMED_LOOP(bare_set_preferred_location, "cuMemAdvise_v2", PFN_cuMemAdvise_v12020, t->pointer,
           t->size, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device)
TIMED_LOOP(bare_set_accessed_by, "cuMemAdvise_v2", PFN_cuMemAdvise_v12020, t->pointer, t->size,
           i % 2 ? CU_MEM_ADVISE_UNSET_ACCESSED_BY : CU_MEM_ADVISE_SET_ACCESSED_BY, host)
TIMED_LOOP(bare_prefetch, "cuMemPrefetchAsync_v2", PFN_cuMemPrefetchAsync_v12020, t->pointer,
           t->size, device, 0, t->stream)
TIMED_LOOP(bare_fill, "cuMemsetD8Async", PFN_cuMemsetD8Async_v3020, t->pointer, 1, t->size,
           t->stream)

/* The host function before a prefetch, as for defer=True. */
static void CUDA_CB
nothing(void *ignored)
{
    (void)ignored;
}

TIMED_LOOP(bare_host_function, "cuLaunchHostFunc", PFN_cuLaunchHostFunc_v10000, t->stream, nothing,
           NULL)

double
bare_allocate(const target *t, int count)
{
    PFN_cuMemAllocManaged_v6000 allocate =
        (PFN_cuMemAllocManaged_v6000)dlsym(driver, "cuMemAllocManaged");
    PFN_cuMemFree_v3020 release = (PFN_cuMemFree_v3020)dlsym(driver, "cuMemFree_v2");
    double start = now();

    for (int i = 0; i < count; i++) {
        CUdeviceptr pointer;
        CUresult code = allocate(&pointer, t->size, CU_MEM_ATTACH_GLOBAL);
        code = code == CUDA_SUCCESS ? release(pointer) : code;
        if (code != CUDA_SUCCESS) {
            return -(double)code;
        }
    }
    return (now() - start) / count;
}

/* --- several ranges --------------------------------------------------------------------- */

typedef struct {
    CUdeviceptr *pointers;
    size_t *sizes;
    size_t count;
    CUstream stream;
    int device; /* -1 is the host */
    int operation;
} sequence;

enum { PREFETCH, DISCARD, DISCARD_PREFETCH, ADVISE }; /* operations; ADVISE has no batch */
enum { LOOP, BATCH, ONE_CALL }; /* forms */

/* Found once, because dlsym takes as long as a query. */
static struct {
    PFN_cuMemPrefetchAsync_v12020 prefetch;
    PFN_cuMemAdvise_v12020 advise;
    PFN_cuMemPrefetchBatchAsync_v13000 prefetch_batch;
    PFN_cuMemDiscardBatchAsync_v13000 discard_batch;
    PFN_cuMemDiscardAndPrefetchBatchAsync_v13000 discard_prefetch_batch;
    PFN_cuStreamSynchronize_v2000 synchronize;
} call;

static void
load_functions(void)
{
    call.prefetch = (PFN_cuMemPrefetchAsync_v12020)dlsym(driver, "cuMemPrefetchAsync_v2");
    call.advise = (PFN_cuMemAdvise_v12020)dlsym(driver, "cuMemAdvise_v2");
    call.prefetch_batch =
        (PFN_cuMemPrefetchBatchAsync_v13000)dlsym(driver, "cuMemPrefetchBatchAsync");
    call.discard_batch =
        (PFN_cuMemDiscardBatchAsync_v13000)dlsym(driver, "cuMemDiscardBatchAsync");
    call.discard_prefetch_batch = (PFN_cuMemDiscardAndPrefetchBatchAsync_v13000)dlsym(
        driver, "cuMemDiscardAndPrefetchBatchAsync");
    call.synchronize = (PFN_cuStreamSynchronize_v2000)dlsym(driver, "cuStreamSynchronize");
}

int
bare_open(const char *path)
{
    driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (driver != NULL) {
        load_functions();
    }
    return driver != NULL;
}

static CUresult
call_batch(const sequence *s, size_t first, size_t count, CUmemLocation *location)
{
    CUdeviceptr *pointers = s->pointers + first;
    size_t *sizes = s->sizes + first, from = 0;

    if (s->operation == ADVISE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (s->operation == DISCARD) {
        return call.discard_batch(pointers, sizes, count, 0, s->stream);
    }
    return (s->operation == PREFETCH ? call.prefetch_batch : call.discard_prefetch_batch)(
        pointers, sizes, count, location, &from, 1, 0, s->stream);
}

static CUresult
call_one(const sequence *s, size_t i, CUmemLocation *location)
{
    if (s->operation == PREFETCH) {
        return call.prefetch(s->pointers[i], s->sizes[i], *location, 0, s->stream);
    }
    if (s->operation == ADVISE) {
        return call.advise(s->pointers[i], s->sizes[i], CU_MEM_ADVISE_SET_PREFERRED_LOCATION,
                           *location);
    }
    return call_batch(s, i, 1, location);
}

static CUresult
call_form(const sequence *s, int form, CUmemLocation *location)
{
    size_t last = s->count - 1;
    size_t all = s->pointers[last] + s->sizes[last] - s->pointers[0];
    CUresult code = CUDA_SUCCESS;

    if (form == BATCH) {
        return call_batch(s, 0, s->count, location);
    }
    if (form == ONE_CALL) {
        sequence whole = *s;
        whole.sizes = &all;
        whole.count = 1;
        return call_form(&whole, LOOP, location);
    }
    for (size_t i = 0; i < s->count && code == CUDA_SUCCESS; i++) {
        code = call_one(s, i, location);
    }
    return code;
}

/* Waits for the stream: nanoseconds since `start`, or minus the error code. */
static double
until_done(CUresult code, CUstream stream, double start)
{
    code = code == CUDA_SUCCESS ? call.synchronize(stream) : code;
    return code == CUDA_SUCCESS ? now() - start : -(double)code;
}

/* Nanoseconds of one operation on all ranges, until the stream has done it. */
double
bare_sequence(const sequence *s, int form)
{
    CUmemLocation location = {.type = s->device < 0 ? CU_MEM_LOCATION_TYPE_HOST
                                                    : CU_MEM_LOCATION_TYPE_DEVICE,
                              .id = s->device < 0 ? 0 : s->device};
    double start = now();

    return until_done(call_form(s, form, &location), s->stream, start);
}

/* The same for one call of a Python function; `names` are those of the last arguments. Needs the
 * GIL. -1 with an exception set if the function raised. */
double
bare_call(PyObject *function, PyObject *arguments, PyObject *names, CUstream stream)
{
    PyObject *items[8];
    Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    Py_ssize_t named = PyTuple_GET_SIZE(names);
    double start;
    PyObject *answer;

    if (count > (Py_ssize_t)(sizeof items / sizeof *items)) {
        PyErr_SetString(PyExc_ValueError, "too many arguments");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        items[i] = PyTuple_GET_ITEM(arguments, i);
    }
    start = now();
    answer = PyObject_Vectorcall(function, items, (size_t)(count - named), named ? names : NULL);
    if (answer == NULL) {
        return -1;
    }
    Py_DECREF(answer);
    return until_done(CUDA_SUCCESS, stream, start);
}

/* --- the page map ----------------------------------------------------------------------- */

/* The argument of PAGEMAP_SCAN, from linux/fs.h, which older systems lack. */
typedef struct {
    uint64_t size, flags, start, end, walk_end, regions, region_count, max_pages;
    uint64_t inverted, mask, any_mask, return_mask;
} scan_argument;

enum { WORDS = 4096, PRESENT = 1 << 3 };

static int
scan_page_map(int file, uint64_t start, uint64_t end, uint64_t *on_host)
{
    static uint64_t regions[512][3];
    scan_argument scan = {sizeof scan, 0, start, end,     0, (uint64_t)(uintptr_t)regions,
                          512,         0, 0,     PRESENT, 0, PRESENT};

    for (; scan.start < end; scan.start = scan.walk_end) {
        int count = ioctl(file, _IOWR('f', 16, scan_argument), &scan);
        if (count < 0) {
            return -1;
        }
        for (int i = 0; i < count; i++) {
            *on_host += regions[i][1] - regions[i][0];
        }
    }
    return 0;
}

static int
read_page_map(int file, uint64_t start, uint64_t end, uint64_t *on_host)
{
    static uint64_t entries[WORDS];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    while (start < end) {
        uint64_t count = (end - start) / page;
        count = count < WORDS ? count : WORDS;
        if (pread(file, entries, count * 8, (off_t)(start / page * 8)) != (ssize_t)(count * 8)) {
            return -1;
        }
        for (uint64_t i = 0; i < count; i++) {
            *on_host += entries[i] >> 63 ? page : 0;
        }
        start += count * page;
    }
    return 0;
}

/* Counts the bytes of whole pages that the host has mapped. Returns nanoseconds, or minus errno. */
double
bare_page_map(uint64_t start, size_t size, int scan, uint64_t *on_host)
{
    double begin = now();
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), failed;

    *on_host = 0;
    failed =
        file < 0 || (scan ? scan_page_map : read_page_map)(file, start, start + size, on_host) < 0;
    if (failed) {
        return -(double)errno;
    }
    close(file);
    return now() - begin;
}
