/* working_claims.c: the list of the memory of all working sets. */
#include "working_claims.h"

#include <pthread.h>

/* Guards the list; nothing else is locked while it is held. */
static pthread_mutex_t claims_mutex = PTHREAD_MUTEX_INITIALIZER;
static mm_working_memory *claimed_memory;

static int
refuse_shared_page(const mm_working_memory *m, const mm_working_memory *other, CUdeviceptr page,
                   mm_status *st)
{
    if (m->set == other->set) {
        return mm_fail(st, MM_BAD_VALUE,
                       "the targets share the page at 0x%llx with group %llu of the working set: "
                       "memory can be in one group, and groups need pages of their own",
                       page, (unsigned long long)other->number);
    }
    return mm_fail(st, MM_BAD_VALUE,
                   "the targets share the page at 0x%llx with group %llu of another working set: "
                   "close that one first",
                   page, (unsigned long long)other->number);
}

static int
refuse_claimed_pages(const mm_working_memory *m, mm_status *st)
{
    for (const mm_working_memory *c = claimed_memory; c != NULL; c = c->next_claim) {
        CUdeviceptr page;
        if (mm_working_memory_meets(m, c, &page)) {
            return refuse_shared_page(m, c, page, st);
        }
    }
    return 0;
}

/* Both ends are known, because a set gives back thousands of claims. */
static void
link_claim(mm_working_memory *m)
{
    m->claim_link = &claimed_memory;
    m->next_claim = claimed_memory;
    if (claimed_memory != NULL) {
        claimed_memory->claim_link = &m->next_claim;
    }
    claimed_memory = m;
}

static void
unlink_claim(mm_working_memory *m)
{
    *m->claim_link = m->next_claim;
    if (m->next_claim != NULL) {
        m->next_claim->claim_link = m->claim_link;
    }
    m->claim_link = NULL;
    m->next_claim = NULL;
}

int
mm_claim_memory(mm_working_memory *m, mm_status *st)
{
    int rc;

    (void)pthread_mutex_lock(&claims_mutex);
    rc = refuse_claimed_pages(m, st);
    if (rc == 0) {
        link_claim(m);
    }
    (void)pthread_mutex_unlock(&claims_mutex);
    return rc;
}

void
mm_give_back_claim(mm_working_memory *m)
{
    (void)pthread_mutex_lock(&claims_mutex);
    if (m->claim_link != NULL) {
        unlink_claim(m);
    }
    (void)pthread_mutex_unlock(&claims_mutex);
}
