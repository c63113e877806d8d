/* The files of the nvidia-uvm module: open, ioctl, poll and close of /dev/nvidia-uvm-tools, and the
 * process's own /dev/nvidia-uvm, with the module's numbers and layouts. These functions stand for
 * the system calls; the descriptors are numbers that no kernel gives out. */
#include "control.h"

#include <errno.h>
#include <poll.h>
#include <string.h>

/* Requests are bare numbers, without the usual directions and sizes. */
enum {
    MAKE_QUEUE = 56,
    ENABLE = 58,
    DISABLE = 59,
    GET_UUIDS = 64,
    FLUSH = 67,
};
enum {
    STATUS_OK = 0,
    ILLEGAL_ACTION = 0x16,
    INVALID_ADDRESS = 0x1e,
    INVALID_ARGUMENT = 0x1f,
    NOT_SUPPORTED = 0x56
};

/* The driver opens the device twice, and only one of the files has the address space. */
enum { OTHER_FILE = 0x70000000, SPACE_FILE, FIRST_TOOLS_FILE };
enum { LAYOUT = 1, UUID_BYTES = 16, MOST_POLLED = 8 };

struct queue_request {
    uint64_t records, count, control;
    uint8_t processor[UUID_BYTES];
    uint32_t all, space_file, status_or_version, version_or_status;
};
struct types_request {
    uint64_t types;
    uint32_t status;
};
struct uuids_request {
    uint64_t table;
    uint32_t first, second; /* branches before 565 have their status in the second word */
};

static int last_file = FIRST_TOOLS_FILE - 1;

static int
fail_with(int error)
{
    errno = error;
    return -1;
}

int
emu_uvm_files(int *files, int most)
{
    static const int all[] = {OTHER_FILE, SPACE_FILE};
    int count = 0;

    emu_lock();
    while (emu_initialised() && !emu_forked() && count < 2 && count < most) {
        files[count] = all[count];
        count++;
    }
    emu_unlock();
    return count;
}

int
emu_uvm_open(const char *path, int flags)
{
    int file = -1, error = 0;

    (void)flags;
    emu_lock();
    if (emu_forked() || strcmp(path, "/dev/nvidia-uvm-tools") != 0
        || emu_queue_fault(EMU_QUEUE_ABSENT) != 0) {
        error = ENOENT;
    } else if (emu_queue_fault(EMU_QUEUE_DENIED) != 0) {
        error = EACCES;
    } else if (!emu_listener_new(last_file + 1)) {
        error = ENOMEM;
    } else {
        file = ++last_file;
    }
    emu_unlock();
    return error == 0 ? file : fail_with(error);
}

int
emu_uvm_close(int file)
{
    struct emu_listener *listener;

    emu_lock();
    listener = emu_listener_find(file);
    if (listener != NULL) {
        emu_listener_delete(listener);
    }
    emu_unlock();
    return listener != NULL ? 0 : fail_with(EBADF);
}

/* The branch of the module whose requests are emulated: 550 stands for all before 560, and 565 for
 * all from 565 on. */
static int
branch(void)
{
    unsigned int number = emu_queue_fault(EMU_QUEUE_BRANCH);

    return number == 0 || number >= 565 ? 565 : number >= 560 ? 560 : 550;
}

static uint32_t
make_queue(struct emu_listener *listener, const struct queue_request *request)
{
    uint64_t count = request->count, page = emu_map_page_size();

    if (emu_queue_fault(EMU_QUEUE_REFUSED) != 0) {
        return NOT_SUPPORTED;
    }
    if ((branch() == 560 && request->status_or_version != LAYOUT)
        || (branch() == 550 && request->version_or_status != LAYOUT)) {
        return INVALID_ARGUMENT;
    }
    if (request->space_file != SPACE_FILE) {
        return ILLEGAL_ACTION;
    }
    if (count < 2 || count > (uint64_t)1 << 24 || (count & (count - 1)) != 0) {
        return INVALID_ARGUMENT;
    }
    if (request->records == 0 || request->records % page != 0 || request->control == 0
        || request->control % page != 0) {
        return INVALID_ADDRESS;
    }
    return emu_listener_start(listener, (void *)(uintptr_t)request->records, (uint32_t)count,
                              (void *)(uintptr_t)request->control)
               ? STATUS_OK
               : INVALID_ARGUMENT;
}

static bool
is_listed(int device)
{
    unsigned int unlisted = emu_queue_fault(EMU_QUEUE_UNLISTED);

    return unlisted == 0 || (unlisted == 1 ? emu_device_has_context(device) : device == 0);
}

static uint32_t
get_uuids(const struct uuids_request *request)
{
    unsigned char *table = (unsigned char *)(uintptr_t)request->table;

    if ((branch() == 560 && request->first != LAYOUT)
        || (branch() == 550 && request->first != 0)) {
        return INVALID_ARGUMENT; /* a count would ask for more rows than there are here */
    }
    if (table == NULL) {
        return INVALID_ADDRESS;
    }
    memcpy(table, "emulated-host-0", UUID_BYTES);
    for (int i = 0; i < emu_config()->devices; i++) {
        if (is_listed(i)) {
            emu_device_uuid(i, table + (size_t)(i + 1) * UUID_BYTES);
        }
    }
    return STATUS_OK;
}

