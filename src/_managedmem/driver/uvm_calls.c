/* uvm_calls.c: the system calls behind event queues, and the files of the module that this process
 * and others have open. */
#include "uvm_calls.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "uvm_abi.h"

/* Numbers of system calls, equal on all architectures. The headers of old systems lack them. */
enum { PIDFD_OPEN = 434, PIDFD_GETFD = 438 };

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
is_file_of(const char *device, int folder, const char *name)
{
    char path[PATH_MAX];
    ssize_t length = folder >= 0 ? readlinkat(folder, name, path, sizeof path) : -1;

    return length == (ssize_t)strlen(device) && memcmp(path, device, (size_t)length) == 0;
}

/* Returns the number of the device's files, or -1 with errno if the folder cannot be read. */
static int
list_files(const char *folder_path, const char *device, int *files, int most)
{
    DIR *folder = opendir(folder_path);
    int count = 0;

    if (folder == NULL) {
        return -1;
    }
    for (struct dirent *entry; count < most && (entry = readdir(folder)) != NULL;) {
        if (is_file_of(device, dirfd(folder), entry->d_name)) {
            files[count++] = (int)strtol(entry->d_name, NULL, 10);
        }
    }
    (void)closedir(folder);
    return count;
}

/* The CUDA driver opens the device; only the kernel's list of files shows its descriptor. */
static int
system_files(int *files, int most)
{
    int count = list_files("/proc/self/fd", MM_UVM_DEVICE, files, most);

    return count < 0 ? 0 : count;
}

/* --- another process's files -------------------------------------------------------------- */

static int
fail_process(mm_status *st, pid_t process, int error)
{
    const char *reason = strerror(error);

    if (error == EPERM || error == EACCES) {
        reason =
            "this user may not trace it: be root, or set /proc/sys/kernel/yama/ptrace_scope to 0";
    } else if (error == ENOSYS) {
        reason = "this needs Linux 5.6 or newer";
    }
    (void)mm_fail(st, MM_TRACE_UNAVAILABLE, "the files of process %ld cannot be shared: %s",
                  (long)process, reason);
    st->code = error;
    return -1;
}

int
mm_uvm_files_of(pid_t process, const char *device, int *files, int most, mm_status *st)
{
    char folder[32];
    int handle = (int)syscall(PIDFD_OPEN, process, 0), count, taken = 0;

    if (handle < 0) {
        return fail_process(st, process, errno);
    }
    (void)snprintf(folder, sizeof folder, "/proc/%ld/fd", (long)process);
    count = list_files(folder, device, files, most);
    for (int i = 0; i < count; i++) {
        int file = (int)syscall(PIDFD_GETFD, handle, files[i], 0);
        if (file >= 0) {
            files[taken++] = file; /* overwrites only what was read */
        }
    }
    if (count == 0) {
        count = mm_fail(st, MM_TRACE_UNAVAILABLE, "process %ld has no open file of %s",
                        (long)process, device);
    } else if (taken == 0) {
        count = fail_process(st, process, errno);
    }
    (void)close(handle);
    return taken > 0 ? taken : count;
}

void
mm_uvm_files_close(const int *files, int count)
{
    for (int i = 0; i < count; i++) {
        (void)close(files[i]);
    }
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
    if (cu == NULL || !cu->emulated) {
        return 0;
    }
    if (!find_symbol(cu->library, "emu_uvm_open", &calls->open)
        || !find_symbol(cu->library, "emu_uvm_ioctl", &calls->ioctl)
        || !find_symbol(cu->library, "emu_uvm_poll", &calls->poll)
        || !find_symbol(cu->library, "emu_uvm_close", &calls->close)
        || !find_symbol(cu->library, "emu_uvm_files", &calls->files)) {
        return mm_fail(st, MM_TRACE_UNAVAILABLE,
                       "the emulated driver %s has no event queues: it comes from another version",
                       cu->path);
    }
    return 0;
}
