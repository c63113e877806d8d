/* labels.c: the text that a memory has in a trace: its name, or its dtype, shape and serial. */
#include "labels.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LABEL_BYTES = 160 }; /* of a label that is not a name */

char *
mm_copy_text(const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = malloc(size);

    return copy ? memcpy(copy, text, size) : NULL;
}

/* "512B", "1.5K", "64.0M" */
static size_t
write_size(char *text, uint64_t bytes)
{
    static const char units[] = "KMGTPE";
    double amount = (double)bytes / 1024;
    int unit = 0;

    if (bytes < 1024) {
        return (size_t)snprintf(text, LABEL_BYTES, "%" PRIu64 "B", bytes);
    }
    while (amount >= 1023.95) { /* which would be written as 1024.0 */
        amount /= 1024;
        unit++;
    }
    return (size_t)snprintf(text, LABEL_BYTES, "%.1f%c", amount, units[unit]);
}

/* "float32[1024,1024]", with "..." for further lengths */
static size_t
write_array(char *text, const mm_allocation_entry *entry)
{
    size_t used = (size_t)snprintf(text, LABEL_BYTES, "%.24s[", entry->dtype);

    for (int i = 0; i < entry->dimensions && i < MM_LABEL_DIMENSIONS; i++) {
        used += (size_t)snprintf(text + used, LABEL_BYTES - used, "%s%" PRId64, i > 0 ? "," : "",
                                 entry->shape[i]);
    }
    used += (size_t)snprintf(text + used, LABEL_BYTES - used, "%s]",
                             entry->dimensions > MM_LABEL_DIMENSIONS ? ",..." : "");
    assert(used < LABEL_BYTES);
    return used;
}

char *
mm_allocation_entry_label(const mm_allocation_entry *entry, const char *name)
{
    bool described = atomic_load_explicit(&entry->described, memory_order_acquire);
    char text[LABEL_BYTES];
    size_t used;

    assert(entry->serial > 0);
    if (name[0] != '\0') {
        return mm_copy_text(name);
    }
    if (described && (entry->dimensions != 1 || strcmp(entry->dtype, "uint8") != 0)) {
        used = write_array(text, entry);
    } else {
        used = write_size(text, described ? (uint64_t)entry->shape[0] : entry->size);
    }
    (void)snprintf(text + used, LABEL_BYTES - used, " #%" PRIu64, entry->serial);
    return mm_copy_text(text);
}
