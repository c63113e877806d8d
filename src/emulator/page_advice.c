/* Advice: the policies in effect for each page, and the records that queries read, which miss
 * some changes as on driver 580. Both change at the call, not in stream order. */
#include "emulator.h"

#include <string.h>

enum { UNSET = CU_DEVICE_INVALID };

struct advice {
    CUmem_advise advice;
    CUmemLocation location;
};

static bool
is_node(CUmemLocation location)
{
    return location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA
           || location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
}

/* Measured with one NUMA node (topic "read-back"): preferring a node is accepted and changes
 * nothing. With several nodes the node is kept; the calling thread's node is always 0 here. */
static void
set_preferred(struct emu_policy *policy, CUmemLocation location)
{
    bool node = is_node(location);

    if (node && emu_config()->numa_nodes == 1) {
        return;
    }
    policy->preferred_type = node ? CU_MEM_LOCATION_TYPE_HOST_NUMA : (int32_t)location.type;
    policy->preferred_id = location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT
                                   || location.type == CU_MEM_LOCATION_TYPE_HOST
                               ? 0
                               : location.id;
}

static void
change_policy(union emu_value *value, size_t first, size_t end, void *argument)
{
    const struct advice *a = argument;
    struct emu_policy *policy = &value->policy;

    (void)first;
    (void)end;
    switch (a->advice) {
    case CU_MEM_ADVISE_SET_READ_MOSTLY:
        policy->read_mostly = 1;
        break;
    case CU_MEM_ADVISE_UNSET_READ_MOSTLY:
        policy->read_mostly = 0;
        break;
    case CU_MEM_ADVISE_SET_PREFERRED_LOCATION:
        set_preferred(policy, a->location);
        break;
    case CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION:
        policy->preferred_type = 0;
        policy->preferred_id = 0;
        break;
    case CU_MEM_ADVISE_SET_ACCESSED_BY:
        policy->accessed_by |= emu_place_bit(a->location);
        break;
    case CU_MEM_ADVISE_UNSET_ACCESSED_BY:
        policy->accessed_by &= ~emu_place_bit(a->location);
        break;
    default:
        break;
    }
}

/* Three kinds of advice ignore their location. With a NUMA node, the driver returns success and
 * does nothing (topic "ignored locations"). */
static bool
advice_has_no_effect(CUmem_advise advice, CUmemLocation location)
{
    return is_node(location)
           && (advice == CU_MEM_ADVISE_SET_READ_MOSTLY || advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY
               || advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION);
}

CUresult
emu_policy_advise(struct emu_region *region, CUdeviceptr ptr, size_t size, CUmem_advise advice,
                  CUmemLocation location)
{
    struct advice a = {advice, location};
    size_t first, end;

    if (advice_has_no_effect(advice, location)) {
        return CUDA_SUCCESS;
    }
    emu_page_span(region, ptr, size, &first, &end);
    emu_pages_observe(region, first, end);
    EMU_EACH_RUN(part, &region->policies, first, end) {
        if (advice == CU_MEM_ADVISE_UNSET_READ_MOSTLY && part.value->policy.read_mostly != 0) {
            emu_pages_collapse(region, part.first, part.end,
                               emu_preferred_bit(&part.value->policy));
        }
    }
    return emu_runs_change(&region->policies, first, end, change_policy, &a)
                   && emu_runs_walk(&region->records, first, end, change_policy, &a)
               ? CUDA_SUCCESS
               : CUDA_ERROR_OUT_OF_MEMORY;
}

static void
change_prefetch(union emu_value *value, size_t first, size_t end, void *argument)
{
    const CUmemLocation *location = argument;

    (void)first;
    (void)end;
    value->policy.prefetch_type = (int32_t)location->type;
    value->policy.prefetch_id = location->id;
}

/* Measured (topic "read-back"): the location reads back as given, the current node as type 4. */
CUresult
emu_policy_prefetched(struct emu_region *region, CUdeviceptr ptr, size_t size,
                      CUmemLocation location)
{
    size_t first, end;

    emu_page_span(region, ptr, size, &first, &end);
    return emu_runs_walk(&region->records, first, end, change_prefetch, &location)
               ? CUDA_SUCCESS
               : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult
emu_policy_check(CUmem_range_attribute attribute, const void *data, size_t size)
{
    if (data == NULL || attribute < CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY
        || attribute > CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY) {
        return size > 0 && size % sizeof(int) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    return size == sizeof(int) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* The advice that all pages of a range share. A location that differs between pages becomes
 * none. */
static struct emu_policy
common_policy(const struct emu_region *region, size_t first, size_t end)
{
    struct emu_policy common = emu_runs_at(&region->records, first)->policy;

    for (size_t at = first; at < end; at += emu_runs_length(&region->records, at)) {
        const struct emu_policy *p = &emu_runs_at(&region->records, at)->policy;

        common.read_mostly &= p->read_mostly;
        common.accessed_by &= p->accessed_by;
        if (common.preferred_type != p->preferred_type || common.preferred_id != p->preferred_id) {
            common.preferred_type = common.preferred_id = 0;
        }
        if (common.prefetch_type != p->prefetch_type || common.prefetch_id != p->prefetch_id) {
            common.prefetch_type = common.prefetch_id = 0;
        }
    }
    return common;
}

/* A location as the attributes with one number give it: the ordinal of a device, -1 for the host
 * and its nodes, -2 for none. */
static int
as_ordinal(int type, int id)
{
    if (type == 0) {
        return UNSET;
    }
    return type == CU_MEM_LOCATION_TYPE_DEVICE ? id : CU_DEVICE_CPU;
}

static void
write_users(uint64_t users, int *data, size_t places)
{
    size_t used = 0;

    for (int i = 0; i < EMU_MAX_DEVICES && used < places; i++) {
        if ((users >> i & 1) != 0) {
            data[used++] = i;
        }
    }
    if ((users >> EMU_HOST_BIT & 1) != 0 && used < places) {
        data[used++] = CU_DEVICE_CPU;
    }
    while (used < places) {
        data[used++] = UNSET;
    }
}

void
emu_policy_read(const struct emu_region *region, CUdeviceptr ptr, size_t size,
                CUmem_range_attribute attribute, int *data, size_t data_size)
{
    struct emu_policy policy;
    const struct emu_policy *p = &policy;
    size_t first, end;

    emu_page_span(region, ptr, size, &first, &end);
    policy = common_policy(region, first, end);
    switch (attribute) {
    case CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY:
        *data = (int)p->read_mostly;
        break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION:
        *data = as_ordinal(p->preferred_type, p->preferred_id);
        break;
    case CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY:
        write_users(p->accessed_by, data, data_size / sizeof(int));
        break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION:
        *data = as_ordinal(p->prefetch_type, p->prefetch_id);
        break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE:
        *data = p->preferred_type;
        break;
    case CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID:
        *data = p->preferred_type == CU_MEM_LOCATION_TYPE_HOST_NUMA
                    ? p->preferred_id
                    : as_ordinal(p->preferred_type, p->preferred_id);
        break;
    case CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE:
        *data = p->prefetch_type;
        break;
    default:
        *data = p->prefetch_type == 0 ? UNSET : p->prefetch_id;
        break;
    }
}
