/* records.c: the fuzz target for records of the nvidia-uvm module. An input is a row of 64-byte
 * records, which one parser reads in order; the rest of the last one is zeros. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef PARSER /* a copy with a fault, to see that the target finds it */
#define PARSER "../../src/_managedmem/trace/uvm_records.c"
#endif
#include PARSER

#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "not so: %s\nof a record of type %d\n", #condition, type); \
            abort();                                                                   \
        }                                                                              \
    } while (0)

static bool
is_processor(int processor)
{
    return processor == MM_NO_PROCESSOR || processor == MM_ON_HOST || processor == 0
           || processor == 1 || processor == MM_OTHER_PROCESSOR;
}

static bool
is_of_pages(int kind)
{
    return kind != MM_HOST_FAULT && kind != MM_DEVICE_FAULT && kind != MM_THROTTLING;
}

/* What recordings rely on. */
static void
check_event(int type, const mm_event *event)
{
    MUST(type > 0 && type < MM_UVM_KNOWN_TYPES && event->kind < MM_CALL);
    MUST(event->start != 0 && event->start <= event->end);
    MUST(event->address != 0 && event->address <= UINT64_MAX - event->amount);
    MUST(event->amount > 0 && event->amount <= (uint64_t)1 << 40);
    MUST(is_of_pages(event->kind) || event->amount == 1);
    MUST(!is_of_pages(event->kind) || (event->address | event->amount) % 4096 == 0);
    MUST(is_processor(event->source) && is_processor(event->destination));
    MUST(event->cause == MM_CAUSE_UNKNOWN || event->kind == MM_MOVE);
    MUST(event->cause < MM_CAUSES && event->access <= MM_ATOMIC_ACCESS);
    MUST(event->kind != MM_MOVE || event->source != event->destination
         || event->source == MM_OTHER_PROCESSOR);
    MUST(event->memory == MM_NO_MEMORY_INDEX && event->flags == 0);
}

static void
check_result(mm_record_result result, int type, const mm_event *event, uint64_t more_rejected)
{
    MUST(more_rejected == (result == MM_RECORD_REJECTED));
    MUST(result <= MM_RECORD_REJECTED);
    if (result == MM_RECORD_EVENT) {
        check_event(type, event);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int16_t processors[] = {MM_ON_HOST, 0, 1, MM_OTHER_PROCESSOR, MM_NO_PROCESSOR};
    mm_uvm_parser parser;
    mm_event event;

    mm_uvm_parser_init(&parser, processors, sizeof processors / sizeof *processors);
    for (size_t at = 0; at < size; at += MM_UVM_RECORD_BYTES) {
        unsigned char record[MM_UVM_RECORD_BYTES] = {0};
        uint64_t rejected = parser.rejected;
        mm_record_result result;

        memcpy(record, data + at, size - at < sizeof record ? size - at : sizeof record);
        result = mm_uvm_parse(&parser, record, &event);
        check_result(result, record[0], &event, parser.rejected - rejected);
    }
    return 0;
}
