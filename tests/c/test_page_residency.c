/* test_page_residency.c: the places of pages, from the page map and the driver's records or its
 * answers: byte for byte, with refusals of the driver and of the system, and on machines with
 * several NUMA nodes. */
#include <errno.h>
#include <stdbool.h>

#include "failing_allocations.h"
#include "fake_pagemap.h"
#include "memory/page_residency.h"
#include "world.h"

enum { BLOCK_PAGES = 512 };

static mm_places places; /* the answer of the last read_one() */
static mm_status st;

/* --- places ---------------------------------------------------------------------------------- */

static mm_range
part_of(const mm_memory *memory, size_t offset, size_t size)
{
    CHECK(offset + size <= memory->size);
    return (mm_range){memory->start + offset, size, atomic_load(&memory->allocation)};
}

static mm_range
pages_of(const mm_memory *memory, size_t first, size_t count)
{
    return part_of(memory, first * page_size(), count * page_size());
}

static void
store(mm_range range)
{
    memset((void *)(uintptr_t)range.start, 1, range.size);
}

static void
prefetch(mm_range range, int device)
{
    CUmemLocation location =
        device < 0 ? mm_host() : mm_location(CU_MEM_LOCATION_TYPE_DEVICE, device);

    CHECK_OK(mm_range_prefetch(world.cu, range, location, NULL, MM_DEFER_NO, &st), &st);
}

static int
read_one(mm_pagemap_source *source, mm_range range)
{
    mm_batch batch;

    mm_batch_one(&batch, range, mm_host());
    return mm_places_read(world.cu, source, &batch, &places, &st);
}

/* Runs of one range, with offsets and sizes in bytes; hint is the device, -1 the host, NONE
 * none. */
enum { NONE = -9 };

typedef struct {
    uint64_t size;
    mm_place place;
    int hint;
} expected_run;

static void
check_place(const mm_place_run *run, const expected_run *expected)
{
    bool to_device = expected->hint >= 0;

    CHECK_EQUAL(run->size, expected->size);
    CHECK_EQUAL(run->place, expected->place);
    CHECK_EQUAL(run->evidence, to_device ? MM_BY_PAGE_MAP_AND_PREFETCH : MM_BY_PAGE_MAP);
    CHECK_EQUAL(run->hint != 0, expected->hint != NONE);
    if (run->hint != 0) {
        CUmemLocation location = places.hint[run->hint - 1];
        CHECK_EQUAL(location.type,
                    to_device ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST);
        CHECK(!to_device || location.id == expected->hint);
    }
}

static void
check_places(mm_range range, const expected_run *expected, size_t count)
{
    uint64_t offset = 0, on_host = 0;

    CHECK_OK(read_one(&mm_kernel_pagemap, range), &st);
    CHECK_EQUAL(places.count, 1);
    CHECK_EQUAL(places.range[0].count, count);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(places.range[0].run[i].offset, offset);
        check_place(&places.range[0].run[i], &expected[i]);
        offset += expected[i].size;
        on_host += expected[i].place == MM_PLACE_HOST ? expected[i].size : 0;
    }
    CHECK_EQUAL(offset, range.size);
    CHECK_EQUAL(places.range[0].on_host, on_host);
    mm_places_free(&places);
}

#define CHECK_PLACES(range, ...)                               \
    check_places((range), (const expected_run[]){__VA_ARGS__}, \
                 sizeof((const expected_run[]){__VA_ARGS__}) / sizeof(expected_run))

