/* test_allocator.c: the functions that other libraries' allocators call: presets, faults, threads. */
#include "memory/allocator.h"

#include <stdlib.h>

#include "world.h"

enum { ROUNDS = 100, WORKERS = 4, BLOCK = 10000 };

typedef void *(*allocate_function)(ssize_t, int, CUstream);

#define ENTRY(n) managedmem_allocate_##n,
static const allocate_function functions[MM_MAX_PRESETS] = {MM_PRESET_SLOTS(ENTRY)};

static const CUmemLocation nowhere;

/* The function that a preset gets. */
static allocate_function
function_of(const mm_preset *preset)
{
    char name[MM_ALLOCATOR_NAME];
    mm_status st;

    CHECK_OK(mm_preset_register(world.cu, preset, name, &st), &st);
    CHECK(strncmp(name, "managedmem_allocate_", 20) == 0);
    return functions[atoi(name + 20)];
}

static mm_range
range_of(void *block)
{
    mm_range range = {.start = (CUdeviceptr)(uintptr_t)block, .size = BLOCK};
    return range;
}

static void
check_advice(void *block, CUmemLocation preferred, mm_location_set accessed_by, bool read_mostly)
{
    CUmemLocation location;
    mm_location_set set;
    mm_status st;
    bool on;

    CHECK(block != NULL);
    CHECK_OK(mm_range_preferred_location(world.cu, range_of(block), &location, &st), &st);
    /* Where none is set, the driver gives a number of its own. */
    CHECK(location.type == preferred.type
          && (location.type == 0 || mm_same_location(location, preferred)));
    CHECK_OK(mm_range_accessed_by(world.cu, range_of(block), &set, &st), &st);
    CHECK(set == accessed_by);
    CHECK_OK(mm_range_read_mostly(world.cu, range_of(block), &on, &st), &st);
    CHECK_EQUAL(on, read_mostly);
}

/* First in the table, because it needs an empty one. */
TEST(functions_without_a_preset_refuse)
{
    size_t before = world.live_allocations();

    for (size_t i = 0; i < MM_MAX_PRESETS; i++) {
        CHECK(functions[i](BLOCK, 0, NULL) == NULL);
    }
    CHECK_EQUAL(world.live_allocations(), before);
}

TEST(blocks_are_whole_pages_with_the_advice)
{
    mm_location_set everyone =
        mm_location_bit(mm_location_from_bit(1)) | mm_location_bit(mm_host());
    mm_preset plain = {.preferred = nowhere};
    mm_preset full = {.preferred = mm_host(), .accessed_by = everyone, .read_mostly = true};
    size_t before = world.live_allocations();
    void *a = function_of(&plain)(BLOCK, 0, NULL), *b = function_of(&full)(BLOCK, 1, NULL);

    CHECK_EQUAL((uintptr_t)a % mm_page_size(), 0);
    CHECK_EQUAL((uintptr_t)b % mm_page_size(), 0);
    check_advice(a, nowhere, 0, false);
    check_advice(b, mm_host(), everyone, true);
    CHECK_EQUAL(world.live_allocations(), before + 2);
    managedmem_free(a, BLOCK, 0, NULL);
    managedmem_free(b, BLOCK, 1, NULL);
    CHECK_EQUAL(world.live_allocations(), before);
    CHECK_EQUAL(world.context_depth(), 0);
}

TEST(own_device_is_the_one_that_is_asked_for)
{
    mm_preset preset = {.own_device = true};

    for (int device = 0; device < world.cu->device_count; device++) {
        CUmemLocation own = mm_location_from_bit(device);
        void *block = function_of(&preset)(BLOCK, device, NULL);
        mm_pointer_attributes attributes;
        mm_status st;

        check_advice(block, own, mm_location_bit(own), false);
        CHECK_OK(mm_pointer_query(world.cu, range_of(block).start, &attributes, &st), &st);
        CHECK_EQUAL(attributes.device, device);
        managedmem_free(block, BLOCK, device, NULL);
    }
}

TEST(equal_presets_share_a_function)
{
    mm_preset host = {.preferred = mm_host()}, device = {.preferred = mm_location_from_bit(0)};
    mm_preset mostly = {.preferred = mm_host(), .read_mostly = true};

    CHECK(function_of(&host) == function_of(&host));
    CHECK(function_of(&host) != function_of(&device));
    CHECK(function_of(&host) != function_of(&mostly));
}

TEST(bad_requests_give_nothing)
{
    mm_preset preset = {.preferred = mm_host()};
    allocate_function f = function_of(&preset);
    size_t before = world.live_allocations();

    CHECK(f(0, 0, NULL) == NULL);
    CHECK(f(-1, 0, NULL) == NULL);
    CHECK(f(BLOCK, -1, NULL) == NULL);
    CHECK(f(BLOCK, world.cu->device_count, NULL) == NULL);
    managedmem_free(NULL, 0, 0, NULL);
    managedmem_free((void *)&before, sizeof before, 0, NULL); /* no managed memory */
    CHECK_EQUAL(world.live_allocations(), before);
    CHECK_EQUAL(world.context_depth(), 0);
}

/* What the driver refuses is known when the preset is registered. */
TEST(a_refused_preset_gets_no_function)
{
    mm_preset preset = {.preferred = mm_location(CU_MEM_LOCATION_TYPE_HOST_NUMA, 99)};
    size_t before = world.live_allocations();
    char name[MM_ALLOCATOR_NAME] = "";
    mm_status st;

    CHECK_EQUAL(mm_preset_register(world.cu, &preset, name, &st), -1);
    CHECK_EQUAL(st.kind, MM_BAD_VALUE);
    CHECK(name[0] == '\0');
    CHECK_EQUAL(world.live_allocations(), before);
}

