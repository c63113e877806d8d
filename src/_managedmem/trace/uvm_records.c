/* uvm_records.c: the layouts of the module's records, and their checks. */
#include "uvm_records.h"

#include <assert.h>
#include <string.h>

enum { SMALLEST_PAGE = 4096 };
#define MOST_BYTES ((uint64_t)1 << 40) /* of one record; the module works in blocks of 2 MiB */

static uint32_t
u32_at(const unsigned char *record, size_t offset)
{
    uint32_t value;

    memcpy(&value, record + offset, sizeof value);
    return value;
}

static uint64_t
u64_at(const unsigned char *record, size_t offset)
{
    uint64_t value;

    memcpy(&value, record + offset, sizeof value);
    return value;
}

/* --- checks of fields --------------------------------------------------------------------- */

static bool
read_processor(mm_uvm_parser *p, unsigned index, int16_t *out)
{
    if (index >= MM_UVM_PROCESSORS) {
        return false;
    }
    if (p->processors[index] == MM_NO_PROCESSOR) {
        p->unlisted |= (uint64_t)1 << index;
        return false;
    }
    *out = p->processors[index];
    return true;
}

/* Turns a set of the module's indices into a set of ordinals. Devices without a bit in that set
 * are left out. */
static bool
read_processors(mm_uvm_parser *p, uint64_t indices, uint32_t *out)
{
    *out = 0;
    for (unsigned index = 0; index < 64; index++) {
        int16_t processor;
        if ((indices >> index & 1) == 0) {
            continue;
        }
        if (!read_processor(p, index, &processor)) {
            return false;
        }
        if (processor == MM_ON_HOST) {
            *out |= (uint32_t)1 << MM_SET_HOST_BIT;
        } else if (processor < MM_SET_HOST_BIT) {
            *out |= (uint32_t)1 << processor;
        }
    }
    return indices != 0;
}

static bool
read_time(const unsigned char *record, size_t offset, mm_event *out)
{
    out->start = out->end = u64_at(record, offset);
    return out->start != 0;
}

/* Whole pages. */
static bool
read_pages(const unsigned char *record, size_t address, size_t amount, mm_event *out)
{
    out->address = u64_at(record, address);
    out->amount = u64_at(record, amount);
    return out->address != 0 && out->address % SMALLEST_PAGE == 0 && out->amount != 0
           && out->amount % SMALLEST_PAGE == 0 && out->amount <= MOST_BYTES
           && out->address <= UINT64_MAX - out->amount;
}

/* One access, at an address inside a page. */
static bool
read_access(const unsigned char *record, size_t address, mm_event *out)
{
    out->address = u64_at(record, address);
    out->amount = 1;
    return out->address != 0 && out->address != UINT64_MAX;
}

static mm_record_result
event_if(bool valid)
{
    return valid ? MM_RECORD_EVENT : MM_RECORD_REJECTED;
}

/* --- the types ---------------------------------------------------------------------------- */

static mm_record_result
parse_host_fault(const unsigned char *record, mm_event *out)
{
    out->kind = MM_HOST_FAULT;
    out->access = record[1];
    out->source = MM_ON_HOST;
    out->extra = u32_at(record, 28);
    return event_if((record[1] == MM_READ_ACCESS || record[1] == MM_WRITE_ACCESS)
                    && read_access(record, 8, out) && read_time(record, 16, out));
}

/* The host's times cover a whole push, the work that the module submits at once: the moves of a
 * block begin together, and the module notices their end late, at the next flush at the latest.
 * The device's times of each move are exact. They give the event its length, and its distance from
 * the first move of the push, which `extra` keeps. */
static void
refine_times(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    uint64_t begin = u64_at(record, 48), end = u64_at(record, 56), offset;

    if (out->start != p->push_begin || begin < p->push_device_begin) {
        p->push_begin = out->start;
        p->push_device_begin = begin;
    }
    offset = begin - p->push_device_begin;
    if (begin != 0 && begin < end && offset <= out->end - out->start && offset <= UINT32_MAX
        && end - begin <= out->end - out->start - offset) {
        out->extra = (uint32_t)offset;
        out->start += offset;
        out->end = out->start + (end - begin);
    }
}

