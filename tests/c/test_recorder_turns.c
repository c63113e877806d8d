/* test_recorder_turns.c: two threads use one recording, and the second one comes while the first one
 * is in the middle of its work: the second one waits for its turn. Needs libhooked.so beside the
 * emulated driver. */
#include "counted_waits.h"
#include "recordings.h"

typedef enum { MARK, STOP, ATTRIBUTE, END } operation;

/* What the second thread does while the first one flushes for the first time. */
static struct {
    mm_recording *recording;
    operation second;
    pthread_t thread;
    int result;
    mm_status status;
    atomic_bool armed, flushing, ended, overlapped;
    bool waited;
} meeting;

static void (*hook_flushes)(void (*hook)(void));

static int
operate(mm_recording *r, operation op, mm_status *own)
{
    mm_recorded_result result;
    int rc = 0;

    switch (op) {
    case MARK:
        return mm_recording_mark(r, own);
    case STOP:
        return mm_recording_stop(r, true, own);
    case ATTRIBUTE:
        rc = mm_recording_attribute(r, NULL, 0, &result, own);
        mm_recorded_result_free(&result);
        return rc;
    case END:
        mm_recordings_end(usual.owner);
    }
    return rc;
}

static void *
run_second(void *unused)
{
    meeting.result = operate(meeting.recording, meeting.second, &meeting.status);
    atomic_store(&meeting.ended, true);
    return unused;
}

/* The first flush starts the second thread, and lasts until that thread waits, flushes or has
 * ended. */
static void
meet(void)
{
    unsigned long before = waits_begun();

    if (!atomic_exchange(&meeting.armed, false)) {
        if (atomic_load(&meeting.flushing)) {
            atomic_store(&meeting.overlapped, true);
        }
        return;
    }
    atomic_store(&meeting.flushing, true);
    CHECK_EQUAL(pthread_create(&meeting.thread, NULL, run_second, NULL), 0);
    for (int round = 0; waits_begun() == before && !atomic_load(&meeting.overlapped)
                        && !atomic_load(&meeting.ended);
         round++) {
        mm_pause(round);
    }
    meeting.waited = waits_begun() > before;
    atomic_store(&meeting.flushing, false);
}

/* Returns the recording, after both. */
static mm_recording *
let_meet(operation first, operation second)
{
    mm_recording *r = start();

    meeting.recording = r;
    meeting.second = second;
    meeting.waited = false;
    atomic_store(&meeting.ended, false);
    atomic_store(&meeting.overlapped, false);
    atomic_store(&meeting.armed, true);
    CHECK_OK(operate(r, first, &st), &st);
    CHECK(!atomic_load(&meeting.armed));
    CHECK_EQUAL(pthread_join(meeting.thread, NULL), 0);
    CHECK(meeting.waited);
    CHECK(!atomic_load(&meeting.overlapped));
    return r;
}

static size_t
count_parts(mm_recording *r)
{
    mm_recorded_part *parts;
    size_t count;

    CHECK_OK(mm_recording_copy_parts(r, &parts, &count, &st), &st);
    for (size_t i = 1; i < count; i++) {
        CHECK_EQUAL(parts[i].start, parts[i - 1].end);
    }
    free(parts);
    return count;
}

TEST(all_wait_for_a_mark)
{
    static const size_t parts[] = {[MARK] = 3, [STOP] = 2, [ATTRIBUTE] = 2, [END] = 1};

    for (operation second = MARK; second <= END; second++) {
        mm_recording *r = let_meet(MARK, second);
        CHECK_OK(meeting.result, &meeting.status);
        CHECK_EQUAL(mm_recording_is_running(r), second == MARK || second == ATTRIBUTE);
        CHECK_OK(mm_recording_stop(r, true, &st), &st);
        CHECK_EQUAL(count_parts(r), parts[second]);
        mm_recording_free(r);
    }
}

TEST(all_wait_for_a_stop)
{
    for (operation second = MARK; second <= END; second++) {
        mm_recording *r = let_meet(STOP, second);
        CHECK(!mm_recording_is_running(r));
        if (second == MARK) { /* it comes too late */
            CHECK_EQUAL(meeting.result, -1);
            CHECK_EQUAL(meeting.status.kind, MM_REFUSED);
        } else {
            CHECK_OK(meeting.result, &meeting.status);
        }
        CHECK_EQUAL(count_parts(r), 1);
        mm_recording_free(r);
    }
}

static void
find_hook(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *symbol;

    CHECK(library != NULL);
    symbol = dlsym(library, "hook_flushes");
    CHECK(symbol != NULL);
    memcpy(&hook_flushes, &symbol, sizeof symbol);
}

static void
set_up(const char *path)
{
    char hooked[PATH_MAX];

    world_path_beside(path, "libhooked.so", hooked);
    world_open_on_device(hooked);
    find_hook(hooked);
    mm_recording_free(start()); /* the test of the first start flushes too */
    hook_flushes(meet);
}

TEST_MAIN(set_up)
