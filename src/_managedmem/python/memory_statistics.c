/* memory_statistics.c: the functions behind memory_stats() and live(): counts, kept memory and the
 * memories that live, as tuples. */
#include "../driver/clock.h"
#include "../memory/allocation_log.h"
#include "../memory/pool.h"
#include "../working/part_frames.h"
#include "errors.h"
#include "leak_warnings.h"
#include "module_functions.h"
#include "state.h"

static const char *
source_name(mm_source source)
{
    static const char *const names[MM_SOURCES] = {
        [MM_FROM_DRIVER] = "managed",
        [MM_FROM_OTHERS] = "wrapped",
        [MM_FROM_MANAGED_POOL] = "managed pool",
        [MM_FROM_DEVICE_POOL] = "device pool",
    };

    assert(source != MM_FROM_NOWHERE && source < MM_SOURCES);
    return names[source];
}

/* --- counts ----------------------------------------------------------------------------------- */

static PyObject *
counts_record(const char *source, int device, const mm_memory_counts *counts)
{
    return Py_BuildValue("(siKKKK)", source, device, (unsigned long long)counts->bytes,
                         (unsigned long long)counts->peak_bytes,
                         (unsigned long long)counts->living, (unsigned long long)counts->made);
}

/* Appends the counts of each source and device that has had memory. */
static int
append_counts(PyObject *list, const mm_memory_tally *tally)
{
    for (int source = MM_FROM_DRIVER; source < MM_SOURCES; source++) {
        for (int i = 0; i < MM_COUNTED_DEVICES; i++) {
            const mm_memory_counts *counts = &tally->by[source][i];
            if (counts->made > 0
                && mm_append_item(list,
                                  counts_record(source_name((mm_source)source), i - 1, counts))
                       < 0) {
                return -1;
            }
        }
    }
    return 0;
}

const char mm_memory_counts_doc[] =
    "_memory_counts(reset_peaks, /)\n--\n\n"
    "The counts of all memory, then those of each source and device that has had memory, as\n"
    "tuples: (source, device or -1, bytes, peak of the bytes, number that live, number made).";

PyObject *
mm_memory_counts_read(PyObject *Py_UNUSED(module), PyObject *reset_peaks)
{
    mm_memory_tally tally;
    PyObject *list;
    int reset = PyObject_IsTrue(reset_peaks);

    if (reset < 0 || (list = PyList_New(0)) == NULL) {
        return NULL;
    }
    mm_allocation_counts_read(&tally, reset != 0);
    if (mm_append_item(list, counts_record("all", MM_NO_DEVICE, &tally.all)) < 0
        || append_counts(list, &tally) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* --- kept memory ------------------------------------------------------------------------------ */

/* Appends (device or -1, bytes of frames, bytes of pools) for each device that has some. */
static int
append_kept(PyObject *list, const uint64_t *frames, const uint64_t *pools)
{
    for (int i = 0; i < MM_COUNTED_DEVICES; i++) {
        if ((frames[i] > 0 || pools[i] > 0)
            && mm_append_item(list, Py_BuildValue("(iKK)", i - 1, (unsigned long long)frames[i],
                                                  (unsigned long long)pools[i]))
                   < 0) {
            return -1;
        }
    }
    return 0;
}

const char mm_memory_kept_doc[] =
    "_memory_kept()\n--\n\n"
    "Tuples (device or -1, bytes of frames, bytes that the driver reserves for pools). Opens no driver.";

MM_GUARD_ARRAYS PyObject *
mm_memory_kept(PyObject *module, PyObject *Py_UNUSED(none))
{
    uint64_t frames[MM_COUNTED_DEVICES] = {0}, pools[MM_COUNTED_DEVICES] = {0};
    mm_driver *cu = mm_driver_usable();
    PyObject *list;
    mm_status st;
    int rc = 0;

    if (cu != NULL) {
        Py_BEGIN_ALLOW_THREADS
        mm_frames_add_kept(frames + 1);
        rc = mm_pools_add_reserved(cu, pools, &st);
        Py_END_ALLOW_THREADS
        mm_report_leaks();
    }
    if (rc < 0) {
        return mm_raise(mm_module_state(module), &st);
    }
    list = PyList_New(0);
    if (list != NULL && append_kept(list, frames, pools) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

/* --- the memories that live ------------------------------------------------------------------- */

static PyObject *
living_record(const mm_living_memory *memory, uint64_t now)
{
    double age = now > memory->born ? (double)(now - memory->born) * 1e-9 : 0;

    return Py_BuildValue("(sKsiKdK)", memory->label, (unsigned long long)memory->size,
                         source_name(memory->source), memory->device,
                         (unsigned long long)memory->serial, age,
                         (unsigned long long)memory->start);
}

const char mm_memory_living_doc[] =
    "_memory_living()\n--\n\n"
    "The memories that live, oldest first, as tuples: (label, bytes, source, device or -1, serial, age in\n"
    "seconds, address).";

PyObject *
mm_memory_living(PyObject *module, PyObject *Py_UNUSED(none))
{
    mm_living_memory *memories;
    PyObject *list = NULL;
    mm_status st;
    size_t count;
    int rc;

    Py_BEGIN_ALLOW_THREADS
    rc = mm_living_memories_copy(&memories, &count, &st);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return mm_raise(mm_module_state(module), &st);
    }
    list = PyList_New(0);
    for (size_t i = 0; list != NULL && i < count; i++) {
        if (mm_append_item(list, living_record(&memories[i], mm_raw_clock())) < 0) {
            Py_CLEAR(list);
        }
    }
    mm_living_memories_free(memories, count);
    return list;
}