/* For a move between NUMA nodes of the host, the module names the host twice, and uses other
 * numbers for causes. Cause 0 is the access of a debugger. */
static mm_record_result
parse_move(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    out->kind = MM_MOVE;
    out->cause = record[1];
    if (!read_processor(p, record[2], &out->source)
        || !read_processor(p, record[3], &out->destination) || !read_pages(record, 8, 16, out)
        || !read_time(record, 24, out)) {
        return MM_RECORD_REJECTED;
    }
    out->end = u64_at(record, 32);
    if (out->end < out->start) {
        return MM_RECORD_REJECTED;
    }
    if (record[2] == record[3]) {
        return record[2] == 0 ? MM_RECORD_IGNORED : MM_RECORD_REJECTED;
    }
    refine_times(p, record, out);
    return event_if(record[1] < MM_MODULE_CAUSES);
}

/* A read that fetches ahead has an access number of its own, the one after atomic accesses. */
static mm_record_result
parse_device_fault(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    enum { FETCH_AHEAD = MM_ATOMIC_ACCESS + 1 };

    out->kind = MM_DEVICE_FAULT;
    out->access = record[2] == FETCH_AHEAD ? MM_READ_ACCESS : record[2];
    return event_if(record[2] >= MM_READ_ACCESS && record[2] <= FETCH_AHEAD && record[3] != 0
                    && read_processor(p, record[3], &out->source) && read_access(record, 8, out)
                    && read_time(record, 16, out));
}

static mm_record_result
parse_duplicate(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    out->kind = record[0] == MM_UVM_DUPLICATE ? MM_DUPLICATE : MM_THRASHING;
    return event_if(read_processors(p, u64_at(record, 8), &out->extra)
                    && read_pages(record, 16, 24, out) && read_time(record, 32, out));
}

static mm_record_result
parse_duplicate_end(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    out->kind = MM_DUPLICATE_END;
    return event_if(read_processor(p, record[1], &out->destination)
                    && read_pages(record, 8, 16, out) && read_time(record, 24, out));
}

static mm_record_result
parse_remote_map(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    out->kind = MM_REMOTE_MAP;
    out->extra = record[3];
    return event_if(record[3] >= MM_REMOTE_BY_FAULT && record[3] <= MM_REMOTE_BY_EVICTION
                    && read_processor(p, record[1], &out->source)
                    && read_processor(p, record[2], &out->destination)
                    && read_pages(record, 8, 16, out) && read_time(record, 24, out));
}

static mm_record_result
parse_eviction(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    out->kind = MM_EVICTION;
    return event_if(read_processor(p, record[1], &out->source)
                    && read_processor(p, record[2], &out->destination) && record[1] != record[2]
                    && read_pages(record, 8, 24, out) && read_time(record, 32, out));
}

/* --- throttling --------------------------------------------------------------------------- */

static bool
is_same_throttle(const mm_throttle *a, const mm_throttle *b)
{
    return a->begin != 0 && a->address == b->address && a->processor == b->processor;
}

/* The place of a throttle, else a free place, else the place of the oldest throttle. */
static mm_throttle *
find_place(mm_uvm_parser *p, const mm_throttle *sought)
{
    uint64_t hash = (sought->address / SMALLEST_PAGE + (uint64_t)(uint16_t)sought->processor)
                    * UINT64_C(0x9e3779b97f4a7c15);
    mm_throttle *set = p->throttles[hash >> 58], *oldest = set;

    _Static_assert(MM_THROTTLE_SETS == 1 << 6, "the hash has 6 bits");
    for (int i = 0; i < MM_THROTTLE_PLACES; i++) {
        if (is_same_throttle(&set[i], sought)) {
            return &set[i];
        }
        oldest = set[i].begin < oldest->begin ? &set[i] : oldest;
    }
    return oldest;
}

