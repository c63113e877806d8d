/* What a driver's records say of the parts of a range that were told different things before, after
 * each of a few calls over the whole range; and what queries of several records say. */
#include "topics.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

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
tell(struct fixture *f, int advice, CUdeviceptr ptr, size_t size, CUmemLocation location)
{
    if (advice == PREFETCH) {
        cu.prefetch(ptr, size, location, 0, f->stream);
        cu.stream_sync(f->stream);
    } else {
        cu.advise(ptr, size, (CUmem_advise)advice, location);
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

/* One record of each of some parts, and a query of each range of parts: a line for each first part, a
 * digit for each last one. A query that begins inside of a record can say what only some pages
 * have. */
static void
show_queries(struct fixture *f, const char *label, CUmem_range_attribute attribute, int advice)
{
    static const unsigned char told[PARTS] = {1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0};
    CUdeviceptr a = managed((size_t)PARTS * PART);
    int yes = attribute == CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY ? 1 : f->device;

    printf("%s\n", label);
    for (size_t i = 0; i < PARTS; i++) {
        if (told[i]) {
            tell(f, advice, a + i * PART, PART, f->dev);
        }
    }
    for (size_t first = 0; first < PARTS; first++) {
        printf("  from %2zu: ", first);
        for (size_t last = first; last < PARTS; last++) {
            int got = -77;
            (void)cu.range_get(&got, sizeof got, attribute, a + first * PART,
                               (last + 1 - first) * PART);
            printf("%d", got == yes);
        }
        printf("\n");
    }
    cu.mem_free(a);
}

void
topic_record_queries(struct fixture *f)
{
    show_queries(f, "read mostly", CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, 1);
    show_queries(f, "preferred D", CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, 3);
    show_queries(f, "accessed_by D", CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, 5);
    show_queries(f, "prefetch D", CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, PREFETCH);
}

/* The records of an allocation in the place of a freed one. While a neighbour in the block lives,
 * the free clears the records of its pages as one call over all of them would. */
struct freed_case {
    const char *label;
    unsigned char pages[PARTS]; /* 1: told before the free */
    bool alone; /* no neighbour */
};

static void
tell_pages(struct fixture *f, const struct freed_case *c, CUdeviceptr a, int advice,
           CUmemLocation location)
{
    for (size_t i = 0, n; i < PARTS; i += n) {
        for (n = 1; i + n < PARTS && c->pages[i + n] == c->pages[i]; n++) {
        }
        if (c->pages[i]) {
            tell(f, advice, a + i * PART, n * PART, location);
        }
    }
}

static void
run_freed_case(struct fixture *f, const struct freed_case *c)
{
    static const CUmem_range_attribute attributes[] = {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
        CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION};
    CUdeviceptr neighbour = c->alone ? 0 : managed(PART), a = managed((size_t)PARTS * PART), b;
    int ignored[2] = {0, 0};

    tell_pages(f, c, a, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev);
    tell_pages(f, c, a, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, f->host);
    tell_pages(f, c, a, CU_MEM_ADVISE_SET_ACCESSED_BY, f->dev);
    tell_pages(f, c, a, PREFETCH, f->dev);
    cu.mem_free(a);
    b = managed((size_t)PARTS * PART);
    printf("%s\n", c->label);
    if (!c->alone) {
        value("  its address is used again", b == a);
    }
    for (size_t n = 0; n < sizeof attributes / sizeof *attributes; n++) {
        printf("  attribute %d:", attributes[n]);
        for (size_t i = 0; i < PARTS; i++) {
            (void)print_record(attributes[n], b + i * PART, PART, ignored);
        }
        printf("\n");
    }
    cu.mem_free(b);
    if (!c->alone) {
        cu.mem_free(neighbour);
    }
}

/* Whether a page whose record says read-mostly is duplicated: then the host keeps it. */
static void
show_stale_advice(struct fixture *f)
{
    CUdeviceptr neighbour = managed(PART), a = managed((size_t)PARTS * PART), b;

    cu.advise(a + PART, PART, CU_MEM_ADVISE_SET_READ_MOSTLY, f->dev);
    cu.mem_free(a);
    b = managed((size_t)PARTS * PART);
    memset((void *)(uintptr_t)b, 1, (size_t)PARTS * PART);
    tell(f, PREFETCH, b, (size_t)PARTS * PART, f->dev);
    printf("page 1 of the next one, written and prefetched\n");
    printf("  read mostly:");
    (void)print_record(CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, b + PART, PART, (int[2]){0, 0});
    printf("\n");
    show_page_map("page 1", b + PART, PART);
    cu.mem_free(b);
    cu.mem_free(neighbour);
}

void
topic_freed_records(struct fixture *f)
{
    static const struct freed_case cases[] = {
        {"page 1, then freed", {0, 1}, false},
        {"pages 0 to 5, then freed", {1, 1, 1, 1, 1, 1}, false},
        {"all pages, then freed", {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, false},
        {"pages 1, 4 and 5, then freed", {0, 1, 0, 0, 1, 1}, false},
        {"odd pages, then freed", {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}, false},
        {"even pages, then freed", {1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0}, false},
        {"odd pages without a neighbour", {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}, true},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run_freed_case(f, &cases[i]);
    }
    show_stale_advice(f);
}
