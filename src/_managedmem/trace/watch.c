/* watch.c: an event queue of another process's managed memory, and the events in it. */
#include "watch.h"

#include <stdlib.h>

#include "uvm_records.h"

enum { QUEUE_RECORDS = 1 << 16 };

struct mm_watch {
    mm_uvm_queue queue;
    mm_uvm_parser parser;
    uint64_t types;
    int files[MM_UVM_MOST_FILES]; /* of the other process */
    int file_count;
};

static int
open_watched(mm_watch *w, mm_driver *cu, pid_t process, mm_status *st)
{
    mm_uvm_calls calls;

    if (mm_uvm_calls_find(cu, &calls, st) < 0) {
        return -1;
    }
    if (cu != NULL) {
        return mm_uvm_queue_open_through(&calls, &w->queue, QUEUE_RECORDS, st);
    }
    w->file_count = mm_uvm_files_of(process, MM_UVM_DEVICE, w->files, MM_UVM_MOST_FILES, st);
    if (w->file_count < 0) {
        w->file_count = 0;
        return -1;
    }
    return mm_uvm_queue_open_for(&calls, w->files, w->file_count, &w->queue, QUEUE_RECORDS, st);
}

mm_watch *
mm_watch_start(mm_driver *cu, pid_t process, mm_status *st)
{
    int16_t processors[MM_UVM_PROCESSORS];
    mm_watch *w = calloc(1, sizeof *w);

    if (w == NULL) {
        (void)mm_fail(st, MM_NO_MEMORY, "out of host memory for the events of a process");
        return NULL;
    }
    for (int i = 0; i < MM_UVM_PROCESSORS; i++) {
        processors[i] = i == 0 ? MM_ON_HOST : MM_OTHER_PROCESSOR;
    }
    mm_uvm_parser_init(&w->parser, processors, MM_UVM_PROCESSORS);
    w->types = mm_uvm_types(true);
    if (open_watched(w, cu, process, st) < 0 || mm_uvm_queue_enable(&w->queue, w->types, st) < 0) {
        mm_watch_free(w);
        return NULL;
    }
    return w;
}

size_t
mm_watch_read(mm_watch *w, mm_event *events, size_t most)
{
    unsigned char record[1][MM_UVM_RECORD_BYTES];
    size_t count = 0;

    while (count < most && mm_uvm_queue_read(&w->queue, record, 1) == 1) {
        count += mm_uvm_parse(&w->parser, record[0], &events[count]) == MM_RECORD_EVENT;
    }
    return count;
}

mm_watch_report
mm_watch_read_report(const mm_watch *w)
{
    return (mm_watch_report){.lost = mm_uvm_queue_dropped(&w->queue, w->types),
                             .rejected = w->parser.rejected};
}

void
mm_watch_free(mm_watch *w)
{
    mm_uvm_queue_close(&w->queue);
    mm_uvm_files_close(w->files, w->file_count);
    free(w);
}
