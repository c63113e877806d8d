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

static struct emu_config active;
static char error[256]; /* what is wrong with the environment; empty when nothing is */
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

static bool
set_option(const char *key, const char *text)
{
    static const struct {
        const char *key;
        long low, high;
    } numbers[] = {
        {"devices", 1, EMU_MAX_DEVICES},
        {"numa_nodes", 1, EMU_MAX_NODES},
        {"driver", 12020, 13050},
        {"concurrent", 0, 1},
        {"pageable", 0, 1},
        {"capacity_mib", 1, 1 << 20},
        {"page", 4096, 65536},
        {"nopeers", 0, 1},
        {"noinit", 0, 1},
    };
    long number = 0;
    size_t i = 0;

    if (strcmp(key, "profile") == 0) {
        return use_profile(text);
    }
    while (i < sizeof numbers / sizeof *numbers && strcmp(numbers[i].key, key) != 0) {
        i++;
    }
    if (i == sizeof numbers / sizeof *numbers) {
        return set_words(key, text);
    }
    if (!read_number(text, numbers[i].low, numbers[i].high, &number)) {
        return false;
    }
    switch (i) {
    case 0:
        active.devices = (int)number;
        break;
    case 1:
        active.numa_nodes = (int)number;
        break;
    case 2:
        active.driver = (int)number;
        break;
    case 3:
        active.concurrent = number != 0;
        break;
    case 4:
        active.pageable = number != 0;
        break;
    case 5:
        active.capacity = (size_t)number << 20;
        break;
    case 6:
        active.page = (size_t)number;
        break;
    case 7:
        active.nopeers = number != 0;
        break;
    default:
        active.noinit = number != 0;
        break;
    }
    return (active.page & (active.page - 1)) == 0;
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
            (void)snprintf(error, sizeof error, "MANAGEDMEM_EMULATOR: cannot use '%s%s%s'", item,
                           equals == NULL ? "" : "=", equals == NULL ? "" : equals + 1);
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
