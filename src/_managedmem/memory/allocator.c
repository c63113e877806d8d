/* allocator.c: the table of presets, and the exported functions that allocate and free with
 * them. The table only grows: entries below the published count never change, so readers need
 * no lock. */
#include "allocator.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy.h"

static pthread_mutex_t presets_lock = PTHREAD_MUTEX_INITIALIZER;
static mm_preset presets[MM_MAX_PRESETS];
static atomic_uint preset_count;

/* The allocator ABI has no error channel: torch says "out of memory" for every failure. */
static void
log_failure(const char *failure, const mm_status *st)
{
    mm_driver *cu = mm_driver_peek();
    const char *name = NULL;

    assert(st->kind != MM_OK);
    if (cu == NULL || st->kind != MM_DRIVER_CALL) {
        (void)fprintf(stderr, "managedmem: %s: %s\n", failure, st->detail);
        return;
    }
    MM_IGNORE(cu->GetErrorName((CUresult)st->code, &name)); /* the name then stays NULL */
    (void)fprintf(stderr, "managedmem: %s: %s failed with %s (%d)%s%s\n", failure, st->function,
                  name ? name : "an unknown error", st->code, st->detail[0] ? ". " : "",
                  st->detail);
}

static int
advise_block(mm_driver *cu, const mm_preset *preset, int device, mm_range block, mm_status *st)
{
    mm_policy policy = {.read_mostly = preset->read_mostly,
                        .preferred = preset->preferred,
                        .accessed_by = preset->accessed_by};

    if (preset->own_device) {
        policy.preferred = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device);
        policy.accessed_by |= mm_location_bit(policy.preferred);
    }
    return mm_policy_advise_new(cu, block, &policy, st);
}

/* Allocates a block of block->size bytes for the device, with the preset's advice. Frees it on
 * failure. */
static int
allocate_block(mm_driver *cu, const mm_preset *preset, int device, mm_range *block, mm_status *st)
{
    mm_status ignored;
    mm_scope scope;
    int rc;

    assert(block->start == 0 && device < cu->device_count);
    mm_deferred_frees_attempt(cu, &(mm_free_conditions){0});
    if (mm_scope_enter(&scope, cu, device, st) < 0) {
        return -1;
    }
    block->start =
        mm_allocate_pages(cu, block->size, CU_MEM_ATTACH_GLOBAL, &block->allocation, st);
    rc = block->start != 0 ? advise_block(cu, preset, device, *block, st) : -1;
    if (rc < 0 && block->start != 0) {
        MM_IGNORE(mm_free(cu, block->allocation, &ignored)); /* the first failure is reported */
    }
    mm_scope_leave(&scope);
    return rc;
}

/* True for a failure that the caller reports itself; the caller may free memory and try again. */
static bool
is_plain_out_of_memory(const mm_status *st)
{
    return st->kind == MM_DRIVER_CALL && st->code == CUDA_ERROR_OUT_OF_MEMORY
           && strcmp(st->function, "cuMemAllocManaged") == 0;
}

/* The address of the block, or NULL after a failure, which is logged. */
static void *
block_or_log(int rc, mm_range block, const char *place, const mm_status *st)
{
    char failure[96];

    if (rc == 0) {
        return (void *)(uintptr_t)block.start;
    }
    if (!is_plain_out_of_memory(st)) {
        (void)snprintf(failure, sizeof failure,
                       "cannot allocate %zd bytes of managed memory for %s", (ssize_t)block.size,
                       place);
        log_failure(failure, st);
    }
    return NULL;
}

static void *
allocate_for_slot(unsigned slot, ssize_t size, int device)
{
    mm_range block = {.size = (size_t)size};
    mm_status st;
    mm_driver *cu = mm_driver_open(&st);
    char place[32];
    int rc = -1;

    assert(slot < MM_MAX_PRESETS);
    if (cu != NULL && slot >= atomic_load_explicit(&preset_count, memory_order_acquire)) {
        rc = mm_fail(&st, MM_REFUSED, "managedmem_allocate_%u has no preset", slot);
    } else if (cu != NULL && (device < 0 || device >= cu->device_count)) {
        rc = mm_fail(&st, MM_BAD_VALUE, "there is no device %d", device);
    } else if (cu != NULL) {
        rc = allocate_block(cu, &presets[slot], device, &block, &st);
    }
    (void)snprintf(place, sizeof place, "Device(%d)", device);
    return block_or_log(rc, block, place, &st);
}

void *
mm_preset_allocate(const mm_preset *preset, size_t size, const char *user)
{
    mm_range block = {.size = size};
    mm_status st;
    mm_driver *cu = mm_driver_open(&st);
    int rc = cu != NULL ? allocate_block(cu, preset, MM_ANY_DEVICE, &block, &st) : -1;

    assert(!preset->own_device);
    return block_or_log(rc, block, user, &st);
}

