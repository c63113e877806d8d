/* test_memory.c: the guard word, closing and freeing under many threads and after a fork, allocations
 * that the driver does not align, and notes of leaks. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "memory/allocation.h"
#include "memory/leaks.h"
#include "world.h"

enum { ROUNDS = 200, WORKERS = 4, PAGE_COUNT = 4 };

TEST(a_reopened_guard_can_be_closed_again)
{
    mm_guard g = {0};

    CHECK_EQUAL(mm_guard_close(&g, false), MM_CLOSED_NOW);
    CHECK(!mm_guard_enter(&g));
    mm_guard_reopen(&g);
    CHECK(!mm_guard_is_closed(&g));
    CHECK(mm_guard_export(&g));
    CHECK_EQUAL(mm_guard_close(&g, false), MM_STILL_EXPORTED);
    mm_guard_unexport(&g);
    CHECK_EQUAL(mm_guard_close(&g, false), MM_CLOSED_NOW);
}

/* Otherwise a child would wait for ever for a thread that only its parent has. */
TEST(forked_child_does_not_wait)
{
    mm_guard g = {0};

    CHECK(mm_guard_enter(&g));
    CHECK_EQUAL(mm_guard_close(&g, true), MM_CLOSED_NOW);
    CHECK(mm_guard_is_closed(&g));
    mm_guard_leave(&g);
}

#ifndef NDEBUG
static void *
enter_nothing(void *argument)
{
    (void)argument;
    CHECK_EQUAL(mm_guards_entered(), 0);
    return NULL;
}

/* mm_guards_entered() counts the calls of the own thread, and not exports. */
TEST(guards_count_the_calls_of_a_thread)
{
    enum { MANY = 100 };
    mm_guard many[MANY] = {{0}};

    CHECK_EQUAL(mm_guards_entered(), 0);
    for (int i = 0; i < MANY; i++) {
        CHECK(mm_guard_enter(&many[i]));
        CHECK(mm_guard_export(&many[i]));
        CHECK_EQUAL(mm_guards_entered(), i + 1);
    }
    check_threads(1, enter_nothing, NULL);
    for (int i = 0; i < MANY; i++) {
        mm_guard_leave(&many[(i * 37) % MANY]);
        mm_guard_unexport(&many[i]);
    }
    CHECK_EQUAL(mm_guards_entered(), 0);
    CHECK_EQUAL(mm_guard_close(&many[0], false), MM_CLOSED_NOW);
    CHECK(!mm_guard_enter(&many[0]));
    CHECK_EQUAL(mm_guards_entered(), 0);
}

