/* system_memory.c: reads MemAvailable of Linux. */
#include "system_memory.h"

#include <stdio.h>

size_t
mm_available_system_memory(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    unsigned long long kibibytes = 0;
    char line[128];

    while (file != NULL && fgets(line, sizeof line, file) != NULL
           && sscanf(line, "MemAvailable: %llu kB", &kibibytes) != 1) {
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return (size_t)kibibytes * 1024;
}
