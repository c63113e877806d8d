/* The configuration of the emulated machine, with its profiles. The environment variable
 * MANAGEDMEM_EMULATOR is a list of key=value, separated by commas; an optional `profile=NAME` comes
 * first. Without the key `page`, pages have the size of the kernel's pages. */
#include "emulator.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Each profile, as differences from the first one. */
static const struct {
    const char *name, *device, *options;
} profiles[] = {
    {"default", "Emulated GPU",
     "devices=2,numa_nodes=2,driver=13000,concurrent=1,capacity_mib=1024"},
    {"h200", "Emulated H200", "devices=1,numa_nodes=1,discard=keep"},
    {"h200-x2", "Emulated H200", "numa_nodes=1,discard=keep"},
    {"wsl", "Emulated GPU", "numa_nodes=1,concurrent=0"},
    {"old12", "Emulated GPU", "driver=12020"},
};

enum number_type { INTEGER, BOOLEAN, BYTES, MEBIBYTES };

#define QUEUE_KEY(key, high, fault) \
    {key, 0, high, INTEGER, offsetof(struct emu_config, queue_faults) + (fault) * sizeof(int)}

/* The keys whose values are numbers, with the member of struct emu_config that each one sets. */
static const struct number_key {
    const char *key;
    long low, high;
    enum number_type type;
    size_t offset;
} number_keys[] = {
    {"devices", 1, EMU_MAX_DEVICES, INTEGER, offsetof(struct emu_config, devices)},
    {"numa_nodes", 1, EMU_MAX_NODES, INTEGER, offsetof(struct emu_config, numa_nodes)},
    {"driver", 12020, 13050, INTEGER, offsetof(struct emu_config, driver)},
    {"concurrent", 0, 1, BOOLEAN, offsetof(struct emu_config, concurrent)},
    {"pageable", 0, 1, BOOLEAN, offsetof(struct emu_config, pageable)},
    {"capacity_mib", 1, 1 << 20, MEBIBYTES, offsetof(struct emu_config, capacity)},
    {"page", 4096, 65536, BYTES, offsetof(struct emu_config, page)},
    {"integrated", 0, 1, BOOLEAN, offsetof(struct emu_config, integrated)},
    {"confidential", 0, 1, BOOLEAN, offsetof(struct emu_config, confidential)},
    {"nopeers", 0, 1, BOOLEAN, offsetof(struct emu_config, nopeers)},
    {"noinit", 0, 1, BOOLEAN, offsetof(struct emu_config, noinit)},
    QUEUE_KEY("queue_absent", 1, EMU_QUEUE_ABSENT),
    QUEUE_KEY("queue_denied", 1, EMU_QUEUE_DENIED),
    QUEUE_KEY("queue_refused", 1, EMU_QUEUE_REFUSED),
    QUEUE_KEY("queue_layout", 1, EMU_QUEUE_LAYOUT),
    QUEUE_KEY("queue_drop", 1 << 20, EMU_QUEUE_DROP),
    QUEUE_KEY("queue_lose", 1 << 20, EMU_QUEUE_LOSE),
    QUEUE_KEY("queue_garbage", 1 << 20, EMU_QUEUE_GARBAGE),
    QUEUE_KEY("queue_late", 1 << 20, EMU_QUEUE_LATE),
    QUEUE_KEY("queue_branch", 999, EMU_QUEUE_BRANCH),
    QUEUE_KEY("queue_unlisted", 2, EMU_QUEUE_UNLISTED),
};
enum { NUMBER_KEYS = sizeof number_keys / sizeof *number_keys };

static struct emu_config active;
static char error[512]; /* the error in the environment, or empty */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_options(char *text);

