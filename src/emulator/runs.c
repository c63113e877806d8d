/* Values of pages, stored as runs: sorted by their first page, neighbours always different. A
 * 64 GiB allocation has 16.8 million pages but rarely more than a few runs. */
#include "emulator.h"

#include <stdlib.h>
#include <string.h>

bool
emu_runs_init(struct emu_runs *runs, size_t pages)
{
    memset(runs, 0, sizeof *runs);
    runs->run = calloc(4, sizeof *runs->run);
    if (runs->run == NULL) {
        return false;
    }
    runs->pages = pages;
    runs->capacity = 4;
    runs->count = 1;
    return true;
}

void
emu_runs_free(struct emu_runs *runs)
{
    free(runs->run);
    memset(runs, 0, sizeof *runs);
}

/* The index of the run that contains a page. */
static size_t
run_index(const struct emu_runs *runs, size_t page)
{
    size_t low = 0, high = runs->count;

    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (runs->run[middle].first <= page) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static bool
reserve_runs(struct emu_runs *runs, size_t more)
{
    struct emu_run *bigger;
    size_t capacity = runs->capacity * 2 + more;

    if (runs->count + more <= runs->capacity) {
        return true;
    }
    bigger = realloc(runs->run, capacity * sizeof *bigger);
    if (bigger == NULL) {
        return false;
    }
    runs->run = bigger;
    runs->capacity = capacity;
    return true;
}

/* Makes a run begin at `page` and returns its index. The array must have space for one more. */
static size_t
split_at(struct emu_runs *runs, size_t page)
{
    size_t i;

    if (page >= runs->pages) {
        return runs->count;
    }
    i = run_index(runs, page);
    if (runs->run[i].first == page) {
        return i;
    }
    memmove(&runs->run[i + 2], &runs->run[i + 1], (runs->count - i - 1) * sizeof *runs->run);
    runs->run[i + 1] = runs->run[i];
    runs->run[i + 1].first = page;
    runs->count++;
    return i + 1;
}

static size_t
run_end(const struct emu_runs *runs, size_t i)
{
    return i + 1 < runs->count ? runs->run[i + 1].first : runs->pages;
}

static bool
same_value(const union emu_value *a, const union emu_value *b)
{
    for (size_t i = 0; i < EMU_VALUE_WORDS; i++) {
        if (a->words[i] != b->words[i]) {
            return false;
        }
    }
    return true;
}

static void
merge_between(struct emu_runs *runs, size_t from, size_t to)
{
    size_t kept = from, last = to < runs->count ? to : runs->count - 1;

    for (size_t i = from + 1; i <= last; i++) {
        if (!same_value(&runs->run[kept].value, &runs->run[i].value)) {
            runs->run[++kept] = runs->run[i];
        }
    }
    if (kept < last) {
        memmove(&runs->run[kept + 1], &runs->run[last + 1],
                (runs->count - last - 1) * sizeof *runs->run);
        runs->count -= last - kept;
    }
}

bool
emu_runs_change(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
                void *argument)
{
    size_t from, to;

    if (first >= end) {
        return true;
    }
    if (!reserve_runs(runs, 2)) {
        return false;
    }
    from = split_at(runs, first);
    to = split_at(runs, end);
    for (size_t i = from; i < to; i++) {
        change(&runs->run[i].value, runs->run[i].first, run_end(runs, i), argument);
    }
    merge_between(runs, from > 0 ? from - 1 : 0, to);
    return true;
}

bool
emu_runs_walk(struct emu_runs *runs, size_t first, size_t end, emu_run_change change,
              void *argument)
{
    size_t last;

    if (first >= end) {
        return true;
    }
    if (!reserve_runs(runs, 2)) {
        return false;
    }
    (void)split_at(runs, first);
    (void)split_at(runs, end);
    for (size_t at = first, i; at < end; at += run_end(runs, i) - runs->run[i].first) {
        i = run_index(runs, at);
        change(&runs->run[i].value, runs->run[i].first, run_end(runs, i), argument);
        merge_between(runs, i > 0 ? i - 1 : 0, i + 1);
        i = run_index(runs, at);
    }
    last = run_index(runs, end); /* the walk can skip the run before `end`: merge there */
    merge_between(runs, last > 0 ? last - 1 : 0, last);
    return true;
}

bool
emu_runs_next(const struct emu_runs *runs, size_t end, struct emu_part *part)
{
    size_t first = part->end, i = run_index(runs, first);

    if (first >= end || first >= runs->pages) {
        return false;
    }
    *part = (struct emu_part){&runs->run[i].value, first, run_end(runs, i)};
    part->end = part->end < end ? part->end : end;
    return true;
}

size_t
emu_runs_length(const struct emu_runs *runs, size_t page)
{
    size_t i = run_index(runs, page);

    return run_end(runs, i) - runs->run[i].first;
}

const union emu_value *
emu_runs_at(const struct emu_runs *runs, size_t page)
{
    return &runs->run[run_index(runs, page)].value;
}
