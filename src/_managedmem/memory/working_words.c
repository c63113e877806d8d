/* working_words.c: the pool of pinned words, which are allocated 64 at a time. */
#include "working_words.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A word has a cache line of its own and uses its first four bytes. */
enum { LINE_WORDS = 16, WORDS_AT_ONCE = 64 };
#define POOL_BYTES (sizeof(uint32_t) * LINE_WORDS * WORDS_AT_ONCE)

/* Guards the list, for a few instructions. A forked child takes no words. */
static pthread_mutex_t words_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_word *free_words;

static mm_word *
take_free_word(void)
{
    mm_word *word;

    (void)pthread_mutex_lock(&words_mutex);
    word = free_words;
    if (word != NULL) {
        free_words = word->next;
        word->next = NULL;
    }
    (void)pthread_mutex_unlock(&words_mutex);
    return word;
}

void
mm_word_give_back(mm_word *word)
{
    (void)pthread_mutex_lock(&words_mutex);
    word->next = free_words;
    free_words = word;
    (void)pthread_mutex_unlock(&words_mutex);
}

static int
add_words(mm_driver *cu, mm_status *st)
{
    mm_word *added = calloc(WORDS_AT_ONCE, sizeof *added);
    _Atomic uint32_t *values;
    void *memory = NULL;
    CUresult code;

    if (added == NULL) {
        return mm_fail(st, MM_NO_MEMORY, "out of host memory for %d words", WORDS_AT_ONCE);
    }
    code = cu->MemHostAlloc(&memory, POOL_BYTES,
                            CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (code != CUDA_SUCCESS) {
        free(added);
        return mm_fail_call(st, "cuMemHostAlloc", (int)code);
    }
    memset(memory, 0, POOL_BYTES);
    values = memory;
    for (size_t i = 0; i < WORDS_AT_ONCE; i++) {
        added[i].value = &values[i * LINE_WORDS];
        added[i].address = (CUdeviceptr)(uintptr_t)added[i].value; /* one address space for all */
        mm_word_give_back(&added[i]);
    }
    return 0;
}

mm_word *
mm_word_take(mm_driver *cu, mm_status *st)
{
    mm_word *word = take_free_word();

    if (word == NULL && add_words(cu, st) == 0) {
        word = take_free_word();
    }
    return word;
}
