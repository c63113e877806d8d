/* uvm_calls.c: the system calls behind event queues, and the process's open files of the
 * module. */
#include "uvm_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "uvm_abi.h"

/* --- the kernel's ------------------------------------------------------------------------- */

static int
system_open(const char *path, int flags)
{
    return open(path, flags);
}

static int
system_ioctl(int file, unsigned long request, void *argument)
{
    return ioctl(file, request, argument);
}

static int
system_poll(struct pollfd *files, unsigned long count, int milliseconds)
{
    return poll(files, count, milliseconds);
}

static int
system_close(int file)
{
    return close(file);
}

static bool
is_module_file(int folder, const char *name)
{
    char path[sizeof MM_UVM_DEVICE + 1];
    ssize_t length = folder >= 0 ? readlinkat(folder, name, path, sizeof path) : -1;

    return length == (ssize_t)sizeof MM_UVM_DEVICE - 1
           && memcmp(path, MM_UVM_DEVICE, sizeof MM_UVM_DEVICE - 1) == 0;
}

/* The CUDA driver opens the device; only the kernel's list of files shows its descriptor. */
static int
system_files(int *files, int most)
{
    DIR *folder = opendir("/proc/self/fd");
    int count = 0;

    if (folder == NULL) {
        return 0;
    }
    for (struct dirent *entry; count < most && (entry = readdir(folder)) != NULL;) {
        if (is_module_file(dirfd(folder), entry->d_name)) {
            files[count++] = (int)strtol(entry->d_name, NULL, 10);
        }
    }
    (void)closedir(folder);
    return count;
}

/* --- the emulated driver's ---------------------------------------------------------------- */

/* Object and function pointers need not be convertible in ISO C, so the bytes are copied. */
static bool
find_symbol(void *library, const char *name, void *out)
{
    void *symbol = dlsym(library, name);

    memcpy(out, &symbol, sizeof symbol);
    return symbol != NULL;
}

int
mm_uvm_calls_find(const mm_driver *cu, mm_uvm_calls *calls, mm_status *st)
{
    static const mm_uvm_calls kernel = {system_open, system_ioctl, system_poll, system_close,
                                        system_files};

    *calls = kernel;
    if (!cu->emulated) {
        return 0;
    }
    if (!find_symbol(cu->library, "emu_uvm_open", &calls->open)
        || !find_symbol(cu->library, "emu_uvm_ioctl", &calls->ioctl)
        || !find_symbol(cu->library, "emu_uvm_poll", &calls->poll)
        || !find_symbol(cu->library, "emu_uvm_close", &calls->close)
        || !find_symbol(cu->library, "emu_uvm_files", &calls->files)) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "the emulated driver %s has no event queues: it is of another version",
                       cu->path);
    }
    return 0;
}