static void
list_processors(struct uuids_request *request)
{
    uint32_t status = get_uuids(request);

    if (branch() == 565) {
        request->first = status;
        return;
    }
    request->second = status;
    if (branch() == 550) {
        request->first = (uint32_t)emu_config()->devices + 1;
    }
}

/* First notices the touches so far, because they happened before the flush. */
static uint32_t
flush(void)
{
    if (emu_queue_fault(EMU_QUEUE_REFUSED) != 0) {
        return NOT_SUPPORTED;
    }
    emu_regions_observe(-1);
    emu_listeners_flush();
    return STATUS_OK;
}

static int
control_tools(struct emu_listener *listener, unsigned long request, void *argument)
{
    struct queue_request *queue = argument;
    struct types_request *types = argument;
    uint32_t status;

    switch (request) {
    case MAKE_QUEUE:
        status = make_queue(listener, queue);
        *(branch() == 560 ? &queue->version_or_status : &queue->status_or_version) = status;
        return 0;
    case ENABLE:
    case DISABLE:
        /* Earlier events belong to the clients that listened at the time. */
        emu_regions_observe(-1);
        types->status = emu_listener_enable(listener, types->types, request == ENABLE)
                            ? STATUS_OK
                            : INVALID_ARGUMENT;
        return 0;
    default:
        return fail_with(EINVAL);
    }
}

static int
control_space(unsigned long request, void *argument)
{
    switch (request) {
    case GET_UUIDS:
        list_processors(argument);
        return 0;
    case FLUSH:
        *(uint32_t *)argument = flush();
        return 0;
    default:
        return fail_with(EINVAL);
    }
}

int
emu_uvm_ioctl(int file, unsigned long request, void *argument)
{
    struct emu_listener *listener;
    int result;

    emu_lock();
    listener = emu_listener_find(file);
    if (emu_forked() || argument == NULL) {
        result = fail_with(argument == NULL ? EFAULT : EBADF);
    } else if (listener != NULL) {
        result = control_tools(listener, request, argument);
    } else if (file == SPACE_FILE) {
        result = control_space(request, argument);
    } else {
        result = fail_with(file == OTHER_FILE ? EINVAL : EBADF);
    }
    emu_unlock();
    return result;
}

/* Polls the kernel's files, at most for `milliseconds`. */
static int
poll_others(struct pollfd *files, unsigned long count, int milliseconds)
{
    struct pollfd others[MOST_POLLED];
    int ready;

    for (unsigned long i = 0; i < count; i++) {
        others[i] = files[i];
        others[i].fd = files[i].fd < OTHER_FILE ? files[i].fd : -1;
    }
    ready = poll(others, count, milliseconds);
    for (unsigned long i = 0; ready >= 0 && i < count; i++) {
        if (files[i].fd < OTHER_FILE) {
            files[i].revents = others[i].revents;
        }
    }
    return ready;
}

static int
poll_queues(struct pollfd *files, unsigned long count)
{
    int ready = 0;

    emu_lock();
    for (unsigned long i = 0; i < count; i++) {
        const struct emu_listener *listener = emu_listener_find(files[i].fd);
        bool readable = listener != NULL && emu_listener_half_full(listener);

        if (files[i].fd >= OTHER_FILE) {
            files[i].revents = (short)(listener == NULL ? POLLNVAL
                                       : readable       ? files[i].events & POLLIN
                                                        : 0);
            ready += files[i].revents != 0;
        }
    }
    emu_unlock();
    return ready;
}

/* A queue is readable once it is half full, as the module wakes its clients. Queues are checked
 * every millisecond. Files with other numbers are the kernel's. */
int
emu_uvm_poll(struct pollfd *files, unsigned long count, int milliseconds)
{
    if (count > MOST_POLLED) {
        return fail_with(EINVAL);
    }
    for (int waited = 0;; waited++) {
        int queues = poll_queues(files, count);
        bool wait = queues == 0 && waited != milliseconds;
        int others = poll_others(files, count, wait ? 1 : 0);

        if (others < 0 || others + queues > 0 || !wait) {
            return others < 0 ? -1 : others + queues;
        }
    }
}

int
emu_uvm_disturb(const char *name, unsigned int value)
{
    static const char *const names[EMU_QUEUE_FAULTS] = {
        [EMU_QUEUE_ABSENT] = "absent",   [EMU_QUEUE_DENIED] = "denied",
        [EMU_QUEUE_REFUSED] = "refused", [EMU_QUEUE_LAYOUT] = "layout",
        [EMU_QUEUE_DROP] = "drop",       [EMU_QUEUE_LOSE] = "lose",
        [EMU_QUEUE_GARBAGE] = "garbage", [EMU_QUEUE_LATE] = "late",
        [EMU_QUEUE_BRANCH] = "branch",   [EMU_QUEUE_UNLISTED] = "unlisted",
    };

    for (int i = 0; i < EMU_QUEUE_FAULTS; i++) {
        if (strcmp(names[i], name) == 0) {
            emu_lock();
            emu_queue_set_fault((enum emu_queue_fault)i, value);
            emu_unlock();
            return 0;
        }
    }
    return -1;
}
