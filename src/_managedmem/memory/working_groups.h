/* working_groups.h: the groups of a working set at work, for the file of their uses. */
#ifndef MM_WORKING_GROUPS_H
#define MM_WORKING_GROUPS_H

#include "working_thread.h"

/* Fails with MM_REFUSED if the group was removed, or is about to be. Under the lock. */
MM_NODISCARD int mm_loader_refuse_removed(const mm_loader *l, uint32_t group, mm_status *st);

#endif
