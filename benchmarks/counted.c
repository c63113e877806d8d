/* counted.c: the mark between two measurements that valgrind sees, loaded by instructions.py. */

int benchmarks_mark(void);

/* valgrind writes its counts before each call of this. */
static int __attribute__((noinline))
benchmarks_marked(void)
{
    static volatile int calls;

    return ++calls;
}

/* Called between two measurements. It returns twice the number of calls, so that it does not end in a
 * jump: valgrind would count a function that is reached by a jump as a part of its caller. */
int
benchmarks_mark(void)
{
    return 2 * benchmarks_marked();
}
