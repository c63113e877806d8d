/* memory_counts.c: counts the memories that live, by source and device. */
#include "memory_counts.h"

#include <assert.h>

static mm_memory_counts *
tallied(mm_memory_tally *tally, mm_source source, int device)
{
    assert(source != MM_FROM_NOWHERE && source < MM_SOURCES);
    assert(device >= MM_NO_DEVICE && device < MM_MAX_DEVICES);
    return &tally->by[source][device + 1];
}

static void
add_one(mm_memory_counts *counts, size_t bytes, bool again)
{
    counts->bytes += bytes;
    counts->peak_bytes = counts->bytes > counts->peak_bytes ? counts->bytes : counts->peak_bytes;
    counts->living++;
    counts->made += again ? 0 : 1;
}

static void
remove_one(mm_memory_counts *counts, size_t bytes)
{
    assert(counts->living > 0 && counts->bytes >= bytes);
    counts->bytes -= bytes;
    counts->living--;
}

void
mm_tally_begin(mm_memory_tally *tally, mm_source source, int device, size_t bytes, bool again)
{
    if (source != MM_FROM_NOWHERE) {
        add_one(&tally->all, bytes, again);
        add_one(tallied(tally, source, device), bytes, again);
    }
}

void
mm_tally_end(mm_memory_tally *tally, mm_source source, int device, size_t bytes)
{
    if (source != MM_FROM_NOWHERE) {
        remove_one(&tally->all, bytes);
        remove_one(tallied(tally, source, device), bytes);
    }
}

void
mm_tally_reset_peaks(mm_memory_tally *tally)
{
    tally->all.peak_bytes = tally->all.bytes;
    for (int source = 0; source < MM_SOURCES; source++) {
        for (int device = 0; device < MM_COUNTED_DEVICES; device++) {
            mm_memory_counts *counts = &tally->by[source][device];
            counts->peak_bytes = counts->bytes;
        }
    }
}
