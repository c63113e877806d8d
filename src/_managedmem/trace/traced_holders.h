/* traced_holders.h: the processors that have the pages of ranges, as far as the recording that
 * runs shows them. */
#ifndef MM_TRACED_HOLDERS_H
#define MM_TRACED_HOLDERS_H

#include "../memory/page_holders.h"

typedef enum {
    MM_NO_TRACE, /* none runs */
    MM_TRACE_READ,
    MM_TRACE_UNUSABLE /* one runs, and has no answer */
} mm_trace_use;

/* Reads the events so far, first delivering those of finished work; waits for no device. *out has
 * the pages of ranges whose memory is in the list of lives. The birth of other memory is unknown,
 * so events could be those of earlier memory at its addresses. *out is all zero unless the result
 * is MM_TRACE_READ, and can always be freed; *reason has a sentence after MM_TRACE_UNUSABLE. Can
 * block: the caller releases the GIL. */
mm_trace_use mm_traced_holders_read(const mm_batch *ranges, mm_page_holders *out,
                                    mm_status *reason);

#endif