/* Each driver call of an allocation fails in turn: a complete block or none. */
TEST(failed_allocations_leave_nothing)
{
    mm_preset preset = {.preferred = mm_host(),
                        .accessed_by = mm_location_bit(mm_location_from_bit(0)),
                        .read_mostly = true};
    allocate_function f = function_of(&preset);
    size_t before = world.live_allocations();
    unsigned refused = 0;

    for (unsigned n = 1;; n++) {
        void *block;
        int fired;

        world.fail("*", n, CUDA_ERROR_LAUNCH_FAILED, 0);
        block = f(BLOCK, 1, NULL);
        fired = world.fail_fired();
        world.fail_clear();
        CHECK_EQUAL(world.context_depth(), 0);
        refused += block == NULL;
        if (block != NULL) {
            check_advice(block, mm_host(), preset.accessed_by, true);
            managedmem_free(block, BLOCK, 1, NULL);
        }
        CHECK_EQUAL(world.live_allocations(), before);
        if (!fired) {
            break;
        }
    }
    CHECK(refused >= 4); /* the allocation and three advices at the least */
}

TEST(failed_registration_leaves_nothing)
{
    mm_preset preset = {.preferred = mm_location_from_bit(1), .read_mostly = true};
    size_t before = world.live_allocations();
    char name[MM_ALLOCATOR_NAME];
    unsigned n = 0;
    mm_status st;
    int fired;

    do {
        int rc;

        world.fail("*", ++n, CUDA_ERROR_LAUNCH_FAILED, 0);
        rc = mm_preset_register(world.cu, &preset, name, &st);
        fired = world.fail_fired();
        world.fail_clear();
        CHECK(rc == 0 || st.code == CUDA_ERROR_LAUNCH_FAILED);
        CHECK_EQUAL(world.context_depth(), 0);
        /* What the driver refuses to free it keeps. */
        before += rc < 0 && strcmp(st.function, "cuMemFree") == 0;
        CHECK_EQUAL(world.live_allocations(), before);
    } while (fired);
    CHECK(n > 3);
}

TEST(free_is_harmless_after_shutdown)
{
    mm_preset preset = {.preferred = mm_host()};
    void *block = function_of(&preset)(BLOCK, 0, NULL);
    size_t before = world.live_allocations();

    world.fail("cuPointerGetAttributes", 1, CUDA_ERROR_DEINITIALIZED, 0);
    managedmem_free(block, BLOCK, 0, NULL);
    CHECK(world.fail_fired());
    world.fail_clear();
    CHECK_EQUAL(world.live_allocations(), before);
    managedmem_free(block, BLOCK, 0, NULL);
    CHECK_EQUAL(world.live_allocations(), before - 1);
}

/* Each thread registers the same presets in its own order and uses what it gets. */
static void *
register_and_use(void *counter)
{
    unsigned start = (unsigned)atomic_fetch_add((atomic_int *)counter, 1);

    for (unsigned round = 0; round < ROUNDS; round++) {
        int device = (int)((start + round) % 2);
        mm_preset preset = {.preferred = mm_location_from_bit(device),
                            .accessed_by = mm_location_bit(mm_host())};
        void *block = function_of(&preset)(BLOCK, device, NULL);

        check_advice(block, preset.preferred, preset.accessed_by, false);
        managedmem_free(block, BLOCK, device, NULL);
    }
    return NULL;
}

TEST(threads_register_and_allocate_at_once)
{
    size_t before = world.live_allocations();
    atomic_int started = 0;

    check_threads(WORKERS, register_and_use, &started);
    CHECK_EQUAL(world.live_allocations(), before);
    CHECK_EQUAL(world.context_depth(), 0);
}

/* Last, because it fills the table. */
TEST(a_full_table_is_an_error_and_keeps_working)
{
    allocate_function last = NULL;
    size_t before = world.live_allocations();
    char name[MM_ALLOCATOR_NAME];
    mm_preset preset = {.read_mostly = true};
    unsigned made = 0;
    mm_status st;
    void *block;

    /* Sets of 2 devices and the host, with and without read mostly, for 5 places: more than 32. */
    for (unsigned i = 0; i < 80; i++) {
        static const CUmemLocation places[] = {
            {.type = (CUmemLocationType)0},
            {.type = CU_MEM_LOCATION_TYPE_HOST},
            {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
            {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1},
            {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = 0},
        };
        mm_preset other = {.preferred = places[i % 5],
                           .accessed_by =
                               (i / 5 % 4) | (mm_location_set)(i / 20 % 2) << MM_HOST_BIT,
                           .read_mostly = i / 40 % 2};
        if (mm_preset_register(world.cu, &other, name, &st) == 0) {
            made++;
            preset = other;
            last = functions[atoi(name + 20)];
        } else {
            CHECK_EQUAL(st.kind, MM_REFUSED);
            CHECK(strstr(st.detail, "32 allocators") != NULL);
        }
    }
    CHECK(made > 0 && made < 80);
    CHECK(function_of(&preset) == last);
    block = last(BLOCK, 0, NULL);
    check_advice(block, preset.preferred, preset.accessed_by, preset.read_mostly);
    managedmem_free(block, BLOCK, 0, NULL);
    CHECK_EQUAL(world.live_allocations(), before);
}

TEST_MAIN(world_open)
