/* slab_mapping.c: memory of a device that is given back and taken again at the same address. */
#include "slab.h"

#include "../memory/nearest_host.h"
#include "../memory/stream.h"

/* --- one mapping, in a scope -------------------------------------------------------------- */

static CUmemAllocationProp
kind_of_memory(CUmemLocation location)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location};
}

static CUmemLocation
device_of(const mm_slab *slab)
{
    return mm_location(CU_MEM_LOCATION_TYPE_DEVICE, slab->device);
}

/* This function and the next two repeat a failed call, as nothing else can be done about it. */
static void
release(mm_driver *cu, CUmemGenericAllocationHandle memory)
{
    if (cu->MemRelease(memory) != CUDA_SUCCESS) {
        MM_IGNORE(cu->MemRelease(memory));
    }
}

static void
free_addresses(mm_driver *cu, CUdeviceptr start, size_t bytes)
{
    if (cu->MemAddressFree(start, bytes) != CUDA_SUCCESS) {
        MM_IGNORE(cu->MemAddressFree(start, bytes));
    }
}

static void
unmap(mm_driver *cu, CUdeviceptr start, size_t bytes)
{
    if (cu->MemUnmap(start, bytes) != CUDA_SUCCESS) {
        MM_IGNORE(cu->MemUnmap(start, bytes));
    }
}

/* Maps memory at an address for the device. On failure nothing is mapped there. */
static int
map(mm_driver *cu, const mm_slab *slab, CUdeviceptr start, size_t bytes,
    CUmemGenericAllocationHandle memory, mm_status *st)
{
    const CUmemAccessDesc access = {.location = device_of(slab),
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult code = cu->MemMap(start, bytes, 0, memory, 0);

    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemMap", (int)code);
        unmap(cu, start, bytes); /* a failed call may have mapped it */
        return -1;
    }
    code = cu->MemSetAccess(start, bytes, &access, 1);
    if (code != CUDA_SUCCESS) {
        unmap(cu, start, bytes);
        return mm_fail_call(st, "cuMemSetAccess", (int)code);
    }
    return 0;
}

/* Maps again what was there before a failure, with a second attempt. */
static void
map_again(mm_driver *cu, const mm_slab *slab, CUdeviceptr start, size_t bytes,
          CUmemGenericAllocationHandle memory)
{
    mm_status ignored;

    if (map(cu, slab, start, bytes, memory, &ignored) < 0) {
        MM_IGNORE(map(cu, slab, start, bytes, memory, &ignored));
    }
}

static int
create(mm_driver *cu, size_t bytes, CUmemLocation location, CUmemGenericAllocationHandle *memory,
       mm_status *st)
{
    const CUmemAllocationProp wanted = kind_of_memory(location);
    CUresult code = cu->MemCreate(memory, bytes, &wanted, 0);
    const bool on_device = location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    size_t available = 0, total = 0;

    if (code == CUDA_SUCCESS) {
        return 0;
    }
    (void)mm_fail_call(st, "cuMemCreate", (int)code);
    if (!on_device) {
        mm_status_add(st, "%zu bytes of page-locked memory of the host were requested", bytes);
    } else if (cu->MemGetInfo(&available, &total) == CUDA_SUCCESS) {
        mm_status_add(st, "%zu bytes of Device(%d) were requested, and %zu are free", bytes,
                      location.id, available);
    }
    return -1;
}

static int
copy(mm_driver *cu, CUdeviceptr to, CUdeviceptr from, size_t bytes, mm_status *st)
{
    MM_TRY(cu, MemcpyAsync, st, to, from, bytes, CU_STREAM_LEGACY);
    MM_TRY(cu, StreamSynchronize, st, CU_STREAM_LEGACY);
    return 0;
}

/* Waits for all work before its memory is unmapped, with further attempts. If all attempts fail,
 * the context has no work any more. */
static CUresult
wait_for_work(mm_driver *cu)
{
    CUresult code = cu->CtxSynchronize();

    for (int i = 0; i < 2 && code != CUDA_SUCCESS && code != CUDA_ERROR_NOT_PERMITTED; i++) {
        code = cu->CtxSynchronize();
    }
    return code;
}