TEST(places_follow_the_moves)
{
    mm_memory *m = world_allocate(64 * page_size());
    uint64_t page = page_size();

    CHECK_PLACES(pages_of(m, 0, 64), {64 * page, MM_PLACE_NOT_HOST, NONE});
    store(pages_of(m, 0, 64));
    CHECK_PLACES(pages_of(m, 0, 64), {64 * page, MM_PLACE_HOST, NONE});
    prefetch(pages_of(m, 16, 16), 0);
    prefetch(pages_of(m, 32, 16), 1);
    CHECK_PLACES(pages_of(m, 0, 64), {16 * page, MM_PLACE_HOST, NONE},
                 {16 * page, MM_PLACE_NOT_HOST, 0}, {16 * page, MM_PLACE_NOT_HOST, 1},
                 {16 * page, MM_PLACE_HOST, NONE});
    CHECK_PLACES(part_of(m, 16 * page - 1, 16 * page + 2), {1, MM_PLACE_HOST, NONE},
                 {16 * page, MM_PLACE_NOT_HOST, 0}, {1, MM_PLACE_NOT_HOST, 1});
    CHECK_PLACES(part_of(m, 20 * page + 5, 3), {3, MM_PLACE_NOT_HOST, 0});
    CHECK_PLACES(part_of(m, 48 * page - 1, 3), {1, MM_PLACE_NOT_HOST, 1},
                 {2, MM_PLACE_HOST, NONE});
    for (size_t first = 0; first < 64; first += 16) {
        prefetch(pages_of(m, first, 16), -1); /* of ranges that differ, drivers keep old records */
    }
    CHECK_PLACES(pages_of(m, 0, 64), {64 * page, MM_PLACE_HOST, NONE});
    CHECK_EQUAL(world.touch(m->start, 64 * page, 1, 1), 0);
    CHECK_PLACES(pages_of(m, 0, 64), {64 * page, MM_PLACE_NOT_HOST, -1});
    mm_memory_release(m);
}

/* Up to 1024 pages without a common answer are asked one by one; more of them in blocks. */
TEST(hints_of_large_ranges_are_those_of_blocks)
{
    size_t blocks = 8, count = blocks * BLOCK_PAGES, few = 1000;
    mm_memory *m = world_allocate((count + BLOCK_PAGES) * page_size());
    uint64_t page = page_size(), border = BLOCK_PAGES * page;
    size_t first = (size_t)((border - m->start % border) % border / page);
    mm_range range = pages_of(m, first, count);

    if (page != 4096) {
        mm_memory_release(m);
        return;
    }
    prefetch(pages_of(m, first, BLOCK_PAGES), 0);
    prefetch(pages_of(m, first + BLOCK_PAGES + 7, 3), 1); /* lost among pages without a prefetch */
    CHECK_PLACES(range, {BLOCK_PAGES * page, MM_PLACE_NOT_HOST, 0},
                 {(count - BLOCK_PAGES) * page, MM_PLACE_NOT_HOST, NONE});
    CHECK_PLACES(pages_of(m, first, few), {BLOCK_PAGES * page, MM_PLACE_NOT_HOST, 0},
                 {7 * page, MM_PLACE_NOT_HOST, NONE}, {3 * page, MM_PLACE_NOT_HOST, 1},
                 {(few - BLOCK_PAGES - 10) * page, MM_PLACE_NOT_HOST, NONE});
    mm_memory_release(m);
}

TEST(the_driver_is_asked_little)
{
    mm_memory *m = world_allocate(64 * page_size());

    store(pages_of(m, 0, 64));
    world.log_clear();
    world.fail("cuCtxGetCurrent", 1, 999, 0);
    CHECK_OK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 64)), &st);
    CHECK(!world.fail_fired()); /* all of it is mapped: not even a context is needed */
    world.fail_clear();
    mm_places_free(&places);
    CHECK_EQUAL(world.log_count(), 0);
    prefetch(pages_of(m, 8, 8), 0);
    prefetch(pages_of(m, 40, 8), 1);
    world.log_clear();
    CHECK_OK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 64)), &st);
    mm_places_free(&places);
    CHECK_EQUAL(world_calls("cuMemRangeGetAttributes"), 2);
    mm_memory_release(m);
}

TEST(failures_leave_nothing)
{
    mm_memory *m = world_allocate(64 * page_size());
    mm_pagemap_source source = fresh_source();
    int nth = 0, fired;

    prefetch(pages_of(m, 0, 20), 0);
    do {
        int rc;
        world.fail("cuMemRangeGetAttributes", (unsigned)++nth, 999, 0);
        rc = read_one(&source, pages_of(m, 0, 64));
        fired = world.fail_fired();
        world.fail_clear();
        CHECK_EQUAL(rc < 0, fired != 0);
        CHECK(rc == 0 || (st.kind == MM_DRIVER_CALL && st.code == 999));
        CHECK_EQUAL(fake.opened, fake.closed);
        CHECK_EQUAL(world.context_depth(), 0);
        mm_places_free(&places);
        CHECK(places.range == NULL && places.count == 0);
    } while (fired);
    CHECK(nth > 40); /* one for the range, one for its block, then page by page */
    source = fresh_source();
    fake.open_error = ENOENT;
    CHECK(read_one(&source, pages_of(m, 0, 64)) < 0);
    CHECK_EQUAL(st.kind, MM_SYSTEM_CALL);
    mm_places_free(&places);
    CHECK_OK(read_one(&source, part_of(m, 10, 0)), &st); /* needs no file */
    mm_places_free(&places);
    mm_memory_release(m);
}

