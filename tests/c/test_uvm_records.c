/* test_uvm_records.c: records of every type become events field by field, whatever a byte of them
 * is; pairs of throttles. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "trace/recorded_events.h"
#include "trace/uvm_records.h"

enum { HOST = 0, FIRST = 1, SECOND = 2, STRANGER = 3, UNUSED = 4, PAGE = 4096 };
static const uint64_t ADDRESS = 0x7f1234567000, TIME = 1000000007, TIB = (uint64_t)1 << 40;

typedef struct {
    unsigned char bytes[MM_UVM_RECORD_BYTES];
} raw;

static mm_uvm_parser
new_parser(void)
{
    static const int16_t processors[] = {MM_ON_HOST, 0, 1, MM_OTHER_PROCESSOR};
    mm_uvm_parser parser;

    mm_uvm_parser_init(&parser, processors, sizeof processors / sizeof *processors);
    return parser;
}

static raw
with(raw record, size_t offset, uint64_t value, size_t size)
{
    memcpy(record.bytes + offset, &value, size);
    return record;
}

/* `first` are the bytes before address, amount and time, which begin at `offset`. */
static raw
range_record(const unsigned char first[8], size_t offset, uint64_t amount)
{
    raw record = {{0}};

    memcpy(record.bytes, first, 8);
    record = with(record, offset, ADDRESS, 8);
    record = with(record, offset + 8, amount, 8);
    return with(record, offset + 16, TIME, 8);
}

static raw
a_host_fault(void)
{
    raw record = {{MM_UVM_HOST_FAULT, 2}};

    record = with(record, 8, ADDRESS + 5, 8);
    record = with(record, 16, TIME, 8);
    record = with(record, 24, 4711, 4);
    return with(record, 28, 4712, 4);
}

static raw
a_move(void)
{
    const unsigned char first[8] = {MM_UVM_MIGRATION, MM_CAUSE_SPECULATIVE, HOST, SECOND};

    return with(range_record(first, 8, 3 * PAGE), 32, TIME + 500, 8);
}

static raw
a_device_fault(void)
{
    raw record = {{MM_UVM_DEVICE_FAULT, 0, 3, FIRST}};

    record = with(record, 8, ADDRESS, 8);
    return with(record, 16, TIME, 8);
}

static raw
a_set(mm_uvm_type type, uint64_t processors)
{
    const unsigned char first[8] = {(unsigned char)type};

    return with(range_record(first, 16, 16 * PAGE), 8, processors, 8);
}

static raw
a_duplicate_end(void)
{
    const unsigned char first[8] = {MM_UVM_DUPLICATE_END, SECOND};

    return range_record(first, 8, PAGE);
}

static raw
a_throttle(mm_uvm_type type, int processor, uint64_t address, uint64_t time)
{
    raw record = {{(unsigned char)type, (unsigned char)processor}};

    return with(with(record, 8, address, 8), 16, time, 8);
}

static raw
a_remote_map(void)
{
    const unsigned char first[8] = {MM_UVM_REMOTE_MAP, FIRST, HOST, MM_REMOTE_BY_ADVICE};

    return range_record(first, 8, 2 << 20);
}

static raw
an_eviction(void)
{
    raw record = {{MM_UVM_EVICTION, FIRST, HOST}};

    record = with(record, 8, ADDRESS, 8);
    record = with(record, 16, ADDRESS * 2, 8);
    record = with(record, 24, 2 << 20, 8);
    return with(record, 32, TIME, 8);
}

/* --- fields ------------------------------------------------------------------------------- */

/* Parses a valid record, and compares the event with the fields that stand here. */
static void
becomes(raw record, mm_event expected)
{
    mm_uvm_parser parser = new_parser();
    mm_event event;

    memset(&event, 0xee, sizeof event);
    CHECK_EQUAL(mm_uvm_parse(&parser, record.bytes, &event), MM_RECORD_EVENT);
    CHECK_EQUAL(event.start, expected.start);
    CHECK_EQUAL(event.end, expected.end);
    CHECK_EQUAL(event.address, expected.address);
    CHECK_EQUAL(event.amount, expected.amount);
    CHECK_EQUAL(event.memory, MM_NO_MEMORY_INDEX);
    CHECK_EQUAL(event.source, expected.source);
    CHECK_EQUAL(event.destination, expected.destination);
    CHECK_EQUAL(event.kind, expected.kind);
    CHECK_EQUAL(event.cause, expected.cause);
    CHECK_EQUAL(event.access, expected.access);
    CHECK_EQUAL(event.flags, 0);
    CHECK_EQUAL(event.extra, expected.extra);
    CHECK_EQUAL(parser.rejected, 0);
}