/* Copies the last at_home bytes of a slab to the end of memory that is not mapped anywhere. */
static int
copy_aside(mm_driver *cu, const mm_slab *slab, CUmemGenericAllocationHandle memory, size_t bytes,
           mm_status *st)
{
    const mm_slab_mapping *m = &slab->mapping;
    CUdeviceptr aside = 0;
    int rc;

    MM_TRY(cu, MemAddressReserve, st, &aside, bytes, 0, 0, 0);
    rc = map(cu, slab, aside, bytes, memory, st);
    if (rc == 0) {
        rc = copy(cu, aside + bytes - m->at_home, slab->start + m->bytes - m->at_home, m->at_home,
                  st);
        if (rc < 0) {
            MM_IGNORE(wait_for_work(cu));
        }
        unmap(cu, aside, bytes);
    }
    free_addresses(cu, aside, bytes);
    return rc;
}

/* --- life --------------------------------------------------------------------------------- */

static bool
has_calls(const mm_driver *cu)
{
    return cu->MemGetAllocationGranularity != NULL && cu->MemCreate != NULL
           && cu->MemRelease != NULL && cu->MemAddressReserve != NULL && cu->MemAddressFree != NULL
           && cu->MemMap != NULL && cu->MemSetAccess != NULL && cu->MemUnmap != NULL;
}

/* Stores the location of memory of the host as a NUMA node, which older drivers need. */
static int
find_host(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    if (mm_nearest_host(cu, slab->device, &slab->mapping.host, st) < 0) {
        return -1;
    }
    if (slab->mapping.host.type == CU_MEM_LOCATION_TYPE_HOST) {
        slab->mapping.host = mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
    }
    return 0;
}

/* The unit serves memory of the device and of the host. */
static int
measure(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    const CUmemAllocationProp here = kind_of_memory(device_of(slab));
    int supported = 0;
    size_t unit = 0;

    if (has_calls(cu)) {
        MM_TRY(cu, DeviceGetAttribute, st, &supported,
               CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, slab->device);
    }
    if (supported == 0) {
        return mm_fail(st, MM_UNSUPPORTED,
                       "Device(%d) cannot map memory at reserved addresses, which suspend() needs",
                       slab->device);
    }
    MM_TRY(cu, MemGetAllocationGranularity, st, &unit, &here, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (slab->size > SIZE_MAX - unit) {
        return mm_fail(st, MM_NO_MEMORY, "%zu bytes are more than the address space has",
                       slab->size);
    }
    slab->mapping.unit = unit;
    slab->mapping.bytes = (slab->size + unit - 1) / unit * unit;
    return 0;
}

/* In a scope. */
static int
fill_addresses(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    mm_slab_mapping *m = &slab->mapping;
    int rc;

    MM_TRY(cu, MemAddressReserve, st, &slab->start, m->bytes, 0, 0, 0);
    rc = create(cu, m->bytes, device_of(slab), &m->frames, st);
    if (rc == 0) {
        rc = map(cu, slab, slab->start, m->bytes, m->frames, st);
        if (rc < 0) {
            release(cu, m->frames);
        }
    }
    if (rc < 0) {
        free_addresses(cu, slab->start, m->bytes);
        return -1;
    }
    m->has_frames = true;
    return 0;
}

int
mm_slab_map(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (measure(cu, slab, st) < 0 || find_host(cu, slab, st) < 0
        || mm_scope_enter_relaxed(&scope, cu, slab->device, st) < 0) {
        return -1;
    }
    rc = fill_addresses(cu, slab, st);
    mm_scope_leave(&scope);
    return rc;
}

bool
mm_slab_unmap(mm_driver *cu, mm_slab *slab)
{
    mm_slab_mapping *m = &slab->mapping;

    if (wait_for_work(cu) == CUDA_ERROR_NOT_PERMITTED) {
        return false;
    }
    if (!m->is_suspended) {
        unmap(cu, slab->start, m->bytes);
    } else if (m->at_home > 0) {
        unmap(cu, slab->start + m->bytes - m->at_home, m->at_home);
    }
    if (m->has_frames) {
        release(cu, m->frames);
    }
    if (m->has_home) {
        release(cu, m->home);
    }
    free_addresses(cu, slab->start, m->bytes);
    return true;
}

/* --- going and coming back ---------------------------------------------------------------- */

/* Waits for the work that uses the memory. MM_REFUSED if a stream captures. In a scope. */
static int
wait_for_uses(mm_driver *cu, mm_status *st)
{
    bool capturing = false;

    if (mm_streams_are_capturing(cu, &capturing, st) < 0) {
        return -1;
    }
    if (capturing) {
        return mm_fail(st, MM_REFUSED,
                       "memory cannot be suspended or resumed while a stream captures a graph");
    }
    MM_TRY(cu, CtxSynchronize, st);
    return 0;
}

/* Creates the home, unless there is one of this size from the last suspension. In a scope. */
static int
make_home(mm_driver *cu, mm_slab *slab, size_t bytes, mm_status *st)
{
    mm_slab_mapping *m = &slab->mapping;

    if (m->has_home && m->at_home != bytes) {
        release(cu, m->home);
        m->has_home = false;
    }
    m->at_home = bytes;
    if (m->has_home || bytes == 0) {
        return 0;
    }
    m->has_home = create(cu, bytes, m->host, &m->home, st) == 0;
    m->at_home = m->has_home ? bytes : 0;
    return m->has_home ? 0 : -1;
}

/* Puts the home in place of the frames. In a scope. */
static int
leave_frames(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    mm_slab_mapping *m = &slab->mapping;
    CUresult code = cu->MemUnmap(slab->start, m->bytes);

    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemUnmap", (int)code);
    } else if (m->at_home == 0
               || map(cu, slab, slab->start + m->bytes - m->at_home, m->at_home, m->home, st)
                      == 0) {
        release(cu, m->frames);
        m->has_frames = false;
        m->is_suspended = true;
        return 0;
    }
    map_again(cu, slab, slab->start, m->bytes, m->frames);
    return -1;
}