TEST(failed_allocations_leave_nothing)
{
    mm_memory *m = world_allocate(64 * page_size());
    mm_pagemap_source source = fresh_source();
    bool failed = true;

    fake.nodes = "0-1\n";
    fake.move_pages = spread_pages;
    node_start = m->start;
    for (size_t i = 0; i < 64; i += 2) {
        store(pages_of(m, i, 1));
    }
    for (long nth = 1; failed; nth++) {
        long before = live_bytes();
        int rc;
        fail_allocation(nth);
        rc = read_one(&source, pages_of(m, 0, 64));
        failed = allocation_has_failed();
        CHECK_EQUAL(rc < 0, failed);
        CHECK(!failed || st.kind == MM_NO_MEMORY);
        mm_places_free(&places);
        CHECK_EQUAL(live_bytes(), before);
        CHECK_EQUAL(fake.opened, fake.closed);
        CHECK(failed || nth > 8); /* the list, spans and runs that grow, exact runs, nodes */
    }
    mm_memory_release(m);
}

/* --- drivers that say where pages are -------------------------------------------------------- */

enum { MOST_ANSWERS = 4096 };

/* Answers: answer i % count for page i of `start`; the nth call, from 0 on, has the code. */
static struct {
    CUdeviceptr start;
    CUmemLocation answer[8];
    size_t count, calls, nth;
    CUresult code;
} teller;

static CUresult CUDAAPI
tell(CUdeviceptr ptr, size_t size, size_t summary, size_t sampling, CUmemLocation *out)
{
    uint64_t page = page_size(), first = (ptr - teller.start) / page;

    CHECK(summary == sampling && summary == (size < page ? size : page));
    CHECK(ptr % page == 0 || ptr % page + size <= page);
    CHECK(size <= MOST_ANSWERS * page);
    if (teller.calls++ == teller.nth && teller.code != CUDA_SUCCESS) {
        return teller.code;
    }
    for (uint64_t i = 0; i < (size + summary - 1) / summary; i++) {
        out[i] = teller.answer[(first + i) % teller.count];
    }
    return CUDA_SUCCESS;
}

static void
prepare_teller(const mm_memory *memory, size_t nth, CUresult code)
{
    memset(&teller, 0, sizeof teller);
    teller.start = memory->start;
    teller.answer[0] = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 1);
    teller.count = 1;
    teller.nth = nth;
    teller.code = code;
    world.cu->MemGetLocationInfo = tell;
}

static void
check_answer(size_t i, uint64_t size, mm_place place, mm_place_evidence evidence)
{
    const mm_range_places *found = &places.range[0];

    CHECK(i < found->count);
    CHECK_EQUAL(found->run[i].size, size);
    CHECK_EQUAL(found->run[i].place, place);
    CHECK_EQUAL(found->run[i].evidence, evidence);
}

