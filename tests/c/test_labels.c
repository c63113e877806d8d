/* test_labels.c: the text that a memory has in a trace. */
#include <string.h>

#include "check.h"
#include "memory/labels.h"

typedef struct {
    const char *dtype;
    int dimensions;
    int64_t shape[6];
    const char *label;
} array;

static void
check_label(const mm_allocation_entry *entry, const char *name, const char *expected)
{
    char *label = mm_allocation_entry_label(entry, name);

    CHECK(label != NULL);
    if (strcmp(label, expected) != 0) {
        (void)fprintf(stderr, "the label is \"%s\", not \"%s\"\n", label, expected);
        exit(1);
    }
    free(label);
}

TEST(arrays_show_dtype_shape_and_birth)
{
    static const array arrays[] = {
        {"float32", 2, {1024, 1024}, "float32[1024,1024] #7"},
        {"float16", 1, {7}, "float16[7] #7"},
        {"int64", 0, {0}, "int64[] #7"},
        {"uint8", 2, {3, 0}, "uint8[3,0] #7"},
        {"bool", 4, {1, 2, 3, 4}, "bool[1,2,3,4] #7"},
        {"complex128", 5, {1, 2, 3, 4, 5}, "complex128[1,2,3,4,...] #7"},
        {"int8",
         4,
         {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX},
         "int8[9223372036854775807,9223372036854775807,9223372036854775807,9223372036854775807] #7"},
        {"uint8", 1, {0}, "0B #7"},
        {"uint8", 1, {1023}, "1023B #7"},
        {"uint8", 1, {1024}, "1.0K #7"},
        {"uint8", 1, {1536}, "1.5K #7"},
        {"uint8", 1, {(1023 << 10) + 972}, "1023.9K #7"},
        {"uint8", 1, {(1023 << 10) + 974}, "1.0M #7"}, /* not 1024.0K */
        {"uint8", 1, {(int64_t)1 << 26}, "64.0M #7"},
        {"uint8", 1, {((int64_t)1 << 30) - 1}, "1.0G #7"},
        {"uint8", 1, {(int64_t)5 << 40}, "5.0T #7"},
        {"uint8", 1, {INT64_MAX}, "8.0E #7"},
    };

    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        mm_allocation_entry entry = {.serial = 7, .size = 4096};
        mm_allocation_entry_describe(&entry, arrays[i].dtype, arrays[i].dimensions,
                                     arrays[i].shape);
        check_label(&entry, "", arrays[i].label);
    }
}

TEST(other_memory_shows_its_size)
{
    mm_allocation_entry entry = {.serial = UINT64_MAX, .size = 3 << 20};

    check_label(&entry, "", "3.0M #18446744073709551615");
}

TEST_MAIN(no_driver)