/* An end without a begin belongs to a throttling that began before the recording. */
static mm_record_result
parse_throttle(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    mm_throttle throttle = {0}, *place;

    out->kind = MM_THROTTLING;
    if (!read_processor(p, record[1], &out->source) || !read_access(record, 8, out)
        || !read_time(record, 16, out)) {
        return MM_RECORD_REJECTED;
    }
    throttle.address = out->address;
    throttle.begin = out->start;
    throttle.processor = out->source;
    place = find_place(p, &throttle);
    if (record[0] == MM_UVM_THROTTLE_BEGIN) {
        *place = throttle;
        return MM_RECORD_IGNORED;
    }
    if (!is_same_throttle(place, &throttle)) {
        return MM_RECORD_IGNORED;
    }
    out->start = place->begin;
    place->begin = 0;
    return event_if(out->start <= out->end);
}

/* --- all records -------------------------------------------------------------------------- */

static mm_record_result
parse_type(mm_uvm_parser *p, const unsigned char *record, mm_event *out)
{
    switch (record[0]) {
    case MM_UVM_HOST_FAULT:
        return parse_host_fault(record, out);
    case MM_UVM_MIGRATION:
        return parse_move(p, record, out);
    case MM_UVM_DEVICE_FAULT:
        return parse_device_fault(p, record, out);
    case MM_UVM_FAULT_OVERFLOW:
        p->fault_overflows++;
        return MM_RECORD_IGNORED;
    case MM_UVM_FATAL_FAULT:
        p->fatal_faults++;
        return MM_RECORD_IGNORED;
    case MM_UVM_DUPLICATE:
    case MM_UVM_THRASHING:
        return parse_duplicate(p, record, out);
    case MM_UVM_DUPLICATE_END:
        return parse_duplicate_end(p, record, out);
    case MM_UVM_THROTTLE_BEGIN:
    case MM_UVM_THROTTLE_END:
        return parse_throttle(p, record, out);
    case MM_UVM_REMOTE_MAP:
        return parse_remote_map(p, record, out);
    case MM_UVM_EVICTION:
        return parse_eviction(p, record, out);
    case MM_UVM_REPLAY:
    case MM_UVM_PAGE_SIZE:
        return MM_RECORD_IGNORED;
    default:
        return MM_RECORD_REJECTED;
    }
}

mm_record_result
mm_uvm_parse(mm_uvm_parser *p, const unsigned char record[MM_UVM_RECORD_BYTES], mm_event *out)
{
    mm_record_result result;

    memset(out, 0, sizeof *out);
    out->memory = MM_NO_MEMORY_INDEX;
    out->source = out->destination = MM_NO_PROCESSOR;
    result = parse_type(p, record, out);
    p->rejected += result == MM_RECORD_REJECTED;
    return result;
}

mm_record_result
mm_uvm_parse_listed(mm_uvm_parser *p, const unsigned char record[MM_UVM_RECORD_BYTES],
                    const int16_t *processors, mm_event *out)
{
    assert(p->rejected > 0);
    p->rejected--;
    memcpy(p->processors, processors, sizeof p->processors);
    return mm_uvm_parse(p, record, out);
}

void
mm_uvm_parser_init(mm_uvm_parser *p, const int16_t *processors, size_t count)
{
    assert(count <= MM_UVM_PROCESSORS);
    memset(p, 0, sizeof *p);
    for (size_t i = 0; i < MM_UVM_PROCESSORS; i++) {
        p->processors[i] = MM_NO_PROCESSOR;
    }
    memcpy(p->processors, processors, count * sizeof *processors);
}

uint64_t
mm_uvm_types(bool faults)
{
    const uint64_t one = 1;
    uint64_t types = one << MM_UVM_MIGRATION | one << MM_UVM_FAULT_OVERFLOW
                     | one << MM_UVM_FATAL_FAULT | one << MM_UVM_DUPLICATE
                     | one << MM_UVM_DUPLICATE_END | one << MM_UVM_THRASHING
                     | one << MM_UVM_THROTTLE_BEGIN | one << MM_UVM_THROTTLE_END
                     | one << MM_UVM_REMOTE_MAP | one << MM_UVM_EVICTION;

    return faults ? types | one << MM_UVM_HOST_FAULT | one << MM_UVM_DEVICE_FAULT : types;
}
