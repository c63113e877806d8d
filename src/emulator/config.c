/* The configuration of the emulated machine: the environment variable MANAGEDMEM_EMULATOR, a comma
 * list of key=value in which `profile=NAME` may come first.  Owns the profiles. */
#include "emulator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    struct emu_config config;
} profiles[] = {
    {"default",
     {.devices = 2,
      .numa_nodes = 2,
      .driver = 13000,
      .concurrent = true,
      .capacity = (size_t)1 << 30,
      .page = 4096,
      .name = "Emulated GPU"}},
    {"h200",
     {.devices = 1,
      .numa_nodes = 1,
      .driver = 13000,
      .concurrent = true,
      .discard = EMU_DISCARD_KEEP,
      .capacity = (size_t)1 << 30,
      .page = 4096,
      .name = "Emulated H200"}},
    {"h200-x2",
     {.devices = 2,
      .numa_nodes = 1,
      .driver = 13000,
      .concurrent = true,
      .discard = EMU_DISCARD_KEEP,
      .capacity = (size_t)1 << 30,
      .page = 4096,
      .name = "Emulated H200"}},
    {"wsl",
     {.devices = 2,
      .numa_nodes = 1,
      .driver = 13000,
      .concurrent = false,
      .capacity = (size_t)1 << 30,
      .page = 4096,
      .name = "Emulated GPU"}},
    {"old12",
     {.devices = 2,
      .numa_nodes = 2,
      .driver = 12020,
      .concurrent = true,
      .capacity = (size_t)1 << 30,
      .page = 4096,
      .name = "Emulated GPU"}},
};

enum { DEVICES, NODES, DRIVER, CONCURRENT, PAGEABLE, CAPACITY, PAGE, NO_PEERS, NO_INIT, NUMBERS };

static const struct {
    const char *key;
    long low, high;
} numbers[NUMBERS] = {
    [DEVICES] = {"devices", 1, EMU_MAX_DEVICES},
    [NODES] = {"numa_nodes", 1, EMU_MAX_NODES},
    [DRIVER] = {"driver", 12020, 13050},
    [CONCURRENT] = {"concurrent", 0, 1},
    [PAGEABLE] = {"pageable", 0, 1},
    [CAPACITY] = {"capacity_mib", 1, 1 << 20},
    [PAGE] = {"page", 4096, 65536},
    [NO_PEERS] = {"nopeers", 0, 1},
    [NO_INIT] = {"noinit", 0, 1},
};

static struct emu_config active;
static char error[384]; /* the error in the environment, or empty */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool
use_profile(const char *name)
{
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        if (strcmp(profiles[i].name, name) == 0) {
            active = profiles[i].config;
            return true;
        }
    }
    return false;
}

static bool
read_number(const char *text, long low, long high, long *out)
{
    char *end = NULL;

    errno = 0;
    *out = strtol(text, &end, 10);
    return errno == 0 && end != text && *end == '\0' && *out >= low && *out <= high;
}

static bool
set_words(const char *key, const char *text)
{
    if (strcmp(key, "schedule") == 0) {
        active.lazy = strcmp(text, "lazy") == 0;
        return active.lazy || strcmp(text, "eager") == 0;
    }
    if (strcmp(key, "discard") == 0) {
        static const char *const words[] = {"poison", "keep", "zero"};
        for (int i = 0; i < 3; i++) {
            if (strcmp(text, words[i]) == 0) {
                active.discard = (enum emu_discard)i;
                return true;
            }
        }
    }
    return false;
}

/* The index of a key among the numbers, NUMBERS for other keys. */
static int
find_number(const char *key)
{
    int i = 0;

    while (i < NUMBERS && strcmp(numbers[i].key, key) != 0) {
        i++;
    }
    return i;
}

static bool
set_option(const char *key, const char *text)
{
    int i = find_number(key);
    long number = 0;

    if (strcmp(key, "profile") == 0) {
        return use_profile(text);
    }
    if (i == NUMBERS) {
        return set_words(key, text);
    }
    if (!read_number(text, numbers[i].low, numbers[i].high, &number)) {
        return false;
    }
    switch (i) {
    case DEVICES:
        active.devices = (int)number;
        break;
    case NODES:
        active.numa_nodes = (int)number;
        break;
    case DRIVER:
        active.driver = (int)number;
        break;
    case CONCURRENT:
        active.concurrent = number != 0;
        break;
    case PAGEABLE:
        active.pageable = number != 0;
        break;
    case CAPACITY:
        active.capacity = (size_t)number << 20;
        break;
    case PAGE:
        active.page = (size_t)number;
        break;
    case NO_PEERS:
        active.nopeers = number != 0;
        break;
    default:
        active.noinit = number != 0;
        break;
    }
    return (active.page & (active.page - 1)) == 0;
}

/* Describes the values of a key, or lists the keys. */
static void
describe(const char *key, char *text, size_t size)
{
    static const char *const words[][2] = {
        {"schedule", "schedule is eager or lazy"},
        {"discard", "discard is poison, keep or zero"},
        {"profile", "profile is default, h200, h200-x2, wsl or old12"},
        {"page", "page is a power of two from 4096 to 65536"},
    };
    int i = find_number(key);

    for (size_t k = 0; k < sizeof words / sizeof *words; k++) {
        if (strcmp(words[k][0], key) == 0) {
            (void)snprintf(text, size, "%s", words[k][1]);
            return;
        }
    }
    if (i < NUMBERS) {
        (void)snprintf(text, size, "%s is a number from %ld to %ld", key, numbers[i].low,
                       numbers[i].high);
        return;
    }
    (void)snprintf(text, size, "key=value is needed, and the keys are profile, schedule, discard");
    for (i = 0; i < NUMBERS; i++) {
        size_t used = strlen(text);
        (void)snprintf(text + used, size - used, ", %s", numbers[i].key);
    }
}

static void
refuse(const char *key, const char *text)
{
    char taken[192];

    describe(key, taken, sizeof taken);
    (void)snprintf(error, sizeof error, "MANAGEDMEM_EMULATOR: cannot use '%.64s%s%.64s'; %s", key,
                   text == NULL ? "" : "=", text == NULL ? "" : text, taken);
}

static void
load(void)
{
    const char *environment = getenv("MANAGEDMEM_EMULATOR");
    char *text, *save = NULL;

    (void)use_profile("default");
    if (environment == NULL || environment[0] == '\0') {
        return;
    }
    text = strdup(environment);
    if (text == NULL) {
        (void)snprintf(error, sizeof error, "MANAGEDMEM_EMULATOR: out of memory");
        return;
    }
    for (char *item = strtok_r(text, ",", &save); item != NULL;
         item = strtok_r(NULL, ",", &save)) {
        char *equals = strchr(item, '=');
        if (equals != NULL) {
            *equals = '\0';
        }
        if (equals == NULL || !set_option(item, equals + 1)) {
            refuse(item, equals == NULL ? NULL : equals + 1);
        }
    }
    free(text);
}

const struct emu_config *
emu_config(void)
{
    pthread_once(&once, load);
    return &active;
}

const char *
emu_config_error(void)
{
    (void)emu_config();
    return error;
}
