/* forking_driver.c: an emulated driver that forks while it is loaded, as the real one does to run the
 * program that loads its kernel modules. It is linked to the emulated driver, whose entry points are
 * found through it. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((constructor)) static void
run_a_program(void)
{
    int status = 1;
    pid_t child = fork();

    if (child == 0) {
        _exit(7);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 7) {
        abort();
    }
}
