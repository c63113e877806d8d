/* The call log: one line for each driver call, with its arguments and its result. */
#include "control.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOG_LIMIT = 65536 };

/* A ring: a long run forgets its oldest calls. */
static char *log_lines[LOG_LIMIT];
static size_t log_first, log_count;
static bool verbose;
static int (*probe)(void);

static void
log_add(const char *text)
{
    char *copy = strdup(text);

    if (copy == NULL) {
        return;
    }
    if (log_count == LOG_LIMIT) {
        free(log_lines[log_first]);
        log_lines[log_first] = copy;
        log_first = (log_first + 1) % LOG_LIMIT;
        return;
    }
    log_lines[(log_first + log_count++) % LOG_LIMIT] = copy;
}

void
emu_log_call(const struct emu_call *call, CUresult result)
{
    char line[EMU_CALL_TEXT + 128];

    if ((call->kind & EMU_CALL_BOOKKEEPING) == 0 || verbose) {
        snprintf(line, sizeof line, "%s(%s) -> %d%s", call->function, call->text, (int)result,
                 probe != NULL && probe() ? " probed" : "");
        log_add(line);
    }
}

void
emu_log_clear(void)
{
    emu_lock();
    while (log_count > 0) {
        free(log_lines[log_first]);
        log_lines[log_first] = NULL;
        log_first = (log_first + 1) % LOG_LIMIT;
        log_count--;
    }
    emu_unlock();
}

size_t
emu_log_count(void)
{
    size_t count;

    emu_lock();
    count = log_count;
    emu_unlock();
    return count;
}

int
emu_log_entry(size_t i, char *text, size_t size)
{
    int length = -1;

    emu_lock();
    if (i < log_count) {
        length = snprintf(text, size, "%s", log_lines[(log_first + i) % LOG_LIMIT]);
    }
    emu_unlock();
    return length;
}

void
emu_log_verbose(int on)
{
    emu_lock();
    verbose = on != 0;
    emu_unlock();
}

void
emu_log_probe(int (*callback)(void))
{
    emu_lock();
    probe = callback;
    emu_unlock();
}
