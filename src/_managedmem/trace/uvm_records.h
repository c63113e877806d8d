/* uvm_records.h: turns records of the nvidia-uvm module into events. Every field is checked,
 * because the layout is private to the module. */
#ifndef MM_UVM_RECORDS_H
#define MM_UVM_RECORDS_H

#include "../memory/event.h"

enum { MM_THROTTLE_SETS = 64, MM_THROTTLE_PLACES = 8 };

/* A throttling of a processor at a page, whose end was not recorded yet. */
typedef struct {
    uint64_t address, begin; /* begin 0: a free place */
    int16_t processor;
} mm_throttle;

typedef struct mm_uvm_parser {
    int16_t processors[MM_UVM_PROCESSORS]; /* as mm_uvm_queue_processors stores them */
    uint64_t rejected; /* records that are not as the module writes them */
    uint64_t unlisted; /* a bit for each index that a record named and no processor has */
    uint64_t fault_overflows; /* a device had more faults at a time than it can report */
    uint64_t fatal_faults; /* accesses to memory that does not exist */
    mm_throttle throttles[MM_THROTTLE_SETS][MM_THROTTLE_PLACES];
    uint64_t push_begin, push_device_begin; /* of the last move's push, on both clocks */
} mm_uvm_parser;

/* Processors beyond `count` do not exist. */
void mm_uvm_parser_init(mm_uvm_parser *p, const int16_t *processors, size_t count);

typedef enum { MM_RECORD_IGNORED, MM_RECORD_EVENT, MM_RECORD_REJECTED } mm_record_result;

/* Makes the event of a record. Moves from host to host, and records that have no event, such as
 * replays, are ignored. The begin and the end of throttling make one event, which lasts from one
 * to the other. *out is undefined unless the result is MM_RECORD_EVENT. */
mm_record_result mm_uvm_parse(mm_uvm_parser *p, const unsigned char record[MM_UVM_RECORD_BYTES],
                              mm_event *out);

/* Parses a record again, with the present processors, after it was rejected for an index in
 * `unlisted`. The earlier rejection is not counted any more. */
mm_record_result mm_uvm_parse_listed(mm_uvm_parser *p,
                                     const unsigned char record[MM_UVM_RECORD_BYTES],
                                     const int16_t *processors, mm_event *out);

/* The types of records to enable, one bit each. */
uint64_t mm_uvm_types(bool faults);

#endif
