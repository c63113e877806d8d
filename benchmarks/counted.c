/* counted.c: the mark between two measurements that valgrind sees, loaded by instructions.py. */

int benchmarks_mark(void);

/* valgrind writes down what it has counted before each call of this. */
static int __attribute__((noinline))
benchmarks_marked(void)
{
    static volatile int calls;

    return ++calls;
}

/* Called between two measurements. Twice the number of calls so far: valgrind takes a function that
 * libffi jumps to, or one that ends in a jump, for a part of its caller. */
int
benchmarks_mark(void)
{
    return 2 * benchmarks_marked();
}
