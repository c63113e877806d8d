/* failing_allocations.h: lets allocations of the extension and of a test fail, and counts their
 * bytes. run.sh links every test so that its calls of malloc, calloc, realloc and free come
 * here. */
#ifndef FAILING_ALLOCATIONS_H
#define FAILING_ALLOCATIONS_H

#include <stdbool.h>

/* From now on the nth next allocation of any thread fails, 1 being the next one. 0: none. */
void fail_allocation(long nth);

/* Ends that; true if an allocation failed. */
bool allocation_has_failed(void);

/* Bytes in blocks that live, and the most there were since the last call of this. */
long live_bytes(void);
long most_live_bytes(void);

#endif
