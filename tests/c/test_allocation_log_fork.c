/* test_allocation_log_fork.c: children that are forked while threads change the list of entries.
 *
 * The threads and the children do not allocate: a child of a process with threads must not wait
 * for the lock of a sanitizer's malloc. */
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "memory/allocation_log.h"

enum { WORKERS = 4, FORKS = 60 };

static atomic_bool forks_done;

static void *
die_and_resume(void *argument)
{
    mm_allocation_entry *entries = argument;
    static atomic_int joined;
    mm_allocation_entry *entry = &entries[atomic_fetch_add(&joined, 1)];
    char text[MM_NAME_BYTES + 1];

    mm_allocation_entry_add(entry, 4096, 100);
    while (!atomic_load(&forks_done)) {
        CHECK(!mm_allocation_entry_read_name(entry, text));
        mm_allocation_entry_end(entry);
        mm_allocation_entry_resume(entry);
    }
    mm_allocation_entry_end(entry);
    return NULL;
}

/* The number of entries before this one, which is the last; -1 if the list is broken. */
static int
count_before(const mm_allocation_entry *last)
{
    int count = 0;

    for (const mm_allocation_entry *l = last; l->previous != NULL; l = l->previous) {
        if (l->previous->next != l) {
            return -1;
        }
        count++;
    }
    return count;
}

/* The list is whole, the lock is free, and the parent's log does not run. */
static int
use_list_in_child(size_t dead)
{
    size_t before = mm_allocation_log_count();
    mm_allocation_entry entry = {0};
    char text[MM_NAME_BYTES + 1];
    mm_status st;

    if (mm_allocations_are_logged()) {
        return 1;
    }
    mm_allocation_entry_add(&entry, 4096, 100);
    if (mm_allocation_log_count() != before + 1 || mm_allocation_entry_read_name(&entry, text)
        || count_before(&entry) != (int)before) {
        return 2;
    }
    mm_allocation_entry_end(&entry);
    mm_allocation_log_stop();
    if (mm_allocation_log_count() != before || mm_allocation_log_start(SIZE_MAX, &st) < 0) {
        return 3;
    }
    return mm_allocation_log_count() <= before - dead ? 0 : 4;
}

static void
fork_once(bool logged)
{
    mm_allocation_entry entry = {0};
    mm_status st;
    int status = 0;
    pid_t child;

    if (logged) {
        CHECK_OK(mm_allocation_log_start(SIZE_MAX, &st), &st);
        mm_allocation_entry_add(&entry, 4096, 100);
        mm_allocation_entry_end(&entry);
    }
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        (void)alarm(10);
        _exit(use_list_in_child(logged));
    }
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(WIFSIGNALED(status) ? WTERMSIG(status) : 0, 0);
    CHECK_EQUAL(WEXITSTATUS(status), 0);
    CHECK_EQUAL(mm_allocations_are_logged(), logged);
    mm_allocation_log_stop();
}

TEST(a_child_finds_the_list_whole)
{
    static mm_allocation_entry entries[WORKERS];
    pthread_t threads[WORKERS];
    mm_status st;

    for (int i = 0; i < WORKERS; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, die_and_resume, entries), 0);
    }
    for (int i = 0; i < FORKS; i++) {
        fork_once(i % 2 == 0);
    }
    atomic_store(&forks_done, true);
    for (int i = 0; i < WORKERS; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
    CHECK_OK(mm_allocation_log_start(SIZE_MAX, &st), &st);
    CHECK_EQUAL(mm_allocation_log_count(), 0);
    mm_allocation_log_stop();
}

TEST_MAIN(no_driver)
