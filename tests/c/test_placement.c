/* test_placement.c: the places of parts in one piece of memory, against a search through all
 * offsets. */
#include "working/placement.h"

#include <string.h>

#include "check.h"
#include "failing_allocations.h"
#include "random_numbers.h"

enum { UNIT = MM_PART_ALIGNMENT, PARTS = 20, STEPS = 400, RUNS = 60 };

static mm_placement placement;
static mm_place places[PARTS];
static mm_status st;

static void
begin(size_t room, size_t most)
{
    placement = (mm_placement){.room = room};
    memset(places, 0, sizeof places);
    CHECK_OK(mm_placement_reserve(&placement, PARTS, &st), &st);
    for (int i = 0; i < PARTS; i++) {
        places[i].bytes = 1 + random_below((uint32_t)most);
    }
}

/* --- the model ---------------------------------------------------------------------------- */

static size_t
end_of(const mm_place *place)
{
    return (place->offset + place->bytes + UNIT - 1) / UNIT * UNIT;
}

static bool
meet(const mm_place *place, size_t offset, size_t bytes)
{
    return place->present && place->offset < offset + bytes && offset < end_of(place);
}

/* What goes for some bytes: it is better if the nearest next use is later; then if the most heat
 * is less; then if it has fewer bytes. */
typedef struct {
    bool allowed;
    uint32_t distance;
    double heat;
    size_t bytes;
} loss;

static loss
loss_of(size_t offset, size_t bytes, uint32_t least)
{
    loss found = {.allowed = offset + bytes <= placement.room, .distance = MM_UNEXPECTED};

    for (int i = 0; i < PARTS; i++) {
        if (meet(&places[i], offset, bytes)) {
            found.allowed = found.allowed && !places[i].fixed && places[i].distance >= least;
            found.distance =
                places[i].distance < found.distance ? places[i].distance : found.distance;
            found.heat = places[i].heat > found.heat ? places[i].heat : found.heat;
            found.bytes += places[i].bytes;
        }
    }
    return found;
}

static bool
is_better(const loss *a, const loss *b)
{
    if (a->allowed != b->allowed) {
        return a->allowed;
    }
    if (a->distance != b->distance) {
        return a->distance > b->distance;
    }
    return a->heat != b->heat ? a->heat < b->heat : a->bytes < b->bytes;
}

static void
check_order(void)
{
    size_t end = 0, present = 0;

    for (size_t i = 0; i < placement.count; i++) {
        const mm_place *place = &places[placement.present[i]];
        CHECK(place->present);
        CHECK_EQUAL(place->offset % UNIT, 0);
        CHECK(place->offset >= end);
        end = end_of(place);
        CHECK(place->offset + place->bytes <= placement.room);
    }
    for (int i = 0; i < PARTS; i++) {
        present += places[i].present;
    }
    CHECK_EQUAL(placement.count, present);
}

/* --- random parts ------------------------------------------------------------------------- */

static void
change_expectations(void)
{
    for (int i = 0; i < PARTS; i++) {
        places[i].distance = random_below(4) == 0 ? MM_UNEXPECTED : random_below(12);
        places[i].fixed = places[i].present && random_below(6) == 0;
    }
}

static void
take_all(size_t offset, size_t bytes)
{
    bool met[PARTS];
    uint32_t part;

    for (int i = 0; i < PARTS; i++) {
        met[i] = meet(&places[i], offset, bytes);
    }
    while ((part = mm_placement_take(&placement, places, offset, bytes)) != MM_UNEXPECTED) {
        CHECK(met[part] && !places[part].present && !places[part].fixed);
        met[part] = false;
    }
    for (int i = 0; i < PARTS; i++) {
        CHECK(!met[i]);
    }
}

/* The place that is found is the best one of all. */
static void
place_one(uint32_t part, uint64_t turn)
{
    const size_t bytes = places[part].bytes;
    const uint32_t least = random_below(3) == 0 ? random_below(12) : 0;
    loss best = loss_of(0, bytes, least), mine;
    size_t offset = 0;
    bool found;

    for (size_t start = UNIT; start < placement.room; start += UNIT) {
        loss other = loss_of(start, bytes, least);
        best = is_better(&other, &best) ? other : best;
    }
    found = mm_placement_find(&placement, places, bytes, least, &offset);
    CHECK_EQUAL(found, best.allowed);
    if (found) {
        mine = loss_of(offset, bytes, least);
        CHECK(mine.allowed && !is_better(&best, &mine));
        take_all(offset, bytes);
        mm_placement_put(&placement, places, part, offset);
        places[part].heat = turn;
    }
}