TEST(every_type_becomes_its_event)
{
    const uint32_t host_and_second = (uint32_t)1 << MM_SET_HOST_BIT | 1 << 1;

    becomes(a_host_fault(), (mm_event){TIME, TIME, ADDRESS + 5, 1, 0, MM_ON_HOST, MM_NO_PROCESSOR,
                                       MM_HOST_FAULT, 0, MM_WRITE_ACCESS, 0, 4712});
    becomes(a_move(), (mm_event){TIME, TIME + 500, ADDRESS, 3 * PAGE, 0, MM_ON_HOST, 1, MM_MOVE,
                                 MM_CAUSE_SPECULATIVE, 0, 0, 0});
    becomes(a_device_fault(), (mm_event){TIME, TIME, ADDRESS, 1, 0, 0, MM_NO_PROCESSOR,
                                         MM_DEVICE_FAULT, 0, MM_ATOMIC_ACCESS, 0, 0});
    becomes(a_set(MM_UVM_DUPLICATE, 1 << HOST | 1 << SECOND),
            (mm_event){TIME, TIME, ADDRESS, 16 * PAGE, 0, MM_NO_PROCESSOR, MM_NO_PROCESSOR,
                       MM_DUPLICATE, 0, 0, 0, host_and_second});
    becomes(a_set(MM_UVM_THRASHING, 1 << FIRST | 1 << STRANGER),
            (mm_event){TIME, TIME, ADDRESS, 16 * PAGE, 0, MM_NO_PROCESSOR, MM_NO_PROCESSOR,
                       MM_THRASHING, 0, 0, 0, 1});
    becomes(a_duplicate_end(), (mm_event){TIME, TIME, ADDRESS, PAGE, 0, MM_NO_PROCESSOR, 1,
                                          MM_DUPLICATE_END, 0, 0, 0, 0});
    becomes(a_remote_map(), (mm_event){TIME, TIME, ADDRESS, 2 << 20, 0, 0, MM_ON_HOST,
                                       MM_REMOTE_MAP, 0, 0, 0, MM_REMOTE_BY_ADVICE});
    becomes(an_eviction(),
            (mm_event){TIME, TIME, ADDRESS, 2 << 20, 0, 0, MM_ON_HOST, MM_EVICTION, 0, 0, 0, 0});
    becomes(with(a_move(), 3, STRANGER, 1),
            (mm_event){TIME, TIME + 500, ADDRESS, 3 * PAGE, 0, MM_ON_HOST, MM_OTHER_PROCESSOR,
                       MM_MOVE, MM_CAUSE_SPECULATIVE, 0, 0, 0});
    becomes(with(a_move(), 1, 0, 1), (mm_event){TIME, TIME + 500, ADDRESS, 3 * PAGE, 0, MM_ON_HOST,
                                                1, MM_MOVE, MM_CAUSE_UNKNOWN, 0, 0, 0});
    becomes(with(a_device_fault(), 2, 4, 1), /* a fetch ahead */
            (mm_event){TIME, TIME, ADDRESS, 1, 0, 0, MM_NO_PROCESSOR, MM_DEVICE_FAULT, 0,
                       MM_READ_ACCESS, 0, 0});
}

static void
is_rejected(raw record)
{
    mm_uvm_parser parser = new_parser();
    mm_event event;

    CHECK_EQUAL(mm_uvm_parse(&parser, record.bytes, &event), MM_RECORD_REJECTED);
    CHECK_EQUAL(parser.rejected, 1);
}

/* Address, amount and time of a record that speaks of bytes. */
static void
bad_ranges_are_rejected(raw record, size_t address, size_t amount, size_t time)
{
    is_rejected(with(record, address, 0, 8));
    is_rejected(with(record, address, ADDRESS + 1, 8));
    is_rejected(with(record, address, ADDRESS + PAGE / 2, 8));
    is_rejected(with(record, address, UINT64_MAX - PAGE + 1, 8)); /* passes the end of memory */
    is_rejected(with(record, amount, 0, 8));
    is_rejected(with(record, amount, PAGE + 1, 8));
    is_rejected(with(record, amount, TIB + PAGE, 8));
    is_rejected(with(record, time, 0, 8));
}

