/* Lists of the emulated driver: pointers to a first item, whose member `next` leads to the
 * others. */
#ifndef MANAGEDMEM_EMULATOR_LISTS_H
#define MANAGEDMEM_EMULATOR_LISTS_H

#define EMU_LINK(list, item) ((item)->next = (list), (list) = (item))

/* Takes an item, which must be there, out of a list. */
#define EMU_UNLINK(list, item)             \
    do {                                   \
        __typeof__(list) *link_ = &(list); \
        while (*link_ != (item)) {         \
            link_ = &(*link_)->next;       \
        }                                  \
        *link_ = (item)->next;             \
    } while (0)

/* Sets `item` to the first of a list that meets a condition, or to NULL. */
#define EMU_SEEK(item, list, condition)                                                \
    do {                                                                               \
        for ((item) = (list); (item) != NULL && !(condition); (item) = (item)->next) { \
        }                                                                              \
    } while (0)

#endif
