/* options.c: the fuzz target for the options of the emulated driver. An input is the text of
 * MANAGEDMEM_EMULATOR. The parser is compiled into the target, which gives it that text in place
 * of the environment. */
#include <stdint.h>

#include "../../src/emulator/emulator.h"

static char options[4096];

static const char *
options_of_the_case(void)
{
    return options;
}

#ifndef PARSER /* a copy with a fault, to see that the target finds it */
#define PARSER "../../src/emulator/config.c"
#endif
#define getenv(name) options_of_the_case()
#include PARSER
#undef getenv

#define MUST(condition)                                                                       \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "not so: %s\nwith: %s\nerror: %s\n", #condition, options, error); \
            abort();                                                                          \
        }                                                                                     \
    } while (0)

static void
read_text(void)
{
    error[0] = '\0';
    load_environment();
}

/* What the rest of the emulated driver relies on. */
static void
check_machine(void)
{
    MUST(active.devices >= 1 && active.devices <= EMU_MAX_DEVICES);
    MUST(active.numa_nodes >= 1 && active.numa_nodes <= EMU_MAX_NODES);
    MUST(active.driver >= 12020 && active.driver <= 13050);
    MUST(active.capacity >= (size_t)1 << 20 && active.capacity <= (size_t)1 << 40);
    MUST(active.page >= 4096 && active.page <= 65536 && (active.page & (active.page - 1)) == 0);
    MUST(active.discard == EMU_DISCARD_POISON || active.discard == EMU_DISCARD_KEEP
         || active.discard == EMU_DISCARD_ZERO);
    for (int i = 0; i < EMU_QUEUE_FAULTS; i++) {
        MUST(active.queue_faults[i] >= 0);
        MUST(active.queue_faults[i] <= (i < EMU_QUEUE_DROP ? 1 : 1 << 20));
    }
    MUST(active.name != NULL && active.name[0] != '\0');
}

/* Whether an item between two commas has no equals sign. */
static bool
has_bare_item(void)
{
    for (const char *item = options; *item != '\0';) {
        size_t length = strcspn(item, ",");
        if (length > 0 && memchr(item, '=', length) == NULL) {
            return true;
        }
        item += length + (item[length] == ',');
    }
    return false;
}

/* The last of several values wins. */
static void
check_last_wins(void)
{
    size_t length = strlen(options);

    if (length + sizeof ",devices=7,page=8192" > sizeof options) {
        return;
    }
    memcpy(options + length, ",devices=7,page=8192", sizeof ",devices=7,page=8192");
    read_text();
    MUST(error[0] == '\0' && active.devices == 7 && active.page == 8192);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size >= sizeof options) {
        return -1; /* not for the corpus */
    }
    memcpy(options, data, size);
    options[size] = '\0';
    read_text();
    MUST(memchr(error, '\0', sizeof error) != NULL);
    if (error[0] != '\0') {
        MUST(strncmp(error, "MANAGEDMEM_EMULATOR: ", 21) == 0);
        return 0;
    }
    check_machine();
    MUST(!has_bare_item());
    check_last_wins();
    return 0;
}