size_t
mm_block_size(const void *block)
{
    CUdeviceptr start = (CUdeviceptr)(uintptr_t)block;
    mm_pointer_attributes attributes;
    mm_status st;
    mm_driver *cu = mm_driver_open(&st);

    if (cu == NULL || mm_pointer_query(cu, start, &attributes, &st) < 0) {
        log_failure("managed memory was not resized", &st);
        return 0;
    }
    return attributes.managed ? attributes.start + attributes.size - start : 0;
}

#define DEFINE_ALLOCATE(n)                                                   \
    void *managedmem_allocate_##n(ssize_t size, int device, CUstream stream) \
    {                                                                        \
        (void)stream;                                                        \
        return allocate_for_slot(n, size, device);                           \
    }
MM_PRESET_SLOTS(DEFINE_ALLOCATE)

/* The driver frees an allocation by its start. The block may start after that. */
static int
free_block_address(mm_driver *cu, CUdeviceptr start, mm_status *st)
{
    mm_pointer_attributes attributes;

    if (mm_pointer_query(cu, start, &attributes, st) < 0) {
        /* The driver is shut down, so the memory is gone. */
        return st->code == CUDA_ERROR_DEINITIALIZED ? 0 : -1;
    }
    if (!attributes.managed) {
        return mm_fail(st, MM_BAD_VALUE, "0x%llx is not managed memory",
                       (unsigned long long)start);
    }
    return mm_free(cu, attributes.start, st);
}

/* A block whose free was refused inside a host function. */
typedef struct {
    mm_deferred_free deferred;
    CUdeviceptr start;
} deferred_block;

static bool
attempt_deferred_block(mm_driver *cu, mm_deferred_free *entry,
                       const mm_free_conditions *conditions)
{
    deferred_block *block = (deferred_block *)entry;
    mm_status st;

    (void)conditions;
    if (free_block_address(cu, block->start, &st) < 0) {
        if (mm_can_defer_free(&st)) {
            return false;
        }
        log_failure("memory was not freed", &st);
    }
    free(block);
    return true;
}

static bool
defer_address(CUdeviceptr start)
{
    deferred_block *block = malloc(sizeof *block);

    if (block == NULL) {
        return false;
    }
    block->start = start;
    mm_deferred_frees_append(&block->deferred, attempt_deferred_block);
    return true;
}

void
managedmem_free(void *block, ssize_t size, int device, CUstream stream)
{
    mm_driver *cu = mm_driver_usable();
    CUdeviceptr start = (CUdeviceptr)(uintptr_t)block;
    mm_status st;

    (void)size, (void)device, (void)stream;
    if (block == NULL || cu == NULL) {
        return;
    }
    if (free_block_address(cu, start, &st) == 0) {
        mm_deferred_frees_attempt(cu, &(mm_free_conditions){0});
    } else if (!mm_can_defer_free(&st) || !defer_address(start)) {
        log_failure("memory was not freed", &st);
    }
}

static bool
same_preset(const mm_preset *a, const mm_preset *b)
{
    return mm_same_location(a->preferred, b->preferred) && a->accessed_by == b->accessed_by
           && a->read_mostly == b->read_mostly && a->own_device == b->own_device;
}

/* The number of the preset's entry, created if missing; -1 if the table is full. */
static int
find_preset_slot(const mm_preset *preset)
{
    unsigned count, slot = 0;

    (void)pthread_mutex_lock(&presets_lock);
    count = atomic_load(&preset_count);
    while (slot < count && !same_preset(&presets[slot], preset)) {
        slot++;
    }
    if (slot == count && count < MM_MAX_PRESETS) {
        presets[slot] = *preset;
        atomic_store_explicit(&preset_count, count + 1, memory_order_release);
    }
    (void)pthread_mutex_unlock(&presets_lock);
    return slot < MM_MAX_PRESETS ? (int)slot : -1;
}

int
mm_preset_try(mm_driver *cu, const mm_preset *preset, mm_status *st)
{
    mm_range trial = {.size = mm_page_size()};
    int device;

    if (mm_current_device(cu, &device, st) < 0
        || allocate_block(cu, preset, device, &trial, st) < 0) {
        return -1;
    }
    return mm_free(cu, trial.allocation, st);
}

int
mm_preset_register(mm_driver *cu, const mm_preset *preset, char name[MM_ALLOCATOR_NAME],
                   mm_status *st)
{
    int slot;

    if (mm_preset_try(cu, preset, st) < 0) {
        return -1;
    }
    slot = find_preset_slot(preset);
    if (slot < 0) {
        return mm_fail(
            st, MM_REFUSED,
            "all %d allocators are taken by other presets and cannot be released: share presets "
            "between pools, or advise the memory after its allocation",
            MM_MAX_PRESETS);
    }
    (void)snprintf(name, MM_ALLOCATOR_NAME, "managedmem_allocate_%d", slot);
    return 0;
}
