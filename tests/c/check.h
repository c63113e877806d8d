/* check.h: the whole test framework of the C unit tests: checks, tests, threads.
 *
 * Usage of every program: test_NAME PATH_OF_THE_EMULATED_DRIVER, which must have two devices. */
#ifndef CHECK_H
#define CHECK_H

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            (void)fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

#define CHECK_EQUAL(actual, expected)                                                           \
    do {                                                                                        \
        long long actual_ = (long long)(actual), expected_ = (long long)(expected);             \
        if (actual_ != expected_) {                                                             \
            (void)fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #actual, \
                          actual_, expected_);                                                  \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

/* A call that must succeed; prints what the status says when it does not. */
#define CHECK_OK(call, st)                                                                       \
    do {                                                                                         \
        if ((call) != 0) {                                                                       \
            (void)fprintf(stderr, "%s:%d: %s: kind %d, code %d of %s, %s\n", __FILE__, __LINE__, \
                          #call, (int)(st)->kind, (st)->code,                                    \
                          (st)->function ? (st)->function : "no call", (st)->detail);            \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

typedef struct check_test {
    const char *name;
    void (*run)(void);
    int line;
    struct check_test *next;
} check_test;

static check_test *check_tests; /* in the order of their lines */

static inline void
check_add(check_test *test)
{
    check_test **at = &check_tests;

    while (*at != NULL && (*at)->line < test->line) {
        at = &(*at)->next;
    }
    test->next = *at;
    *at = test;
}

/* TEST(name) { ... } is a test, which adds itself before main begins. */
#define TEST(name)                                              \
    static void name(void);                                     \
    __attribute__((constructor)) static void add_##name(void)   \
    {                                                           \
        static check_test test = {#name, name, __LINE__, NULL}; \
        check_add(&test);                                       \
    }                                                           \
    static void name(void)

/* Runs the tests in the order of the file; the first failed check ends the process with status 1. */
static inline int
check_run(void)
{
    for (const check_test *test = check_tests; test != NULL; test = test->next) {
        test->run();
        (void)printf("ok %s\n", test->name);
        (void)fflush(stdout);
    }
    return 0;
}

/* The main function of a program, which runs its tests after set_up(path of the emulated driver). */
#define TEST_MAIN(set_up)           \
    int main(int argc, char **argv) \
    {                               \
        CHECK_EQUAL(argc, 2);       \
        set_up(argv[1]);            \
        return check_run();         \
    }

/* The set-up of tests that use no driver. */
static inline void
no_driver(const char *path)
{
    (void)path;
}

enum { CHECK_MAX_THREADS = 8 };

/* Runs work(argument) in so many threads at once and waits for all of them. */
static inline void
check_threads(size_t count, void *(*work)(void *), void *argument)
{
    pthread_t threads[CHECK_MAX_THREADS];

    CHECK(count <= CHECK_MAX_THREADS);
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(pthread_create(&threads[i], NULL, work, argument), 0);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    }
}

#endif
