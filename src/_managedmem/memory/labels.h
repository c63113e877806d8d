/* labels.h: the text that a memory has in a trace. */
#ifndef MM_LABELS_H
#define MM_LABELS_H

#include "allocation_log.h"

/* A copy with malloc; NULL if host memory ran out. */
char *mm_copy_text(const char *text);

/* The name or, if that is empty, dtype, shape and serial of an entry that is in the list. With
 * malloc; NULL if host memory ran out. */
char *mm_allocation_entry_label(const mm_allocation_entry *entry, const char *name);

#endif