TEST(the_driver_tells_the_devices)
{
    mm_memory *m = world_allocate(64 * page_size());
    uint64_t page = page_size();

    world.cu->MemGetLocationInfo = world.locate;
    store(pages_of(m, 0, 32));
    prefetch(pages_of(m, 8, 8), 1);
    prefetch(pages_of(m, 16, 8), 0);
    world.log_clear();
    CHECK_OK(read_one(&mm_kernel_pagemap, part_of(m, 5, 63 * page)), &st);
    CHECK_EQUAL(places.range[0].count, 5);
    check_answer(0, 8 * page - 5, MM_PLACE_HOST, MM_BY_PAGE_MAP);
    check_answer(1, 8 * page, MM_PLACE_DEVICE, MM_BY_DRIVER);
    CHECK_EQUAL(places.hint[places.range[0].run[1].hint - 1].id, 1);
    check_answer(2, 8 * page, MM_PLACE_DEVICE, MM_BY_DRIVER);
    CHECK_EQUAL(places.hint[places.range[0].run[2].hint - 1].id, 0);
    check_answer(3, 8 * page, MM_PLACE_HOST, MM_BY_PAGE_MAP);
    check_answer(4, 31 * page + 5, MM_PLACE_NOWHERE, MM_BY_DRIVER);
    CHECK_EQUAL(places.range[0].on_host, 16 * page - 5);
    mm_places_free(&places);
    CHECK_EQUAL(world_calls("cuMemRangeGetAttributes"), 0);
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

/* Of a page on a device and on the host, the emulated driver names the device. */
TEST(a_copy_on_the_host_counts)
{
    mm_memory *m = world_allocate(8 * page_size());
    CUmemLocation told;
    mm_scope scope;

    store(pages_of(m, 0, 8));
    CHECK_OK(mm_range_advise(world.cu, pages_of(m, 0, 8), CU_MEM_ADVISE_SET_READ_MOSTLY, mm_host(),
                             &st),
             &st);
    prefetch(pages_of(m, 0, 8), 0);
    world.cu->MemGetLocationInfo = world.locate;
    CHECK_OK(mm_scope_enter(&scope, world.cu, MM_ANY_DEVICE, &st), &st);
    CHECK_EQUAL(world.locate(m->start, 1, 1, 1, &told), CUDA_SUCCESS);
    mm_scope_leave(&scope);
    CHECK_EQUAL(told.type, CU_MEM_LOCATION_TYPE_DEVICE);
    CHECK_OK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 8)), &st);
    CHECK_EQUAL(places.range[0].count, 1);
    check_answer(0, 8 * page_size(), MM_PLACE_HOST, MM_BY_PAGE_MAP);
    mm_places_free(&places);
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

TEST(each_type_of_location_has_a_place)
{
    static const struct {
        int type, id;
        mm_place place;
        int device;
    } rows[] = {
        {0, 7, MM_PLACE_NOWHERE, NONE},  {1, 0, MM_PLACE_DEVICE, 0},
        {1, 2, MM_PLACE_NOT_HOST, NONE}, {1, -1, MM_PLACE_NOT_HOST, NONE},
        {2, 7, MM_PLACE_HOST, NONE},     {3, 1, MM_PLACE_HOST, NONE},
        {4, 7, MM_PLACE_HOST, NONE},     {5, -2, MM_PLACE_NOT_HOST, NONE},
        {6, 0x101, MM_PLACE_DEVICE, 1},  {77, 0, MM_PLACE_NOT_HOST, NONE},
    };
    mm_memory *m = world_allocate(4 * page_size());

    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const mm_range_places *found;
        prepare_teller(m, 0, CUDA_SUCCESS);
        teller.answer[0] = mm_location((CUmemLocationType)rows[i].type, rows[i].id);
        CHECK_OK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 4)), &st);
        found = &places.range[0];
        CHECK_EQUAL(found->count, 1);
        check_answer(0, 4 * page_size(), rows[i].place, MM_BY_DRIVER);
        CHECK_EQUAL(found->run[0].hint != 0, rows[i].device != NONE);
        CHECK(rows[i].device == NONE || places.hint[0].id == rows[i].device);
        CHECK_EQUAL(found->on_host, rows[i].place == MM_PLACE_HOST ? 4 * page_size() : 0);
        mm_places_free(&places);
    }
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