TEST(bad_fields_are_rejected)
{
    bad_ranges_are_rejected(a_move(), 8, 16, 24);
    bad_ranges_are_rejected(a_set(MM_UVM_DUPLICATE, 3), 16, 24, 32);
    bad_ranges_are_rejected(a_set(MM_UVM_THRASHING, 3), 16, 24, 32);
    bad_ranges_are_rejected(a_duplicate_end(), 8, 16, 24);
    bad_ranges_are_rejected(a_remote_map(), 8, 16, 24);
    bad_ranges_are_rejected(an_eviction(), 8, 24, 32);
    becomes(with(a_move(), 16, TIB, 8), (mm_event){TIME, TIME + 500, ADDRESS, TIB, 0, MM_ON_HOST,
                                                   1, MM_MOVE, MM_CAUSE_SPECULATIVE, 0, 0, 0});
    is_rejected(with(a_move(), 1, MM_MODULE_CAUSES, 1));
    is_rejected(with(a_move(), 2, UNUSED, 1));
    is_rejected(with(a_move(), 3, UNUSED, 1));
    is_rejected(with(a_move(), 3, MM_UVM_PROCESSORS, 1));
    is_rejected(with(a_move(), 3, 255, 1));
    is_rejected(with(a_move(), 2, SECOND, 1)); /* to itself */
    is_rejected(with(a_move(), 32, TIME - 1, 8));
    is_rejected(with(a_host_fault(), 1, 0, 1));
    is_rejected(with(a_host_fault(), 1, 3, 1));
    is_rejected(with(a_host_fault(), 8, 0, 8));
    is_rejected(with(a_host_fault(), 8, UINT64_MAX, 8));
    is_rejected(with(a_host_fault(), 16, 0, 8));
    is_rejected(with(a_device_fault(), 2, 0, 1));
    is_rejected(with(a_device_fault(), 2, 5, 1));
    is_rejected(with(a_device_fault(), 3, HOST, 1));
    is_rejected(with(a_device_fault(), 3, UNUSED, 1));
    is_rejected(a_set(MM_UVM_DUPLICATE, 0));
    is_rejected(a_set(MM_UVM_DUPLICATE, 1 << UNUSED));
    is_rejected(a_set(MM_UVM_DUPLICATE, (uint64_t)1 << 63 | 1));
    is_rejected(with(a_duplicate_end(), 1, UNUSED, 1));
    is_rejected(with(a_remote_map(), 3, 0, 1));
    is_rejected(with(a_remote_map(), 3, 6, 1));
    is_rejected(with(a_remote_map(), 1, UNUSED, 1));
    is_rejected(with(a_remote_map(), 2, UNUSED, 1));
    is_rejected(with(an_eviction(), 2, FIRST, 1));
    is_rejected(with(an_eviction(), 1, UNUSED, 1));
}

TEST(other_records_are_ignored_or_rejected)
{
    mm_uvm_parser parser = new_parser();
    mm_event event;

    for (unsigned type = 0; type < 256; type++) {
        raw record = {{(unsigned char)type}};
        mm_record_result result = mm_uvm_parse(&parser, record.bytes, &event);
        bool told = type >= MM_UVM_REPLAY && type <= MM_UVM_FATAL_FAULT;
        CHECK_EQUAL(result,
                    told || type == MM_UVM_PAGE_SIZE ? MM_RECORD_IGNORED : MM_RECORD_REJECTED);
    }
    CHECK_EQUAL(parser.fault_overflows, 1);
    CHECK_EQUAL(parser.fatal_faults, 1);
    CHECK_EQUAL(parser.rejected, 256 - 4);
    /* From one node of the host's memory to another, where modules use other numbers of causes. */
    CHECK_EQUAL(mm_uvm_parse(&parser, with(a_move(), 3, HOST, 1).bytes, &event),
                MM_RECORD_IGNORED);
    CHECK_EQUAL(mm_uvm_parse(&parser,
                             with(with(a_move(), 3, HOST, 1), 1, MM_MODULE_CAUSES + 2, 1).bytes,
                             &event),
                MM_RECORD_IGNORED);
    CHECK_EQUAL(parser.rejected, 256 - 4);
}

