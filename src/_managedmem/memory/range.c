/* range.c: checks of ranges, pages, pointer queries, and the diagnosis of refused operations. */
#include "range.h"

#include <assert.h>
#include <unistd.h>

size_t
mm_page_size(void)
{
    static atomic_size_t page;
    size_t size = atomic_load_explicit(&page, memory_order_relaxed);

    if (size == 0) {
        size = (size_t)sysconf(_SC_PAGESIZE);
        atomic_store_explicit(&page, size, memory_order_relaxed);
    }
    return size;
}

mm_range
mm_first_page(mm_range range)
{
    size_t page = mm_page_size(), rest = page - (size_t)(range.start % page);

    assert(range.size > 0);
    range.size = range.size < rest ? range.size : rest;
    return range;
}

/* The plural query succeeds for any address, with zeros for memory that CUDA does not know
 * (conformance: pointer attributes, plural). */
int
mm_pointer_query(mm_driver *cu, CUdeviceptr p, mm_pointer_attributes *attributes, mm_status *st)
{
    CUpointer_attribute queried[] = {
        CU_POINTER_ATTRIBUTE_IS_MANAGED,       CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    };
    void *out[] = {&attributes->managed, &attributes->type, &attributes->start, &attributes->size,
                   &attributes->device};

    _Static_assert(sizeof queried / sizeof *queried == sizeof out / sizeof *out, "one out each");
    *attributes = (mm_pointer_attributes){0};
    MM_TRY(cu, PointerGetAttributes, st, sizeof queried / sizeof *queried, queried, out, p);
    return 0;
}

int
mm_range_is_managed(mm_driver *cu, mm_range range, bool *managed, mm_status *st)
{
    CUdeviceptr end = mm_range_end(range), next = range.start;
    mm_pointer_attributes attributes;

    assert(range.size > 0);
    do {
        range.start = next;
        if (mm_pointer_query(cu, range.start, &attributes, st) < 0) {
            return -1;
        }
        next = attributes.start + attributes.size;
        *managed = attributes.managed;
        assert(!*managed || next > range.start);
    } while (*managed && next < end);
    return 0;
}

/* 1 if the device can access system memory, 0 if not, -1 on failure. */
static int
reaches_system_memory(mm_driver *cu, int device, mm_status *st)
{
    int pageable = 0;

    assert(device >= 0 && device < cu->device_count);
    MM_TRY(cu, DeviceGetAttribute, st, &pageable, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
           device);
    return pageable != 0;
}

bool
mm_device_reaches(mm_driver *cu, const mm_pointer_attributes *attributes)
{
    mm_status ignored;

    return attributes->managed || attributes->type != 0
           || reaches_system_memory(cu, 0, &ignored) > 0;
}

/* The first device that cannot access system memory; device_count if all can, -1 on failure. */
static int
first_apart(mm_driver *cu, mm_status *st)
{
    int device = 0, reaches = 1;

    while (device < cu->device_count && (reaches = reaches_system_memory(cu, device, st)) > 0) {
        device++;
    }
    return reaches < 0 ? -1 : device;
}

/* The driver discards system memory only if every device can access it. */
static int
check_system_discard(mm_driver *cu, const mm_range *range, mm_status *st)
{
    int device = first_apart(cu, st);

    if (device >= 0 && device < cu->device_count) {
        return mm_fail(st, MM_NOT_MANAGED,
                       "address 0x%llx is not in a managed-memory allocation; it is system "
                       "memory, which can only be discarded where every device has "
                       "pageable_memory_access (Device(%d) lacks it)",
                       (unsigned long long)range->start, device);
    }
    return device < 0 ? -1 : 0;
}

/* Refuses system memory, except for MM_LOCATE if the driver has the call and every device can
 * access the memory. Other system memory moves to no device, or no call tells its place. */
static int
check_system_query(mm_driver *cu, const mm_range *range, mm_operation op, mm_status *st)
{
    if (op == MM_LOCATE && cu->MemGetLocationInfo != NULL) {
        int device = first_apart(cu, st);
        if (device < 0 || device == cu->device_count) {
            return device < 0 ? -1 : 0;
        }
    }
    return mm_fail(st, MM_NOT_MANAGED,
                   "address 0x%llx is system memory; this needs a managed-memory allocation, "
                   "such as managedmem.empty() makes; managedmem.asarray(array) copies an "
                   "array to one",
                   (unsigned long long)range->start);
}

/* The end of an error message, which names the function that copies such memory. */
static const char *
copy_hint(mm_operation op)
{
    return op == MM_COPY ? ". managedmem.copy(source, destination) copies such memory; to fill "
                           "it, copy from filled memory"
                         : "";
}

