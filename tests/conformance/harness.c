/* The conformance program's frame: opening the driver, one child process per topic, printing.
 * Every topic starts from a fresh driver: no answer depends on which topics ran before it. */

/* Values outside an enumeration are what many cases are about.
 * NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange) */
#include "harness.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TOPIC_SECONDS = 60, NO_CHILD_STATUS = 2, SKIPPED = 3 };

struct driver cu;

static const char *
name_of(CUresult result)
{
    const char *text = NULL;

    if (cu.error_name(result, &text) != CUDA_SUCCESS || text == NULL) {
        return "?";
    }
    return strncmp(text, "CUDA_", 5) == 0 ? text + 5 : text;
}

void
report(const char *label, CUresult result)
{
    printf("%-52s %d %s\n", label, (int)result, name_of(result));
}

void
value(const char *label, long long number)
{
    printf("%-52s %lld\n", label, number);
}

void
query(const char *label, CUdeviceptr ptr, size_t size)
{
    int users[6] = {-77, -77, -77, -77, -77, -77};

    printf("Q %-30s", label);
    for (int attribute = 1; attribute <= 8; attribute++) {
        int got = -77;
        CUresult result =
            cu.range_get(&got, sizeof got, (CUmem_range_attribute)attribute, ptr, size);
        if (result == CUDA_SUCCESS) {
            printf(" %d:%d", attribute, got);
        } else {
            printf(" %d:(%d)", attribute, (int)result);
        }
    }
    (void)cu.range_get(users, sizeof users, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, ptr, size);
    printf(" AB6 [%d %d %d %d %d %d]\n", users[0], users[1], users[2], users[3], users[4],
           users[5]);
}

CUdeviceptr
managed(size_t size)
{
    CUdeviceptr ptr = 0;
    CUresult result = cu.alloc(&ptr, size, CU_MEM_ATTACH_GLOBAL);

    if (result != CUDA_SUCCESS) {
        report("no managed memory for this topic", result);
        fflush(stdout);
        _exit(NO_CHILD_STATUS);
    }
    return ptr;
}

CUstream
new_stream(unsigned int flags)
{
    CUstream stream = NULL;
    CUresult result = cu.stream_create(&stream, flags);

    if (result != CUDA_SUCCESS) {
        report("no stream for this topic", result);
        fflush(stdout);
        _exit(NO_CHILD_STATUS);
    }
    return stream;
}

void CUDA_CB
nap(void *argument)
{
    usleep((useconds_t)(size_t)argument);
}

void CUDA_CB
write_late(void *argument)
{
    const struct late_write *job = argument;

    usleep(20000);
    memset(job->bytes, job->with, job->size);
}

static void *
lookup(const char *name, int version)
{
    void *function = NULL;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;

    if (cu.lookup(name, &function, version, 0, &status) != CUDA_SUCCESS) {
        return NULL;
    }
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? function : NULL;
}

