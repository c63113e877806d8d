/* check.h: the whole test framework of the C unit tests: checks, a table of tests, threads. */
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

typedef struct {
    const char *name;
    void (*run)(void);
} check_test;

#define CHECK_TEST(function) {#function, function}

/* Runs the tests in order; the first failed check ends the process with status 1. */
static inline int
check_run(const check_test *tests, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        tests[i].run();
        (void)printf("ok %s\n", tests[i].name);
        (void)fflush(stdout);
    }
    return 0;
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
