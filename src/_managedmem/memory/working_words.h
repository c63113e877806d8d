/* working_words.h: words of pinned host memory, for which streams wait and which streams write.
 *
 * The memory is never freed, because a stream of another library may still have to wait for a word
 * whose user has ended. The value of a word only grows, also from one user to the next, so that such
 * a wait ends at once. */
#ifndef MM_WORKING_WORDS_H
#define MM_WORKING_WORDS_H

#include <stdatomic.h>
#include <stdint.h>

#include "../driver/context.h"

typedef struct mm_word {
    _Atomic uint32_t *value;
    CUdeviceptr address; /* of the value, for streams of every device */
    struct mm_word *next;
} mm_word;

/* A word for this caller alone, or NULL. In the caller's scope. */
mm_word *mm_word_take(mm_driver *cu, mm_status *st);

/* Ends the use. No stream may have to write the word any more. */
void mm_word_give_back(mm_word *word);

/* True once the word has reached a value: values come in cycles of 32 bits, half a cycle apart at
 * most. */
static inline bool
mm_word_has_reached(const mm_word *word, uint32_t value)
{
    return atomic_load_explicit(word->value, memory_order_acquire) - value <= INT32_MAX;
}

#endif
