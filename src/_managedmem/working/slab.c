/* slab.c: allocating memory of devices and page-locked memory of the host, and freeing it. */
#include "slab.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "../memory/allocation.h"
#include "../memory/range.h"
#include "../memory/stream.h"

/* --- life --------------------------------------------------------------------------------- */

static pthread_mutex_t slabs_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_slab *host_slabs;

static void
list_slab(mm_slab *slab)
{
    (void)pthread_mutex_lock(&slabs_mutex);
    slab->next = host_slabs;
    host_slabs = slab;
    (void)pthread_mutex_unlock(&slabs_mutex);
}

static void
unlist_slab(const mm_slab *slab)
{
    mm_slab **link = &host_slabs;

    (void)pthread_mutex_lock(&slabs_mutex);
    while (*link != NULL && *link != slab) {
        link = &(*link)->next;
    }
    *link = *link != NULL ? slab->next : NULL;
    (void)pthread_mutex_unlock(&slabs_mutex);
}

/* False for a slab without a holder, which is about to be freed. */
static bool
add_holder(mm_slab *slab)
{
    size_t holders = atomic_load(&slab->holders);

    while (holders > 0 && !atomic_compare_exchange_weak(&slab->holders, &holders, holders + 1)) {
    }
    return holders > 0;
}

mm_slab *
mm_slab_hold(CUdeviceptr start, size_t bytes)
{
    mm_slab *slab;

    (void)pthread_mutex_lock(&slabs_mutex);
    slab = host_slabs;
    while (slab != NULL
           && (start < slab->start || start - slab->start > slab->size
               || bytes > slab->size - (start - slab->start) || !add_holder(slab))) {
        slab = slab->next;
    }
    (void)pthread_mutex_unlock(&slabs_mutex);
    return slab;
}

static mm_slab *
new_slab(int device, size_t size, mm_status *st)
{
    mm_slab *slab = calloc(1, sizeof *slab);

    if (slab == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory");
        return NULL;
    }
    slab->device = device;
    slab->size = size;
    atomic_init(&slab->holders, 1);
    return slab;
}

static int
allocate_on_device(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    CUresult code;

    MM_CALL_IN(code, mm_scope_enter_relaxed, slab->device, cu, MemAlloc, st, &slab->start,
               slab->size);
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemAlloc", (int)code);
        mm_status_add(st, "%zu bytes of Device(%d) were requested", slab->size, slab->device);
        return -1;
    }
    return 0;
}

mm_slab *
mm_slab_on_device(mm_driver *cu, int device, size_t size, bool can_suspend, mm_status *st)
{
    mm_slab *slab = new_slab(device, size, st);
    int rc;

    mm_deferred_frees_attempt(cu, &(mm_free_conditions){0});
    if (slab == NULL) {
        return NULL;
    }
    rc = can_suspend ? mm_slab_map(cu, slab, st) : allocate_on_device(cu, slab, st);
    if (rc < 0) {
        free(slab);
        return NULL;
    }
    return slab;
}

/* Maps private memory, or that of a file if `file` is not negative, and makes it a slab. */
static mm_slab *
map_slab(int device, size_t size, int file, mm_status *st)
{
    const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    mm_slab *slab = new_slab(device, mm_whole_pages(size), st);
    void *start;

    if (slab == NULL) {
        return NULL;
    }
    start = mmap(NULL, slab->size, PROT_READ | PROT_WRITE, flags, file, 0);
    if (start == MAP_FAILED) {
        (void)mm_fail(st, errno == ENOMEM ? MM_NO_MEMORY : MM_BAD_VALUE,
                      "the system did not give %zu bytes of memory: %s", slab->size,
                      strerror(errno));
        free(slab);
        return NULL;
    }
    /* Hints: a system without huge pages has small ones. */
    (void)madvise(start, slab->size, MADV_HUGEPAGE);
    (void)madvise(start, slab->size, MADV_DONTFORK);
    slab->start = (CUdeviceptr)(uintptr_t)start;
    slab->on_host = true;
    slab->is_shared = file >= 0;
    slab->is_listed = true;
    list_slab(slab);
    return slab;
}

mm_slab *
mm_slab_on_host(int device, size_t size, mm_status *st)
{
    return map_slab(device, size, -1, st);
}

mm_slab *
mm_slab_of_file(int device, int file, mm_status *st)
{
    const int seals = fcntl(file, F_GET_SEALS);
    struct stat facts;

    /* A read behind the end of a shrunk file would be SIGBUS. Files on disks have no seals. */
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(file, &facts) < 0
        || facts.st_size <= 0) {
        (void)mm_fail(st, MM_BAD_VALUE,
                      "file descriptor %d is not memory that can be shared: it must come from "
                      "memfd_create, not be empty, and be sealed with F_SEAL_SHRINK",
                      file);
        return NULL;
    }
    return map_slab(device, (size_t)facts.st_size, file, st);
}

