/* What a driver's records say of the parts of a range that were told different things before, after
 * each of a few calls over the whole range. */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>

enum { PART = 4096, PARTS = 12, MOST_CALLS = 5, PREFETCH = 0 };

/* One case: the odd parts are told one thing, then the whole range another, until all parts say the
 * same. */
struct record_case {
    const char *label;
    CUmem_range_attribute attribute;
    int odd_advice; /* PREFETCH: a prefetch instead */
    const CUmemLocation *odd_place;
    int whole_advice;
    const CUmemLocation *whole_place;
};

static void
tell(struct fixture *f, int advice, CUdeviceptr ptr, size_t size, CUmemLocation where)
{
    if (advice == PREFETCH) {
        cu.prefetch(ptr, size, where, 0, f->stream);
        cu.stream_sync(f->stream);
    } else {
        cu.advise(ptr, size, (CUmem_advise)advice, where);
    }
}

/* Prints what a record says; true where that is the same as `before`. */
static bool
print_record(CUmem_range_attribute attribute, CUdeviceptr ptr, size_t size, int before[2])
{
    int got[2] = {-77, -77};
    bool users = attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, same;

    (void)cu.range_get(got, users ? sizeof got : sizeof got[0], attribute, ptr, size);
    if (users) {
        printf(" [%d %d]", got[0], got[1]);
    } else {
        printf(" %d", got[0]);
    }
    same = got[0] == before[0] && got[1] == before[1];
    before[0] = got[0];
    before[1] = got[1];
    return same;
}

static void
run_case(struct fixture *f, const struct record_case *c)
{
    CUdeviceptr a = managed((size_t)PARTS * PART);
    int before[2] = {0, 0};
    bool equal = false;

    printf("%s\n", c->label);
    if (c->odd_advice == PREFETCH) {
        tell(f, PREFETCH, a, (size_t)PARTS * PART, *c->whole_place);
    }
    for (size_t i = 1; i < PARTS; i += 2) {
        tell(f, c->odd_advice, a + i * PART, PART, *c->odd_place);
    }
    for (int call = 1; call <= MOST_CALLS && !equal; call++) {
        tell(f, c->whole_advice, a, (size_t)PARTS * PART, *c->whole_place);
        printf("  call %d:", call);
        equal = true;
        for (size_t i = 0; i < PARTS; i++) {
            bool same = print_record(c->attribute, a + i * PART, PART, before);
            equal = equal && (same || i == 0);
        }
        printf("  all:");
        (void)print_record(c->attribute, a, (size_t)PARTS * PART, before);
        printf("\n");
    }
    cu.mem_free(a);
}

void
topic_records(struct fixture *f)
{
    const struct record_case cases[] = {
        {"preferred D after H on odd", CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 3, &f->host, 3,
         &f->dev},
        {"preferred unset after H on odd", CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 3, &f->host,
         4, &f->dev},
        {"read mostly after odd", CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 1, &f->dev, 1, &f->dev},
        {"unset read mostly after odd", CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 1, &f->dev, 2,
         &f->dev},
        {"accessed_by D after odd", CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 5, &f->dev, 5, &f->dev},
        {"accessed_by H after D odd", CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 5, &f->dev, 5, &f->host},
        {"unset accessed_by D after odd", CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 5, &f->dev, 6,
         &f->dev},
        {"prefetch H after D odd", CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, PREFETCH,
         &f->dev, PREFETCH, &f->host},
        {"prefetch D after H odd", CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, PREFETCH,
         &f->host, PREFETCH, &f->dev},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_case(f, &cases[i]);
    }
}
