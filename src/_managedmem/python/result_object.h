/* result_object.h: the object behind an array of numpy(copy=True), which returns its block to the
 * cache of results. */
#ifndef MM_RESULT_OBJECT_H
#define MM_RESULT_OBJECT_H

#include "../memory/result_blocks.h"
#include "buffer.h"

/* An object without memory, with the layout of a buffer; mm_result_set gives it a block. It has the
 * buffer protocol. */
PyObject *mm_result_new(const mm_buffer *b);
void mm_result_set(PyObject *result, mm_result_block *block);

#endif
