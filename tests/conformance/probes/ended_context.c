/* ended_context.c: the behaviour of a driver when a destroyed context, or a stream or event of one, is
 * used.
 *
 * Usage: ended_context CALL, linked to the driver, with headers of CUDA 13; CALL is the place of a call
 * in the table below. Makes and destroys contexts, and prints the answers of that call. On driver
 * 580.159.04 (H200) only the first two answer; the others crash with SIGSEGV, those of events with
 * MALLOC_PERTURB_=165. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    CUcontext context;
    CUstream stream;
    CUevent event;
} ended;

static CUresult
get_id(const ended *e)
{
    unsigned long long id;
    return cuCtxGetId(e->context, &id);
}

static CUresult
get_version(const ended *e)
{
    unsigned int version;
    return cuCtxGetApiVersion(e->context, &version);
}

static CUresult
push(const ended *e)
{
    CUresult code = cuCtxPushCurrent(e->context);
    return code == CUDA_SUCCESS ? cuCtxPopCurrent(NULL) : code;
}

static CUresult
query_stream(const ended *e)
{
    return cuStreamQuery(e->stream);
}

static CUresult
ask_for_capture(const ended *e)
{
    CUstreamCaptureStatus status;
    return cuStreamIsCapturing(e->stream, &status);
}

static CUresult
get_context(const ended *e)
{
    CUcontext context;
    return cuStreamGetCtx(e->stream, &context);
}

static CUresult
destroy_stream(const ended *e)
{
    return cuStreamDestroy(e->stream);
}

static CUresult
query_event(const ended *e)
{
    return cuEventQuery(e->event);
}

static CUresult
destroy_event(const ended *e)
{
    return cuEventDestroy(e->event);
}

static const struct {
    const char *name;
    CUresult (*call)(const ended *e);
} calls[] = {
    {"cuCtxGetId", get_id},
    {"cuCtxGetApiVersion", get_version},
    {"cuCtxPushCurrent", push},
    {"cuStreamQuery", query_stream},
    {"cuStreamGetCtx", get_context},
    {"cuStreamIsCapturing", ask_for_capture},
    {"cuStreamDestroy", destroy_stream},
    {"cuEventQuery", query_event},
    {"cuEventDestroy", destroy_event},
};

#define CHECK(call)                                            \
    do {                                                       \
        CUresult code = (call);                                \
        if (code != CUDA_SUCCESS) {                            \
            fprintf(stderr, "%s gave %d\n", #call, (int)code); \
            exit(1);                                           \
        }                                                      \
    } while (0)

static ended
make_and_end(void)
{
    ended e;

    CHECK(cuCtxCreate(&e.context, NULL, 0, 0));
    CHECK(cuStreamCreate(&e.stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&e.event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuCtxDestroy(e.context));
    return e;
}

int
main(int argc, char **argv)
{
    size_t number = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
    CUcontext primary;

    if (number >= sizeof calls / sizeof *calls) {
        return 2;
    }
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    for (int round = 0; round < 6; round++) {
        ended e = make_and_end();
        CUcontext next = NULL;
        if (round % 2) {
            CHECK(cuCtxCreate(&next, NULL, 0, 0)); /* often with the same handle */
            CHECK(cuCtxSetCurrent(primary));
        }
        printf("%s%s: %d\n", calls[number].name, next == e.context ? ", handle reused" : "",
               (int)calls[number].call(&e));
        (void)fflush(stdout);
        if (next != NULL) {
            CHECK(cuCtxDestroy(next));
        }
    }
    return 0;
}