/* --- times of moves ----------------------------------------------------------------------- */

static void
move_lasts(mm_uvm_parser *parser, const uint64_t times[4], uint64_t start, uint64_t end)
{
    raw record = a_move();
    mm_event event;

    for (size_t i = 0; i < 4; i++) {
        record = with(record, (size_t[]){24, 32, 48, 56}[i], times[i], 8);
    }
    CHECK_EQUAL(mm_uvm_parse(parser, record.bytes, &event), MM_RECORD_EVENT);
    CHECK_EQUAL(event.start, start);
    CHECK_EQUAL(event.end, end);
    CHECK_EQUAL(event.extra, start - times[0]);
}

/* The host noticed the end of a push late; the device's clock is another one. */
TEST(moves_last_as_long_as_on_the_device)
{
    mm_uvm_parser p = new_parser();

    move_lasts(&p, (uint64_t[]){1000, 9000, 77000, 77100}, 1000, 1100);
    move_lasts(&p, (uint64_t[]){1000, 9000, 77100, 77250}, 1100, 1250); /* the same push */
    move_lasts(&p, (uint64_t[]){1000, 9000, 77400, 77500}, 1400, 1500);
    move_lasts(&p, (uint64_t[]){2000, 9000, 78000, 78010}, 2000, 2010); /* the next one */
    move_lasts(&p, (uint64_t[]){2000, 9000, 70000, 70020}, 2000, 2020); /* another device */
    /* Times that cannot be: none, backwards, longer than the host saw. */
    move_lasts(&p, (uint64_t[]){3000, 4000, 0, 0}, 3000, 4000);
    move_lasts(&p, (uint64_t[]){3100, 4000, 0, 500}, 3100, 4000);
    move_lasts(&p, (uint64_t[]){3200, 4000, 600, 500}, 3200, 4000);
    move_lasts(&p, (uint64_t[]){3300, 4000, 500, 500}, 3300, 4000);
    move_lasts(&p, (uint64_t[]){3400, 4000, 500, 1101}, 3400, 4000);
    move_lasts(&p, (uint64_t[]){3400, 4000, 1101, 1102}, 3400, 4000);
    move_lasts(&p, (uint64_t[]){3400, 4000, UINT64_MAX - 1, UINT64_MAX}, 3400, 4000);
    move_lasts(&p, (uint64_t[]){3500, 4000, 500, 1000}, 3500, 4000);
}

/* --- every byte --------------------------------------------------------------------------- */

static void
check_event(const mm_event *event)
{
    bool pages = event->kind != MM_HOST_FAULT && event->kind != MM_DEVICE_FAULT
                 && event->kind != MM_THROTTLING;

    CHECK(event->kind < MM_CALL);
    CHECK(event->start != 0 && event->start <= event->end);
    CHECK(event->address != 0);
    CHECK(event->amount > 0 && event->amount <= TIB);
    CHECK(pages || event->amount == 1);
    CHECK(!pages || (event->address % PAGE == 0 && event->amount % PAGE == 0));
    CHECK(event->address <= UINT64_MAX - event->amount);
    CHECK(event->cause < MM_MODULE_CAUSES && (event->kind == MM_MOVE || event->cause == 0));
    CHECK(event->access <= MM_ATOMIC_ACCESS);
    CHECK(event->source == MM_OTHER_PROCESSOR || (event->source >= -2 && event->source < 2));
    CHECK(event->destination == MM_OTHER_PROCESSOR
          || (event->destination >= -2 && event->destination < 2));
    CHECK(event->memory == MM_NO_MEMORY_INDEX && event->flags == 0);
}

/* Each of the 64 bytes gets each of its 256 values. */
TEST(any_byte_may_be_anything)
{
    const raw records[] = {a_host_fault(),
                           a_move(),
                           a_device_fault(),
                           a_set(MM_UVM_DUPLICATE, 3),
                           a_set(MM_UVM_THRASHING, 3),
                           a_duplicate_end(),
                           a_remote_map(),
                           an_eviction(),
                           a_throttle(MM_UVM_THROTTLE_BEGIN, FIRST, ADDRESS, TIME),
                           a_throttle(MM_UVM_THROTTLE_END, FIRST, ADDRESS, TIME)};
    mm_uvm_parser parser = new_parser();
    uint64_t rejected = 0;

    for (size_t i = 0; i < sizeof records / sizeof *records; i++) {
        for (size_t byte = 0; byte < MM_UVM_RECORD_BYTES * (size_t)256; byte++) {
            raw record = with(records[i], byte / 256, byte % 256, 1);
            mm_event event;
            mm_record_result result = mm_uvm_parse(&parser, record.bytes, &event);
            rejected += result == MM_RECORD_REJECTED;
            if (result == MM_RECORD_EVENT) {
                check_event(&event);
            }
        }
    }
    CHECK_EQUAL(parser.rejected, rejected);
    CHECK(rejected > 10 * 256);
}

