/* cuGetProcAddress, as measured on driver 580 (topic "lookup"). Newer drivers accept versions
 * up to their own, and have newer forms of functions that changed since CUDA 13.0. */
#include "entries.h"

#include "control.h"

#include <string.h>

static const struct entry {
    const char *name;
    int version;
    void (*function)(void);
} entries[] = {
#define X(name, version, symbol) {name, version, (void (*)(void))emu_##symbol},
    EMU_ENTRIES(X)
#undef X
};

/* These return constants; they cannot fail. */
static bool
never_fails(const char *name)
{
    return strcmp(name, "cuDriverGetVersion") == 0 || strcmp(name, "cuGetProcAddress") == 0
           || strcmp(name, "cuGetErrorName") == 0 || strcmp(name, "cuGetErrorString") == 0;
}

const char *
emu_fail_name(size_t i)
{
    for (size_t entry = 0; entry < sizeof entries / sizeof *entries; entry++) {
        if (!never_fails(entries[entry].name) && i-- == 0) {
            return entries[entry].name;
        }
    }
    return NULL;
}

static CUresult
find_entry(const char *symbol, void **out, int version, CUdriverProcAddressQueryResult *status)
{
    const struct entry *best = NULL;
    bool known = false;

    /* The only error that leaves both outputs alone. */
    if (symbol == NULL || out == NULL || version > emu_config()->driver) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        if (strcmp(entries[i].name, symbol) != 0) {
            continue;
        }
        known = true;
        if (entries[i].version <= version
            && (best == NULL || entries[i].version > best->version)) {
            best = &entries[i];
        }
    }
    *out = NULL;
    if (best != NULL) {
        memcpy(out, &best->function, sizeof *out);
    }
    if (status != NULL) {
        *status = best != NULL ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known      ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                               : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    }
    return CUDA_SUCCESS;
}

/* The flags choose between legacy and per-thread default streams. Both have the same function. */
EMU_ENTRY(cuGetProcAddress_v2, const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
          CUdriverProcAddressQueryResult *symbolStatus)
{
    return flags > 2 ? CUDA_ERROR_INVALID_VALUE
                     : find_entry(symbol, pfn, cudaVersion, symbolStatus);
}

/* The first form has no status; a name that is not found is an error. */
EMU_ENTRY(cuGetProcAddress, const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
    CUresult result =
        flags > 2 ? CUDA_ERROR_INVALID_VALUE : find_entry(symbol, pfn, cudaVersion, NULL);

    return result == CUDA_SUCCESS && *pfn == NULL ? CUDA_ERROR_NOT_FOUND : result;
}