static int
suspend_mapping(mm_driver *cu, mm_slab *slab, size_t kept_from, bool keeps, mm_status *st)
{
    mm_slab_mapping *m = &slab->mapping;
    const size_t first = kept_from < slab->size ? kept_from / m->unit * m->unit : m->bytes;

    if (wait_for_uses(cu, st) < 0 || make_home(cu, slab, m->bytes - first, st) < 0) {
        return -1;
    }
    m->keeps = keeps && m->at_home > 0;
    if (m->keeps && copy_aside(cu, slab, m->home, m->at_home, st) < 0) {
        return -1;
    }
    return leave_frames(cu, slab, st);
}

int
mm_slab_suspend(mm_driver *cu, mm_slab *slab, size_t kept_from, bool keeps, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (slab->mapping.bytes == 0) {
        return mm_fail(st, MM_REFUSED,
                       "the memory cannot be suspended: it was made without suspendable=True");
    }
    if (slab->mapping.is_suspended) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, slab->device, st) < 0) {
        return -1;
    }
    rc = suspend_mapping(cu, slab, kept_from, keeps, st);
    mm_scope_leave(&scope);
    return rc;
}

/* Puts frames in place of the home. In a scope. */
static int
leave_home(mm_driver *cu, mm_slab *slab, CUmemGenericAllocationHandle frames, mm_status *st)
{
    mm_slab_mapping *m = &slab->mapping;
    const CUdeviceptr kept = slab->start + m->bytes - m->at_home;
    CUresult code = m->at_home > 0 ? cu->MemUnmap(kept, m->at_home) : CUDA_SUCCESS;

    if (code != CUDA_SUCCESS) {
        (void)mm_fail_call(st, "cuMemUnmap", (int)code);
    } else if (map(cu, slab, slab->start, m->bytes, frames, st) == 0) {
        m->frames = frames;
        m->has_frames = true;
        m->is_suspended = false;
        return 0;
    }
    if (m->at_home > 0) {
        map_again(cu, slab, kept, m->at_home, m->home);
    }
    return -1;
}

static int
resume_mapping(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    const mm_slab_mapping *m = &slab->mapping;
    CUmemGenericAllocationHandle frames = 0;

    if (wait_for_uses(cu, st) < 0 || create(cu, m->bytes, device_of(slab), &frames, st) < 0) {
        return -1;
    }
    if ((m->keeps && copy_aside(cu, slab, frames, m->bytes, st) < 0)
        || leave_home(cu, slab, frames, st) < 0) {
        release(cu, frames);
        return -1;
    }
    return 0;
}

int
mm_slab_resume(mm_driver *cu, mm_slab *slab, mm_status *st)
{
    mm_scope scope;
    int rc;

    if (!slab->mapping.is_suspended) {
        return 0;
    }
    if (mm_scope_enter_relaxed(&scope, cu, slab->device, st) < 0) {
        return -1;
    }
    rc = resume_mapping(cu, slab, st);
    mm_scope_leave(&scope);
    return rc;
}