/* --- throttling --------------------------------------------------------------------------- */

static mm_record_result
throttle(mm_uvm_parser *parser, mm_uvm_type type, int processor, uint64_t address, uint64_t time,
         mm_event *event)
{
    return mm_uvm_parse(parser, a_throttle(type, processor, address, time).bytes, event);
}

TEST(throttles_begin_and_end)
{
    const mm_uvm_type begin = MM_UVM_THROTTLE_BEGIN, end = MM_UVM_THROTTLE_END;
    mm_uvm_parser p = new_parser();
    mm_event e;

    CHECK_EQUAL(throttle(&p, end, FIRST, ADDRESS, 5, &e), MM_RECORD_IGNORED); /* begun before */
    CHECK_EQUAL(throttle(&p, begin, FIRST, ADDRESS, 10, &e), MM_RECORD_IGNORED);
    CHECK_EQUAL(throttle(&p, begin, HOST, ADDRESS, 11, &e), MM_RECORD_IGNORED);
    CHECK_EQUAL(throttle(&p, begin, FIRST, ADDRESS + PAGE, 12, &e), MM_RECORD_IGNORED);
    CHECK_EQUAL(throttle(&p, end, FIRST, ADDRESS, 30, &e), MM_RECORD_EVENT);
    CHECK_EQUAL(e.kind, MM_THROTTLING);
    CHECK_EQUAL(e.source, 0);
    CHECK_EQUAL(e.address, ADDRESS);
    CHECK_EQUAL(e.amount, 1);
    CHECK_EQUAL(e.start, 10);
    CHECK_EQUAL(e.end, 30);
    CHECK_EQUAL(throttle(&p, end, FIRST, ADDRESS, 31, &e), MM_RECORD_IGNORED); /* ended */
    CHECK_EQUAL(throttle(&p, end, HOST, ADDRESS, 32, &e), MM_RECORD_EVENT);
    CHECK_EQUAL(e.source, MM_ON_HOST);
    CHECK_EQUAL(e.start, 11);
    CHECK_EQUAL(throttle(&p, begin, FIRST, ADDRESS, 40, &e), MM_RECORD_IGNORED);
    CHECK_EQUAL(throttle(&p, begin, FIRST, ADDRESS, 50, &e), MM_RECORD_IGNORED); /* again */
    CHECK_EQUAL(throttle(&p, end, FIRST, ADDRESS, 60, &e), MM_RECORD_EVENT);
    CHECK_EQUAL(e.start, 50);
    CHECK_EQUAL(throttle(&p, end, FIRST, ADDRESS + PAGE, 11, &e), MM_RECORD_REJECTED);
    CHECK_EQUAL(throttle(&p, begin, UNUSED, ADDRESS, 12, &e), MM_RECORD_REJECTED);
    CHECK_EQUAL(p.rejected, 2);
}

/* As many as an H100 had at once for pages that were written from two sides. */
TEST(hundreds_of_throttles_find_their_ends)
{
    enum { PAGES = 200 };
    mm_uvm_parser p = new_parser();
    uint64_t waited = 0;
    mm_event e;

    for (uint64_t i = 0; i < PAGES; i++) {
        CHECK_EQUAL(throttle(&p, MM_UVM_THROTTLE_BEGIN, FIRST, ADDRESS + i * PAGE, 1000 + i, &e),
                    MM_RECORD_IGNORED);
    }
    for (uint64_t i = 0; i < PAGES; i++) {
        CHECK_EQUAL(throttle(&p, MM_UVM_THROTTLE_END, FIRST, ADDRESS + i * PAGE, 2000 + 2 * i, &e),
                    MM_RECORD_EVENT);
        waited += e.end - e.start;
    }
    CHECK_EQUAL(waited, PAGES * 1000 + PAGES * (PAGES - 1) / 2);
}