TEST(answers_are_few_at_a_time)
{
    mm_memory *m = world_allocate(3 * MOST_ANSWERS * page_size());
    uint64_t page = page_size(), size = 3 * MOST_ANSWERS * page - 12;

    prepare_teller(m, 0, CUDA_SUCCESS);
    teller.answer[1] = mm_location(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    teller.answer[2] = teller.answer[0];
    teller.answer[3] = teller.answer[0];
    teller.count = 4;
    CHECK_OK(read_one(&mm_kernel_pagemap, part_of(m, 7, size)), &st);
    CHECK(teller.calls == 4 || teller.calls == 5); /* by the start's multiple of 16 MiB */
    CHECK_EQUAL(places.range[0].count, 3 * MOST_ANSWERS / 2 + 1);
    check_answer(0, page - 7, MM_PLACE_DEVICE, MM_BY_DRIVER);
    check_answer(1, page, MM_PLACE_DEVICE, MM_BY_DRIVER);
    check_answer(2, 3 * page, MM_PLACE_DEVICE, MM_BY_DRIVER);
    mm_places_free(&places);
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

TEST(a_driver_without_support_is_an_older_one)
{
    mm_memory *m = world_allocate(64 * page_size());
    uint64_t page = page_size();

    store(pages_of(m, 8, 8));
    prefetch(pages_of(m, 16, 48), 1);
    for (size_t nth = 0; nth < 2; nth++) {
        prepare_teller(m, nth, CUDA_ERROR_NOT_SUPPORTED);
        CHECK_OK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 64)), &st);
        CHECK_EQUAL(teller.calls, nth + 1); /* it is not asked again */
        CHECK_EQUAL(places.range[0].count, 3);
        check_answer(0, 8 * page, nth == 0 ? MM_PLACE_NOT_HOST : MM_PLACE_DEVICE,
                     nth == 0 ? MM_BY_PAGE_MAP : MM_BY_DRIVER);
        check_answer(1, 8 * page, MM_PLACE_HOST, MM_BY_PAGE_MAP);
        check_answer(2, 48 * page, MM_PLACE_NOT_HOST, MM_BY_PAGE_MAP_AND_PREFETCH);
        mm_places_free(&places);
    }
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

/* Where the host maps pages of devices, only the driver is asked. */
TEST(coherent_machines_need_the_driver)
{
    mm_memory *m = world_allocate(8 * page_size());
    mm_pagemap_source source = fresh_source();

    fake.nodes = "0-1\n";
    store(pages_of(m, 0, 8));
    world.cu->direct_host_access = true;
    prepare_teller(m, 0, CUDA_SUCCESS);
    teller.answer[1] = mm_host();
    teller.count = 2;
    CHECK_OK(read_one(&source, pages_of(m, 0, 8)), &st);
    CHECK_EQUAL(fake.opened, 0);
    CHECK_EQUAL(places.range[0].count, 8);
    check_answer(0, page_size(), MM_PLACE_DEVICE, MM_BY_DRIVER);
    check_answer(1, page_size(), MM_PLACE_HOST, MM_BY_DRIVER);
    CHECK_EQUAL(places.range[0].on_host, 4 * page_size());
    CHECK(places.range[0].node_bytes == NULL);
    mm_places_free(&places);
    prepare_teller(m, 0, CUDA_ERROR_NOT_SUPPORTED);
    CHECK(read_one(&source, pages_of(m, 0, 8)) < 0);
    CHECK_EQUAL(st.kind, MM_UNSUPPORTED);
    CHECK(strstr(st.detail, "direct_managed_mem_access_from_host") != NULL);
    CHECK_EQUAL(world.context_depth(), 0);
    mm_places_free(&places);
    world.cu->direct_host_access = false;
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

TEST(failed_answers_leave_nothing)
{
    mm_memory *m = world_allocate(64 * page_size());
    mm_pagemap_source source = fresh_source();
    mm_range range = part_of(m, 9, 50 * page_size());
    int nth = 0, fired;

    store(pages_of(m, 20, 4));
    world.cu->MemGetLocationInfo = world.locate;
    do {
        int rc;
        world.fail("*", (unsigned)++nth, 999, 0);
        rc = read_one(&source, range);
        fired = world.fail_fired();
        world.fail_clear();
        CHECK(rc == 0 || fired != 0);
        CHECK(rc == 0 || (st.kind == MM_DRIVER_CALL && st.code == 999));
        CHECK_EQUAL(fake.opened, fake.closed);
        CHECK_EQUAL(world.context_depth(), 0);
        mm_places_free(&places);
    } while (fired);
    CHECK(nth > 3); /* the inside of a page, the pages before those on the host, and behind them */
    for (size_t call = 0; call < 3; call++) {
        prepare_teller(m, call, CUDA_ERROR_INVALID_VALUE);
        CHECK(read_one(&source, range) < 0);
        CHECK(st.kind == MM_DRIVER_CALL && strcmp(st.function, "cuMemGetLocationInfo") == 0);
        mm_places_free(&places);
    }
    for (long allocation = 1, failed = 1; failed; allocation++) {
        long before = live_bytes();
        int rc;
        world.cu->MemGetLocationInfo = world.locate;
        fail_allocation(allocation);
        rc = read_one(&source, range);
        failed = allocation_has_failed();
        CHECK_EQUAL(rc < 0, failed != 0);
        CHECK(!failed || st.kind == MM_NO_MEMORY);
        mm_places_free(&places);
        CHECK_EQUAL(live_bytes(), before);
        CHECK(failed || allocation > 3); /* the list, the answers, the spans, the runs */
    }
    world.cu->MemGetLocationInfo = NULL;
    mm_memory_release(m);
}

/* Devices whose first `pageable_devices` reach system memory; -1: the query fails. */
static int pageable_devices;

static CUresult CUDAAPI
get_pageable(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CHECK_EQUAL(attribute, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS);
    *value = device < pageable_devices;
    return pageable_devices < 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

TEST(system_memory_needs_the_call_and_devices_that_reach_it)
{
    static const struct {
        bool tells;
        int pageable;
        mm_kind kind;
    } rows[] = {
        {false, 2, MM_NOT_MANAGED}, {true, -1, MM_DRIVER_CALL}, {true, 0, MM_NOT_MANAGED},
        {true, 1, MM_NOT_MANAGED},  {true, 2, MM_OK},
    };
    PFN_cuDeviceGetAttribute_v2000 attribute = world.cu->DeviceGetAttribute;
    char bytes[100] = {0};
    mm_range range = {(CUdeviceptr)(uintptr_t)bytes, sizeof bytes, 0};

    world.cu->DeviceGetAttribute = get_pageable;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        st.kind = MM_OK;
        pageable_devices = rows[i].pageable;
        world.cu->MemGetLocationInfo = rows[i].tells ? tell : NULL;
        CHECK_EQUAL(mm_range_check(world.cu, &range, MM_LOCATE, &st),
                    rows[i].kind == MM_OK ? 0 : -1);
        CHECK_EQUAL(st.kind, rows[i].kind);
        CHECK_EQUAL(range.allocation, 0);
    }
    world.cu->DeviceGetAttribute = attribute;
    world.cu->MemGetLocationInfo = NULL;
}

/* --- systems --------------------------------------------------------------------------------- */

TEST(systems_whose_page_map_says_nothing_are_refused)
{
    mm_memory *m = world_allocate(page_size());

    world.cu->concurrent_access = false;
    CHECK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 1)) < 0);
    CHECK_EQUAL(st.kind, MM_UNSUPPORTED);
    CHECK(strstr(st.detail, "concurrent_managed_access") != NULL);
    mm_places_free(&places);
    world.cu->concurrent_access = true;
    world.cu->direct_host_access = true;
    CHECK(read_one(&mm_kernel_pagemap, pages_of(m, 0, 1)) < 0);
    CHECK_EQUAL(st.kind, MM_UNSUPPORTED);
    CHECK(strstr(st.detail, "direct_managed_mem_access_from_host") != NULL);
    mm_places_free(&places);
    world.cu->direct_host_access = false;
    mm_memory_release(m);
}