static bool
open_driver(const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void *symbol;

    if (handle == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return false;
    }
    symbol = dlsym(handle, "cuGetProcAddress_v2");
    if (symbol == NULL) {
        fprintf(stderr, "%s has no cuGetProcAddress_v2\n", library);
        return false;
    }
    /* ISO C has no conversion from void * to a function pointer: the bytes are copied. */
    memcpy(&cu.lookup, &symbol, sizeof symbol);
#define X(member, name, version)     \
    symbol = lookup(#name, version); \
    memcpy(&cu.member, &symbol, sizeof symbol);
    DRIVER_FUNCTIONS(X)
#undef X
    if (cu.init == NULL || cu.advise == NULL || cu.prefetch == NULL || cu.error_name == NULL) {
        fprintf(stderr, "%s is older than CUDA 12.2\n", library);
        return false;
    }
    return true;
}

static CUmemLocation
place(CUmemLocationType type, int id)
{
    return (CUmemLocation){.type = type, .id = id};
}

static void
fixture_places(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    f->dev = place(CU_MEM_LOCATION_TYPE_DEVICE, 0);
    f->dev9 = place(CU_MEM_LOCATION_TYPE_DEVICE, 9);
    f->dev99 = place(CU_MEM_LOCATION_TYPE_DEVICE, 99);
    f->host = place(CU_MEM_LOCATION_TYPE_HOST, 0);
    f->numa = place(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0);
    f->numa999 = place(CU_MEM_LOCATION_TYPE_HOST_NUMA, 999);
    f->numa_current = place(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0);
    f->none = place(CU_MEM_LOCATION_TYPE_NONE, 0);
    f->unknown = place((CUmemLocationType)77, 0);
}

/* Starts the driver, unless the topic wants it asleep; whether the topic applies to it. */
static int
start_driver(struct fixture *f, const struct topic *topic)
{
    int version = 0;

    if (topic->bare) {
        return 0;
    }
    if (cu.init(0) != CUDA_SUCCESS || cu.device_count(&f->devices) != CUDA_SUCCESS
        || cu.driver_version(&version) != CUDA_SUCCESS) {
        printf("the driver does not start\n");
        return NO_CHILD_STATUS;
    }
    return f->devices < topic->devices || version < topic->version ? SKIPPED : 0;
}

static int
make_current(struct fixture *f)
{
    if (cu.device_get(&f->device, 0) != CUDA_SUCCESS
        || cu.primary_retain(&f->ctx, f->device) != CUDA_SUCCESS
        || cu.ctx_set(f->ctx) != CUDA_SUCCESS) {
        printf("no context\n");
        return NO_CHILD_STATUS;
    }
    f->stream = new_stream(CU_STREAM_NON_BLOCKING);
    return 0;
}

/* Each line is written out at once: it must survive a crash behind it. */
static int
run_child(const char *library, const struct topic *topic)
{
    struct fixture f;
    int status;

    alarm(TOPIC_SECONDS);
    setvbuf(stdout, NULL, _IOLBF, 0);
    fixture_places(&f);
    if (!open_driver(library)) {
        return NO_CHILD_STATUS;
    }
    status = start_driver(&f, topic);
    if (status != 0) {
        return status;
    }
    printf("## %s\n", topic->name);
    if (!topic->bare && make_current(&f) != 0) {
        return NO_CHILD_STATUS;
    }
    topic->run(&f);
    fflush(stdout);
    return 0;
}

int
run_topics(const char *library, const struct topic *topics, size_t count, const char *only)
{
    int failures = 0;

    for (size_t i = 0; i < count; i++) {
        int status = 0;
        pid_t child;

        if (only != NULL && strcmp(only, topics[i].name) != 0) {
            continue;
        }
        fflush(stdout);
        child = fork();
        if (child == 0) {
            /* Not exit(): a driver's own exit handlers are not under test. */
            _exit(run_child(library, &topics[i]));
        }
        if (child < 0 || waitpid(child, &status, 0) != child) {
            fprintf(stderr, "cannot run a child process\n");
            return 1;
        }
        if (WIFSIGNALED(status)) {
            printf("%s: ended by signal %d\n", topics[i].name, WTERMSIG(status));
            failures++;
        } else if (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != SKIPPED) {
            failures++;
        }
    }
    fflush(stdout);
    return failures == 0 ? 0 : 1;
}

/* NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange) */

void
show_page_map(const char *label, CUdeviceptr ptr, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), count = size / page, mapped = 0;
    uint64_t *entries = calloc(count, sizeof *entries);
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    ssize_t want = (ssize_t)(count * sizeof *entries), got = -1;

    if (file >= 0 && entries != NULL) {
        got = pread(file, entries, (size_t)want, (off_t)(ptr / page * sizeof *entries));
    }
    if (entries != NULL && got == want) {
        for (size_t i = 0; i < count; i++) {
            mapped += (size_t)(entries[i] >> 63);
        }
        printf("pagemap %-24s %s pages mapped on the CPU\n", label,
               mapped == 0       ? "no"
               : mapped == count ? "all"
                                 : "some");
    } else {
        printf("pagemap %-24s not readable\n", label);
    }
    if (file >= 0) {
        close(file);
    }
    free(entries);
}
