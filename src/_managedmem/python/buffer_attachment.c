/* buffer_attachment.c: attach() and attachment of a buffer, and the argument attach of allocations. */
#include "buffer.h"
#include "foreign_class.h"
#include "resource.h"

static const struct {
    const char *name;
    CUmemAttach_flags flag;
} attachments[] = {
    {"global", CU_MEM_ATTACH_GLOBAL},
    {"host", CU_MEM_ATTACH_HOST},
    {"single", CU_MEM_ATTACH_SINGLE},
};

/* Returns 0 for a value that is none of the three. */
static CUmemAttach_flags
find_attachment(PyObject *value)
{
    for (size_t i = 0; PyUnicode_Check(value) && i < sizeof attachments / sizeof *attachments;
         i++) {
        if (PyUnicode_CompareWithASCIIString(value, attachments[i].name) == 0) {
            return attachments[i].flag;
        }
    }
    return (CUmemAttach_flags)0;
}

int
mm_read_attach_text(PyObject *value, CUmemAttach_flags *out)
{
    *out = find_attachment(value);
    if (*out == CU_MEM_ATTACH_SINGLE) {
        return MM_ERROR(PyExc_ValueError,
                        "attach=\"single\" needs a stream, which an allocation does not have: "
                        "allocate with attach=\"host\", then call "
                        "buf.attach(\"single\", stream=stream)");
    }
    return *out != 0 ? 0
                     : MM_ERROR(PyExc_ValueError, "attach must be \"global\" or \"host\", got %R",
                                value);
}

/* ValueError unless the buffer is a whole allocation made here: the driver attaches only these. */
static int
check_attached(mm_buffer *b)
{
    const mm_memory *memory = b->memory;

    if (!memory->owned) {
        return mm_refuse_foreign(PyExc_ValueError, (PyObject *)b,
                                 "cannot be attached: its memory was not allocated here, and only "
                                 "the library that allocated it knows to what it is attached");
    }
    if (memory->pooled) {
        return mm_refuse_foreign(PyExc_ValueError, (PyObject *)b,
                                 "cannot be attached: its memory is a part of a pool, and the "
                                 "driver attaches whole allocations; allocate it without a pool");
    }
    if (b->size != memory->size) {
        return MM_ERROR(
            PyExc_ValueError,
            "a slice of %zu of %zu bytes cannot be attached, because the driver attaches "
            "whole allocations: call attach() of the whole buffer",
            b->size, memory->size);
    }
    return 0;
}

static int
read_attachment(mm_buffer *b, PyObject *value, PyObject *stream_object, CUmemAttach_flags *to,
                mm_stream_use *stream)
{
    *to = find_attachment(value);
    if (*to == 0) {
        return MM_ERROR(PyExc_ValueError,
                        "attach() takes \"global\", \"host\" or \"single\", got %R", value);
    }
    if (mm_buffer_check_open(b) < 0 || check_attached(b) < 0
        || mm_stream_read(b->state, stream_object, stream) < 0) {
        return -1;
    }
    if (*to == CU_MEM_ATTACH_SINGLE && mm_is_legacy_stream(stream->handle)) {
        return MM_ERROR(
            PyExc_ValueError,
            "attach(\"single\") cannot use the default stream, because the driver attaches "
            "nothing to it: pass stream=managedmem.Stream()");
    }
    return 0;
}

const char mm_attach_doc[] =
    "attach($self, to, *, stream=None)\n--\n\n"
    "Say who may use the memory from here on, in stream order.\n"
    "\n"
    "Where a device has no concurrent_managed_access, as under WSL, the host may use managed memory only\n"
    "while no device works at all. Attached memory is free of that rule:\n"
    "\n"
    "- \"host\": only the host may use it, at any time;\n"
    "- \"single\": only work on this stream, and the host while the stream is idle;\n"
    "- \"global\": every stream of every device, as after the allocation.\n"
    "\n"
    "Host views and numpy() then wait for this stream instead of all devices. Memory attached to\n"
    "the host needs no wait at all once the host has waited for that attachment. Host views still\n"
    "wait for all devices if the stream is neither a Stream nor the legacy default stream of a\n"
    "primary context. While the buffer is attached to a Stream, it keeps the Stream alive. Work\n"
    "on other streams that uses or attaches the memory must have ended. fill() on a stream that\n"
    "may not use the memory raises RuntimeError; copies work, because the driver then makes them\n"
    "on the host. Where every device has concurrent_managed_access, attachments have no effect.\n"
    "\n"
    "Raises ValueError for another word, a slice, memory of a pool or of another library, and \"single\"\n"
    "with the default stream; RuntimeError when closed; CUDAError while the stream captures a graph, which\n"
    "stays intact, and when the driver refuses, after which host views wait for all devices again. Safe from\n"
    "every thread; releases the GIL. Driver: cuStreamAttachMemAsync.";

PyObject *
mm_buffer_attach(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TO, STREAM, ARGC };
    static mm_signature signature = {.doc = mm_attach_doc};
    mm_buffer *b = mm_buffer_of(op);
    CUmemAttach_flags to;
    mm_stream_use stream;
    mm_buffer_use use;
    PyObject *argv[ARGC];
    mm_status st;
    int rc;

    if (mm_signature_args(&signature, args, nargs, kwnames, argv) < 0
        || read_attachment(b, argv[TO], argv[STREAM], &to, &stream) < 0
        || mm_buffer_enter(b, MM_WAIT, &stream, &use) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mm_attach(use.cu, &use.memory->attachment, use.range.allocation, to,
                   (mm_device_stream){stream.handle, MM_ANY_DEVICE}, stream.shared, &st);
    mm_buffer_leave(&use);
    Py_END_ALLOW_THREADS
    return mm_none_or_raise(b->state, rc, &st);
}

const char mm_attachment_doc[] =
    "Who may use the memory: \"global\", \"host\" or \"single\", as for attach(). None for memory that was\n"
    "not allocated here and for plain device memory, which cannot be attached.\n"
    "\n"
    "The driver does not report attachments. The value is the one that the allocation or the last\n"
    "attach() set, in the order of calls and not of streams; it is \"global\" after a call that\n"
    "the driver refused. It does not say which stream is the single one. A view has the value of\n"
    "its whole buffer; memory of a managed pool always has \"global\". Raises RuntimeError when\n"
    "closed. Safe from every thread. Driver: none.";

PyObject *
mm_buffer_get_attachment(PyObject *op, void *Py_UNUSED(closure))
{
    const mm_memory *memory = mm_buffer_of(op)->memory;
    CUmemAttach_flags to;
    size_t i = 0;

    if (mm_buffer_check_open(mm_buffer_of(op)) < 0) {
        return NULL;
    }
    if (!memory->owned || memory->device != MM_ANY_DEVICE) {
        Py_RETURN_NONE;
    }
    to = mm_attachment_now(&memory->attachment);
    while (attachments[i].flag != to) {
        i++;
    }
    return PyUnicode_FromString(attachments[i].name);
}