TEST(places_have_the_bytes_of_nodes)
{
    mm_memory *m = world_allocate(64 * page_size());
    mm_pagemap_source source = fresh_source();
    uint64_t page = page_size(), sum = 0;

    fake.nodes = "0-2\n";
    fake.move_pages = spread_pages;
    node_start = m->start;
    store(pages_of(m, 0, 32));
    CHECK_OK(read_one(&source, part_of(m, 10, 64 * page - 20)), &st);
    for (int node = 0; node < MM_MOST_NODES; node++) {
        sum += places.range[0].node_bytes[node];
    }
    CHECK_EQUAL(places.range[0].on_host, 32 * page - 10);
    CHECK_EQUAL(places.range[0].node_bytes[0], 8 * page); /* 3 6 9 12 18 21 24 27 */
    CHECK_EQUAL(sum, 25 * page); /* without 0 5 10 15 20 25 30 */
    mm_places_free(&places);
    fake.move_pages = refuse_to_tell;
    CHECK_OK(read_one(&source, pages_of(m, 0, 64)), &st);
    CHECK(places.range[0].node_bytes == NULL);
    mm_places_free(&places);
    mm_memory_release(m);
}

static void
set_up(const char *path)
{
    world_open(path);
    world.schedule(0);
}

TEST_MAIN(set_up)