/* Runs work in a child. Returns the signal that ended it, or 0. */
static int
signal_of_child(void (*work)(mm_guard *), mm_guard *g)
{
    int status = 0;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        (void)alarm(20);
        (void)signal(SIGABRT, SIG_DFL);
        (void)freopen("/dev/null", "w", stderr);
        work(g);
        _exit(0);
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void
close_while_in(mm_guard *g)
{
    CHECK(mm_guard_enter(g));
    (void)mm_guard_close(g, false);
}

static void
close_another(mm_guard *g)
{
    mm_guard other = {0};

    CHECK(mm_guard_enter(&other));
    CHECK_EQUAL(mm_guard_close(g, false), MM_CLOSED_NOW);
    mm_guard_leave(&other);
}

/* Without the assertion, the thread would wait for itself for ever. */
TEST(closing_an_entered_guard_aborts)
{
    mm_guard g = {0};

    CHECK_EQUAL(signal_of_child(close_while_in, &g), SIGABRT);
    CHECK_EQUAL(signal_of_child(close_another, &g), 0);
}
#endif

/* What the guard protects: written only by the closer, read only by those inside. A guard that let
 * both in would be a data race, which ThreadSanitizer reports, or a failed check. */
typedef struct {
    mm_guard guard;
    int resource; /* 1 until freed */
    atomic_int closers;
    atomic_int entries;
} shared;

static void *
use_and_close(void *argument)
{
    shared *s = argument;

    while (mm_guard_enter(&s->guard)) {
        CHECK_EQUAL(s->resource, 1);
        mm_guard_leave(&s->guard);
        if (mm_guard_export(&s->guard)) {
            CHECK_EQUAL(s->resource, 1);
            mm_guard_unexport(&s->guard);
        }
        if (atomic_fetch_add(&s->entries, 1) > 40
            && mm_guard_close(&s->guard, false) == MM_CLOSED_NOW) {
            s->resource = 0;
            (void)atomic_fetch_add(&s->closers, 1);
        }
    }
    return NULL;
}

TEST(guard_lets_one_close_after_all_left)
{
    for (int round = 0; round < ROUNDS; round++) {
        shared s = {.resource = 1};

        check_threads(WORKERS, use_and_close, &s);
        CHECK_EQUAL(atomic_load(&s.closers), 1);
        CHECK_EQUAL(s.resource, 0);
    }
}

/* Views in several threads: each is used, then releases its hold while others still enter. Wrapped
 * memory ends with the last hold, so no thread may be inside at that time. */
typedef struct {
    mm_memory *memory;
    int alive; /* written by the thread that retires, read inside the guard */
} viewed;

static void *
use_and_release_hold(void *argument)
{
    viewed *v = argument;

    for (int i = 0; i < 20 && mm_guard_enter(&v->memory->guard); i++) {
        CHECK_EQUAL(v->alive, 1);
        mm_guard_leave(&v->memory->guard);
    }
    if (mm_memory_release_hold(v->memory)) {
        mm_memory_retire(v->memory);
        v->alive = 0;
    }
    while (mm_guard_enter(&v->memory->guard)) {
        CHECK_EQUAL(v->alive, 1);
        mm_guard_leave(&v->memory->guard);
    }
    return NULL;
}

TEST(the_last_of_many_holds_waits_for_calls)
{
    for (int round = 0; round < ROUNDS; round++) {
        mm_status st;
        viewed v = {mm_memory_wrap(4096, 100, &st), 1};

        CHECK(v.memory != NULL);
        for (int i = 1; i < WORKERS; i++) {
            mm_memory_retain(v.memory);
        }
        check_threads(WORKERS, use_and_release_hold, &v);
        CHECK_EQUAL(v.alive, 0);
        for (int i = 0; i < WORKERS; i++) {
            mm_memory_release_reference(v.memory);
        }
    }
}

typedef struct {
    mm_memory *memory;
    atomic_int uses;
    atomic_int closings;
} shared_memory;

static void *
prefetch_until_closed(void *argument)
{
    shared_memory *s = argument;
    mm_memory *m = s->memory;
    mm_status st;

    mm_memory_retain(m);
    while (mm_guard_enter(&m->guard)) {
        mm_range range = {.start = m->start, .size = m->size};
        bool first;

        CHECK_OK(mm_range_prefetch(world.cu, range, mm_host(), NULL, MM_DEFER_NO, &st), &st);
        mm_guard_leave(&m->guard);
        if (atomic_fetch_add(&s->uses, 1) > 20) {
            CHECK_OK(mm_memory_close(m, NULL, &first, &st), &st);
            (void)atomic_fetch_add(&s->closings, first);
        }
    }
    mm_memory_release(m);
    return NULL;
}

TEST(close_races_prefetch)
{
    size_t before = world.live_allocations();

    for (int round = 0; round < ROUNDS / 4; round++) {
        shared_memory s = {.memory = world_allocate(PAGE_COUNT * mm_page_size())};

        check_threads(WORKERS, prefetch_until_closed, &s);
        CHECK_EQUAL(atomic_load(&s.closings), 1);
        mm_memory_release(s.memory);
        CHECK_EQUAL(world.live_allocations(), before);
    }
}

static void *
drop_reference(void *argument)
{
    mm_memory_release(argument);
    return NULL;
}

TEST(last_reference_goes_in_any_thread)
{
    size_t before = world.live_allocations();

    for (int round = 0; round < ROUNDS; round++) {
        mm_memory *m = world_allocate(100);

        for (int i = 1; i < WORKERS; i++) {
            mm_memory_retain(m);
        }
        check_threads(WORKERS, drop_reference, m);
        CHECK_EQUAL(world.live_allocations(), before);
    }
}

static void *
use_everything(void *unused)
{
    mm_memory *m = world_allocate(PAGE_COUNT * mm_page_size());
    mm_range range = {.start = m->start, .size = m->size};
    CUmemLocation location;
    mm_batch batch;
    mm_status st;

    CHECK_OK(mm_range_check(world.cu, &range, MM_DISCARD, &st), &st);
    CHECK_OK(mm_range_prefetch(world.cu, range, mm_location_from_bit(0), NULL, MM_DEFER_YES, &st),
             &st);
    CHECK_OK(mm_range_last_prefetch(world.cu, range, &location, &st), &st);
    CHECK(mm_same_location(location, mm_location_from_bit(0)));
    mm_batch_one(&batch, range, mm_host());
    /* On the legacy stream, so that all threads want the same stand-in stream at once. */
    CHECK_OK(world_run(world.cu, MM_DISCARD, &batch, NULL, MM_DISPATCH_AUTO, &st), &st);
    CHECK_EQUAL(world.context_depth(), 0);
    mm_memory_release(m);
    return unused;
}

TEST(threads_share_contexts_and_streams)
{
    size_t before = world.live_allocations();

    check_threads(WORKERS, use_everything, NULL);
    CHECK_EQUAL(world.live_allocations(), before);
    /* Threads that lost the race for the stand-in destroyed theirs. */
    CHECK_EQUAL(world.live_streams(), 1);
}

/* --- drivers that do not align allocations to pages ----------------------------------------- */

enum { SHIFT = 512 };

static size_t allocated_size; /* bytes of the latest allocation */

static CUresult CUDAAPI
allocate_shifted(CUdeviceptr *start, size_t size, unsigned int flags)
{
    CUresult code = world.cu->MemAllocManaged(start, size + SHIFT, flags);

    *start += SHIFT;
    allocated_size = size;
    return code;
}

static CUresult CUDAAPI
free_shifted(CUdeviceptr start)
{
    return world.cu->MemFree(start - SHIFT);
}

TEST(unaligned_allocations_get_whole_pages)
{
    const size_t page = mm_page_size();
    const size_t sizes[] = {1, page - 1, page, page + 1, 3 * page + 100, (size_t)1 << 20};
    size_t live = world.live_allocations();
    mm_driver cu = *world.cu;
    CUdeviceptr start, allocation = 0;
    mm_status st;

    cu.MemAllocManaged = allocate_shifted;
    cu.MemFree = free_shifted;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t whole = (sizes[i] + page - 1) / page * page;
        start = mm_allocate_pages(&cu, sizes[i], CU_MEM_ATTACH_GLOBAL, &allocation, &st);
        CHECK(start != 0);
        CHECK_EQUAL(start % page, 0);
        CHECK(start >= allocation && start + whole <= allocation + allocated_size);
        CHECK_EQUAL(world.live_allocations(), live + 1);
        CHECK_OK(mm_free(&cu, allocation, &st), &st);
        CHECK_EQUAL(world.live_allocations(), live);
    }
    world.fail("cuMemAllocManaged", 2, CUDA_ERROR_OUT_OF_MEMORY, 0);
    CHECK_EQUAL(mm_allocate_pages(&cu, 1, CU_MEM_ATTACH_GLOBAL, &allocation, &st), 0);
    CHECK_EQUAL(st.code, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQUAL(world.live_allocations(), live);
    world.fail_clear();
}

static size_t
count_and_free_notes(void)
{
    size_t count = 0;

    for (mm_leak *leak = mm_leaks_take(), *next; leak != NULL; leak = next, count++) {
        next = leak->next;
        free(leak);
    }
    return count;
}

TEST(notes_of_leaks_are_bounded)
{
    enum { MOST_NOTES = 256 };

    (void)count_and_free_notes();
    for (int i = 0; i < MOST_NOTES + 10; i++) {
        mm_leak_note(CUDA_ERROR_UNKNOWN, "cuMemFree", 1);
    }
    CHECK_EQUAL(count_and_free_notes(), MOST_NOTES);
    mm_leak_note(CUDA_ERROR_UNKNOWN, "cuMemFree", 1); /* there is room again */
    CHECK_EQUAL(count_and_free_notes(), 1);
    CHECK(!mm_leaks_are_known());
}

TEST_MAIN(world_open)
