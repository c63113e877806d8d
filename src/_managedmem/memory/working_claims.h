/* working_claims.h: the memory of all working sets of the process, whose pages can be in one group only:
 * two sets would each take the other's advice for that of the caller, and restore it. */
#ifndef MM_WORKING_CLAIMS_H
#define MM_WORKING_CLAIMS_H

#include "working_memory.h"

/* Claims the memory, which stays where it is until it is given back. Fails with MM_BAD_VALUE if it
 * shares a page with claimed memory. */
MM_NODISCARD int mm_claim_memory(mm_working_memory *m, mm_status *st);

/* Does nothing for memory that is not claimed. */
void mm_give_back_claim(mm_working_memory *m);

#endif
