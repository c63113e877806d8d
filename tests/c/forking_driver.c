/* forking_driver.c: an emulated driver whose loading forks, as the real one does to run the program
 * that loads its kernel modules. It depends on the emulated driver, so that looking up an entry
 * point in it finds that one's. */
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