TEST(random_parts_take_the_best_place)
{
    for (uint64_t run = 0; run < RUNS; run++) {
        seed = run + 1;
        begin(UNIT + random_below(30 * UNIT), run % 2 == 0 ? 6 * UNIT : UNIT + 1);
        for (uint32_t step = 0; step < STEPS; step++) {
            uint32_t part = random_below(PARTS);
            change_expectations();
            if (!places[part].present) {
                place_one(part, step);
            } else if (!places[part].fixed && random_below(4) == 0) {
                take_all(places[part].offset, places[part].bytes);
                CHECK(!places[part].present);
            }
            check_order();
        }
        mm_placement_free(&placement);
    }
}

/* --- single cases -------------------------------------------------------------------------- */

static void
put_two(void)
{
    begin(4 * UNIT, 1);
    places[0].bytes = places[1].bytes = 2 * UNIT;
    mm_placement_put(&placement, places, 0, 0);
    mm_placement_put(&placement, places, 1, (size_t)2 * UNIT);
}

TEST(the_farthest_goes_first)
{
    for (uint32_t farthest = 0; farthest < 2; farthest++) {
        size_t offset = 99;
        put_two();
        places[farthest].distance = 5;
        places[1 - farthest].distance = 3;
        CHECK(mm_placement_find(&placement, places, UNIT, 0, &offset));
        CHECK_EQUAL(offset, places[farthest].offset);
        CHECK(!mm_placement_find(&placement, places, UNIT, 6, &offset));
        mm_placement_free(&placement);
    }
}

TEST(of_parts_that_are_not_expected_the_ccoldest_goes_first)
{
    for (uint32_t coldest = 0; coldest < 2; coldest++) {
        size_t offset = 99;
        put_two();
        places[0].distance = places[1].distance = MM_UNEXPECTED;
        places[coldest].heat = 4;
        places[1 - coldest].heat = 7;
        CHECK(mm_placement_find(&placement, places, UNIT, MM_UNEXPECTED, &offset));
        CHECK_EQUAL(offset, places[coldest].offset);
        mm_placement_free(&placement);
    }
}

TEST(fixed_parts_stay)
{
    size_t offset = 99;

    put_two();
    places[0].fixed = true;
    CHECK(!mm_placement_find(&placement, places, (size_t)3 * UNIT, 0, &offset));
    CHECK(mm_placement_find(&placement, places, (size_t)2 * UNIT, 0, &offset));
    CHECK_EQUAL(offset, 2 * UNIT);
    places[1].fixed = true;
    CHECK(!mm_placement_find(&placement, places, 1, 0, &offset));
    mm_placement_free(&placement);
}

TEST(sizes_at_the_limits)
{
    size_t offset = 99;

    begin(3 * UNIT + 1, 1);
    CHECK(mm_placement_find(&placement, places, 3 * UNIT + 1, 0, &offset));
    CHECK_EQUAL(offset, 0);
    CHECK(!mm_placement_find(&placement, places, 3 * UNIT + 2, 0, &offset));
    CHECK(!mm_placement_find(&placement, places, SIZE_MAX, 0, &offset));
    places[0].bytes = 3 * UNIT + 1; /* ends behind the room once it is rounded */
    mm_placement_put(&placement, places, 0, 0);
    places[0].fixed = true;
    CHECK(!mm_placement_find(&placement, places, 1, 0, &offset));
    CHECK_EQUAL(mm_placement_take(&placement, places, (size_t)4 * UNIT, 1), MM_UNEXPECTED);
    mm_placement_free(&placement);
}

TEST(a_reservation_may_fail)
{
    placement = (mm_placement){.room = UNIT};
    fail_allocation(1);
    CHECK_EQUAL(mm_placement_reserve(&placement, PARTS, &st), -1);
    CHECK(allocation_has_failed());
    CHECK_EQUAL(st.kind, MM_NO_MEMORY);
    fail_allocation(0);
    CHECK_OK(mm_placement_reserve(&placement, PARTS, &st), &st);
    fail_allocation(1);
    CHECK_EQUAL(mm_placement_reserve(&placement, 100 * PARTS, &st), -1);
    CHECK(placement.capacity >= PARTS && placement.present != NULL);
    fail_allocation(0);
    mm_placement_free(&placement);
}

TEST_MAIN(no_driver)