/* System memory is a target on HMM and ATS systems, but the driver cannot query its advice. */
static int
check_system_memory(mm_driver *cu, const mm_range *range, mm_operation op, mm_status *st)
{
    int device = 0, reaches;

    if (op == MM_QUERY || op == MM_LOCATE) {
        return check_system_query(cu, range, op, st);
    }
    if (mm_discards(op)) {
        return check_system_discard(cu, range, st);
    }
    if (mm_current_device(cu, &device, st) < 0
        || (reaches = reaches_system_memory(cu, device, st)) < 0) {
        return -1;
    }
    if (!reaches) {
        return mm_fail(
            st, MM_NOT_MANAGED,
            "address 0x%llx is not in a managed-memory allocation; it is system memory, "
            "which can only be a target where the device has pageable_memory_access "
            "(Device(%d) lacks it)%s",
            (unsigned long long)range->start, device, copy_hint(op));
    }
    return 0;
}

int
mm_range_check(mm_driver *cu, mm_range *range, mm_operation op, mm_status *st)
{
    mm_pointer_attributes attributes;

    assert(op >= MM_ADVISE && op <= MM_LOCATE);
    if (range->size == 0) {
        return 0;
    }
    if (mm_pointer_query(cu, range->start, &attributes, st) < 0) {
        return -1;
    }
    if (!attributes.managed && attributes.type == 0) {
        return check_system_memory(cu, range, op, st);
    }
    if (!attributes.managed) {
        return mm_fail(st, MM_NOT_MANAGED,
                       "address 0x%llx is not in a managed-memory allocation: it is %s memory, "
                       "which does not migrate%s",
                       (unsigned long long)range->start,
                       attributes.type == CU_MEMORYTYPE_HOST ? "pinned host" : "plain device",
                       copy_hint(op));
    }
    range->allocation = attributes.start;
    if (range->size > attributes.size
        || range->start - attributes.start > attributes.size - range->size) {
        return mm_fail(st, MM_BAD_VALUE,
                       "the range of %zu bytes at 0x%llx leaves its managed-memory allocation, "
                       "which has %zu bytes at 0x%llx",
                       range->size, (unsigned long long)range->start, attributes.size,
                       (unsigned long long)attributes.start);
    }
    return 0;
}

const char *
mm_skipping_function(mm_operation op)
{
    switch (op) {
    case MM_ADVISE:
        return "advise";
    case MM_PREFETCH:
        return "prefetch";
    case MM_DISCARD:
        return "discard";
    case MM_DISCARD_PREFETCH:
        return "discard_prefetch";
    default:
        return NULL;
    }
}

/* A call for a single range also fails for a missing NUMA node. unsupported="skip" does not pass
 * over that, so the message does not propose it then. */
static void
explain_access(mm_operation op, CUmemLocation location, mm_status *st)
{
    const char *function = mm_skipping_function(op);
    bool names_node = st->code == CUDA_ERROR_INVALID_VALUE && !mm_discards(op)
                      && location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;

    mm_status_add(
        st, "Not every device here has concurrent_managed_access, which this operation needs "
            "(WSL, Windows and some Tegra systems lack it).");
    if (function != NULL && !names_node) {
        mm_status_add(st, "managedmem.%s(..., unsupported=\"skip\") skips what is unsupported.",
                      function);
    }
}

MM_COLD int
mm_range_diagnose(mm_driver *cu, mm_range range, CUmemLocation location, mm_operation op,
                  mm_status *st)
{
    mm_status found = {.kind = MM_OK};
    char text[MM_LOCATION_TEXT];

    assert(st->kind != MM_OK);
    if (st->kind != MM_DRIVER_CALL) {
        return -1;
    }
    mm_location_text(location, text);
    if (st->code == CUDA_ERROR_NOT_SUPPORTED && op == MM_ADVISE) {
        mm_status_add(st,
                      "Memory from a driver pool takes no advice: allocate it with "
                      "ManagedMemoryResource().allocate(), or prefetch instead "
                      "(%zu bytes at 0x%llx).",
                      range.size, (unsigned long long)range.start);
    } else if (!cu->concurrent_access
               && (st->code == CUDA_ERROR_INVALID_DEVICE
                   || st->code == CUDA_ERROR_INVALID_VALUE)) {
        explain_access(op, location, st);
    } else if (st->code == CUDA_ERROR_INVALID_VALUE) {
        if (mm_range_check(cu, &range, op, &found) < 0 && mm_is_bad_argument(&found)) {
            *st = found;
        } else if (location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA) {
            return mm_fail(st, MM_BAD_VALUE, "%s: this system has no NUMA node %d", text,
                           location.id);
        } else {
            bool located = op != MM_DISCARD;
            mm_status_add(st, "The driver refused %zu bytes at 0x%llx%s%s.", range.size,
                          (unsigned long long)range.start, located ? " with " : "",
                          located ? text : "");
        }
    }
    return -1;
}

int
mm_range_whole_pages(mm_range *range, mm_status *st)
{
    size_t page = mm_page_size(), rest = (size_t)(range->start % page);
    size_t before = rest > 0 ? page - rest : 0; /* bytes up to the first whole page */

    if (range->size == 0) {
        return 0;
    }
    if (range->size < before || range->size - before < page) {
        return mm_fail(st, MM_BAD_VALUE,
                       "cannot discard %zu bytes at 0x%llx: they hold no whole page of %zu bytes, "
                       "and a driver discards whole pages only",
                       range->size, (unsigned long long)range->start, page);
    }
    range->start += before;
    range->size = (range->size - before) / page * page;
    return 0;
}
