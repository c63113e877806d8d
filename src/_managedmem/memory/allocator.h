/* allocator.h: managed memory for the allocators of other libraries, which find its functions by
 * their names in this shared library.
 *
 * torch's pluggable allocator takes a pair of names and passes no data of ours. So each preset
 * (the advice for each block) has a function of its own, managedmem_allocate_0 and so on;
 * managedmem_free serves all presets. All of these functions may be called from any thread, even
 * with locks of the caller held, and need no interpreter. */
#ifndef MM_ALLOCATOR_H
#define MM_ALLOCATOR_H

#include <sys/types.h>

#include "memory.h"

/* The advice for each block. */
typedef struct {
    CUmemLocation preferred; /* type 0: none */
    mm_location_set accessed_by;
    bool read_mostly;
    bool own_device; /* the block's own device is preferred, and a member of accessed_by */
} mm_preset;

enum { MM_MAX_PRESETS = 32, MM_ALLOCATOR_NAME = 32 };

/* Allocates, advises and frees a page as a trial, so that this call reports what the driver
 * refuses. */
MM_NODISCARD int mm_preset_try(mm_driver *cu, const mm_preset *preset, mm_status *st);

/* Makes a trial, assigns a function to the preset for the life of the process, and writes the name
 * of the function. Equal presets share a function. MM_REFUSED if all functions are taken. */
MM_NODISCARD int mm_preset_register(mm_driver *cu, const mm_preset *preset,
                                    char name[MM_ALLOCATOR_NAME], mm_status *st);

/* Allocates whole pages in the thread's context, with the preset's advice. managedmem_free frees
 * them. On failure returns NULL and leaves nothing allocated. Unless memory ran out, it then writes
 * a line that names the user to the standard error. */
void *mm_preset_allocate(const mm_preset *preset, size_t size, const char *user);

/* The bytes of a block of mm_preset_allocate, which are whole pages. If the driver does not tell
 * them, as in a forked child, returns 0 and writes a line with the reason to the standard error. */
size_t mm_block_size(const void *block);

#define MM_EXPORT __attribute__((visibility("default")))

#define MM_FREE_NAME "managedmem_free"

/* Frees a block by its address; the other arguments are not used. Inside a host function the block
 * is freed later. Does nothing after the driver's shutdown and in a forked child. */
MM_EXPORT void managedmem_free(void *block, ssize_t size, int device, CUstream stream);

/* X(n) for each n below MM_MAX_PRESETS. clang-format does not terminate on it. */
/* clang-format off */
#define MM_PRESET_SLOTS(X)                                  \
    X(0)  X(1)  X(2)  X(3)  X(4)  X(5)  X(6)  X(7)          \
    X(8)  X(9)  X(10) X(11) X(12) X(13) X(14) X(15)         \
    X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)         \
    X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
/* clang-format on */

/* Allocates whole pages for a device, with the preset's advice. On failure returns NULL, leaves
 * nothing allocated, and writes a line to the standard error unless memory ran out. */
#define MM_DECLARE_ALLOCATE(n) \
    MM_EXPORT void *managedmem_allocate_##n(ssize_t size, int device, CUstream stream);
MM_PRESET_SLOTS(MM_DECLARE_ALLOCATE)
#undef MM_DECLARE_ALLOCATE

#endif
