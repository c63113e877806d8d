/* symbols.h: the functions of a library that a C test opens itself. */
#ifndef SYMBOLS_H
#define SYMBOLS_H

#include <dlfcn.h>
#include <string.h>

#include "check.h"

static inline void
load(void *library, const char *name, void *place)
{
    void *symbol = dlsym(library, name);

    CHECK(symbol != NULL);
    memcpy(place, &symbol, sizeof symbol);
}

#endif