static bool
use_profile(const char *name)
{
    char joined[192];

    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        if (strcmp(profiles[i].name, name) == 0) {
            active = (struct emu_config){.page = active.page, .name = profiles[i].device};
            (void)snprintf(joined, sizeof joined, "%s,%s", profiles[0].options,
                           profiles[i].options);
            read_options(joined);
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

/* The row of a key, or NULL if its values are not numbers. */
static const struct number_key *
find_number_key(const char *key)
{
    for (size_t i = 0; i < NUMBER_KEYS; i++) {
        if (strcmp(number_keys[i].key, key) == 0) {
            return &number_keys[i];
        }
    }
    return NULL;
}

static void
store_number(const struct number_key *row, long number)
{
    void *member = (char *)&active + row->offset;

    switch (row->type) {
    case INTEGER:
        *(int *)member = (int)number;
        break;
    case BOOLEAN:
        *(bool *)member = number != 0;
        break;
    case BYTES:
        *(size_t *)member = (size_t)number;
        break;
    case MEBIBYTES:
        *(size_t *)member = (size_t)number << 20;
        break;
    }
}

static bool
set_option(const char *key, const char *text)
{
    const struct number_key *row = find_number_key(key);
    long number = 0;

    if (strcmp(key, "profile") == 0) {
        return use_profile(text);
    }
    if (row == NULL) {
        return set_words(key, text);
    }
    if (!read_number(text, row->low, row->high, &number)) {
        return false;
    }
    store_number(row, number);
    return (active.page & (active.page - 1)) == 0;
}

/* Writes the values that a key takes or, for an unknown key, the list of keys. */
static void
describe_key(const char *key, char *text, size_t size)
{
    static const char *const words[][2] = {
        {"schedule", "schedule is eager or lazy"},
        {"discard", "discard is poison, keep or zero"},
        {"profile", "profile is default, h200, h200-x2, wsl or old12"},
        {"page", "page is a power of two from 4096 to 65536"},
    };
    const struct number_key *row = find_number_key(key);

    for (size_t k = 0; k < sizeof words / sizeof *words; k++) {
        if (strcmp(words[k][0], key) == 0) {
            (void)snprintf(text, size, "%s", words[k][1]);
            return;
        }
    }
    if (row != NULL) {
        (void)snprintf(text, size, "%s is a number from %ld to %ld", key, row->low, row->high);
        return;
    }
    (void)snprintf(text, size, "key=value is needed, and the keys are profile, schedule, discard");
    for (size_t i = 0; i < NUMBER_KEYS; i++) {
        size_t used = strlen(text);
        (void)snprintf(text + used, size - used, ", %s", number_keys[i].key);
    }
}

static void
refuse_option(const char *key, const char *text)
{
    char taken[320];

    describe_key(key, taken, sizeof taken);
    (void)snprintf(error, sizeof error, "MANAGEDMEM_EMULATOR: cannot use '%.64s%s%.64s'; %s", key,
                   text == NULL ? "" : "=", text == NULL ? "" : text, taken);
}

/* Reads a list of options. Splits `text` in place. */
static void
read_options(char *text)
{
    char *save = NULL;

    for (char *item = strtok_r(text, ",", &save); item != NULL;
         item = strtok_r(NULL, ",", &save)) {
        char *equals = strchr(item, '=');
        if (equals != NULL) {
            *equals = '\0';
        }
        if (equals == NULL || !set_option(item, equals + 1)) {
            refuse_option(item, equals == NULL ? NULL : equals + 1);
        }
    }
}

static void
load_environment(void)
{
    const char *environment = getenv("MANAGEDMEM_EMULATOR");
    char *text = environment == NULL ? NULL : strdup(environment);

    active.page = (size_t)sysconf(_SC_PAGESIZE);
    (void)use_profile("default");
    if (text != NULL) {
        read_options(text);
    } else if (environment != NULL) {
        (void)snprintf(error, sizeof error, "MANAGEDMEM_EMULATOR: out of memory");
    }
    free(text);
}

const struct emu_config *
emu_config(void)
{
    pthread_once(&once, load_environment);
    return &active;
}

const char *
emu_config_error(void)
{
    (void)emu_config();
    return error;
}
