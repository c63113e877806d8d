/* counted.c: what the process under valgrind needs beside Python, preloaded by instructions.py: a mark
 * that valgrind sees, and a bound on reserved addresses, of which valgrind has few. */
#include <stddef.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const size_t MOST = (size_t)1 << 35;

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

/* The emulated driver reserves 256 GiB of addresses once, and uses them from the bottom. */
void *
mmap(void *address, size_t length, int protection, int flags, int file, off_t offset)
{
    if (address == NULL && protection == PROT_NONE && length > MOST) {
        length = MOST;
    }
    return (void *)syscall(SYS_mmap, address, length, protection, flags, file, offset);
}
