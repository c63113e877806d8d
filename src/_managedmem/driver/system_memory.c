/* system_memory.c: reads MemAvailable of Linux. */
#include "system_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t
mm_available_system_memory(void)
{
    static const char label[] = "MemAvailable:";
    FILE *file = fopen("/proc/meminfo", "re");
    unsigned long long kibibytes = 0;
    char line[128];

    while (file != NULL && kibibytes == 0 && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, label, sizeof label - 1) == 0) {
            kibibytes = strtoull(line + sizeof label - 1, NULL, 10);
        }
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return (size_t)kibibytes * 1024;
}
