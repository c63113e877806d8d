/* test_range.c: system memory as a target on machines where only some devices reach it, for which the
 * emulated driver has no profile. */
#include "world.h"
static unsigned reaching; /* bit n: device n reaches system memory */

static CUresult CUDAAPI
answer_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    if (attribute != CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *value = reaching >> device & 1;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI
fail_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)value, (void)attribute, (void)device;
    return CUDA_ERROR_UNKNOWN;
}

static int
check(mm_driver *cu, mm_operation op, mm_status *st)
{
    static char memory[1 << 16];
    mm_range range = {.start = (CUdeviceptr)(uintptr_t)memory, .size = sizeof memory};
    int rc = mm_range_check(cu, &range, op, st);

    CHECK_EQUAL(range.allocation, 0);
    return rc;
}

TEST(system_memory_needs_the_right_devices)
{
    mm_driver cu = *world.cu;
    mm_status st;

    cu.DeviceGetAttribute = answer_attribute;
    for (reaching = 0; reaching < 4; reaching++) {
        bool current = (reaching & 1) != 0, all = reaching == 3;
        CHECK_EQUAL(check(&cu, MM_ADVISE, &st), current ? 0 : -1);
        CHECK_EQUAL(check(&cu, MM_PREFETCH, &st), current ? 0 : -1);
        CHECK_EQUAL(check(&cu, MM_DISCARD, &st), all ? 0 : -1);
        if (!all) {
            CHECK_EQUAL((int)st.kind, (int)MM_NOT_MANAGED);
            CHECK(strstr(st.detail, current ? "Device(1) lacks it" : "Device(0) lacks it")
                  != NULL);
        }
        CHECK_EQUAL(check(&cu, MM_QUERY, &st), -1);
        CHECK_EQUAL((int)st.kind, (int)MM_NOT_MANAGED);
    }
}

TEST(a_failed_query_is_an_error)
{
    mm_driver cu = *world.cu;
    mm_status st;

    cu.DeviceGetAttribute = fail_attribute;
    for (mm_operation op = MM_ADVISE; op <= MM_DISCARD_PREFETCH; op++) {
        CHECK_EQUAL(check(&cu, op, &st), -1);
        CHECK_EQUAL((int)st.kind, (int)MM_DRIVER_CALL);
        CHECK_EQUAL(st.code, (int)CUDA_ERROR_UNKNOWN);
    }
}

TEST(details_end_within_their_space)
{
    mm_status st[2]; /* the second one shows what is written behind the first */
    char text[sizeof st->detail];

    memset(text, 'x', sizeof text);
    for (size_t used = sizeof text - 4; used < sizeof text; used++) {
        text[used] = '\0';
        memset(st, 'y', sizeof st);
        (void)mm_fail(&st[0], MM_BAD_VALUE, "%s", text);
        mm_status_add(&st[0], "more");
        CHECK_EQUAL(strnlen(st[0].detail, sizeof st[0].detail),
                    used < sizeof text - 1 ? sizeof text - 1 : used);
        CHECK_EQUAL(st[0].detail[used - 1], 'x');
        CHECK_EQUAL(((char *)&st[1])[0], 'y');
        text[used] = 'x';
    }
}

TEST_MAIN(world_open_devices)