/* A failed call may have locked the memory nevertheless. Memory that stays locked is unlocked when
 * it is freed. */
static CUresult
lock_or_undo(mm_driver *cu, mm_slab *slab)
{
    const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    void *start = (void *)(uintptr_t)slab->start;
    CUresult code = cu->MemHostRegister(start, slab->size, flags), undone;

    slab->locked = true;
    if (code != CUDA_SUCCESS) {
        undone = cu->MemHostUnregister(start);
        slab->locked = undone != CUDA_SUCCESS && undone != CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    return code;
}

int
mm_slab_lock(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    CUresult code;

    if (slab->locked) {
        return 0;
    }
    MM_RUN_IN(code, mm_scope_enter_relaxed, slab->device, cu, st, lock_or_undo(cu, slab));
    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemHostRegister", (int)code);
        mm_status_add(
            st,
            "%zu bytes cannot be page-locked: the limit of a container, or that of ulimit -l, "
            "may be lower",
            slab->size);
        return -1;
    }
    return 0;
}

/* --- freeing ------------------------------------------------------------------------------ */

/* Waits for the other devices that read the memory over the bus, as far as they still work. */
static CUresult
wait_for_readers(mm_driver *cu, mm_slab *slab)
{
    const unsigned long long readers = atomic_load(&slab->readers);
    CUresult code = CUDA_SUCCESS;
    mm_status ignored;
    mm_scope scope;

    for (int device = 0; device < cu->device_count && code != CUDA_ERROR_NOT_PERMITTED; device++) {
        if ((readers >> device & 1) != 0
            && mm_scope_enter_relaxed(&scope, cu, device, &ignored) == 0) {
            code = cu->CtxSynchronize();
            mm_scope_leave(&scope);
        }
    }
    return code;
}

/* Unlocks memory of the host after a wait for kernels that read it over the bus, because
 * cuMemHostUnregister does not wait. Memory that stays locked stays mapped. In a relaxed scope. */
static CUresult
unlock_memory(mm_driver *cu, mm_slab *slab)
{
    CUresult code = cu->CtxSynchronize();

    if (code == CUDA_ERROR_NOT_PERMITTED
        || wait_for_readers(cu, slab) == CUDA_ERROR_NOT_PERMITTED) {
        return CUDA_ERROR_NOT_PERMITTED;
    }
    code = cu->MemHostUnregister((void *)(uintptr_t)slab->start);
    slab->on_host = code == CUDA_ERROR_NOT_PERMITTED || mm_is_freed(code)
                    || code == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return code;
}

/* Frees the memory. False if it has to be freed later, which happens only in a host function:
 * after other failures the memory may be free already, and its address may have a new owner. In a
 * relaxed scope. */
static bool
give_up(mm_driver *cu, mm_slab *slab)
{
    if (slab->on_host && !slab->locked) {
        return true;
    }
    if (slab->mapping.bytes > 0) {
        return mm_slab_unmap(cu, slab);
    }
    return (slab->on_host ? unlock_memory(cu, slab) : cu->MemFree(slab->start))
           != CUDA_ERROR_NOT_PERMITTED;
}

static bool
free_now(mm_driver *cu, mm_slab *slab)
{
    bool capturing = false, done;
    mm_status ignored;
    mm_scope scope;

    if (mm_streams_are_capturing(cu, &capturing, &ignored) < 0 || capturing
        || mm_scope_enter_relaxed(&scope, cu, slab->device, &ignored) < 0) {
        return false;
    }
    done = give_up(cu, slab);
    mm_scope_leave(&scope);
    return done;
}

static void
free_slab(mm_slab *slab)
{
    if (slab->is_listed) {
        unlist_slab(slab);
    }
    if (slab->on_host) {
        (void)munmap((void *)(uintptr_t)slab->start, slab->size);
    }
    free(slab);
}

static bool
attempt_slab(mm_driver *cu, mm_deferred_free *entry, const mm_free_conditions *conditions)
{
    mm_slab *slab = (mm_slab *)entry;

    (void)conditions;
    if (!free_now(cu, slab)) {
        return false;
    }
    free_slab(slab);
    return true;
}

void
mm_slab_free(mm_slab *slab)
{
    mm_driver *cu = mm_driver_usable();

    if (slab == NULL || mm_driver_forked()) {
        return; /* it is the parent's */
    }
    if (atomic_fetch_sub(&slab->holders, 1) != 1) {
        return;
    }
    if (cu == NULL || free_now(cu, slab)) {
        free_slab(slab);
        return;
    }
    mm_deferred_frees_append(&slab->deferred, attempt_slab);
}

void
mm_slab_defer_free(mm_slab *slab)
{
    if (atomic_fetch_sub(&slab->holders, 1) == 1) {
        mm_deferred_frees_append(&slab->deferred, attempt_slab);
    }
}
