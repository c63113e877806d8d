/* working_groups.h: the groups of a working set at work, for the file of their uses. */
#ifndef MM_WORKING_GROUPS_H
#define MM_WORKING_GROUPS_H

#include "working_thread.h"

/* NULL if the group was removed. Under the lock. */
mm_loader_group *mm_loader_find_group(const mm_loader *l, mm_group_id group);

/* The same for a group to be used: fails with MM_REFUSED also if it is about to be removed. */
mm_loader_group *mm_loader_usable_group(const mm_loader *l, mm_group_id group, mm_status *st);

#endif