/* More than there is space for push the oldest out; none gets the time of another. */
TEST(throttles_beyond_the_space_push_out_the_oldest)
{
    enum { PAGES = 100000 };
    mm_uvm_parser p = new_parser();
    uint64_t found = 0;
    mm_event e;

    for (uint64_t i = 0; i < PAGES; i++) {
        (void)throttle(&p, MM_UVM_THROTTLE_BEGIN, FIRST, ADDRESS + i * PAGE, 1000 + i, &e);
    }
    for (uint64_t i = 0; i < PAGES; i++) {
        if (throttle(&p, MM_UVM_THROTTLE_END, FIRST, ADDRESS + i * PAGE, 2000000, &e)
            == MM_RECORD_EVENT) {
            CHECK_EQUAL(e.start, 1000 + i);
            CHECK(i > PAGES * 9 / 10);
            found++;
        }
    }
    CHECK_EQUAL(found, MM_THROTTLE_SETS * MM_THROTTLE_PLACES);
}

TEST(types_are_those_that_are_read)
{
    uint64_t faults = (uint64_t)1 << MM_UVM_HOST_FAULT | (uint64_t)1 << MM_UVM_DEVICE_FAULT;

    CHECK_EQUAL(mm_uvm_types(true) & ~mm_uvm_types(false), faults);
    CHECK_EQUAL(mm_uvm_types(false) & faults, 0);
    CHECK_EQUAL(mm_uvm_types(true),
                0x7fff & ~(1 << 0 | 1 << MM_UVM_REPLAY | 1 << MM_UVM_PAGE_SIZE));
}

TEST(processors_that_are_listed_later_are_read)
{
    static const int16_t later[MM_UVM_PROCESSORS] = {MM_ON_HOST, 0, 1, MM_OTHER_PROCESSOR, 3};
    mm_uvm_parser p = new_parser();
    raw record = with(a_move(), 3, UNUSED, 1);
    mm_event event;

    CHECK_EQUAL(mm_uvm_parse(&p, with(a_move(), 3, 255, 1).bytes, &event), MM_RECORD_REJECTED);
    CHECK_EQUAL(p.unlisted, 0);
    CHECK_EQUAL(mm_uvm_parse(&p, record.bytes, &event), MM_RECORD_REJECTED);
    CHECK_EQUAL(p.unlisted, 1 << UNUSED);
    CHECK_EQUAL(mm_uvm_parse_listed(&p, record.bytes, later, &event), MM_RECORD_EVENT);
    CHECK_EQUAL(event.destination, 3);
    CHECK_EQUAL(p.rejected, 1);
}

/* A page behind another one, of the same push. */
TEST(pages_of_one_push_become_one_move)
{
    const mm_event first = {TIME, TIME + 10, ADDRESS,        PAGE, 0, MM_ON_HOST,
                            0,    MM_MOVE,   MM_CAUSE_FAULT, 0,    0, 0};
    mm_event page = first, others[7], joined = first;

    page.address += PAGE;
    page.start += 10;
    page.extra = 10;
    page.end = TIME + 20;
    CHECK(mm_event_join(&joined, &page, PAGE));
    CHECK_EQUAL(joined.amount, 2 * PAGE);
    CHECK_EQUAL(joined.start, TIME);
    CHECK_EQUAL(joined.end, TIME + 20);
    CHECK_EQUAL(joined.extra, 0);
    CHECK(!mm_event_join(&joined, &page, PAGE)); /* it is not behind both */
    for (size_t i = 0; i < 7; i++) {
        others[i] = page;
    }
    others[0].kind = MM_EVICTION;
    others[1].amount = 2 * PAGE;
    others[2].address += PAGE;
    others[3].destination = 1;
    others[4].source = 1;
    others[5].cause = MM_CAUSE_SPECULATIVE;
    others[6].extra = 9; /* of another push */
    for (size_t i = 0; i < 7; i++) {
        joined = first;
        CHECK(!mm_event_join(&joined, &others[i], PAGE));
        CHECK_EQUAL(joined.amount, PAGE);
    }
    joined = first;
    joined.address = (ADDRESS | ((2 << 20) - 1)) + 1 - PAGE;
    page.address = joined.address + PAGE; /* in the next block */
    CHECK(!mm_event_join(&joined, &page, PAGE));
}

TEST_MAIN(no_driver)
